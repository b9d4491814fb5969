"""The kernels of a drafter's layer in rollout do what their torch versions do, and those what loops in float64 do.

Without a GPU the Triton kernels run in the interpreter in float32; with one they run on it in bfloat16. What nobody may
read holds NaN.
"""

import math
from typing import get_args

import pytest
import tiny
import torch
from torch import Tensor

from tlt.config import DrafterArchitecture
from tlt.kernels.attention import window as ring_attention
from tlt.kernels.dispatch import dispatch
from tlt.kernels.draft_tree import layer as drafter
from tlt.kernels.draft_tree.layer import ExtendState, NewPositions
from tlt.kernels.linear.workspace import shared_workspace
from tlt.model.linear import rows_of
from tlt.spec import eagle, window
from tlt.spec.eagle import Eagle, EagleConfig

drafter_triton = pytest.importorskip("tlt.kernels.draft_tree.layer_triton")
ring_attention_triton = pytest.importorskip("tlt.kernels.attention.window_triton")
WindowLaunch = ring_attention_triton.WindowLaunch

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
CLOSE = {"atol": 2e-2, "rtol": 2e-2} if GPU else {"atol": 2e-5, "rtol": 2e-5}
NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, behind the interpreter, on inf − inf


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Values that both the CPU and the device hold exactly."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE).float()


