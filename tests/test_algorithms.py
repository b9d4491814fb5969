"""GRPO, Dr. GRPO, DAPO, RLOO, GSPO and CISPO: each recipe against the formula of its paper, answer by answer."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_policy import assert_same, experiences, gradients_of, plain_logprobs
from tests.tiny import policy
from tests.training import small
from tlt.config import GrpoSettings, ModelSettings, TrainSettings
from tlt.fleet import Worker
from tlt.policy import Policy, open_policy
from tlt.recipe import load_config
from tlt.train.grpo import Totals, advantages, clipped_weight, sequence_old, token_weight
from tlt.train.lora import Lora
from tlt.train.policy import PolicyTrainer
from tlt.types import Experience, SamplingParams

RECIPES = ("grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo")
REWARDS = (1.0, 0.0, 0.5), (0.0, 3.0, 1.0)  # of two groups
LIMIT = 20  # tokens of an answer
LN2 = math.log(2.0)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- by hand


@pytest.mark.parametrize(
    ("objective", "expected"),
    [("token", 1 / 30), ("sequence", 1 / 20), ("constant", 1 / 400), ("sum", 1 / 4)],
)
def test_weights_of_a_token(objective: Any, expected: float) -> None:
    """Of an answer with 5 tokens, among 4 with 30 tokens that could have had 100 each."""
    assert token_weight(5, Totals(4, 30, 100), GrpoSettings(loss=objective)) == pytest.approx(expected)


def test_cispo_by_hand() -> None:
    """Ratios 1, 4, 4 and 1/4; weights between 1/2 and 2."""
    settings = GrpoSettings(objective="cispo", clip_low=0.5, clip_high=1.0)
    now = tensor(-1.0, -1.0, -1.0, -1.0).requires_grad_()
    old = tensor(-1.0, -1.0 - 2 * LN2, -1.0 - 2 * LN2, -1.0 + 2 * LN2)
    loss, clipped = clipped_weight(now, old, tensor(1.0, 1.0, -1.0, 3.0), settings)
    assert loss.tolist() == pytest.approx([1.0, 2.0, -2.0, 1.5])  # −w·A·log p, with log p = −1
    assert clipped.tolist() == [False, True, True, True]
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-1.0, -2.0, 2.0, -1.5]), "what is clipped still has a gradient"


def test_ratios_of_whole_answers_by_hand() -> None:
    """Of 3 tokens, twice, once and a quarter as probable as when they were drawn; of one, 4 times as probable."""
    now = tensor(-1.0, -2.0, -3.0, -1.0)
    old = now - tensor(LN2, 0.0, -2 * LN2, 2 * LN2)
    ratio = (now - sequence_old(now, old, torch.tensor([3, 1]))).exp()
    assert ratio.tolist() == pytest.approx([2 ** (-1 / 3)] * 3 + [4.0])


# ---- each recipe against its paper

Group = list[tuple[Tensor, Tensor, float]]  # log-probabilities now and when drawn, reward


def advantage(group: Group, over_std: bool = True) -> list[float]:
    rewards = [reward for _, _, reward in group]
    return [(reward - fmean(rewards)) / ((stdev(rewards) + 1e-6) if over_std else 1.0) for reward in rewards]


def surrogate(now: Tensor, old: Tensor, gain: float, low: float, high: float) -> Tensor:
    ratio = (now - old).exp()
    return torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)


def grpo(groups: list[Group]) -> Tensor:
    """1/G Σ 1/|o| Σ min(r·A, clip(r)·A), of each group; the mean over groups."""
    each = [
        sum(
            surrogate(now, old, gain, 0.2, 0.2).mean()
            for (now, old, _), gain in zip(group, advantage(group), strict=True)
        )
        / len(group)
        for group in groups
    ]
    return sum(each) / len(groups)  # type: ignore[return-value]


def dr_grpo(groups: list[Group]) -> Tensor:
    """The same without 1/|o|, and without the standard deviation: a constant divides instead."""
    total = tensor(0.0).squeeze()
    for group in groups:
        for (now, old, _), gain in zip(group, advantage(group, over_std=False), strict=True):
            total = total + surrogate(now, old, gain, 0.2, 0.2).sum() / LIMIT / len(group)
    return total / len(groups)


def dapo(groups: list[Group]) -> Tensor:
    """Over all tokens, with a higher upper clip."""
    tokens = sum(len(now) for group in groups for now, _, _ in group)
    total = tensor(0.0).squeeze()
    for group in groups:
        for (now, old, _), gain in zip(group, advantage(group), strict=True):
            total = total + surrogate(now, old, gain, 0.2, 0.28).sum()
    return total / tokens


def rloo(groups: list[Group]) -> Tensor:
    """1/k Σ (R − mean of the others)·log π(answer)."""
    total = tensor(0.0).squeeze()
    for group in groups:
        for place, (now, _, reward) in enumerate(group):
            others = [other for index, (_, _, other) in enumerate(group) if index != place]
            total = total + (reward - fmean(others)) * now.sum() / len(group)
    return total / len(groups)


def gspo(groups: list[Group]) -> Tensor:
    """1/G Σ min(s·A, clip(s)·A) with s = (π(answer)/π_old(answer))^(1/|o|)."""
    total = tensor(0.0).squeeze()
    for group in groups:
        for (now, old, _), gain in zip(group, advantage(group), strict=True):
            ratio = (now.sum() - old.sum()).div(len(now)).exp()
            held = ratio.clamp(1 - 3e-4, 1 + 4e-4)
            total = total + torch.minimum(ratio * gain, held * gain) / len(group)
    return total / len(groups)


def cispo(groups: list[Group]) -> Tensor:
    """1/Σ|o| Σ sg(clip(r))·A·log π, with an upper bound alone."""
    tokens = sum(len(now) for group in groups for now, _, _ in group)
    total = tensor(0.0).squeeze()
    for group in groups:
        for (now, old, _), gain in zip(group, advantage(group), strict=True):
            total = total + ((now - old).exp().clamp(max=5.0).detach() * gain * now).sum()
    return total / tokens


PAPERS: dict[str, Callable[[list[Group]], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "rloo": rloo,
    "gspo": gspo,
    "cispo": cispo,
}


def learned(name: str, given: list[Experience], settings: GrpoSettings) -> list[Experience]:
    """With the advantages that the recipe gives these rewards."""
    gains = [gain for rewards in REWARDS for gain in advantages(rewards, settings)]
    return [replace(experience, advantage=gain) for experience, gain in zip(given, gains, strict=True)]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("row_tokens", [20, 10_000])
def test_a_recipe_follows_the_gradient_of_its_paper(name: str, row_tokens: int) -> None:
    config = load_config(name)
    settings = replace(config.grpo, importance_cap=0.0, mismatch_limit=0.0)
    off = 0.0 if name == "rloo" else 0.01 if name == "gspo" else 0.8  # rloo: one update, with what was just drawn
    given = experiences(policy(torch.float64), off=off)
    model = copy.deepcopy(policy(torch.float64))
    answers = []
    for experience in given:
        completion = experience.rollout.completion
        tokens = torch.tensor(completion.prompt_tokens + completion.tokens)
        now = plain_logprobs(model, tokens, len(completion.prompt_tokens))
        answers.append((now, torch.tensor(completion.policy_logprobs, dtype=torch.float64)))
    groups = [
        [(now, old, reward) for (now, old), reward in zip(answers[first : first + 3], rewards, strict=True)]
        for first, rewards in zip((0, 3), REWARDS, strict=True)
    ]
    (-PAPERS[name](groups)).backward()  # type: ignore[no-untyped-call]
    expected = [weight.grad for weight in model.parameters() if weight.grad is not None]
    train = TrainSettings(learning_rate=1e-3, row_tokens=row_tokens)
    trainer = PolicyTrainer(policy(torch.float64), train, settings, sampling=SamplingParams(max_tokens=LIMIT))
    result, found = gradients_of(trainer, learned(name, given, settings))
    assert_same(found, expected, rtol=1e-6)  # 1e-6 is added to the standard deviation
    assert result.clipped == 0 if name == "rloo" else 0 < result.clipped < 1


def test_recipes_differ_where_their_papers_do() -> None:
    """So that the gradients above are six, not one."""
    settings = {name: replace(load_config(name).grpo, importance_cap=0.0) for name in RECIPES}
    assert len(set(settings.values())) == len(RECIPES)
    given = experiences(policy(torch.float64), off=0.8)
    norms = set()
    for one in settings.values():
        trainer = PolicyTrainer(policy(torch.float64), TrainSettings(), replace(one, mismatch_limit=0.0))
        norms.add(round(trainer.update(learned("", given, one)).grad_norm, 9))
    assert len(norms) == len(RECIPES)


def test_gspo_starts_from_the_trainers_own_log_probabilities_in_later_updates() -> None:
    """In float32 the engine's differ by a rounding, which a clip at 1 ± 0.0003 would take for an update."""
    settings = replace(load_config("gspo").grpo, importance_cap=0.0, mismatch_limit=0.0)
    off = learned("", experiences(policy(torch.float32), off=4e-4), settings)
    exact = learned("", experiences(policy(torch.float32)), settings)
    train = TrainSettings(learning_rate=1e-3, epochs=2)
    first, second = (PolicyTrainer(policy(torch.float32), train, settings).update(given) for given in (off, exact))
    assert (first.loss, first.grad_norm, first.clipped) == (second.loss, second.grad_norm, second.clipped)


