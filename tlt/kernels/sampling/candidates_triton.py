"""The k likeliest successors a drafter names, in Triton: noise, ranking and softmax sum in one read of the logits.

`candidates.name` is the reference and says what is computed. Always holds: one launch, whose shape depends on shapes
alone; ranks by the same bits as torch on a CPU (so `enable_fp_fusion=False`, see `noise_triton`); equals go by lower
id; sums are taken in a fixed order. Danger: shares the arrival counters of `workspace`, so keep to one stream.

Program (node, split of the vocabulary) leaves its K best and its sum; the last of a node's programs merges them.
A total and its id travel as one int64 whose order is that of (total, lower id first): one maximum finds both.
"""
# N nodes, v draft vocabulary, K candidates; in kernels C Philox counters of a tile, which serve 4·C tokens

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt.kernels.attention.cache_triton import start
from tlt.kernels.linear.workspace import shared_workspace
from tlt.kernels.sampling import noise
from tlt.kernels.sampling.candidates import Key
from tlt.kernels.sampling.noise_triton import first_token, gumbel_lanes, gumbel_of
from tlt.kernels.sampling.reference import GREEDY_BELOW

MOST = 8  # candidates one launch can name
TILES = (512, 256, 128)  # counters per program: at 4 warps 16, 8 or 4 tokens per thread
PROGRAMS = 264  # wanted at least: two for each of an H200's processors; smaller tiles then have less to wait for

_LANE_TOKENS = tl.constexpr(noise.LANE_TOKENS)
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # a finite stand-in for −inf: no −inf − −inf
_NO_KEY = tl.constexpr(-(2**63))
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered_key(total, token, V):
    """One int64 for both: the order of totals, equals by lower token; below all others where there is no token."""
    bits = (total + 0.0).to(tl.int32, bitcast=True)  # −0 becomes 0: they are equals
    ordered = tl.where(bits < 0, bits ^ _MAGNITUDE, bits).to(tl.int64)
    return tl.where(token < V, (ordered << 32) | (token ^ _MAGNITUDE).to(tl.int64), _NO_KEY)


@triton.jit
def _total_of(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ _MAGNITUDE, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _token_of(key):
    return (key & _MAGNITUDE).to(tl.int32) ^ _MAGNITUDE


@triton.jit
def _scaled_logits(row_ptr, token, V, inverse):
    return tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32) * inverse


@triton.jit
def _noise(seed, request, position, counter, x, ids_ptr, t0, t1, t2, t3, V):
    if ids_ptr is None:
        # Adds nothing: no x is above +inf. But the noise then gets the register layout of the loaded logits.
        counter = counter + (x > float("inf")).to(tl.int32)
        g0, g1, g2, g3 = gumbel_lanes(seed, request, position, counter.to(tl.uint32))
    else:
        g0 = gumbel_of(seed, request, position, tl.load(ids_ptr + t0, mask=t0 < V, other=0))
        g1 = gumbel_of(seed, request, position, tl.load(ids_ptr + t1, mask=t1 < V, other=0))
        g2 = gumbel_of(seed, request, position, tl.load(ids_ptr + t2, mask=t2 < V, other=0))
        g3 = gumbel_of(seed, request, position, tl.load(ids_ptr + t3, mask=t3 < V, other=0))
    return g0, g1, g2, g3


@triton.jit
def _merge(
    row, sharp, key_ptr, sum_ptr, ids_ptr, token_ptr, score_ptr, splits,
    K: tl.constexpr, S: tl.constexpr, SK: tl.constexpr,
):  # fmt: skip
    """What all programs of a node have left, read past the first-level cache: they wrote it in this very launch."""
    part, of_key = tl.arange(0, S), tl.arange(0, SK)
    sums_ptr = sum_ptr + (row * splits + part) * 2
    top = tl.load(sums_ptr, mask=part < splits, other=_LOWEST, cache_modifier=".cg")
    mass = tl.load(sums_ptr + 1, mask=part < splits, other=0.0, cache_modifier=".cg")
    key = tl.load(key_ptr + row * splits * K + of_key, mask=of_key < splits * K, other=_NO_KEY, cache_modifier=".cg")
    highest = tl.max(top)
    log_sum = highest + tl.log(tl.sum(mass * tl.exp(top - highest)))
    for place in tl.static_range(K):
        best = tl.max(key)
        key = tl.where(key == best, _NO_KEY, key)
        token = _token_of(best).to(tl.int64)
        if ids_ptr is not None:
            token = tl.load(ids_ptr + token)
        tl.store(token_ptr + row * K + place, token)
        tl.store(score_ptr + row * K + place, _total_of(best) * sharp - log_sum)