def ring_of(rows: int, heads: int, window: int, width: int, newest: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Rings that have taken in positions 0 … newest[r]; what was never written is NaN, the last slot too."""
    k, v = normal(rows, heads, window + 1, width, seed=1), normal(rows, heads, window + 1, width, seed=2)
    held = torch.full((rows, window + 1), -1)
    for row, last in enumerate(newest):
        for position in range(last + 1):
            held[row, position % window] = position
    unused = (held < 0)[:, None, :, None]
    held[:, window] = 10**6  # padding was written there
    return k, v.masked_fill(unused, NAN), held


def attend_by_loops(
    q: Tensor, ring: tuple[Tensor, Tensor, Tensor], position: Tensor, beside: tuple[Tensor, Tensor, Tensor] | None
) -> Tensor:
    (rows, queries, heads, width), (k, v, held) = q.shape, ring
    window, group, out = held.shape[1] - 1, heads // k.shape[1], torch.zeros(q.shape, dtype=torch.float64)
    for row in range(rows):
        for query in range(queries):
            back = (position[row, query] - held[row, :window]).masked_fill(held[row, :window] < 0, window)
            slots = (back < window).nonzero().flatten()
            near = beside[2][row, query].nonzero().flatten() if beside else slots[:0]
            for head in range(heads):
                at = (row, head // group)
                keys, values = [k[at][slots]], [v[at][slots]]
                if beside:
                    keys, values = [*keys, beside[0][at][near]], [*values, beside[1][at][near]]
                scores = torch.cat(keys).double() @ q[row, query, head].double() / math.sqrt(width)
                out[row, query, head] = scores.softmax(0) @ torch.cat(values).double()
    return out


def to_device(x: Tensor) -> Tensor:
    return x.to(DEVICE, DTYPE) if x.is_floating_point() else x.to(DEVICE)


def as_double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def tree_sight(rows: int, queries: int, nodes: int) -> Tensor:
    seen = torch.rand((rows, queries, nodes), generator=torch.Generator().manual_seed(5)) < 0.4
    seen[:, :, 0] = True
    return seen


SHAPES = [  # rows, queries, heads, key heads, width, window, nodes, newest position of each row
    (1, 1, 2, 2, 16, 5, 1, [2]),
    (2, 3, 6, 2, 32, 40, 7, [90, 11]),
    (3, 5, 3, 1, 64, 33, 20, [32, -1, 200]),
    (2, 1, 4, 2, 16, 37, 0, [36, 3]),
    (1, 7, 9, 3, 24, 70, 3, [75]),
    (1, 2, 2, 1, 8, 9, 75, [30]),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("launch", [None, WindowLaunch(16, 16, 1), WindowLaunch(32, 16, 3), WindowLaunch(16, 32, 2)])
def test_ring_attention_equals_loops(shape: tuple, launch: WindowLaunch | None) -> None:
    rows, queries, heads, key_heads, width, window, nodes, newest = shape
    q, ring = normal(rows, queries, heads, width), ring_of(rows, key_heads, window, width, newest)
    position = torch.tensor(newest)[:, None] + 1 + torch.arange(queries) % 3
    beside = None
    if nodes:
        seen = tree_sight(rows, queries, nodes)
        k, v = normal(rows, key_heads, nodes, width, seed=3), normal(rows, key_heads, nodes, width, seed=4)
        v = v.masked_fill(~seen.any(1)[:, None, :, None], NAN)
        beside = (k, v, seen)
    expected = attend_by_loops(q, ring, position, beside)
    found = ring_attention_triton.attend(
        *map(to_device, (q, *ring, position)), beside and tuple(map(to_device, beside)), launch=launch
    )
    torch.testing.assert_close(found.cpu().double(), expected, **CLOSE)
    assert not shared_workspace(found.device).counters.any(), "the counters are zero again"
    fine = [None if part is None else [as_double(x) for x in part] for part in ((q, *ring, position), beside)]
    by_torch = ring_attention.attend(*fine[0], fine[1])
    torch.testing.assert_close(by_torch, expected, atol=1e-9, rtol=1e-9)


def test_a_query_that_sees_nothing_disturbs_nobody() -> None:
    q, (k, v, held) = normal(2, 2, 4, 16), ring_of(2, 2, 20, 16, [-1, 9])
    position = torch.tensor([[0, 0], [10, 100]])
    for launch in (WindowLaunch(16, 16, 1), WindowLaunch(16, 16, 2)):
        out = ring_attention_triton.attend(*map(to_device, (q, k, v, held, position)), launch=launch)
        assert not out[0].any()
        assert not out[1, 1].any()
        torch.testing.assert_close(
            out[1:, :1].cpu().double(),
            attend_by_loops(q[1:, :1], (k[1:], v[1:], held[1:]), position[1:, :1], None),
            **CLOSE,
        )
    assert bool(ring_attention.attend(q, k, v, held, position).isfinite().all())


def test_tensors_may_be_views() -> None:
    """Rows of a larger ring, queries inside qkv, sights and positions that all rows share."""
    qkv, ring = normal(2, 3, 10, 16), ring_of(5, 2, 20, 16, [30] * 5)
    seen, position = tree_sight(1, 3, 4).expand(2, -1, -1), torch.tensor([[31]]).expand(2, 3)
    beside = (normal(2, 4, 2, 16, seed=3).transpose(1, 2), normal(2, 4, 2, 16, seed=4).transpose(1, 2), seen)
    expected = attend_by_loops(qkv[:, :, :6], tuple(x[:2] for x in ring), position, beside)
    found = ring_attention_triton.attend(
        to_device(qkv)[:, :, :6], *(to_device(x)[:2] for x in ring), to_device(position[:1]).expand(2, 3),
        (*(to_device(x) for x in beside[:2]), to_device(seen[:1]).expand(2, -1, -1)),
    )  # fmt: skip
    torch.testing.assert_close(found.cpu().double(), expected, **CLOSE)


@pytest.mark.parametrize(
    ("rows", "pairs", "expected"),
    [
        (1, 3, WindowLaunch(16, 64, 8)),
        (8, 24, WindowLaunch(32, 64, 8)),
        (16, 3, WindowLaunch(16, 64, 4)),
        (64, 3, WindowLaunch(16, 128, 1)),
        (64, 192, WindowLaunch(64, 64, 1)),
    ],
)
def test_few_rings_are_cut_and_many_are_not(rows: int, pairs: int, expected: WindowLaunch) -> None:
    assert WindowLaunch.plan(rows, 6, pairs, 512) == expected


@pytest.mark.parametrize(("rows", "alone", "beside"), [(1, 8, 8), (4, 8, 4), (8, 4, 2), (16, 2, 2), (24, 1, 1)])
def test_one_more_program_beside_a_ring_is_reckoned_with(rows: int, alone: int, beside: int) -> None:
    assert WindowLaunch.plan(rows, 16, 3, 512).splits == alone
    assert WindowLaunch.plan(rows, 16, 3, 512, beside=True).splits == beside


@pytest.mark.parametrize(("rows", "queries", "width"), [(1, 1, 64), (3, 4, 100), (2, 5, 576)])
@pytest.mark.parametrize("counted", [False, True])
def test_embeddings_and_states_are_normed_side_by_side(rows: int, queries: int, width: int, counted: bool) -> None:
    token = torch.randint(50, (rows, queries), generator=torch.Generator().manual_seed(0))
    state, embed = normal(rows, queries, width), normal(50, width, seed=1)
    norms = normal(width, seed=2), normal(width, seed=3)
    new = tiny.new_positions(torch.arange(rows), torch.tensor([0, queries, 2][:rows]), queries) if counted else None
    if new is not None:
        token, state = token.view(-1, 1), state.view(-1, 1, width)
    expected = drafter.embed_and_norm(token, state, embed, *norms, 1e-5, new)
    given = [to_device(x) for x in (token, state, embed, *norms)]
    found = drafter_triton.embed_and_norm(*given, 1e-5, on_device(new))
    if new is not None:
        last = [state[row * queries + count - 1, 0] if count else 0.0 * state[0, 0] for row, count in counts(new)]
        torch.testing.assert_close(expected[1], torch.stack(last), **CLOSE)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu().float(), theirs, **CLOSE)
    assert torch.equal(given[1].cpu().float(), state)
    assert found[1].data_ptr() != given[1].data_ptr(), "the residual is the caller's to write over"
    if not counted:  # one state for all of a row's tokens, as a tree's first level has
        shared = drafter_triton.embed_and_norm(given[0], given[1][:, :1].expand(-1, queries, -1), *given[2:], 1e-5)
        alone = drafter.embed_and_norm(token, state[:, :1].expand(-1, queries, -1), embed, *norms, 1e-5)
        torch.testing.assert_close(shared[1].cpu().float(), alone[1], **CLOSE)
        torch.testing.assert_close(shared[0].cpu().float(), alone[0], **CLOSE)


def counts(new: NewPositions) -> list[tuple[int, int]]:
    return list(enumerate(new.count_R.tolist()))


def on_device(new: NewPositions | None) -> NewPositions | None:
    return new and NewPositions(*(part.to(DEVICE) for part in (new.row_T, new.place_T, new.first_R, new.count_R)))


def intake_of(device: str, ready: list[bool]) -> ExtendState:
    """Five rows, the last of which is idle; positions with gaps between them, as an engine's are."""
    position = torch.tensor([[8, 0], [0, 0], [62, 0], [12, 0], [3, 0]])[:, 0].to(device)
    taken = torch.tensor([5, 0, 60, 7, 2], device=device)
    return ExtendState(
        position, torch.tensor(4, dtype=torch.int32, device=device), taken, torch.tensor(ready, device=device)
    )


@pytest.mark.parametrize("tokens", [1, 4, 9, 10, 40])
@pytest.mark.parametrize("window", [3, 8])
@pytest.mark.parametrize("most", [4, 9])
def test_new_positions_are_spread_row_after_row(tokens: int, window: int, most: int) -> None:
    first = [max(taken, at - window) for taken, at in zip((5, 0, 60, 7, 2), (8, 0, 62, 12, 3), strict=True)]
    count = [min(at - begun, most) for at, begun in zip((8, 0, 62, 12), first, strict=False)] + [0]
    places = [(row, place) for row, many in enumerate(count) for place in range(many)][:tokens]
    for spread, device in ((drafter.plan_extend, "cpu"), (drafter_triton.plan_extend, DEVICE)):
        new, source = spread(intake_of(device, [False] * 5), most, tokens, window)
        assert list(zip(new.row_T.tolist(), new.place_T.tolist(), strict=True))[: len(places)] == places
        assert new.place_T[len(places) :].tolist() == [-1] * (tokens - len(places))
        assert new.row_T[len(places) :].tolist() == source[len(places) :].tolist() == [0] * (tokens - len(places))
        expected = [row * window + (first[row] + place) % window for row, place in places]
        assert source[: len(places)].tolist() == expected
        assert new.count_R.tolist() == [sum(row == whose for whose, _ in places) for row in range(5)]
        assert new.first_R.tolist() == first


@pytest.mark.parametrize("width", [5, 64])
def test_what_was_taken_in_is_noted(width: int) -> None:
    """Rows without any keep their state; one that had more than there was room for cannot guess, nor one that waits."""
    empty = torch.zeros(1, dtype=torch.int64)
    for module, device in ((drafter, "cpu"), (drafter_triton, DEVICE)):
        state = intake_of(device, [False, True, True, True, True])
        first = torch.tensor([5, 0, 60, 9, 2], device=device)  # one is more than a window behind
        new = NewPositions(empty, empty, first, torch.tensor([3, 0, 2, 1, 0], device=device))
        newest, g = normal(5, width, seed=1).to(device), normal(8, width, seed=2).to(device)
        before = g.clone()
        module.finish_extend(state, new, newest, g[:5])
        assert state.taken_R.tolist() == [8, 0, 62, 10, 2]
        assert state.ready_R.tolist() == [True, True, True, False, True]  # the last one is idle
        had = [0, 2, 3]
        assert torch.equal(g[had], newest[had])
        assert torch.equal(g[[1, 4, 5, 6, 7]], before[[1, 4, 5, 6, 7]])


def tables(width: int, positions: int = 64) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions)[:, None] * 10000.0 ** -(torch.arange(0, width, 2) / width)
    return angle.cos(), angle.sin()


