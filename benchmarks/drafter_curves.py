"""How fast a drafter learns from a policy's own completions: what it reaches over tokens and seconds, by variant.

    python benchmarks/drafter_curves.py RECIPE [--SECTION.KNOB VALUE …] [--completions 1024] [--held 64] [--passes 4]
        [--variants default,norm=ones,lr=3,…] [--budget S] [--keep FILE] [--out FILE]

The recipe's task is decoded plainly once (`--keep`: and kept in a file, which is read if it exists); completions of
held-out prompts are measured on, the others are learned from, pass after pass, each variant from the same new drafter
and in the same order. A variant is settings joined by "+":

    norm=ones        the last norm starts from ones, not from the policy's
    fc=tap           the state starts as the last tapped layer's, not as a random mix of the three
    layer=policy     attention and MLP start from the policy's last layer
    lr=X             X times draft.learning_rate
    tokens=N         tokens of a micro-step (default drafting.tokens)
    unroll=N         draft steps unrolled from the first micro-step on
    single=N         draft.single_steps
    tv=X             draft.total_variation
    norms=WHERE      none: eagle-3; fc: of the tapped states; output: of the drafter's own states; both: eagle-3.1
    block=R          a block drafter: all draft steps in one pass, and a bigram of rank R over the drafted tokens
    muon             Muon for matrices, AdamW for the rest

`accept_length` is measured on the held-out completions, as chains of five would reach it. Seconds
are those of micro-steps alone: in a run the policy's update computes the hidden states. Results are printed and, with
--out or in the directory $OUT, written as JSON.
"""

import argparse
import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from tlt.bench.record import new_record, write_record
from tlt.config import RunConfig
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.loop import ask
from tlt.machine import free_memory, wait_for
from tlt.model.device import upload
from tlt.model.transformer import Block, Transformer
from tlt.policy import Policy, open_policy
from tlt.recipe import load_config
from tlt.spec.align import Aligned
from tlt.spec.eagle import Eagle, EagleConfig, draft_vocabulary
from tlt.spec.eagle_files import drafter_shape
from tlt.spec.window import Band
from tlt.tasks.choose import task_of
from tlt.train.drafter import DrafterBatch, DrafterTrainer, policy_states
from tlt.train.drafter_measure import expected
from tlt.train.optimizer import MasterAdamW
from tlt.train.packing import Example, pack
from tlt.types import Completion

CHECKS = 4  # measurements in a pass


class Muon(MasterAdamW):
    """Matrices by torch's Muon, the rest by AdamW, both at AdamW's learning rate."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, weight_decay=0.0)
        matrices = [master for master in self._masters if master.dim() == 2]
        self._muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        self._adam = torch.optim.AdamW([m for m in self._masters if m.dim() < 2], lr=0.0, weight_decay=0.0)

    def step(self, rate: float, clip: float, norm: Tensor, unless: Tensor | None = None) -> None:
        torch.nn.utils.clip_grads_with_norm_(self._masters, clip, norm)
        for optimizer in (self._muon, self._adam):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.forget()
        self._write_back()


class BlockDrafter(Eagle):
    """Drafts all steps in one pass, as DFlash and DSpark do: steps after the first read a learned state and no token.

    A drafted token reaches the next prediction only through a low-rank bigram in front of the head.
    """

    def __init__(self, config: EagleConfig, rank: int, **where: Any) -> None:
        super().__init__(config, **where)
        hidden = config.layer.hidden
        sizes = {"masked_state": (hidden,), "masked_token": (hidden,), "narrow": (rank, hidden), "wide": (hidden, rank)}
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Parameter(self.fc.new_empty(size)))

    def unroll(self, aligned: Aligned, features_TF: Tensor, embed_VD: Tensor, steps: int) -> list[Tensor]:
        index_T, next_T = (upload(part, features_TF.device) for part in (aligned.index_T, aligned.next_T))
        band = Band.of(aligned.index_T, self.config.window, features_TF.device)
        tokens_STD = self._normed_tokens(torch.stack([next_T.roll(-step) for step in range(steps)]), embed_VD)
        state_TD, token_TD = self.fuse(features_TF), tokens_STD[0]
        chain, out = list[tuple[Tensor, Tensor]](), list[Tensor]()
        keys = values = None
        for step in range(steps):
            q, k, v = self._project(token_TD, state_TD, index_T + step)
            if step == 0:
                keys, values = band.windows(k), band.windows(v)
            else:
                chain.append((k, v))
            g_TD = self._finish(band.attend(q, keys, values, step, chain).flatten(1), state_TD)
            bigram_TD = tokens_STD[step] @ self.narrow.T @ self.wide.T
            out.append(g_TD + bigram_TD if step else g_TD)
            state_TD, token_TD = self.masked_state.expand_as(state_TD), self.masked_token.expand_as(token_TD)
        return out


def completions_of(config: RunConfig, policy: Policy, count: int) -> list[Completion]:
    """Those of the task's first prompts, in order, without those of one token."""
    engine = EngineCore(policy.model, policy.tokenizer, config.engine)
    engine.compile()
    task, requests, step = task_of(config), list[Request](), 0
    while len(requests) < count:
        requests += [request for one in ask(step, config, task, policy.tokenizer) for request in one.requests]
        step += 1
    engine.submit(requests[:count])
    started = time.perf_counter()
    by_key = {completion.key: completion for completion in engine.drain()}
    done = [by_key[request.key] for request in requests[:count] if len(by_key[request.key].tokens) > 1]
    tokens = sum(len(completion.tokens) for completion in done)
    seconds = time.perf_counter() - started
    print(f"{len(done)} completions, {tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s")
    return done


