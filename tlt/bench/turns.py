"""`tlt bench train --recipe`: the steps of a recipe with plain decoding and with TLT, in turns, everything included.

Both variants run in one process: step n of one, then step n of the other, in reverse order for step n + 1, so that
drifts (clocks, temperature, other load) affect both. Each has its own copy of the policy; on a GPU they share its
memory evenly. The drafter is the recipe's; nothing is trained beforehand. Before both are opened, a run of a few tokens
compiles the kernels of both, which otherwise only the first variant would pay for.

What always holds: steps, ratios and totals are on disk after every pair of steps; an interrupted benchmark keeps them.
The budget ends the benchmark after a complete pair, and not before the first. Both variants plan for `run.steps` steps,
however few are taken.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.table import Table

from tlt.bench.lab import check_shape
from tlt.bench.options import TrainOptions, TrainScale
from tlt.bench.report import BenchReport, Clock
from tlt.bench.training import (
    PLAIN,
    RECENT,
    StepRecord,
    Total,
    VariantRun,
    agreement,
    answers_of,
    in_shape,
    ratio,
    subject_of,
    total_of,
)
from tlt.checkpoint_size import checkpoint_bytes
from tlt.config import RunConfig, SpecSettings
from tlt.engine.memory import GIB, LEAST_GIB, gib_of_what_is_free
from tlt.errors import ConfigError, TltError
from tlt.machine import describe, free_memory
from tlt.model.device import free_bytes
from tlt.model.weights import read_config
from tlt.policy import device_of, source_of
from tlt.types import Experience

TLT = "tlt"
ORDERS = ((PLAIN, TLT), (TLT, PLAIN))  # of odd and even steps
_HELD = 1.5  # bytes that training holds over those of a checkpoint, which has no gradients
_BOTH_HOLD = 0.75  # of a GPU's free memory, with the caches; the rest is for activations
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class StartRecord:
    """The start-up before the first step."""

    phase: str  # "warm-up", whose seconds are no variant's, or the variant
    seconds: float
    parts_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepPair:
    """One step of both variants, and the ratios so far: seconds of plain decoding over those of TLT."""

    step: int
    first: str  # variant in turn
    plain_s: float
    tlt_s: float
    ratio: float | None  # of this step
    speedup: float | None  # of all steps so far, as are those that follow
    speedup_with_start: float | None
    lowest_speedup: float | None
    rollout_speedup: float | None
    drafting_share: float  # of TLT's steps
    recent_speedup: float | None  # of the last ten steps, as are those that follow
    recent_rollout_speedup: float | None
    recent_token_speedup: float | None  # of seconds per token


def bench_turns(config: RunConfig, options: TrainOptions) -> None:
    check_shape(options.shape)
    ends_s = time.perf_counter() + options.budget_s if options.budget_s else float("inf")
    scale = options.recipe_scale(config)
    device = device_of(config.model.device)
    with TemporaryDirectory() as scratch:
        named, config = config.model.path, in_shape(_asked(config, scale), options.shape, Path(scratch))
        subject = subject_of(config, named, options, scale)
        if device.type == "cuda" and not config.engine.kv_gib:
            free_memory()
            kv_gib = kv_gib_of_each(free_bytes(device), round(_HELD * sum(checkpoint_bytes(config))))
            config = replace(config, engine=replace(config.engine, kv_gib=kv_gib))
        model, machine = read_config(source_of(config.model)), describe(device, options.commit)
        report = BenchReport(machine, subject, model, scale, options.json, settings=config)
        with ExitStack() as stack:
            bench = _TurnsBench(config, scale, report, stack, ends_s)
            complete = report.section("pairs", bench.pairs(options.snapshot), Clock(), line=bench.line, table=False)
            if bench.taken:
                report.show(table_of(*bench.totals()))
        report.close()
    if not complete:
        raise TltError(
            "the bench ended early, for the reason above" + (f"; see {options.json}" if options.json else "")
        )


def _asked(config: RunConfig, scale: TrainScale) -> RunConfig:
    """The recipe in the scale asked for. Replays would be taken twice, and what they tell is told of every step."""
    if not config.spec.drafters:
        raise ConfigError(
            "spec.drafter is none: both variants would be plain decoding; set one, as in "
            "--spec.drafter both --spec.path new"
        )
    if config.cluster.workers > 1:
        raise ConfigError(
            f"cluster.workers is {config.cluster.workers}, and the variants run in one process; set it to 1, or see "
            "tlt bench fleet"
        )
    return replace(
        config,
        run=replace(config.run, replay_every=0),
        task=replace(config.task, prompts=scale.prompts, group=scale.group),
        sampling=replace(config.sampling, max_tokens=scale.cap),
    )


def kv_gib_of_each(free: int, held: int) -> float:
    """Half of the KV cache of one run, or less if training of both variants needs the memory.

    In bytes: `free` before either is opened, `held` by the policy and the training of one.
    """
    room_gib = (_BOTH_HOLD * free - 2 * held) / GIB
    return max(LEAST_GIB, min(gib_of_what_is_free(free - held), room_gib) / 2)


class _TurnsBench:
    """Opens both variants and takes their steps in turns."""

    def __init__(
        self, config: RunConfig, scale: TrainScale, report: BenchReport, stack: ExitStack, ends_s: float
    ) -> None:
        self._configs = {PLAIN: replace(config, spec=SpecSettings()), TLT: config}
        self._scale, self._report, self._stack, self._ends_s = scale, report, stack, ends_s
        self._runs: dict[str, VariantRun] = {}
        self._records: list[StepRecord] = []
        self.taken = 0  # pairs

    def pairs(self, snapshot: bool) -> Iterator[StepPair]:
        self._open()
        while self.taken < self._scale.steps:
            yield self._pair(ORDERS[self.taken % 2])
            if time.perf_counter() >= self._ends_s:
                break
        if snapshot:
            for run in self._runs.values():
                run.snapshot()
            self._report.keep("totals", [*self.totals()])

    def _open(self) -> None:
        starts = []
        started = time.perf_counter()
        _warm_up(self._configs[PLAIN])
        starts.append(StartRecord("warm-up", time.perf_counter() - started, {}))
        self._report.keep("start", starts)
        for name, config in self._configs.items():
            self._runs[name] = self._stack.enter_context(VariantRun(name, config))
            taken = self._runs[name].taken
            starts.append(StartRecord(name, taken.start_s, taken.start_phases_s))
            self._report.keep("start", starts)
        self._report.show(", ".join(f"{start.phase} {start.seconds:.1f} s" for start in starts))

    def _pair(self, order: tuple[str, str]) -> StepPair:
        steps = {name: self._runs[name].step() for name in order}
        answers = {name: answers_of(step) for name, (step, _) in steps.items()}
        identical, common = agreement(answers[TLT], answers[PLAIN])
        for name, (step, record) in steps.items():
            found = replace(record, identical=identical, common=common) if name == TLT else record
            self._runs[name].taken.add(found, step)
            self._records.append(found)
        self.taken += 1
        totals = [*self.totals()]
        self._report.keep("steps", self._records)
        self._report.keep("totals", totals)
        return self._compared(order[0], totals[1])

    def _compared(self, first: str, tlt: Total) -> StepPair:
        plain_s, tlt_s = (self._runs[name].taken.records[-1].step_s for name in (PLAIN, TLT))
        return StepPair(
            step=self.taken,
            first=first,
            plain_s=plain_s,
            tlt_s=tlt_s,
            ratio=ratio(plain_s, tlt_s),
            speedup=tlt.speedup,
            speedup_with_start=tlt.speedup_with_start,
            lowest_speedup=tlt.lowest_speedup,
            rollout_speedup=tlt.rollout_speedup,
            drafting_share=tlt.drafting_share,
            recent_speedup=tlt.recent_speedup,
            recent_rollout_speedup=tlt.recent_rollout_speedup,
            recent_token_speedup=tlt.recent_token_speedup,
        )

    def totals(self) -> Iterator[Total]:
        """The totals of plain decoding, then of TLT."""
        for name in (PLAIN, TLT):
            yield total_of(self._runs[name].taken, self._runs[PLAIN].taken)

    def line(self, pair: StepPair) -> str:
        plain, tlt = (self._runs[name].taken.records[-1] for name in (PLAIN, TLT))
        return (
            f"step {pair.step} ({pair.first} first): plain {pair.plain_s:.2f} s, tlt {pair.tlt_s:.2f} s (rollout "
            f"{plain.rollout_s:.2f} → {tlt.rollout_s:.2f}, update {plain.update_s:.2f} → {tlt.update_s:.2f}, drafting "
            f"{tlt.drafting_s:.2f}), tokens {plain.tokens:,} → {tlt.tokens:,}, reward {plain.mean_reward:.3f} → "
            f"{tlt.mean_reward:.3f}, accept {tlt.accept_length:.2f}; so far whole step {_times(pair.speedup)}, rollout "
            f"{_times(pair.rollout_speedup)}"
        )


def _warm_up(config: RunConfig) -> None:
    """A step of a few tokens: kernels that both variants need are compiled, and the device is awake."""
    task, sampling = replace(config.task, prompts=1, group=2), config.sampling
    short = replace(sampling, max_tokens=min(_WARM_UP_TOKENS, sampling.max_tokens))
    with VariantRun("warm-up", replace(config, task=task, sampling=short)) as run:
        rollouts = run.step()[0].rollouts
        # equal rewards teach nothing: only these two are sure to be learned from
        run.fleet.update([Experience(rollouts[0], 1.0), Experience(rollouts[1], -1.0)])
    del run
    free_memory()


def table_of(plain: Total, tlt: Total) -> Table:
    """The times of both variants, and their ratio."""
    table = Table(title=f"{tlt.steps} steps of each, in turns", title_justify="left")
    table.add_column("")
    for heading in (PLAIN, TLT, "plain / tlt"):
        table.add_column(heading, justify="right")

    def seconds(name: str, plain_s: float, tlt_s: float, found: float | None) -> None:
        table.add_row(name, f"{plain_s:,.2f} s", f"{tlt_s:,.2f} s", _times(found))

    def same(name: str, *fields: str, form: str = ",") -> None:
        cells = (" ".join(format(getattr(total, field), form) for field in fields) for total in (plain, tlt))
        table.add_row(name, *cells, "")

    seconds("whole steps", plain.seconds, tlt.seconds, tlt.speedup)
    plain_s, tlt_s = (total.start_s + total.seconds for total in (plain, tlt))
    seconds("with start-up", plain_s, tlt_s, tlt.speedup_with_start)
    seconds("rollouts", plain.rollout_s, tlt.rollout_s, tlt.rollout_speedup)
    table.add_row("lowest so far, whole steps", "", "", _times(tlt.lowest_speedup))
    if tlt.steps > RECENT:
        table.add_row(f"last {RECENT} steps", "", "", _times(tlt.recent_speedup))
        table.add_row(f"last {RECENT} rollouts", "", "", _times(tlt.recent_rollout_speedup))
    table.add_row(f"last {min(RECENT, tlt.steps)} steps, per token", "", "", _times(tlt.recent_token_speedup))
    table.add_row("drafter training", "", f"{tlt.drafting_share:.1%}", "")
    if plain.snapshot_s is not None and tlt.snapshot_s is not None:
        table.add_row("first checkpoint's snapshot", f"{plain.snapshot_s:,.2f} s", f"{tlt.snapshot_s:,.2f} s", "")
    same("reward, first and last third", "reward_first", "reward_last", form=".3f")
    same("accept length, first and last third", "accept_first", "accept_last", form=".2f")
    same("tokens", "tokens")
    same(f"lengths: p50 p90 p99 max (cap {tlt.cap:,})", "length_p50", "length_p90", "length_p99", "length_max")
    table.caption = f"temperature {tlt.temperature:g}, {tlt.answers:,} answers of each"
    return table


def _times(found: float | None) -> str:
    return "–" if found is None else f"{found:.3f} ×"
