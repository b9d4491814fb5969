"""The machine: what it is called, what is installed on it, and how fast it reads memory."""

import gc
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tlt import __version__

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Machine:
    device: str
    device_memory_gib: float  # 0 on a CPU
    cpu: str
    cores: int
    python: str
    torch: str
    cuda: str
    triton: str
    transformers: str
    tlt: str
    commit: str
    command: str
    date: str  # UTC
    triton_cache: str  # "cold" or "warm" when this run began: whether kernels had to be compiled


def describe(device: torch.device, commit: str | None) -> Machine:
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory / GIB if on_gpu else 0.0
    return Machine(
        device=torch.cuda.get_device_name(device) if on_gpu else "CPU",
        device_memory_gib=round(memory, 1),
        cpu=_cpu_name(),
        cores=os.cpu_count() or 1,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=str(torch.version.cuda or ""),
        triton=_installed("triton"),
        transformers=_installed("transformers"),
        tlt=__version__,
        commit=_commit() or commit or "unknown",
        command=shlex.join([_program(), *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        triton_cache=_triton_cache(),
    )


def _program() -> str:
    """As it is called from the repository's root: `tlt` itself, or a script of `benchmarks`."""
    called = Path(sys.argv[0])
    return f"{called.parent.name}/{called.name}" if called.parent.name == "benchmarks" else "tlt"


def read_bandwidth(device: torch.device, gib: float) -> float:
    """Bytes per second of reading `gib` GiB once from end to end: the best of several ways to do it."""
    count = int(gib * GIB / 4)
    block = 1 << 14
    numbers = torch.ones(count // block * block, device=device)
    rows = numbers.view(-1, block)
    ways: tuple[Callable[[], object], ...] = (numbers.sum, lambda: rows.sum(1), lambda: rows.amax(1))
    fastest = min(_fastest(way, device) for way in ways)
    return numbers.nbytes / fastest


def free_memory() -> None:
    """What nobody holds any more goes, before somebody asks for what is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fastest(way: Callable[[], object], device: torch.device, tries: int = 3, times: int = 4) -> float:
    """Seconds of one go, the best of a few tries; each try goes several times so that the launch does not count."""
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


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """Of the checkout this package lies in, with a mark where files differ from it; empty where git cannot tell."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip()


def _triton_cache() -> str:
    cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return "warm" if cache.is_dir() and any(cache.iterdir()) else "cold"
