"""`tlt simulate`: how long a rollout would take on so many workers, plainly and with TLT, from a length trace.

Measures a policy on this machine first, or reads the cost book of a measured one. Rollouts are simulated one after the
other, so that tuners learn; the last one counts. For the trace of a run, its measured time is printed beside.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import log
from pathlib import Path
from statistics import pstdev
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tlt.config import NEW, EngineSettings, RunConfig, SpecSettings
from tlt.engine.build import record_of, shape_policy_of, shapes_of
from tlt.errors import ConfigError
from tlt.event_builders import Lengths
from tlt.outputs import check_new, write_new
from tlt.policy import open_policy
from tlt.sim.book import CostBook, read_book, words_of, write_book
from tlt.sim.fleet import SimFleet, Simulated
from tlt.sim.measuring import measure_book, pad_of
from tlt.sim.trace import Trace, trace_of
from tlt.sim.world import World
from tlt.spec.drafter import drafter_class, learned_drafter
from tlt.spec.shape import by_batch
from tlt.spec.shape_policy import ShapePolicy

_LAST = 32  # completions that make up the tail
_LEAST_TAIL = (
    0.05  # fraction of the rollout below which the tail is not shown: many completions end together at the cap
)


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    subject: str  # a policy to measure, or a cost book
    lengths: str
    workers: tuple[int, ...] = (1, 2, 4, 8)
    rollouts: int = 3  # one after the other
    save: Path | None = None  # where the book goes
    json: Path | None = None


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Simulated rollouts on one number of workers."""

    workers: int
    plain: Simulated
    drafted: Simulated | None  # None: the book has no drafter

    @property
    def best(self) -> Simulated:
        return self.drafted or self.plain


def simulate(config: RunConfig, options: SimulateOptions) -> None:
    for argument, file in (("--json", options.json), ("--save", options.save)):
        if file:
            check_new(file, argument)
    trace = trace_of(options.lengths, config)
    console = Console(highlight=False)
    book = _book(config, options, console)
    _tell_subject(console, book, trace)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=len(options.workers) * (1 + options.rollouts * book.drafts))
        done = partial(progress.advance, task)
        found = [choose_next(book, trace, config, workers, options.rollouts, done) for workers in options.workers]
    _tell(console, found, trace)
    if options.json:
        write_new(options.json, partial(_write, book, trace, found))
        console.print(f"wrote {options.json}", soft_wrap=True)


def _book(config: RunConfig, options: SimulateOptions, console: Console) -> CostBook:
    if not all(drafter_class(name).learned for name in config.spec.drafters):
        raise ConfigError(
            f'spec.drafter is "{config.spec.drafter}"; what a suffix drafter finds depends on the text, which no trace '
            'has: expected "none", or "eagle" and the drafter\'s spec.path'
        )
    if options.subject.endswith(".json"):
        return read_book(Path(options.subject))
    if config.spec.drafters and record_of(config.spec) is None:
        known = "a drafter that has learned nothing" if config.spec.path == NEW else config.spec.path
        raise ConfigError(
            f"nobody has measured what the policy accepts of {known}; train a drafter with `tlt draft train`, or "
            "measure one with `tlt draft measure DRAFTER --prompts FILE`"
        )
    policy = open_policy(config.model)
    with console.status("measuring what runs cost on this machine"):
        book = measure_book(policy, config)
    if options.save:
        write_new(options.save, partial(write_book, book))
        console.print(f"wrote {options.save}", soft_wrap=True)
    return book


def choose_next(
    book: CostBook,
    trace: Trace,
    config: RunConfig,
    workers: int,
    rollouts: int,
    done: Callable[[], None] = lambda: None,
) -> Foreseen:
    """Simulates rollouts plainly and with a tuner per worker that chooses among the learned drafter's shapes.

    Returns the last of each. `done` is called after every rollout.
    """
    spec = replace(config.spec, drafter=learned_drafter() if book.drafts else "none", path=NEW)
    engine = replace(config.engine, rows=book.rows, page_size=book.page_size)
    shapes, pad = shapes_of(spec, exact=engine.exact) if book.drafts else (), pad_of(book)

    def run(shape_policy: Callable[[], ShapePolicy | None], count: int) -> Simulated:
        fleet = SimFleet(
            trace,
            workers,
            lambda number: World(book, shapes, pad, config.run.seed + number),
            engine,
            shape_policy,
            max(spec.depths),
        )
        for _ in range(count):
            found = fleet.rollout()
            done()
        return found

    return Foreseen(
        workers, run(lambda: None, 1), run(lambda: _tuner(spec, engine, book), rollouts) if book.drafts else None
    )


