"""One step of reinforcement learning on one page: ask, answer, judge, update, publish; and the fleet it needs.

What always holds: the step is a function of the policy, the seed and the step's number alone. Answers may come in any
order, from any worker, with any speculation: groups, advantages and the update see them in the order they were asked.
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
ByDepth = tuple[tuple[str, tuple[float, ...]], ...]  # drafter; share accepted at depth 1, 2, … of what got there
_PROGRESS_S = 1.0  # between two words about a rollout under way


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """How the last rollout went, over all workers."""

    verifies: int = 0  # of single requests
    accepted: int = 0  # draft tokens
    saved_s: float = 0.0  # against plain ticks for the same tokens, by measured costs; one_off_s is taken off
    chosen: TicksByBatch = ()  # in which shapes
    by_depth: ByDepth = ()  # as the tuners knew it afterwards, of those that were asked
    switches: int = 0  # ticks in another shape than the tick before
    one_off_s: float = 0.0  # work done once because of speculation: drafters that caught up, captures
    ahead_tokens: int = 0  # of the next step's completions, written ahead
    traces: tuple[WorkerTrace, ...] = ()  # one per worker

    @property
    def accept_length(self) -> float:
        """Tokens per verify, pooled; 1 where nothing was drafted."""
        return 1.0 + self.accepted / max(1, self.verifies)


class Fleet(Protocol):
    """All workers, each with an engine, a share of the policy's trainer, and the drafter's."""

    def rollout(self, step: int, requests: Sequence[Request], replies: Replies | None = None) -> Iterator[Completion]:
        """Every request's answer, once, as it ends. Workers that run dry may train the drafter until the last is in.
        An answer that gets `replies` ends with its last turn.

        Preparations end before this returns; the rollout runs while its answers are taken.
        """

    def write_ahead(self, step: int, upcoming: Callable[[], Sequence[Request]]) -> None:
        """During this step, rows and workers that nothing else needs may write these requests of the next one. What
        they wrote are guesses at its completions."""

    def report(self) -> RolloutReport:
        """Of the last step's rollouts: with dynamic sampling there may be several."""

    def draft(self, step: int, until: Callable[[], bool]) -> None:
        """The rollout is over: trains the drafter until `until` is true, and longer only if that is worth the wait."""

    def update(self, experiences: Sequence[Experience]) -> UpdateResult:
        """One step of the policy, on all workers."""

    def publish(self, step: int, version: int) -> None:
        """From now on every engine writes with the updated policy, and drafts with the newest drafter."""

    def replay(self, requests: Sequence[Request], replies: Replies | None = None) -> tuple[list[Completion], float]:
        """The same requests once more without speculation, and the seconds of the rollout alone: they do not include
        building, compiling and measuring the engines that write it."""

    def evaluate(self, step: int, requests: Sequence[Request], replies: Replies | None = None) -> Iterator[Completion]:
        """Every request's answer, once, as it ends, by the engines of the rollout. No drafter learns from them."""

    def leave_out(self, seconds: float) -> None:
        """The run did something else for so long, between two steps: that is no part of a step."""

    def snapshot(self) -> Callable[[Path], None]:
        """Everything `restore` needs to go on bit by bit, as it is now; it is copied while the run goes on. What comes
        back writes it into an empty directory, whenever it is called, from any thread, but before the next snapshot is
        taken."""

    def restore(self, directory: Path, version: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of a step and the requests for its answers."""

    prompt: Prompt
    requests: tuple[Request, ...]
    place: int = 0  # among the prompts of a step


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step by what it waited for; they do not overlap."""

    rollout: float
    reward: float  # after the last answer
    drafting: float  # after the last reward
    update: float  # and handing the policy to the engines
    replay: float  # of no use to the step: it is compared with


@dataclass(frozen=True, slots=True)
class Step:
    """What came of one step."""

    number: int  # from 1, as in every event
    judged: tuple[Judged, ...]
    report: RolloutReport
    update: UpdateResult
    times: Times
    learned: frozenset[int]  # indices of the groups that the update learned from

    @property
    def rollouts(self) -> list[Rollout]:
        """In the order they were asked."""
        return [rollout for one in self.judged for rollout in one.group.rollouts]


@dataclass(frozen=True, slots=True)
class Loop:
    """Everything a step needs, given once."""

    config: RunConfig
    task: Task
    tokenizer: Tokenizer
    judge: Judge
    fleet: Fleet
    emit: Emit

    def step(self, taken: int) -> Step:
        """The step after `taken` others, which brings the policy from that version to the next."""
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
        """Turns of rollout and judging, until every place has a group with a signal or may ask no more."""
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
        """Of the first turn of another step; none where the task has no prompts for it, which that step will tell."""
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
        waited = max(0.0, min(late, drafted) - answered)  # for rewards; drafting beside it costs nothing
        rolled.rollout_s += answered - started
        rolled.reward_s += waited + rolled.ended - drafted
        rolled.drafting_s -= waited
        rolled.turns.append((asked, judged, seconds))
        rewards = [[rollout.reward for rollout in one.group.rollouts] for one in judged]
        rolled.places.see([one.place for one in asked], rewards)

    def _draft(self, number: int, rolled: "_Rolled", until: Callable[[], bool]) -> float:
        """After the last rollout of the step; the seconds it took."""
        started = time.perf_counter()
        rolled.report, rolled.drafted = self.fleet.report(), True
        self.emit(PhaseStarted(number, "drafting"))
        self.fleet.draft(number, until)
        rolled.ended = time.perf_counter()
        rolled.drafting_s += rolled.ended - started
        return rolled.ended - started

    def _roll_out(self, number: int, asked: Sequence[Asked], judging: Judging) -> float:
        """Seconds from the first request to the last answer."""
        requests = [request for one in asked for request in one.requests]
        self.emit(PhaseStarted(number, "rollout"))
        completions = self.fleet.rollout(number, requests, self._replies(asked))
        tokens, told = 0, (started := time.perf_counter())
        for finished, completion in enumerate(completions, start=1):
            judging.hand_in(completion)
            tokens += len(completion.tokens)
            if time.perf_counter() - told > _PROGRESS_S:
                told = time.perf_counter()
                left = len(requests) - finished
                self.emit(RolloutProgress(number, finished, len(requests), min(left, self.config.engine.rows), tokens))
        return time.perf_counter() - started

    def _replay(self, number: int, rolled: "_Rolled") -> None:
        """The answers of the first turn written plainly, by the same policy: to compare."""
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
    """What the turns of a step add up to."""

    places: Places
    ended: float  # what has happened so far; at first, when the step began
    turns: list[tuple[Sequence[Asked], Sequence[Judged], float]] = field(
        default_factory=list
    )  # seconds: of the rollout
    report: RolloutReport = field(default_factory=RolloutReport)
    drafted: bool = False  # whether drafting had its turn
    rollout_s: float = 0.0
    reward_s: float = 0.0
    drafting_s: float = 0.0

    @property
    def judged(self) -> list[Judged]:
        return [one for _, judged, _ in self.turns for one in judged]


def is_replayed(taken: int, every: int) -> bool:
    """The middle one of every so many steps: it speaks for those around it, and a cold start only for itself.

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
    """The prompts of the step after `taken` others, with `task.group` requests each. No key is used twice in a run.

    With dynamic sampling a step has several turns, each with prompts of its own; `places`: those that ask in this one.
    """
    turns, count, group = config.grpo.dynamic_sampling + 1, config.task.prompts, config.task.group
    number = taken * turns + turn
    prompts = list(task.sample(number, count) or ())
    if not prompts and not turn:
        raise TaskError(
            f"{type(task).__module__}.{type(task).__qualname__}.sample({number}, {count}) returned no prompts; "
            f"expected {count}, one at least: begin again with the first where they end, or lower run.steps to {taken}"
        )
    asked, several = [], isinstance(task, MultiTurnTask)  # the pages of a turn are kept for the next one
    for place, prompt in enumerate(prompts):
        if places is None or place in places:
            tokens = tuple(tokenizer.encode_prompt(prompt.content))
            first = (taken << 32) + (turn * count + place) * group
            keys = [Key(config.run.seed, first + completion) for completion in range(group)]
            requests = tuple(Request(key, tokens, config.sampling, prompt.id, keep=several) for key in keys)
            asked.append(Asked(prompt, requests, place))
    return asked


def sampled_of(number: int, judged: Sequence[Judged], wanted: int) -> frozenset[int]:
    """Indices of the groups that the step's file holds token by token."""
    longest = [max(len(rollout.completion.tokens) for rollout in one.group.rollouts) for one in judged]
    return sampled_groups(number, longest, wanted)


def experiences(
    judged: Sequence[Judged],
    grpo: GrpoSettings,
    sampled: Collection[int] = (),
    learned: Collection[int] | None = None,
) -> list[Experience]:
    """Every rollout with its advantage over its group, in the order they were asked. `sampled`, `learned`: indices of
    groups; None: all."""
    found = []
    for index, one in enumerate(judged):
        if learned is None or index in learned:
            rollouts, kept = one.group.rollouts, index in sampled
            gains = advantages([rollout.reward for rollout in rollouts], grpo)
            found += [Experience(rollout, gain, kept) for rollout, gain in zip(rollouts, gains, strict=True)]
    return found
