"""Growing and pruning: kept nodes are the likeliest, in order, each under its own parent; both pruners agree.

And what trees are grown from: states are kept in their place, those of idle rows nowhere."""

import pytest
import torch

from tlt.kernels.batch_state import reference as batch_state
from tlt.kernels.batch_state.reference import StatePlaces, keep_states
from tlt.kernels.draft_tree import pruning
from tlt.kernels.draft_tree.pruning import Pruned, VerifyBudget
from tlt.spec.prompt_states import PromptStates
from tlt.spec.shape import Draft, merge, share_out
from tlt.spec.tree import Trees, own_bits

pruning_triton = pytest.importorskip("tlt.kernels.draft_tree.pruning_triton")
batch_state_triton = pytest.importorskip("tlt.kernels.batch_state.triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def growth(rows: int, width: int, depth: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random nodes, level by level, each less likely than its parent."""
    generator = torch.Generator().manual_seed(seed)
    token = torch.randint(0, 1000, (rows, width * depth), generator=generator)
    parent = torch.full((rows, width * depth), -1)
    score = -torch.rand((rows, width * depth), generator=generator)
    for level in range(1, depth):
        here = slice(level * width, (level + 1) * width)
        parent[:, here] = torch.randint(0, width, (rows, width), generator=generator) + (level - 1) * width
        score[:, here] += score.gather(1, parent[:, here])
    return token, parent, score


def pruned(  # type: ignore[no-untyped-def]
    prune, grown, ready: torch.Tensor, width: int, depth: int, nodes: int, shared: VerifyBudget | int | None = None
) -> Trees:
    trees = Trees.empty(len(ready), nodes, DEVICE)
    trees.token_RQ[:, 0] = 77
    out = Pruned(*trees.parts)
    if isinstance(shared, int):
        shared = share(shared, [9] * len(ready))
    prune(*(part.to(DEVICE) for part in grown), ready.to(DEVICE), width, depth, out, shared)
    return trees


def share(nodes: int, left: list[int], remaining_bias: float = 0.0, most: float = 99.0) -> VerifyBudget:
    return VerifyBudget(nodes, torch.tensor(left, device=DEVICE), torch.tensor(remaining_bias, device=DEVICE), most)


@pytest.mark.parametrize(
    ("width", "depth", "nodes"), [(1, 1, 2), (1, 4, 5), (3, 4, 9), (4, 8, 16), (8, 8, 40), (2, 2, 9)]
)
def test_pruned_trees_are_those_that_merging_on_the_host_keeps(width: int, depth: int, nodes: int) -> None:
    grown, ready = growth(5, width, depth, seed=nodes), torch.tensor([True, True, False, True, True])
    token, parent, score = grown
    expected = Trees.empty(5, nodes, "cpu")
    drafts = [
        merge([Draft(tuple(t), tuple(p), tuple(s))], nodes - 1) if go else Draft()
        for t, p, s, go in zip(token.tolist(), parent.tolist(), score.exp().tolist(), ready.tolist(), strict=True)
    ]
    expected.fill(drafts)
    with torch.no_grad():
        found = pruned(pruning.prune, grown, ready, width, depth, nodes)
    for row in range(5):
        size = len(drafts[row]) + 1
        assert found.token_RQ[row, 1:size].tolist() == expected.token_RQ[row, 1:size].tolist()
    assert torch.equal(found.parent_RQ.cpu(), expected.parent_RQ)
    assert torch.equal(found.depth_RQ.cpu(), expected.depth_RQ)
    assert torch.equal(found.mask_RQW.cpu(), expected.mask_RQW)
    assert found.token_RQ[:, 0].tolist() == [77] * 5, "the root belongs to the policy"


@pytest.mark.parametrize("budget", [0, 1, 7, 20, 10_000])
@pytest.mark.parametrize(("width", "depth", "nodes"), [(1, 1, 2), (1, 4, 5), (3, 4, 13), (4, 8, 33), (8, 8, 65)])
def test_rows_that_share_a_budget_keep_the_likeliest_nodes_of_all(
    width: int, depth: int, nodes: int, budget: int
) -> None:
    """Larger trees for those who are predictable: exactly what sharing out on the host keeps."""
    grown, ready = growth(6, width, depth, seed=budget), torch.tensor([True, True, False, True, True, True])
    grown[2].mul_(torch.linspace(0.02, 1.0, 6)[:, None])  # the first rows are surer of themselves
    drafts = share_out(drafts_of(grown, ready), budget)
    expected = Trees.empty(6, nodes, "cpu")
    expected.fill(drafts)
    found = pruned(pruning.prune, grown, ready, width, depth, nodes, budget)
    assert found.size_R.tolist() == expected.size_R.tolist() == [len(draft) for draft in drafts]
    assert sum(map(len, drafts)) == min(budget, 5 * width * depth)
    for name in ("parent_RQ", "depth_RQ", "mask_RQW"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    real = expected.parent_RQ >= 0
    assert torch.equal(found.token_RQ.cpu()[real], expected.token_RQ[real])


def drafts_of(grown: tuple[torch.Tensor, ...], ready: torch.Tensor) -> list[Draft]:
    token, parent, score = grown
    columns = zip(token.tolist(), parent.tolist(), score.double().exp().tolist(), ready.tolist(), strict=True)
    return [Draft(tuple(t), tuple(p), tuple(s)) if go else Draft() for t, p, s, go in columns]


def test_of_equals_the_first_rows_stay_and_numbers_that_are_none_go() -> None:
    token, parent, score = growth(4, 1, 3, seed=1)
    score[:] = torch.tensor([[0.0, 0.0, -0.01]])  # quite sure, as predictable text lets them be
    score[3] = float("nan")
    for prune in (pruning.prune, pruning_triton.prune):
        for budget, left in ((0, "000"), (1, "100"), (3, "111"), (4, "211"), (6, "222"), (8, "332"), (9, "333")):
            trees = pruned(prune, (token, parent, score), torch.ones(4, dtype=torch.bool), 1, 3, 4, budget)
            assert trees.size_R.tolist() == [*map(int, left), 0], budget
        many = [part[:1].repeat(33, 1) for part in (token, parent, score)]  # held back, numbers lie less close
        shared = share(20, [100] + [50] * 32, 16.0)
        trees = pruned(prune, many, torch.ones(33, dtype=torch.bool), 1, 3, 4, shared)
        assert trees.size_R.tolist() == [3] + [1] * 17 + [0] * 15


def test_who_has_more_left_comes_first() -> None:
    """As far as `remaining_bias` goes: a row with half as much left as the first has to be so much more predictable."""
    token, parent, score = growth(3, 1, 2, seed=1)
    score[:] = torch.tensor([[-0.5, -1.0]])
    everybody = torch.ones(3, dtype=torch.bool)
    cases = [
        (0.0, [100, 50, 0], "111"),  # nobody is held back: first nodes come first
        (0.9, [100, 50, 0], "210"),  # the second row's first node is as good as −0.95, the third's as −1.4
        (16.0, [100, 100, 100], "111"),
        (16.0, [100, 90, 80], "210"),
        (16.0, [-50, 0, 100], "112"),  # beyond its end is at its end
        (16.0, [0, 0, 0], "111"),
    ]
    for prune in (pruning.prune, pruning_triton.prune):
        for remaining_bias, left, expected in cases:
            nodes = sum(map(int, expected))
            trees = pruned(prune, (token, parent, score), everybody, 1, 2, 3, share(nodes, left, remaining_bias))
            assert trees.size_R.tolist() == [*map(int, expected)], (remaining_bias, left)
        shared = share(3, [100, 50, 0], 16.0, most=0.4)  # no more than that: first nodes come first again
        assert pruned(prune, (token, parent, score), everybody, 1, 2, 3, shared).size_R.tolist() == [1, 1, 1]
    late = torch.tensor([False, True, True])  # who is not ready holds nobody back
    trees = pruned(pruning.prune, (token, parent, score), late, 1, 2, 3, share(2, [1000, 10, 10], 16.0))
    assert trees.size_R.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("budget", "remaining_bias"), [(None, 0.0), (0, 16.0), (5, 0.0), (5, 16.0), (12, 16.0), (1000, 16.0)]
)
@pytest.mark.parametrize(("width", "depth", "nodes"), [(1, 3, 4), (4, 8, 16), (3, 5, 9), (8, 8, 40), (2, 2, 9)])
def test_the_fused_pruner_prunes_alike(
    width: int, depth: int, nodes: int, budget: int | None, remaining_bias: float
) -> None:
    grown, ready = growth(4, width, depth, seed=width), torch.tensor([True, False, True, True])
    grown[2][0] = 0.0  # all equal: parents first
    grown[2][3, -1] = float("nan")
    shared = None if budget is None else share(budget, [90, 500, 101, 97], remaining_bias, most=1.0)
    one = pruned(lambda *given: pruning_triton.prune(*given), grown, ready, width, depth, nodes, shared)
    cpu = [part.cpu() for part in grown]
    trees = Trees.empty(4, nodes, "cpu")
    here = (
        None
        if shared is None
        else VerifyBudget(shared.nodes, shared.left_R.cpu(), shared.remaining_bias.cpu(), shared.most)
    )
    pruning.prune(*cpu, ready, width, depth, Pruned(*trees.parts), here)
    assert budget is None or int(trees.size_R.sum()) <= budget
    for name in ("parent_RQ", "depth_RQ", "mask_RQW", "size_R"):
        assert torch.equal(getattr(one, name).cpu(), getattr(trees, name)), name
    real = trees.parent_RQ >= 0
    assert torch.equal(one.token_RQ.cpu()[real], trees.token_RQ[real])


def test_cleared_trees_are_empty_ones() -> None:
    trees, expected = Trees.empty(3, 40, "cpu"), Trees.empty(3, 40, "cpu")
    trees.fill([Draft((5, 6, 7), (-1, 0, 0), (0.5, 0.4, 0.3))] * 3)
    expected.fill([Draft((5, 6, 7), (-1, 0, 0), (0.5, 0.4, 0.3)), Draft(), Draft()])
    trees.clear(torch.tensor([1, 2]))
    assert torch.equal(trees.parent_RQ, expected.parent_RQ)
    assert torch.equal(trees.depth_RQ, expected.depth_RQ)
    assert torch.equal(trees.mask_RQW, expected.mask_RQW)
    assert trees.size_R[1:].tolist() == [0, 0] != trees.size_R[:1].tolist()
    assert own_bits(40, torch.device("cpu"))[31, 0] == -(1 << 31)


# ---- states kept for the drafter

NODES, WIDTH = 5, 20


def plain_tick() -> StatePlaces:
    """One state a row, at the ring's ends and far beyond; the third is idle, the fourth drew from no distribution."""
    position, slot = torch.tensor([0, 7, 8, 15, 1_000_003]), torch.tensor([4, 0, -1, 9, 2], dtype=torch.int32)
    return StatePlaces(position, slot, torch.tensor([[11], [12], [13], [-1], [15]]))


def results() -> StatePlaces:
    """Given as the engine has them: columns of wider tables. The second row is idle, the third stays at its root."""
    root, slot = torch.tensor([6, 3, 50, 7, 0])[:, None], torch.tensor([4, -1, 3, 0, 8])[:, None]
    depth_Q = torch.tensor([0, 1, 1, 1, 2])
    position_RQ, slot_RQ = root + depth_Q, (slot + torch.zeros(NODES)).int()
    packed = torch.arange(5 * 10, dtype=torch.int32).view(5, 10)
    packed[3, 1] = packed[4, 2] = -1
    node = torch.tensor([[0, 2, 4], [0, 1, 2], [0, 0, 0], [0, 3, 3], [0, 1, 4]])
    at = node + torch.arange(5)[:, None] * NODES
    return StatePlaces(position_RQ.flatten(), slot_RQ.flatten(), packed[:, :3], at, torch.tensor([3, 3, 1, 2, 3]))


def by_hand(states: torch.Tensor, tokens: torch.Tensor, taps: list[torch.Tensor], kept: StatePlaces) -> None:
    rows, steps = kept.token_RS.shape
    for row in range(rows):
        for step in range(steps if kept.steps_R is None else int(kept.steps_R[row])):
            state = row if kept.at_RS is None else int(kept.at_RS[row, step])
            if kept.slot_T[state] >= 0:
                place = int(kept.position_T[state]) % tokens.shape[1]
                states[row, place] = torch.cat([tap[state] for tap in taps])
                tokens[row, place] = max(0, int(kept.token_RS[row, step]))


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("window", [8, 2, 1])  # the last two are shorter than a walk: the newest states stay
@pytest.mark.parametrize("tick", [plain_tick, results])
def test_states_are_kept_where_they_belong(tick, window: int, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(batch_state_triton, "_TAPS_BLOCK", 16)  # columns in two parts
    device = DEVICE if fused else "cpu"
    with torch.device(device):
        kept = tick()
    generator = torch.Generator().manual_seed(1)
    taps = [torch.randn((len(kept.position_T), WIDTH), generator=generator).to(device) for _ in range(3)]
    expected = torch.full((7, window, 3 * WIDTH), -5.0), torch.full((7, window), -5)  # and rows that nobody decodes
    found = [ring.to(device, copy=True) for ring in expected]
    by_hand(*expected, taps, kept)
    keep = batch_state_triton.keep_states if fused else keep_states
    keep(*found, taps, kept)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.skipif(DEVICE == "cpu", reason="dependent launches need a GPU")
def test_states_are_kept_behind_the_kernel_that_makes_them() -> None:
    """As the engine keeps them, in a graph: what is launched early must not read early."""
    taps = [torch.zeros((4, 4096), dtype=torch.bfloat16, device=DEVICE) for _ in range(3)]
    states = torch.zeros((4, 8, 3 * 4096), dtype=torch.bfloat16, device=DEVICE)
    tokens = torch.zeros((4, 8), dtype=torch.int64, device=DEVICE)
    position, token = (torch.zeros(4, dtype=torch.int64, device=DEVICE) for _ in range(2))
    kept = StatePlaces(position, torch.zeros(4, dtype=torch.int32, device=DEVICE), token[:, None])

    def tick() -> None:
        for written in (*taps, token):
            written.add_(1)
        batch_state_triton.keep_states(states, tokens, taps, kept, pdl=True)
        position.add_(1)

    tick()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tick()
    for _ in range(7):
        graph.replay()
    assert tokens.tolist() == [list(range(1, 9))] * 4
    assert torch.equal(states, tokens[:, :, None].expand_as(states).bfloat16())


def test_a_node_whose_parent_is_gone_hangs_on_nothing() -> None:
    """Scores that rise put children before their parents; such a child must not be taken for a root's."""
    token, parent, score = growth(1, 4, 3, seed=5)
    score[:, 8:] = 9.0
    trees = pruned(pruning.prune, (token, parent, score), torch.tensor([True]), 4, 3, 4)
    kept = trees.parent_RQ[0, 1:] >= 0
    assert all(trees.depth_RQ[0, 1:][kept] == 1), "only true children of the root hang on it"


@pytest.mark.parametrize("pairs", [[(7, 0)], [(7, 2), (6, 5), (4, 1)], [(5, 5)]])
def test_rows_move_with_all_they_hold(pairs: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [
        torch.randn((8, 3, 5000), generator=generator).bfloat16(),
        torch.randint(100, (8, 7), generator=generator),
        torch.randint(100, (8,), generator=generator),
        torch.randint(2, (8,), generator=generator).bool(),
        torch.randn((8, 2, 3), generator=generator).bfloat16(),  # 12 bytes
        torch.randint(100, (8, 3), generator=generator, dtype=torch.int16),
    ]
    source, target = (torch.tensor(column) for column in zip(*pairs, strict=True))
    expected = [x.clone() for x in rows]
    for x, before in zip(expected, rows, strict=True):
        for come_from, to in pairs:
            x[to] = before[come_from]
    for move_rows, device in ((batch_state.move_rows, "cpu"), (batch_state_triton.move_rows, DEVICE)):
        found = [x.to(device, copy=True) for x in rows]
        move_rows(found, source.to(device), target.to(device))
        for x, wanted in zip(found, expected, strict=True):
            assert torch.equal(x.cpu(), wanted)
    with pytest.raises(ValueError, match="strides"):
        batch_state_triton.move_rows([rows[0].transpose(1, 2)], source, target)


def test_prompt_states_hold_no_more_than_they_count() -> None:
    kept = PromptStates(4, torch.zeros((0, 8)))
    kept.add(tuple(range(10)), 0, torch.ones((10, 8)))
    states = kept.states(tuple(range(10)))
    assert len(states) == 4
    assert states.untyped_storage().nbytes() == states.nbytes
