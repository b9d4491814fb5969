"""The learned drafter: one attention in three forms, one alignment, the sampler's own noise, and a fitted sharpness."""

import copy
import math
from collections.abc import Sequence
from typing import get_args

import pytest
import tiny
import torch
from torch import Tensor

from tlt.config import DrafterArchitecture
from tlt.engine import sampler
from tlt.errors import ModelError, TltError
from tlt.kernels.batch_state.reference import UNUSED
from tlt.kernels.linear import plan as linear_table
from tlt.model.config import ModelConfig
from tlt.model.linear import rows_of
from tlt.spec.align import UNKNOWN, Aligned, align
from tlt.spec.candidates import BETAS, GREEDY, BetaCalibrator, DrawKeys, beta_hits, candidates
from tlt.spec.eagle import Eagle, EagleConfig, draft_vocabulary, taps
from tlt.types import Key, SamplingParams

POLICY = tiny.policy()
EMBED = POLICY.embed.detach()
HIDDEN = POLICY.config.hidden
EXACT = {"rtol": 1e-9, "atol": 1e-9}
ROUNDED = {"rtol": 1e-6, "atol": 1e-5}  # log-probabilities of -10 and above, from some hundred terms of float32


ARCHITECTURES = get_args(DrafterArchitecture)


def drafter(
    window: int, *, seed: int = 0, draft_vocab: int = 0, architecture: DrafterArchitecture = "eagle-3"
) -> Eagle:
    """Random, with weights large enough that who sees whom shows."""
    shape = EagleConfig.of_policy(POLICY.config, window=window, draft_vocab=draft_vocab, architecture=architecture)
    model = Eagle(shape, dtype=torch.float64)
    ids = torch.arange(draft_vocab) * (tiny.VOCAB // draft_vocab) if draft_vocab else None
    model.init_weights(seed, ids)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6.0)
        if model.fc_norm is not None:
            model.fc_norm.copy_(torch.linspace(0.5, 1.5, len(model.fc_norm)))
    return model


