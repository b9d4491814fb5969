"""Processes of a run as the system sees them: `tlt train` in one of its own, its descendants, what they listen on."""

import ipaddress
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.training import SMALL
from tlt.watch.events import PhaseStarted, RunFailed, read_run
from tlt.watch.history import events_of

ROOT = Path(__file__).parents[1]
LONG_S = 300.0  # after which something that is waited for will not happen any more


@dataclass
class Child:
    """`tlt train` in a process of its own."""

    process: "subprocess.Popen[str]"
    directory: Path

    @classmethod
    def start(cls, out: Path, *flags: str) -> "Child":
        recipe = out / "recipe.toml"
        recipe.write_text("")
        command = [sys.executable, "-m", "tlt", "train", str(recipe), *SMALL, "--watch.report=true", f"--run.out={out}"]
        process = subprocess.Popen(
            [*command, "--run.steps=1000", *flags],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return cls(process, out / "run")

    def reached(self, phase: str) -> None:
        def told() -> bool:
            run = read_run(self.directory) if (self.directory / "events.jsonl").exists() else None
            return run is not None and any(event.phase == phase for event in events_of(run, PhaseStarted))

        self._wait_for(told)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def ended(self) -> tuple[int, list[str]]:
        """The exit code and the lines on standard error."""
        _, stderr = self.process.communicate(timeout=LONG_S)
        return self.process.returncode, stderr.splitlines()

    def failure(self) -> RunFailed:
        assert (self.directory / "report.html").is_file()
        return events_of(read_run(self.directory), RunFailed)[-1]


def descendants(pid: int) -> dict[int, str]:
    """Every process below this one, with its command."""
    parents, commands = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it ended meanwhile
            continue
    found: dict[int, str] = {}
    generation = {pid}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        found |= {pid: commands[pid] for pid in generation}
    return found


def wait_until_gone(processes: dict[int, str]) -> None:
    deadline = time.monotonic() + LONG_S
    while left := [pid for pid in processes if _running(pid)]:
        assert time.monotonic() < deadline, [processes[pid] for pid in left]
        time.sleep(0.1)


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening(pids: Iterable[int]) -> dict[tuple[int, int], Address]:
    """On which address, by process and port."""
    owners = {inode: pid for pid in pids for inode in _sockets(pid)}
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in owners:
                host, _, port = local.partition(":")
                found[owners[inode], int(port, 16)] = _address(host)
    return found


def _sockets(pid: int) -> list[str]:
    links = []
    for file in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            links.append(os.readlink(file))
        except OSError:  # closed meanwhile
            continue
    return [link[len("socket:[") : -1] for link in links if link.startswith("socket:[")]


def _address(digits: str) -> Address:
    """The kernel writes words of four bytes, each the wrong way round on this kind of machine."""
    raw = bytes.fromhex(digits)
    words = b"".join(raw[i : i + 4][:: -1 if sys.byteorder == "little" else 1] for i in range(0, len(raw), 4))
    address = ipaddress.ip_address(words)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
