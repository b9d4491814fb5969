"""The health of a run in five lights: learning, rewards, truncation, speculation, machine.

Pure: events in; lights (with a remedy in one line) and warnings out. A light depends on the last few steps, so it
recovers when the problem is over. A warning is made when a light gets worse, and not again while it stays the same.
Does not depend on the code that emits, shows or writes.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import fmean, median
from typing import Literal

from tlt.config import RunConfig
from tlt.watch.events import (
    AcceptanceCollapsed,
    CheckpointsPlanned,
    Evaluated,
    Event,
    HealthWarning,
    ReaderFailed,
    Recorded,
    ReplayCompared,
    RewardsFailed,
    RolloutFinished,
    StepFinished,
)
from tlt.watch.workers import WorkerLost, WorkerReturned

Level = Literal["off", "good", "warn", "bad"]  # in this order of gravity
NAMES = ("learning", "rewards", "truncation", "speculation", "machine")
_GRAVITY: tuple[Level, ...] = ("off", "good", "warn", "bad")
_RECENT = 5  # steps that a light looks at
_STREAK = 3  # steps of the same in a row that are no accident
_FEW_SIGNALS, _CUT_SOME, _CUT_MANY, _FAILED = 0.8, 0.1, 0.5, 0.1  # shares of groups; then of completions
_MISMATCH = 0.1  # nats per token between trainer and engine
_CLIPPED = 0.3  # share of the completion tokens
_ENTROPY_LEFT, _ENTROPY_LOW = 0.1, 0.05  # of what it was at first; nats per token
_LOSS_OF_TIME = 0.02  # of the rollouts' seconds
_SLOW_REWARDS = 0.3  # of the steps' seconds, waited for rewards
_ERRORS = 2.0  # standard errors of a difference that is no accident
_SLOWER = 0.5  # of the tokens per second that it once had
_MEMORY_GROWN, _MEMORY_BYTES = 1.3, 2**31  # times, and bytes, above what it was; a replay has its own KV cache
_LONG, _LITTLE = 10, 0.1  # a run of so many steps learned next to nothing in so small a share of them
MORE_SIGNAL = "give prompts that are solved sometimes, raise task.group, or let task.reward tell completions apart"
_SETTLED = 5  # steps until times and memory are as they will be


@dataclass(frozen=True, slots=True)
class HealthLight:
    """The state of one light."""

    name: str
    level: Level
    says: str
    remedy: str = ""  # what to do, in one line


class Health:
    """The lights of one run, updated event by event."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._recent: deque[StepFinished] = deque(maxlen=_RECENT)
        self._first: StepFinished | None = None
        self._steps = 0
        self._silent = 0  # steps in a row in which no group had a signal
        self._still = 0  # steps in a row with a signal and without a gradient
        self._best_reward, self._best_pace, self._host_bytes = float("-inf"), 0.0, 0
        self._failed: dict[int, int] = {}  # step → completions whose reward failed
        self._judged: dict[int, int] = {}  # step → completions
        self._collapsed: AcceptanceCollapsed | None = None
        self._fault: ReplayCompared | None = None
        self._planned: CheckpointsPlanned | None = None
        self._lost: dict[int, str] = {}
        self._best_held_out: dict[str, Evaluated] = {}  # of each set, the evaluation with the highest reward
        self._last_held_out: dict[str, Evaluated] = {}
        self._readers: list[str] = []
        self._told: dict[str, Level] = {}  # the last level of each light

    def see(self, event: Event) -> list[HealthWarning]:
        """Warnings about the lights that this event made worse."""
        self.take(event)
        return list(self._worse(event.step)) if isinstance(event, StepFinished | Evaluated) else []

    def take(self, event: Event) -> None:
        """Updates the state that the lights are computed from."""
        match event:
            case StepFinished():
                self._see_step(event)
            case RolloutFinished(step=step, n=n):
                self._judged = {step: n, **{at: count for at, count in self._judged.items() if at > step - _RECENT}}
            case RewardsFailed(step=step, count=count):
                self._failed[step] = self._failed.get(step, 0) + count
            case AcceptanceCollapsed():
                self._collapsed = event
            case ReplayCompared(exact=True, identical=False):
                self._fault = event
            case Evaluated():
                best = self._best_held_out.get(event.name, event)
                self._best_held_out[event.name] = max(best, event, key=lambda told: told.mean_reward)
                self._last_held_out[event.name] = event
            case CheckpointsPlanned():
                self._planned = event
            case WorkerLost(worker=worker, reason=reason):
                self._lost[worker] = reason
            case WorkerReturned(worker=worker):
                self._lost.pop(worker, None)
            case ReaderFailed(reader=reader):
                self._readers.append(reader)
            case _:
                pass

    def lights(self) -> tuple[HealthLight, ...]:
        """All five lights, in the order of `NAMES`."""
        if not self._recent:
            return tuple(HealthLight(name, "off", "no step yet") for name in NAMES)
        return (self._learning(), self._rewards(), self._truncation(), self._speculation(), self._machine())

    # ---- what has come

    def _see_step(self, step: StepFinished) -> None:
        self._first = self._first or step
        self._steps += 1
        self._recent.append(step)
        silent = step.no_signal == 1.0
        self._silent = self._silent + 1 if silent else 0
        self._still = self._still + 1 if not silent and step.grad_norm == 0 else 0
        if len(self._recent) == _RECENT:
            self._best_reward = max(self._best_reward, self._mean("mean_reward"))
            self._best_pace = max(self._best_pace, self._pace())
        if self._steps == _SETTLED:
            self._host_bytes = step.host_bytes
        self._failed = {at: count for at, count in self._failed.items() if at > step.step - _RECENT}

    def _worse(self, step: int) -> Iterator[HealthWarning]:
        for light in self.lights():
            before = self._told.get(light.name, "good")
            self._told[light.name] = light.level
            if _GRAVITY.index(light.level) > max(_GRAVITY.index(before), _GRAVITY.index("good")):
                yield HealthWarning(step, light.name, light.level == "bad", light.says, light.remedy)

    def _mean(self, field: str) -> float:
        return fmean(getattr(step, field) for step in self._recent)

    def _pace(self) -> float:
        """Tokens per second of rollout, median of the recent steps."""
        return median(step.tokens / step.rollout_s if step.rollout_s else 0.0 for step in self._recent)

    # ---- the lights

    def _learning(self) -> HealthLight:
        last = self._recent[-1]
        if self._silent >= _STREAK:
            return self._without_signal(last)
        if self._still >= _STREAK:
            cure = "grpo.mask_overlong leaves cut-off completions out: raise sampling.max_tokens"
            usual = "see task.group and the rewards of the completions in the report"
            remedy = cure if self._config.grpo.mask_overlong and last.truncated else usual
            return HealthLight("learning", "bad", f"the gradient was 0 for {self._still} steps", remedy)
        silent = self._mean("no_signal")
        if len(self._recent) >= _STREAK and silent > _FEW_SIGNALS and not self._config.grpo.dynamic_sampling:
            cure = f"set grpo.dynamic_sampling, or {MORE_SIGNAL}"
            return HealthLight("learning", "warn", f"{silent:.0%} of the groups have no signal", cure)
        for found in (self._mismatch, self._entropy, self._clipped):
            if light := found():
                return light
        return HealthLight("learning", "good", f"{1 - silent:.0%} of the groups have a signal")

    def _without_signal(self, last: StepFinished) -> HealthLight:
        says = f"no group had a signal for {self._silent} steps"
        if last.reward_std:
            return HealthLight("learning", "bad", says, MORE_SIGNAL)
        return HealthLight(
            "learning",
            "bad",
            f"{says}: every completion earned {last.mean_reward:.3g}",
            "read the completions in the report: if they are right, give harder prompts; if wrong, check task.reward, "
            "task.template and sampling.max_tokens, or give easier ones",
        )

    def _mismatch(self) -> HealthLight | None:
        nats = self._mean("mismatch_mean")
        if nats < _MISMATCH:
            return None
        says = f"trainer and engine differ by {nats:.2g} nats per token"
        return HealthLight("learning", "warn", says, "set grpo.importance_cap to 2, or model.dtype to float32")

    def _entropy(self) -> HealthLight | None:
        assert self._first is not None
        before, now = self._first.entropy, self._mean("entropy")
        if now >= _ENTROPY_LOW or now >= _ENTROPY_LEFT * before:
            return None
        says = f"entropy fell from {before:.2g} to {now:.2g} nats per token: the policy hardly tries anything"
        return HealthLight("learning", "warn", says, "raise grpo.clip_high or grpo.kl, or lower train.learning_rate")

    def _clipped(self) -> HealthLight | None:
        """For objectives that clip single tokens: GSPO clips whole completions, and CISPO keeps every gradient."""
        share = self._mean("clipped")
        if share < _CLIPPED or self._config.grpo.objective != "ppo":
            return None
        says = f"{share:.0%} of the tokens are clipped: updates go too far"
        return HealthLight("learning", "warn", says, "lower train.learning_rate, train.minibatches or train.epochs")

    def _rewards(self) -> HealthLight:
        failed, mean = sum(self._failed.values()), self._mean("mean_reward")
        judged = sum(self._judged.values())
        if failed:
            says = f"{failed} of {judged} rewards failed" if judged else f"{failed} rewards failed"
            cure = "see what they said in events.jsonl (RewardsFailed); raise task.reward_timeout_s if they hang"
            return HealthLight("rewards", "bad" if failed > _FAILED * judged else "warn", says, cure)
        for name, last in self._last_held_out.items():
            if light := _fallen(self._best_held_out[name], last):
                return light
        spread = max(step.reward_std for step in self._recent)
        if self._best_reward - mean > spread:
            says = f"mean reward fell from {self._best_reward:.3f} to {mean:.3f}"
            cure = "lower train.learning_rate or raise grpo.kl, and go on from an earlier step: --resume-from step_N"
            return HealthLight("rewards", "bad", says, cure)
        waited_s, steps_s = (sum(getattr(step, name) for step in self._recent) for name in ("reward_s", "step_s"))
        if len(self._recent) >= _STREAK and waited_s > _SLOW_REWARDS * steps_s:
            says = f"{waited_s / steps_s:.0%} of the time goes by waiting for rewards"
            more = "raise task.reward_processes, or " if self._config.task.name == "files" else ""
            return HealthLight("rewards", "warn", says, f"{more}make the reward faster")
        return HealthLight("rewards", "good", f"mean reward {mean:.3f} over the last {_steps(len(self._recent))}")

    def _truncation(self) -> HealthLight:
        share, most = self._mean("truncated"), self._config.sampling.max_tokens
        says = f"{share:.0%} of the completions ran into sampling.max_tokens ({most})"
        if share < _CUT_SOME:
            return HealthLight("truncation", "good", says)
        masked = "" if self._config.grpo.mask_overlong else ", or keep them out of the loss with grpo.mask_overlong"
        level: Level = "bad" if share >= _CUT_MANY else "warn"
        return HealthLight("truncation", level, says, f"raise sampling.max_tokens or ask for less text{masked}")

    def _speculation(self) -> HealthLight:
        if self._config.spec.drafter == "none":
            return HealthLight("speculation", "off", "spec.drafter is none: plain decoding")
        if self._fault:
            says = f"step {self._fault.step} was decoded to other tokens without drafts, and none may differ"
            return HealthLight("speculation", "bad", says, "report this; until then spec.drafter none")
        collapsed = self._collapsed
        if collapsed and collapsed.step > self._recent[-1].step - _RECENT:
            fell = f"from {collapsed.baseline:.2f} to {collapsed.recent:.2f} tokens per verify"
            cure = "decoding goes on without it until it helps again; a lower train.learning_rate moves the policy less"
            return HealthLight("speculation", "warn", f"acceptance of {collapsed.drafter} fell {fell}", cure)
        rollout_s, saved_s = (sum(getattr(step, name) for step in self._recent) for name in ("rollout_s", "saved_s"))
        if len(self._recent) >= _STREAK and saved_s < -_LOSS_OF_TIME * rollout_s:
            says = f"drafts cost {-saved_s:.1f} s of the last {rollout_s:.1f} s of rollout"
            return HealthLight("speculation", "warn", says, "spec.drafter none decodes plainly")
        drafting = [step for step in self._recent if step.verifies or step.accept_length > 1]
        if not drafting:
            return HealthLight("speculation", "good", "no drafts: plain decoding is expected to be as fast")
        accepted = fmean(step.accept_length for step in drafting)
        return HealthLight("speculation", "good", f"accept length {accepted:.2f}")

    def _machine(self) -> HealthLight:
        for found in (self._disk, self._workers, self._memory, self._slower):
            if light := found():
                return light
        if self._readers:
            says = f"{', '.join(self._readers)} failed and shows nothing more"
            return HealthLight("machine", "warn", says, "the run's events are whole: `tlt report` tells it")
        return HealthLight("machine", "good", f"{self._pace():,.0f} tokens per second of rollout")

    def _disk(self) -> HealthLight | None:
        if not self._planned or self._planned.most_bytes <= self._planned.free_bytes:
            return None
        says = "the checkpoints need more room than the disk has"
        return HealthLight("machine", "bad", says, "lower checkpoint.keep or checkpoint.keep_optimizer, or make room")

    def _workers(self) -> HealthLight | None:
        if not self._lost:
            return None
        says = "; ".join(f"worker {worker} is lost ({reason})" for worker, reason in self._lost.items())
        return HealthLight("machine", "warn", says, "others do its work until another takes its place")

    def _memory(self) -> HealthLight | None:
        now = self._recent[-1].host_bytes
        if now < max(_MEMORY_GROWN * self._host_bytes, self._host_bytes + _MEMORY_BYTES) or not self._host_bytes:
            return None
        says = f"host memory grew from {self._host_bytes / 2**30:.1f} to {now / 2**30:.1f} GiB"
        return HealthLight(
            "machine", "warn", says, "lower drafting.buffer_mib or spec.memory_tokens, or resume the run"
        )

    def _slower(self) -> HealthLight | None:
        pace = self._pace()
        if self._steps <= 2 * _SETTLED or pace >= _SLOWER * self._best_pace:
            return None
        says = f"{pace:,.0f} tokens per second of rollout, once {self._best_pace:,.0f}"
        return HealthLight(
            "machine", "warn", says, "see what else runs on the machine, and whether completions became longer"
        )


