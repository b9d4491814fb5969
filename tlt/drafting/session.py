"""One session of drafter training: what it has done so far, and what is told of it when it ends. Numbers only."""

from dataclasses import dataclass, field

from tlt.drafting.cadence import Reason
from tlt.train.drafter import DrafterBatch
from tlt.train.drafter_measure import Expected


@dataclass(frozen=True, slots=True)
class DraftingResult:
    """What one call of `train` did."""

    began: str  # why: cold, behind, improving, probe; or rested, and nothing was done
    ended: str  # rested, no answers, stopped, no gain; or, with an alarm, spoilt or no memory
    micro_steps: int
    tokens: int  # learned from, repetitions included
    before: Expected  # the last good drafter, on answers held out
    after: Expected  # the drafter given out now, on the same answers
    seconds: float
    published: bool  # a better drafter is there
    version: int  # of the drafter given out now
    alarm: str = ""  # what went wrong, if something did
    waited_s: float = 0.0  # of the seconds, in which everything else waited …
    measuring_s: float = 0.0  # … and in which accept lengths were measured


NOTHING = Expected(0.0, 1.0, 0)


@dataclass(slots=True)
class Session:
    """One call of `train`."""

    began: Reason = "rested"
    held: list[DrafterBatch] = field(default_factory=list)  # to measure on
    before: Expected = NOTHING
    best: Expected = NOTHING  # of the drafter given out by now
    micro_steps: int = 0
    unchecked: int = 0  # micro-steps since the last measurement
    tokens: int = 0
    published: bool = False
    measuring_s: float = 0.0

    def result(self, version: int, ended: str, alarm: str, seconds: float, waited_s: float) -> DraftingResult:
        return DraftingResult(
            *(self.began, ended, self.micro_steps, self.tokens, self.before, self.best),
            *(seconds, self.published, version, alarm, waited_s, self.measuring_s),
        )
