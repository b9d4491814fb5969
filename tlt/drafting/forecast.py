"""Whether training the drafter pays: rollout seconds that come back before the run ends, against the seconds it costs.

Owns a learning curve of the drafter, the makespan of a rollout from its lengths and measured costs, and the choice of
how long to train. What always holds: no number of the forecast is older than the step before; training is proposed only
where what comes back exceeds its cost by a margin. Knows numbers only: no tensors, no clock.

M = Σ_n min over shapes of T(shape, B(n)) / accept_length(shape), B(n) the requests that still run at token n.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import expm1, log1p

_MARGIN = 1.5  # times its cost that training must bring back
_RISE, _FIRST_TOKENS = 0.138, 15_000  # chance = rise · ln(1 + tokens / first): Qwen2.5-1.5B on GSM8K, drafter_curves.py
_FADE = 0.7  # weight of earlier points of the curve, when another arrives
_HIGHEST = 0.95  # chance that any drafter is taken to reach
_NEXT_RANK = 0.5  # chance of a further candidate, relative to the one before it
_LONGEST = 12  # doublings of a training's length that are compared


# ---- how good a drafter becomes


def chance_of(accept_length: float, depth: int) -> float:
    """Chance c of every draft token, given those before it, with 1 + c + c² + … + c^depth = accept_length."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**d for d in range(depth + 1)) < accept_length else (low, middle)
    return low


def ranks_of(chance: float, depth: int, width: int) -> list[list[float]]:
    """Probability of each rank at each depth, as `tlt.spec.acceptance` wants it."""
    left, row = 1.0, list[float]()
    for rank in range(width):
        row.append(left * chance * _NEXT_RANK**rank)
        left -= row[-1]
    return [row] * depth


@dataclass(slots=True)
class LearningCurve:
    """Chance of a draft token against tokens trained on: a prior, corrected by what this run has seen."""

    _tokens: float = 0.0  # trained on, by the prior where a drafter was trained elsewhere
    _squares: float = 1.0
    _products: float = _RISE

    def see(self, before: float, tokens: int, after: float) -> None:
        """Training on so many tokens led from one chance to another."""
        self._tokens = (self._tokens or _tokens_at(before, _RISE)) + tokens
        x = log1p(self._tokens / _FIRST_TOKENS)
        self._squares = 1.0 + _FADE * (self._squares - 1.0) + x * x
        self._products = _RISE + _FADE * (self._products - _RISE) + x * after

    def after(self, chance: float, tokens: int) -> float:
        """What training on so many more tokens leads to from this chance; never less than it."""
        rise = max(1e-3, self._products / self._squares)
        reached = rise * log1p((_tokens_at(chance, rise) + tokens) / _FIRST_TOKENS)
        return max(chance, min(_HIGHEST, reached))


def _tokens_at(chance: float, rise: float) -> float:
    return _FIRST_TOKENS * expm1(min(40.0, chance / rise))


# ---- how long a rollout takes


@dataclass(frozen=True, slots=True)
class Choices:
    """What decoding at one batch size may cost."""

    others_s: float  # per token of every request, the best without the learned drafter
    learned_s: tuple[float, ...]  # of a tick of each shape of the learned drafter alone


def ticks_by_size(lengths: Sequence[int], rows: int, pad: Callable[[int], int]) -> dict[int, float]:
    """Plain ticks at each padded number of requests, few of them; more requests than rows wait for each other."""
    ticks: dict[int, float] = {}
    before, left = 0, len(lengths)
    for length in sorted(lengths):
        if length > before:
            running = min(rows, left)
            size = pad(min(rows, 1 << (running - 1).bit_length()))
            ticks[size] = ticks.get(size, 0.0) + (length - before) * left / running
            before = length
        left -= 1
    return ticks


def makespan(ticks: Mapping[int, float], choices: Mapping[int, Choices], lengths: Sequence[float]) -> float:
    """Seconds of a rollout. `lengths`: accept length of each shape of the learned drafter; none: it is not asked."""
    total = 0.0
    for size, count in ticks.items():
        here = choices[size]
        drafted = [seconds / length for seconds, length in zip(here.learned_s, lengths, strict=False)]
        total += count * min([here.others_s, *drafted])
    return total


# ---- whether and how long to train


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of drafter training."""

    micro_s: float
    micro_tokens: int
    look_s: float  # measuring accept length, before and after
    check: int  # micro-steps between two measurements

    def of(self, micro_steps: int) -> float:
        looks = 1 + -(-micro_steps // self.check)
        return looks * self.look_s + micro_steps * self.micro_s


@dataclass(frozen=True, slots=True)
class Situation:
    """A run as it is after a rollout."""

    ticks: Mapping[int, float]  # `ticks_by_size` of the last rollout
    choices: Mapping[int, Choices]
    accept_lengths: Callable[[float], Sequence[float]]  # of the learned drafter's shapes, for a chance
    chance: float  # now
    costs: Costs
    steps_left: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """The best training there is, or none."""

    micro_steps: int  # 0: none pays
    cost_s: float = 0.0
    returns_s: float = 0.0  # before the run ends
    gain: float = 0.0  # of the time that is left, costs taken off; of the best training, whether it pays or not
    steps_left: int = 0

    @property
    def pays(self) -> bool:
        return self.micro_steps > 0


def forecast(now: Situation, curve: LearningCurve) -> Forecast:
    """Trainings twice as long as each other are compared. The one that leaves most after its cost is the best."""
    without_s = makespan(now.ticks, now.choices, now.accept_lengths(now.chance))
    left_s = max(1e-9, now.steps_left * now.step_s)
    best, most, highest = Forecast(0, steps_left=now.steps_left), 0.0, -float("inf")
    for doubling in range(_LONGEST):
        micro_steps = now.costs.check << doubling
        cost_s = now.costs.of(micro_steps)
        then = curve.after(now.chance, micro_steps * now.costs.micro_tokens)
        returns_s = now.steps_left * (without_s - makespan(now.ticks, now.choices, now.accept_lengths(then)))
        gain = (returns_s - cost_s) / left_s
        highest = max(highest, gain)
        if cost_s > now.steps_left * without_s:
            break  # longer ones cost more than rollouts take
        if returns_s - _MARGIN * cost_s > most:
            most = returns_s - _MARGIN * cost_s
            best = Forecast(micro_steps, cost_s, returns_s, gain, now.steps_left)
    return best if best.pays else Forecast(0, gain=highest if now.steps_left else 0.0, steps_left=now.steps_left)
