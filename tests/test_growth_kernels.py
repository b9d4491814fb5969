"""The fused growth kernel grows the trees that torch grows, and torch those that a list of paths grows."""

import pytest
import torch
from torch import Tensor

from tlt.kernels.draft_tree import growth
from tlt.kernels.draft_tree.growth import Growing

growth_triton = pytest.importorskip("tlt.kernels.draft_tree.growth_triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def named(rows: int, width: int, hidden: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Successors of a level and the states that named them."""
    generator = torch.Generator().manual_seed(seed)
    token = torch.randint(1000, (rows * width, width), generator=generator)
    score = -torch.rand((rows * width, width), generator=generator)
    return token, score, torch.randn((rows, width, hidden), generator=generator)


def grow(module: object, device: str, rows: int, width: int, levels: int, hidden: int, deepened: int) -> Growing:
    whole = Growing.empty(rows + 2, width, levels, hidden, torch.float32, torch.device(device))
    whole.seen_RwL.fill_(True)  # left by the trees before
    trees = whole.first(rows)
    token, score, state = (x.to(device) for x in named(rows, width, hidden, 0))
    position = torch.arange(rows * 3).view(rows, 3)[:, 1].to(device)
    module.start_trees(trees, token[:rows].contiguous(), score[:rows].contiguous(), state[:, 0], position)
    for level in range(1, deepened + 1):
        module.expand(trees, *(x.to(device) for x in named(rows, width, hidden, level)))
    return whole


@pytest.mark.parametrize(
    ("rows", "width", "levels", "hidden"), [(1, 1, 3, 16), (3, 4, 4, 40), (2, 3, 5, 64), (2, 8, 3, 20)]
)
@pytest.mark.parametrize("more", [0, 2])
def test_both_grow_the_same_trees(rows: int, width: int, levels: int, hidden: int, more: int) -> None:
    """Also when a graph is replayed beyond the last level."""
    expected = grow(growth, "cpu", rows, width, levels, hidden, levels - 1 + more)
    found = grow(growth_triton, DEVICE, rows, width, levels, hidden, levels - 1 + more)
    for name in Growing.__slots__:
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


def test_the_likeliest_paths_survive() -> None:
    rows, width, levels, hidden = 1, 3, 4, 8
    trees = grow(growth, "cpu", rows, width, levels, hidden, levels - 1)
    token, score, _ = named(rows, width, hidden, 0)
    paths = [((), float(score[0, n]), int(token[0, n])) for n in range(width)]  # ancestors' columns, score, token
    columns = list(range(width))
    for level in range(1, levels):
        token, score, state = named(rows, width, hidden, level)
        successors = [
            ((*paths[n][0], columns[n]), paths[n][1] + float(score[n, k]), int(token[n, k]), state[0, n])
            for n in range(width)
            for k in range(width)
        ]
        best = sorted(successors, key=lambda path: -path[1])[:width]
        paths, columns = [path[:3] for path in best], [level * width + n for n in range(width)]
        assert trees.token_RL[0, columns].tolist() == [path[2] for path in best]
        assert trees.parent_RL[0, columns].tolist() == [path[0][-1] for path in best]
        scores = torch.tensor([path[1] for path in best])  # of at most four numbers below 1, added in double precision
        torch.testing.assert_close(trees.score_RL[0, columns], scores, rtol=1e-6, atol=1e-6)
    assert torch.equal(trees.state_RwD[0], torch.stack([path[3] for path in best]))


def test_a_level_stands_where_its_step_wants_it() -> None:
    """Slots and sights of the nodes that the next step computes, and their entries: one before the tokens they hold."""
    trees = grow(growth_triton, DEVICE, 2, 2, 4, 8, 1)
    assert trees.level_R[:2].tolist() == [2, 2]
    assert trees.slot_Rw[:2].tolist() == [[2, 3]] * 2
    assert trees.entry_R[:2].tolist() == [2, 5]  # roots at 1 and 4, their successors' successors at 3 and 6
    for row in range(2):
        for n in range(2):
            seen = trees.seen_RwL[row, n].nonzero().flatten().tolist()
            assert seen == [int(trees.parent_RL[row, 2 + n]), 2 + n]


def test_what_does_not_fit_is_refused() -> None:
    trees = Growing.empty(2, 2, 3, 8, torch.float32, torch.device(DEVICE))
    token, score, state = (x.to(DEVICE) for x in named(2, 2, 8, 0))
    with pytest.raises(ValueError, match="contiguous"):
        growth_triton.expand(trees, token.t(), score, state)
    with pytest.raises(ValueError, match="contiguous"):
        growth_triton.expand(trees, token, score, state.transpose(0, 1).contiguous().transpose(0, 1))
