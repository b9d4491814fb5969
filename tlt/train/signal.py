"""Groups with a signal, and dynamic sampling (DAPO): which places of a step ask another prompt. Pure decisions.

A group has a signal if its rewards differ. Without one, every advantage is 0. A step has one place per prompt. A place
whose group has no signal asks another prompt in the next turn, `grpo.dynamic_sampling` times at most.
Always holds: the prompts of a place, and the group that is learned from, depend on the rewards of that place alone. A
resumed step therefore asks the same prompts, in any order of arrival. Knows rewards; does not know prompts or engines.
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
        """Whether no turn can follow this one."""
        return self._turn == self._more

    @property
    def done(self) -> bool:
        return self._turn > self._more or self.open == []

    @property
    def learned(self) -> frozenset[int]:
        """Indices of the groups that are learned from, among all groups asked. Without dynamic sampling, and if no
        group has a signal, all of them."""
        return frozenset(self._learned.values() if self._more and self._learned else range(self._seen))
