"""Describes the machine: device, processor, installed versions, commit and command line of the process.

Runs and benchmarks write this description into their records.
"""

import gc
import os
import platform
import shlex
import subprocess
import sys
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
    """The command from the repository's root: `tlt`, or a script of `benchmarks`."""
    called = Path(sys.argv[0])
    return f"{called.parent.name}/{called.name}" if called.parent.name == "benchmarks" else "tlt"


def free_memory() -> None:
    """Collects garbage and returns cached device memory, so that the free memory is measured correctly."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    """The commit of the package's checkout, with `-dirty` where files differ; empty without git."""
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
