"""Policy training: neither rows, chunks nor workers change a thing; who teaches nothing costs nothing; exact state."""

import copy
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.tiny import VOCAB, Seen, letters, policy
from tlt.config import GrpoSettings, TrainSettings
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.errors import ConfigError, TltError
from tlt.model.attention import PackedLayout
from tlt.model.transformer import Transformer
from tlt.train.logprobs import token_logprobs, token_loss
from tlt.train.lora import Lora
from tlt.train.optimizer import MasterAdamW
from tlt.train.policy import PolicyTrainer, UpdateResult
from tlt.types import Completion, Experience, FinishReason, Key, Prompt, Rollout, SamplingParams, Timing

# T tokens, N answer tokens, V vocabulary

LENGTHS = ((3, 5), (1, 9), (6, 2), (2, 14), (4, 1), (3, 8))  # of prompts and answers
ADVANTAGES = (1.5, -0.5, 0.7, -1.0, 0.25, -0.95)
ONE_STEP = TrainSettings(learning_rate=1e-3)
FREE = GrpoSettings(mismatch_limit=0)  # the same answers are learned from again and again


def experiences(
    model: Transformer, *, off: float = 0.0, reason: FinishReason = "eos", temperature: float = 1.0
) -> list[Experience]:
    """Random answers with the policy's own log-probabilities, `off` by so much from token to token."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for index, ((prompt, answer), advantage) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        tokens = torch.randint(VOCAB, (prompt + answer,), generator=generator)
        away = off * torch.randn(answer, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            told = [(plain_logprobs(model, tokens, prompt, at).double() + away).tolist() for at in (temperature, 1.0)]
        completion = Completion(
            key=Key(0, index),
            prompt_tokens=tuple(tokens[:prompt].tolist()),
            tokens=tuple(tokens[prompt:].tolist()),
            text="",
            logprobs=tuple(told[0]),
            policy_logprobs=tuple(told[1]),
            finish_reason=reason,
            policy_version=0,
            timing=Timing(0.0, 0.0),
        )
        found.append(Experience(Rollout(Prompt(str(index), ""), completion, 0.0), advantage))
    return found


def plain_logprobs(model: Transformer, tokens: Tensor, prompt: int, temperature: float = 1.0) -> Tensor:
    """The definition: one sequence, all logits at once."""
    logits = model.logits(model(tokens, PackedLayout.from_lengths([len(tokens)])).hidden_TD)
    return torch.log_softmax(logits[prompt - 1 : -1] / temperature, dim=-1).gather(1, tokens[prompt:, None]).squeeze(1)


def gradients_of(trainer: PolicyTrainer, given: Sequence[Experience]) -> tuple[UpdateResult, list[Tensor]]:
    """What an update would have followed, by standing where workers exchange their gradients."""
    seen: list[Tensor] = []

    def look(tensors: Sequence[Tensor]) -> None:
        if len(tensors) > 1:
            seen.extend(tensor.clone() for tensor in tensors[:-1])

    trainer._sum_over_workers = look
    return trainer.update(given), seen


def plain_gradients(
    model: Transformer, given: Sequence[Experience], settings: GrpoSettings
) -> tuple[float, list[Tensor]]:
    """The same loss answer by answer, with nothing packed, chunked or left out."""
    model = copy.deepcopy(model)
    tokens_in_all = sum(len(e.rollout.completion.tokens) for e in given)
    total = torch.zeros((), dtype=torch.float64)
    for experience in given:
        completion = experience.rollout.completion
        tokens = torch.tensor(completion.prompt_tokens + completion.tokens)
        old = torch.tensor(completion.policy_logprobs, dtype=torch.float64)
        ratio = (plain_logprobs(model, tokens, len(completion.prompt_tokens)) - old).exp()
        held = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        loss = -torch.minimum(ratio * experience.advantage, held * experience.advantage)
        share = 1 / tokens_in_all if settings.loss == "token" else 1 / (len(given) * len(completion.tokens))
        total = total + loss.sum() * share
    total.backward()  # type: ignore[no-untyped-call]
    return total.item(), [weight.grad for weight in model.parameters() if weight.grad is not None]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float = 1e-9) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-12)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


# ---- making rows ready


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_are_made_ready_without_torch(dtype: torch.dtype) -> None:
    """Which would wake up all its threads, row after row; and with the very numbers torch would have put there."""
    given = [replace(e, advantage=e.advantage / 3) for e in experiences(policy(torch.float64), off=0.3)]
    trainer = PolicyTrainer(policy(dtype), ONE_STEP, GrpoSettings(loss="sequence"))
    part = trainer._prepare(given)
    (packed,) = part.packed
    with Seen() as seen:
        row = trainer._row(packed, part.learned, part.totals)
    assert seen.names <= {"detach", "lift_fresh"}
    wide = torch.promote_types(dtype, torch.float32)
    members = [given[index] for index in packed.members]
    sizes = torch.tensor([len(e.rollout.completion.tokens) for e in members])
    answers_N = packed.mask_T.nonzero().squeeze(1)
    weights = [1 / (len(given) * size) for size in sizes.tolist()]
    told = torch.tensor([one for e in members for one in e.rollout.completion.policy_logprobs], dtype=torch.float64)
    for found, expected in (
        (row.before_N, answers_N - 1),
        (row.token_N, packed.tokens_T[answers_N]),
        (row.advantage_N, torch.tensor([e.advantage for e in members], dtype=wide).repeat_interleave(sizes)),
        (row.weight_N, torch.tensor(weights, dtype=wide).repeat_interleave(sizes)),
        (row.old_N, told.to(wide)),
    ):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


# ---- the loss and its gradient


@pytest.mark.parametrize("loss", ["token", "sequence"])
@pytest.mark.parametrize("row_tokens", [20, 10_000])
def test_packed_rows_equal_answers_one_by_one(loss: Any, row_tokens: int) -> None:
    model = policy(torch.float64)
    given = experiences(model, off=0.3)  # some tokens beyond the clip
    settings = GrpoSettings(loss=loss, mismatch_limit=0)
    expected_loss, expected = plain_gradients(model, given, settings)
    result, found = gradients_of(PolicyTrainer(model, replace(ONE_STEP, row_tokens=row_tokens), settings), given)
    assert result.loss == pytest.approx(expected_loss, rel=1e-10)
    assert_same(found, expected)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in expected))
    assert result.grad_norm == pytest.approx(norm, rel=1e-10)
    assert 0 < result.clipped < 1
    assert result.answer_tokens == 39
    assert result.tokens == 39 + 19


def test_the_token_budget_changes_nothing() -> None:
    given = experiences(policy(torch.float64))
    models = [policy(torch.float64) for _ in range(3)]
    for model, row_tokens in zip(models, (1, 25, 10_000), strict=True):  # 1: every answer has a row of its own
        trainer = PolicyTrainer(model, replace(ONE_STEP, row_tokens=row_tokens, minibatches=2), FREE)
        for _ in range(3):
            trainer.update(given)
    assert_same(weights_of(models[1]), weights_of(models[0]), rtol=1e-8)
    assert_same(weights_of(models[2]), weights_of(models[0]), rtol=1e-8)


def test_activation_checkpoints_change_nothing() -> None:
    given = experiences(policy(torch.float64))
    plain = gradients_of(PolicyTrainer(policy(torch.float64), ONE_STEP, GrpoSettings()), given)
    model = policy(torch.float64)
    modes = []
    model.blocks[0].register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    recomputes = replace(ONE_STEP, checkpoint_activations="always")
    again = gradients_of(PolicyTrainer(model, recomputes, GrpoSettings()), given)
    assert again[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(again[1], plain[1], strict=True))
    # computed twice, and both times with gradients enabled: the kernels of rollout, which write in place, stay away
    assert modes == [True, True]


@pytest.mark.parametrize("logits_at_once", [1, 3 * VOCAB, 1000 * VOCAB])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_losses_equal_plain_ones(logits_at_once: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    head = torch.randn(VOCAB, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    token = torch.randint(VOCAB, (11,), generator=generator)
    target = torch.randn(11, dtype=torch.float64, generator=generator)

    logprobs_NV = torch.log_softmax(hidden @ head.T / temperature, dim=-1)
    plain = ((logprobs_NV[torch.arange(11), token] - target) ** 3).sum() * 0.3
    expected = torch.autograd.grad(plain, (hidden, head))
    options = {"temperature": temperature, "logits_at_once": logits_at_once}
    loss, logprob, entropy = token_loss(
        hidden,
        head,
        token,
        lambda logprob_C, chunk: (logprob_C - target[chunk]) ** 3,
        **options,  # type: ignore[arg-type]
    )
    found = torch.autograd.grad(loss * 0.3, (hidden, head))
    torch.testing.assert_close(loss * 0.3, plain)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(logprob, logprobs_NV[torch.arange(11), token])
    torch.testing.assert_close(entropy, -(logprobs_NV.exp() * logprobs_NV).sum(-1))
    torch.testing.assert_close(token_logprobs(hidden, head, token, **options), logprob)  # type: ignore[arg-type]


def test_at_another_temperature_the_ratio_is_of_what_was_drawn_from() -> None:
    model = policy(torch.float64)
    given = experiences(model, temperature=0.7)
    cooler = PolicyTrainer(model, ONE_STEP, GrpoSettings(), sampling=SamplingParams(temperature=0.7))
    assert cooler.update(given).mismatch_max < 1e-6
    as_if_one = PolicyTrainer(policy(torch.float64), ONE_STEP, GrpoSettings(mismatch_limit=0))
    wrong = [
        replace(
            e,
            rollout=replace(
                e.rollout, completion=replace(e.rollout.completion, policy_logprobs=e.rollout.completion.logprobs)
            ),
        )
        for e in given
    ]
    assert as_if_one.update(wrong).mismatch_mean > 0.01


# ---- options


def test_divergence_from_the_reference_is_paid_for() -> None:
    model, reference = policy(torch.float64), policy(torch.float64, seed=5)
    given = [replace(e, advantage=0.0) for e in experiences(model)]
    trainer = PolicyTrainer(model, ONE_STEP, GrpoSettings(kl=0.1, mismatch_limit=0), reference=reference)
    results = [trainer.update(given) for _ in range(5)]
    assert results[0].kl > results[-1].kl > 0
    assert results[0].loss == pytest.approx(0.1 * results[0].kl, rel=1e-9)
    same = PolicyTrainer(
        policy(torch.float64), ONE_STEP, GrpoSettings(kl=0.1, mismatch_limit=0), reference=policy(torch.float64)
    )
    assert same.update(given).kl == pytest.approx(0.0, abs=1e-12)


def test_what_was_cut_off_neither_teaches_nor_counts() -> None:
    given = experiences(policy(torch.float64))
    cut = [
        replace(e, rollout=replace(e.rollout, completion=replace(e.rollout.completion, finish_reason="length")))
        for e in given[:2]
    ]
    masked = GrpoSettings(mask_overlong=True)
    _, found = gradients_of(PolicyTrainer(policy(torch.float64), ONE_STEP, masked), [*cut, *given[2:]])
    _, expected = gradients_of(PolicyTrainer(policy(torch.float64), ONE_STEP, masked), given[2:])
    assert_same(found, expected)


def test_answers_without_advantage_count_but_are_not_computed() -> None:
    model = policy(torch.float64)
    given = experiences(model)
    given[1] = replace(given[1], advantage=0.0)
    expected_loss, expected = plain_gradients(model, given, GrpoSettings())
    result, found = gradients_of(PolicyTrainer(model, ONE_STEP, GrpoSettings()), given)
    assert result.answer_tokens == 39 - 9
    assert result.loss == pytest.approx(expected_loss, rel=1e-10)
    assert_same(found, expected)


def test_where_nobody_did_better_nothing_moves() -> None:
    model = policy(torch.float64)
    trainer = PolicyTrainer(model, ONE_STEP, FREE)
    given = experiences(model)
    trainer.update(given)  # the optimizer has momentum now
    before = weights_of(model)
    result = trainer.update([replace(e, advantage=0.0) for e in given])
    assert_same(weights_of(model), before, rtol=0)
    assert (result.updates, result.tokens, result.loss, result.weight_mean) == (0, 0, 0.0, 1.0)
    assert trainer.steps_taken == 2


@pytest.mark.parametrize("minibatches", [1, 2])
def test_truncated_weights_make_up_for_the_engine(minibatches: int) -> None:
    """Where the engine was off, the ratio starts at 1 and the weight is what is left, cut off at the cap."""
    model = policy(torch.float64)
    given = experiences(model, off=0.3)
    settings = GrpoSettings(importance_cap=1.2, mismatch_limit=0)
    exact = experiences(model)
    result = PolicyTrainer(model, replace(ONE_STEP, minibatches=minibatches), settings).update(given)
    first = range(0, len(given), minibatches)
    off = [
        theirs - ours
        for i in first
        for theirs, ours in zip(
            exact[i].rollout.completion.policy_logprobs, given[i].rollout.completion.policy_logprobs, strict=True
        )
    ]
    assert result.mismatch_mean == pytest.approx(sum(map(abs, off)) / len(off), rel=1e-9)
    assert result.mismatch_max == pytest.approx(max(map(abs, off)), rel=1e-9)
    if minibatches == 1:
        weights = [min(math.exp(d), 1.2) for d in off]
        assert result.weight_mean == pytest.approx(sum(weights) / len(weights), rel=1e-9)
        assert result.clipped == 0.0
        assert max(weights) == 1.2


@pytest.mark.parametrize("settings", [GrpoSettings(), GrpoSettings(importance_cap=2.0, kl=0.1)])
def test_the_batch_an_answer_was_written_in_leaves_no_trace(settings: GrpoSettings) -> None:
    """The engine's last bits depend on it, and on the clock. What is no round-off still counts."""

    def learned(off: float) -> list[Tensor]:
        model = policy(torch.float32)
        train = replace(ONE_STEP, minibatches=2, epochs=2)
        trainer = PolicyTrainer(model, train, settings, reference=policy(torch.float32))
        assert (trainer.update(experiences(model, off=off)).mismatch_max > 1e-6) == (off > 0)
        return weights_of(model)

    assert_same(learned(2e-5), learned(0.0), rtol=0)
    assert any(not torch.equal(a, b) for a, b in zip(learned(0.1), learned(0.0), strict=True))


