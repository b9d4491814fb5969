"""A run in numbers and sentences: the last lines of the console and the top of the report.

Pure: a run in, numbers and sentences out. Measured and estimated times are never mixed: `replayed` is measured,
`saved_s` is estimated with the engine's cost model, and the sentences say which.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tlt.config import RunConfig
from tlt.watch.events import (
    AcceptanceCollapsed,
    DrafterTrained,
    Evaluated,
    MachineDescribed,
    ReaderFailed,
    Recorded,
    ReplayCompared,
    RewardsFailed,
    Run,
    RunFailed,
    RunFinished,
    RunResumed,
    RunStarted,
    StepFinished,
    TrainingForecast,
)
from tlt.watch.health import HealthLight, lights_of, nothing_learned
from tlt.watch.history import counted, drafted, events_of, steps_of
from tlt.watch.verdict import Replayed, WholeSteps, both_ratios, verdict_in_words, whole_steps

PHASES = ("rollout", "reward", "update", "drafting", "checkpoint")
_ENDS = 5  # steps at the beginning and at the end that are compared


@dataclass(frozen=True, slots=True)
class Ends:
    """A number at the beginning and at the end of a run: means over the first and the last few steps."""

    first: float
    last: float
    steps: int  # in each mean
    apart: bool = True  # False: of one step, both of them


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Evaluations on one set of held-out prompts."""

    first: Evaluated
    last: Evaluated
    best: Evaluated | None  # by eval.best, which names one set

    @classmethod
    def of(cls, told: Sequence[Evaluated]) -> "tuple[Evaluations, ...]":
        by_name: dict[str, dict[int, Evaluated]] = {}
        for one in told:
            by_name.setdefault(one.name, {})[one.step] = one
        each = [list(found.values()) for found in by_name.values()]
        return tuple(
            cls(found[0], found[-1], next((one for one in reversed(found) if one.best), None)) for found in each
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a run. Numbers of steps that do not exist are 0."""

    name: str
    planned: int  # steps
    taken: int
    ended: str  # "finished", "stopped" or "running": where no end is on record
    failure: str  # what stopped it
    resumes: int
    reward: Ends
    evaluations: tuple[Evaluations, ...]
    length: Ends
    accept_length: Ends  # over the steps that drafted: all their verifies pooled
    forecast: TrainingForecast | None  # whether drafter training pays, as it was told last
    drafter: Ends | None  # accept length to expect of the learned drafter alone, before its first training and now
    ahead: int  # tokens that it drafts where that is measured
    tokens: int
    step_s: float  # all steps together
    phase_s: dict[str, float]  # by PHASES and "other"
    saved_s: float  # of rollout, estimated from measured costs of plain ticks
    asked: bool  # to speculate, by the configuration
    drafted: bool
    estimated: bool  # somebody estimates `saved_s`: choosers other than the tuner do not
    replayed: Replayed | None
    whole: WholeSteps
    rewards_failed: int
    alarms: int
    readers_failed: tuple[str, ...]
    lights: tuple[HealthLight, ...]
    nothing_learned: str  # in words, where that is so

    @property
    def whole_speedup(self) -> float:
        """Plain time over actual time of whole steps, drafter work included; measured if steps were replayed, else
        estimated."""
        return self.whole.measured or self.whole.estimated(self.saved_s)

    @property
    def rollout_speedup(self) -> float:
        """Plain time over actual time of the rollouts, estimated."""
        rollout = self.phase_s["rollout"]
        return (rollout + self.saved_s) / rollout if rollout else 1.0


def summarise(run: Run) -> Summary:
    steps = steps_of(run)
    ended, failure = _end(counted(run.events))
    replays = events_of(run, ReplayCompared)
    return Summary(
        name=run.config.run.name,
        planned=run.config.run.steps,
        taken=len(steps),
        ended=ended,
        failure=failure,
        resumes=len(events_of(run, RunResumed)),
        reward=_ends([step.mean_reward for step in steps]),
        evaluations=Evaluations.of(events_of(run, Evaluated)),
        length=_ends([step.length_mean for step in steps]),
        accept_length=_accept_length([step for step in steps if drafted(step)]),
        forecast=next(reversed(events_of(run, TrainingForecast)), None),
        drafter=_drafter(events_of(run, DrafterTrained)),
        ahead=run.config.draft.unroll,
        tokens=sum(step.tokens for step in steps),
        step_s=sum(step.step_s for step in steps),
        phase_s=_phases(steps),
        saved_s=sum(step.saved_s for step in steps),
        asked=run.config.spec.drafter != "none",
        drafted=any(map(drafted, steps)),
        estimated=is_estimated(run.config),
        replayed=Replayed.of(replays) if replays else None,
        whole=whole_steps(record.event for record in counted(run.events)),
        rewards_failed=sum(event.count for event in events_of(run, RewardsFailed)),
        alarms=len(events_of(run, AcceptanceCollapsed)),
        readers_failed=tuple(f"{event.reader}: {event.message}" for event in events_of(run, ReaderFailed)),
        lights=lights_of(run.config, (record.event for record in counted(run.events))),
        nothing_learned=nothing_learned(steps),
    )


def is_estimated(config: RunConfig) -> bool:
    """Whether saved time is estimated: only the tuner keeps a cost model."""
    return config.spec.shape_policy == "tuner"


def phase_seconds(step: StepFinished) -> dict[str, float]:
    """Seconds of a step by phase. `other` is the rest."""
    parts = {phase: float(getattr(step, f"{phase}_s")) for phase in PHASES}
    return {**parts, "other": max(0.0, step.step_s - sum(parts.values()))}


def machine_of(run: Run) -> MachineDescribed | None:
    return next(reversed(events_of(run, MachineDescribed)), None)


def started_of(run: Run) -> RunStarted | None:
    return next(iter(events_of(run, RunStarted)), None)


def _phases(steps: Sequence[StepFinished]) -> dict[str, float]:
    each = [phase_seconds(step) for step in steps]
    return {phase: sum(parts[phase] for parts in each) for phase in (*PHASES, "other")}


def _ends(values: Sequence[float]) -> Ends:
    count = min(_ENDS, max(1, len(values) // 2))  # the two ends of a short run do not overlap
    if not values:
        return Ends(0.0, 0.0, 0)
    return Ends(sum(values[:count]) / count, sum(values[-count:]) / count, count, apart=len(values) > 1)


def _accept_length(steps: Sequence[StepFinished]) -> Ends:
    """Tokens per verify of the first and the last few steps, verifies pooled at each end."""
    ends = _ends([1.0] * len(steps))
    return replace(ends, first=_pooled(steps[: ends.steps]), last=_pooled(steps[len(steps) - ends.steps :]))


def _pooled(steps: Sequence[StepFinished]) -> float:
    weights = [step.verifies or 1 for step in steps]  # events of earlier versions do not say how many
    emitted = sum(weight * step.accept_length for weight, step in zip(weights, steps, strict=True))
    return emitted / max(1, sum(weights))


def _drafter(trained: Sequence[DrafterTrained]) -> Ends | None:
    return Ends(trained[0].accept_before, trained[-1].accept_after, 1) if trained else None


def _end(records: Sequence[Recorded]) -> tuple[str, str]:
    for record in reversed(records):
        match record.event:
            case RunFinished():
                return "finished", ""
            case RunFailed(kind=kind, message=message):
                return "stopped", f"{kind}: {first_line(message)}".rstrip(": ")
            case RunStarted():
                break
    return "running", ""


# ---- in words


def size(count: int) -> str:
    """Bytes in words: 640 bytes, 1.2 MB, 7.5 GB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def duration(seconds: float) -> str:
    """Seconds in words: 0.42 s, 8.3 s, 2 min 05 s, 3 h 20 min."""
    if seconds < 0:
        return f"−{duration(-seconds)}"
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def forecast_in_words(told: TrainingForecast) -> str:
    """As in `no drafter training: expected -0.1% over the 40 steps left`."""
    what = "drafter training" if told.pays else "no drafter training"
    return f"{what}: expected {told.gain:+.1%} over the {_steps(told.steps_left)} left"


def evaluation_in_words(told: Evaluated) -> str:
    """As in `test: reward 0.512 ± 0.020, pass@1 51.2%, 312 tokens a completion (256 prompts, 12.0 s)`."""
    passed = "".join(f", pass@{k} {value:.1%}" for k, value in told.pass_at)
    cut = f", {told.truncated:.0%} cut off" if told.truncated else ""
    text = (
        f"{told.name}: reward {told.mean_reward:.3f} ± {told.reward_error:.3f}{passed}, {told.length_mean:.0f} tokens"
    )
    return f"{text} a completion{cut} ({told.prompts} prompts, {duration(told.seconds)})"


def when_evaluated(told: Evaluated) -> str:
    return f"after step {told.step}" if told.step else "before the first step"


def first_line(message: str) -> str:
    return message.partition("\n")[0]


def in_words(summary: Summary) -> str:
    """The run in one paragraph."""
    if not summary.taken:
        return f"{_opening(summary)} No step was finished, so there is nothing to draw yet."
    held_out = " ".join(map(_held_out, summary.evaluations))
    sentences = [
        _opening(summary),
        summary.nothing_learned,
        _learned(summary),
        held_out,
        _time(summary),
        _saved(summary),
        _troubles(summary),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def last_lines(summary: Summary, where: str) -> list[str]:
    """The last lines of a run: reward, accept length, times with and without speculation, token comparison, report."""
    if not summary.taken:
        return [f"No step was finished. Everything is in {where}."]
    reward, accept = summary.reward, summary.accept_length
    lines = [summary.nothing_learned] if summary.nothing_learned else []
    lines += [f"Mean reward: {_both(reward, '.3f', '')}.", *map(_held_out, summary.evaluations)]
    if summary.drafted:
        lines.append(f"Accept length: {_both(accept, '.2f', ' tokens per verify', ' with drafts')}.")
    else:
        lines.append(_why_plain(summary))
    if summary.drafter:
        lines.append(
            f"Learned drafter alone, {summary.ahead} tokens ahead: {summary.drafter.first:.2f} tokens per verify to be "
            f"expected at first, {summary.drafter.last:.2f} at the end, on completions it had not learned from."
        )
    if summary.forecast:
        lines.append(_forecast(summary.forecast))
    if summary.replayed:
        lines += [*_replay_times(summary, summary.replayed), verdict_in_words(summary.replayed)]
    elif summary.drafted and summary.estimated:
        lines.append(_estimate(summary))
    return [*lines, f"Report: {where}"]


def _replay_times(summary: Summary, replayed: Replayed) -> list[str]:
    twice = f"{replayed.tokens:,} tokens ({_rollouts(replayed.count)} written twice)"
    again = "the same tokens, same seeds" if replayed.identical else "the same requests, same seeds"
    if not summary.drafted:
        return [f"Rollout time: {duration(replayed.tlt_s)} for {twice}, {duration(replayed.plain_s)} for {again}."]
    return [
        f"Rollout time with TLT: {duration(replayed.tlt_s)} for {twice}.",
        f"Plain decoding took: {duration(replayed.plain_s)} for {again}.",
        f"Against plain training: {both_ratios(replayed.speedup, summary.whole.measured)} as fast, with all work for "
        "the drafter.",
    ]


def _opening(summary: Summary) -> str:
    name, taken = summary.name, f"{summary.taken} of {_steps(summary.planned)}"
    if summary.ended == "stopped":
        text = f"The run “{name}” was stopped after {taken} ({summary.failure})."
    elif summary.ended == "running":
        text = f"The run “{name}” has taken {taken}; its end is not on record."
    else:
        text = f"The run “{name}” took {taken if summary.taken != summary.planned else _steps(summary.taken)}."
    if summary.resumes:
        text += f" It was resumed {_times(summary.resumes)}."
    return text


def _learned(summary: Summary) -> str:
    reward, length = summary.reward, summary.length
    if not reward.apart:
        return f"Mean reward was {reward.first:.3f}, with completions of {length.first:.0f} tokens on average."
    ends = f"over the first {_few(reward)} to {{}} over the last"
    first, last = f"{reward.first:.3f}", f"{reward.last:.3f}"
    if first == last:
        text = f"Mean reward was {first} over the first {_few(reward)} and over the last"
    else:
        text = f"Mean reward {'rose' if reward.last > reward.first else 'fell'} from {first} {ends.format(last)}"
    before, after = f"{length.first:.0f}", f"{length.last:.0f}"
    went = f"went from {before} to {after}" if before != after else f"stayed at {after}"
    return f"{text}, while completions {went} tokens on average."


def _held_out(told: Evaluations) -> str:
    """As in `Reward on held-out test: 0.312 ± 0.020 before the first step, 0.498 ± 0.021 after step 60 (best: …).`"""
    first, last, best = (when_evaluated(one) if one else "" for one in (told.first, told.last, told.best))
    text = f"Reward on held-out {told.first.name}: {_with_error(told.first)} {first}"
    if told.first is not told.last:
        text += f", {_with_error(told.last)} {last}"
    if told.best and told.best not in (told.first, told.last):
        text += f", {_with_error(told.best)} {best}"
    return f"{text}; the best policy is that {best}." if told.best and told.first is not told.last else f"{text}."


def _with_error(told: Evaluated) -> str:
    return f"{told.mean_reward:.3f} ± {told.reward_error:.3f}"


def _time(summary: Summary) -> str:
    longest = max(summary.phase_s, key=lambda phase: summary.phase_s[phase])
    share = summary.phase_s[longest] / summary.step_s if summary.step_s else 0.0
    which = "It" if summary.taken == 1 else "All steps together"
    return (
        f"{which} took {duration(summary.step_s)}, of which {share:.0%} was "
        f"{'not accounted for' if longest == 'other' else longest}."
    )


def _saved(summary: Summary) -> str:
    parts = [_accepted(summary) if summary.drafted else _why_plain(summary)]
    if summary.drafter:
        parts.append(
            f"Of the learned drafter alone, drafting {summary.ahead} tokens, {summary.drafter.first:.2f} were to be "
            f"expected before its first training and {summary.drafter.last:.2f} after its last, on held-out text."
        )
    if summary.forecast:
        parts.append(_forecast(summary.forecast))
    if summary.replayed:
        parts.append(_measured(summary.replayed, summary))
    elif summary.drafted and summary.estimated:
        parts.append(_estimate(summary))
    return " ".join(parts)


def _accepted(summary: Summary) -> str:
    accept = summary.accept_length
    first, last = f"{accept.first:.2f}", f"{accept.last:.2f}"
    if first == last == "1.00":
        return "Drafts were verified, and next to none of their tokens were accepted."
    if first == last:
        return f"A verify gave {first} tokens on average, the policy's own included."
    return f"A verify gave {first} tokens on average at first and {last} at the end, the policy's own included."


def _why_plain(summary: Summary) -> str:
    if summary.asked:
        return "Nothing was drafted: no draft was expected to pay, so rollouts were decoded plainly."
    return "Speculation was off: rollouts were decoded plainly."


def _measured(replayed: Replayed, summary: Summary) -> str:
    were = "was" if replayed.count == 1 else "were"
    opening = f"{_rollouts(replayed.count).capitalize()} {were} written once more without speculation, same seeds: "
    plain_s, tlt_s = duration(replayed.plain_s), duration(replayed.tlt_s)
    if summary.drafted:
        ratios = both_ratios(replayed.speedup, summary.whole.measured)
        text = f"{opening}{plain_s} instead of {tlt_s} ({ratios}, measured)"
    else:
        text = f"{opening}{plain_s} after {tlt_s}"
    if replayed.identical:
        return f"{text}, identical token for token."
    return f"{text}. {verdict_in_words(replayed)}"


def _estimate(summary: Summary) -> str:
    verb = "saved" if summary.saved_s >= 0 else "cost"
    return (
        f"By the engine's own cost table, speculation {verb} {duration(abs(summary.saved_s))} of rollout "
        f"({both_ratios(summary.rollout_speedup, summary.whole_speedup)} as fast as plain training, estimated)."
    )


def _troubles(summary: Summary) -> str:
    troubles = []
    if summary.rewards_failed:
        troubles.append(f"{summary.rewards_failed} {'reward' if summary.rewards_failed == 1 else 'rewards'} failed")
    if summary.alarms:
        troubles.append(f"acceptance collapsed {_times(summary.alarms)}")
    troubles += [f"{failed} (left out from then on)" for failed in summary.readers_failed]
    return f"Worth a look: {'; '.join(troubles)}." if troubles else ""


def _forecast(told: TrainingForecast) -> str:
    return f"{forecast_in_words(told).capitalize()} at step {told.step}."


def _both(ends: Ends, form: str, unit: str, which: str = "") -> str:
    """As in `0.125 tokens in the first 5 steps, 0.250 in the last`."""
    if not ends.apart:
        return f"{ends.first:{form}}{unit} in the only step{which}"
    return f"{ends.first:{form}}{unit} in the first {_few(ends)}{which}, {ends.last:{form}} in the last"


def _few(ends: Ends) -> str:
    return "step" if ends.steps == 1 else f"{ends.steps} steps"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _rollouts(count: int) -> str:
    return "1 rollout" if count == 1 else f"{count} rollouts"
