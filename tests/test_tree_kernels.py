"""The fused tree kernels do to rows and trees what their torch versions do."""

import random
from itertools import product

import pytest
import torch

from tlt.config import SpecSettings
from tlt.engine.build import shapes_of
from tlt.kernels.draft_tree import verification as reference
from tlt.kernels.draft_tree.pruning import Pruned, VerifyBudget
from tlt.spec.shape import Draft
from tlt.spec.tree import Trees

trees_triton = pytest.importorskip("tlt.kernels.draft_tree.verification_triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_trees(rows: int, nodes: int, dice: random.Random) -> Trees:
    drafts = []
    for _ in range(rows):
        size = dice.randrange(nodes)
        tokens = tuple(dice.randrange(3) for _ in range(size))
        drafts.append(Draft(tokens, tuple(dice.randrange(-1, node) for node in range(size)), (1.0,) * size))
    trees = Trees.empty(rows, nodes, "cpu")
    trees.fill(drafts)
    return trees


SIZES = [(1, 1, 2, 2), (5, 3, 8, 4), (6, 6, 17, 9), (3, 2, 40, 1)]
SHARED = [0.0, 1.0, 0.5, 0.2]  # 1: all nodes fit, padding left out; less: trees are cut


@pytest.mark.parametrize(
    ("rows", "count", "nodes", "steps", "shared"),
    [*((*size, shared) for size in SIZES for shared in SHARED), (70, 66, 4, 4, 0.5)],
)
def test_trees_are_prepared_and_walked_alike(rows: int, count: int, nodes: int, steps: int, shared: float) -> None:
    tokens = rows * nodes if not shared else rows + int(rows * (nodes - 1) * shared)
    dice, generator = random.Random(nodes), torch.Generator().manual_seed(nodes)
    ints = torch.randint(-(2**60), 2**60, (72, 5), generator=generator)
    ints[:, :2] = torch.randint(0, 64, (72, 2), generator=generator)
    floats = torch.rand((72, 3), generator=generator)
    pages = torch.randint(0, 999, (72, 20), generator=generator, dtype=torch.int32)
    drawn = torch.randint(-1, 3, (tokens,), generator=generator)
    logprobs = torch.randn((2, tokens), generator=generator)
    trees = random_trees(rows, nodes, dice)
    outcomes = []
    for module in (reference, trees_triton):
        state = [tensor.clone().to(DEVICE) for tensor in (ints, floats, pages)]
        live = torch.tensor(count, dtype=torch.int32, device=DEVICE)
        token, parent, depth, mask, size = (part.clone().to(DEVICE) for part in trees.parts)
        start = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * nodes
        if shared:
            start = module.starts(size, live, tokens)
        inputs = module.prepare((*state, live), (token, depth, mask), start, tokens, 8)
        drawn_parts = (inputs[1], *(part.to(DEVICE) for part in (drawn, *logprobs)))
        walked = module.finish(state[0], live, (parent, token), start, drawn_parts, steps)
        outcomes.append([start, *inputs, token, *walked, state[0]])
    for expected, got in zip(*outcomes, strict=True):
        assert expected.dtype == got.dtype
        assert torch.equal(expected, got)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 6])
def test_a_walk_ends_where_there_is_no_room_for_more(steps: int) -> None:
    """All of a chain comes true; kernels are compiled for powers of two, and a walk is no longer than was asked for."""
    trees = Trees.empty(1, 8, DEVICE)
    trees.fill([Draft((4,) * 7, (-1, 0, 1, 2, 3, 4, 5), (1.0,) * 7)])
    ints, count = (
        torch.zeros((1, 5), dtype=torch.int64, device=DEVICE),
        torch.ones((), dtype=torch.int32, device=DEVICE),
    )
    start = torch.tensor([0, 8], dtype=torch.int32, device=DEVICE)
    slot, drawn = torch.arange(8, dtype=torch.int32, device=DEVICE), torch.full((8,), 4, device=DEVICE)
    parts = (slot, drawn, torch.zeros(8, device=DEVICE), torch.zeros(8, device=DEVICE))
    for module in (reference, trees_triton):
        position = ints.clone()
        walked = module.finish(position, count, (trees.parent_RQ, trees.token_RQ), start, parts, steps)
        assert walked[4].tolist() == [steps]
        assert position[0, :2].tolist() == [4, steps]