def _fallen(best: Evaluated, last: Evaluated) -> HealthLight | None:
    """The light of a set of held-out prompts whose reward fell by more than its standard error explains."""
    if best.mean_reward - last.mean_reward <= _ERRORS * hypot(best.reward_error, last.reward_error):
        return None
    says = f"reward on held-out {last.name} fell from {best.mean_reward:.3f} to {last.mean_reward:.3f}"
    where = f"go on from checkpoint step_{best.step}, whose weights are kept" if best.step else "begin again"
    return HealthLight("rewards", "bad", says, f"lower train.learning_rate or raise grpo.kl, and {where}")


class HealthReader:
    """A reader that collects warnings; the run takes and emits them."""

    name = "health"

    def __init__(self, config: RunConfig) -> None:
        self._health = Health(config)
        self._warnings: list[HealthWarning] = []

    def show(self, record: Recorded) -> None:
        self._warnings += self._health.see(record.event)

    def take_warnings(self) -> list[HealthWarning]:
        taken, self._warnings = self._warnings, []
        return taken

    def close(self) -> None:
        pass


def lights_of(config: RunConfig, events: Iterable[Event]) -> tuple[HealthLight, ...]:
    """The lights after the given events."""
    health = Health(config)
    for event in events:
        health.take(event)
    return health.lights()


def worst_of(lights: Iterable[HealthLight]) -> HealthLight:
    """The worst light, the first of equals."""
    return max(lights, key=lambda light: _GRAVITY.index(light.level))


def nothing_learned(steps: Sequence[StepFinished]) -> str:
    """A sentence with a remedy if a run taught the policy nothing or almost nothing; otherwise empty."""
    taught = sum(step.grad_norm > 0 for step in steps)
    if not steps or (taught and (len(steps) < _LONG or taught > _LITTLE * len(steps))):
        return ""
    silent = sum(step.no_signal == 1.0 for step in steps)
    why = f"in {_steps(silent)} no group had a signal, as all completions to a prompt earned the same"
    how = f"Next to nothing was learned, in {taught} of {_steps(len(steps))}" if taught else "Nothing was learned"
    return f"{how}: {why if silent else 'the gradient was 0'}. To change that, {MORE_SIGNAL}."


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
