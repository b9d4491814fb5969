"""Generation by transformers with the same weights, prompts and length cap, in the same process.

The transformers model shares our tensors: nothing is copied. A peer that cannot run, or exceeds its time budget, has a
note in its record, and the others continue.
"""
# B prompts, T tokens

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tlt.bench.lab import Lab
from tlt.machine import wait_for
from tlt.model.transformer import Transformer
from tlt.model.weights import places

_BLOCK = 256  # tokens in a block of transformers' paged cache, by default
_WARM_TOKENS = 8  # enough to compile and to record graphs
# What foreign code is known to raise where it does not support a model, a device or a version.
_UNABLE = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, OSError, KeyError, AssertionError)


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    prompts: int
    tokens_per_s: float | None
    makespan_s: float | None
    warm_up_s: float | None  # compilation and graphs, before the measured run
    tokens: int | None
    median: int | None
    longest: int | None
    cap: int
    temperature: float
    ours_tokens_per_s: float
    times_peer: float | None  # ours over theirs
    note: str = ""  # why there is no figure, or a condition of it


@dataclass(frozen=True, slots=True)
class PeerAnswers:
    """A peer's completions."""

    lengths: list[int]
    seconds: float
    warm_up_s: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Job:
    """One workload in the form that transformers expects."""

    model: Any
    prompts: Sequence[tuple[int, ...]]
    cap: int
    temperature: float
    eos_ids: list[int]
    device: torch.device
    budget_s: float


def peers(lab: Lab) -> Iterator[Peer]:
    count = lab.scale.peer_prompts
    ours = lab.natural_once(count, lab.scale.cap)
    lab.release()
    rate = ours.tokens / ours.seconds
    job = _Job(
        model=transformers_model(lab.model),
        prompts=lab.prompts[:count],
        cap=lab.scale.cap,
        temperature=lab.temperature,
        eos_ids=sorted(lab.tokenizer.eos_ids),
        device=lab.device,
        budget_s=lab.scale.budget_s,
    )
    best: Peer | None = None
    for name, run in _peers(lab.on_gpu):
        peer = _measure(name, run, job, rate)
        best = max(best or peer, peer, key=lambda measured: measured.tokens_per_s or 0.0)
        yield peer
        lab.release()
    if best and best.tokens_per_s:
        yield replace(best, name="the best of these", note=best.name)


def _peers(on_gpu: bool) -> Iterator[tuple[str, Callable[[_Job], PeerAnswers]]]:
    yield "transformers generate, dynamic cache", partial(generate, cache=None, compiled=False)
    if on_gpu:
        yield "transformers generate, static cache, compiled", partial(generate, cache="static", compiled=True)
    yield "transformers continuous batching", continuous
    yield "transformers generate, static cache", partial(generate, cache="static", compiled=False)


def _measure(name: str, run: Callable[[_Job], PeerAnswers], job: _Job, ours: float) -> Peer:
    try:
        completions = run(job)
    except _UNABLE as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        return _peer(name, job, ours, None, f"not available: {type(error).__name__}: {reason}")
    if not completions.lengths:
        return _peer(name, job, ours, None, completions.note or "not available: no answers came back")
    return _peer(name, job, ours, completions, completions.note)


