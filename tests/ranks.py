"""Ranks of one engine for tests: threads of this process, connected by gloo."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed

from tlt.model.parallel import Ranks

T = TypeVar("T")
dist: Any = torch.distributed
_STORE, _NAMES = dist.HashStore(), count()


def together(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """The results of so many ranks that do this work at the same time. Raises what the first of them raised."""
    name = next(_NAMES)

    def run(rank: int) -> T:
        groups = [_gloo(f"{name}-{kind}", rank, size) for kind in ("tensors", "commands")]
        with torch.no_grad():
            return work(Ranks(rank, size, *groups))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def _gloo(name: str, rank: int, size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=60)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(dist.PrefixStore(name, _STORE), rank, size, options)
