"""A run in a few numbers and in plain words: what the console says at the end, and the report at its top.

Pure: a run in, numbers and sentences out. Measured times and estimated ones are never mixed: `replayed` was measured,
`saved_s` comes from the engine's cost table, and the words say which is which.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tlt.watch.events import (
    AcceptanceCollapsed,
    DrafterTrained,
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
)
from tlt.watch.history import counted, events_of, steps_of

PHASES = ("rollout", "reward", "update", "drafting", "checkpoint")
_ENDS = 5  # steps at the beginning and at the end that are compared


@dataclass(frozen=True, slots=True)
class Ends:
    """A number at the beginning of a run and at its end: means over the first and the last few steps."""

    first: float
    last: float
    steps: int  # in each mean


@dataclass(frozen=True, slots=True)
class Replayed:
    """Rollouts that were written twice with the same seeds: as the run did, and plainly."""

    count: int
    tokens: int
    tlt_s: float
    plain_s: float
    identical: bool  # all of them, token for token

    @property
    def speedup(self) -> float:
        return self.plain_s / self.tlt_s if self.tlt_s else 1.0


@dataclass(frozen=True, slots=True)
class Summary:
    """What there is to say. Numbers of steps that do not exist are 0."""

    name: str
    planned: int  # steps
    taken: int
    ended: str  # "finished", "stopped" or "running": where no end is on record
    failure: str  # what stopped it
    resumes: int
    reward: Ends
    length: Ends
    accept_length: Ends  # over the steps that drafted: all their verifies pooled
    drafter: Ends | None  # accept length to expect of the learned drafter alone, before its first training and now
    ahead: int  # tokens that it drafts where that is measured
    tokens: int
    step_s: float  # all steps together
    phase_s: dict[str, float]  # by PHASES and "other"
    saved_s: float  # of rollout, estimated from measured costs of plain ticks
    speculated: bool
    replayed: Replayed | None
    rewards_failed: int
    alarms: int
    readers_failed: tuple[str, ...]

    @property
    def rollout_speedup(self) -> float:
        """Plain over actual, estimated."""
        rollout = self.phase_s["rollout"]
        return (rollout + self.saved_s) / rollout if rollout else 1.0


def summarise(run: Run) -> Summary:
    steps = steps_of(run)
    ended, failure = _end(counted(run.events))
    return Summary(
        name=run.config.run.name,
        planned=run.config.run.steps,
        taken=len(steps),
        ended=ended,
        failure=failure,
        resumes=len(events_of(run, RunResumed)),
        reward=_ends([step.mean_reward for step in steps]),
        length=_ends([step.length_mean for step in steps]),
        accept_length=_accept_length([step for step in steps if step.accept_length > 1]),
        drafter=_drafter(events_of(run, DrafterTrained)),
        ahead=run.config.draft.unroll,
        tokens=sum(step.tokens for step in steps),
        step_s=sum(step.step_s for step in steps),
        phase_s=_phases(steps),
        saved_s=sum(step.saved_s for step in steps),
        speculated=any(step.accept_length > 1 for step in steps),
        replayed=_replayed(events_of(run, ReplayCompared)),
        rewards_failed=sum(event.count for event in events_of(run, RewardsFailed)),
        alarms=len(events_of(run, AcceptanceCollapsed)),
        readers_failed=tuple(f"{event.reader}: {event.message}" for event in events_of(run, ReaderFailed)),
    )


def phase_seconds(step: StepFinished) -> dict[str, float]:
    """Where a step's time went. `other` is what no phase accounts for."""
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
    return Ends(sum(values[:count]) / count, sum(values[-count:]) / count, count)


def _accept_length(steps: Sequence[StepFinished]) -> Ends:
    """Tokens per verify of the first and the last few steps, each end's verifies taken together."""
    ends = _ends([1.0] * len(steps))
    return Ends(_pooled(steps[: ends.steps]), _pooled(steps[len(steps) - ends.steps :]), ends.steps)


def _pooled(steps: Sequence[StepFinished]) -> float:
    weights = [step.verifies or 1 for step in steps]  # events of earlier versions do not say how many
    emitted = sum(weight * step.accept_length for weight, step in zip(weights, steps, strict=True))
    return emitted / max(1, sum(weights))


def _drafter(trained: Sequence[DrafterTrained]) -> Ends | None:
    return Ends(trained[0].accept_before, trained[-1].accept_after, 1) if trained else None


def _replayed(replays: Sequence[ReplayCompared]) -> Replayed | None:
    if not replays:
        return None
    return Replayed(
        count=len(replays),
        tokens=sum(replay.tokens for replay in replays),
        tlt_s=sum(replay.tlt_s for replay in replays),
        plain_s=sum(replay.plain_s for replay in replays),
        identical=all(replay.identical for replay in replays),
    )


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


def duration(seconds: float) -> str:
    """As a person would say it: 0.42 s, 8.3 s, 2 min 05 s, 3 h 20 min."""
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


def first_line(message: str) -> str:
    return message.partition("\n")[0]


