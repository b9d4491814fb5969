"""The run on a terminal: a line per finished step, and below them the current activity.

A reader of events: every event is on disk before it is shown. In a terminal the lower part is live; elsewhere (a pipe,
a log file) there are only lines, and no line is rewritten. Does not depend on the code that emits the events.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from tlt.config import RunConfig
from tlt.train.rates import is_far
from tlt.watch.events import (
    AcceptanceCollapsed,
    CheckpointDamaged,
    CheckpointSaved,
    CheckpointsPlanned,
    DrafterSwapped,
    DrafterTrained,
    Evaluated,
    Event,
    HealthWarning,
    LearningRatePlanned,
    MemoryPlanned,
    NothingLeft,
    PhaseStarted,
    PromptsFitted,
    PromptsPlanned,
    ReaderFailed,
    Recorded,
    ReplayCompared,
    RewardsFailed,
    RolloutProgress,
    RunFailed,
    RunResumed,
    RunStarted,
    StartupFinished,
    StartupPhase,
    StepFinished,
    TrainingForecast,
)
from tlt.watch.health import Health, HealthLight, Level, worst_of
from tlt.watch.history import drafted
from tlt.watch.summary import duration, evaluation_in_words, first_line, forecast_in_words, size, when_evaluated
from tlt.watch.verdict import Replayed, both_ratios, in_short, whole_steps
from tlt.watch.workers import FleetWaits, WorkerLost, WorkerReturned

_RECENT = 10  # steps whose mean time the remaining ones are reckoned by
_HEAD_EVERY = 25  # lines between two headings
_DOING = {
    "start": "starting",
    "rollout": "rollout",
    "reward": "judging the completions",
    "update": "updating the policy",
    "drafting": "training the drafter",
    "checkpoint": "saving a checkpoint",
    "replay": "writing the rollout again, plainly, to compare",
    "evaluation": "evaluating on held-out prompts",
}
_BY_HEART = 20.0  # times that each prompt is asked
_LOUD = {"more": "bold yellow", "fault": "bold red"}  # verdicts on a replay; the others are quiet


@dataclass(slots=True)
class Progress:
    """State computed from the events so far. No drawing."""

    planned: int  # steps
    taken: int = 0
    phase: str = ""
    phase_since: float = 0.0  # time of the event
    rollout: RolloutProgress | None = None  # of the rollout that runs
    saved_s: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))  # seconds per step

    def note(self, record: Recorded) -> None:
        match record.event:
            case RunStarted():
                self.phase, self.phase_since = "start", record.time
            case StartupPhase(phase=phase):
                self.phase, self.phase_since = phase, record.time
            case StartupFinished():
                self.phase = ""
            case RunResumed(step=step):
                self.taken = step
            case PhaseStarted(phase=phase):
                self.phase, self.phase_since, self.rollout = phase, record.time, None
            case RolloutProgress() as rollout:
                self.rollout = rollout
            case StepFinished() as step:
                self.taken, self.phase, self.rollout = step.step, "", None
                self.saved_s += step.saved_s
                self.recent.append(step.step_s)
            case _:
                pass

    @property
    def left_s(self) -> float | None:
        """Estimated seconds until the last step, from the mean of recent steps."""
        if not self.recent:
            return None
        return (self.planned - self.taken) * sum(self.recent) / len(self.recent)


# ---- lines


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    width: int
    say: Callable[[StepFinished], str]
    spare: bool = False  # left out where the terminal is narrow


_COLUMNS = (
    _Column("reward", 9, lambda step: _reward(step.mean_reward)),
    _Column("length p50", 11, lambda step: f"{step.length_p50}"),
    _Column("p90", 6, lambda step: f"{step.length_p90}"),
    _Column("longest", 8, lambda step: f"{step.length_max}"),
    _Column("cut", 5, lambda step: f"{step.truncated:.0%}"),
    _Column("accept", 7, lambda step: f"{step.accept_length:.2f}" if drafted(step) else "–"),
    _Column("rollout", 9, lambda step: _short(step.rollout_s)),
    _Column("update", 8, lambda step: _short(step.update_s), spare=True),
    _Column("drafter", 8, lambda step: _short(step.drafting_s), spare=True),
    _Column("step", 8, lambda step: _short(step.step_s)),
    _Column("saved", 8, lambda step: _short(step.saved_s) if step.saved_s else "–"),
)
_STEP_WIDTH = 9
WIDE = _STEP_WIDTH + sum(column.width for column in _COLUMNS)  # characters of a whole line


def heading(wide: bool = True) -> str:
    return f"{'step':>{_STEP_WIDTH}}" + "".join(f"{column.name:>{column.width}}" for column in _columns(wide))


def step_line(step: StepFinished, planned: int, wide: bool = True) -> str:
    number = f"{step.step}/{planned}"
    return f"{number:>{_STEP_WIDTH}}" + "".join(f"{column.say(step):>{column.width}}" for column in _columns(wide))


def _columns(wide: bool) -> list[_Column]:
    return [column for column in _COLUMNS if wide or not column.spare]


def _reward(mean: float) -> str:
    return f"{mean:.3f}" if abs(mean) < 1000 else f"{mean:.2g}"  # what a user's function returns may be large


def _short(seconds: float) -> str:
    sign = "−" if seconds < -0.005 else ""
    seconds = abs(seconds)
    return f"{sign}{seconds:.2f}s" if seconds < 9.995 else f"{sign}{seconds:.0f}s"


_LIGHT: dict[Level, tuple[str, str]] = {  # how a light is drawn, and its style
    "off": ("○", "dim"),
    "good": ("●", "green"),
    "warn": ("▲", "bold yellow"),
    "bad": ("■", "bold red"),
}


def lights_row(lights: Sequence[HealthLight]) -> Text:
    """As in `● learning  ▲ truncation`: the shape of a light says its level without colour."""
    row = Text(no_wrap=True, overflow="ellipsis")
    for light in lights:
        mark, style = _LIGHT[light.level]
        row.append(f"  {mark} {light.name}", style)
    return row


def notice(event: Event) -> tuple[str, str] | None:
    """The line and style that the console prints for an event other than a step's; None: no line."""
    match event:
        case RunResumed(step=step, path=path, changed=changed):
            text = f"resumed from {path}, {step} steps taken" if path else "nothing to resume yet: begins"
            return f"{text}; with other settings: {', '.join(changed)}" if changed else text, "bold"
        case CheckpointDamaged(path=path, problem=problem):
            return f"{path} is passed over: {problem}", "bold yellow"
        case CheckpointsPlanned() as planned:
            return _plan(planned)
        case MemoryPlanned(device_bytes=device_bytes) as memory if device_bytes:
            return _memory(memory), "dim"
        case NothingLeft(step=step, steps=steps):
            return f"nothing is left to do: step {step} was the last of run.steps ({steps}); raise it to go on", "bold"
        case PromptsPlanned() as asked:
            return _prompts(asked)
        case LearningRatePlanned() as planned_rate:
            return _rate(planned_rate)
        case CheckpointSaved(path=path, seconds=seconds):
            return f"saved {path} ({duration(seconds)})", "dim"
        case PromptsFitted() as fitted:
            became = "lose their beginning" if fitted.choice == "truncate" else "are left out"
            text = f"{fitted.long:,} of {fitted.prompts:,} prompts ({fitted.name}) have more than {fitted.limit} tokens"
            return f"{text}: they {became}", "bold yellow" if 10 * fitted.long > fitted.prompts else "dim"
        case Evaluated() as evaluated:
            best = ", the best so far" if evaluated.best and evaluated.step else ""
            return f"{when_evaluated(evaluated)}: {evaluation_in_words(evaluated)}{best}", "bold"
        case TrainingForecast() as told:
            return f"step {told.step}: {forecast_in_words(told)}", "dim"
        case DrafterTrained() as trained:
            text = f"drafter {trained.version}: loss {trained.loss_before:.3f} → {trained.loss_after:.3f}"
            return f"{text} in {duration(trained.seconds)}, {trained.reason}", "dim"
        case ReplayCompared() as replay:
            compared = Replayed.of([replay])
            text = f"plainly {duration(replay.plain_s)} instead of {duration(replay.tlt_s)}, {in_short(compared)}"
            return f"step {replay.step} written again: {text}", _LOUD.get(compared.verdict, "dim")
        case RewardsFailed() as failed:
            text = f"{failed.count} rewards failed ({failed.kind}); the first, of {failed.prompt}: {failed.message}"
            return text, "bold yellow"
        case HealthWarning() as warning:
            style = "bold red" if warning.bad else "bold yellow"
            return f"{warning.light}: {warning.message}; {warning.remedy}", style
        case AcceptanceCollapsed() as alarm:
            text = f"acceptance of {alarm.drafter} collapsed: {alarm.recent:.2f} tokens per verify"
            return f"{text}, was {alarm.baseline:.2f}; decoding goes on without it until it helps again", "bold yellow"
        case WorkerLost() as lost:
            text = f"worker {lost.worker} was lost in {lost.phase}: {lost.reason}"
            return f"{text}; others take over its {lost.requests} requests", "bold yellow"
        case WorkerReturned(worker=worker, host=host, seconds=seconds):
            return f"worker {worker} is back on {host} after {duration(seconds)}", "bold"
        case FleetWaits() as waits:
            who = ", ".join(map(str, waits.workers))
            return f"{waits.phase} has waited {duration(waits.seconds)} for worker {who}", "bold yellow"
        case ReaderFailed(reader=reader, message=message):
            return f"{reader} is left out from now on: {message}. The run goes on; its events are complete", "bold red"
        case RunFailed(kind=kind, message=message):
            return f"stopped by {kind}: {first_line(message)}".rstrip(": "), "bold red"
        case _:
            return None


