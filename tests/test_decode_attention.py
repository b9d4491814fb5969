"""Decoding attention in one launch, against rotation, writing and attention one after the other in torch (float64).

Without a GPU the Triton kernel runs in the interpreter in float32; with one it runs on it in bfloat16. Slots outside
the contexts hold NaN, so whatever reads past a context cannot pass.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tlt.kernels import attention

pytest.importorskip("triton")
from tests.test_attention_kernels import (
    GPU,
    PAGE,
    TOLERANCE,
    loops_with_bounds_from_memory,  # noqa: F401
    one_thread,  # noqa: F401
)
from tlt.kernels.attention_triton import Launch
from tlt.kernels.decode_attention_triton import decode_attention

DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
SPLIT = Launch(block_m=16, block_n=16, splits=3, min_split=16, num_warps=4, num_stages=2)


def both(
    contexts: list[int],
    *,
    n_kv: int = 2,
    group: int = 3,
    d_head: int = 32,
    normed: bool = False,
    spare: int = 0,
    **settings: Any,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Output and caches of the reference and of the kernel; `spare` tokens belong to no request."""
    random = torch.Generator().manual_seed(len(contexts) + d_head)
    launch = settings.pop("launch", None)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(DTYPE).double()

    most = max(1, math.ceil(max(contexts) / PAGE))
    pages = torch.randperm(len(contexts) * most, generator=random).view(len(contexts), most)
    inside = (torch.arange(most * PAGE)[None] < torch.tensor(contexts)[:, None] - 1).view(-1, most, PAGE)
    k, v = (torch.full((pages.numel(), PAGE, n_kv, d_head), math.nan, dtype=torch.float64) for _ in range(2))
    for cache in (k, v):
        cache[pages] = torch.where(inside[..., None, None], normal(*inside.shape, n_kv, d_head), math.nan)
    tokens = len(contexts) + spare
    last = torch.tensor([max(0, context - 1) for context in contexts] + [0] * spare)
    slots = [int(pages[r, (c - 1) // PAGE]) * PAGE + (c - 1) % PAGE if c else -1 for r, c in enumerate(contexts)]
    angles = torch.rand((4096, d_head // 2), generator=random, dtype=torch.float64)
    qkv = normal(tokens, (group + 2) * n_kv * d_head)
    norms = {"q_norm": normal(d_head), "k_norm": normal(d_head)} if normed else {}
    index = [torch.tensor(slots + [-1] * spare), torch.arange(len(contexts) + 1), torch.tensor(contexts), pages]

    def run(device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        def there(x: Tensor) -> Tensor:
            return x.to(device, dtype).clone() if x.is_floating_point() else x.to(device, torch.int32)

        table = torch.float64 if dtype == torch.float64 else torch.float32
        keys, values = there(k), there(v)
        slot, start, context, page = map(there, index)
        first = (there(qkv), there(last), slot, angles.cos().to(device, table), angles.sin().to(device, table))
        own = {name: there(norm) for name, norm in norms.items()}
        kept = {key: settings[key] for key in ("rotary",) if key in settings} or {"rotary": True}
        window = settings.get("sliding_window", 0)
        if dtype != torch.float64:
            out = decode_attention(
                *(*first, keys, values, start, context, page, group * n_kv),
                **(own | kept),
                scale=0.2,
                sliding_window=window,
                launch=launch,
            )
        else:
            q = attention.rope_and_write(*first, keys, values, group * n_kv, n_kv, d_head, **(own | kept))
            out = attention.paged_attention(
                *(q, keys, values, start, context, page), max_query=1, scale=0.2, sliding_window=window
            )
        return tuple(x.double().cpu() for x in (out[: len(contexts)], keys, values))

    return run("cpu", torch.float64), run(DEVICE, DTYPE)


CASES: dict[str, dict[str, Any]] = {
    "ragged": {"contexts": [1, 2, 17, 64, 65, 150]},
    "one": {"contexts": [133]},
    "split": {"contexts": [1, 16, 17, 18, 150, 40], "launch": SPLIT},
    "padded": {"contexts": [20, 0, 33, 0], "spare": 3},
    "wide heads": {"contexts": [70, 9], "d_head": 128, "n_kv": 1},
    "odd width": {"contexts": [70, 9], "d_head": 80, "n_kv": 1},
    "many heads": {"contexts": [21], "group": 17, "n_kv": 1},
    "alone": {"contexts": [50, 12], "group": 1},
    "normed": {"contexts": [40, 3], "normed": True},
    "not rotated": {"contexts": [40, 3], "rotary": False, "normed": True},
    "window": {"contexts": [5, 33, 34, 90, 120], "sliding_window": 33},
    "window, split": {"contexts": [5, 33, 34, 90, 120], "sliding_window": 50, "launch": SPLIT},
}


@pytest.mark.parametrize("case", CASES)
def test_one_launch_is_the_three_steps(case: str) -> None:
    expected, got = both(**CASES[case])
    for name, right, found in zip(("attended", "keys", "values"), expected, got, strict=True):
        assert torch.equal(found.isnan(), right.isnan()), f"{name}: written or read elsewhere"
        error = (found - right).nan_to_num().norm() / right.nan_to_num().norm()
        assert error < TOLERANCE[DTYPE], f"{name}: relative error {error:.2e}"