def test_two_minibatches_are_two_updates() -> None:
    whole, halves = policy(torch.float64), policy(torch.float64)
    given = experiences(whole)
    result = PolicyTrainer(halves, replace(ONE_STEP, minibatches=2, epochs=2), FREE).update(given)
    assert result.updates == 4
    one_by_one = PolicyTrainer(whole, ONE_STEP, FREE)
    for part in (given[0::2], given[1::2], given[0::2], given[1::2]):
        one_by_one.update(part)
    assert_same(weights_of(halves), weights_of(whole), rtol=1e-9)


# ---- with the engine


def test_the_engines_answers_are_the_trainers_and_good_ones_become_likelier() -> None:
    model = policy(torch.float32)
    engine = EngineCore(model, letters())
    engine.submit(Request(Key(0, i), (5, 6, 7 + i % 2), SamplingParams(max_tokens=12)) for i in range(8))
    answers = sorted(engine.drain(), key=lambda completion: completion.key.request)
    rewards = [1.0 if i % 4 < 2 else -1.0 for i in range(8)]
    given = [
        Experience(Rollout(Prompt(str(i), ""), answer, reward), advantage=reward)
        for i, (answer, reward) in enumerate(zip(answers, rewards, strict=True))
    ]
    trainer = PolicyTrainer(model, replace(ONE_STEP, learning_rate=1e-4), GrpoSettings())
    result = trainer.update(given)
    assert result.mismatch_max < 1e-4
    assert result.entropy > 0
    gained = {1.0: 0.0, -1.0: 0.0}
    for experience in given:
        completion = experience.rollout.completion
        tokens = torch.tensor(completion.prompt_tokens + completion.tokens)
        with torch.no_grad():
            now = plain_logprobs(model, tokens, len(completion.prompt_tokens)).sum().item()
        gained[experience.advantage] += now - sum(completion.policy_logprobs)
    assert gained[1.0] > 0.1
    assert gained[-1.0] < -0.1


