"""One session of drafter training: its running totals and its result. Numbers only."""

from dataclasses import dataclass, field

from tlt.drafting.cadence import Reason
from tlt.train.drafter import DrafterBatch
from tlt.train.drafter_measure import Expected


@dataclass(frozen=True, slots=True)
class DraftingResult:
    """The result of one call of `train`."""

    began: str  # reason: cold, behind, improving, probe; rested: nothing was done
    ended: str  # rested, no answers, stopped, no gain; or, with an alarm, diverged or no memory
    micro_steps: int
    tokens: int  # learned from, repetitions included
    before: Expected  # the published drafter before, on held-out answers
    after: Expected  # the published drafter now, on the same answers
    seconds: float
    published: bool  # a better drafter was published
    version: int  # of the published drafter
    alarm: str = ""  # the error, if there was one
    waited_s: float = 0.0  # of the seconds, those for which other work waited
    measuring_s: float = 0.0  # of the seconds, those spent measuring accept lengths


NOTHING = Expected(0.0, 1.0, 0)


@dataclass(slots=True)
class Session:
    """One call of `train`."""

    began: Reason = "rested"
    held: list[DrafterBatch] = field(default_factory=list)  # to measure on
    before: Expected = NOTHING
    best: Expected = NOTHING  # of the published drafter
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
