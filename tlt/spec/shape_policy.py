"""Whoever chooses shapes, as the engine sees them: what they are asked, and how they are told how a tick went."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from tlt.spec.acceptance import AcceptResult
from tlt.spec.alarm import Alarm
from tlt.spec.budget import TunerReport
from tlt.spec.costs import Measured
from tlt.spec.shape import Shape


def forever() -> float:
    return inf


def nothing() -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One tick as it went."""

    shape: Shape
    batch: int  # requests that decoded
    results: Sequence[AcceptResult] = ()  # one per request; none when off
    seconds: float | None = None  # of the tick, one-off work left out; None if it cannot be told
    one_off_s: float = 0.0  # one-off work because of the shape: a drafter catching up, a capture
    drafts_s: Sequence[float] = ()  # of the seconds, what each drafter took on the host; none if it cannot be told
    caught_up_s: float = 0.0  # of the one-off work, what comes again whenever a drafter was left out for a while …
    lag: int = 0  # … and the positions that it took in
    taken_in: float = 0.0  # positions of a request on average that newcomers brought and that were taken in meanwhile
    arrived: int = 0  # positions that requests which have just come bring a learned drafter
    to_come: Callable[[], float] = forever  # plain ticks until all are answered, at most, whenever it is asked …
    due_s: Callable[[], float] = nothing  # … and seconds that drafters on the host need before they can be asked
    indexed_s: float = 0.0  # of what catching up took, what those took


class ShapePolicy(Protocol):
    """What the engine asks. Calls need not alternate: a tick may be chosen before the last one is observed."""

    def choose(self, batch: int, lag: int = 0) -> Shape:
        """`lag`: positions of a request that a learned drafter would have to take in first, on average."""

    def observe(self, outcome: Outcome) -> tuple[Alarm, ...]: ...

    def load_costs(self, costs: Iterable[Measured]) -> None:
        """What runs cost, measured beforehand."""

    def set_max_len(self, ticks: int) -> None:
        """A request has come that may run for so many ticks."""

    def load_prior(self, drafter: str, ranks: Sequence[Sequence[float]]) -> None:
        """What was measured of this drafter when it was trained: by depth, how often each of its guesses is right."""

    def precapture(self, sizes: Iterable[int]) -> Sequence[tuple[Shape, int]]:
        """What it may use for so many requests, as far as it can tell: their graphs will be captured beforehand."""

    def drafter_changed(self, drafter: str) -> None:
        """Another version of this drafter is in place from the next tick on."""

    def report(self) -> TunerReport | None:
        """Its books; None if it keeps none."""
