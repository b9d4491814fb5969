"""Drafter training: the right thing is learned, from answers alone; packing and chunks change nothing."""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from tlt.cli import main
from tlt.config import DraftSettings
from tlt.draft import _not_held_out, draft_export
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.errors import TltError
from tlt.kernels.training import reference as training
from tlt.model.attention import PackedLayout
from tlt.model.linear import rows_of
from tlt.model.transformer import Transformer
from tlt.model.weights import read_config
from tlt.policy import TINY_POLICY
from tlt.spec.align import align
from tlt.spec.candidates import BETAS, GREEDY, DrawKeys, candidates
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.eagle_files import Origin, load_drafter, save_drafter
from tlt.spec.record import FILE, read_record
from tlt.train import drafter_measure
from tlt.train.drafter import (
    RATED_AT,
    DrafterBatch,
    DrafterTrainer,
    distribution_loss,
    drafter_loss,
    policy_states,
    stream_states,
    weigh,
)
from tlt.train.drafter_measure import DEPTH, WIDTHS, DrafterAcceptance, KeyedBatch, accept_length
from tlt.train.packing import Example, pack
from tlt.types import Key, SamplingParams

POLICY = tiny.policy()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = DraftSettings(unroll=3, window=16, single_steps=0)
NARROW = POLICY.config.hidden / RATED_AT  # learning rates below are meant as they stand


def drafter(window: int = 16, draft_vocab: int = 0, dtype: torch.dtype = torch.float64) -> Eagle:
    model = Eagle(EagleConfig.of_policy(POLICY.config, window=window, draft_vocab=draft_vocab), dtype=dtype)
    model.init_weights(0, torch.arange(draft_vocab) * 2 if draft_vocab else None)
    return model


def examples(lengths: Sequence[int], seed: int = 0) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Example(tuple(torch.randint(tiny.VOCAB, (length,), generator=generator).tolist()), 1 + length // 3)
        for length in lengths
    ]


def batch_of(given: Sequence[Example]) -> DrafterBatch:
    (row,) = pack(given, sum(len(example.tokens) for example in given))
    return policy_states(POLICY, row, EagleConfig.of_policy(POLICY.config, window=16).taps)


def loss_of(model: Eagle, batch: DrafterBatch, settings: DraftSettings = SETTINGS) -> tuple[Tensor, int]:
    return drafter_loss(model, batch, POLICY.head_weight, POLICY.embed, settings, settings.unroll)


def fingerprint(model: Transformer) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


# ---- making batches ready


def test_batches_are_made_ready_without_torch() -> None:
    """Which would wake up all its threads, many times a step, while the device waits."""
    given = examples((40, 9, 23))
    with tiny.Seen() as seen:
        (row,) = pack(given, 72)
        weigh(align(row.tokens_T, row.mask_T, row.lengths), SETTINGS, SETTINGS.unroll)
    assert seen.names <= {"detach", "lift_fresh"}
    with tiny.Seen() as seen:
        PackedLayout.from_lengths(row.lengths)
    assert seen.names <= {"detach", "lift_fresh"}


