"""How ticks differ from what a table of costs says: what a shape costs beyond it, and what newcomers bring.

What always holds: no single tick is believed; what was seen long ago fades. Knows shapes, sizes and seconds, and
nothing of where they come from.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from tlt.spec.shape import Shape

SETTLED = 8  # ticks after a switch in which the new shape is compared with the one before
TRUSTED = 4  # ticks of its own on which a shape's correction stands alone; before, it leans on its neighbours'
_DEAREST = 32.0  # times as dear as many a newcomer's position may be: beyond that the machine stood still
_ARRIVALS = 9  # of which is remembered what they took


class IngestCost:
    """How many times as dear as a position that all rows take in at once is one that newcomers bring.

    They come few at a time, and passes have room in steps: by the position it is dearest where the fewest come. So
    what some arrivals took together is compared with what was foreseen of them together, without the strangest ones.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, int]] = deque(maxlen=_ARRIVALS)  # seconds, positions of a row, rows
        self._compared: float | None = None  # kept until something changes: it is asked for of every shape

    def changed(self) -> None:
        """What a position costs otherwise is another number now."""
        self._compared = None

    def see(self, seconds: float, positions: float, rows: int) -> None:
        self._seen.append((seconds, positions, rows))
        self._compared = None

    def fade(self) -> None:
        """What was seen long ago, perhaps in a bad moment, is forgotten in the end: or nobody would look again."""
        if self._seen:
            self._seen.popleft()
            self._compared = None

    def times(self, believed: float, position_s: Callable[[int], float]) -> float:
        """`believed`: before anything was seen, and less and less of it until enough was."""
        known = min(len(self._seen), TRUSTED)
        if known and self._compared is None:
            self._compared = self._compare(position_s)
        return ((self._compared or 0.0) * known + believed * (TRUSTED - known)) / TRUSTED

    def _compare(self, position_s: Callable[[int], float]) -> float:
        expected = [(seconds, positions * position_s(rows)) for seconds, positions, rows in self._seen]
        pairs = [(min(took, _DEAREST * baseline), baseline) for took, baseline in expected if baseline > 0.0]
        pairs.sort(key=lambda pair: pair[0] / pair[1])
        cut = len(pairs) // 4
        middle = pairs[cut : len(pairs) - cut]
        return max(0.0, sum(took for took, _ in middle)) / sum(baseline for _, baseline in middle) if middle else 0.0


def clipped(value: float, most: float) -> float:
    return min(max(value, -most), most)


class CostResiduals:
    """Seconds beyond the table: of a shape at a batch size, and of all of its kind there."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, int], tuple[float, int]] = {}  # (shape or kind, size) → seconds, ticks
        self._now: tuple[bool, Shape, int] | None = None  # who is being compared …
        self._said: list[float] = []  # … and what its ticks have said so far

    def of(self, kind: bool, shape: Shape, size: int) -> float:
        if self._now == (kind, shape, size) and len(self._said) >= TRUSTED:
            return self._with_news((shape, size))[0]
        own, ticks = self._known.get((shape, size), (0.0, 0))
        if ticks >= TRUSTED:
            return own
        return (ticks * own + (TRUSTED - ticks) * self._of_kind(kind, size)) / TRUSTED

    def of_all(self, kinds: Sequence[bool], index: Mapping[Shape, int], size: int) -> list[float]:
        """`of` each of many shapes, of these kinds, for less: hardly any of them was ever seen at this size."""
        baseline = {kind: self._of_kind(kind, size) for kind in set(kinds)}
        found = [baseline[kind] for kind in kinds]
        seen = [key for key, at in self._known if at == size and isinstance(key, Shape)]
        for shape in (*seen, self._now[1]) if self._now is not None else seen:
            if shape in index:
                found[index[shape]] = self.of(kinds[index[shape]], shape, size)
        return found

    def ticks(self, shape: Shape, size: int) -> int:
        return self._known.get((shape, size), (0.0, 0))[1]

    def _of_kind(self, kind: bool, size: int) -> float:
        """At the nearest size at which its kind ever ran."""
        if self._now is not None and self._now[::2] == (kind, size) and len(self._said) >= TRUSTED:
            seconds, ticks = self._with_news((kind, size))
            return seconds
        sizes = [known for key, known in self._known if key is kind]
        if not sizes:
            return 0.0
        nearest = min(sizes, key=lambda known: abs(known - size))
        seconds, ticks = self._known[kind, nearest]
        return seconds * min(1.0, ticks / TRUSTED)

    def see(self, kind: bool, shape: Shape, size: int, beyond: float) -> None:
        """A tick took so many seconds more than the table says."""
        if self._now != (kind, shape, size):
            self.close()
            self._now = (kind, shape, size)
        self._said.append(beyond)

    def close(self) -> None:
        """The comparison is over: what it said counts as much as what was known before, tick for tick."""
        if self._now is not None:
            kind, shape, size = self._now
            for key in ((shape, size), (kind, size)):
                self._known[key] = self._with_news(key)
        self._now, self._said = None, []

    def fade(self, used: Shape) -> None:
        """What was learned long ago, perhaps while the machine was busy, is forgotten in the end: or whoever seemed too
        dear then would never be used again."""
        halved = {
            key: (seconds, ticks if key[0] == used else ticks // 2) for key, (seconds, ticks) in self._known.items()
        }
        self._known = {key: known for key, known in halved.items() if known[1]}

    def forget(self, kind: bool, kind_of: Callable[[Shape], bool], size: int) -> None:
        """All of one kind, at this size."""
        self._known = {
            (key, known_at): known
            for (key, known_at), known in self._known.items()
            if known_at != size or (kind_of(key) if isinstance(key, Shape) else key) is not kind
        }

    def _with_news(self, key: tuple[object, int]) -> tuple[float, int]:
        before, ticks = self._known.get(key, (0.0, 0))
        new = len(self._said)
        return before + (_middle(self._said) - before) * new / (ticks + new), min(ticks + new, SETTLED)


def _middle(values: list[float]) -> float:
    """The mean of the middle half: two ticks of which one was read late cancel out, and a busy moment says nothing."""
    cut = len(values) // 4
    middle = sorted(values)[cut : len(values) - cut]
    return sum(middle) / len(middle)
