"""How many pages the key-value cache gets."""

import torch

from tlt.config import EngineSettings
from tlt.errors import ConfigError
from tlt.model.device import free_bytes
from tlt.model.kv import KVCache
from tlt.model.transformer import Transformer

GIB = 1024**3
CPU_GIB = 1.0
RESERVE_SHARE = 0.05  # of the whole GPU, kept for graphs and the allocator
LOGIT_BYTES = 4  # logits are float32
RESERVE_GIB = 1.0  # and this on top
SHARE_OF_FREE = 0.4  # for the cache of a second engine, beside one whose run has all it needs
LEAST_GIB = 0.5  # of it, however little is free


def gib_of_what_is_free(free: int) -> float:
    """The key-value cache of a second engine. `free`: bytes that nobody has now."""
    return max(LEAST_GIB, SHARE_OF_FREE * free / GIB)


def cache_pages(model: Transformer, settings: EngineSettings, beyond: int, nodes: int = 1) -> int:
    """Pages within the memory asked for, or within what is free on every rank; never more than all rows could fill.

    `beyond` is how many places a draft tree may take behind a context that is full, `nodes` how many of each row are
    computed in one tick at most.
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
    """What the largest prefill piece and the logits of all rows' nodes need beside the weights."""
    config, size = model.local, model.embed.element_size()
    widest = 2 * config.mlp + config.mlp + config.qkv_width + 4 * config.hidden
    tokens = max(settings.prefill_tokens, settings.rows * nodes)
    logits = -(-config.vocab // model.parallel.size)
    return tokens * widest * size + settings.rows * nodes * logits * LOGIT_BYTES
