"""The memory plan: the number of pages of the KV cache. Knows no requests."""

import torch

from tlt.config import EngineSettings
from tlt.errors import ConfigError
from tlt.model.device import free_bytes
from tlt.model.kv import KVCache
from tlt.model.transformer import Transformer

GIB = 1024**3
CPU_GIB = 1.0
RESERVE_SHARE = 0.05  # fraction of the GPU's total memory reserved for graphs and the allocator
LOGIT_BYTES = 4  # logits are float32
RESERVE_GIB = 1.0  # reserved in addition to RESERVE_SHARE
SHARE_OF_FREE = 0.4  # fraction of the free memory for a second engine's KV cache, beside a complete run
LEAST_GIB = 0.5  # minimum of a second engine's KV cache


def gib_of_what_is_free(free: int) -> float:
    """GiB of a second engine's KV cache. `free`: unallocated bytes of the GPU."""
    return max(LEAST_GIB, SHARE_OF_FREE * free / GIB)


def cache_pages(model: Transformer, settings: EngineSettings, beyond: int, nodes: int = 1) -> int:
    """Pages that fit in `engine.kv_gib`, or in the free memory of every rank; at most the pages that all rows can fill.

    `beyond`: positions that a draft tree may use behind a full context. `nodes`: most tokens per row in one tick.
    """
    page = KVCache.page_bytes(model.local, settings.page_size, model.embed.dtype)
    budget = settings.kv_gib * GIB if settings.kv_gib else _free_bytes(model, settings, nodes)
    most = settings.rows * (-(-(model.config.max_positions + beyond) // settings.page_size) + 1)
    pages = min(int(budget // page), most)
    if pages < 2:
        least = f"{2 * page / GIB:.2g}"
        if settings.kv_gib:
            raise ConfigError(f"engine.kv_gib is {settings.kv_gib:.3g}; two pages need {least}: raise it")
        raise ConfigError(
            f"{budget / GIB:.3g} GiB are left for keys and values, and two pages need {least}: lower engine.rows or "
            "engine.prefill_tokens, which take memory too, or take a smaller policy"
        )
    return model.parallel.least(pages)


def _free_bytes(model: Transformer, settings: EngineSettings, nodes: int) -> float:
    if not model.embed.is_cuda:
        return CPU_GIB * GIB
    total = torch.cuda.mem_get_info(model.embed.device)[1]
    reserve = RESERVE_SHARE * total + RESERVE_GIB * GIB
    return free_bytes(model.embed.device) - reserve - _forward_bytes(model, settings, nodes)


def _forward_bytes(model: Transformer, settings: EngineSettings, nodes: int) -> int:
    """Bytes of activations and logits of the largest forward: a full prefill chunk, or all rows with all nodes."""
    config, size = model.local, model.embed.element_size()
    widest = 2 * config.mlp + config.mlp + config.qkv_width + 4 * config.hidden
    tokens = max(settings.prefill_tokens, settings.rows * nodes)
    logits = -(-config.vocab // model.parallel.size)
    return tokens * widest * size + settings.rows * nodes * logits * LOGIT_BYTES
