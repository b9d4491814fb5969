"""The alarm: a drafter whose tokens the policy suddenly refuses is reported, never silently carried along.

What always holds: a drafter is compared with itself in the same shape, so a change of shape or batch is no collapse.
Knows nothing of why (weights lost in a hand-off, a policy that jumped) and nothing of what is done about it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.spec.acceptance import Walked
from tlt.spec.shape import Shape


@dataclass(frozen=True, slots=True)
class Alarm:
    """A drafter's acceptance collapsed; it is out until a probe shows it useful again."""

    drafter: str
    shape: Shape  # in use when it showed
    recent: float  # accept length of the drafter alone over the last verifies …
    usual: float  # … and what it used to be in the same shapes
    verifies: int  # that `recent` rests on


_LEARNED = 64  # verifies before a shape's usual accept length is one
_MEMORY = 4096  # verifies over which the usual is an average
_WINDOW_VERIFIES = 64  # the recent past: at least so many verifies …
_WINDOW_TOKENS = 32.0  # … and so many tokens that should have been accepted: chance alone does not lose most of them
_HALF, _QUARTER = 0.5, 0.25  # collapse: half the accept length, or a quarter of the accepted tokens


class CollapseWatch:
    """Of one drafter."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._usual: dict[Shape, tuple[int, float]] = {}  # verifies, accepted per verify
        self._window: deque[tuple[int, int, float]] = deque()  # verifies, accepted, accepted as usual
        self._verifies = self._accepted = 0  # in the window
        self._expected = 0.0

    def see(self, shape: Shape, walks: Sequence[Walked]) -> Alarm | None:
        """An alarm at the moment the collapse shows. It would repeat: whoever acts on it starts a new watch."""
        index = shape.drafters.index(self._drafter)
        walks = [walked for walked in walks if walked.tracks]
        if not walks:
            return None
        accepted = sum(len(walked.tracks[index].ranks) for walked in walks)
        verifies, usual = self._usual.get(shape, (0, 0.0))
        if verifies >= _LEARNED:
            self._enter(len(walks), accepted, len(walks) * usual)
        verifies = min(verifies + len(walks), _MEMORY)
        self._usual[shape] = (verifies, usual + (accepted - len(walks) * usual) / verifies)
        return self._alarm(shape) if self._collapsed() else None

    def _enter(self, verifies: int, accepted: int, expected: float) -> None:
        self._window.append((verifies, accepted, expected))
        self._verifies, self._accepted = self._verifies + verifies, self._accepted + accepted
        self._expected += expected
        while self._long_enough(*self._window[0]):
            old_verifies, old_accepted, old_expected = self._window.popleft()
            self._verifies, self._accepted = self._verifies - old_verifies, self._accepted - old_accepted
            self._expected -= old_expected

    def _long_enough(self, without_verifies: int = 0, _accepted: int = 0, without_expected: float = 0.0) -> bool:
        """The window, or the window without this entry."""
        enough = self._verifies - without_verifies >= _WINDOW_VERIFIES
        return enough and self._expected - without_expected >= _WINDOW_TOKENS

    def _collapsed(self) -> bool:
        if not self._long_enough():
            return False
        recent, usual = self._accepted / self._verifies, self._expected / self._verifies
        return 1.0 + recent < _HALF * (1.0 + usual) or recent < _QUARTER * usual

    def _alarm(self, shape: Shape) -> Alarm:
        recent, usual = self._accepted / self._verifies, self._expected / self._verifies
        return Alarm(self._drafter, shape, 1.0 + recent, 1.0 + usual, self._verifies)