def rotated_by_hand(qkv: Tensor, position: Tensor, heads: int, key_heads: int, width: int) -> tuple[Tensor, ...]:
    """As complex numbers: half a head is the real part, the other half the imaginary one."""
    x = qkv.double().view(*position.shape, heads + 2 * key_heads, width)
    turning, v = x[:, :, : heads + key_heads], x[:, :, heads + key_heads :]
    angle = position[:, :, None, None] * 10000.0 ** -(torch.arange(0, width, 2).double() / width)
    turned = torch.complex(*turning.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    turned = torch.cat((turned.real, turned.imag), -1)
    return turned[:, :, :heads], turned[:, :, heads:], v


@pytest.mark.parametrize(("heads", "key_heads", "width"), [(2, 2, 16), (9, 3, 64), (4, 1, 24)])
def test_queries_and_keys_turn_and_go_to_their_nodes(heads: int, key_heads: int, width: int) -> None:
    rows, queries, nodes = 3, 4, 9
    qkv = normal(rows * queries, (heads + 2 * key_heads) * width)
    position = torch.tensor([[7], [0], [40]]).expand(-1, queries)
    slot = torch.tensor([5, 0, 8, 2]).expand(rows, -1)
    q, k, v = rotated_by_hand(qkv, position, heads, key_heads, width)
    for module, place in ((drafter, torch.Tensor.float), (drafter_triton, to_device)):
        where = DEVICE if module is drafter_triton else "cpu"
        room = [place(torch.full((rows + 1, key_heads, nodes, width), 7.0)) for _ in "kv"]
        found = module.rope_into_nodes(
            place(qkv), position[:, :1].to(where).expand(-1, queries), slot[:1].to(where).expand(rows, -1),
            *(table.to(where) for table in tables(width)), *(x[:rows] for x in room),
        )  # fmt: skip
        torch.testing.assert_close(found.cpu().double(), q, **CLOSE)
        for kept, new in zip(room, (k, v), strict=True):
            expected = torch.full(kept.shape, 7.0, dtype=torch.float64)
            expected[:rows, :, slot[0]] = new.transpose(1, 2)
            torch.testing.assert_close(kept.cpu().double(), expected, **CLOSE)


@pytest.mark.parametrize(("window", "new"), [(8, 5), (4, 11), (3, 1)])
def test_new_positions_enter_the_ring(window: int, new: int) -> None:
    heads, key_heads, width = 4, 2, 16
    count, first = (
        torch.tensor([new, 0, max(1, new - 2), new]),
        torch.tensor([0, 60, 13, 30]),
    )  # row 1: padding beyond the tables
    rows = len(count)
    qkv = normal(rows * new, (heads + 2 * key_heads) * width)
    entering = tiny.new_positions(first, count, new)
    position = first[:, None] + torch.arange(new)
    q, k, v = rotated_by_hand(qkv, position, heads, key_heads, width)
    for module, place in ((drafter, torch.Tensor.float), (drafter_triton, to_device)):
        where = DEVICE if module is drafter_triton else "cpu"
        ring = [place(torch.full((rows, key_heads, window + 1, width), 7.0)) for _ in "kv"]
        held = torch.full((rows, window + 1), -1, device=where)
        found, last = module.rope_into_ring(
            place(qkv),
            entering if where == "cpu" else on_device(entering),
            *(table.to(where) for table in tables(width)),
            *(*ring, held),
        )
        expected_k, expected_v = (torch.full(ring[0].shape, 7.0, dtype=torch.float64) for _ in "kv")
        expected_held = torch.full((rows, window + 1), -1)
        for row in range(rows):
            for at in range(int(count[row])):  # in order: the newest stays
                slot = int(position[row, at]) % window
                expected_k[row, :, slot], expected_v[row, :, slot] = k[row, at], v[row, at]
                expected_held[row, slot] = position[row, at]
            at, some = int(count[row]) - 1, int(count[row]) > 0
            torch.testing.assert_close(found[row, 0].cpu().double(), some * q[row, at], **CLOSE)
            assert int(last[row, 0]) == some * int(position[row, at])
        assert torch.equal(held[:, :window].cpu(), expected_held[:, :window])
        torch.testing.assert_close(ring[0][:, :, :window].cpu().double(), expected_k[:, :, :window], **CLOSE)
        torch.testing.assert_close(ring[1][:, :, :window].cpu().double(), expected_v[:, :, :window], **CLOSE)


def test_layouts_that_cannot_be_read_are_refused() -> None:
    q, (k, v, held) = normal(1, 1, 2, 16), ring_of(1, 2, 5, 16, [3])
    with pytest.raises(ValueError, match="same layout"):
        ring_attention_triton.attend(q, k, v.transpose(2, 3), held, torch.ones(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="gaps"):
        drafter_triton.embed_and_norm(
            torch.zeros(1, 1, dtype=torch.int64), normal(1, 1, 32)[:, :, ::2], normal(5, 16), *normal(2, 16), 1e-5
        )


# ---- a whole drafter


def drafter_of(dtype: torch.dtype, device: str, architecture: DrafterArchitecture) -> Eagle:
    shape = EagleConfig.of_policy(tiny.policy().config, window=12, architecture=architecture)
    model = Eagle(shape, dtype=dtype, device=device)
    cpu = Eagle(model.config)
    cpu.init_weights(0)
    model.load_state_dict({name: 6.0 * value if value.dim() > 1 else value for name, value in cpu.state_dict().items()})
    return model


def drafted(model: Eagle, embed: Tensor, head: Tensor) -> list[Tensor]:
    """What two rows give: taking in three pieces of unequal length, then two levels of a tree."""
    device, hidden = embed.device, embed.shape[1]
    ring, nodes, out = model.new_ring(2), model.new_nodes(2, 6), []
    at = torch.tensor([0, 0])
    for piece, count in enumerate(([9, 4], [0, 7], [5, 1])):
        tokens = torch.randint(len(embed), (2, 9), generator=torch.Generator().manual_seed(piece))
        states = normal(2, 9, 3 * hidden, seed=piece).to(device, embed.dtype)
        counts = torch.tensor(count)
        new = tiny.new_positions(at.to(device), counts.to(device), 9)
        g = model.extend(ring, tokens.to(device).flatten(), states.flatten(0, 1), new, embed)
        at = at + counts
        out.append(g[counts.to(device) > 0])
    parent, seen = g[:, None].expand(-1, 3, -1), torch.zeros(2, 3, 6, dtype=torch.bool, device=device)
    for level in range(2):
        slot = (torch.arange(3, device=device) + 3 * level).expand(2, -1)
        seen = seen.scatter(2, slot[:, :, None], True)
        tokens = torch.randint(len(embed), (2, 3), generator=torch.Generator().manual_seed(9 + level)).to(device)
        position = (at.to(device) + level)[:, None].expand(-1, 3)
        before = parent.clone()
        g = model.step(ring, nodes, tokens, parent, position, slot, seen, embed)
        assert torch.equal(parent, before), "what named the nodes is not the layer's to write over"
        out += [rows_of(g), model.logits(g, head)]
        parent, seen = rows_of(g).view(parent.shape).flip(1), seen.flip(1)
    return out


@pytest.mark.parametrize("architecture", get_args(DrafterArchitecture))
def test_the_whole_layer_is_the_same_through_the_kernels(
    monkeypatch: pytest.MonkeyPatch, architecture: DrafterArchitecture
) -> None:
    policy = tiny.policy()
    weights = policy.embed.detach().float(), policy.head_weight.detach().float()
    expected = drafted(drafter_of(torch.float32, "cpu", architecture), *weights)
    if GPU:
        found = drafted(drafter_of(DTYPE, DEVICE, architecture), *(weight.to(DEVICE, DTYPE) for weight in weights))
    else:
        for module in (drafter_triton, ring_attention_triton):  # the interpreter knows no dependent launch
            for name in ("embed_and_norm", "rope_into_nodes", "rope_into_ring", "attend"):
                if function := getattr(module, name, None):
                    plain = lambda *given, pdl, function=function: function(*given)
                    monkeypatch.setattr(module, name, plain)
        for module in (eagle, window):
            monkeypatch.setattr(module, "dispatch", lambda reference, in_triton: dispatch(reference, True))
        found = drafted(drafter_of(torch.float32, "cpu", architecture), *weights)
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.cpu().float() - theirs).norm() / theirs.norm()
        assert error < (3e-2 if GPU else 1e-5)
