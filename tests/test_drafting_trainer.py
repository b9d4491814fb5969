"""The drafter in training: lined up as in rollout, whole at every moment, never worse, and nobody else's tensors."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from tests.clocks import Clock
from tlt.config import DraftingSettings, DraftSettings, RunConfig
from tlt.drafting import deadline, states, trainer
from tlt.drafting.buffer import Sample, hold_out
from tlt.drafting.states import (
    Kept,
    Recompute,
    SamplePiece,
    StateCosts,
    StateKeeper,
    aligned_pieces,
    keeper_of,
    longest_piece,
    measure_states,
)
from tlt.drafting.trainer import OnlineDrafter, load_weights
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.model.transformer import Transformer
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.train.checkpoint import load_state, save_state
from tlt.train.drafter import RATED_AT, DrafterBatch, DrafterTrainer, drafter_loss, policy_states
from tlt.train.drafter_measure import expected
from tlt.train.optimizer import MasterAdamW
from tlt.train.packing import Example, pack
from tlt.train.supervised import StepResult
from tlt.types import Completion, Key, SamplingParams, Timing

NARROW = 32 / RATED_AT  # learning rates below are meant as they stand
DRAFT = DraftSettings(window=16, unroll=3, single_steps=4, warmup_steps=2, learning_rate=1e-2 * NARROW)
DRAFTING = DraftingSettings(tokens=400, micro_s=0.0, held_out=400, check=4, states="recompute")


def eagle(policy: Transformer, draft_vocab: int = 0) -> Eagle:
    model = Eagle(EagleConfig.of_policy(policy.config, window=16, draft_vocab=draft_vocab), dtype=policy.embed.dtype)
    model.init_weights(0, torch.arange(draft_vocab) if draft_vocab else None)
    return model


def online(policy: Transformer, *, draft: DraftSettings = DRAFT, cold: bool = True, **rest: object) -> OnlineDrafter:
    return OnlineDrafter(policy, eagle(policy), draft, DRAFTING, cold=cold, **rest)  # type: ignore[arg-type]


def completion(number: int, prompt: Sequence[int], answer: Sequence[int], version: int = 0) -> Completion:
    logprobs = (0.0,) * len(answer)
    return Completion(
        Key(0, number), tuple(prompt), tuple(answer), "", logprobs, logprobs, "length", version, Timing(0.0, 0.0)
    )


def answers(
    policy: Transformer, *, prompts: int = 12, group: int = 2, length: int = 30, start: int = 0
) -> list[Completion]:
    """What the policy writes."""
    engine = EngineCore(policy, tiny.letters())
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    engine.submit(
        Request(Key(0, start + number), (5, 2 + number // group, 3 + start % 30), params)
        for number in range(prompts * group)
    )
    return sorted(engine.drain(), key=lambda done: done.key.request)


def after(calls: int) -> Callable[[], bool]:
    """Says stop once it has been asked so often before."""
    asked = 0

    def until() -> bool:
        nonlocal asked
        asked += 1
        return asked > calls

    return until


def fingerprint(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


# ---- lining up


def test_pieces_are_lined_up_as_in_offline_training() -> None:
    """Every pair of state and next token, and every target, is what `policy_states` of the whole rows gives."""
    policy = tiny.policy()
    taps = EagleConfig.of_policy(policy.config, window=16).taps
    generator = torch.Generator().manual_seed(0)
    samples = [
        Sample(torch.randint(40, (length,), generator=generator, dtype=torch.int32), start, "", 0)
        for length, start in ((20, 7), (9, 1), (30, 28), (14, 5))
    ]
    pieces = [
        SamplePiece.whole(samples[0]),
        SamplePiece.whole(samples[1]),
        SamplePiece.whole(samples[2]),
        SamplePiece(samples[3], 8, 12),
    ]
    batch = Recompute(policy, taps).batch(pieces)
    at = 0
    for piece in pieces:
        sample = piece.sample
        (row,) = pack([Example(tuple(sample.tokens_T.tolist()), sample.answer_start)], 100)
        alone = policy_states(policy, row, taps)
        there, here = slice(piece.first, piece.end), slice(at, at + piece.positions)
        torch.testing.assert_close(batch.features_TF[here], alone.features_TF[there])
        torch.testing.assert_close(batch.hidden_TD[here], alone.hidden_TD[there])
        assert torch.equal(batch.aligned.next_T[here], alone.aligned.next_T[there])
        assert torch.equal(batch.aligned.learn_T[here], alone.aligned.learn_T[there])
        assert batch.aligned.index_T[here].tolist() == list(range(piece.positions))
        at += piece.positions
    assert at == len(batch.aligned.next_T)


def test_a_whole_piece_teaches_every_token_that_offline_training_does() -> None:
    sample = Sample.of(range(6), range(9), "", 0)
    (row,) = pack([Example(tuple(sample.tokens_T.tolist()), 6)], 100)
    policy = tiny.policy()
    offline = policy_states(policy, row, (0, 1, 2)).aligned.targets(3)
    here = aligned_pieces([SamplePiece.whole(sample)]).targets(3)
    assert torch.equal(here.state_N, offline.state_N)
    assert torch.equal(here.reached_SN, offline.reached_SN)


def test_states_kept_in_rollout_are_those_computed_again() -> None:
    policy = tiny.policy()
    taps = EagleConfig.of_policy(policy.config, window=16).taps
    keeper = StateKeeper(2**30)
    engine = EngineCore(policy, tiny.letters(), taps=taps, on_features=keeper)
    engine.submit(Request(Key(0, n), (5, 2 + n, 9), SamplingParams(max_tokens=20 + n)) for n in range(5))
    done = [one for one in engine.drain() if len(one.tokens) > 1]
    samples = [replace(Sample.of(one.prompt_tokens, one.tokens, "", 0), states=keeper.collect(one)) for one in done]
    assert len(samples) > 3
    assert keeper.bytes == 0
    again = Recompute(policy, taps)
    bare = replace(samples[0], states=None)
    pieces = [SamplePiece.whole(bare), *(SamplePiece.whole(sample) for sample in samples[1:])]
    mixed, computed = Kept(again, policy.embed.device).batch(pieces), again.batch(pieces)
    torch.testing.assert_close(mixed.features_TF, computed.features_TF)
    torch.testing.assert_close(mixed.hidden_TD, computed.hidden_TD)
    assert torch.equal(mixed.aligned.next_T, computed.aligned.next_T)


def test_a_keeper_that_is_full_loses_states_and_nothing_else() -> None:
    keeper = StateKeeper(1000)
    ones = [torch.ones(2, 1, 4)] * 4
    keys = [Key(0, 0), Key(0, 1)]
    for position in range(20):
        keeper.keep(keys, [position, position], ones)
        assert keeper.bytes <= 1000
    assert [keeper.take(key, 0, 20) for key in keys] == [None, None]
    keeper.keep(keys[:1], [0], [one[:1] for one in ones])
    found = keeper.take(keys[0], 0, 1)
    assert found is not None
    assert found.features_PF.shape == (1, 12)


def test_both_sources_of_states_are_timed() -> None:
    costs = measure_states(tiny.policy(), (0, 1, 2), running=3, tokens=50)
    assert costs.recompute_s > 0
    assert costs.keep_s > 0
    assert StateCosts(recompute_s=8, keep_s=1).keep
    assert not StateCosts(recompute_s=3, keep_s=1).keep  # most of what is kept is never learned from


@pytest.mark.parametrize(
    ("wanted", "keep_s", "keeps"), [("recompute", 1, 0), ("keep", 9, 1), ("auto", 1, 1), ("auto", 9, 0)]
)
def test_states_are_kept_if_asked_for_or_cheaper(
    monkeypatch: pytest.MonkeyPatch, wanted: str, keep_s: float, keeps: bool
) -> None:
    monkeypatch.setattr(states, "measure_states", lambda *_, **__: StateCosts(recompute_s=5, keep_s=keep_s))
    config = RunConfig(drafting=replace(DRAFTING, states=wanted))  # type: ignore[arg-type]
    assert (keeper_of(tiny.policy(), (0, 1, 2), config) is not None) == keeps


# ---- learning


def test_from_nothing_acceptance_rises_and_the_policy_is_untouched() -> None:
    policy = tiny.policy(torch.float32)
    before = fingerprint(list(policy.parameters()))
    drafter = online(policy)
    results = []
    for version in range(2):
        drafter.learn_from(answers(policy, start=100 * version), version)
        results.append(drafter.train(after(32)))
    assert [result.began for result in results] == ["cold", "improving"]
    assert results[-1].after.accept_length > results[0].before.accept_length + 0.4
    assert results[-1].after.loss < results[0].before.loss
    assert drafter.version == results[-1].version > 1
    assert fingerprint(list(policy.parameters())) == before
    assert all(parameter.grad is None for parameter in policy.parameters())
    handed = eagle(policy)
    load_weights(handed, drafter.weights())
    assert fingerprint(list(handed.parameters())) == fingerprint(list(drafter.drafter.parameters()))


def test_what_is_measured_is_the_overlap_of_the_distributions() -> None:
    policy = tiny.policy()
    model = eagle(policy, draft_vocab=20)
    done = answers(policy, prompts=3, group=1, length=12)
    pieces = [SamplePiece.whole(Sample.of(one.prompt_tokens, one.tokens, "", 0)) for one in done]
    batch = Recompute(policy, model.config.taps).batch(pieces)
    found = expected(model, [batch], policy.head_weight, policy.embed, DRAFT)
    unrolled = model.unroll(batch.aligned, batch.features_TF, policy.embed, 3)
    total, count = 0.0, 0
    chains: list[list[float]] = []
    for sequence in range(3):
        first = sum(batch.aligned.lengths[:sequence])
        prompt = len(done[sequence].prompt_tokens)
        # the next token is one of the answer
        for entry in range(first + prompt - 1, first + batch.aligned.lengths[sequence] - 1):
            chain = []
            for step in range(3):
                if entry + step + 1 < first + batch.aligned.lengths[sequence]:
                    p = (batch.hidden_TD[entry + step + 1] @ policy.head_weight.T).softmax(-1)[:20]
                    q = model.logits(unrolled[step][entry], policy.head_weight[:20]).softmax(-1)
                    chain.append(torch.minimum(p, q).sum().item())
            chains.append(chain)
    for depth in range(3):
        long_enough = [chain for chain in chains if len(chain) > depth]
        total += sum(float(torch.tensor(chain[: depth + 1]).double().prod()) for chain in long_enough) / len(
            long_enough
        )
        count += len(long_enough)
    assert found.accept_length == pytest.approx(1 + total)
    assert found.tokens == len(chains)
    full = eagle(policy)
    loss, _ = drafter_loss(full, batch, policy.head_weight, policy.embed, DRAFT, 3)
    assert expected(full, [batch], policy.head_weight, policy.embed, DRAFT).loss == pytest.approx(loss.item())


def test_a_stop_between_any_two_micro_steps_keeps_what_was_learned() -> None:
    """Ten calls of one micro-step each and one call of ten lead to the same learner."""
    policy = tiny.policy()
    done = answers(policy)
    learners = []
    for calls in ([10], [1] * 10):
        drafter = OnlineDrafter(policy, eagle(policy), DRAFT, replace(DRAFTING, check=100), cold=True)
        drafter.learn_from(done, 0)
        for micro_steps in calls:
            result = drafter.train(after(micro_steps))
            assert (result.micro_steps, result.ended) == (micro_steps, "stopped")
            assert drafter.version > 0
        learners.append(drafter.state()["learner"])
    assert all(torch.equal(learners[0][name], learners[1][name]) for name in learners[0])


def test_told_to_stop_at_once_nothing_changes() -> None:
    policy = tiny.policy()
    drafter = online(policy)
    drafter.learn_from(answers(policy), 0)
    before = fingerprint(list(drafter.weights().values()))
    result = drafter.train(lambda: True)
    assert (result.micro_steps, result.published, drafter.version) == (0, False, 0)
    assert fingerprint(list(drafter.weights().values())) == before


def test_a_worse_drafter_is_never_given_out() -> None:
    policy = tiny.policy(torch.float32)
    good = online(policy)
    good.learn_from(answers(policy), 0)
    good.train(after(24))
    reckless = replace(DRAFT, learning_rate=3.0 * NARROW, warmup_steps=0)
    drafter = OnlineDrafter(policy, good.drafter, reckless, replace(DRAFTING, probe=1))
    handed = fingerprint(list(drafter.weights().values()))
    for version in range(2):
        drafter.learn_from(answers(policy, start=100 * version), version)
        result = drafter.train(after(8))
        assert (result.micro_steps, result.published) == (8, False)
        assert result.after == result.before
    assert drafter.version == 0
    assert fingerprint(list(drafter.weights().values())) == handed
    learner = drafter.state()["learner"]  # refused again and again, it went back to the good one
    assert fingerprint([learner[name] for name in drafter.weights()]) == handed


def test_numbers_that_are_none_are_reported_and_the_last_good_drafter_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny.policy(torch.float32)
    drafter = online(policy)
    drafter.learn_from(answers(policy), 0)
    drafter.train(after(8))
    handed, version = fingerprint(list(drafter.weights().values())), drafter.version
    batch_of = Recompute.batch
    calls = 0

    def poisoned(self: Recompute, pieces: Sequence[SamplePiece]) -> DrafterBatch:
        nonlocal calls
        calls += 1
        batch = batch_of(self, pieces)
        if calls == 3:  # the first measures
            batch.features_TF[0] = float("nan")
        return batch

    monkeypatch.setattr(Recompute, "batch", poisoned)
    drafter.learn_from(answers(policy, start=100), 1)
    result = drafter.train(after(8))
    assert (result.ended, result.micro_steps, result.published) == ("diverged", 2, False)
    assert "diverged" in result.alarm
    assert (fingerprint(list(drafter.weights().values())), drafter.version) == (handed, version)
    monkeypatch.undo()
    drafter.learn_from(answers(policy, start=200), 2)
    result = drafter.train(after(20))
    assert result.micro_steps > 8
    assert not result.alarm
    assert result.after.accept_length >= result.before.accept_length


def test_memory_that_does_not_suffice_makes_micro_steps_smaller_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = tiny.policy(torch.float32)
    drafter = online(policy)
    drafter.learn_from(answers(policy), 0)
    launch = DrafterTrainer.launch

    def narrow(self: DrafterTrainer, batch: DrafterBatch) -> Callable[[], StepResult]:
        if len(batch.aligned.next_T) > 150:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(self, batch)

    monkeypatch.setattr(DrafterTrainer, "launch", narrow)
    ended = []
    while not ended or ended[-1] == "no memory":
        result = drafter.train(after(3))
        assert bool(result.alarm) == (result.ended == "no memory")
        ended.append(result.ended)
    assert ended == ["no memory", "no memory", "stopped"]  # 400 tokens, 200, 100


class Averaged:
    """What a session averages with, by a function."""

    def __init__(self, mean: Callable[[Sequence[Tensor]], None]) -> None:
        self.mean = self.gradients = mean

    def weights(self, tensors: Sequence[Tensor]) -> bool:
        return False


def test_weights_that_a_session_averages_are_those_that_draft() -> None:
    policy = tiny.policy()
    model = eagle(policy).to(torch.bfloat16)

    def halve(tensors: Sequence[Tensor]) -> bool:
        torch._foreach_mul_(list(tensors), 0.5)
        return True

    optimizer = MasterAdamW(model, weight_decay=0.0)
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer.change(lambda tensors: False)
    optimizer.change(halve)
    for weight, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(weight, old * 0.5)


def test_two_who_train_together_take_the_step_of_both_batches_as_one() -> None:
    """Two members in one process: each hands its gradients in, and both get the mean."""
    policy = tiny.policy()
    samples = [Sample.of(range(3), torch.arange(length).remainder(40).tolist(), "", 0) for length in (5, 60, 11, 30)]
    source = Recompute(policy, EagleConfig.of_policy(policy.config, window=16).taps)
    parts = [source.batch([SamplePiece.whole(sample) for sample in part]) for part in (samples[:2], samples[2:])]
    together = source.batch([SamplePiece.whole(sample) for sample in samples])
    settings = replace(DRAFT, single_steps=0)

    def trainer(average: Callable[[Sequence[Tensor]], None] | None = None) -> tuple[Eagle, DrafterTrainer]:
        model, averaging = eagle(policy), Averaged(average) if average else None
        return model, DrafterTrainer(model, policy.head_weight, policy.embed, settings, average=averaging)

    handed_in: list[list[Tensor]] = []
    for part in parts:
        trainer(lambda tensors: handed_in.append([tensor.clone() for tensor in tensors]))[1].micro_step(part)
    means = [torch.stack(pair).mean(0) for pair in zip(*handed_in, strict=True)]

    def average(tensors: Sequence[Tensor]) -> None:
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean)

    model, member = trainer(average)
    other, alone = trainer()
    result, whole = member.micro_step(parts[0]), alone.micro_step(together)
    assert result.grad_norm == pytest.approx(whole.grad_norm, rel=1e-9)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_members_measure_together_so_that_all_decide_alike() -> None:
    policy = tiny.policy()
    met: list[Tensor] = []

    def average(tensors: Sequence[Tensor]) -> None:
        met.append(tensors[0].clone())

    drafter = online(policy, average=Averaged(average))
    drafter.learn_from(answers(policy), 0)
    result = drafter.train(lambda: True)
    loss, accept_length, tokens = met[0].tolist()
    assert result.before.accept_length == pytest.approx(accept_length / tokens)
    assert result.before.loss == pytest.approx(loss / tokens)


def test_a_restored_trainer_goes_on_bit_by_bit(tmp_path: Path) -> None:
    policy = tiny.policy(torch.float32)
    first = online(policy)
    first.learn_from(answers(policy), 0)
    first.train(after(7))
    first.learn_from(answers(policy, start=100), 1)
    save_state(first.state(), tmp_path, "drafter")
    second = online(policy)
    second.restore(load_state(tmp_path, "drafter"))
    for drafter in (first, second):
        drafter.train(after(9))
    assert first.version == second.version
    for name, tensor in first.weights().items():
        assert torch.equal(tensor, second.weights()[name])
    third = online(policy)
    third.restore({**load_state(tmp_path, "drafter"), "buffer": None, "arrived": None})
    assert third.train(after(3)).ended == "no answers"


# ---- what is learned from


def test_answers_held_out_are_whole_prompts_and_few() -> None:
    samples = [Sample.of((1, 2), range(10), f"prompt {number // 4}", 0) for number in range(160)]
    held = hold_out(samples, 10_000)
    names = {sample.prompt_id for sample in held}
    assert len(names) == 5
    assert len(held) == 20
    assert {sample.prompt_id for sample in hold_out(samples, 50)} < names
    assert len(hold_out(samples[:4], 50)) == 1
    assert hold_out([], 50) == []


def test_what_is_held_out_is_learned_from_when_newer_answers_are_there() -> None:
    policy = tiny.policy(torch.float32)
    drafter = online(policy)
    first = answers(policy)
    drafter.learn_from(first, 0)
    drafter.train(lambda: True)
    held = len(first) - len(drafter.state()["buffer"]["serials"])
    assert held > 0
    drafter.learn_from(answers(policy, start=100), 1)
    drafter.train(lambda: True)
    assert len(drafter.state()["buffer"]["serials"]) == 2 * len(first) - held


def test_answers_longer_than_a_micro_step_come_in_pieces() -> None:
    policy = tiny.policy(torch.float32)
    drafter = OnlineDrafter(policy, eagle(policy), DRAFT, replace(DRAFTING, tokens=64, held_out=50), cold=True)
    drafter.learn_from(answers(policy, prompts=4, group=1, length=300), 0)
    result = drafter.train(after(12))
    assert result.micro_steps == 12
    assert result.tokens == 12 * 64
    assert result.before.tokens == 49


def test_answers_of_one_token_teach_nothing() -> None:
    policy = tiny.policy()
    drafter = online(policy)
    drafter.learn_from([completion(number, (3, 4), (5,)) for number in range(20)], 0)
    result = drafter.train(after(5))
    assert (result.ended, result.micro_steps) == ("no answers", 0)


def test_a_new_drafter_of_few_words_learns_the_most_frequent_ones() -> None:
    policy = tiny.policy(torch.float32)
    model = eagle(policy, draft_vocab=8)
    drafter = OnlineDrafter(policy, model, DRAFT, DRAFTING, cold=True)
    done = [completion(number, (1, 2), [30, 31, 32, 33, 34, 35, 36, 37] * 3) for number in range(10)]
    drafter.learn_from(done, 0)
    drafter.train(after(4))
    assert drafter.weights()["token_of_draft_v"].tolist() == list(range(30, 38))
    handed = eagle(policy, draft_vocab=8)
    load_weights(handed, drafter.weights())
    assert handed.token_of_draft_v is not None
    assert handed.token_of_draft_v.tolist() == list(range(30, 38))


def training_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A look at what is held out takes 1 s on it, a micro-step 0.5 s."""
    clock = Clock()
    clock.used_by(monkeypatch, trainer, deadline)
    clock.passes_in(monkeypatch, DrafterTrainer, "launch", 0.5)
    clock.passes_in(monkeypatch, OnlineDrafter, "_measure", 1.0)
    return clock


