"""Whether the simulator foresees fleets: the same rollouts written by 2 and 4 workers under Ray, and simulated.

    python benchmarks/simulated_fleet.py --workers 2,4 [--groups 32 --group-size 8 --rollouts 3] --json FILE

On CPU clocks: the cost book and every worker's ticks are timed by the CPU seconds of their thread, so that other work
on the machine does not count. A worker decodes from the first request to its last, so the rollout lasts as long as the
busiest worker. Plain decoding, all requests handed out at the start. CPU seconds follow the machine's load as well, if
less: the same forward is timed while a book is measured and around every rollout, and its ratio scales the book. Every
knob is a flag too.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch

from tlt.bench.record import write_record
from tlt.cluster.host import Host
from tlt.cluster.ray_fleet import RayFleet
from tlt.config import RunConfig
from tlt.engine.request import Request
from tlt.machine import describe
from tlt.model.attention import PackedLayout
from tlt.policy import Policy, open_policy
from tlt.recipe import load_config, take_flags
from tlt.sim.book import CostBook, words_of
from tlt.sim.fleet import Simulated
from tlt.sim.measuring import measure_book
from tlt.sim.trace import Trace, TracedPrompt
from tlt.simulate import choose_next
from tlt.tasks.toy import ToyTask
from tlt.types import Completion, Key

_FORWARDS = 60


def count_cpu_seconds() -> None:
    """Every clock of this process is the CPU time of the thread that reads it."""
    torch.set_num_threads(1)
    time.perf_counter = time.thread_time


def forward_s(policy: Policy) -> float:
    """The middle time of the same forward."""
    tokens, layout, took = torch.arange(64) % 16, PackedLayout.from_lengths((64,)), list[float]()
    with torch.no_grad():
        for _ in range(_FORWARDS):
            started = time.thread_time()
            policy.model(tokens, layout)
            took.append(time.thread_time() - started)
    return median(took)


class TimedHost(Host):
    """A worker that sums up the CPU seconds of its ticks."""

    def open(self, *given: Any) -> None:
        count_cpu_seconds()
        super().open(*given)
        self._ticks_s, self._ticks = 0.0, 0

    def forward_s(self) -> float:
        return forward_s(self._worker.policy)

    def _tick(self) -> None:
        started = time.thread_time()
        super()._tick()
        self._ticks_s += time.thread_time() - started
        self._ticks += 1

    def ticked(self) -> tuple[float, int]:
        """CPU seconds and ticks since the last call."""
        found = self._ticks_s, self._ticks
        self._ticks_s, self._ticks = 0.0, 0
        return found


@ray.remote(num_cpus=0)
def book_of(config: RunConfig) -> tuple[CostBook, float]:
    """And the seconds of a forward around it."""
    count_cpu_seconds()
    policy = open_policy(config.model)
    before = forward_s(policy)
    return measure_book(policy, config), (before + forward_s(policy)) / 2


def book_beside(config: RunConfig, workers: int) -> tuple[CostBook, float]:
    """Measured in as many processes as there will be workers, at once: they share caches and memory. The middle one, by
    its largest forward over the same forward."""
    books: list[tuple[CostBook, float]] = ray.get([book_of.remote(config) for _ in range(workers)])
    return sorted(books, key=lambda one: max(cost.seconds for cost in one[0].measured) / one[1])[len(books) // 2]


def requests_of(config: RunConfig, step: int, group: int) -> list[Request]:
    tokenizer = open_policy(config.model).tokenizer
    asked = ToyTask(config.task.toy, seed=config.run.seed).sample(step, config.task.prompts)
    prompts = [tuple(tokenizer.encode_prompt(prompt.content)) for prompt in asked]
    return [
        Request(Key(step, number * group + n), prompt, config.sampling, f"{step}/{number}")
        for number, prompt in enumerate(prompts)
        for n in range(group)
    ]


def trace_of(requests: Sequence[Request], completions: Sequence[Completion], group: int, cap: int) -> Trace:
    length = {completion.key: len(completion.tokens) for completion in completions}
    groups = [requests[first : first + group] for first in range(0, len(requests), group)]
    asked = tuple(TracedPrompt(tuple(length[one.key] for one in each), len(each[0].prompt)) for each in groups)
    return Trace(asked, cap, "measured here")


def compared(config: RunConfig, workers: int, book: CostBook, book_s: float, rollouts: int) -> list[dict[str, Any]]:
    """`book_s`: of a forward while the book was measured."""
    group, found = config.task.group, []
    cluster = replace(config.cluster, workers=workers, cpus_per_worker=0.1, pin=False, drafting=False)
    fleet = RayFleet(replace(config, cluster=cluster), lambda event: None, host=TimedHost)
    try:
        for step in range(rollouts + 1):  # the first one warms up
            requests = requests_of(config, step, group)
            members = sorted(fleet._actors.members.values(), key=lambda member: member.rank)
            before = ray.get([member.actor.forward_s.remote() for member in members])
            completions = list(fleet.rollout(step, requests))
            after = ray.get([member.actor.forward_s.remote() for member in members])
            ticked = ray.get([member.actor.ticked.remote() for member in members])
            trace = trace_of(requests, completions, group, config.sampling.max_tokens)
            if step:
                slower = sum((*before, *after)) / (2 * workers) / book_s
                found.append(row(ticked, choose_next(book, trace, config, workers, 1).plain, trace, slower))
                print(workers, found[-1], flush=True)
    finally:
        fleet.close()
    return found


def row(ticked: Sequence[tuple[float, int]], simulated: Simulated, trace: Trace, slower: float) -> dict[str, Any]:
    """`slower`: the machine, than while the book was measured."""
    seconds = [took for took, _ in ticked]
    measured, expected = max(seconds), simulated.seconds * slower
    idle = 1.0 - sum(seconds) / (len(seconds) * measured)
    return {
        "tokens": sum(trace.lengths),
        "longest": max(trace.lengths),
        "measured_s": measured,
        "foreseen_s": expected,
        "slower": slower,
        "error": expected / measured - 1.0,
        "measured_ticks": sum(ticks for _, ticks in ticked),
        "foreseen_ticks": simulated.ticks,
        "error_of_shares": (1.0 - idle) / (1.0 - simulated.idle_share) - 1.0,  # given the seconds of all ticks together
        "measured_idle": idle,
        "foreseen_idle": simulated.idle_share,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    flags, rest = take_flags(list(sys.argv[1:] if arguments is None else arguments))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args(rest)
    config = load_config(None, ["--engine.rows=128", "--model.path=tiny", "--model.device=cpu", *flags])
    config = replace(config, task=replace(config.task, prompts=options.groups, group=options.group_size))
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    machine, found = asdict(describe(torch.device("cpu"), options.commit)), dict[int, Any]()
    for workers in map(int, options.workers.split(",")):
        book, book_s = book_beside(config, workers)
        rows = compared(config, workers, book, book_s, options.rollouts)
        found[workers] = {"error": median(one["error"] for one in rows), "rollouts": rows, "book": words_of(book)}
        print(workers, "workers, error", found[workers]["error"], flush=True)
    if options.json:
        write_record(options.json, {"machine": machine, "workers": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
