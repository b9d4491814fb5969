"""Steps task: apply a few rules in rotation, one numbered line per step, for the number of steps in the prompt.

Example: the prompt says to start with 47 and do 3 steps with the rules "add 8, multiply by 3, add the number of the
step". The solution has the lines `1. 47+8=55`, `2: 55 times 3 is 65`, `3. 65+3 gives 68;` and `Result: 68`. Arithmetic
is modulo 100, and the phrasing of each line is drawn at random. The number of steps is lognormal with a wide spread:
most completions are short, and a few fill the context. Every prompt is a function of (seed, step, index), and the
reward is exact. Works on text; does not know tokens, tensors or the policy.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.config import StepsSettings
from tlt.errors import TaskError
from tlt.types import Completion, Message, Prompt

_Ways = tuple[tuple[str, ...], tuple[float, ...]]  # equivalent phrasings and their probabilities

_MARKS: _Ways = ((". ", ": ", ") "), (0.5, 0.3, 0.2))
_STYLES: _Ways = (("symbol", "word"), (0.7, 0.3))
_EQUALS: _Ways = (("=", " is ", " gives "), (0.5, 0.3, 0.2))
_STOPS: _Ways = (("", ".", ";"), (0.6, 0.2, 0.2))
_ENDINGS: _Ways = (("Result: {}", "The result is {}.", "So it ends at {}."), (0.5, 0.3, 0.2))
_LINE = (_MARKS, _STYLES, _EQUALS, _STOPS)

_WORDS = {"+": " plus ", "-": " minus ", "*": " times "}
_ASKED = {"+": "add {}", "-": "subtract {}", "*": "multiply by {}"}
_OWN_NUMBER = "the number of the step"
_FACTORS = range(2, 10)

_PROMPTS = (
    "Start with {start} and do {steps} steps, taking these in turn: {rules}. Count modulo {modulus}.",
    "Take the number {start}. Do these in turn, {steps} steps in all, modulo {modulus}: {rules}.",
    "Begin at {start}. Modulo {modulus}, again and again in this order, {steps} steps altogether: {rules}.",
)
_NUMBERED = re.compile(r"([0-9]+)[.:)] .+")
_RESULT = re.compile(r"[^0-9]*\b([0-9]+)\.?")


@dataclass(frozen=True, slots=True)
class Rule:
    operator: str  # one of + - *
    operand: int | None  # None: the number of the step

    def __str__(self) -> str:
        return _ASKED[self.operator].format(_OWN_NUMBER if self.operand is None else self.operand)


@dataclass(frozen=True, slots=True)
class Problem:
    start: int
    rules: tuple[Rule, ...]  # applied in rotation
    steps: int
    modulus: int

    def values(self) -> list[int]:
        """The value after each step."""
        values, value = [], self.start
        for number in range(1, self.steps + 1):
            value = self._apply(self.rules[(number - 1) % len(self.rules)], value, number)
            values.append(value)
        return values

    def _apply(self, rule: Rule, value: int, number: int) -> int:
        operand = number if rule.operand is None else rule.operand
        return {"+": value + operand, "-": value - operand, "*": value * operand}[rule.operator] % self.modulus


class StepsTask:
    """Rules applied step by step: unlimited prompts, exact reward, completions of very different lengths."""

    def __init__(self, settings: StepsSettings | None = None, *, seed: int = 0) -> None:
        self.settings = settings or StepsSettings()
        self.seed = seed

    def sample(self, step: int, count: int) -> Sequence[Prompt]:
        return [self._prompt(step, index) for index in range(count)]

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        """1.0 if the completion ended with EOS, has one line per step, and its last line has the result."""
        if completion.finish_reason != "eos":
            return 0.0
        return float(is_right(completion.text, _problem_of(prompt)))

    def solution(self, prompt: Prompt, draw: random.Random | None = None) -> str:
        """A correct completion of one of this task's prompts. Phrasing is drawn from `draw`, or by seed and prompt."""
        draw = draw or random.Random(f"steps/{self.seed}/{prompt.id}")
        return write_solution(_problem_of(prompt), draw, self.settings.variety)

    def _prompt(self, step: int, index: int) -> Prompt:
        draw = random.Random(f"steps/{self.seed}/{step}/{index}")
        problem = draw_problem(draw, self.settings)
        rules = ", ".join(map(str, problem.rules))
        text = draw.choice(_PROMPTS).format(
            start=problem.start, steps=problem.steps, modulus=problem.modulus, rules=rules
        )
        return Prompt(
            id=f"steps:{text}",
            content=(Message("user", text),) if self.settings.chat else text + "\n",
            reference=str(problem.values()[-1]),
            extra={"problem": problem},
        )


def draw_problem(draw: random.Random, settings: StepsSettings) -> Problem:
    """One rule always uses the number of the step: without it, sequences modulo a small number soon repeat."""
    steps = round(draw.lognormvariate(math.log(settings.median_steps), settings.spread))
    rules = [_draw_rule(draw, settings) for _ in range(draw.randint(1, settings.rules - 1))]
    rules.insert(draw.randint(0, len(rules)), Rule(draw.choice("+-"), None))
    return Problem(
        start=draw.randrange(settings.modulus),
        rules=tuple(rules),
        steps=min(max(steps, 1), settings.max_steps),
        modulus=settings.modulus,
    )


def write_solution(problem: Problem, draw: random.Random, variety: float = 1.0) -> str:
    lines, before = [], problem.start
    for index, after in enumerate(problem.values()):
        rule = problem.rules[index % len(problem.rules)]
        mark, style, equals, stop = (_one_of(ways, draw, variety) for ways in _LINE)
        operator = rule.operator if style == "symbol" else _WORDS[rule.operator]
        operand = index + 1 if rule.operand is None else rule.operand
        lines.append(f"{index + 1}{mark}{before}{operator}{operand}{equals}{after}{stop}")
        before = after
    return "\n".join([*lines, _one_of(_ENDINGS, draw, variety).format(before)])


def is_right(completion: str, problem: Problem) -> bool:
    """Whether the lines are numbered up to the last step and the last line has the correct result.

    Every step is required, so that guessing the result directly earns nothing. The values of the steps are not checked.
    """
    *lines, last = completion.split("\n")
    numbered = [_NUMBERED.fullmatch(line) for line in lines]
    counts_up = [found and found[1] for found in numbered] == [str(number + 1) for number in range(problem.steps)]
    result = _RESULT.fullmatch(last)
    return counts_up and result is not None and result[1] == str(problem.values()[-1])


def _draw_rule(draw: random.Random, settings: StepsSettings) -> Rule:
    """Factors are coprime to the modulus: other factors would collapse all starts onto few values."""
    if draw.random() < settings.products:
        factors = [factor for factor in _FACTORS if math.gcd(factor, settings.modulus) == 1]
        if factors:
            return Rule("*", draw.choice(factors))
    return Rule(draw.choice("+-"), draw.randint(2, settings.largest))


def _one_of(ways: _Ways, draw: random.Random, variety: float) -> str:
    return draw.choices(ways[0], _varied(ways, variety))[0]


def _varied(ways: _Ways, variety: float) -> list[float]:
    """Scales the weights of the other phrasings by `variety`; the first one gets the rest."""
    rest = [variety * weight for weight in ways[1][1:]]
    return [1.0 - sum(rest), *rest]


def _problem_of(prompt: Prompt) -> Problem:
    problem = prompt.extra.get("problem")
    if not isinstance(problem, Problem):
        raise TaskError(f"prompt {prompt.id!r} is not one of the steps task's; expected one that it has sampled")
    return problem
