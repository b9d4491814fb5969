"""What recording and watching cost a run: the same short run in turns without step files, as it is, and watched.

    python benchmarks/watching.py [--turns 4] [--steps 6] [--json FILE]

A watched run has a `tlt watch` beside it, whose `run.json` is requested once a second as an open page does. All turns
compute the same tokens (no speculation). Of each the processor seconds of the run's process are compared: on a machine
with other work they are steadier than the clock. The time of writing events and step files is measured inside the run.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tlt.bench.record import new_record, write_record

VARIANTS = ("no step files", "recorded", "watched")
POLL_S = 1.0  # as the page


def run(directory: Path, name: str, steps: int, groups: int) -> None:
    """In a process of its own: trains, and prints the seconds of writing and of everything."""
    import tlt
    from tlt.reinforce import StepKeeper
    from tlt.watch.log import EventLog

    spent = {"step files": 0.0, "events": 0.0}

    def timed(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*given: Any) -> Any:
            started = time.thread_time()
            found = call(*given)
            spent[kind] += time.thread_time() - started
            return found

        return measured

    StepKeeper.keep = timed("step files", StepKeeper.keep)  # type: ignore[method-assign]
    EventLog.emit = timed("events", EventLog.emit)  # type: ignore[method-assign]
    started = time.process_time()
    settings = {"run.out": str(directory), "run.name": name, "run.steps": steps, "run.replay_every": 0}
    settings |= {"spec.drafter": "none", "spec.path": "", "watch.groups": groups, "watch.console": "off"}
    told = tlt.train("quickstart", overrides=settings)
    steps_s = [record.event.step_s for record in told.events if type(record.event).__name__ == "StepFinished"]
    print(json.dumps({"process_s": time.process_time() - started, "steps_s": sum(steps_s), **spent}))


@contextmanager
def watched(directory: Path, name: str, told: dict[str, Any]) -> Iterator[None]:
    """A server beside the run, and what an open page requests of it."""
    command = [sys.executable, "-m", "tlt", "watch", str(directory), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address, over = server.stdout.readline().split()[-1], threading.Event()

    def poll() -> None:
        had: dict[str, Any] = {"steps": [], "lives": 0, "at": 0}
        while not over.wait(POLL_S):
            query = f"rows={len(had['steps'])}&lives={had['lives']}&at={had['at']}"
            try:
                with urllib.request.urlopen(f"{address}data/{name}/run.json?{query}") as response:
                    news = json.load(response)
            except OSError:
                continue  # there is no run yet
            told["requests"] = told.get("requests", 0) + 1
            if "unchanged" not in news:
                had = {**news, "steps": had["steps"][: news["from"]] + news["steps"]}

    thread = threading.Thread(target=poll)
    thread.start()
    yield
    over.set()
    thread.join()
    server.send_signal(signal.SIGINT)
    _, _, usage = os.wait4(server.pid, 0)
    server.returncode = 0
    told["server_s"] = usage.ru_utime + usage.ru_stime


def turn(variant: str, steps: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home:
        groups = 0 if variant == VARIANTS[0] else 2
        command = [sys.executable, __file__, "--inside", home, "--steps", str(steps), "--groups", str(groups)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        if variant == "watched":
            with watched(Path(home), "measured", told):
                said, _ = child.communicate()
        else:
            said, _ = child.communicate()
        files = {path.name: path.stat().st_size for path in Path(home, "measured", "steps").glob("*.json")}
        told["step_file_bytes"] = sum(files.values()) / max(1, len(files))
        told["event_bytes"] = Path(home, "measured", "events.jsonl").stat().st_size / steps
    return {**json.loads(said.splitlines()[-1]), **told}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--json", type=Path)
    options.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--groups", type=int, default=2, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.inside:
        return run(given.inside, "measured", given.steps, given.groups)
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for number in range(given.turns):
        for place in range(len(VARIANTS)):
            variant = VARIANTS[(place + number) % len(VARIANTS)]
            found[variant].append(turn(variant, given.steps))
            print(f"{variant}: {found[variant][-1]}", flush=True)
    medians = {
        variant: {key: median(one[key] for one in turns) for key in turns[0]} for variant, turns in found.items()
    }
    print(json.dumps(medians, indent=1))
    if given.json:
        write_record(given.json, new_record("cpu", steps=given.steps, turns=found, medians=medians))
    return None


if __name__ == "__main__":
    main()