# ---- several workers


def test_shares_give_the_numbers_of_one_worker() -> None:
    given = experiences(policy(torch.float64), off=0.1)
    alone = policy(torch.float64)
    train = replace(ONE_STEP, row_tokens=20, minibatches=2)
    lone_result = PolicyTrainer(alone, train, GrpoSettings()).update(given)
    shares = [given[:5], given[5:]]  # unequal, and in its second minibatch one worker has nothing
    models = [policy(torch.float64) for _ in shares]
    results = in_parallel(
        lambda index, add: PolicyTrainer(models[index], train, GrpoSettings(), sum_over_workers=add).update(
            shares[index]
        ),
        len(shares),
    )
    assert results[0].loss == results[1].loss
    # minibatches are cut within each share, so compare where there is one of them
    train = replace(train, minibatches=1)
    alone, models = policy(torch.float64), [policy(torch.float64) for _ in shares]
    lone_result = PolicyTrainer(alone, train, GrpoSettings()).update(given)
    results = in_parallel(
        lambda index, add: PolicyTrainer(models[index], train, GrpoSettings(), sum_over_workers=add).update(
            shares[index]
        ),
        len(shares),
    )
    for model, result in zip(models, results, strict=True):
        assert_same(weights_of(model), weights_of(alone), rtol=1e-9)
        for name in ("loss", "grad_norm", "mismatch_mean", "entropy"):
            assert getattr(result, name) == pytest.approx(getattr(lone_result, name), rel=1e-9)