@triton.jit(do_not_specialize=["splits", "stride_s", "stride_r", "stride_p", "stride_t", "stride_a"])
def _name_kernel(
    logits_ptr, row_stride, V, seed_ptr, request_ptr, position_ptr, temperature_ptr, ahead_ptr, beta_ptr, beta, ids_ptr,
    key_ptr, sum_ptr, counter_ptr, token_ptr, score_ptr, splits, stride_s, stride_r, stride_p, stride_t, stride_a,
    REPEAT: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr, SK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    counter = split * C + tl.arange(0, C)
    t0 = first_token(counter)
    t1, t2, t3 = t0 + _LANE_TOKENS, t0 + 2 * _LANE_TOKENS, t0 + 3 * _LANE_TOKENS
    drawn = row // REPEAT
    temperature = tl.load(temperature_ptr + drawn * stride_t)
    if beta_ptr is not None:
        beta = tl.load(beta_ptr)
    greedy = temperature < _GREEDY_BELOW
    inverse = tl.where(greedy, 1.0, tl.div_rn(1.0, temperature))
    weight = tl.where(greedy, 0.0, tl.div_rn(1.0, beta))
    sharp = tl.where(beta == float("inf"), 1.0, beta)

    logits_ptr += row * row_stride
    x0, x1 = _scaled_logits(logits_ptr, t0, V, inverse), _scaled_logits(logits_ptr, t1, V, inverse)
    x2, x3 = _scaled_logits(logits_ptr, t2, V, inverse), _scaled_logits(logits_ptr, t3, V, inverse)
    if weight != 0.0:
        seed, request = tl.load(seed_ptr + drawn * stride_s), tl.load(request_ptr + drawn * stride_r)
        position = tl.load(position_ptr + drawn * stride_p)
        if ahead_ptr is not None:
            position += tl.load(ahead_ptr + drawn * stride_a)
        g0, g1, g2, g3 = _noise(seed, request, position, counter, x0, ids_ptr, t0, t1, t2, t3, V)
        x0, x1, x2, x3 = g0 * weight + x0, g1 * weight + x1, g2 * weight + x2, g3 * weight + x3

    k0, k1 = ordered_key(x0, t0, V), ordered_key(x1, t1, V)
    k2, k3 = ordered_key(x2, t2, V), ordered_key(x3, t3, V)
    part = row * splits + split
    top = tl.maximum(tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))) * sharp, _LOWEST)
    mass = (tl.exp(x0 * sharp - top) + tl.exp(x1 * sharp - top)) + (tl.exp(x2 * sharp - top) + tl.exp(x3 * sharp - top))
    tl.store(sum_ptr + part * 2, top)
    tl.store(sum_ptr + part * 2 + 1, tl.sum(mass))
    for place in tl.static_range(K):
        best = tl.max(tl.maximum(tl.maximum(k0, k1), tl.maximum(k2, k3)))
        tl.store(key_ptr + part * K + place, best)
        if place < K - 1:
            k0, k1 = tl.where(k0 == best, _NO_KEY, k0), tl.where(k1 == best, _NO_KEY, k1)
            k2, k3 = tl.where(k2 == best, _NO_KEY, k2), tl.where(k3 == best, _NO_KEY, k3)

    # all threads' stores, then one thread's release: the program that counts last has acquired them all
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived == splits - 1:
        tl.store(counter_ptr + row, 0)  # ready for the next launch
        _merge(row, sharp, key_ptr, sum_ptr, ids_ptr, token_ptr, score_ptr, splits, K, S, SK)


def name(
    logits_Nv: Tensor,
    key: Key,
    temperature: Tensor,
    beta: Tensor | float,
    k: int,
    token_of_draft_v: Tensor | None = None,
    *,
    repeat: int = 1,
    ahead: Tensor | None = None,
    pdl: bool = False,
    counters: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `candidates.name`, for at most MOST candidates. `counters`, the tile size, is for tests and benchmarks."""
    _check(logits_Nv, (*key, temperature), k, token_of_draft_v, repeat)
    (nodes, vocab), device = logits_Nv.shape, logits_Nv.device
    tile = counters or _tile(nodes, vocab)
    splits = triton.cdiv(vocab, tile * noise.LANES)
    arrivals = shared_workspace(device).counters
    if nodes > len(arrivals):
        raise ValueError(f"{nodes} nodes to name successors of; expected at most {len(arrivals)} in one call")
    keys = torch.empty((nodes, splits, k), dtype=torch.int64, device=device)
    sums = torch.empty((nodes, splits, 2), dtype=torch.float32, device=device)
    token_Nk = torch.empty((nodes, k), dtype=torch.int64, device=device)
    score_Nk = torch.empty((nodes, k), dtype=torch.float32, device=device)
    strides = (
        *(part.stride(0) for part in (*key, temperature)),
        ahead.stride(0) if ahead is not None and ahead.dim() else 0,
    )
    beta_at, beta_value = (beta, 1.0) if isinstance(beta, Tensor) else (None, float(beta))
    if nodes:
        _name_kernel[(nodes, splits)](
            logits_Nv, logits_Nv.stride(0), vocab, *key, temperature, ahead, beta_at, beta_value, token_of_draft_v,
            keys, sums, arrivals, token_Nk, score_Nk, splits, *strides,
            REPEAT=repeat, K=k, C=tile, S=triton.next_power_of_2(splits), SK=triton.next_power_of_2(splits * k),
            PDL=pdl, num_warps=4, enable_fp_fusion=False, launch_pdl=pdl,
        )  # fmt: skip
    return token_Nk, score_Nk


def _tile(nodes: int, vocab: int) -> int:
    """The largest tile that still gives every processor something to do."""
    fitting = (tile for tile in TILES if nodes * triton.cdiv(vocab, tile * noise.LANES) >= PROGRAMS)
    return next(fitting, TILES[-1])


def _check(logits: Tensor, row_tensors: tuple[Tensor, ...], k: int, ids: Tensor | None, repeat: int) -> None:
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32) or logits.stride(1) != 1:
        raise ValueError(
            f"logits are {logits.dtype} with strides {logits.stride()}; expected bfloat16, float16 or float32 with the "
            "vocabulary contiguous; call .contiguous() or convert them first"
        )
    if not 0 < k <= min(MOST, logits.shape[1]):
        raise ValueError(f"{k} candidates asked for; expected 1 to {min(MOST, logits.shape[1])}")
    if ids is not None and (ids.shape != logits.shape[1:] or not ids.is_contiguous()):
        raise ValueError(f"{tuple(ids.shape)} draft ids; expected {logits.shape[1]}, contiguous, one for each logit")
    for tensor in row_tensors:
        if tensor.dim() != 1 or len(tensor) * repeat != len(logits):
            raise ValueError(
                f"a key is {tuple(tensor.shape)}; expected an entry for each {repeat} of {len(logits)} logit rows"
            )