def kept_completions(file: Path | None, made: Callable[[], list[Completion]]) -> list[Completion]:
    """Those in the file if it exists, otherwise new ones, which are written to it."""
    if file is not None and file.exists():
        kept: list[Completion] = pickle.loads(file.read_bytes())
        return kept
    done = made()
    if file is not None:
        file.write_bytes(pickle.dumps(done))
    return done


class Batches:
    """Completions with the policy's states, in batches of about so many tokens. Kept: every variant reads them."""

    def __init__(self, policy: Transformer, taps: Sequence[int], learned: Sequence[Completion]) -> None:
        self._policy, self._taps, self._learned = policy, taps, learned
        self._of: dict[int, list[DrafterBatch]] = {}

    def of(self, tokens: int) -> list[DrafterBatch]:
        if tokens not in self._of:
            self._of.clear()  # one size fits in memory, several may not
            order = random.Random(tokens).sample(self._learned, len(self._learned))
            self._of[tokens] = [*batches_of(self._policy, order, self._taps, tokens)]
        return self._of[tokens]


def batches_of(
    policy: Transformer, done: Sequence[Completion], taps: Sequence[int], tokens: int
) -> Iterator[DrafterBatch]:
    group: list[Example] = []
    for completion in done:
        whole = (*completion.prompt_tokens, *completion.tokens)
        group.append(Example(whole, len(completion.prompt_tokens)))
        if sum(len(example.tokens) for example in group) >= tokens:
            yield from _states(policy, group, taps)
            group = []
    if group:
        yield from _states(policy, group, taps)


def _states(policy: Transformer, group: Sequence[Example], taps: Sequence[int]) -> Iterator[DrafterBatch]:
    for row in pack(group, sum(len(example.tokens) for example in group)):
        yield policy_states(policy, row, taps)


def new_drafter_of(config: RunConfig, policy: Policy, words: dict[str, str], done: Sequence[Completion]) -> Eagle:
    model = policy.model
    written = torch.tensor([token for completion in done for token in completion.tokens])
    counts_V = torch.bincount(written, minlength=model.config.vocab)
    size = drafter_shape(model.config, config.draft)
    if norms := words.get("norms"):
        size = replace(size, fc_norm=norms in ("fc", "both"), norm_output=norms in ("output", "both"))
    ids = draft_vocabulary(counts_V, size.draft_vocab).to(model.embed.device) if size.reduced else None
    where: Any = {"dtype": model.embed.dtype, "device": model.embed.device}
    drafter = BlockDrafter(size, int(words["block"]), **where) if "block" in words else Eagle(size, **where)
    drafter.init_weights(config.run.seed, ids, model.norm)
    if words.get("norm") == "ones":
        torch.nn.init.ones_(drafter.norm)
    if words.get("fc") == "tap":
        hidden = size.layer.hidden
        with torch.no_grad():
            drafter.fc.zero_()[:, -hidden:].fill_diagonal_(1.0)
    if words.get("layer") == "policy":
        _copy_layer(drafter, model)
    return drafter


