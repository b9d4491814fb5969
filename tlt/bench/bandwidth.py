"""Measures the read bandwidth of a device's memory."""

import time
from collections.abc import Callable

import torch

from tlt.machine import GIB, wait_for


def read_bandwidth(device: torch.device, gib: float) -> float:
    """Bytes per second of reading `gib` GiB once, by the fastest of several ways to read."""
    count = int(gib * GIB / 4)
    block = 1 << 14
    numbers = torch.ones(count // block * block, device=device)
    rows = numbers.view(-1, block)
    ways: tuple[Callable[[], object], ...] = (numbers.sum, lambda: rows.sum(1), lambda: rows.amax(1))
    fastest = min(_fastest(way, device) for way in ways)
    return numbers.nbytes / fastest


def _fastest(way: Callable[[], object], device: torch.device, tries: int = 3, times: int = 4) -> float:
    """Seconds of one read, the fastest of a few tries; a try reads several times, so the launch does not count."""
    way()
    seconds = []
    for _ in range(tries):
        wait_for(device)
        started = time.perf_counter()
        for _ in range(times):
            way()
        wait_for(device)
        seconds.append((time.perf_counter() - started) / times)
    return min(seconds)
