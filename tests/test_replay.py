"""Replays: differing tokens are counted once, beside those of plain decoding; the verdict follows from both."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import tlt
from tests.training import small
from tlt.config import RunConfig
from tlt.engine.request import Request
from tlt.replay import Difference, common_start, replayed
from tlt.types import Completion, Key, SamplingParams, Timing
from tlt.watch.events import ReplayCompared
from tlt.watch.history import events_of
from tlt.watch.verdict import Replayed, in_1000, in_short, verdict_in_words

LENGTH = 600


def request(number: int) -> Request:
    return Request(Key(0, number), (5,), SamplingParams(max_tokens=LENGTH))


class Rounding:
    """Decodes as a half-precision engine might: with fewer requests at once, every third completion differs."""

    def __init__(self, at: int = 100) -> None:
        self.at, self.asked = at, list[list[Request]]()

    def __call__(self, requests: Sequence[Request]) -> tuple[list[Completion], float]:
        self.asked.append(list(requests))
        return [self._completion(one, len(requests)) for one in reversed(requests)], 2.0

    def _completion(self, one: Request, at_once: int) -> Completion:
        tokens = [7] * one.params.max_tokens
        if at_once < 64 and one.key.request % 3 == 0 and self.at < len(tokens):
            tokens[self.at :] = [8] * (len(tokens) - self.at)
        logprobs = (-0.5,) * len(tokens)
        return Completion(one.key, (5,), tuple(tokens), "", logprobs, logprobs, "length", 0, Timing(0.0, 0.0))


def compared(answers: Sequence[Completion], decode: Rounding, config: RunConfig) -> ReplayCompared:
    return replayed(3, config, [request(number) for number in range(64)], answers, 1.5, decode)


def written(turned: int) -> list[Completion]:
    """64 completions, the first few with another token at position 9."""
    answers, _ = Rounding()([request(number) for number in range(64)])
    other = (*[7] * 9, *[6] * 11)
    return [replace(one, tokens=other) if one.key.request < turned else one for one in answers]


def test_an_answer_counts_up_to_its_first_difference() -> None:
    pairs = [((1, 2, 3), (1, 2, 3)), ((1, 2, 3, 4), (1, 9, 3, 5)), ((1, 2), (1, 2, 4))]
    assert Difference.of(pairs) == Difference(tokens=3 + 2 + 3, differing=2)
    assert common_start([1, 2, 3], [1, 2, 4]) == common_start([1, 2], [1, 2, 4]) == 2


def test_the_same_tokens_need_no_sample(tmp_path: Path) -> None:
    decode = Rounding()
    event = compared(written(0), decode, small(tmp_path, "--engine.rows=64", "--model.dtype=float32"))
    assert len(decode.asked) == 1
    assert (event.identical, event.compared, event.differing, event.sample_s) == (True, 64 * LENGTH, 0, 0.0)
    assert (event.tlt_s, event.plain_s, event.tokens, event.plain_tokens) == (1.5, 2.0, 64 * LENGTH, 64 * LENGTH)


def test_other_tokens_are_set_beside_those_of_a_smaller_batch(tmp_path: Path) -> None:
    decode = Rounding()
    event = compared(written(4), decode, small(tmp_path, "--engine.rows=64", "--model.dtype=float32"))
    _, sample = decode.asked
    assert [one.key.request for one in sample] == list(range(0, 64, 4))  # evenly chosen, a quarter of 64
    assert {one.params.max_tokens for one in sample} == {512}
    assert (event.identical, event.compared, event.differing) == (False, 60 * LENGTH + 4 * 10, 4)
    assert (event.at_once, event.sample_at_once) == (64, 16)
    turned = sum(number % 3 == 0 for number in range(0, 64, 4))
    assert (event.sample_compared, event.sample_differing) == ((16 - turned) * 512 + turned * 101, turned)
    assert event.sample_s > 0


@pytest.mark.parametrize(
    ("flags", "at_once"),
    [(["--engine.rows=64"], 16), (["--engine.rows=8"], 2), (["--engine.rows=3"], 2), (["--engine.rows=1"], 0)],
)
def test_fewer_run_at_once_than_did(tmp_path: Path, flags: list[str], at_once: int) -> None:
    decode = Rounding()
    event = compared(written(4), decode, small(tmp_path, *flags))
    assert event.sample_at_once == at_once
    assert [len(asked) for asked in decode.asked[1:]] == ([at_once] if at_once else [])


# ---- the verdict


ROUNDED = ReplayCompared(
    *(3, 20000, 9.0, 8.1, False),
    compared=19400,
    differing=37,
    at_once=64,
    sample_at_once=16,
    sample_compared=3300,
    sample_differing=6,
    sample_s=1.2,
)


def test_rounding_is_told_calmly_with_both_rates() -> None:
    replay = Replayed.of([ROUNDED])
    assert replay.verdict == "rounding"
    assert verdict_in_words(replay) == (
        "Tokens: 1.9 in 1,000 differ from plain decoding (37 of 19,400 compared). In plain decoding itself 1.8 in "
        "1,000 (6 of 3,300) differ when 16 requests run at once instead of 64: this is rounding. (That took 1.2 s to "
        "measure, outside the steps.)"
    )
    assert in_short(replay) == "1.9 in 1,000 tokens differ by rounding"


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({"differing": 400}, "more", "rounding alone does NOT explain the difference"),
        ({"sample_differing": 0, "sample_compared": 300}, "few", "none of 300 differ when 16 requests"),
        ({"sample_differing": 0, "sample_compared": 9900}, "more", "(0 of 9,900)"),
        ({"sample_compared": 0, "sample_differing": 0}, "few", "no smaller batch"),
        ({"exact": True}, "fault", "37 completions differ, and in exact mode or float64 nothing may"),
        ({"compared": 0, "differing": 0}, "uncounted", "not on record"),
        ({"identical": True, "differing": 0}, "identical", "Tokens identical: yes."),
    ],
)
def test_verdicts(changes: dict[str, int], verdict: str, words: str) -> None:
    replay = Replayed.of([replace(ROUNDED, **changes)])  # type: ignore[arg-type]
    assert replay.verdict == verdict
    assert words in verdict_in_words(replay)
    assert in_short(replay).startswith("the same tokens") == (verdict == "identical")


def test_replays_are_pooled() -> None:
    same = ReplayCompared(10, 19400, 1.0, 2.0, True, compared=19400, at_once=64)
    replay = Replayed.of([ROUNDED, same])
    assert (replay.compared, replay.differing, replay.sample_compared) == (38800, 37, 3300)
    assert (replay.count, replay.identical, replay.verdict) == (2, False, "rounding")
    assert Replayed.of([same]).verdict == "identical"


def test_rates_are_read_at_a_glance() -> None:
    assert [in_1000(n, 10000) for n in (0, 1, 19, 150, 2000)] == [
        "0 in 1,000",
        "0.1 in 1,000",
        "1.9 in 1,000",
        "15 in 1,000",
        "200 in 1,000",
    ]


# ---- for real


HALF = ["--model.dtype=bfloat16", "--task.prompts=8", "--task.group=4", "--engine.rows=32", "--run.steps=1"]
DRAFTED = ["--spec.drafter=suffix", "--spec.chooser=fixed", "--run.replay_every=1", "--sampling.temperature=1.5"]
PROBE = "import torch; a = torch.ones(8, 8).bfloat16(); torch.nn.functional.linear(a, a) @ a"


def half_runs() -> bool:
    """Some processors cannot multiply in bfloat16 and kill the process that tries."""
    return subprocess.run([sys.executable, "-c", PROBE], check=False, capture_output=True).returncode == 0


@pytest.mark.slow
def test_in_half_precision_what_differs_is_counted(tmp_path: Path) -> None:
    if not half_runs():
        pytest.skip("this processor does not multiply in bfloat16")
    [event] = events_of(tlt.train(small(tmp_path, *HALF, *DRAFTED)), ReplayCompared)
    assert 0 < event.compared <= event.tokens
    assert event.identical == (event.differing == 0) == (event.sample_at_once == 0)
    assert Replayed.of([event]).verdict in ("identical", "few", "rounding")


def test_in_float64_nothing_differs_and_nothing_may(tmp_path: Path) -> None:
    [event] = events_of(tlt.train(small(tmp_path, "--run.steps=1", *DRAFTED)), ReplayCompared)
    assert (event.identical, event.exact, event.compared, event.differing) == (True, True, event.tokens, 0)