def in_parallel(work: Callable[[int, Any], UpdateResult], count: int) -> list[UpdateResult]:
    """Threads that meet where workers would exchange tensors."""
    barrier, given, results = threading.Barrier(count, timeout=300), {}, {}

    def run(index: int) -> None:
        def add(tensors: Sequence[Tensor]) -> None:
            given[index] = [tensor.clone() for tensor in tensors]
            barrier.wait()
            for place, tensor in enumerate(tensors):
                tensor.copy_(torch.stack([given[i][place] for i in range(count)]).sum(0))
            barrier.wait()

        results[index] = work(index, add)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[index] for index in range(count)]


# ---- state


@pytest.mark.parametrize("train", [ONE_STEP, replace(ONE_STEP, lora_rank=2)], ids=["all", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_going_on_from_a_state_is_exact(train: TrainSettings, dtype: torch.dtype) -> None:
    """Also for a run that then recomputes activations, as on a smaller GPU."""
    train = replace(train, warmup_steps=2, decay_steps=9, weight_decay=0.1)
    model = policy(dtype)
    given = experiences(model)
    trainer = PolicyTrainer(model, train, FREE)
    for _ in range(3):
        trainer.update(given)
    saved_state, saved_model = copy.deepcopy(trainer.state()), copy.deepcopy(model.state_dict())
    expected = [trainer.update(given) for _ in range(3)]

    resumed_model = policy(dtype, seed=0 if train.lora_rank else 9)
    if not train.lora_rank:  # adapters go on from the policy that they were learned on
        resumed_model.load_state_dict(saved_model)
    resumed = PolicyTrainer(resumed_model, replace(train, checkpoint_activations="always"), FREE)
    resumed.restore(saved_state)
    assert [resumed.update(given) for _ in range(3)] == expected
    for a, b in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_state_with_adapters_wants_adapters() -> None:
    with_adapters = PolicyTrainer(policy(), replace(ONE_STEP, lora_rank=2), GrpoSettings())
    with pytest.raises(ConfigError, match=r"train\.lora_rank is 0"):
        PolicyTrainer(policy(), ONE_STEP, GrpoSettings()).restore(with_adapters.state())


def test_masters_of_half_precision_weights_are_part_of_the_state() -> None:
    def steps(optimizer: MasterAdamW, module: nn.ParameterList, count: int) -> None:
        for _ in range(count):
            for factor in (1.0, 0.5):  # two rows
                module[0].grad = module[0].detach() * factor
                optimizer.gather()
            optimizer.step(1e-4, 1.0, optimizer.norm())

    one = nn.ParameterList([torch.full((3, 2), 0.7, dtype=torch.bfloat16)])
    optimizer = MasterAdamW(one, weight_decay=0.1)
    steps(optimizer, one, 5)
    other = nn.ParameterList([one[0].detach().clone()])
    resumed = MasterAdamW(other, weight_decay=0.1)
    resumed.restore(copy.deepcopy(optimizer.state()))
    steps(optimizer, one, 40)
    steps(resumed, other, 40)
    assert torch.equal(one[0], other[0])
    assert torch.equal(optimizer.state()["masters"][0], resumed.state()["masters"][0])
    assert not torch.equal(one[0].float(), optimizer.state()["masters"][0])  # the rounded weight alone would not do


# ---- adapters


def test_merged_adapters_equal_adapters_beside_the_weights() -> None:
    """The textbook's W·x + s·B·(A·x), with its own gradients, against one merged matrix."""
    model = policy(torch.float64)
    lora = Lora(model, rank=3, alpha=6.0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for b in lora.b:
            b.normal_(0.0, 0.1, generator=generator)
    lora.merge()
    weight, base = model.blocks[1].gate_up, lora._bases[6]
    a, b = (p.detach().clone().requires_grad_() for p in (lora.a[6], lora.b[6]))
    x = torch.randn(7, 32, dtype=torch.float64, generator=generator)
    beside = functional.linear(x, base) + 2.0 * functional.linear(functional.linear(x, a), b)
    merged = functional.linear(x, weight)
    torch.testing.assert_close(merged, beside)
    for _ in range(2):  # gradients of several rows add up
        functional.linear(x, weight).square().sum().backward()  # type: ignore[no-untyped-call]
    (2 * beside.square().sum()).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(lora.a[6].grad, a.grad)
    torch.testing.assert_close(lora.b[6].grad, b.grad)
    assert weight.grad is None


def test_a_rank_above_the_matrices_is_refused() -> None:
    """The smallest side of a matrix of this policy is 32."""
    assert PolicyTrainer(policy(), replace(ONE_STEP, lora_rank=32), FREE).state()["lora"]["a"][0].shape == (32, 32)
    model = policy()
    with pytest.raises(ConfigError, match=r"train\.lora_rank is 33, but the smallest matrix .* has 32 rows or columns"):
        PolicyTrainer(model, replace(ONE_STEP, lora_rank=33), FREE)
    assert all(weight.requires_grad for weight in model.parameters())  # refused before anything was changed


def test_adapters_learn_in_place_and_leave_the_rest_alone() -> None:
    model = policy(torch.float64)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    places = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    trainer = PolicyTrainer(model, replace(ONE_STEP, lora_rank=2), FREE)
    given = experiences(model)
    for _ in range(2):
        result = trainer.update(given)
    assert result.grad_norm > 0
    for name, tensor in model.named_parameters():
        adapted = name.rpartition(".")[2] in ("qkv", "o", "gate_up", "down")
        assert torch.equal(tensor, before[name]) != adapted
        assert tensor.data_ptr() == places[name]
        if adapted:
            rank = torch.linalg.matrix_rank(tensor.detach() - before[name], atol=1e-9)
            assert 1 <= rank <= 2


# ---- what is refused


def test_numbers_that_would_spoil_the_weights_do_not_reach_them() -> None:
    model = policy(torch.float32)
    trainer = PolicyTrainer(model, ONE_STEP, FREE)
    given = experiences(model)
    trainer.update(given)
    before, state = weights_of(model), copy.deepcopy(trainer.state())
    with pytest.raises(TltError, match=r"weights were not touched.*lower train\.learning_rate"):
        trainer.update([replace(given[0], advantage=1e300), replace(given[1], advantage=-1e300)])
    assert_same(weights_of(model), before, rtol=0)
    expected = copy.deepcopy(model)
    fresh = PolicyTrainer(expected, ONE_STEP, FREE)
    fresh.restore(state)
    assert trainer.update(given) == fresh.update(given)  # nothing of the bad step is left


def test_another_policys_answers_are_refused() -> None:
    model = policy(torch.float32)
    before = weights_of(model)
    with pytest.raises(TltError, match=r"differ by \d.*grpo.mismatch_limit.*the engine holds the trainer's weights"):
        PolicyTrainer(model, ONE_STEP, GrpoSettings()).update(experiences(policy(torch.float32, seed=4)))
    assert_same(weights_of(model), before, rtol=0)


def test_settings_that_cannot_be_trained_with_are_refused() -> None:
    model = policy(torch.float32)
    for sampling, complaint in (
        (SamplingParams(temperature=0.0), "all answers of a group are the same"),
        (SamplingParams(temperature=0.7, top_p=0.9), "no unfiltered log-probabilities"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            PolicyTrainer(model, ONE_STEP, GrpoSettings(), sampling=sampling)
    with pytest.raises(ConfigError, match="no reference policy"):
        PolicyTrainer(model, ONE_STEP, GrpoSettings(kl=0.1))
    with pytest.raises(ConfigError, match="train in bfloat16"):
        PolicyTrainer(policy(torch.float16), ONE_STEP, GrpoSettings())


def test_a_misshapen_answer_is_named() -> None:
    model = policy(torch.float32)
    good = experiences(model)[0]
    completion = good.rollout.completion
    for broken, complaint in (
        (replace(completion, policy_logprobs=completion.policy_logprobs[:-1]), "'0'.* 5 tokens and 5 and 4"),
        (replace(completion, policy_logprobs=(math.nan, *completion.policy_logprobs[1:])), "not finite"),
    ):
        with pytest.raises(TltError, match=complaint):
            PolicyTrainer(model, ONE_STEP, GrpoSettings()).update(
                [replace(good, rollout=replace(good.rollout, completion=broken))]
            )