def sequences(lengths: Sequence[int], seed: int = 0) -> tuple[Aligned, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    tokens = torch.randint(tiny.VOCAB, (total,), generator=generator)
    features = torch.randn(total, 3 * HIDDEN, dtype=torch.float64, generator=generator)
    return align(tokens, torch.ones(total, dtype=torch.bool), lengths), features


# ---- shape and values


def test_the_taps_are_those_of_the_serving_engines() -> None:
    for layers in range(7, 80):
        assert taps(policy_of(layers)) == (2, layers // 2, layers - 3)


@pytest.mark.parametrize("layers", range(2, 9))
def test_the_taps_of_a_shallow_policy_differ(layers: int) -> None:
    found = taps(policy_of(layers))
    assert sorted(set(found)) == list(found)
    assert found[0] >= 0
    assert found[-1] <= layers


def test_one_layer_is_too_few() -> None:
    with pytest.raises(ModelError, match="the policy has 1 layer"):
        taps(policy_of(1))


def policy_of(layers: int) -> ModelConfig:
    source = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": 64, "num_attention_heads": 4}
    return ModelConfig.from_hf(source)


def test_values_come_from_a_seed_or_not_at_all() -> None:
    first, again, other = drafter(8), drafter(8), drafter(8, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.fc, other.fc)


def test_the_head_is_the_policys_own() -> None:
    head = POLICY.head_weight
    assert drafter(8).head_rows(head) is head
    reduced = drafter(8, draft_vocab=10)
    assert reduced.token_of_draft_v is not None
    assert torch.equal(reduced.head_rows(head), head[reduced.token_of_draft_v])
    assert not reduced.head_rows(head).requires_grad
    assert not {"embed", "head"} & {name for name, _ in reduced.named_parameters()}


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    assert draft_vocabulary(torch.tensor([5, 0, 9, 5, 1, 5]), 3).tolist() == [0, 2, 3]


@pytest.mark.parametrize("ids", [None, [0, 1], [0, 2, 1], [0, 1, 1], [0, 1, 40], [-1, 0, 1]])
def test_a_reduced_vocabulary_must_be_named_rightly(ids: list[int] | None) -> None:
    model = Eagle(EagleConfig.of_policy(POLICY.config, window=8, draft_vocab=3))
    with pytest.raises(ModelError):
        model.init_weights(0, None if ids is None else torch.tensor(ids))


# ---- the alignment


def test_alignment_by_hand() -> None:
    # two sequences: a b | C D E and f | G; capitals are the answer, the second one's last token G was only drawn
    tokens = torch.tensor([10, 11, 12, 13, 14, 20])
    found = align(tokens, torch.tensor([0, 0, 1, 1, 1, 0]).bool(), (5, 1), torch.tensor([UNKNOWN, 21]))
    assert found.next_T.tolist() == [11, 12, 13, 14, 0, 21]
    assert found.learn_T.tolist() == [False, True, True, True, False, True]
    assert found.index_T.tolist() == [0, 1, 2, 3, 4, 0]
    targets = found.targets(3)
    # D from (C, states of b) at once, E from (D, states of C) at once or from (C, states of b) in the next draft step
    assert targets.state_N.tolist() == [2, 3]
    assert targets.entry_SN[targets.reached_SN].tolist() == [1, 2, 1]
    assert targets.reached_SN.tolist() == [[True, True], [False, True], [False, False]]


def test_packing_and_truncation_shift_nothing() -> None:
    """Whatever lies beside a sequence, and wherever its states begin, an entry keeps its token and its target."""
    tokens = torch.randint(tiny.VOCAB, (12,), generator=torch.Generator().manual_seed(0))
    learn = torch.arange(12) >= 5
    whole = align(tokens, learn, (12,))
    beside = align(torch.cat((tokens[:3], tokens, tokens[:4])), torch.cat((learn[:3], learn, learn[:4])), (3, 12, 4))
    cut = align(tokens[4:11], learn[4:11], (7,), tokens[11:12])  # as online: from the last prompt token, the end drawn
    for steps in (1, 4):
        assert pairs(beside, steps, 3) >= pairs(whole, steps, 0)
        assert pairs(cut, steps, -4) == {pair for pair in pairs(whole, steps, 0) if pair[1] >= 4}
    assert torch.equal(beside.next_T[3:15], whole.next_T)
    assert torch.equal(cut.next_T, whole.next_T[4:11])


def pairs(aligned: Aligned, steps: int, offset: int) -> set[tuple[int, int, int, int]]:
    """(draft step, entry, state that decides, token named), positions counted from `offset`."""
    targets = aligned.targets(steps)
    return {
        (step, int(targets.entry_SN[step, n]) - offset, int(state) - offset, int(aligned.next_T[state]))
        for step in range(steps)
        for n, state in enumerate(targets.state_N)
        if targets.reached_SN[step, n]
    }


def test_what_does_not_line_up_is_refused() -> None:
    tokens = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(TltError, match="4 tokens and 4 marks"):
        align(tokens, torch.ones(4, dtype=torch.bool), (3,))
    with pytest.raises(TltError, match="no empty sequence"):
        align(tokens, torch.ones(4, dtype=torch.bool), (4, 0))


# ---- training form


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("window", "lengths"), [(7, (30, 5, 1, 21)), (40, (150, 3, 131)), (512, (9, 260))])
def test_blocks_equal_dense_attention(window: int, lengths: tuple[int, ...], architecture: DrafterArchitecture) -> None:
    model, steps = drafter(window, architecture=architecture), 4
    aligned, features = sequences(lengths)
    found, expected = model.unroll(aligned, features, EMBED, steps), dense_unroll(model, aligned, features, steps)
    usable = usable_entries(aligned, steps)
    weight = torch.randn(len(features), HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    total = [sum((g[ok] * weight[ok]).sum() for g, ok in zip(gs, usable, strict=True)) for gs in (found, expected)]
    for g, reference, ok in zip(found, expected, usable, strict=True):
        torch.testing.assert_close(g[ok], reference[ok], **EXACT)
    in_g = model.config.norm_output
    weights = [value for name, value in model.named_parameters() if in_g or name != "norm"]
    gradients = [torch.autograd.grad(value, weights) for value in total if isinstance(value, Tensor)]
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, **EXACT)


def usable_entries(aligned: Aligned, steps: int) -> list[Tensor]:
    """Entries whose draft step s still has a true token to read."""
    sizes = torch.tensor(aligned.lengths)
    left = torch.repeat_interleave(sizes, sizes) - aligned.index_T - 1
    return [left > step for step in range(steps)]


def dense_unroll(model: Eagle, aligned: Aligned, features: Tensor, steps: int) -> list[Tensor]:
    """The definition: all scores of all positions, and a mask."""
    count, heads = len(features), model.heads
    sizes = torch.tensor(aligned.lengths)
    sequence = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    back = torch.arange(count)[:, None] - torch.arange(count)[None, :]
    if model.fc_norm is not None:
        features = torch.cat([normed(tap) for tap in features.split(HIDDEN, -1)], -1) * model.fc_norm
    state, out, chain_k, chain_v = features @ model.fc.T, [], [], []
    k0 = v0 = state
    for step in range(steps):
        token = model._normed_tokens(aligned.next_T.roll(-step), EMBED)
        q, k, v = model._project(token, state, aligned.index_T + step)
        k, v = (x.repeat_interleave(heads.query // heads.kv, dim=1) for x in (k, v))
        if step == 0:
            k0, v0 = k, v
        else:
            chain_k.append(k)
            chain_v.append(v)
        seen = (sequence[:, None] == sequence[None, :]) & (back >= 0) & (back + step < model.config.window)
        scores = torch.einsum("thd,jhd->thj", q, k0).masked_fill(~seen[:, None], -math.inf)
        own = [(q * key).sum(-1, keepdim=True) for key in chain_k]
        weights = (torch.cat((scores, *own), dim=-1) * heads.scale).softmax(-1)
        attended = torch.einsum("thj,jhd->thd", weights[..., :count], v0)
        for place, value in enumerate(chain_v):
            attended = attended + weights[..., count + place, None] * value
        state = model._finish(attended.flatten(1), state)
        out.append(state)
    return out


def normed(x_TD: Tensor) -> Tensor:
    return x_TD / (x_TD.square().mean(-1, keepdim=True) + POLICY.config.norm_eps).sqrt()


def test_g_is_normed_once() -> None:
    """EAGLE-3.1: the next draft step reads what the LM head reads."""
    aligned, features = sequences((9,))
    old, new = drafter(8), drafter(8, architecture="eagle-3.1")
    with torch.no_grad():
        for model in (old, new):
            model.norm.copy_(torch.linspace(0.5, 1.5, HIDDEN))
        new.load_state_dict(old.state_dict(), strict=False)
        new.fc_norm.fill_(1.0)
        taps_normed = torch.cat([normed(tap) for tap in features.split(HIDDEN, -1)], -1)
        g_old, g_new = old.unroll(aligned, taps_normed, EMBED, 2), new.unroll(aligned, features, EMBED, 2)
    torch.testing.assert_close(g_new[0], normed(g_old[0]) * old.norm, **EXACT)
    torch.testing.assert_close(new.logits(g_new[0], EMBED), old.logits(g_old[0], EMBED), **EXACT)
    assert not torch.allclose(g_new[1], normed(g_old[1]) * old.norm, rtol=1e-3)


def test_packed_equals_alone() -> None:
    model, lengths = drafter(16), (40, 7, 133)
    aligned, features = sequences(lengths)
    packed = model.unroll(aligned, features, EMBED, 3)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        learn = torch.ones(length, dtype=torch.bool)
        tokens = torch.cat((torch.zeros(1, dtype=torch.int64), aligned.next_T[part][:-1]))
        alone = model.unroll(align(tokens, learn, (length,)), features[part], EMBED, 3)
        for step in range(3):
            usable = length - 1 - step
            torch.testing.assert_close(packed[step][part][:usable], alone[step][:usable], **EXACT)
        start += length


def test_a_draft_may_be_longer_than_all_there_is() -> None:
    model = drafter(16)
    aligned, features = sequences((2,))
    for found, right in zip(
        model.unroll(aligned, features, EMBED, 6), dense_unroll(model, aligned, features, 6), strict=True
    ):
        torch.testing.assert_close(found, right, **EXACT)


def test_the_residual_is_the_state_itself() -> None:
    """With a layer that adds nothing, g is the fused state, un-normed."""
    model = drafter(8)
    with torch.no_grad():
        model.o.zero_()
        model.down.zero_()
    aligned, features = sequences((6,))
    torch.testing.assert_close(model.unroll(aligned, features, EMBED, 1)[0], features @ model.fc.T, **EXACT)


# ---- rollout form


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("window", [5, 12, 64])
def test_extending_row_by_row_equals_the_packed_forward(window: int, architecture: DrafterArchitecture) -> None:
    """Rows of different lengths take in pieces of different sizes, some of them nothing, round the ring and round."""
    model, lengths = drafter(window, architecture=architecture), (41, 23, 30)
    aligned, features = sequences(lengths)
    expected = model.unroll(aligned, features, EMBED, 1)[0]
    starts = [0, 41, 64]
    ring, done = model.new_ring(len(lengths)), [0, 0, 0]
    draw = torch.Generator().manual_seed(2)
    while min(left := [size - at for size, at in zip(lengths, done, strict=True)]) > 0 or max(left) > 0:
        width = int(torch.randint(1, 9, (1,), generator=draw))
        counts = [min(more, int(torch.randint(0, width + 1, (1,), generator=draw))) for more in left]
        last = extend(model, ring, aligned, features, starts, done, counts, width)
        done = [at + count for at, count in zip(done, counts, strict=True)]
        for row, count in enumerate(counts):
            if count:
                torch.testing.assert_close(last[row], expected[starts[row] + done[row] - 1], **EXACT)


def extend(
    model: Eagle,
    ring: object,
    aligned: Aligned,
    features: Tensor,
    starts: Sequence[int],
    done: Sequence[int],
    counts: Sequence[int],
    width: int,
) -> Tensor:
    """One `extend` of `counts` positions per row, padded to `width` with rubbish."""
    rows = len(counts)
    tokens = torch.full((rows, width), 3)
    states = torch.full((rows, width, features.shape[1]), 7.0, dtype=torch.float64)
    for row, count in enumerate(counts):
        part = slice(starts[row] + done[row], starts[row] + done[row] + count)
        tokens[row, :count], states[row, :count] = aligned.next_T[part], features[part]
    new = tiny.new_positions(torch.tensor(done), torch.tensor(counts), width)
    return model.extend(ring, tokens.flatten(), states.flatten(0, 1), new, EMBED)  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("taken", [3, 11, 26])
def test_drafting_along_the_true_tokens_equals_the_unrolled_training(
    taken: int, architecture: DrafterArchitecture
) -> None:
    """`step` after `step` gives what training saw in draft steps 1, 2, …, whether or not the ring has wrapped."""
    model, depth = drafter(8, architecture=architecture), 4
    aligned, features = sequences((34, 34))
    unrolled = model.unroll(aligned, features, EMBED, depth + 1)
    ring, nodes = model.new_ring(2), model.new_nodes(2, depth)
    starts, entry = [0, 34], torch.tensor([0, 34]) + taken - 1
    g = extend(model, ring, aligned, features, starts, [0, 0], [taken, taken], taken)
    torch.testing.assert_close(g, unrolled[0][entry], **EXACT)
    for step in range(1, depth + 1):
        seen = (torch.arange(depth) < step).expand(2, 1, -1)
        slot, position = torch.full((2, 1), step - 1), torch.full((2, 1), taken - 1 + step)
        token = aligned.next_T[entry + step][:, None]
        g = rows_of(model.step(ring, nodes, token, g[:, None], position, slot, seen, EMBED))
        torch.testing.assert_close(g, unrolled[step][entry], **EXACT)


def test_a_node_sees_its_ancestors_and_nobody_else() -> None:
    """A tree drafted frontier by frontier equals each of its branches drafted alone."""
    model, taken = drafter(8), 13
    aligned, features = sequences((20,))
    branches = [(4, 9, 2), (4, 9, 7), (11, 1, 5)]  # the first two share a beginning
    alone = [draft_branch(model, aligned, features, taken, branch) for branch in branches]
    frontiers = [[(4,), (11,)], [(4, 9), (11, 1)], [(4, 9, 2), (4, 9, 7), (11, 1, 5)]]
    order = [path for frontier in frontiers for path in frontier]
    ring, nodes = model.new_ring(1), model.new_nodes(1, len(order))
    root = extend(model, ring, aligned, features, [0], [0], [taken], taken)
    states: dict[tuple[int, ...], Tensor] = {(): root[0]}
    for depth, frontier in enumerate(frontiers, start=1):
        seen = torch.tensor([[path[: len(other)] == other for other in order] for path in frontier])
        g = model.step(
            ring,
            nodes,
            torch.tensor([[path[-1] for path in frontier]]),
            torch.stack([states[path[:-1]] for path in frontier])[None],
            torch.full((1, len(frontier)), taken - 1 + depth),
            torch.tensor([[order.index(path) for path in frontier]]),
            seen[None],
            EMBED,
        )
        states.update(zip(frontier, rows_of(g), strict=True))
    for branch, expected in zip(branches, alone, strict=True):
        for depth in range(1, 4):
            torch.testing.assert_close(states[branch[:depth]], expected[depth - 1], **EXACT)


def draft_branch(model: Eagle, aligned: Aligned, features: Tensor, taken: int, branch: tuple[int, ...]) -> list[Tensor]:
    ring, nodes, found = model.new_ring(1), model.new_nodes(1, len(branch)), []
    g = extend(model, ring, aligned, features, [0], [0], [taken], taken)
    for depth, token in enumerate(branch, start=1):
        seen = (torch.arange(len(branch)) < depth)[None, None]
        position, slot = torch.tensor([[taken - 1 + depth]]), torch.tensor([[depth - 1]])
        g = rows_of(model.step(ring, nodes, torch.tensor([[token]]), g[:, None], position, slot, seen, EMBED))
        found.append(g[0])
    return found


def test_a_row_that_starts_afresh_forgets() -> None:
    model = drafter(8)
    aligned, features = sequences((9, 6))
    ring = model.new_ring(1)
    extend(model, ring, aligned, features, [0], [0], [9], 9)
    ring.position_RW[0] = UNUSED
    g = extend(model, ring, aligned, features, [9], [0], [5], 5)
    torch.testing.assert_close(g[0], model.unroll(aligned, features, EMBED, 1)[0][9 + 4], **EXACT)


# ---- candidates


def keys_of(count: int, temperature: float = 1.0, seed: int = 5) -> DrawKeys:
    return DrawKeys(
        torch.full((count,), seed),
        torch.arange(count),
        torch.arange(count) % 7 + 3,
        torch.full((count,), temperature),
    )


def drawn_by_the_policy(logits: Tensor, keys: DrawKeys) -> Tensor:
    rows = sampler.SamplingRows.of(
        [Key(int(seed), int(request)) for seed, request in zip(keys.seed_N, keys.request_N, strict=True)],
        keys.position_N.tolist(),
        [SamplingParams(temperature=float(t)) for t in keys.temperature_N],
    )
    return sampler.sample(logits, rows).token_R


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_a_perfect_drafter_names_the_token_the_sampler_draws(temperature: float) -> None:
    logits = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) * 3
    keys = keys_of(200, temperature)
    found = candidates(logits, keys, 1.0, 4)
    assert torch.equal(found.token_Nk[:, 0], drawn_by_the_policy(logits, keys))


def test_without_noise_the_largest_logits_are_named() -> None:
    logits = torch.randn(50, 80, generator=torch.Generator().manual_seed(0))
    for found in (candidates(logits, keys_of(50), GREEDY, 5), candidates(logits, keys_of(50, 0.0), 1.0, 5)):
        assert torch.equal(found.token_Nk, logits.topk(5).indices)
        torch.testing.assert_close(found.score_Nk, logits.log_softmax(-1).topk(5).values, **ROUNDED)
    assert not torch.equal(candidates(logits, keys_of(50), 1.0, 5).token_Nk, logits.topk(5).indices)


def test_sharpness_weighs_the_logits_against_the_noise() -> None:
    logits = torch.randn(50, 80, generator=torch.Generator().manual_seed(0))
    found, expected = candidates(logits, keys_of(50), 3.0, 5), candidates(logits * 3.0, keys_of(50), 1.0, 5)
    assert torch.equal(found.token_Nk, expected.token_Nk)
    torch.testing.assert_close(found.score_Nk, expected.score_Nk, **ROUNDED)
    tensor = candidates(logits, keys_of(50), torch.tensor(3.0), 5)
    assert torch.equal(tensor.token_Nk, found.token_Nk)


def test_a_reduced_vocabulary_hears_the_noise_of_its_own_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(60, 300, generator=generator), torch.randperm(300, generator=generator)[:40].sort().values
    masked = torch.full_like(logits, -math.inf)
    masked[:, ids] = logits[:, ids]
    found, full = candidates(logits[:, ids], keys_of(60), 1.4, 6, ids), candidates(masked, keys_of(60), 1.4, 6)
    assert torch.equal(found.token_Nk, full.token_Nk)
    torch.testing.assert_close(found.score_Nk, full.score_Nk, **ROUNDED)


def test_scores_are_log_probabilities_in_falling_order() -> None:
    logits = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    score = candidates(logits, keys_of(30), 1.0, 20).score_Nk
    assert bool((score[:, :-1] >= score[:, 1:]).all())
    torch.testing.assert_close(score.exp().sum(-1), torch.ones(30), **ROUNDED)


# ---- sharpness

# What the drafter believes, given the policy's logits: right, too flat, too sharp, and right but blurred.
DRAFTERS = {
    "calibrated": lambda logits, blur: logits,
    "flat": lambda logits, blur: logits * 0.3 + 0.2 * blur,
    "sharp": lambda logits, blur: logits * 2.5,
    "blurred": lambda logits, blur: logits + 0.8 * blur,
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_sharpness_is_never_worse_than_greedy_or_plain_noise(kind: str) -> None:
    generator, sharpness = torch.Generator().manual_seed(3), BetaCalibrator()
    hits = {"fitted": 0, "greedy": 0, "plain": 0}
    for tick in range(60):
        logits = torch.randn(100, 50, generator=generator) * 2.5
        keys = keys_of(100, seed=tick)
        named = DRAFTERS[kind](logits, torch.randn(100, 50, generator=generator))
        found = beta_hits(named, keys, drawn_by_the_policy(logits, keys)).sum(0).tolist()
        if tick >= 10:
            hits["fitted"] += found[BETAS.index(sharpness.beta)]
            hits["greedy"] += found[BETAS.index(GREEDY)]
            hits["plain"] += found[BETAS.index(1.0)]
        sharpness.observe(found, 100)
    assert hits["fitted"] >= max(hits["greedy"], hits["plain"]) - 5000 * 0.005
    if kind == "flat":
        assert hits["fitted"] > 1.05 * hits["plain"]
        assert hits["fitted"] > 1.05 * hits["greedy"]


def test_sharpness_follows_a_drafter_that_changes() -> None:
    sharpness = BetaCalibrator(memory=1000.0)
    assert sharpness.beta == 1.0
    for best in (GREEDY, 2.0):
        for _ in range(40):
            sharpness.observe([60 + 20 * (beta == best) for beta in BETAS], 100)
        assert sharpness.beta == best


def test_beta_hits_agree_with_the_candidates() -> None:
    logits = torch.randn(80, 60, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(0, 60, 2)
    drawn = torch.randint(60, (80,), generator=torch.Generator().manual_seed(1))
    for k in (1, 4):
        hits = beta_hits(logits[:, ids], keys_of(80), drawn, token_of_draft_v=ids, k=k)
        for place, beta in enumerate(BETAS):
            named = candidates(logits[:, ids], keys_of(80), beta, k, ids).token_Nk
            assert torch.equal(hits[:, place], (named == drawn[:, None]).any(1))


def test_copies_have_no_matrices_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs are others, and they are trained; whoever has such matrices renews them in place, and can leave them."""
    model = drafter(8)
    model.quantize()
    assert not model._quantized, "nobody would read matrices as small as these in 8 bits"
    monkeypatch.setattr(linear_table, "LEAST_QUANTIZED", {16: 0, 32: 0})
    model.quantize()
    assert model._quantized.keys() == {"fc", "qkv", "o", "gate_up", "down"}
    quantized = model._quantized["qkv"]
    copied = copy.deepcopy(model)
    assert not copied._quantized
    assert copied.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        model.qkv.mul_(3.0)
    model.quantize()
    assert model._quantized["qkv"] is quantized
    read = quantized.quantized_NK.double() * quantized.scale_N[:, None]
    assert (read - model.qkv.detach()).norm() < 0.04 * model.qkv.norm()
    model.quantize(False)
    assert model._matrix("qkv") is model.qkv