# ---- the reference of adapters


@pytest.mark.parametrize("minibatches", [1, 2])
def test_adapters_need_no_copy_of_the_reference(minibatches: int) -> None:
    settings = GrpoSettings(kl=0.1, mismatch_limit=0.0)
    train = TrainSettings(learning_rate=1e-2, lora_rank=2, minibatches=minibatches)
    given = experiences(policy(torch.float64))
    bare = PolicyTrainer(policy(torch.float64), train, settings)
    copied = PolicyTrainer(policy(torch.float64), train, settings, reference=policy(torch.float64))
    results = [(bare.update(given), copied.update(given)) for _ in range(3)]
    assert all(one == other for one, other in results)
    assert results[0][0].kl == 0.0 if minibatches == 1 else results[0][0].kl > 0
    assert results[2][0].kl > results[0][0].kl
    assert_same([*bare._model.parameters()], [*copied._model.parameters()], rtol=0)


@pytest.mark.parametrize(("rank", "opened"), [(0, 2), (2, 1)])
def test_a_worker_opens_the_policy_again_only_where_all_weights_are_learned(
    rank: int, opened: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[ModelSettings] = []

    def counted(settings: ModelSettings) -> Policy:
        calls.append(settings)
        return open_policy(settings)

    monkeypatch.setattr("tlt.fleet.open_policy", counted)
    Worker(small(tmp_path, "--grpo.kl=0.1", f"--train.lora_rank={rank}"))
    assert len(calls) == opened


def test_a_policy_is_itself_again_after_its_adapters_were_off() -> None:
    model, base = policy(torch.float32), policy(torch.float32)
    adapters = Lora(model, 2)
    with torch.no_grad():
        for b in adapters.b:
            b.normal_()
    adapters.merge()
    before = [weight.clone() for weight in model.parameters()]
    with adapters.off():
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), base.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), base.parameters(), strict=True))
