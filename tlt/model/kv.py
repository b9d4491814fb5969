"""The key-value cache: one tensor of keys and one of values, in pages, for all layers. Knows nothing of requests."""
# L layers, P pages, S slots of a page, K key-value heads, d head width

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVCache:
    k: Tensor  # [L, P, S, K, d]
    v: Tensor

    @classmethod
    def allocate(
        cls, config: ModelConfig, pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> "KVCache":
        shape = (config.layers, pages, page_size, config.kv_heads, config.head_dim)
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        return 2 * config.layers * page_size * config.kv_heads * config.head_dim * dtype.itemsize
