"""The alarm: a drafter whose tokens the policy suddenly refuses is reported, never silently carried along.

What always holds: a drafter is compared with itself in the same shape, so a change of shape or batch is no collapse;
and with how much its requests differ from each other, so a few odd answers are none. Verifies of one answer resemble
each other: an answer speaks only a few times for a shape, and what counts as chance is measured between answers.
Knows nothing of why (weights lost in a hand-off, a policy that jumped) and nothing of what is done about it.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import sqrt

from tlt.spec.acceptance import AcceptResult
from tlt.spec.shape import Shape


@dataclass(frozen=True, slots=True)
class Alarm:
    """A drafter's acceptance collapsed; it is out until a probe shows it useful again."""

    drafter: str
    shape: Shape  # in use when it showed
    recent: float  # accept length of the drafter alone over the last verifies …
    baseline: float  # … and what it used to be in the same shapes
    verifies: int  # that `recent` rests on


_SPEAKS = 8  # verifies of one answer in one shape that count
_REMEMBERED = 4096  # answers and shapes whose verifies are counted
_LEARNED, _LEARNED_FROM = 64, 8  # verifies, and answers, before a shape's usual accept length is one
_MEMORY = 4096  # verifies over which the usual is an average
_WINDOW_VERIFIES = 64  # the recent past: at least so many verifies …
_WINDOW_REQUESTS = 32  # … of so many answers …
_WINDOW_TOKENS = 32.0  # … and so many tokens that should have been accepted
_HALF, _QUARTER = 0.5, 0.25  # collapse: half the accept length, or a quarter of the accepted tokens …
_BEYOND = 4.0  # … and so many standard deviations of what answers differ by
_NOISE_FROM = 16  # answers before it is known what they differ by
_NOISE_MEMORY = 1 - 1 / 512  # per answer


@dataclass(slots=True)
class _Usual:
    """Of one shape."""

    verifies: int = 0
    accepted: float = 0.0  # per verify
    requests: int = 0  # that spoke, counted until they are enough

    @property
    def known(self) -> bool:
        return self.verifies >= _LEARNED and self.requests >= _LEARNED_FROM

    def see(self, accepted: int, first: bool) -> None:
        self.requests += first
        self.verifies = min(self.verifies + 1, _MEMORY)
        self.accepted += (accepted - self.accepted) / self.verifies


@dataclass(slots=True)
class _Said:
    """By one answer, of late."""

    verifies: int = 0
    accepted: int = 0
    expected: float = 0.0


class CollapseWatch:
    """Of one drafter."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._baseline: dict[Shape, _Usual] = {}
        self._spoke: OrderedDict[tuple[Hashable, Shape], int] = OrderedDict()
        self._window: OrderedDict[Hashable, _Said] = OrderedDict()  # oldest first
        self._total = _Said()  # of the window
        self._squares = 0.0  # Σ expected² of the window
        self._noise, self._noise_squares, self._noise_from = 0.0, 0.0, 0  # of answers before: Σ (accepted − expected)²

    def see(self, shape: Shape, results: Sequence[AcceptResult]) -> Alarm | None:
        """An alarm at the moment the collapse shows. It would repeat: whoever acts on it starts a new watch."""
        index = shape.drafters.index(self._drafter)
        for walked in results:
            if walked.rank_hits:
                self._hear(shape, walked.request, len(walked.rank_hits[index].ranks))
        return self._alarm(shape) if self._collapsed() else None

    def _hear(self, shape: Shape, request: Hashable, accepted: int) -> None:
        request = object() if request is None else request
        spoke = self._spoke.pop((request, shape), 0)
        self._spoke[request, shape] = spoke + 1
        if len(self._spoke) > _REMEMBERED:
            self._spoke.popitem(last=False)
        if spoke >= _SPEAKS:
            return
        baseline = self._baseline.setdefault(shape, _Usual())
        if baseline.known:
            self._enter(request, accepted, baseline.accepted)
        baseline.see(accepted, first=not spoke)

    def _enter(self, request: Hashable, accepted: int, expected: float) -> None:
        said, total = self._window.setdefault(request, _Said()), self._total
        self._squares += (said.expected + expected) ** 2 - said.expected**2
        for one in (said, total):
            one.verifies, one.accepted = one.verifies + 1, one.accepted + accepted
            one.expected += expected
        while self._long_enough(next(iter(self._window.values())), 1):
            self._leave(self._window.popitem(last=False)[1])

    def _leave(self, said: _Said) -> None:
        total = self._total
        total.verifies, total.accepted = total.verifies - said.verifies, total.accepted - said.accepted
        total.expected, self._squares = total.expected - said.expected, self._squares - said.expected**2
        self._noise = self._noise * _NOISE_MEMORY + (said.accepted - said.expected) ** 2
        self._noise_squares = self._noise_squares * _NOISE_MEMORY + said.expected**2
        self._noise_from += 1

    def _long_enough(self, without: _Said, requests: int) -> bool:
        """The window without this."""
        verifies, expected = self._total.verifies - without.verifies, self._total.expected - without.expected
        enough = verifies >= _WINDOW_VERIFIES and len(self._window) - requests >= _WINDOW_REQUESTS
        return enough and expected >= _WINDOW_TOKENS

    def _collapsed(self) -> bool:
        if not self._long_enough(_Said(), 0) or self._noise_from < _NOISE_FROM:
            return False
        recent, baseline = self._total.accepted / self._total.verifies, self._total.expected / self._total.verifies
        halved = 1.0 + recent < _HALF * (1.0 + baseline) or recent < _QUARTER * baseline
        return halved and 1.0 - recent / baseline > _BEYOND * self._chance()

    def _chance(self) -> float:
        """Standard deviation of accepted ÷ expected over the window, if nothing has changed."""
        return sqrt(self._noise / max(self._noise_squares, 1e-9) * max(0.0, self._squares)) / self._total.expected

    def _alarm(self, shape: Shape) -> Alarm:
        recent, baseline = self._total.accepted / self._total.verifies, self._total.expected / self._total.verifies
        return Alarm(self._drafter, shape, 1.0 + recent, 1.0 + baseline, self._total.verifies)
