"""What learning may cost: time spent, a share of it earned, and what trying things out has lost.

What always holds: what is being tried counts as lost, at its worst, until it was seen. Knows shapes and seconds.
"""

from dataclasses import dataclass, field

from tlt.spec.shape import Shape


@dataclass(frozen=True, slots=True)
class Probe:
    shape: Shape
    rate: float  # of the shape it stood in for
    worst: float
    tick: int


@dataclass(slots=True)
class Ledger:
    """Time spent, and how much of it was lost by learning."""

    share: float
    loan_ticks: float = 0.0
    tick_s: float = 0.0  # of a plain tick, of late
    spent: float = 0.0
    lost: float = 0.0  # a probe that paid off gives back, but never below 0
    open: list[Probe] = field(default_factory=list)  # chosen, not yet observed: booked at their worst

    @property
    def left(self) -> float:
        earned = max(self.share * self.spent, self.loan_ticks * self.tick_s)  # what was lent is paid back
        return earned - self.lost - sum(probe.worst for probe in self.open)

    def close(self, shape: Shape, tick: int) -> Probe | None:
        """The probe this tick was, if it was one. One that never ran is dropped."""
        found = next((probe for probe in self.open if probe.shape == shape), None)  # it may run at another size
        self.open = [probe for probe in self.open if probe is not found and tick - probe.tick < 16]
        return found
