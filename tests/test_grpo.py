"""GRPO by hand: every option against numbers worked out on paper."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt.config import GrpoSettings
from tlt.errors import TltError
from tlt.train.grpo import (
    LARGEST_LOG_RATIO,
    Totals,
    advantages,
    clipped_surrogate,
    counts,
    divergence,
    importance,
    settled,
    token_weight,
)
from tlt.types import Completion, FinishReason, Key, Timing

LN2 = math.log(2.0)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- advantages


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # rewards 1, 0, 0, 3: mean 1, squares 0 + 1 + 1 + 4 = 6, sample variance 6/3 = 2
        (GrpoSettings(divide_by_std=False), [0.0, -1.0, -1.0, 2.0]),
        (GrpoSettings(), [0.0, -1 / math.sqrt(2), -1 / math.sqrt(2), 2 / math.sqrt(2)]),
        # each against the mean of the other three: 1 − 3/3, 0 − 4/3, 0 − 4/3, 3 − 1/3
        (GrpoSettings(divide_by_std=False, leave_one_out=True), [0.0, -4 / 3, -4 / 3, 8 / 3]),
        (GrpoSettings(leave_one_out=True), [0.0, -4 / 3 / math.sqrt(2), -4 / 3 / math.sqrt(2), 8 / 3 / math.sqrt(2)]),
    ],
)
def test_advantages_by_hand(settings: GrpoSettings, expected: list[float]) -> None:
    assert advantages([1.0, 0.0, 0.0, 3.0], settings) == pytest.approx(expected, rel=2e-6, abs=1e-12)


@pytest.mark.parametrize("settings", [GrpoSettings(), GrpoSettings(divide_by_std=False, leave_one_out=True)])
def test_where_all_did_equally_well_there_is_exactly_nothing_to_learn(settings: GrpoSettings) -> None:
    assert advantages([0.1] * 7, settings) == [0.0] * 7  # 0.1 + … + 0.1 is not 0.7 in floating point


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_advantages_of_a_group_cancel(rewards: list[float]) -> None:
    for settings in (GrpoSettings(divide_by_std=False), GrpoSettings(divide_by_std=False, leave_one_out=True)):
        assert sum(advantages(rewards, settings)) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("rewards", "complaint"), [([1.0], "task.group"), ([1.0, math.nan], "rollout 1.*nan")])
def test_a_group_that_compares_nothing_is_an_error(rewards: list[float], complaint: str) -> None:
    with pytest.raises(TltError, match=complaint):
        advantages(rewards, GrpoSettings())


# ---- what counts


def completion(reason: FinishReason) -> Completion:
    return Completion(Key(0, 0), (1,), (2,), "", (0.0,), (0.0,), reason, 0, Timing(0.0, 0.0))


def test_answers_cut_off_teach_nothing_where_asked() -> None:
    masked = GrpoSettings(mask_overlong=True)
    assert [counts(completion(reason), masked) for reason in ("eos", "stop", "length")] == [True, True, False]
    assert counts(completion("length"), GrpoSettings())


def test_tokens_weigh_the_same_or_answers_do() -> None:
    lengths = [1, 3, 6]
    totals = Totals(answers=3, tokens=10)
    by_token = [token_weight(length, totals, GrpoSettings(loss="token")) for length in lengths]
    by_answer = [token_weight(length, totals, GrpoSettings(loss="sequence")) for length in lengths]
    assert by_token == pytest.approx([0.1, 0.1, 0.1])
    assert by_answer == pytest.approx([1 / 3, 1 / 9, 1 / 18])
    for weights in (by_token, by_answer):
        assert sum(w * n for w, n in zip(weights, lengths, strict=True)) == pytest.approx(1.0)


# ---- tokens


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high", "loss", "slope", "clipped"),
    [
        # the slope is d loss / d log p = −r·A where the clip does not hold, else 0
        (1.0, 2.0, 0.2, 0.2, -2.0, -2.0, False),
        (1.5, 2.0, 0.2, 0.2, -2.4, 0.0, True),  # 1.2 · 2
        (1.5, 2.0, 0.2, 0.6, -3.0, -3.0, False),  # clip-higher lets it through
        (1.5, -2.0, 0.2, 0.2, 3.0, 3.0, False),  # a bad answer that became likelier: nothing is held back
        (0.5, 2.0, 0.2, 0.2, -1.0, -1.0, False),
        (0.5, -2.0, 0.2, 0.2, 1.6, 0.0, True),  # 0.8 · 2
        (0.5, -2.0, 0.6, 0.2, 1.0, 1.0, False),  # the lower bound is its own
        (1.19, 2.0, 0.2, 0.2, -2.38, -2.38, False),
    ],
)
def test_the_clip_by_hand(
    ratio: float, advantage: float, low: float, high: float, loss: float, slope: float, clipped: bool
) -> None:
    new = tensor(math.log(ratio) - 3.0).requires_grad_()
    settings = GrpoSettings(clip_low=low, clip_high=high)
    found, held = clipped_surrogate(new, tensor(-3.0), tensor(advantage), settings)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert found.item() == pytest.approx(loss)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(slope)
    assert held.item() is clipped


def test_divergence_by_hand() -> None:
    policy = tensor(-1.0, -1.0, -1.0).requires_grad_()
    found = divergence(policy, tensor(-1.0, -1.0 + LN2, -1.0 - LN2))
    found.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found.detach(), tensor(0.0, 2 - LN2 - 1, 0.5 + LN2 - 1))
    torch.testing.assert_close(policy.grad, tensor(0.0, 1 - 2, 1 - 0.5))  # d/dp = 1 − e^(ref − p)


def test_divergence_is_the_kullback_leibler_one_on_average() -> None:
    policy, reference = torch.softmax(tensor(0.3, -1.0, 2.0), 0), torch.softmax(tensor(1.0, 0.5, -0.2), 0)
    kl = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * divergence(policy.log(), reference.log())).sum(), kl)


def test_importance_by_hand() -> None:
    trainer, engine = tensor(-1.0, -1.0, -1.0, -1.0), tensor(-1.0, -1.0 - LN2, -1.0 - 3 * LN2, -1.0 + LN2)
    torch.testing.assert_close(importance(trainer, engine, cap=2.0), tensor(1.0, 2.0, 2.0, 0.5))
    torch.testing.assert_close(importance(trainer, engine, cap=5.0), tensor(1.0, 2.0, 5.0, 0.5))


def test_round_off_is_no_difference() -> None:
    start = tensor(-1.0, -1.0, -1.0, -1.0)
    found = settled(tensor(-1.0 + 1e-5, -1.0 - 1e-5, -1.1, -0.9), start, round_off=1e-3)
    assert found.tolist() == [-1.0, -1.0, -1.1, -0.9]
    loss, _ = clipped_surrogate(start, found, tensor(2.0, -2.0, 1.0, 1.0), GrpoSettings())
    assert loss.tolist() == pytest.approx([-2.0, 2.0, -math.exp(0.1), -math.exp(-0.1)])


def test_ratios_beyond_reason_stay_finite() -> None:
    far = tensor(1000.0, -1000.0)
    loss, _ = clipped_surrogate(far, tensor(0.0, 0.0), tensor(-1.0, -1.0), GrpoSettings())
    assert loss.tolist() == pytest.approx([math.exp(LARGEST_LOG_RATIO), 0.8])
    assert divergence(-far, tensor(0.0, 0.0)).isfinite().all()
    assert importance(far, tensor(0.0, 0.0), cap=3.0).tolist() == [3.0, 0.0]