@pytest.mark.parametrize("steps", [33, 100, 128])
def test_long_chains_are_walked_alike(steps: int) -> None:
    """Chunks of written-ahead text: all of one comes true, half of another, nothing of a third."""
    nodes, generator = 128, torch.Generator().manual_seed(steps)
    trees = Trees.empty(3, nodes, DEVICE)
    trees.fill([Draft((4,) * (nodes - 1), tuple(range(-1, nodes - 2)), (1.0,) * (nodes - 1))] * 3)
    drawn = torch.full((3, nodes), 4, device=DEVICE)
    drawn[1, 50], drawn[2, 0] = 5, 5
    logprobs = torch.randn((2, 3 * nodes), generator=generator).to(DEVICE)
    slot, start = (torch.arange(count, dtype=torch.int32, device=DEVICE) for count in (3 * nodes, 4))
    outcomes = []
    for module in (reference, trees_triton):
        ints = torch.zeros((3, 5), dtype=torch.int64, device=DEVICE)
        live = torch.tensor(3, dtype=torch.int32, device=DEVICE)
        parts = (slot, drawn.flatten(), *logprobs)
        walked = module.finish(ints, live, (trees.parent_RQ, trees.token_RQ), start * nodes, parts, steps)
        assert walked[4].tolist() == [steps, min(steps, 51), 1]
        outcomes.append([*walked, ints])
    for expected, got in zip(*outcomes, strict=True):
        assert torch.equal(expected, got)


class Compiled:
    """Stands in for a kernel, and notes which versions of it would have to be compiled."""

    def __init__(self) -> None:
        self.versions: set[tuple[tuple[str, object], ...]] = set()

    def __getitem__(self, grid: object) -> "Compiled":
        return self

    def __call__(self, *args: object, **options: object) -> None:
        missing = tuple((str(at), None) for at, arg in enumerate(args) if arg is None)
        self.versions.add((*sorted(options.items()), *missing))


def test_few_kernels_serve_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler takes tenths of a second, and a rollout would wait for it whenever a shape is tried."""
    pruning_triton = pytest.importorskip("tlt.kernels.draft_tree.pruning_triton")
    names = ("_prune_kernel", "_cut_kernel", "_penalty_kernel", "_prepare_kernel", "_finish_kernel")
    kernels = {name: Compiled() for name in names}
    for name, compiled in kernels.items():
        monkeypatch.setattr(trees_triton if hasattr(trees_triton, name) else pruning_triton, name, compiled)
    shapes = [shape for shape in shapes_of(SpecSettings(drafter="eagle", path="new")) if not shape.off]
    assert len(shapes) >= 30
    for shape, rows in product(shapes, (1, 24, 256)):
        grown, nodes = shape.width * shape.depth, shape.verify
        trees = Trees.empty(rows, nodes, "cpu")
        node = torch.zeros((rows, grown), dtype=torch.int64)
        everybody = VerifyBudget(shape.tokens(rows) - rows, node[:, 0], torch.zeros(()))
        shared, ready = everybody if shape.share else None, torch.ones(rows, dtype=torch.bool)
        pruning_triton.prune(node, node, node.float(), ready, shape.width, shape.depth, Pruned(*trees.parts), shared)
        state = tuple(torch.zeros((rows, 5)) for _ in range(3))
        start = torch.zeros(rows + 1, dtype=torch.int32)
        laid = (trees.token_RQ, trees.depth_RQ, trees.mask_RQW)
        trees_triton.prepare((*state, torch.tensor(rows)), laid, start, shape.tokens(rows), 16)
        drawn = tuple(torch.zeros(shape.tokens(rows)) for _ in range(4))
        trees_triton.finish(state[0], torch.tensor(rows), (trees.parent_RQ, trees.token_RQ), start, drawn, nodes)
    found = {name: len(compiled.versions) for name, compiled in kernels.items()}
    assert found["_prune_kernel"] <= 20, found
    assert found["_cut_kernel"] <= 8, found
    assert found["_penalty_kernel"] <= 3, found
    assert max(found["_prepare_kernel"], found["_finish_kernel"]) <= 5, found
