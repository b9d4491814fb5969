"""Whether training the drafter pays: rollout seconds saved until the run ends, against the seconds that training costs.

Owns a learning curve of the drafter, the makespan of a rollout from its lengths and measured costs, and the choice of
how long to train. What always holds: no number of the forecast is older than the step before; training is proposed only
if its savings exceed its cost by a margin; no more is expected of it than this run, or the recorded one, has shown.
Knows numbers only: no tensors, no clock.

M = Σ_n min over shapes of T(shape, B(n)) / accept_length(shape), B(n) the requests that still run at token n.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import expm1, log1p

from tlt.spec.budget import PAYBACK

# chance = rise · ln(1 + tokens / first), up to so many tokens: Qwen2.5-1.5B on GSM8K, benchmarks/drafter_curves.py
_RISE, _FIRST_TOKENS, _SHOWN_TOKENS = 0.138, 15_000, 1_150_000
_FADE = 0.7  # weight of earlier points of the curve when a new one arrives
_NEXT_RANK = 0.5  # chance of a further candidate, relative to the one before it


# ---- learning curve


def chance_of(accept_length: float, depth: int) -> float:
    """The chance c of a draft token, given that those before it are right: 1 + c + c² + … + c^depth = accept_length."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**d for d in range(depth + 1)) < accept_length else (low, middle)
    return low


def ranks_of(chance: float, depth: int, width: int) -> list[list[float]]:
    """The probability of each rank at each depth, in the form of `tlt.spec.acceptance`."""
    left, row = 1.0, list[float]()
    for rank in range(width):
        row.append(left * chance * _NEXT_RANK**rank)
        left -= row[-1]
    return [row] * depth


@dataclass(slots=True)
class LearningCurve:
    """Chance of a draft token as a function of the tokens trained on: a prior, updated with this run's measurements."""

    _tokens: float = 0.0  # trained on; for a drafter trained elsewhere, estimated from its chance
    _squares: float = 1.0
    _products: float = _RISE

    def see(self, before: float, tokens: int, after: float) -> None:
        """Adds a measurement: training on `tokens` tokens changed the chance from `before` to `after`."""
        self._tokens = (self._tokens or _tokens_at(before, _RISE)) + tokens
        x = log1p(self._tokens / _FIRST_TOKENS)
        self._squares = 1.0 + _FADE * (self._squares - 1.0) + x * x
        self._products = _RISE + _FADE * (self._products - _RISE) + x * after

    def state(self) -> tuple[float, float, float]:
        return self._tokens, self._squares, self._products

    def restore(self, state: Sequence[float]) -> None:
        self._tokens, self._squares, self._products = state

    @property
    def longest(self) -> float:
        """Tokens up to which the curve holds: those of the record, or twice those of this run."""
        return max(_SHOWN_TOKENS, 2.0 * self._tokens)

    def after(self, chance: float, tokens: int) -> float:
        """The expected chance after training on `tokens` more tokens; never below the present one."""
        rise = max(1e-3, self._products / self._squares)
        reached = rise * log1p(min(_tokens_at(chance, rise) + tokens, self.longest) / _FIRST_TOKENS)
        return max(chance, min(1.0, reached))


def _tokens_at(chance: float, rise: float) -> float:
    return _FIRST_TOKENS * expm1(min(40.0, chance / rise))


# ---- makespan of a rollout


@dataclass(frozen=True, slots=True)
class Choices:
    """Costs of decoding at one batch size."""

    others_s: float  # seconds per token of every request, with the best shape without the learned drafter
    learned_s: tuple[float, ...]  # seconds of a tick, for each shape of the learned drafter alone


def ticks_by_size(lengths: Sequence[int], rows: int, pad: Callable[[int], int]) -> dict[int, float]:
    """Plain ticks at each padded batch size, for a rollout of these lengths. Requests beyond `rows` wait."""
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
    """Seconds of a rollout. `lengths`: accept length of each shape of the learned drafter; empty: do not use it."""
    total = 0.0
    for size, count in ticks.items():
        here = choices[size]
        drafted = [seconds / length for seconds, length in zip(here.learned_s, lengths, strict=False)]
        total += count * min([here.others_s, *drafted])
    return total


# ---- choice


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of drafter training."""

    micro_s: float
    micro_tokens: int
    look_s: float  # of one measurement of the accept length
    check: int  # micro-steps between two measurements

    def of(self, micro_steps: int) -> float:
        looks = 1 + -(-micro_steps // self.check)
        return looks * self.look_s + micro_steps * self.micro_s


@dataclass(frozen=True, slots=True)
class Situation:
    """The state of a run after a rollout."""

    ticks: Mapping[int, float]  # `ticks_by_size` of the last rollout
    choices: Mapping[int, Choices]
    accept_lengths: Callable[[float], Sequence[float]]  # of the learned drafter's shapes, as a function of the chance
    chance: float  # at present
    costs: Costs
    steps_left: int
    step_s: float
    realized: float = 1.0  # fraction of the expected savings that rollouts have shown


@dataclass(frozen=True, slots=True)
class Forecast:
    """The best length of training, or none."""

    micro_steps: int  # 0: no training pays
    cost_s: float = 0.0
    returns_s: float = 0.0  # seconds saved until the run ends
    gain: float = 0.0  # (savings − cost) of the best training over the remaining time, also if it does not pay
    steps_left: int = 0

    @property
    def pays(self) -> bool:
        return self.micro_steps > 0


def forecast(now: Situation, curve: LearningCurve) -> Forecast:
    """Compares trainings of `check` · 2ⁿ micro-steps, and takes the one with the largest savings beyond its cost."""
    without_s = makespan(now.ticks, now.choices, now.accept_lengths(now.chance))
    left_s = max(1e-9, now.steps_left * now.step_s)
    best, most, highest = Forecast(0, steps_left=now.steps_left), 0.0, -float("inf")
    micro_steps = now.costs.check // 2
    while micro_steps * now.costs.micro_tokens <= curve.longest:
        micro_steps = max(1, 2 * micro_steps)
        cost_s = now.costs.of(micro_steps)
        then = curve.after(now.chance, micro_steps * now.costs.micro_tokens)
        returns_s = without_s - makespan(now.ticks, now.choices, now.accept_lengths(then))
        returns_s *= now.steps_left * now.realized
        gain = (returns_s - cost_s) / left_s
        highest = max(highest, gain)
        if cost_s > now.steps_left * without_s:
            break  # longer trainings cost more than all remaining rollouts
        if returns_s - PAYBACK * cost_s > most:
            most = returns_s - PAYBACK * cost_s
            best = Forecast(micro_steps, cost_s, returns_s, gain, now.steps_left)
    return best if best.pays else Forecast(0, gain=highest if now.steps_left else 0.0, steps_left=now.steps_left)