@torch.no_grad()
def _copy_layer(drafter: Eagle, policy: Transformer) -> None:
    """The policy's last layer reads the state where the drafter reads its own; of its MLP the largest neurons stay."""
    block = policy.blocks[-1]
    assert isinstance(block, Block)
    gate, up = block.gate_up.chunk(2)
    kept = (up.norm(dim=1) * block.down.norm(dim=0)).topk(drafter.config.layer.mlp).indices
    drafter.gate_up.copy_(torch.cat((gate[kept], up[kept])))
    drafter.down.copy_(block.down[:, kept])
    drafter.o.copy_(block.o)
    drafter.qkv[:, drafter.config.layer.hidden :].copy_(block.qkv)
    drafter.mlp_norm.copy_(block.mlp_norm)
    drafter.feature_norm.copy_(block.attn_norm)


def curve(
    config: RunConfig,
    policy: Policy,
    name: str,
    learned: Sequence[Completion],
    held: Sequence[DrafterBatch],
    batches: Batches,
    given: Any,
) -> dict[str, Any]:
    words = dict(part.partition("=")[::2] for part in name.split("+"))
    unroll = int(words.get("unroll", 1))
    settings = replace(
        config.draft,
        unroll=config.draft.unroll if unroll == 1 else unroll,
        single_steps=0 if unroll > 1 else int(words.get("single", config.draft.single_steps)),
        learning_rate=config.draft.learning_rate * float(words.get("lr", 1)),
        total_variation=float(words.get("tv", config.draft.total_variation)),
    )
    drafter, model = new_drafter_of(config, policy, words, learned), policy.model
    trainer = DrafterTrainer(drafter, model.head_weight, model.embed, settings, endless=True)
    if "muon" in words:
        trainer._optimizer = Muon(drafter)
    seconds, tokens, points = 0.0, 0, list[list[float]]()

    def measure() -> None:
        begun = time.perf_counter()
        found = expected(drafter, held, model.head_weight, model.embed, config.draft)
        took_s = time.perf_counter() - begun
        points.append([tokens, seconds, trainer.steps_taken, found.accept_length, found.loss, took_s])

    measure()
    order = batches.of(int(words.get("tokens", config.drafting.tokens)))
    for number in range(given.passes):
        order = random.Random(number).sample(order, len(order))
        every = max(1, len(order) // CHECKS)
        for place, batch in enumerate(order, start=1):
            wait_for(model.embed.device)
            begun = time.perf_counter()
            tokens += trainer.micro_step(batch).tokens
            seconds += time.perf_counter() - begun
            if place % every == 0:
                measure()
        if time.perf_counter() > given.ends_s:
            break
    line = "  ".join(f"{round(t / 1000)}k {a:.2f}" for t, _, _, a, _, _ in points)
    per_s = points[-1][0] / max(1e-9, points[-1][1])
    print(f"{name:24} {points[-1][1]:5.1f} s, {per_s:,.0f} tokens/s | {line}", flush=True)
    return {"variant": name, "points": points, "columns": "tokens seconds micro_steps accept_length loss measuring_s"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("--completions", type=int, default=1024)
    parser.add_argument("--held", type=int, default=64)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--variants", default="default,norm=ones")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds, after which no further pass begins")
    parser.add_argument("--keep", type=Path, default=None, help="file of the completions")
    parser.add_argument("--out", type=Path, default=None)
    given, flags = parser.parse_known_args()
    given.ends_s = time.perf_counter() + given.budget if given.budget else float("inf")
    config = load_config(given.recipe, flags)
    policy = open_policy(config.model)
    done = kept_completions(given.keep, lambda: completions_of(config, policy, given.completions))[: given.completions]
    free_memory()  # of the engine
    held, learned = done[: given.held], done[given.held :]
    lengths = sorted(len(completion.tokens) for completion in done)
    places = {"p50": len(done) // 2, "p90": len(done) * 9 // 10, "p99": len(done) * 99 // 100, "max": len(done) - 1}
    told = {name: lengths[place] for name, place in places.items()}
    print(f"{sum(lengths[given.held :]):,} tokens or so to learn from, lengths {told}")
    taps = drafter_shape(policy.model.config, config.draft).taps
    batches, measured = Batches(policy.model, taps, learned), [*batches_of(policy.model, held, taps, 8192)]
    record = new_record(policy.model.embed.device, recipe=given.recipe, flags=flags, lengths=lengths, curves=[])
    out = given.out or (Path(os.environ["OUT"]) / "drafter_curves.json" if "OUT" in os.environ else None)
    for name in given.variants.split(","):
        if time.perf_counter() > given.ends_s:
            break
        record["curves"].append(curve(config, policy, name, learned, measured, batches, given))
        if out:
            write_record(out, record)


if __name__ == "__main__":
    main()
