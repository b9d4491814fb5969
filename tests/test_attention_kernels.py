"""The attention and row-wise kernels, torch and Triton, against token-by-token float64 loops that share no code.

Without a GPU the Triton kernels run in the interpreter in float32; with one they run on it in bfloat16.
Every slot outside the contexts holds NaN, so whatever reads past a context cannot pass.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tlt.kernels.attention import reference as attention
from tlt.kernels.linear import elementwise

pytest.importorskip("triton")
from tlt.kernels.attention import triton as attention_triton
from tlt.kernels.attention.kv_splits import list_kv_splits
from tlt.kernels.linear import elementwise_triton

GPU = torch.cuda.is_available()
WHERE = {attention: ("cpu", torch.float64), elementwise: ("cpu", torch.float64)} | dict.fromkeys(
    (attention_triton, elementwise_triton), ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 1e-2}
BOTH = pytest.mark.parametrize("kernels", [attention, attention_triton], ids=["torch", "triton"])
BOTH_ROWS = pytest.mark.parametrize("kernels", [elementwise, elementwise_triton], ids=["torch", "triton"])
PAGE = 16


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The loops below are thousands of tiny operations: a second thread only makes them wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def loops_with_bounds_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter takes int() of one-element arrays, which numpy 2.4 refuses: give it their item."""
    if GPU:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_and_mend)


