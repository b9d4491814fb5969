"""The key-value cache: one tensor of keys and one of values, in pages, for all layers. Knows nothing of requests."""
# L layers, P pages, S slots of a page, K key-value heads, d head width

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.model.config import ModelConfig
from tlt.model.returnable import Returnable, returnable


@dataclass(frozen=True, slots=True)
class KVCache:
    k: Tensor  # [L, P, S, K, d]
    v: Tensor
    memory: tuple[Returnable, ...] = ()  # of k and v, if it can be given back

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        sleeps: bool = False,
    ) -> "KVCache":
        """`sleeps`: its memory can be given back."""
        shape = (config.layers, pages, page_size, config.kv_heads, config.head_dim)
        if sleeps:
            k, v = (returnable(shape, dtype, torch.device(device)) for _ in range(2))
            return cls(k.tensor, v.tensor, (k, v))
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    @property
    def bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def give_back(self) -> None:
        """Keys and values are lost; nothing may touch them until `take`."""
        for each in self.memory:
            each.give_back()

    def take(self) -> None:
        for each in self.memory:
            each.take()

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        return 2 * config.layers * page_size * config.kv_heads * config.head_dim * dtype.itemsize
