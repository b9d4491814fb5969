"""Draft trees: merged without duplicates, masked to their ancestors, walked where the policy's tokens lead."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import depths
from tlt.kernels.draft_tree.verification import walk
from tlt.spec.shape import OFF, Draft, Shape, by_batch, merge
from tlt.spec.tree import Trees


@st.composite
def drafts(draw: st.DrawFn, largest: int = 40) -> Draft:
    size = draw(st.integers(0, largest))
    parents = [draw(st.integers(-1, index - 1)) for index in range(size)]
    tokens = [draw(st.integers(0, 3)) for _ in range(size)]
    scores = [draw(st.floats(0.01, 1.0)) for _ in range(size)]
    return Draft(tuple(tokens), tuple(parents), tuple(scores))


def paths(draft: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@given(st.lists(drafts(12), max_size=3))
def test_merging_loses_no_branch_and_repeats_none(parts: list[Draft]) -> None:
    merged = merge(parts, budget=1000)
    expected = {path for part in parts for path in paths(part)}
    assert set(paths(merged)) == expected
    assert len(merged) == len(expected)
    assert all(parent < index for index, parent in enumerate(merged.parents))


@given(st.lists(drafts(12), max_size=3), st.integers(0, 8))
def test_a_small_budget_keeps_the_likeliest_connected_part(parts: list[Draft], budget: int) -> None:
    whole, merged = merge(parts, budget=1000), merge(parts, budget)
    assert len(merged) == min(budget, len(whole))
    assert set(paths(merged)) <= set(paths(whole))
    dropped = [score for path, score in zip(paths(whole), whole.scores, strict=True) if path not in set(paths(merged))]
    if dropped and len(merged):
        assert min(merged.scores) >= max(dropped) - 1e-12


@given(drafts())
def test_nodes_see_their_ancestors_and_nobody_else(draft: Draft) -> None:
    trees = Trees.empty(2, 41, "cpu")
    trees.fill([Draft(), draft])
    ancestors = [{0}]
    for index, parent in enumerate(draft.parents, start=1):
        ancestors.append(ancestors[parent + 1] | {index})
    for node in range(41):
        words = trees.mask_RQW[1, node].tolist()
        sees = {bit for bit in range(41) if words[bit // 32] >> (bit % 32) & 1}
        assert sees == (ancestors[node] if node <= len(draft) else {node})
    assert trees.depth_RQ[1, 1 : len(draft) + 1].tolist() == depths(draft)
    assert trees.parent_RQ[0].tolist() == [-1] * 41


@given(drafts(), st.lists(st.integers(0, 3), min_size=41, max_size=41), st.integers(1, 12))
def test_the_walk_follows_the_drawn_tokens(draft: Draft, drawn: list[int], steps: int) -> None:
    trees = Trees.empty(1, 41, "cpu")
    trees.fill([draft])
    node, expected = 0, [0]
    while len(expected) < steps:
        children = [
            index
            for index, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), start=1)
            if parent + 1 == node and token == drawn[node]
        ]
        if not children:
            break
        node = children[0]
        expected.append(node)
    node_RS, steps_R = walk(trees.parent_RQ, trees.token_RQ, torch.tensor([drawn]), steps)
    count = int(steps_R)
    assert node_RS[0, :count].tolist() == expected
    assert node_RS[0, count:].tolist() == [node] * (steps - count)


def test_batches_fall_into_powers_of_two() -> None:
    batches = (1, 2, 3, 4, 5, 8, 9, 256, 257)
    assert [by_batch([((batch, OFF), 1)])[0][0] for batch in batches] == [1, 2, 4, 4, 8, 8, 16, 256, 512]


def test_ticks_are_counted_by_number_of_requests_and_shape() -> None:
    chain = Shape(("eagle",), 3, 1, 4)
    ticks = {(1, OFF): 1, (5, OFF): 2, (8, OFF): 3, (9, OFF): 4, (6, chain): 5, (16, chain): 6}
    once = by_batch(ticks.items())
    assert once == ((1, "off", 1), (8, "eagle 3x1/4", 5), (8, "off", 5), (16, "eagle 3x1/4", 6), (16, "off", 4))
    twice = by_batch(((requests, shape), count) for requests, shape, count in once + once)
    assert twice == tuple((requests, shape, 2 * count) for requests, shape, count in once)
    assert by_batch(()) == ()