@dataclass(frozen=True)
class Batch:
    """A paged batch in float64 on the CPU, rounded to what the kernel under test will see."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start: Tensor
    context_len: Tensor
    page_table: Tensor
    tree_mask: Tensor | None
    max_query: int


def make_batch(
    lengths: list[tuple[int, int]],
    *,
    n_kv: int,
    group: int,
    d_head: int,
    dtype: torch.dtype,
    tree_words: int = 0,
    seed: int = 0,
) -> Batch:
    """`lengths`: (queries, context) per request. Pages are shuffled; unused slots hold NaN, unused table entries -1."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype).double()

    pages_of = [math.ceil(context / PAGE) for _, context in lengths]
    n_pages = sum(pages_of) + 3
    shuffled = torch.randperm(n_pages, generator=random).tolist()
    table = torch.full((len(lengths), max(pages_of) + 2), -1, dtype=torch.int32)
    k_cache = torch.full((n_pages, PAGE, n_kv, d_head), math.nan, dtype=torch.float64)
    v_cache = k_cache.clone()
    for r, (_, context) in enumerate(lengths):
        mine = torch.tensor([shuffled.pop() for _ in range(pages_of[r])], dtype=torch.int32)
        table[r, : pages_of[r]] = mine
        for position in range(context):
            page, offset = int(mine[position // PAGE]), position % PAGE
            k_cache[page, offset] = normal(n_kv, d_head)
            v_cache[page, offset] = normal(n_kv, d_head)
    queries = torch.tensor([0] + [count for count, _ in lengths])
    tree = random_trees([count for count, _ in lengths], tree_words, random) if tree_words else None
    return Batch(
        q=normal(int(queries.sum()), n_kv * group, d_head),
        k_cache=k_cache,
        v_cache=v_cache,
        query_start=queries.cumsum(0).int(),
        context_len=torch.tensor([context for _, context in lengths], dtype=torch.int32),
        page_table=table,
        tree_mask=tree,
        max_query=int(queries.max()),
    )


def random_trees(counts: list[int], words: int, random: torch.Generator) -> Tensor:
    """Each node hangs under a random earlier one, or is a root; its bits are itself and its ancestors."""
    rows = []
    for count in counts:
        seen: list[int] = []
        for node in range(count):
            parent = int(torch.randint(-1, node, (), generator=random)) if node else -1
            seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
        rows += [[bits >> 32 * word & 0xFFFFFFFF for word in range(words)] for bits in seen]
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def naive(batch: Batch, scale: float, window: int = 0) -> Tensor:
    """One query token and one head at a time, over the list of positions it sees."""
    out = torch.zeros_like(batch.q)
    group = batch.q.shape[1] // batch.k_cache.shape[2]
    for r, context in enumerate(batch.context_len.tolist()):
        start, stop = batch.query_start[r : r + 2].tolist()
        first = context - (stop - start)
        for token in range(start, stop if context else start):
            if batch.tree_mask is None:
                seen = list(range(first + token - start + 1))
                position = first + token - start
            else:
                nodes = [j for j in range(stop - start) if int(batch.tree_mask[token, j // 32]) >> (j % 32) & 1]
                seen = list(range(first)) + [first + j for j in nodes]
                position = first + len(nodes) - 1
            if window:
                seen = [n for n in seen if n > position - window or n >= first]
            where = torch.tensor([[int(batch.page_table[r, n // PAGE]), n % PAGE] for n in seen]).T
            for head in range(batch.q.shape[1]):
                k = batch.k_cache[where[0], where[1], head // group]
                v = batch.v_cache[where[0], where[1], head // group]
                weight = ((k * batch.q[token, head]).sum(1) * scale).exp()
                out[token, head] = (weight[:, None] * v).sum(0) / weight.sum()
    return out


def run(kernels: ModuleType, batch: Batch, scale: float, window: int = 0, **more: object) -> Tensor:
    device, dtype = WHERE[kernels]
    return kernels.paged_attention(
        batch.q.to(device, dtype),
        batch.k_cache.to(device, dtype),
        batch.v_cache.to(device, dtype),
        batch.query_start.to(device),
        batch.context_len.to(device),
        batch.page_table.to(device),
        max_query=batch.max_query,
        scale=scale,
        tree_mask_TW=None if batch.tree_mask is None else batch.tree_mask.to(device),
        sliding_window=window,
        **more,
    )


def assert_close(kernels: ModuleType, got: Tensor, expected: Tensor) -> None:
    assert not got.isnan().any()
    error = (got.cpu().double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[WHERE[kernels][1]], f"relative error {error:.2e}"


RAGGED = {
    "decode": ([(1, 1), (1, 40), (1, 64), (1, 97)], 0),
    "decode_one": ([(1, 150)], 0),
    "verify": ([(5, 37), (3, 3), (7, 80), (1, 20)], 1),
    "verify_alike": ([(6, 30), (6, 70)], 1),
    "verify_wide": ([(37, 50), (2, 20)], 2),
    "chunked_prefill": ([(20, 20), (9, 70), (33, 40)], 0),
    "mixed": ([(1, 30), (12, 70), (0, 17), (4, 4)], 0),
    "padded": ([(1, 20), (1, 0), (0, 0), (2, 0)], 0),
    "padded_verify": ([(3, 20), (3, 0), (3, 35)], 1),
}


@BOTH
@pytest.mark.parametrize("case", RAGGED)
def test_attention_equals_the_naive_loop(kernels: ModuleType, case: str) -> None:
    lengths, words = RAGGED[case]
    dtype = WHERE[kernels][1]
    batch = make_batch(lengths, n_kv=2, group=3, d_head=64, dtype=dtype, tree_words=words, seed=len(case))
    assert_close(kernels, run(kernels, batch, 0.125), naive(batch, 0.125))


@BOTH
@pytest.mark.parametrize(("group", "d_head"), [(1, 32), (4, 80), (2, 96), (7, 128)])
def test_head_groups_and_widths(kernels: ModuleType, group: int, d_head: int) -> None:
    batch = make_batch([(2, 35), (1, 70)], n_kv=2, group=group, d_head=d_head, dtype=WHERE[kernels][1], tree_words=1)
    assert_close(kernels, run(kernels, batch, 0.2), naive(batch, 0.2))


@BOTH
@pytest.mark.parametrize(
    ("lengths", "words"), [([(1, 90), (1, 5)], 0), ([(30, 80), (4, 40)], 0), ([(9, 80), (3, 9)], 1)]
)
@pytest.mark.parametrize("window", [10, 33])
def test_sliding_window(kernels: ModuleType, lengths: list[tuple[int, int]], words: int, window: int) -> None:
    batch = make_batch(lengths, n_kv=1, group=2, d_head=32, dtype=WHERE[kernels][1], tree_words=words)
    if words == 0:
        expected = naive_causal_window(batch, window)
    else:
        expected = naive(batch, 0.3, window)
    assert_close(kernels, run(kernels, batch, 0.3, window), expected)


def naive_causal_window(batch: Batch, window: int) -> Tensor:
    """Each query alone: as a decode step whose context is cut to the window's keys."""
    out = torch.zeros_like(batch.q)
    for r, context in enumerate(batch.context_len.tolist()):
        start, stop = batch.query_start[r : r + 2].tolist()
        for token in range(start, stop):
            position = context - stop + token
            seen = range(max(0, position - window + 1), position + 1)
            where = torch.tensor([[int(batch.page_table[r, n // PAGE]), n % PAGE] for n in seen]).T
            k, v = batch.k_cache[where[0], where[1], 0], batch.v_cache[where[0], where[1], 0]
            for head in range(batch.q.shape[1]):
                weight = ((k * batch.q[token, head]).sum(1) * 0.3).exp()
                out[token, head] = (weight[:, None] * v).sum(0) / weight.sum()
    return out


SPLIT = attention_triton.AttentionLaunch(block_m=16, block_n=16, extra=9, min_split=16, num_warps=4, num_stages=2)


@pytest.mark.parametrize(("extra", "window"), [(0, 0), (1, 40), (5, 0), (40, 0), (40, 40)])
@pytest.mark.parametrize("case", ["decode", "verify", "mixed", "padded"])
def test_shares_change_nothing_but_rounding(case: str, extra: int, window: int) -> None:
    lengths, words = RAGGED[case]
    dtype = WHERE[attention_triton][1]
    batch = make_batch(lengths, n_kv=1, group=3, d_head=32, dtype=dtype, tree_words=words)
    launch = replace(SPLIT, extra=extra)
    got = run(attention_triton, batch, 0.2, window, launch=launch)
    expected = run(attention, batch, 0.2, window)
    assert_close(attention_triton, got, expected)
    assert all(not counters.any() for counters in attention_triton._counters.values())


@pytest.mark.parametrize("extra", [0, 1, 7, 100])
@pytest.mark.parametrize(
    "contexts",
    [[1], [300, 0, 17], [0, 0], [64] * 20, [40] * 30 + [3000], [2000, 1000, 500, 7], [5] * 470, [30] * 1100],
    ids=lambda contexts: f"{len(contexts)} from {contexts[0]}",
)
@pytest.mark.parametrize("min_split", [16, 512])
def test_contexts_are_divided_evenly(contexts: list[int], extra: int, min_split: int) -> None:
    """Every key is read once, by splits of one length; a shorter one would not have been enough of them."""
    launch = replace(SPLIT, extra=extra, min_split=min_split)
    device = WHERE[attention_triton][0]
    length, *listed = list_kv_splits(torch.tensor(contexts, dtype=torch.int32, device=device), launch).tolist()
    tiles = [math.ceil(context / 16) for context in contexts]
    counts = [max(1, math.ceil(count / length)) for count in tiles]
    assert listed[: sum(counts)] == [256 * r + share for r, count in enumerate(counts) for share in range(count)]
    assert set(listed[sum(counts) :]) <= {-1}
    assert len(listed) == len(contexts) + extra
    shorter = length - max(1, length // 8)  # the search takes steps of an eighth
    if length > min_split // 16:
        assert shorter < 1 or sum(max(1, math.ceil(n / shorter)) for n in tiles) > len(listed)


def test_a_straggler_is_shared_out() -> None:
    """One long context among 64: whoever reads most of it reads little more than the others read of theirs."""
    contexts = torch.tensor([250] * 63 + [4000], dtype=torch.int32, device=WHERE[attention_triton][0])
    launch = attention_triton.plan_launch(64, 16, 3, 1, 132)
    assert list_kv_splits(contexts, launch)[0] * launch.block_n <= 512


@BOTH
def test_a_branch_is_invisible_to_its_sibling(kernels: ModuleType) -> None:
    """Node 0 has the children 1 and 2; what node 2 wrote must not change a bit of what node 1 gives."""
    batch = make_batch([(3, 30)], n_kv=1, group=2, d_head=32, dtype=WHERE[kernels][1], tree_words=1)
    batch = replace(batch, tree_mask=torch.tensor([[0b001], [0b011], [0b101]], dtype=torch.int32))
    before = run(kernels, batch, 0.2).clone()
    page = int(batch.page_table[0, 29 // PAGE])
    batch.k_cache[page, 29 % PAGE] = 50.0
    batch.v_cache[page, 29 % PAGE] = 1000.0
    after = run(kernels, batch, 0.2)
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])


@BOTH
@pytest.mark.parametrize(("queries", "columns"), [(4, 32), (5, 32), (4, 1)], ids=["alike", "ragged", "one column"])
def test_a_node_that_is_no_number_harms_those_below_it_alone(kernels: ModuleType, queries: int, columns: int) -> None:
    """Node 2 is NaN and has the child 3; its sibling 1 and their root do not see it: no bit of theirs may change."""
    batch = make_batch([(4, 70), (queries, 40)], n_kv=2, group=2, d_head=32, dtype=WHERE[kernels][1], tree_words=1)
    tree = [[0b0001], [0b0011], [0b0101], [0b1101]]
    batch = replace(batch, tree_mask=torch.tensor(tree + [[0b1]] * queries, dtype=torch.int32))
    before = run(kernels, batch, 0.2).clone()
    page = int(batch.page_table[0, 68 // PAGE])
    batch.k_cache[page, 68 % PAGE, :, :columns] = math.nan
    batch.v_cache[page, 68 % PAGE] = math.nan
    after = run(kernels, batch, 0.2)
    assert torch.equal(after[[0, 1, *range(4, 4 + queries)]], before[[0, 1, *range(4, 4 + queries)]])
    assert after[2:4].isnan().all(), "who sees it must not be told a number"


@pytest.mark.parametrize(
    ("where", "last", "columns"),
    [
        ("key", 40, slice(0, 32)),
        ("value", 66, slice(7, 8)),
        ("both", 66, slice(7, 8)),
        ("value", 130, slice(31, 32)),
    ],
)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_either_half_of_a_node_may_be_no_number(where: str, last: int, columns: slice, split: bool) -> None:
    """In one column or all, in a tile or across two: the same for the key, the value and both; a lone query may stand
    beside them, and one that is NaN itself is told so.
    """
    dtype = WHERE[attention_triton][1]
    lengths = [(1, 66), (4, last), (1, 70), (2, 30)]
    batch = make_batch(lengths, n_kv=2, group=3, d_head=32, dtype=dtype, tree_words=1)
    tree = [[0b1], [0b0001], [0b0011], [0b0101], [0b1101], [0b1], [0b01], [0b11]]
    batch = replace(batch, tree_mask=torch.tensor(tree, dtype=torch.int32))
    launch = SPLIT if split else None
    before = run(attention_triton, batch, 0.2, launch=launch).clone()
    assert_close(attention_triton, before, naive(batch, 0.2))
    for request, position in ((1, last - 2), (2, 69)):
        page = int(batch.page_table[request, position // PAGE])
        for name, cache in (("key", batch.k_cache), ("value", batch.v_cache)):
            if where in (name, "both"):
                cache[page, position % PAGE, :, columns] = math.nan
    after = run(attention_triton, batch, 0.2, launch=launch)
    unharmed = [0, 1, 2, 6, 7]
    assert torch.equal(after[unharmed], before[unharmed])
    assert after[3:5].isnan().all(), "who sees it must not be told a number"
    told = after[5] if where != "value" else after[5, :, columns]
    assert told.isnan().all(), "nor a lone query that is none"


@BOTH
def test_output_goes_where_it_is_told(kernels: ModuleType) -> None:
    device, dtype = WHERE[kernels]
    batch = make_batch([(2, 35), (1, 20)], n_kv=1, group=2, d_head=32, dtype=dtype)
    out = torch.full(batch.q.shape, math.nan, dtype=dtype, device=device)
    returned = run(kernels, batch, 0.2, out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert_close(kernels, out, naive(batch, 0.2))


def naive_rope(x: Tensor, position: int, theta: float) -> Tensor:
    """A head's pairs (i, i + d/2) as complex numbers, each turned by its own angle."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


@BOTH
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("n_q", "n_kv", "d_head"), [(6, 2, 64), (7, 1, 80)])
def test_rope_and_write(kernels: ModuleType, rotary: bool, normed: bool, n_q: int, n_kv: int, d_head: int) -> None:
    device, dtype = WHERE[kernels]
    random = torch.Generator().manual_seed(1)
    qkv = torch.randn(5, (n_q + 2 * n_kv) * d_head, generator=random).to(dtype).double()
    weights = [torch.rand(d_head, generator=random).to(dtype).double() + 0.5 if normed else None for _ in range(2)]
    positions, slots = torch.tensor([0, 3, 41, 63, 7]), torch.tensor([5, 16, -1, 47, 0])
    angles = torch.arange(64)[:, None] * 100.0 ** (-torch.arange(d_head // 2, dtype=torch.float64) / (d_head // 2))
    table = torch.float64 if dtype == torch.float64 else torch.float32
    caches = [torch.full((3, PAGE, n_kv, d_head), 9.0, dtype=dtype, device=device) for _ in range(2)]
    q = kernels.rope_and_write(
        qkv.to(device, dtype),
        positions.int().to(device),
        slots.int().to(device),
        angles.cos().to(device, table),
        angles.sin().to(device, table),
        *caches,
        n_q,
        n_kv,
        d_head,
        rotary=rotary,
        q_norm=weights[0] if weights[0] is None else weights[0].to(device, dtype),
        k_norm=weights[1] if weights[1] is None else weights[1].to(device, dtype),
        norm_eps=1e-5,
    )
    heads = qkv.view(5, -1, d_head)
    expected_q = torch.zeros(5, n_q, d_head, dtype=torch.float64)
    expected_k, expected_v = (torch.full((3 * PAGE, n_kv, d_head), 9.0, dtype=torch.float64) for _ in range(2))
    for token in range(5):
        for head in range(n_q + n_kv):
            x = heads[token, head]
            weight = weights[head >= n_q]
            if weight is not None:
                x = x / math.sqrt(float((x**2).mean()) + 1e-5) * weight
            x = naive_rope(x, int(positions[token]), 100.0) if rotary else x
            if head < n_q:
                expected_q[token, head] = x
            elif slots[token] >= 0:
                expected_k[slots[token], head - n_q] = x
        if slots[token] >= 0:
            expected_v[slots[token]] = heads[token, n_q + n_kv :]
    assert_close(kernels, q, expected_q)
    assert_close(kernels, caches[0].view(expected_k.shape), expected_k)
    assert_close(kernels, caches[1].view(expected_v.shape), expected_v)


@BOTH
def test_copy_kv_reads_all_before_it_writes(kernels: ModuleType) -> None:
    device, dtype = WHERE[kernels]
    shape = (3, 4, PAGE, 2, 32)
    k, v = (torch.randn(shape).to(device, dtype) for _ in range(2))
    src = [[3, 5, 9, -1, 12], [40, 41, -1, 43, 45], [60, -1, -1, -1, -1]]
    dst = [[2, 3, 5, 6, -1], [41, 40, 44, 43, 50], [1, -1, -1, -1, -1]]  # a shift, a swap, a lone copy
    expected = [cache.cpu().clone().view(3, -1, 2, 32) for cache in (k, v)]
    for cache, original in zip(expected, (k, v), strict=True):
        for src_row, dst_row in zip(src, dst, strict=True):
            for a, b in zip(src_row, dst_row, strict=True):
                if a >= 0 and b >= 0:
                    cache[:, b] = original.cpu().view(3, -1, 2, 32)[:, a]
    kernels.copy_kv(
        k, v, torch.tensor(src, dtype=torch.int32, device=device), torch.tensor(dst, dtype=torch.int32, device=device)
    )
    assert torch.equal(k.cpu().view(3, -1, 2, 32), expected[0])
    assert torch.equal(v.cpu().view(3, -1, 2, 32), expected[1])


@BOTH
def test_copy_kv_of_one_flat_list(kernels: ModuleType) -> None:
    device, dtype = WHERE[kernels]
    k, v = (torch.randn(2, 2, PAGE, 3, 16).to(device, dtype) for _ in range(2))
    wanted = k[:, 0, 7].clone()
    src, dst = torch.tensor([7, -1], dtype=torch.int32), torch.tensor([20, 3], dtype=torch.int32)
    kernels.copy_kv(k, v, src.to(device), dst.to(device))
    assert torch.equal(k[:, 1, 4], wanted)


@BOTH_ROWS
@pytest.mark.parametrize("width", [1, 48, 577])
def test_norms(kernels: ModuleType, width: int) -> None:
    device, dtype = WHERE[kernels]
    x, residual = (torch.randn(3, width).to(dtype).double() for _ in range(2))
    weight = (torch.rand(width) + 0.5).to(dtype).double()
    on = [tensor.to(device, dtype) for tensor in (x, residual, weight)]

    def expected(row: Tensor) -> Tensor:
        return torch.stack([one / math.sqrt(float(one @ one) / width + 1e-5) * weight for one in row])

    assert_close(kernels, kernels.rms_norm(on[0], on[2], 1e-5), expected(x))
    normed, total = kernels.add_rms_norm(*on, 1e-5)
    assert_close(kernels, total, x + residual)
    assert_close(kernels, normed, expected((x + residual).to(dtype).double()))


@BOTH_ROWS
@pytest.mark.parametrize("width", [1, 33, 1100])
def test_silu_mul(kernels: ModuleType, width: int) -> None:
    device, dtype = WHERE[kernels]
    both = (torch.randn(3, 2 * width) * 3).to(dtype).double()
    expected = both[:, :width] / (1 + (-both[:, :width]).exp()) * both[:, width:]
    assert_close(kernels, kernels.silu_mul(both.to(device, dtype)), expected)


@pytest.mark.parametrize("n_requests", [1, 8, 64, 256])
@pytest.mark.parametrize("max_query", [1, 8, 32, 2048])
def test_launches_fit_the_chip(n_requests: int, max_query: int) -> None:
    launch = attention_triton.plan_launch(n_requests, 16, 3, max_query, 132)
    assert 16 <= launch.block_m <= 128
    assert launch.min_split % launch.block_n == 0
    per_share = 16 * math.ceil(max_query * 3 / launch.block_m)
    assert launch.kv_splits(n_requests) * per_share >= 132
    if launch.extra:
        assert n_requests * per_share <= attention_triton.COUNTERS
        assert launch.kv_splits(n_requests) * per_share * launch.block_m * 64 * 4 <= 64 << 20  # bytes of parts


def test_too_many_blocks_for_the_counters() -> None:
    with pytest.raises(ValueError, match="cut the batch"):
        attention_triton.arrival_counters(torch.device("cpu"), attention_triton.COUNTERS + 1)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_graph_follows_its_inputs(pdl: bool) -> None:
    """Captured at some context lengths, replayed at others, many times: counters reset themselves, bits repeat."""
    batch = make_batch([(3, 300), (3, 40), (3, 129)], n_kv=2, group=3, d_head=64, dtype=torch.bfloat16, tree_words=1)
    device = {name: getattr(batch, name).cuda() for name in ("query_start", "context_len", "page_table", "tree_mask")}
    q, k, v = (t.to("cuda", torch.bfloat16) for t in (batch.q, batch.k_cache, batch.v_cache))
    launch = replace(SPLIT, extra=21)
    splits = list_kv_splits(device["context_len"], launch)

    def call() -> Tensor:
        return attention_triton.paged_attention(
            q, k, v, device["query_start"], device["context_len"], device["page_table"], max_query=3, scale=0.125,
            tree_mask_TW=device["tree_mask"], launch=launch, pdl=pdl, kv_splits_S=splits if pdl else None,
        )  # fmt: skip

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for contexts in ([300, 40, 129], [17, 3, 100], [250, 0, 64]):
        device["context_len"].copy_(torch.tensor(contexts))
        splits.copy_(list_kv_splits(device["context_len"], launch))
        expected = naive(replace(batch, context_len=torch.tensor(contexts)), 0.125)
        graph.replay()
        first = out.clone()
        assert_close(attention_triton, first, expected)
        for _ in range(50):
            graph.replay()
            assert torch.equal(out, first)
