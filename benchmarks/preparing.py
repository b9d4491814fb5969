"""What speculation is measured with: a tuned policy and a drafter for it, made within a time budget and kept on disk.

Everything of a workload lies in its directory: `policy/` (where it was tuned), `drafter/` as `tlt draft train` saves
it, `drafter-SHAPE/` widened to a larger policy, and `prepare.json`. What is there is not made again.
"""

import json
import os
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import workloads
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BytesTokenizer
from workloads import Workload

from tlt.bench.drafter_widen import widen_drafter
from tlt.config import RunConfig
from tlt.draft import Trained, draft_train
from tlt.errors import ConfigError
from tlt.machine import wait_for
from tlt.model.config import ModelConfig
from tlt.model.transformer import Transformer
from tlt.model.weights import save_policy
from tlt.model.widen import wide_config, widen
from tlt.policy import Policy, open_policy
from tlt.spec.eagle import Eagle
from tlt.spec.eagle_files import Origin, load_drafter, save_drafter
from tlt.spec.record import DraftRecord, read_record
from tlt.train.drafter_measure import DEPTH, WIDTHS
from tlt.train.packing import pack
from tlt.train.supervised import SupervisedTrainer, batches

OWN, DOUBLE = "own", "double"  # shapes: as it is; everything twice as wide, for tests
_TIMED_STEPS = 6
_ROW_TOKENS = 32768  # of one pass: with half of that the host is slower than the device


@dataclass(frozen=True, slots=True)
class PreparedPlace:
    """Where a workload's things are."""

    directory: Path

    @property
    def record(self) -> Path:
        return self.directory / "prepare.json"

    def policy(self) -> str:
        if not self.record.is_file():
            raise ConfigError(f"{self.directory} holds no prepared workload; run `speculation.py prepare` first")
        return str(json.loads(self.record.read_text(encoding="utf-8"))["policy"])

    def drafter(self, shape: str = OWN) -> Path:
        return self.directory / ("drafter" if shape == OWN else f"drafter-{shape}")


# ---- policies in their shapes


def in_shape(policy: Policy, shape: str) -> Policy:
    if shape == OWN:
        return policy
    return replace(policy, model=widen(policy.model, config_in_shape(policy.model.config, shape)))


def config_in_shape(config: ModelConfig, shape: str) -> ModelConfig:
    if shape == OWN:
        return config
    if shape != DOUBLE:
        return wide_config(config, shape)
    names = ("hidden", "mlp", "heads", "kv_heads")
    size = {name: 2 * getattr(config, name) for name in names}
    return config.reshaped(**size, layers=config.layers + 1, norm_eps=config.norm_eps / 2)


def ready_drafter(place: PreparedPlace, small: Transformer, policy: Policy, shape: str) -> Path:
    """The directory of the trained drafter in the policy's shape; `small` is the policy it was trained for. Widened, it
    names what it named: what was measured of it holds."""
    target = place.drafter(shape)
    if not (target / "config.json").is_file():
        drafter = load_drafter(
            place.drafter(),
            small.config,
            window=RunConfig().draft.window,
            dtype=small.embed.dtype,
            device=small.embed.device,
        )
        mlp = drafter.config.layer.mlp / small.config.mlp
        wide = widen_drafter(drafter, policy.model.config, mlp=mlp)
        _save(wide, target, policy, read_record(place.drafter()))
    return target


def _save(drafter: Eagle, target: Path, policy: Policy, record: DraftRecord | None) -> None:
    architectures = tuple(policy.model.config.source.get("architectures") or ())
    save_drafter(drafter, target, policy.model.head_weight, Origin(str(policy.source), architectures), record=record)


# ---- preparing


@dataclass(frozen=True, slots=True)
class Wanted:
    workload: Workload
    place: PreparedPlace
    data: Path | None  # JSONL to tune on and to draft from
    prompts: Path | None  # JSONL of the measured prompts, which are left out
    measured: int  # how many of them
    tune_budget_s: float
    draft_budget_s: float
    processes: int  # that encode examples


def prepare(config: RunConfig, wanted: Wanted) -> dict[str, Any]:
    """Tunes the policy and trains its drafter, where they are not there yet. What was done, and how long it took."""
    place = wanted.place
    place.directory.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"policy": config.model.path}
    if wanted.workload.tune:
        record["policy"] = str(place.directory / "policy")
        if not (place.directory / "policy" / "config.json").is_file():
            record["tuning"] = tune(config, wanted)
    config = replace(config, model=replace(config.model, path=record["policy"]))
    if not (place.drafter() / "config.json").is_file():
        record["drafting"] = train_drafter(config, wanted)
    kept = json.loads(place.record.read_text(encoding="utf-8")) if place.record.is_file() else {}
    place.record.write_text(json.dumps({**kept, **record}, indent=1) + "\n", encoding="utf-8")
    return record


