"""BEG-MAB, the TLT paper's bucketed ε-greedy bandit, with several shapes per bucket: the baseline to beat.

Shapes that verify equally many tokens form a group; the group that verifies most serves the smallest batches, and so
on. Beyond the last bucket decoding is plain. A shape's reward is (Σ accepted / batch + 1) · batch / seconds, its worth
the median of its last rewards. Knows nothing of costs, survival or "off" as a choice; forgets by its windows alone, a
drafter's old version too. No graphs are captured for it beforehand: it tries all shapes.
"""

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

from tlt.spec.acceptance import Alarm
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import Outcome, ShapePolicy


class Bandit(ShapePolicy):
    """`buckets` are the largest batches of each bucket, rising, one for each verify size among the shapes."""

    def __init__(
        self, shapes: Sequence[Shape], buckets: Sequence[int], *, epsilon: float = 0.1, window: int = 32, seed: int = 0
    ) -> None:
        sizes = sorted({shape.verify for shape in shapes if not shape.off}, reverse=True)
        if len(sizes) != len(buckets) or any(low >= high for low, high in zip([0, *buckets], buckets, strict=False)):
            raise ValueError(
                f"buckets are {tuple(buckets)} for verify sizes {tuple(sizes)}; expected as many, rising batch sizes"
            )
        self._buckets = tuple(buckets)
        self._groups = [[s for s in shapes if not s.off and s.verify == size] for size in sizes]
        self._rewards: dict[Shape, deque[float]] = {
            shape: deque(maxlen=window) for group in self._groups for shape in group
        }
        self._epsilon = epsilon
        self._random = random.Random(seed)

    def group(self, batch: int) -> list[Shape]:
        """The shapes that compete at this batch size; none beyond the last bucket."""
        index = bisect_left(self._buckets, batch)
        return self._groups[index] if index < len(self._groups) else []

    def worth(self, shape: Shape) -> float | None:
        rewards = self._rewards[shape]
        return median(rewards) if rewards else None

    def choose(self, batch: int, lag: int = 0) -> Shape:
        """An unseen shape first, then at random with probability ε, else the best."""
        group = self.group(batch)
        if not group:
            return OFF
        unseen = next((shape for shape in group if not self._rewards[shape]), None)
        if unseen is not None:
            return unseen
        if self._random.random() < self._epsilon:
            return self._random.choice(group)
        return max(group, key=lambda shape: median(self._rewards[shape]))

    def observe(self, outcome: Outcome) -> tuple[Alarm, ...]:
        """Never alarms: the paper's tuner has no notion of a collapse."""
        if outcome.shape in self._rewards and outcome.times.seconds:
            accepted = sum(walked.accepted for walked in outcome.results)
            reward = (accepted / outcome.batch + 1.0) * outcome.batch / outcome.times.seconds
            self._rewards[outcome.shape].append(reward)
        return ()