@pytest.mark.parametrize("at_once", [None, 0, 60, 1000])
def test_rows_that_share_a_forward_have_the_states_they_would_have_alone(at_once: int | None) -> None:
    taps = EagleConfig.of_policy(POLICY.config, window=16).taps
    rows = [row for lengths in ((20, 9), (7,), (30, 4, 5), (12,)) for row in pack(examples(lengths), 64)]
    found = list(stream_states(POLICY, rows, taps, at_once))
    for batch, row in zip(found, rows, strict=True):
        alone = policy_states(POLICY, row, taps)
        assert torch.equal(batch.aligned.next_T, alone.aligned.next_T)
        assert batch.aligned.lengths == row.lengths
        torch.testing.assert_close(batch.features_TF, alone.features_TF, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(batch.hidden_TD, alone.hidden_TD, rtol=1e-9, atol=1e-9)
    shared = [batch.features_TF.untyped_storage().data_ptr() for batch in found]
    assert len(set(shared)) == {None: 4, 0: 4, 60: 2, 1000: 1}[at_once]


# ---- the loss


@pytest.mark.parametrize("variation", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("logits_at_once", [1, 700, 10**9])
def test_the_loss_in_chunks_equals_the_definition(variation: float, logits_at_once: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    normed, hidden, head, policy_head = random(12, 8).requires_grad_(), random(5, 8), random(30, 8), random(30, 8)
    row = torch.tensor([[0, 1, 2, 3, 4], [6, 7, 8, 9, 0]])
    weight = torch.tensor([[0.1, 0.2, 0.1, 0.1, 0.1], [0.05, 0.1, 0.2, 0.05, 0.0]], dtype=torch.float64)
    found = distribution_loss(normed, hidden, policy_head, head, row, weight, variation, logits_at_once) * 3
    p, q = (hidden @ policy_head.T).softmax(-1), (normed[row] @ head.T).softmax(-1)
    entropy, distance = -(p * q.log()).sum(-1), 0.5 * (p - q).abs().sum(-1)
    expected = 3 * (weight * ((1 - variation) * entropy + variation * distance)).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, normed), torch.autograd.grad(expected, normed))


@pytest.mark.parametrize("variation", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("width", [37, 5000])
def test_the_fused_comparison_equals_the_plain_one(variation: float, width: int) -> None:
    fused = pytest.importorskip("tlt.kernels.training.triton")
    generator = torch.Generator().manual_seed(0)
    policy = (torch.randn(3, width, generator=generator) * 3).to(DEVICE)
    draft = (torch.randn(2, 3, width, generator=generator) * 3).to(DEVICE)
    weight = torch.rand(2, 3, generator=generator).to(DEVICE)
    expected = training.compare_distributions(policy.double(), draft.double(), weight.double(), variation)
    found = fused.compare_distributions(policy, draft.clone(), weight, variation)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("draft_vocab", [0, 15])
def test_packed_loss_and_gradients_equal_one_by_one(draft_vocab: int) -> None:
    model, given = drafter(draft_vocab=draft_vocab), examples((9, 30, 4, 150, 12))
    packed, named = loss_of(model, batch_of(given))
    packed.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    weights = [step_weight(batch_of([example])) for example in given]
    alone = torch.zeros((), dtype=torch.float64)
    count = 0
    for example, weight in zip(given, weights, strict=True):
        loss, single = loss_of(model, batch_of([example]))
        (loss * weight / sum(weights)).backward()  # type: ignore[no-untyped-call]
        alone += loss.detach() * weight / sum(weights)
        count += single
    assert named == count
    torch.testing.assert_close(packed.detach(), alone, rtol=1e-10, atol=1e-12)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-8, atol=1e-12)


def step_weight(batch: DrafterBatch) -> float:
    """What a sequence's mean loss counts for in a batch: its targets, later draft steps less."""
    reached = batch.aligned.targets(SETTINGS.unroll).reached_SN.sum(1)
    return sum(float(count) * SETTINGS.decay**step for step, count in enumerate(reached))


def test_only_answers_are_learned() -> None:
    """The policy's opinion on a position counts if and only if the token it decides is one of the answer's to draft."""
    model, given = drafter(), examples((12, 15))
    batch = batch_of(given)
    plain = loss_of(model, batch)[0].item()
    learned = set(batch.aligned.targets(SETTINGS.unroll).state_N.tolist())
    # of 15 tokens with an answer from 6 on: 7 … 14 can be drafted, decided by the states of 6 … 13; likewise of 12
    assert learned == {*range(6, 14), *range(15 + 5, 15 + 11)}
    for position in range(27):
        hidden = batch.hidden_TD.clone()
        hidden[position] += 1.0
        changed = loss_of(model, replace(batch, hidden_TD=hidden))[0].item() != plain
        assert changed == (position in learned)


def test_later_draft_steps_count_less() -> None:
    model, batch = drafter(), batch_of(examples((20,)))
    first = loss_of(model, batch, replace(SETTINGS, unroll=1))[0].item()
    steep = loss_of(model, batch, replace(SETTINGS, unroll=3, decay=1e-9))[0].item()
    level = loss_of(model, batch, replace(SETTINGS, unroll=3, decay=1.0))[0].item()
    assert steep == pytest.approx(first, rel=1e-6)
    assert level != pytest.approx(first, rel=1e-6)


def test_a_batch_without_answers_is_refused() -> None:
    with pytest.raises(TltError, match="nothing for a drafter to learn"):
        loss_of(drafter(), batch_of([Example((3, 4, 5), 2)]))


# ---- learning


def telling_batch(policy: Transformer, shift: int, seed: int) -> DrafterBatch:
    """A policy whose state at t tells x_{t+2} and nothing else: tokens are random, so no other state helps.

    `shift` moves the features by so many positions: what a drafter with a wrong alignment would be shown.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = (50, 31, 40)
    tokens = torch.randint(tiny.VOCAB, (sum(lengths),), generator=generator)
    aligned = align(tokens, torch.ones(len(tokens), dtype=torch.bool), lengths)
    told = policy.embed.detach()[tokens.roll(-2)].repeat(1, 3) * 50
    hidden = policy.head_weight.detach()[aligned.next_T] * 3  # the policy itself is sure of the next token
    return DrafterBatch(aligned, told.roll(shift, dims=0), hidden)


def learn(shift: int) -> DrafterAcceptance:
    policy = tiny.policy(torch.float32)
    settings = DraftSettings(steps=50, learning_rate=1e-2 * NARROW, unroll=1, window=16)
    model = drafter(dtype=torch.float32)
    trainer = DrafterTrainer(model, policy.head_weight, policy.embed, settings)
    for step in range(settings.steps):
        trainer.micro_step(telling_batch(policy, shift, step))
    keys = torch.zeros(3, dtype=torch.int64)
    held = KeyedBatch(telling_batch(policy, shift, 999), keys, keys, torch.zeros(3))
    return accept_length(model, [held], policy.head_weight, policy.embed)


def test_the_drafter_learns_what_the_state_tells_and_only_if_rightly_aligned() -> None:
    assert learn(0).greedy.first_hit > 0.97
    for wrong in (-1, 1):
        assert learn(wrong).greedy.first_hit < 0.4


def test_training_touches_no_tensor_of_the_policy_and_may_stop_anywhere() -> None:
    policy = tiny.policy(torch.float32)
    before = fingerprint(policy)
    model = drafter(dtype=torch.float32)
    settings = DraftSettings(steps=8, learning_rate=5e-3 * NARROW, unroll=3, window=16, single_steps=0)
    trainer = DrafterTrainer(model, policy.head_weight, policy.embed, settings)
    (row,) = pack(examples((40, 50)), 90)
    batch = policy_states(policy, row, model.config.taps)
    results = [trainer.micro_step(batch) for _ in range(8)]
    assert results[-1].loss < results[0].loss
    assert (results[0].tokens, trainer.steps_taken) == (90, 8)
    assert fingerprint(policy) == before
    assert policy.embed.grad is None
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.gpu
def test_half_precision_on_a_gpu_learns_what_float32_learns() -> None:
    losses = []
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "cuda")):
        policy = tiny.policy(torch.float32).to(device, dtype)
        model = drafter(dtype=torch.float32).to(device, dtype)
        settings = DraftSettings(steps=40, learning_rate=5e-3 * NARROW, unroll=3, window=16, single_steps=0)
        trainer = DrafterTrainer(model, policy.head_weight, policy.embed, settings)
        (row,) = pack(examples((200, 90, 30)), 320)
        batch = policy_states(policy, row, model.config.taps)
        losses.append([trainer.micro_step(batch).loss for _ in range(40)])
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.03)
    assert losses[0][-1] == pytest.approx(losses[1][-1], rel=0.15)
    assert losses[1][-1] < 0.8 * losses[1][0]


def test_training_starts_with_the_first_draft_token_alone() -> None:
    batch = batch_of(examples((20,)))
    losses = []
    for single, unroll in ((1, 3), (0, 1), (0, 3)):
        settings = replace(SETTINGS, single_steps=single, unroll=unroll)
        trainer = DrafterTrainer(drafter(), POLICY.head_weight, POLICY.embed, settings)
        losses.append([trainer.micro_step(batch).loss for _ in range(2)])
    assert losses[0][0] == losses[1][0] != losses[2][0]
    assert losses[0][1] != losses[1][1]


def test_micro_steps_in_a_stream_are_micro_steps_one_by_one() -> None:
    stream = [batch_of(examples((20, length))) for length in (5, 30, 12)]
    one_by_one, streamed = (
        DrafterTrainer(drafter(), POLICY.head_weight, POLICY.embed, SETTINGS, endless=True) for _ in range(2)
    )
    assert list(streamed.micro_steps(iter(stream))) == [one_by_one.micro_step(batch) for batch in stream]


def test_an_endless_trainer_keeps_its_learning_rate() -> None:
    settings = replace(SETTINGS, steps=2, warmup_steps=0)
    batch = batch_of(examples((20,)))
    rates = []
    for endless in (False, True):
        trainer = DrafterTrainer(drafter(), POLICY.head_weight, POLICY.embed, settings, endless=endless)
        rates.append([trainer.micro_step(batch).learning_rate for _ in range(3)])
    assert rates[1] == pytest.approx([settings.learning_rate / NARROW] * 3)
    assert rates[0][-1] < rates[0][0]


def test_a_spoilt_drafter_is_said_to_be_spoilt() -> None:
    batch = batch_of(examples((20,)))
    batch.features_TF[3] = float("nan")
    trainer = DrafterTrainer(drafter(), POLICY.head_weight, POLICY.embed, SETTINGS)
    with pytest.raises(TltError, match="the training diverged"):
        trainer.micro_step(batch)


# ---- measuring


def test_accept_lengths_are_those_of_drafting_for_real() -> None:
    """Every start of every answer drafted with `extend` and `step` along the true tokens, candidate by candidate."""
    params = SamplingParams(max_tokens=14)
    engine = EngineCore(POLICY, tiny.letters())
    engine.submit([Request(Key(7, number), (5, 9 + number, 3), params) for number in range(3)])
    done = [completion for completion in engine.drain() if len(completion.tokens) > 1]
    given = [Example(c.prompt_tokens + c.tokens, len(c.prompt_tokens)) for c in done]
    model = drafter(window=16, draft_vocab=20)
    with torch.no_grad():
        model.fc.mul_(20)
    (row,) = pack(given, 100)
    batch = policy_states(POLICY, row, model.config.taps)
    requests = torch.tensor([done[member].key.request for member in row.members])
    held = KeyedBatch(batch, torch.full_like(requests, 7), requests, torch.ones(len(requests)))
    found = accept_length(model, [held], POLICY.head_weight, POLICY.embed)
    walked = [walks(model, batch, start, held) for start in starts_of(batch)]
    assert found.tokens == len(walked) > 15
    for beta, reach in ((GREEDY, found.greedy), (1.0, found.shared), (found.beta, found.fitted)):
        ranks = [walk[beta] for walk in walked]
        assert reach.first_hit == pytest.approx(sum(walk[0] == 0 for walk in ranks) / len(ranks))
        for width, length in zip(WIDTHS, reach.lengths, strict=True):
            assert length == pytest.approx(1 + sum(survival(ranks, width, depth) for depth in range(DEPTH)))
    assert found.fitted.first_hit >= max(found.greedy.first_hit, found.shared.first_hit)
    assert len(found.ranks) == DEPTH
    for depth, row in enumerate(found.ranks):
        came = came_to([walk[found.beta] for walk in walked], depth)
        if not came:
            assert depth > 1, "the test must get somewhere to mean anything"
            assert row == found.ranks[depth - 1]
            continue
        assert row == pytest.approx([sum(walk[depth] == rank for walk in came) / len(came) for rank in range(8)])


def came_to(walked: list[list[int]], depth: int) -> list[list[int]]:
    """Of the places with a token so deep, those whose earlier ones a tree of width 8 would have held."""
    return [walk for walk in walked if len(walk) > depth and all(rank < 8 for rank in walk[:depth])]


def test_a_drafter_that_is_always_right_is_recorded_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the depths that answers of four tokens have, and so below them."""

    def right(*given: Any) -> Tensor:
        reached_SN = given[2].reached_SN
        return torch.zeros((len(BETAS), *reached_SN.shape), dtype=torch.int32).masked_fill(~reached_SN, -1)

    monkeypatch.setattr(drafter_measure, "_ranks", right)
    keys = torch.zeros(2, dtype=torch.int64)
    held = KeyedBatch(batch_of([Example((1, 2, 3, 4, 5), 1), Example((5, 4, 3, 2, 1), 1)]), keys, keys, torch.ones(2))
    found = accept_length(drafter(), [held], POLICY.head_weight, POLICY.embed)
    assert found.ranks == ((1.0, *[0.0] * 7),) * DEPTH
    assert found.tokens == 6


@pytest.mark.parametrize("logit", [0.0, float("nan")])
def test_a_drafter_without_opinions_is_not_taken_for_a_perfect_one(logit: float) -> None:
    """All logits are equal, or none is a number: only where the policy wrote token 0 is that the token named first."""
    model = drafter()
    with torch.no_grad():
        model.norm.fill_(logit)
    keys = torch.zeros(1, dtype=torch.int64)
    held = KeyedBatch(batch_of([Example((7, 3, 0, 9, 0, 5, 2, 0, 4), 1)]), keys, keys, torch.ones(1))
    found = accept_length(model, [held], POLICY.head_weight, POLICY.embed)
    zeros, places = 3, 7  # among the tokens after the answer's first
    assert found.tokens == places
    assert found.greedy.first_hit == pytest.approx(0.0 if logit else zeros / places)
    assert found.greedy.lengths[0] < 2


def test_the_table_by_hand() -> None:
    """Three places: ranks 1, 2 and a miss at depth 1; of the two that go on, rank 1 and none of eight."""
    followed = drafter_measure._Followed(3)
    rank_ST = torch.tensor([[0, 1, 8], [0, 99, 0], [-1, 0, 0]])
    for part in (rank_ST[:, :2], rank_ST[:, 2:]):  # batches are pooled
        rank_BST = part.repeat(len(BETAS), 1, 1)
        rank_BST[BETAS.index(GREEDY)] = 8
        followed.see(rank_BST)
    first, second, third = followed.ranks(1.0)
    assert first == pytest.approx([1 / 3, 1 / 3, *[0.0] * 6])
    assert second == pytest.approx([1 / 2, *[0.0] * 7])
    assert third == second, "nobody came there with a token to name"
    assert followed.ranks(GREEDY) == ((0.0,) * 8,) * 3


def starts_of(batch: DrafterBatch) -> list[int]:
    targets = batch.aligned.targets(1)
    return targets.entry_SN[0][targets.reached_SN[0]].tolist()


def survival(walked: list[list[int]], width: int, depth: int) -> float:
    """How many of the drafts that could reach a depth did."""
    long_enough = [walk for walk in walked if len(walk) > depth]
    return sum(all(rank < width for rank in walk[: depth + 1]) for walk in long_enough) / max(1, len(long_enough))


def walks(model: Eagle, batch: DrafterBatch, entry: int, held: KeyedBatch) -> dict[float, list[int]]:
    """For every β: at each depth, the candidates named before the policy's token; all of them if it is none."""
    aligned = batch.aligned
    sequence = int((torch.tensor(aligned.lengths).cumsum(0) <= entry).sum())
    end = sum(aligned.lengths[: sequence + 1])
    first = entry - int(aligned.index_T[entry])
    ring, nodes = model.new_ring(1), model.new_nodes(1, DEPTH)
    part, count = slice(first, entry + 1), torch.tensor([entry + 1 - first])
    new = tiny.new_positions(count * 0, count, int(count))
    g = model.extend(ring, aligned.next_T[part], batch.features_TF[part], new, POLICY.embed)
    found: dict[float, list[int]] = {beta: [] for beta in BETAS}
    for depth in range(min(DEPTH, end - 2 - entry)):
        if depth:
            seen, slot = (torch.arange(DEPTH) < depth)[None, None], torch.tensor([[depth - 1]])
            token, position = aligned.next_T[None, entry + depth, None], (count - 1 + depth)[None]
            g = rows_of(model.step(ring, nodes, token, g[:, None], position, slot, seen, POLICY.embed))
        logits = model.logits(g, model.head_rows(POLICY.head_weight))
        place = torch.tensor([entry + 2 + depth - first])  # of the token to be named
        keys = DrawKeys(held.seed_C[:1], held.request_C[sequence, None], place, torch.ones(1))
        true = int(aligned.next_T[entry + 1 + depth])
        for beta in BETAS:
            named = candidates(logits, keys, beta, max(WIDTHS), model.token_of_draft_v).token_Nk[0].tolist()
            found[beta].append(named.index(true) if true in named else len(named))
    return found


# ---- the verb


def test_a_drafter_is_trained_saved_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"answers": 6, "held_out": 3, "steps": 2, "tokens_per_batch": 128, "vocab": 16, "window": 64}
    knobs = [f"--draft.{name}={value}" for name, value in small.items()]
    there = str(tmp_path / "drafter")
    assert (
        main(
            [
                "draft",
                "train",
                "tiny",
                "--prompts",
                "toy",
                "--out",
                there,
                *knobs,
                "--sampling.max_tokens=24",
                "--engine.kv_gib=0.01",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "Accept length over 8 draft tokens" in said
    assert "greedy" in said
    for form in ("flat", "speculators"):
        assert main(["draft", "export", there, str(tmp_path / form), "--format", form]) == 0
    config = read_config(TINY_POLICY)
    record = read_record(there)
    assert record is not None
    assert f"{record.places} places of held-out answers" in said
    assert (len(record.ranks), len(record.ranks[0]), record.temperature) == (DEPTH, max(WIDTHS), 1.0)
    assert all(read_record(tmp_path / form) == record for form in ("flat", "speculators"))
    (tmp_path / "flat" / FILE).unlink()
    knobs.remove("--draft.answers=6")  # the file says from how many prompts it learned
    rest = ["--prompts", "toy", *knobs, "--sampling.max_tokens=24", "--engine.kv_gib=0.01"]
    assert main(["draft", "measure", str(tmp_path / "flat"), *rest]) == 0
    measured = read_record(tmp_path / "flat")
    assert measured == record, "on the same answers, which it did not learn from"
    assert f"{record.places} places of held-out answers" in capsys.readouterr().out
    assert main(["draft", "measure", str(tmp_path / "flat"), *rest, "--draft.held_out=1"]) == 0
    assert f"has a record of {record.places} places already" in capsys.readouterr().out
    assert read_record(tmp_path / "flat") == record, "one of fewer places does not replace it"
    unknown = tmp_path / "flat" / "config.json"
    words = json.loads(unknown.read_text())
    unknown.write_text(json.dumps({**words, "tlt": {**words["tlt"], "learned_prompts": 0}}))
    more = [flag for flag in rest if "held_out" not in flag]
    assert main(["draft", "measure", str(tmp_path / "flat"), *more, "--draft.held_out=9"]) == 0
    said = capsys.readouterr().out
    assert "does not say how many of these prompts it learned from" in said
    assert "give draft.answers, or remove" in said
    assert read_record(tmp_path / "flat") == record, "nor does one of answers that may not be held out"
    assert main(["draft", "measure", str(tmp_path / "flat"), *more, "--draft.held_out=9", "--draft.answers=6"]) == 0
    larger = read_record(tmp_path / "flat")
    assert larger is not None
    assert larger.places > record.places
    unknown.write_text(json.dumps(words))
    saved, *exported = (load_drafter(tmp_path / name, config, window=64) for name in ("drafter", "flat", "speculators"))
    assert saved.config.draft_vocab == 16
    for other in exported:
        assert other.config == saved.config
        for name, tensor in saved.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name


def test_a_few_prompts_asked_again_are_not_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever trains on one prompt is told that what is measured is no measure; so is whoever measures on it."""
    one = tmp_path / "one.jsonl"
    one.write_text('{"prompt": "3+4="}\n')
    small = ["--draft.answers=4", "--draft.held_out=2", "--sampling.max_tokens=16", "--draft.tokens_per_batch=64"]
    there = str(tmp_path / "drafter")
    warning = "2 of the 2 held-out answers are to prompts that are learned from, too"
    assert main(["draft", "train", "tiny", "--prompts", str(one), *small, "--draft.steps=1", "--out", there]) == 0
    said = capsys.readouterr().out
    assert f"{warning}: what is measured on them says nothing of other prompts" in said
    assert "Give 6 different prompts (there is 1), or lower draft.answers and draft.held_out" in said
    record = read_record(there)
    (Path(there) / FILE).unlink()
    assert main(["draft", "measure", there, "--prompts", str(one), *small]) == 0
    assert f"no record of this is kept: {warning}" in capsys.readouterr().out
    assert read_record(there) is None
    assert record is not None
    assert main(["draft", "measure", there, "--prompts", "toy", *small]) == 0
    assert "held-out answers are to prompts" not in capsys.readouterr().out


def test_some_prompts_are_asked_twice_and_many_are_told() -> None:
    learned = [(1, n) for n in range(20)]
    assert _not_held_out(learned, [(2, n) for n in range(10)]) == ""
    assert _not_held_out(learned, [(1, 0), *((2, n) for n in range(9))]) == ""
    assert "2 of the 10 held-out" in _not_held_out(learned, [(1, 0), (1, 1), *((2, n) for n in range(8))])
    assert "(there are 28)" in _not_held_out(learned, [(1, 0), (1, 1), *((2, n) for n in range(8))])


def test_a_narrower_drafter_is_trained_saved_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--draft.answers=4", "--draft.held_out=2", "--sampling.max_tokens=16", "--draft.tokens_per_batch=64"]
    narrow = str(tmp_path / "narrow")
    train = ["draft", "train", "tiny", "--prompts", "toy", *small, "--draft.steps=2", "--draft.mlp=0.25"]
    assert main([*train, "--out", narrow]) == 0
    policy = read_config(TINY_POLICY)
    drafter = load_drafter(narrow, policy, window=16)
    assert drafter.config.layer.mlp == policy.mlp // 4 == drafter.down.shape[1]
    capsys.readouterr()
    generate = ["generate", "tiny", "3+4=", "--raw", "--sampling.max_tokens=12"]
    answers = []
    for spec in ([], ["--spec.drafter=eagle", f"--spec.path={narrow}", "--spec.chooser=fixed"]):
        assert main([*generate, *spec]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["draft", "improve", "tiny"], "tlt draft knows train, measure, export, not 'improve'"),
        (["draft", "train", "tiny", "--out", "x"], "tlt draft train needs --prompts"),
        (
            ["draft", "train", "tiny", "--prompts", "toy", "--out", __file__],
            "is there already, and nothing is written over",
        ),
        (["draft", "measure", "x"], "tlt draft measure needs --prompts"),
        (["draft", "measure", "nowhere", "--prompts", "toy"], "no drafter at nowhere"),
        (["draft", "export", "x"], "tlt draft export needs TARGET"),
        (["draft", "export", "nowhere", "x"], "no drafter at nowhere"),
        (["draft", "export", "nowhere", "x", "--format", "gguf"], "--format is 'gguf'; expected flat or speculators"),
        (["draft", "train", "tiny", "--prompts", "none.jsonl", "--out", "x"], "none.jsonl: no such file"),
        (["draft", "train", "tiny", "--prompts", "toy", "--out", "x", "--draft.window=3"], "draft.window is 3"),
        (["draft", "train", "tiny", "--prompts", "toy", "--out", "x", "--draft.mlp=0"], "draft.mlp is 0"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    assert main(arguments) in (1, 2)
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["train", "tiny", "--prompts", "toy", "--out", "{}"], "--out"), (["export", "x", "{}"], "TARGET")],
)
def test_what_a_directory_holds_is_never_written_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    named: str,
) -> None:
    monkeypatch.setattr("tlt.draft.open_policy", lambda _: pytest.fail("work was done first"))
    monkeypatch.setattr("tlt.draft.read_drafter_config", lambda _: {"tlt": {"policy": "tiny"}})
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "model.safetensors").write_bytes(b"dear")
    assert main(["draft", *(word.format(kept) for word in arguments)]) == 2
    assert f"{named} {kept} is there already, and nothing is written over" in capsys.readouterr().err
    assert [file.read_bytes() for file in kept.iterdir()] == [b"dear"]


def test_a_drafter_that_cannot_be_saved_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is elsewhere, and the error says where."""

    def half(learned: Eagle, path: Path, *words: Any, **more: Any) -> None:
        if path.parent == tmp_path:
            path.mkdir()
            (path / "config.json").write_text("{")
            raise OSError("the disk is full")
        save_drafter(learned, path, *words, **more)

    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    save_drafter(drafter(), source, POLICY.head_weight, Origin("tiny", ()))
    monkeypatch.setattr("tlt.draft.save_drafter", half)
    monkeypatch.setattr("tlt.draft.open_policy", lambda _: SimpleNamespace(model=POLICY))
    with pytest.raises(TltError, match=r"target cannot be written \(the disk is full\); it is at .* instead") as caught:
        draft_export(str(source), str(tmp_path / "target"), "flat", None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["elsewhere", "source"]
    (kept,) = elsewhere.glob("*/target")
    assert str(kept) in str(caught.value)
    assert (kept / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_drafter_is_saved_beside_you_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[str] = []
    monkeypatch.setattr("tlt.draft.draft_train", lambda config, prompts, out, **_: saved.append(out))
    assert main(["draft", "train", "models/smollm2/", "--prompts", "toy"]) == 0
    assert saved == ["smollm2-drafter"]