def tune(config: RunConfig, wanted: Wanted) -> dict[str, Any]:
    """Supervised tuning with the trainer of `tlt warmup`; fewer steps where the machine is too slow for all."""
    settings = wanted.workload.tune
    assert settings is not None
    policy = open_policy(config.model)
    model = policy.model
    row_tokens = min(settings.tokens_per_batch, _ROW_TOKENS)
    longest = min(row_tokens, model.config.max_positions)
    examples = workloads.tuning_examples(wanted.workload, policy.source, wanted.data, longest, wanted.processes)
    stream = batches(examples, settings.tokens_per_batch)
    rows = (pack(batch, row_tokens) for batch in stream)
    trial = SupervisedTrainer(deepcopy(model), settings)
    steps = trial.steps(islice(rows, 1 + _TIMED_STEPS))
    step_s = timed([partial(next, steps)] * (1 + _TIMED_STEPS), model.embed.device)
    del trial, steps
    settings = replace(settings, steps=max(1, min(settings.steps, int(wanted.tune_budget_s / step_s))))
    trainer = SupervisedTrainer(model, settings)
    started, tokens, losses = time.perf_counter(), 0, []
    for result in trainer.steps(islice(rows, settings.steps)):
        tokens += result.tokens
        losses.append(result.loss)
        if trainer.steps_taken % 50 == 0:
            pace = tokens / (time.perf_counter() - started)
            print(f"tuning: step {trainer.steps_taken}/{settings.steps} loss {result.loss:.4f} {pace:,.0f} tokens/s")
    examples.close()  # ends the encoding processes
    seconds = time.perf_counter() - started
    save_policy(model, wanted.place.directory / "policy", tokenizer_from=policy.source)
    last = losses[-20:]
    return {
        "settings": asdict(settings),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "loss_nats": sum(last) / len(last),
    }


def train_drafter(config: RunConfig, wanted: Wanted) -> dict[str, Any]:
    """`tlt draft train`, within the budget."""
    policy = open_policy(config.model)
    workload = wanted.workload
    config = workloads.drafting_config(workload, config, policy.model.config.vocab)
    config = replace(config, sampling=replace(config.sampling, temperature=1.0, max_tokens=workload.cap))
    measured = workloads.measured_prompts(workload, wanted.prompts, wanted.measured)
    prompts = workloads.drafting(workload, config, wanted.data or wanted.prompts, measured, wanted.place.directory)
    config = replace(config, draft=replace(config.draft, seconds=wanted.draft_budget_s))
    started = time.perf_counter()
    trained = draft_train(config, prompts, str(wanted.place.drafter()), policy)
    return {
        "settings": asdict(config.draft),
        "steps": trained.steps,
        "seconds": time.perf_counter() - started,
        "prompts": prompts,
        "measured": measured_of(trained),
    }


def measured_of(trained: Trained) -> dict[str, Any]:
    """The table that `tlt draft train` prints: what was reached on the answers held out, before and after."""
    moments = {"before": trained.before, "after": trained.after}
    return {
        "draft_tokens": DEPTH,
        "widths": list(WIDTHS),  # of the trees that the accept lengths are of
        "places": trained.after.tokens,
        "beta": {when: str(found.beta) for when, found in moments.items()},  # as fitted; inf: without noise
        **{
            way: {when: asdict(getattr(found, name)) for when, found in moments.items()}
            for way, name in (("greedy", "greedy"), ("β = 1", "shared"), ("β fitted", "fitted"))
        },
    }


def timed(calls: list[Callable[[], Any]], device: torch.device) -> float:
    """Seconds of a call; the first is not counted."""
    calls[0]()
    wait_for(device)
    started = time.perf_counter()
    for call in calls[1:]:
        call()
    wait_for(device)
    return (time.perf_counter() - started) / (len(calls) - 1)


def encoding_processes() -> int:
    return max(1, min(8, (os.cpu_count() or 1) - 2))


# ---- a stand-in where there is no policy at hand


_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
_SIZE = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}


def stand_in(directory: Path) -> str:
    """A small random policy that reads and writes bytes and knows a chat: for trying the benchmark out, no more."""
    if (directory / "config.json").is_file():
        return str(directory)
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate((*_SPECIAL, *alphabet))}
    tokenizer = BytesTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _SPECIAL[0],
        "pad_token": _SPECIAL[0],
        "chat_template": _TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    source = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(vocabulary),
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        **_SIZE,
    }
    model = Transformer(ModelConfig.from_hf(source))
    model.init_weights(0)
    with torch.no_grad():
        for block in model.blocks:  # opinions: otherwise answers are noise that nobody could draft
            for matrix in (block.qkv, block.o, block.gate_up, block.down):
                matrix.mul_(8.0)
        assert model.head is not None
        model.head.mul_(30.0)
    save_policy(model, directory)
    return str(directory)