def _peer(name: str, job: _Job, ours: float, completions: PeerAnswers | None, note: str) -> Peer:
    tokens = sum(completions.lengths) if completions else None
    rate = tokens / completions.seconds if completions and tokens else None
    return Peer(
        name=name,
        prompts=len(job.prompts),
        tokens_per_s=rate,
        makespan_s=completions.seconds if completions else None,
        warm_up_s=completions.warm_up_s if completions else None,
        tokens=tokens,
        median=sorted(completions.lengths)[len(completions.lengths) // 2] if completions else None,
        longest=max(completions.lengths) if completions else None,
        cap=job.cap,
        temperature=job.temperature,
        ours_tokens_per_s=ours,
        times_peer=ours / rate if rate else None,
        note=note,
    )


# ---- their model


def transformers_model(model: Transformer) -> Any:
    """The transformers model of the same config, sharing our tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**dict(model.config.source))
    with torch.device(model.embed.device):
        theirs = AutoModelForCausalLM.from_config(
            config, dtype=model.embed.dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    ours = dict(model.named_parameters())
    wanted = places(model.config)
    for name, parameter in theirs.named_parameters():
        parameter.data = wanted[name].of(ours).detach()
    theirs.requires_grad_(False)
    return theirs.eval()


def _generation_config(job: _Job) -> Any:
    """Plain sampling: by default transformers would sample from the 50 most probable tokens."""
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=job.cap,
        do_sample=job.temperature > 0,
        temperature=job.temperature or 1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=job.eos_ids,
        pad_token_id=job.eos_ids[0],
    )


# ---- generate: one padded batch until the last answer ends


def generate(job: _Job, *, cache: str | None, compiled: bool) -> PeerAnswers:
    ids_BT, mask_BT = _padded(job)
    config = _generation_config(job)
    config.cache_implementation = cache
    config.disable_compile = not compiled

    def run(tokens: int) -> tuple[Tensor, float]:
        wait_for(job.device)
        started = time.perf_counter()
        stop = _stop_after(ids_BT.shape[1] + tokens, started + job.budget_s)
        out = job.model.generate(ids_BT, attention_mask=mask_BT, generation_config=config, stopping_criteria=stop)
        wait_for(job.device)
        return out[:, ids_BT.shape[1] :], time.perf_counter() - started

    _, warm_up_s = run(_WARM_TOKENS)
    if warm_up_s > job.budget_s:
        return PeerAnswers([], 0.0, warm_up_s, f"not available: warming up took {warm_up_s:.0f} s")
    written_BT, seconds = run(job.cap)
    lengths, unfinished = _lengths(written_BT, job)
    late = seconds > job.budget_s and unfinished
    note = f"stopped after {seconds:.0f} s with {unfinished} answers unfinished" if late else ""
    return PeerAnswers(lengths, seconds, warm_up_s, note)


def _padded(job: _Job) -> tuple[Tensor, Tensor]:
    """Prompts in one rectangle, padded on the left."""
    width = max(len(prompt) for prompt in job.prompts)
    rows = [[job.eos_ids[0]] * (width - len(prompt)) + list(prompt) for prompt in job.prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in job.prompts]
    return torch.tensor(rows, device=job.device), torch.tensor(mask, device=job.device)


def _stop_after(width: int, deadline: float) -> list[Callable[..., Tensor]]:
    def stop(ids_BT: Tensor, scores: Any, **_: Any) -> Tensor:
        over = ids_BT.shape[1] >= width or time.perf_counter() > deadline
        return torch.full((len(ids_BT),), over, device=ids_BT.device)

    from transformers import StoppingCriteriaList

    criteria: list[Callable[..., Tensor]] = StoppingCriteriaList([stop])
    return criteria


def _lengths(written_BT: Tensor, job: _Job) -> tuple[list[int], int]:
    """Tokens of each completion, the end token included, and the number of incomplete ones."""
    ends_BT = torch.isin(written_BT, torch.tensor(job.eos_ids, device=written_BT.device))
    first_B = ends_BT.int().argmax(1) + 1
    length_B = torch.where(ends_BT.any(1), first_B, written_BT.shape[1])
    unfinished = int((~ends_BT.any(1)).sum()) if written_BT.shape[1] < job.cap else 0
    return length_B.tolist(), unfinished


# ---- continuous batching


def continuous(job: _Job) -> PeerAnswers:
    """The paged engine of transformers, which returns completions one by one."""
    started = time.perf_counter()
    settings = {"generation_config": _generation_config(job), "continuous_batching_config": _paging(job)}
    with job.model.continuous_batching_context_manager(**settings, block=True, timeout=5) as manager:
        warm = _collect(manager, job, _WARM_TOKENS)
        wait_for(job.device)
        warm_up_s = time.perf_counter() - started
        if len(warm) < len(job.prompts):
            return PeerAnswers([], 0.0, warm_up_s, f"not available: warming up took {warm_up_s:.0f} s")
        measured = time.perf_counter()
        lengths = _collect(manager, job, job.cap)
        seconds = time.perf_counter() - measured
    missing = len(job.prompts) - len(lengths)
    return PeerAnswers(lengths, seconds, warm_up_s, f"stopped with {missing} answers unfinished" if missing else "")


def _paging(job: _Job) -> Any:
    """Room for all prompts at once instead of all free memory; no kernels from a hub."""
    from transformers import ContinuousBatchingConfig

    longest = max(len(prompt) for prompt in job.prompts) + job.cap
    blocks = len(job.prompts) * (longest // _BLOCK + 2)
    tokens = _BLOCK if job.device.type == "cpu" else 8 * _BLOCK
    local = {"auto_switch_to_flash": False} if hasattr(ContinuousBatchingConfig, "auto_switch_to_flash") else {}
    return ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=tokens, **local)


def _collect(manager: Any, job: _Job, tokens: int) -> list[int]:
    deadline = time.perf_counter() + job.budget_s
    manager.add_requests(inputs=[list(prompt) for prompt in job.prompts], max_new_tokens=tokens)
    lengths: list[int] = []
    while len(lengths) < len(job.prompts) and time.perf_counter() < deadline and manager.is_running():
        result = manager.get_result(timeout=0.1)
        if result is None or not result.is_finished():
            continue
        if result.error is not None:
            raise RuntimeError(f"a request failed: {result.error}")
        lengths.append(len(result.generated_tokens))
    return lengths
