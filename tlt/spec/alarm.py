"""The alarm: a drafter whose tokens the policy suddenly refuses is reported, never silently carried along.

A CUSUM of log-likelihood ratios: "the odds of the drafter's first candidates fell to a quarter" against "they are as
usual". Only first candidates count, so a change of shape is no collapse; a completion counts a few times only, for its
verifies resemble each other. Does not know the cause, nor the reaction.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import log

from tlt.spec.acceptance import AcceptResult
from tlt.spec.shape import Shape


@dataclass(frozen=True, slots=True)
class Alarm:
    """A drafter's acceptance collapsed; it is not used until a try shows that it is useful again."""

    drafter: str
    shape: Shape  # in use when the collapse showed
    recent: float  # accept length of a chain of the drafter's first candidates, since acceptance fell
    baseline: float  # the same before
    verifies: int  # that `recent` rests on


_FALL = 4.0  # factor by which the odds of a first candidate fall in a collapse
_VERIFIES_COUNTED = 2  # most verifies counted per completion
_COMPLETIONS_REMEMBERED = 4096  # completions whose counts are kept
_BASELINE_VERIFIES = (64, 4096)  # from which the usual odds are known; over which they are a mean
_THRESHOLD = 48.0  # of the sum; completions that differ as much as any seen reach 40 without a collapse


class CollapseWatch:
    """Watches one drafter."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._right, self._wrong = 0.0, 1.0  # baseline: first candidates per verify, means that start from one miss
        self._verifies = 1  # that the baseline rests on
        self._counted: OrderedDict[Hashable, int] = OrderedDict()  # completion → verifies counted
        self._sum, self._since = 0.0, (0, 0, 0)  # CUSUM; verifies, right and wrong candidates since it was 0

    def see(self, shape: Shape, results: Sequence[AcceptResult]) -> Alarm | None:
        """The alarm, at the moment the collapse shows. It would repeat: the caller starts a new watch."""
        index = shape.drafters.index(self._drafter)
        for result in results:
            if result.rank_hits and self._counts(result.request):
                ranks = result.rank_hits[index].ranks
                right = next((depth for depth, rank in enumerate(ranks) if rank > 1), len(ranks))
                told = right < len(ranks) or result.rank_hits[index].missed_among > 0
                self._add(right, int(told and right < shape.depth))
        if self._sum < _THRESHOLD:
            return None
        verifies, right, wrong = self._since
        return Alarm(self._drafter, shape, 1.0 + right / wrong, 1.0 + self._right / self._wrong, verifies)

    def _counts(self, completion: Hashable) -> bool:
        """Whether a verify of this completion counts. None, an unknown completion, always counts."""
        if completion is None:
            return True
        counted = self._counted.pop(completion, 0)
        self._counted[completion] = counted + 1
        if len(self._counted) > _COMPLETIONS_REMEMBERED:
            self._counted.popitem(last=False)
        return counted < _VERIFIES_COUNTED

    def _add(self, right: int, wrong: int) -> None:
        """Adds a verify with `right` correct first candidates in a row. `wrong`: the next one was wrong."""
        if self._verifies >= _BASELINE_VERIFIES[0] and self._right:
            usual = self._right / (self._right + self._wrong)
            fallen = self._right / (self._right + _FALL * self._wrong)
            self._sum += right * log(fallen / usual) + wrong * log((1.0 - fallen) / (1.0 - usual))
            before, all_right, all_wrong = self._since
            self._since = (before + 1, all_right + right, all_wrong + wrong)
            if self._sum <= 0.0:
                self._sum, self._since = 0.0, (0, 0, 0)
        self._verifies = min(self._verifies + 1, _BASELINE_VERIFIES[1])
        self._right += (right - self._right) / self._verifies
        self._wrong += (wrong - self._wrong) / self._verifies