class StartupLines:
    """Start-up: a line for each phase as it begins, and one at the end with the seconds of each."""

    name = "console"

    def __init__(self, console: Console, *, beginnings: bool = True) -> None:
        self._console = console
        self._beginnings = beginnings  # whether a phase is a line before it is over
        self._phases: list[tuple[str, float]] = []  # and the time of its event

    def show(self, record: Recorded) -> None:
        match record.event:
            case StartupPhase(phase=phase):
                self._phases.append((phase, record.time))
                self._begin(phase)
            case StartupFinished(seconds=seconds):
                ends = [*(began for _, began in self._phases[1:]), record.time]
                took = [end - began for (_, began), end in zip(self._phases, ends, strict=True)]
                each = [f"{phase} {duration(s)}" for (phase, _), s in zip(self._phases, took, strict=True)]
                self._print(f"ready after {duration(seconds)}: {', '.join(each)}")
            case _:
                pass

    def _begin(self, phase: str) -> None:
        if self._beginnings:
            self._print(f"{phase} …")

    def _print(self, text: str) -> None:
        self._console.print(f"  {text}", style="dim", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


class StartupStatus(StartupLines):
    """Start-up in a terminal: one line with the current phase, removed at the end."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, beginnings=False)
        self._status = Status("", console=console)

    def show(self, record: Recorded) -> None:
        if isinstance(record.event, StartupFinished):
            self._status.stop()  # before the verb shows something of its own
        super().show(record)

    def _begin(self, phase: str) -> None:
        self._status.start()
        self._status.update(f"{phase} …", spinner="dots")  # a spinner named is drawn at once

    def close(self) -> None:
        self._status.stop()


def _plan(planned: CheckpointsPlanned) -> tuple[str, str]:
    weights, optimizer = planned.weights_bytes, planned.optimizer_bytes
    whole = size(weights + optimizer)
    parts = f"weights {size(weights)}, optimizer {size(optimizer)}"
    text = f"a checkpoint takes {whole}, and {whole} of host memory: {parts}"
    kept = f"{planned.keep} kept"
    if planned.keep_optimizer < planned.keep:
        kept += f", {planned.keep_optimizer} of them with the optimizer"
    text += f"; {kept}: up to {size(planned.most_bytes)} while one is written, {size(planned.free_bytes)} free"
    if planned.most_bytes <= planned.free_bytes:
        return text, "dim"
    return f"{text}: too little for {planned.path}; lower checkpoint.keep or checkpoint.keep_optimizer", "bold yellow"


def _memory(planned: MemoryPlanned) -> str:
    parts = ", ".join(f"{name} {size(bytes_)}" for name, bytes_ in planned.parts)
    return f"GPU memory: {size(sum(bytes_ for _, bytes_ in planned.parts))} of {size(planned.device_bytes)}: {parts}"


def _prompts(planned: PromptsPlanned) -> tuple[str, str]:
    text = f"{planned.path} has {planned.prompts:,} prompts: {_asked(planned)}"
    if planned.per_step > planned.prompts:
        cure = f"a step asks {planned.per_step}: lower task.prompts to {planned.prompts}, and raise task.group instead"
        return f"{text}, some more than once in a step, as {cure}", "bold yellow"
    if planned.times > _BY_HEART:
        return f"{text}; the policy may learn them by heart: more prompts, or fewer steps", "bold yellow"
    return text, "dim"


def _asked(planned: PromptsPlanned) -> str:
    number, turns = planned.per_step * planned.steps, planned.turns
    if planned.times * turns < 1:
        more = f" to {number * turns:,}" if turns > 1 else ""
        return f"{planned.steps} steps ask {number:,}{more} of them"
    more = f" to {planned.times * turns:.3g}" if turns > 1 else ""
    return f"each is asked {planned.times:.3g}{more} times in {planned.steps} steps"


def _rate(planned: LearningRatePlanned) -> tuple[str, str]:
    text = f"learning rate {planned.rate:g} for {planned.kind}"
    if not planned.given:
        return f"{text}, the usual one; train.learning_rate sets another", "dim"
    text = f"{text}, as given; {planned.usual:g} is usual"
    return (
        (f"{text}: this may destroy the policy", "bold yellow")
        if is_far(planned.rate, planned.usual)
        else (text, "dim")
    )


class Lines:
    """Lines only, for pipes and log files."""

    name = "console"

    def __init__(self, config: RunConfig, console: Console, *, beginnings: bool = True) -> None:
        self._progress = Progress(config.run.steps)
        self._health = Health(config)
        self._console = console
        self._startup = StartupLines(console, beginnings=beginnings)
        self._since_heading = _HEAD_EVERY
        self._drafter: int | None = None  # version last told of
        self._compared: list[Event] = []  # all that whole steps are compared by
        self._replays: list[ReplayCompared] = []

    def show(self, record: Recorded) -> None:
        self._progress.note(record)
        self._health.see(record.event)
        self._startup.show(record)
        if isinstance(record.event, StepFinished | ReplayCompared | DrafterSwapped | CheckpointsPlanned):
            self._compared.append(record.event)
        if isinstance(record.event, ReplayCompared):
            self._replays.append(record.event)
        if isinstance(record.event, StepFinished):
            self._show_step(record.event)
        elif (said := notice(record.event)) and not self._stale(record.event):
            self._print(f"  {said[0]}", said[1])

    def _stale(self, event: Event) -> bool:
        """Whether an event is about a drafter version that is no newer than the last one."""
        if not isinstance(event, DrafterTrained):
            return False
        stale = event.version == self._drafter
        self._drafter = event.version
        return stale

    def _show_step(self, step: StepFinished) -> None:
        if self._since_heading == _HEAD_EVERY:
            self._console.print(lights_row(self._health.lights()), soft_wrap=True)
            self._print(heading(self._wide), "dim")
            self._since_heading = 0
        self._since_heading += 1
        self._print(step_line(step, self._progress.planned, self._wide), "")
        if self._replays and self._replays[-1].step == step.step:
            ratios = both_ratios(Replayed.of(self._replays).speedup, whole_steps(self._compared).measured)
            self._print(f"  against plain training so far: {ratios} as fast", "dim")

    @property
    def _wide(self) -> bool:
        return not self._console.is_terminal or self._console.width >= WIDE

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


class LiveLines(Lines):
    """Lines, and below them a live part: the run's progress bar and the current phase."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        super().__init__(config, console, beginnings=False)
        self._live = Live(_Now(self._progress, self._health), console=console, refresh_per_second=4, transient=True)

    def show(self, record: Recorded) -> None:
        super().show(record)
        if not self._live.is_started:
            self._live.start(refresh=True)

    def close(self) -> None:
        self._live.stop()


class _Now:
    """The live part; rendered whenever the terminal asks."""

    def __init__(self, progress: Progress, health: Health) -> None:
        self._progress, self._health = progress, health

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(*self._box(), self._run(), self._step())

    def _box(self) -> Iterator[Text]:
        """The lights, and the remedy of the worst one."""
        lights = self._health.lights()
        yield lights_row(lights)
        worst = worst_of(lights)
        if worst.remedy:
            text, style = f"{worst.name}: {worst.says}; {worst.remedy}", _LIGHT[worst.level][1]
            yield Text(text, style, no_wrap=True, overflow="ellipsis")

    def _run(self) -> Table:
        progress = self._progress
        left = "–" if progress.left_s is None else duration(progress.left_s)
        words = f"{progress.taken} of {progress.planned} steps · {left} left"
        if progress.saved_s:
            words += f" · {duration(progress.saved_s)} of rollout saved"
        return self._row(ProgressBar(progress.planned, progress.taken, width=28), words)

    def _step(self) -> Table:
        progress, rollout = self._progress, self._progress.rollout
        if not progress.phase:
            return self._row(Text(""), "")
        seconds = max(0.0, time.time() - progress.phase_since)
        doing = f"{_DOING.get(progress.phase, progress.phase)} · {duration(seconds)}"
        if progress.phase not in ("rollout", "replay", "evaluation") or rollout is None:
            return self._row(Text("…"), doing)
        words = f"{doing} · {rollout.finished} of {rollout.n} completions, {rollout.running} running"
        return self._row(ProgressBar(rollout.n, rollout.finished, width=28), f"{words} · {rollout.tokens:,} tokens")

    @staticmethod
    def _row(bar: ProgressBar | Text, words: str) -> Table:
        row = Table.grid(padding=(0, 2))
        row.add_column(width=28)
        row.add_row(bar, Text(words, style="dim", no_wrap=True, overflow="ellipsis"))
        return row
