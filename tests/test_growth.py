"""Growing and pruning: kept nodes are the likeliest, in order, each under its own parent; both pruners agree."""

import pytest
import torch

from tlt.kernels import pruning
from tlt.kernels.pruning import Pruned
from tlt.kernels.states import keep_states
from tlt.spec.prompt_states import PromptStates
from tlt.spec.shape import Draft, merge
from tlt.spec.tree import Trees, own_bits

pruning_triton = pytest.importorskip("tlt.kernels.pruning_triton")
states_triton = pytest.importorskip("tlt.kernels.states_triton")
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


def pruned(prune, grown, ready: torch.Tensor, width: int, depth: int, nodes: int) -> Trees:  # type: ignore[no-untyped-def]
    trees = Trees.empty(len(ready), nodes, DEVICE)
    trees.token_RQ[:, 0] = 77
    out = Pruned(trees.token_RQ, trees.parent_RQ, trees.depth_RQ, trees.mask_RQW)
    prune(*(part.to(DEVICE) for part in grown), ready.to(DEVICE), width, depth, out)
    return trees


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


@pytest.mark.parametrize(("width", "depth", "nodes"), [(1, 3, 4), (4, 8, 16), (3, 5, 9), (8, 8, 40), (2, 2, 9)])
def test_the_fused_pruner_prunes_alike(width: int, depth: int, nodes: int) -> None:
    grown, ready = growth(4, width, depth, seed=width), torch.tensor([True, False, True, True])
    grown[2][0] = 0.0  # all equal: parents first
    one = pruned(lambda *given: pruning_triton.prune(*given), grown, ready, width, depth, nodes)
    cpu = [part.cpu() for part in grown]
    trees = Trees.empty(4, nodes, "cpu")
    pruning.prune(*cpu, ready, width, depth, Pruned(trees.token_RQ, trees.parent_RQ, trees.depth_RQ, trees.mask_RQW))
    for name in ("parent_RQ", "depth_RQ", "mask_RQW"):
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
    assert own_bits(40, torch.device("cpu"))[31, 0] == -(1 << 31)


def test_states_are_kept_alike_in_one_launch() -> None:
    generator = torch.Generator().manual_seed(1)
    taps = [torch.randn((6, 20), generator=generator) for _ in range(3)]
    source = torch.tensor([[0, 2], [3, 5]])
    slot, token = torch.tensor([[4, 1], [0, 7]]), torch.tensor([[11, 12], [13, 14]], dtype=torch.int32)
    kept = []
    for module in (None, states_triton):
        states, tokens = torch.zeros((2, 8, 60)), torch.zeros((2, 8), dtype=torch.int64)
        if module is None:
            keep_states(states, tokens, taps, source, slot, token)
        else:
            given = [part.to(DEVICE) for part in (states, tokens, *taps, source, slot, token)]
            module.keep_states(given[0], given[1], given[2:5], *given[5:])
            states, tokens = given[0].cpu(), given[1].cpu()
        kept.append((states, tokens))
    assert torch.equal(kept[0][0], kept[1][0])
    assert torch.equal(kept[0][1], kept[1][1])
    assert kept[0][1][1, 7] == 14


def test_a_node_whose_parent_is_gone_hangs_on_nothing() -> None:
    """Scores that are no numbers put children before their parents; such a child must not be taken for a root's."""
    token, parent, score = growth(1, 4, 3, seed=5)
    score[:, 8:] = float("nan")
    trees = pruned(pruning.prune, (token, parent, score), torch.tensor([True]), 4, 3, 4)
    kept = trees.parent_RQ[0, 1:] >= 0
    assert all(trees.depth_RQ[0, 1:][kept] == 1), "only true children of the root hang on it"


def test_prompt_states_hold_no_more_than_they_count() -> None:
    kept = PromptStates(4, torch.zeros((0, 8)))
    kept.add(tuple(range(10)), 0, torch.ones((10, 8)))
    states = kept.states(tuple(range(10)))
    assert len(states) == 4
    assert states.untyped_storage().nbytes() == states.nbytes
