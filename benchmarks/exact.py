"""What exact mode is worth and what it costs on this GPU, with a real policy: tokens that turn, and time.

    python benchmarks/exact.py POLICY [--shape SHAPE] [--out FILE] [--requests 64] [--alone 8] [--tokens 128]

Two modes, usual and exact. For each
- the same requests in one batch and alone, and with speculation (a drafter that knows most of the answers, chains of
  four) and without: answers that left their course, per token written until then, and log-probabilities that differ;
- milliseconds of a decode step at batch 1, 8 and 64, of a chain's verification, and of a prompt.
And for each layer of the policy: whether tiles of 16, 32 and 64 rows give the same bits, and the time of each with one
row. If all of them do, `EXACT_BLOCKS` in `tlt/kernels/linear/plan.py` may name them, and small batches get faster.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tlt.bench.lab import check_shape, widened
from tlt.bench.record import new_record, write_record
from tlt.config import EngineSettings, ModelSettings
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.kernels.linear.plan import choose_exact
from tlt.kernels.linear.reference import pre_norm
from tlt.kernels.linear.triton import exact_linear, room_for
from tlt.policy import Policy, open_policy
from tlt.replay import common_start
from tlt.spec.costs import TickTimes
from tlt.spec.shape import OFF, Draft, Shape
from tlt.spec.speculation import Speculation
from tlt.tasks.token_prompts import token_prompts
from tlt.types import Completion, Key, SamplingParams

CHAIN = Shape(("recall",), 4, 1, 5)
MISSES = 0.2  # share of the drafter's tokens that are made up
STEPS = {1: 120, 8: 100, 64: 60}  # batch: timed steps
KV_GIB = 8.0
BLOCKS = (16, 32, 64)

Answers = dict[Key, Completion]


class Recall(Speculation):
    """Drafts chains from answers known beforehand, with errors."""

    deepest, widest = CHAIN.depth, CHAIN.verify

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._dice = random.Random(1)
        self.verifies = self.emitted = 0

    def choose(self, running: int) -> Shape:
        return CHAIN if running else OFF

    def propose(self, keys: Sequence[Key], answers: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        return [self._draft(key, len(answer), shape.depth) for key, answer in zip(keys, answers, strict=True)]

    def _draft(self, key: Key, written: int, depth: int) -> Draft:
        known = self._answers[key].tokens[written : written + depth]
        tokens = tuple(token if self._dice.random() >= MISSES else self._dice.randrange(100, 200) for token in known)
        return Draft(tokens, tuple(range(-1, len(tokens) - 1)), (0.5,) * len(tokens))

    def verified(self, shape: Shape, emitted: Sequence[Sequence[int]], times: TickTimes, context: float = 0.0) -> None:
        self.verifies += len(emitted)
        self.emitted += sum(map(len, emitted))


class ExactBench:
    def __init__(self, policy: Policy, arguments: argparse.Namespace) -> None:
        self._policy = policy
        self._arguments = arguments
        prompts = token_prompts(policy.tokenizer, arguments.requests, None, raw=False)
        params = SamplingParams(temperature=1.0, max_tokens=arguments.tokens)
        self._requests = [Request(Key(1, i), prompt, params, str(i)) for i, prompt in enumerate(prompts)]

    # ---- tokens

    def divergence(self, exact: bool) -> dict[str, Any]:
        plain = self._answer(self._requests, exact, len(self._requests))
        few = self._requests[: self._arguments.alone]
        alone = self._answer(few, exact, 1)
        load_prior = Recall(plain)
        speculated = self._answer(self._requests, exact, len(self._requests), load_prior)
        return {
            "alone": compared(plain, alone),
            "speculation": {**compared(plain, speculated), "accept_length": load_prior.emitted / load_prior.verifies},
        }

    def _answer(
        self, requests: Sequence[Request], exact: bool, rows: int, speculation: Recall | None = None
    ) -> Answers:
        engine = self._engine(exact, rows, speculation)
        engine.submit(requests)
        return {completion.key: completion for completion in engine.drain()}

    def _engine(self, exact: bool, rows: int, speculation: Recall | None = None) -> EngineCore:
        torch.cuda.empty_cache()
        settings = EngineSettings(rows=rows, exact=exact, kv_gib=KV_GIB)
        return EngineCore(self._policy.model, self._policy.tokenizer, settings, speculation=speculation)

    # ---- time

    def speed(self, exact: bool) -> dict[str, Any]:
        return {
            "step_ms": {batch: self._steps(exact, batch) for batch in STEPS},  # by batch
            "verify_ms": self._verifications(exact, 8),
            "prompt_tokens": self._prompt_tokens,
            "prompt_ms": self._prompt(exact),
        }

    def _steps(self, exact: bool, batch: int, speculation: Recall | None = None) -> float:
        engine = self._engine(exact, batch, speculation)
        steps = STEPS[batch]
        params = SamplingParams(max_tokens=(steps + 30) * (2 if speculation else 1), ignore_eos=True)
        asked = [replace(self._requests[i % len(self._requests)], key=Key(2, i), params=params) for i in range(batch)]
        engine.submit(asked)
        for _ in range(12):
            engine.tick()
        torch.cuda.synchronize()
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            engine.tick()
            times.append(time.perf_counter() - started)
        return 1e3 * statistics.median(times)

    def _verifications(self, exact: bool, batch: int) -> float:
        """Chains of made-up tokens."""
        filler = tuple([5] * 4096)
        answers = {Key(2, i): _fake(Key(2, i), filler) for i in range(batch)}
        return self._steps(exact, batch, Recall(answers))

    @property
    def _prompt_tokens(self) -> int:
        return min(4096, self._policy.model.config.max_positions - 8)

    def _prompt(self, exact: bool) -> float:
        engine = self._engine(exact, 1)
        times = []
        for turn in range(4):
            prompt = tuple(100 + (7 * i + turn) % 300 for i in range(self._prompt_tokens))
            engine.submit([Request(Key(3, turn), prompt, SamplingParams(max_tokens=1), f"long {turn}")])
            torch.cuda.synchronize()
            started = time.perf_counter()
            engine.drain()
            times.append(time.perf_counter() - started)
        return 1e3 * min(times[1:])

    # ---- tiles

    def tiles(self) -> list[dict[str, Any]]:
        block = self._policy.model.blocks[0]
        weights = {"qkv": block.qkv, "o": block.o, "gate_up": block.gate_up, "down": block.down}
        weights["head"] = self._policy.model.head_weight
        return [_tiles_of(name, weight.detach()) for name, weight in weights.items()]


def _fake(key: Key, tokens: tuple[int, ...]) -> Completion:
    return Completion(key, (), tokens, "", (), (), "length", 0, None)  # type: ignore[arg-type]


def compared(one: Answers, other: Answers) -> dict[str, Any]:
    """Of the answers that both hold: how many left their course, per token written until then."""
    keys = [key for key in other if key in one]
    common = [common_start(one[key].tokens, other[key].tokens) for key in keys]
    turned = sum(one[key].tokens != other[key].tokens for key in keys)
    tokens = sum(common) + turned
    pairs = [
        pair
        for key, same in zip(keys, common, strict=True)
        for pair in zip(one[key].policy_logprobs[:same], other[key].policy_logprobs[:same], strict=True)
    ]
    gaps = [abs(a - b) for a, b in pairs]
    return {
        "answers": len(keys),
        "tokens": tokens,
        "turned": turned,
        "turned_per_token": turned / max(1, tokens),
        "logprobs_that_differ": sum(gap > 0 for gap in gaps) / max(1, len(gaps)),
        "largest_difference": max(gaps, default=0.0),
    }


@torch.no_grad()
def _tiles_of(name: str, weight_NK: torch.Tensor) -> dict[str, Any]:
    """The layer as the policy runs it: its input weighed for a norm, or its output left so, or neither (the head)."""
    gated = name == "gate_up"
    n, k = len(weight_NK) // (2 if gated else 1), weight_NK.shape[1]
    config = choose_exact(1, n, k, gated)
    record: dict[str, Any] = {"layer": name, "n": n, "k": k, "gated": gated, "config": str(config)}
    if not config.swap or config.wide:
        return record | {"same_bits": None}  # its tile is never varied
    x_MK = torch.randn(64, k, device="cuda").to(torch.bfloat16)
    norm_K = torch.rand(k, device="cuda").to(torch.bfloat16)
    norm_N = torch.rand(n, device="cuda").to(torch.bfloat16)

    def compute(rows: int, block: int) -> tuple[torch.Tensor, ...]:
        x = pre_norm(x_MK[:rows], norm_K, 64) if name in ("qkv", "gate_up") else x_MK[:rows]
        out = torch.zeros((rows, n), dtype=torch.float32 if name == "head" else torch.bfloat16, device="cuda")
        leave = room_for(out, norm_N, config.block_n) if name in ("o", "down") else None
        tile = replace(config, block_m=block)
        exact_linear(x, weight_NK, tile, gated=gated, out=out, leave=leave, norm_eps=1e-5, pdl=True)
        return (out,) if leave is None else (out, leave.pre_normed_MD, leave.squares_MP)

    def one_row(block: int) -> Callable[[], object]:
        tile = replace(config, block_m=block)
        return lambda: exact_linear(x_MK[:1], weight_NK, tile, gated=gated, pdl=True)

    outs = [compute(64, block) for block in BLOCKS]
    return record | {
        "same_bits": all(torch.equal(*pair) for out in outs for pair in zip(outs[-1], out, strict=True)),
        "one_row_us": {block: 1e3 * triton.testing.do_bench_cudagraph(one_row(block), rep=10) for block in BLOCKS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy")
    parser.add_argument(
        "--shape", default=None, help="widen the policy to this shape first, as `tlt bench engine` does"
    )
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--alone", type=int, default=8, help="requests that are answered alone, too")
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    check_shape(arguments.shape)
    started = time.perf_counter()
    policy = open_policy(ModelSettings(path=arguments.policy, device="cuda", dtype="bfloat16"))
    bench = ExactBench(replace(policy, model=widened(policy.model, arguments.shape)), arguments)
    sizes = {"requests": arguments.requests, "alone": arguments.alone, "tokens": arguments.tokens}
    results = new_record("cuda", policy=Path(arguments.policy).name, shape=arguments.shape, sizes=sizes)
    for mode, exact in (("usual", False), ("exact", True)):
        results[mode] = {"divergence": bench.divergence(exact), **bench.speed(exact)}
        print(mode, json.dumps(results[mode], indent=2), flush=True)
    results["tiles"] = bench.tiles()
    print(json.dumps(results["tiles"], indent=2))
    results["seconds"] = time.perf_counter() - started
    if arguments.out:
        write_record(arguments.out, results)


if __name__ == "__main__":
    main()
