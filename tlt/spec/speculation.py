"""Speculation as the engine sees it: which shape now, which trees, and how it went.

Owns the drafters and the policy that chooses between them; knows tokens and seconds, computes no tensors. Whatever
happens here, the tokens that come out are the same.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from tlt.spec.alarm import Alarm
from tlt.spec.budget import TunerReport
from tlt.spec.drafter import Drafter, HiddenStateSink, Indexing, NoSink, Running
from tlt.spec.feedback import Proposed, TickFeedback, looked_into
from tlt.spec.learned import LearnedDrafting
from tlt.spec.lifecycle import LifecycleQueue
from tlt.spec.shape import OFF, Draft, Shape, merge, share_out
from tlt.spec.shape_policy import Outcome, ShapePolicy, forever
from tlt.types import Key, SamplingParams


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """What was chosen and what came of it, since the start."""

    ticks: Mapping[tuple[int, Shape], int]  # (requests that ran when it was chosen, shape) → ticks
    switches: int  # ticks whose shape was not that of the tick before
    verifies: int  # of single requests
    accepted: int  # draft tokens
    drafting_s: float  # in which the host waited for drafts
    one_off_s: float  # work done once because of speculation: drafters that caught up, captures
    alarms: tuple[Alarm, ...]
    tuner: TunerReport | None  # the tuner's own books, if it keeps any

    @property
    def accept_length(self) -> float:
        """Tokens per verify, pooled."""
        return 1.0 + self.accepted / max(1, self.verifies)

    @property
    def off_share(self) -> float:
        """Of the ticks."""
        off = sum(count for (_, shape), count in self.ticks.items() if shape.off)
        return off / max(1, sum(self.ticks.values()))

    def since(self, before: "SpeculationReport") -> "SpeculationReport":
        """What came after an earlier report."""
        return replace(
            self,
            ticks=dict(Counter(self.ticks) - Counter(before.ticks)),
            switches=self.switches - before.switches,
            verifies=self.verifies - before.verifies,
            accepted=self.accepted - before.accepted,
            drafting_s=self.drafting_s - before.drafting_s,
            one_off_s=self.one_off_s - before.one_off_s,
            alarms=self.alarms[len(before.alarms) :],
            tuner=self.tuner.since(before.tuner) if self.tuner and before.tuner else self.tuner,
        )


class Speculation(Protocol):
    """What the engine asks and tells."""

    @property
    def alarms(self) -> Sequence[Alarm]:
        """All there have been, oldest first."""

    @property
    def state_sink(self) -> HiddenStateSink:
        """Who wants the policy's states."""

    @property
    def deepest(self) -> int:
        """Tokens a branch may run ahead in any shape that will be chosen."""

    @property
    def widest(self) -> int:
        """Nodes of a tree in any shape that will be chosen."""

    def attach(self, to_come: Callable[[], float], running: Callable[[], Running]) -> None:
        """Called once, by the engine: it tells how many plain ticks are to come at most, and who decodes."""

    def policy_changed(self) -> None:
        """The policy's tensors hold another version from the next tick on."""

    def load_drafter(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Another version of the learned drafter, between two ticks; the same version again is nothing."""

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None: ...

    def end(self, key: Key, completion: Sequence[int]) -> None: ...

    def choose(self, running: int) -> Shape:
        """For the tick that begins now."""

    def choose_next(self, running: int) -> Shape:
        """For the tick after the one just launched; whoever then runs it says so with `chosen`."""

    def chosen(self, running: int, shape: Shape) -> None:
        """A tick begins in a shape that was foreseen."""

    def propose(
        self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape
    ) -> Sequence[Draft] | None:
        """A draft for each row; None: they lie on the device, in the trees the policy verifies."""

    def prepare(self, keys: Sequence[Key], shape: Shape) -> None:
        """Behind a launched verification: starts drafting for the tick after it, where that needs no tokens read."""

    def needs_no_tokens(self, shape: Shape) -> bool:
        """Whether trees of this shape grow where the tokens are, so that nobody has to read them first."""

    def verified(
        self, shape: Shape, emitted: Sequence[Sequence[int]], seconds: float | None, one_off_s: float = 0.0
    ) -> None:
        """The oldest tick proposed for and not verified yet emitted these tokens, row by row (none: its request was
        over), and took this long, drafting included.

        None: it did other work too. `one_off_s` was spent beside it on what will not be needed again.
        """

    def decoded(self, running: int, seconds: float) -> None:
        """A plain tick took this long."""

    def report(self) -> SpeculationReport | None:
        """None if nobody speculates."""


class NoSpeculation:
    """Plain decoding."""

    alarms: Sequence[Alarm] = ()
    state_sink: HiddenStateSink = NoSink()
    deepest = 0
    widest = 1

    def attach(self, to_come: Callable[[], float], running: Callable[[], Running]) -> None:
        pass

    def policy_changed(self) -> None:
        pass

    def load_drafter(self, weights: Mapping[str, Tensor], version: int) -> None:
        raise ValueError("nobody speculates here; expected a learned drafter to load weights into")

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        pass

    def end(self, key: Key, completion: Sequence[int]) -> None:
        pass

    def choose(self, running: int) -> Shape:
        return OFF

    def choose_next(self, running: int) -> Shape:
        return OFF

    def chosen(self, running: int, shape: Shape) -> None:
        pass

    def propose(
        self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape
    ) -> Sequence[Draft] | None:
        raise AssertionError("plain decoding drafts nothing")

    def prepare(self, keys: Sequence[Key], shape: Shape) -> None:
        pass

    def needs_no_tokens(self, shape: Shape) -> bool:
        return False

    def verified(
        self, shape: Shape, emitted: Sequence[Sequence[int]], seconds: float | None, one_off_s: float = 0.0
    ) -> None:
        pass

    def decoded(self, running: int, seconds: float) -> None:
        pass

    def report(self) -> SpeculationReport | None:
        return None


class Speculating:
    """Drafters whose branches are merged into one tree per request, in the shape that a tuner chooses."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        tuner: ShapePolicy,
        *,
        learned: LearnedDrafting | None = None,
        deepest: int = 0,
        widest: int = 1,
    ) -> None:
        """`learned` is the one among the drafters that reads the policy's states."""
        self._drafters: Mapping[str, Drafter] = {drafter.name: drafter for drafter in drafters}
        self._tuner = tuner
        self._learned = learned
        self.state_sink: HiddenStateSink = learned or NoSink()
        self.deepest, self.widest = deepest, widest
        self._proposed: deque[Proposed] = deque()  # of the ticks under way, oldest first
        self._lifecycle = LifecycleQueue(drafters, tuner.set_max_len)
        self._feedback: TickFeedback | None = None  # of the tick before, until somebody asks what was learned
        self._looking_up = [drafter for drafter in drafters if isinstance(drafter, Indexing)]
        self._to_come: Callable[[], float] = forever  # plain ticks, at most
        self._running: Callable[[], Running] = tuple
        self._arrived = 0  # positions that newcomers brought the learned drafter, as far as the tuner was told
        self._last: Shape | None = None  # shape of the tick before, if there was one
        self._plain: Counter[int] = Counter()  # requests that ran → ticks without speculation
        self._ticks: Counter[tuple[int, Shape]] = Counter()  # the others
        self._switches = self._verifies = self._accepted = 0
        self._drafting_s = self._one_off_s = 0.0
        self._alarms: list[Alarm] = []

    @property
    def alarms(self) -> Sequence[Alarm]:
        self._learn()
        return self._alarms

    def attach(self, to_come: Callable[[], float], running: Callable[[], Running]) -> None:
        self._to_come, self._running = to_come, running

    def _due_s(self) -> float:
        return sum(drafter.due_s(self._running()) for drafter in self._looking_up)

    def policy_changed(self) -> None:
        if self._learned is not None:
            self._learned.policy_changed()

    def load_drafter(self, weights: Mapping[str, Tensor], version: int) -> None:
        if self._learned is None:
            raise ValueError(f"drafters are {sorted(self._drafters)}; expected a learned one to load weights into")
        if version != self._learned.version:
            self._learn()
            self._learned.load(weights, version)
            self._tuner.drafter_changed(self._learned.name)

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._lifecycle.begin(key, prompt_id, prompt, params)

    def end(self, key: Key, completion: Sequence[int]) -> None:
        self._lifecycle.end(key, completion)

    def choose(self, running: int) -> Shape:
        shape = self.choose_next(running)
        self.chosen(running, shape)
        return shape

    def choose_next(self, running: int) -> Shape:
        self._learn()
        if not running:
            return OFF
        self._lifecycle.flush()
        return self._tuner.choose(running, self._learned.lag(running) if self._learned is not None else 0)

    def chosen(self, running: int, shape: Shape) -> None:
        if not running:
            self._last = None
            return
        if shape.off:
            self._plain[running] += 1
        else:
            self._ticks[running, shape] += 1
        if shape is not self._last:
            self._switches += self._last is not None and shape != self._last
            self._last = shape

    def propose(
        self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape
    ) -> Sequence[Draft] | None:
        self._lifecycle.flush()
        drafters = [self._drafters[name] for name in shape.drafters]
        caught_up = self._catch_up(drafters, keys, completions, shape)
        started = time.perf_counter()
        started_trees = drafters[0].start_trees(keys, shape) if len(drafters) == 1 else None
        if started_trees is not None:
            took_s = [time.perf_counter() - started]
            self._proposed.append(
                Proposed(keys, took_s, caught_up, self._ingest_tokens(), self._version, started_trees=started_trees)
            )
            return None
        columns, drafts_s = self._ask_all(drafters, keys, completions, shape)
        parts = list(zip(*columns, strict=True))
        self._proposed.append(Proposed(keys, drafts_s, caught_up, self._ingest_tokens(), self._version, parts))
        drafts = [_joined(row, shape.verify - 1) for row in parts]
        return share_out(drafts, shape.tokens(len(keys)) - len(keys)) if shape.share else drafts

    def _ask_all(
        self, drafters: Sequence[Drafter], keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape
    ) -> tuple[list[Sequence[Draft]], list[float]]:
        """Everyone's drafts, and the seconds each took. Whoever looks things up does so while a device grows trees."""
        drafts, seconds = dict[str, Sequence[Draft]](), dict.fromkeys((drafter.name for drafter in drafters), 0.0)
        for drafter in drafters:
            started = time.perf_counter()
            drafter.start_trees(keys, shape)
            seconds[drafter.name] += time.perf_counter() - started
        for drafter in sorted(drafters, key=lambda drafter: drafter is self._learned):
            started = time.perf_counter()
            drafts[drafter.name] = drafter.propose(keys, completions, shape)
            seconds[drafter.name] += time.perf_counter() - started
        return [drafts[drafter.name] for drafter in drafters], [seconds[drafter.name] for drafter in drafters]

    def _ingest_tokens(self) -> float | None:
        """What newcomers had brought a row, if much was taken in for the trees that have just been grown."""
        return self._learned.took_in() if self._learned is not None else None

    def prepare(self, keys: Sequence[Key], shape: Shape) -> None:
        for name in shape.drafters:
            if self._learned is None or name != self._learned.name or not self._learned.late(len(keys)):
                self._drafters[name].start_trees(
                    keys, shape
                )  # who must catch up does so when asked, and it is timed there

    def needs_no_tokens(self, shape: Shape) -> bool:
        return self._learned is not None and shape.drafters == (self._learned.name,)

    @property
    def _version(self) -> int:
        return self._learned.version if self._learned is not None else 0

    def _catch_up(
        self, drafters: Sequence[Drafter], keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape
    ) -> tuple[float, int, float]:
        """Seconds it took, captures left out, for they come once; positions that the learned drafter took in; and what
        the others took of the time."""
        lag = self._learned.lag(len(keys)) if self._learned is not None and self._learned in drafters else 0
        if lag and self._learned is not None:
            self._learned.wait()
        started, captured_s = time.perf_counter(), self._captured_s
        for drafter in drafters:
            if drafter is not self._learned:
                drafter.catch_up(keys, completions, shape)
        indexed_s = time.perf_counter() - started
        if self._learned is not None and self._learned in drafters:
            self._learned.catch_up(keys, completions, shape)
        return time.perf_counter() - started - (self._captured_s - captured_s), lag, indexed_s

    @property
    def _captured_s(self) -> float:
        return self._learned.capture_s if self._learned is not None else 0.0

    def verified(
        self, shape: Shape, emitted: Sequence[Sequence[int]], seconds: float | None, one_off_s: float = 0.0
    ) -> None:
        self._learn()
        self._lifecycle.flush()
        proposed = self._proposed.popleft()
        if self._took_in_early or any(self._read_behind(later) for later in self._proposed):
            seconds = None
        rows = looked_into(len(emitted), self._verifies)
        completions = {
            row: self._lifecycle.number(proposed.keys[row]) for row in rows
        }  # now: later they may have ended
        self._feedback = TickFeedback(shape, proposed, emitted, completions, seconds, one_off_s)

    def _learn(self) -> None:
        """What the tick before taught, when somebody wants to know: by then the device works on the next one."""
        feedback, self._feedback = self._feedback, None
        if feedback is None:
            return
        results, proposed = feedback.results(), feedback.proposed
        caught_up_s, lag, indexed_s = proposed.caught_up
        newly = 0.0 if lag else proposed.ingest_tokens or 0.0
        seconds = None
        if feedback.seconds is not None and (proposed.ingest_tokens is None or (newly and self._asynchronous)):
            seconds = feedback.seconds - caught_up_s
        one_off_s = feedback.one_off_s + caught_up_s
        self._verifies += len(results)
        self._accepted += sum(map(len, feedback.emitted)) - len(results)
        self._drafting_s += sum(proposed.drafts_s)
        self._one_off_s += one_off_s
        told = results if proposed.version == self._version else []  # another drafter's walks say nothing of this one
        spent = (seconds, one_off_s, proposed.drafts_s, caught_up_s, lag, newly)
        asked = self._newly_arrived(), self._to_come, self._due_s, indexed_s
        self._alarms += self._tuner.observe(Outcome(feedback.shape, len(feedback.emitted), told, *spent, *asked))

    def decoded(self, running: int, seconds: float) -> None:
        self._learn()
        arrived = self._newly_arrived()
        self._tuner.observe(
            Outcome(OFF, running, (), seconds, arrived=arrived, to_come=self._to_come, due_s=self._due_s)
        )

    @property
    def _asynchronous(self) -> bool:
        return self._learned is not None and self._learned.asynchronous

    @property
    def _took_in_early(self) -> bool:
        """Where nothing is done meanwhile, the tick that is read now waited for it."""
        return self._learned is not None and not self._learned.asynchronous and self._learned.took_in_early

    def _read_behind(self, later: Proposed) -> bool:
        """Whether a tick that is read now was waited for behind another's taking in, so that it seems to have taken as
        long as both. What newcomers bring is launched behind it where the device works on by itself."""
        _, lag, _ = later.caught_up
        return later.ingest_tokens is not None and (lag > 0 or not self._asynchronous)

    def _newly_arrived(self) -> int:
        before, self._arrived = self._arrived, self._learned.arrived if self._learned is not None else 0
        return self._arrived - before

    def report(self) -> SpeculationReport:
        self._learn()
        return SpeculationReport(
            ticks={**self._ticks, **{(running, OFF): ticks for running, ticks in self._plain.items()}},
            switches=self._switches,
            verifies=self._verifies,
            accepted=self._accepted,
            drafting_s=self._drafting_s,
            one_off_s=self._one_off_s,
            alarms=tuple(self._alarms),
            tuner=self._tuner.report(),
        )


def _joined(parts: Sequence[Draft], budget: int) -> Draft:
    """One tree of all drafters' branches; of a single drafter, mostly its own."""
    return parts[0] if len(parts) == 1 and len(parts[0]) <= budget else merge(parts, budget)