def _tuner(spec: SpecSettings, engine: EngineSettings, book: CostBook) -> ShapePolicy:
    """A tuner that starts from the book's acceptance."""
    tuner = shape_policy_of(spec, book.rows, book.measured, exact=engine.exact, on_gpu=book.gpu)
    for name in spec.drafters:
        tuner.load_prior(name, book.ranks)
    return tuner


# ---- output


def _tell_subject(console: Console, book: CostBook, trace: Trace) -> None:
    lengths = Lengths.of(trace.lengths)
    console.print(
        f"[bold]{book.policy}[/bold] on {book.device}, {book.rows} requests at a time; {len(trace.lengths)} answers to "
        f"{len(trace.asked)} prompts ({trace.source}): median {lengths.p50}, p90 {lengths.p90}, longest "
        f"{lengths.longest} tokens",
        soft_wrap=True,
    )


def _tell(console: Console, found: list[Foreseen], trace: Trace) -> None:
    table = Table(title="A rollout, foreseen", title_justify="left", caption_justify="left")
    for name in (
        "workers",
        "plain s",
        "TLT s",
        "faster",
        f"last {_LAST}",
        "accepted",
        "idle, plain",
        "idle, TLT",
    ):
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(*_cells(one))
    table.caption = "accepted: tokens per verify; idle: of all workers' time, when the drafter may be trained"
    console.print(table)
    for line in (_measured(found, trace), _step(found, trace)):
        if line:
            console.print(line, soft_wrap=True)


def _cells(one: Foreseen) -> list[str]:
    plain, drafted = one.plain, one.drafted
    known = [str(one.workers), f"{plain.seconds:.3g}"]
    if drafted is None:
        return [*known, "–", "–", "–", "–", f"{plain.idle_share:.0%}", "–"]
    tails = plain.tail_s(_LAST), drafted.tail_s(_LAST)
    last = tails[0] / tails[1] if min(tails) > 0 and tails[0] > _LEAST_TAIL * plain.seconds else None
    return [
        *known,
        f"{drafted.seconds:.3g}",
        f"{plain.seconds / drafted.seconds:.2f} ×",
        f"{last:.2f} ×" if last else "–",
        f"{drafted.accept_length:.2f}",
        f"{plain.idle_share:.0%}",
        f"{drafted.idle_share:.0%}",
    ]


def _compared(found: list[Foreseen], trace: Trace) -> Simulated | None:
    """The simulated counterpart of the run from which the trace was read."""
    one = next((one for one in found if one.workers == trace.workers), None)
    if one is None or trace.rollout_s is None:
        return None
    return one.plain if trace.drafter == "none" else one.drafted if trace.drafter == learned_drafter() else None


def _measured(found: list[Foreseen], trace: Trace) -> str:
    expected = _compared(found, trace)
    if expected is None or trace.rollout_s is None:
        return ""
    error = expected.seconds / trace.rollout_s - 1.0
    return (
        f"That rollout took {trace.rollout_s:.3g} s on {trace.workers} worker{'s'[: trace.workers > 1]} "
        f"(spec.drafter {trace.drafter}); foreseen are {expected.seconds:.3g} s, {error:+.0%} "
        "if it ran on what was measured."
    )


def _step(found: list[Foreseen], trace: Trace) -> str:
    if trace.rest_s is None:
        return ""
    steps = (
        f"{one.workers}: {one.plain.seconds + rest:.3g} → {one.best.seconds + rest:.3g} s "
        f"({(one.plain.seconds + rest) / (one.best.seconds + rest):.2f} ×)"
        for one in found
        for rest in [trace.rest_s * trace.workers / one.workers]
    )
    return (
        f"Steps, if their other {trace.rest_s:.3g} s on {trace.workers} worker{'s'[: trace.workers > 1]} are shared by "
        f"all: {', '.join(steps)}."
    )


def _write(book: CostBook, trace: Trace, found: list[Foreseen], file: Path) -> None:
    expected = _compared(found, trace)
    content = {
        "book": words_of(book),
        "trace": {
            "source": trace.source,
            "answers": len(trace.lengths),
            "prompts": len(trace.asked),
            "tokens": sum(trace.lengths),
            "longest": max(trace.lengths),
            "sigma_log_length": pstdev(map(log, trace.lengths)),
            "cap": trace.cap,
        },
        "measured": None
        if expected is None
        else {"rollout_s": trace.rollout_s, "foreseen_s": expected.seconds, "workers": trace.workers},
        "foreseen": [
            {"workers": one.workers, "plain": _told(one.plain), "drafted": _told(one.drafted)} for one in found
        ],
    }
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _told(one: Simulated | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "seconds": one.seconds,
        "ticks": one.ticks,
        "accept_length": one.accept_length,
        "idle_share": one.idle_share,
        "last_32_s": one.tail_s(_LAST),
        "writing_s": one.writing_s,
        "drafting_s": one.drafting_s,
        "shapes": by_batch(one.shapes.items()),
    }
