"""One step of reinforcement learning: sample prompts, roll out, judge, update, publish; and the `Fleet` protocol.

Always holds: a step is a function of the policy, the seed and the step number. Completions may arrive in any order,
from any worker, with any speculation: groups, advantages and the update process them in the order of their requests.
Knows nothing of engines, processes or devices: a fleet is any object with these methods.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from tlt.config import GrpoSettings, RunConfig
from tlt.engine.request import Request
from tlt.errors import TaskError
from tlt.multi_turn import Replies, replies_of
from tlt.replay import replayed
from tlt.spec.shape import TicksByBatch
from tlt.tasks.judge import Judge
from tlt.tasks.judging import Judged, Judging
from tlt.tasks.task import MultiTurnTask, Task
from tlt.text import Tokenizer
from tlt.train.grpo import advantages
from tlt.train.policy import UpdateResult
from tlt.train.signal import Places
from tlt.types import Completion, Experience, Key, Prompt, Rollout
from tlt.watch.events import Event, PhaseStarted, RolloutProgress
from tlt.watch.step_files import sampled_groups
from tlt.watch.trace import WorkerTrace

Emit = Callable[[Event], None]
ByDepth = tuple[tuple[str, tuple[float, ...]], ...]  # drafter; at depth 1, 2, …: accepted / reached
_PROGRESS_S, _PROGRESS_SHARE = 1.0, 0.02  # least time between two progress events: seconds, share of the time so far


class ProgressPace:
    """When a rollout tells its progress. The number of times grows with the logarithm of its length, not with it."""

    def __init__(self) -> None:
        self._began = self._told = time.perf_counter()

    def due(self) -> bool:
        now = time.perf_counter()
        if now - self._told <= max(_PROGRESS_S, _PROGRESS_SHARE * (now - self._began)):
            return False
        self._told = now
        return True


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """Speculation in the rollouts of the last step, over all workers."""

    verifies: int = 0  # of single requests
    accepted: int = 0  # draft tokens
    saved_s: float = 0.0  # against plain ticks for the same tokens, by measured costs; `one_off_s` is subtracted
    chosen: TicksByBatch = ()  # ticks by shape and batch size
    by_depth: ByDepth = ()  # the tuners' estimates after the rollout, of the drafters that were used
    switches: int = 0  # ticks in another shape than the tick before
    one_off_s: float = 0.0  # one-off work for speculation: draft-extends and captures
    ahead_tokens: int = 0  # tokens of the next step's completions, written ahead
    traces: tuple[WorkerTrace, ...] = ()  # one per worker

    @property
    def accept_length(self) -> float:
        """Tokens per verify, pooled; 1 if nothing was drafted."""
        return 1.0 + self.accepted / max(1, self.verifies)


class Fleet(Protocol):
    """All workers. Each has an engine, a part of the policy's trainer, and a drafter's trainer."""

    def rollout(self, step: int, requests: Sequence[Request], replies: Replies | None = None) -> Iterator[Completion]:
        """Yields the completion of every request once, when it ends. With `replies` it ends with its last turn.

        Workers without requests may train the drafter until the last completion. Preparations end before this returns;
        the rollout runs while its completions are read.
        """

    def write_ahead(self, step: int, upcoming: Callable[[], Sequence[Request]]) -> None:
        """Offers requests of the next step, for rows and workers that are free during this one.

        The tokens written for them are guesses at the next step's completions.
        """

    def report(self) -> RolloutReport:
        """The report on the last step's rollouts. With dynamic sampling there may be several."""

    def draft(self, step: int, until: Callable[[], bool]) -> None:
        """Trains the drafter after a rollout until `until` is true; longer only if training pays."""

    def update(self, experiences: Sequence[Experience]) -> UpdateResult:
        """One optimizer step of the policy, on all workers."""

    def publish(self, step: int, version: int) -> None:
        """Gives every engine the updated policy and the newest drafter."""

    def replay(self, requests: Sequence[Request], replies: Replies | None = None) -> tuple[list[Completion], float]:
        """Runs the same requests again without speculation. Returns the completions and the seconds of the rollout.

        The seconds do not include building, compiling and measuring the engines of the replay.
        """

    def evaluate(self, step: int, requests: Sequence[Request], replies: Replies | None = None) -> Iterator[Completion]:
        """Yields the completion of every request once, when it ends. No drafter learns from them."""

    def leave_out(self, seconds: float) -> None:
        """Excludes `seconds` of other work between two steps from the time of a step."""

    def snapshot(self) -> Callable[[Path], None]:
        """Begins a copy of the state that `restore` needs for a bit-exact continuation. The run goes on meanwhile.

        The returned function writes the copy into an empty directory. It may be called from any thread, before the next
        snapshot is taken.
        """

    def restore(self, directory: Path, version: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of a step and the requests of its group."""

    prompt: Prompt
    requests: tuple[Request, ...]
    place: int = 0  # index among the prompts of a step


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step by phase. Phases do not overlap."""

    rollout: float
    reward: float  # after the last completion
    drafting: float  # after the last reward
    update: float  # includes publishing the policy
    replay: float  # plain decoding of the same requests, for comparison only


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step."""

    number: int  # from 1
    judged: tuple[Judged, ...]
    report: RolloutReport
    update: UpdateResult
    times: Times
    learned: frozenset[int]  # indices of the groups that the update learned from

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, in the order of their requests."""
        return [rollout for one in self.judged for rollout in one.group.rollouts]


@dataclass(frozen=True, slots=True)
class Loop:
    """Runs steps, with everything that they need."""

    config: RunConfig
    task: Task
    tokenizer: Tokenizer
    judge: Judge
    fleet: Fleet
    emit: Emit

    def step(self, taken: int) -> Step:
        """Runs the step after `taken` others: policy version `taken` becomes `taken + 1`."""
        number = taken + 1
        rolled = self._sample(taken)
        self._replay(number, rolled)
        update_started = time.perf_counter()
        self.emit(PhaseStarted(number, "update"))
        judged, learned = tuple(rolled.judged), rolled.places.learned
        sampled = sampled_of(number, judged, self.config.watch.groups)
        update = self.fleet.update(experiences(judged, self.config.grpo, sampled, learned))
        self.fleet.publish(number, number)
        times = Times(
            rollout=rolled.rollout_s,
            reward=rolled.reward_s,
            drafting=rolled.drafting_s + update.drafting_s,
            update=time.perf_counter() - update_started - update.drafting_s - update.checkpoint_s,
            replay=update_started - rolled.ended,
        )
        return Step(number, judged, rolled.report, update, times, learned)

    def _sample(self, taken: int) -> "_Rolled":
        """Turns of rollout and judging, until every place has a group with a signal or no turn is left."""
        rolled = _Rolled(Places(self.config.grpo.dynamic_sampling), time.perf_counter())
        if self.config.spec.ahead != "off" and taken + 1 < self.config.run.steps:
            self.fleet.write_ahead(taken + 1, partial(self._upcoming, taken + 1))
        while not rolled.places.done:
            asked = ask(taken, self.config, self.task, self.tokenizer, rolled.places.turn, rolled.places.open)
            if not asked and rolled.places.turn:  # the task has no further prompts
                break
            self._take_turn(taken + 1, asked, rolled)
        if not rolled.drafted:
            self._draft(taken + 1, rolled, lambda: True)
        return rolled

    def _upcoming(self, taken: int) -> list[Request]:
        """Requests of the first turn of the step after `taken` others; none if the task has no prompts for it."""
        try:
            asked = ask(taken, self.config, self.task, self.tokenizer)
        except TaskError:
            return []
        return [request for one in asked for request in one.requests]

    def _take_turn(self, number: int, asked: Sequence[Asked], rolled: "_Rolled") -> None:
        started = rolled.ended
        keys = [(one.prompt, [request.key for request in one.requests]) for one in asked]
        with Judging(self.judge, keys, by_step=self.config.task.reward_batch == "step") as judging:
            seconds = self._roll_out(number, asked, judging)
            answered = drafted = time.perf_counter()
            if rolled.places.last_turn:
                drafted += self._draft(number, rolled, judging.all_in)
            judged = judging.judged()
        rolled.ended = time.perf_counter()
        late = judging.last_verdict_s
        waited = max(0.0, min(late, drafted) - answered)  # for rewards; drafting at the same time costs nothing
        rolled.rollout_s += answered - started
        rolled.reward_s += waited + rolled.ended - drafted
        rolled.drafting_s -= waited
        rolled.turns.append((asked, judged, seconds))
        rewards = [[rollout.reward for rollout in one.group.rollouts] for one in judged]
        rolled.places.see([one.place for one in asked], rewards)

    def _draft(self, number: int, rolled: "_Rolled", until: Callable[[], bool]) -> float:
        """The drafting phase, after the last rollout of the step. Returns its seconds."""
        started = time.perf_counter()
        rolled.report, rolled.drafted = self.fleet.report(), True
        self.emit(PhaseStarted(number, "drafting"))
        self.fleet.draft(number, until)
        rolled.ended = time.perf_counter()
        rolled.drafting_s += rolled.ended - started
        return rolled.ended - started

    def _roll_out(self, number: int, asked: Sequence[Asked], judging: Judging) -> float:
        """Runs a rollout. Returns the seconds from its first request to its last completion."""
        requests = [request for one in asked for request in one.requests]
        self.emit(PhaseStarted(number, "rollout"))
        completions = self.fleet.rollout(number, requests, self._replies(asked))
        tokens, started, progress = 0, time.perf_counter(), ProgressPace()
        for finished, completion in enumerate(completions, start=1):
            judging.hand_in(completion)
            tokens += len(completion.tokens)
            if progress.due():
                left = len(requests) - finished
                self.emit(RolloutProgress(number, finished, len(requests), min(left, self.config.engine.rows), tokens))
        return time.perf_counter() - started

    def _replay(self, number: int, rolled: "_Rolled") -> None:
        """Compares the first turn with plain decoding by the same policy, in steps that are replayed."""
        if not is_replayed(number - 1, self.config.run.replay_every):
            return
        self.emit(PhaseStarted(number, "replay"))
        asked, judged, seconds = rolled.turns[0]
        requests = [request for one in asked for request in one.requests]
        completions = [rollout.completion for one in judged for rollout in one.group.rollouts]
        replay = partial(self.fleet.replay, replies=self._replies(asked))
        self.emit(replayed(number, self.config, requests, completions, seconds, replay))

    def _replies(self, asked: Sequence[Asked]) -> Replies | None:
        prompts = {request.key: one.prompt for one in asked for request in one.requests}
        return replies_of(self.task, self.tokenizer, prompts)


@dataclass(slots=True)
class _Rolled:
    """Totals over the turns of a step."""

    places: Places
    ended: float  # when the last phase ended; at first, when the step began
    turns: list[tuple[Sequence[Asked], Sequence[Judged], float]] = field(
        default_factory=list
    )  # the last: seconds of the rollout
    report: RolloutReport = field(default_factory=RolloutReport)
    drafted: bool = False  # the drafting phase has run
    rollout_s: float = 0.0
    reward_s: float = 0.0
    drafting_s: float = 0.0

    @property
    def judged(self) -> list[Judged]:
        return [one for _, judged, _ in self.turns for one in judged]


def is_replayed(taken: int, every: int) -> bool:
    """Whether a step is replayed: the middle one of every `every` steps, which represents them better than the first.

    `taken`: steps before this one.
    """
    return every > 0 and taken % every == every // 2


def ask(
    taken: int,
    config: RunConfig,
    task: Task,
    tokenizer: Tokenizer,
    turn: int = 0,
    places: Sequence[int] | None = None,
) -> list[Asked]:
    """The prompts of the step after `taken` others, with `task.group` requests each. Keys are unique in a run.

    With dynamic sampling a step has several turns with different prompts. `places`: places that ask in this turn.
    """
    turns, count, group = config.grpo.dynamic_sampling + 1, config.task.prompts, config.task.group
    number = taken * turns + turn
    prompts = list(task.sample(number, count) or ())
    if not prompts and not turn:
        raise TaskError(
            f"{type(task).__module__}.{type(task).__qualname__}.sample({number}, {count}) returned no prompts; "
            f"expected {count}, one at least: begin again with the first where they end, or lower run.steps to {taken}"
        )
    asked, several = [], isinstance(task, MultiTurnTask)  # the KV cache of a turn is kept for the next turn
    for place, prompt in enumerate(prompts):
        if places is None or place in places:
            tokens = tuple(tokenizer.encode_prompt(prompt.content))
            first = (taken << 32) + (turn * count + place) * group
            keys = [Key(config.run.seed, first + completion) for completion in range(group)]
            requests = tuple(Request(key, tokens, config.sampling, prompt.id, keep=several) for key in keys)
            asked.append(Asked(prompt, requests, place))
    return asked


def sampled_of(number: int, judged: Sequence[Judged], wanted: int) -> frozenset[int]:
    """Indices of the groups whose tokens the step file holds."""
    longest = [max(len(rollout.completion.tokens) for rollout in one.group.rollouts) for one in judged]
    return sampled_groups(number, longest, wanted)


def experiences(
    judged: Sequence[Judged],
    grpo: GrpoSettings,
    sampled: Collection[int] = (),
    learned: Collection[int] | None = None,
) -> list[Experience]:
    """Every rollout with its advantage in its group, in the order of the requests.

    `sampled`, `learned`: indices of groups; None: all.
    """
    found = []
    for index, one in enumerate(judged):
        if learned is None or index in learned:
            rollouts, kept = one.group.rollouts, index in sampled
            gains = advantages([rollout.reward for rollout in rollouts], grpo)
            found += [Experience(rollout, gain, kept) for rollout, gain in zip(rollouts, gains, strict=True)]
    return found