def in_words(summary: Summary) -> str:
    """One paragraph."""
    if not summary.taken:
        return f"{_opening(summary)} No step was finished, so there is nothing to draw yet."
    sentences = [_opening(summary), _learned(summary), _time(summary), _saved(summary), _troubles(summary)]
    return " ".join(sentence for sentence in sentences if sentence)


def last_lines(summary: Summary, where: str) -> list[str]:
    """What a run says when it ends: reward, accept length, both times, whether the tokens are the same, and where."""
    if not summary.taken:
        return [f"No step was finished. Everything is in {where}."]
    reward, accept = summary.reward, summary.accept_length
    lines = [f"Mean reward: {reward.first:.3f} in the first {_few(reward)}, {reward.last:.3f} in the last."]
    if summary.speculated:
        lines.append(
            f"Accept length: {accept.first:.2f} tokens per verify in the first {_few(accept)} with drafts, "
            f"{accept.last:.2f} in the last."
        )
    if summary.drafter:
        lines.append(
            f"Learned drafter alone, {summary.ahead} tokens ahead: {summary.drafter.first:.2f} tokens per verify to be "
            f"expected at first, {summary.drafter.last:.2f} at the end, on answers it had not learned from."
        )
    replayed = summary.replayed
    if replayed:
        lines += [
            f"Rollout time with TLT: {duration(replayed.tlt_s)} for {replayed.tokens:,} tokens "
            f"({_rollouts(replayed.count)} written twice).",
            f"Plain decoding took: {duration(replayed.plain_s)} for the same tokens, same seeds: "
            f"TLT is {replayed.speedup:.2f} × as fast.",
            f"Tokens identical: {'yes' if replayed.identical else 'NO'}.",
        ]
    elif summary.speculated:
        lines.append(_estimate(summary))
    return [*lines, f"Report: {where}"]


def _opening(summary: Summary) -> str:
    name, taken = summary.name, f"{summary.taken} of {_steps(summary.planned)}"
    if summary.ended == "stopped":
        text = f"The run “{name}” was stopped after {taken} ({summary.failure})."
    elif summary.ended == "running":
        text = f"The run “{name}” has taken {taken}; its end is not on record."
    else:
        text = f"The run “{name}” took {taken if summary.taken != summary.planned else _steps(summary.taken)}."
    if summary.resumes:
        text += f" It was resumed {summary.resumes} {'time' if summary.resumes == 1 else 'times'}."
    return text


def _learned(summary: Summary) -> str:
    reward, length = summary.reward, summary.length
    moved = "rose" if reward.last > reward.first else "fell" if reward.last < reward.first else "stayed"
    return (
        f"Mean reward {moved} from {reward.first:.3f} over the first {_few(reward)} to {reward.last:.3f} over "
        f"the last, while answers went from {length.first:.0f} to {length.last:.0f} tokens on average."
    )


def _time(summary: Summary) -> str:
    longest = max(summary.phase_s, key=lambda phase: summary.phase_s[phase])
    share = summary.phase_s[longest] / summary.step_s if summary.step_s else 0.0
    return (
        f"All steps together took {duration(summary.step_s)}, of which {share:.0%} was "
        f"{'not accounted for' if longest == 'other' else longest}."
    )


def _saved(summary: Summary) -> str:
    if not summary.speculated:
        return "Nothing was drafted: rollouts were decoded plainly."
    accept = summary.accept_length
    text = f"The policy accepted {accept.first:.2f} tokens per verify at first and {accept.last:.2f} at the end."
    if summary.drafter:
        text += (
            f" Of the learned drafter alone, drafting {summary.ahead} tokens, {summary.drafter.first:.2f} were to be "
            f"expected before its first training and {summary.drafter.last:.2f} after its last, on answers held out."
        )
    replayed = summary.replayed
    if replayed:
        same = "identical token for token" if replayed.identical else "NOT identical, which must not happen"
        return (
            f"{text} {_rollouts(replayed.count).capitalize()} written once more without speculation, same seeds: "
            f"{duration(replayed.plain_s)} instead of {duration(replayed.tlt_s)} ({replayed.speedup:.2f} ×, measured), "
            f"{same}."
        )
    return f"{text} {_estimate(summary)}"


def _estimate(summary: Summary) -> str:
    verb = "saved" if summary.saved_s >= 0 else "cost"
    return (
        f"By the engine's own cost table, speculation {verb} {duration(abs(summary.saved_s))} of rollout "
        f"({summary.rollout_speedup:.2f} × as fast as plain decoding, estimated)."
    )


def _troubles(summary: Summary) -> str:
    troubles = []
    if summary.rewards_failed:
        troubles.append(f"{summary.rewards_failed} rewards failed")
    if summary.alarms:
        troubles.append(f"acceptance collapsed {summary.alarms} {'time' if summary.alarms == 1 else 'times'}")
    troubles += [f"{failed} (left out from then on)" for failed in summary.readers_failed]
    return f"Worth a look: {'; '.join(troubles)}." if troubles else ""


def _few(ends: Ends) -> str:
    return "step" if ends.steps == 1 else f"{ends.steps} steps"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _rollouts(count: int) -> str:
    return "1 rollout" if count == 1 else f"{count} rollouts"
