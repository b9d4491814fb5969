"""Groups with a signal, and dynamic sampling (DAPO): which places of a step ask another prompt. Pure decisions.

A group has a signal if its rewards differ: without, every advantage is 0 and nothing is learned from it. A step has so
many places; in a place whose group has no signal another prompt is asked, `grpo.dynamic_sampling` times at most.
Always holds: what is asked in a place, and what is learned from, depends on the rewards of that place alone, so that a
resumed step asks the same, whatever came in first. Knows rewards; does not know prompts or engines.
"""

from collections.abc import Sequence


def has_signal(rewards: Sequence[float]) -> bool:
    return min(rewards) != max(rewards)


class Places:
    """The places of a step, turn by turn."""

    def __init__(self, more: int) -> None:
        """`more`: how many further prompts a place may ask."""
        self._more = more
        self._turn = 0
        self._seen = 0  # groups, of all turns
        self._learned: dict[int, int] = {}  # place → index of its group, in the order they were asked
        self.open: list[int] | None = None  # places that ask in this turn; None: all there are

    def see(self, places: Sequence[int], rewards: Sequence[Sequence[float]]) -> None:
        """The rewards of this turn's groups, one for each of `places`."""
        signals = list(map(has_signal, rewards))
        for index, (place, signal) in enumerate(zip(places, signals, strict=True), start=self._seen):
            if signal:
                self._learned[place] = index
        self._seen += len(places)
        self.open = [place for place, signal in zip(places, signals, strict=True) if not signal]
        self._turn += 1

    @property
    def turn(self) -> int:
        return self._turn

    @property
    def last_turn(self) -> bool:
        """Whether this turn is the last one, whatever comes of it."""
        return self._turn == self._more

    @property
    def done(self) -> bool:
        return self._turn > self._more or self.open == []

    @property
    def learned(self) -> frozenset[int]:
        """Indices of the groups that are learned from, of all that were asked. Without dynamic sampling, and where no
        group has a signal: all."""
        return frozenset(self._learned.values() if self._more and self._learned else range(self._seen))