def test_training_fits_into_the_time_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, policy = training_clock(monkeypatch), tiny.policy()
    drafter = online(policy)
    drafter.learn_from(answers(policy), 0)
    assert drafter.status().micro_s == drafter.status().look_s == 0.0
    started = clock.now
    result = drafter.train(lambda: True, extra_s=4.9)
    assert result.micro_steps == 4, "a look, micro-steps, and the look behind them"
    assert result.seconds == result.waited_s == clock.now - started == 1.0 + 4 * 0.5 + 1.0
    assert result.measuring_s == 2.0
    status = drafter.status()
    assert (status.micro_s, status.look_s) == (0.5, 1.0)
    assert status.accept_length == result.after.accept_length
    assert drafter.train(lambda: True, extra_s=2.4).micro_steps == 0, "not even one would fit"


def test_what_nothing_waits_for_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, policy = training_clock(monkeypatch), tiny.policy()
    drafter = online(policy)
    drafter.learn_from(answers(policy), 0)
    result = drafter.train(after(3))
    assert result.micro_steps == 3
    assert result.waited_s == 1.0, "the look after the last micro-step"
    assert clock.now - 100.0 >= result.seconds == 3.5


def test_it_is_over_when_told_so_and_the_time_for_it_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(), [False]
    clock.now = 0.0
    clock.used_by(monkeypatch, deadline)
    end = deadline.Deadline(lambda: told[0], extra_s=5.0)
    clock.now = 9.0
    assert not end.over(1.0)  # nobody waits yet
    assert end.waited_s == 0.0
    clock.now, told[0] = 10.0, True
    assert end.over(0.0)
    clock.now = 12.0
    assert end.waited_s == 2.0
    at_once = deadline.Deadline(lambda: True, extra_s=5.0)  # from 12 on
    clock.now = 13.0
    assert not at_once.near(100.0)  # it has not been asked
    assert not at_once.over(3.0)
    assert at_once.near(4.0)
    clock.now = 15.0
    assert at_once.over(2.0)  # what would come yet does not fit in
    assert at_once.waited_s == 3.0


def test_held_out_answers_are_cut_at_one_length() -> None:
    assert longest_piece([3, 5, 100, 100], 28) == 10
    assert longest_piece([3, 5], 28) == 5
    assert longest_piece([100] * 4, 2) == 2


def test_a_warm_up_leaves_no_trace() -> None:
    policy = tiny.policy(torch.float32)
    warm, other = online(policy), online(policy)
    warm.warm_up()
    assert warm.version == warm.steps_taken == 0
    for drafter in (warm, other):
        drafter.learn_from(answers(policy), 0)
        drafter.train(after(6))
    assert fingerprint(list(warm.weights().values())) == fingerprint(list(other.weights().values()))
