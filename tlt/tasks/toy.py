"""Toy task: evaluate an arithmetic expression by rewriting it, one operation at a time, until a number is left.

The solution of `(3+4)*2-5=` is `7*2-5=4-5=9`. Arithmetic is modulo 10, so every number is one character. The length of
a solution grows with the square of the number of operations, which is lognormal: lengths have a long tail. Every prompt
is a function of (seed, step, index), or of (seed, index in the pool) if `pool` is set. The reward is exact.
Works on text; does not know tokens, tensors or the policy.
"""

import math
import random
import re
from collections.abc import Sequence

from tlt.config import ToySettings
from tlt.errors import TaskError
from tlt.types import Completion, Prompt

OPERATORS = "+-*"
ALPHABET = "0123456789" + OPERATORS + "()="  # every character of a prompt or a correct completion

# The leftmost operation that can be evaluated: both operands are numbers, and no neighbour has precedence.
# The match includes parentheses around it.
_READY = re.compile(r"\(\d+[-+*]\d+\)|(?<![*\d])\d+\*\d+(?!\d)|(?<![-+*\d])\d+[-+]\d+(?![*\d])")


class ToyTask:
    """Arithmetic by rewriting: unlimited prompts, exact reward."""

    def __init__(self, settings: ToySettings | None = None, *, seed: int = 0) -> None:
        self.settings = settings or ToySettings()
        self.seed = seed

    def sample(self, step: int, count: int) -> Sequence[Prompt]:
        pool = self.settings.pool
        if pool:
            return [self._prompt(f"pool/{(step * count + index) % pool}") for index in range(count)]
        return [self._prompt(f"{step}/{index}") for index in range(count)]

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        """1.0 if the completion ended with EOS, each rewriting has one operation less, and the last is the result."""
        if completion.finish_reason != "eos":
            return 0.0
        return float(is_right(completion.text, _expression_of(prompt), self.settings.modulus))

    def solution(self, prompt: Prompt) -> str:
        """The correct completion of one of this task's prompts, used by supervised warm-up."""
        return solve(_expression_of(prompt), self.settings.modulus)

    def _prompt(self, name: str) -> Prompt:
        draw = random.Random(f"toy/{self.seed}/{name}")
        expression = write_expression(draw, _draw_ops(draw, self.settings), self.settings)
        result = solve(expression, self.settings.modulus).rpartition("=")[2]
        return Prompt(id=f"toy:{expression}", content=expression + "=", reference=result)


def solve(expression: str, modulus: int = 10) -> str:
    """The rewritings of an expression, down to its result: `(3+4)*2-5` gives `7*2-5=4-5=9`."""
    lines = []
    while not expression.isdecimal():
        expression = _rewrite_once(expression, modulus)
        lines.append(expression)
    return "=".join(lines)


def is_right(completion: str, expression: str, modulus: int = 10) -> bool:
    """Whether each rewriting has one operation less and the last one is the correct result.

    Every rewriting is required, so that guessing the result directly earns nothing. The values of the intermediate
    rewritings are not checked.
    """
    operations = count_ops(expression)
    lines = completion.split("=")
    counts_down = [count_ops(line) for line in lines] == list(range(operations - 1, -1, -1))
    return (
        counts_down and set(completion) <= set(ALPHABET) and lines[-1] == solve(expression, modulus).rpartition("=")[2]
    )


def count_ops(expression: str) -> int:
    return sum(character in OPERATORS for character in expression)


def write_expression(draw: random.Random, ops: int, settings: ToySettings) -> str:
    """A random expression with exactly `ops` operations."""
    text, left = _write_operand(draw, ops, settings)
    while left:
        operator = "*" if draw.random() < settings.products else draw.choice("+-")
        operand, left = _write_operand(draw, left - 1, settings)
        text += operator + operand
    return text


def _write_operand(draw: random.Random, ops: int, settings: ToySettings) -> tuple[str, int]:
    """A number or an expression in parentheses, and how many of the `ops` operations are left."""
    if ops < 2 or draw.random() >= settings.parentheses:
        return str(draw.randrange(settings.modulus)), ops
    inside = draw.randint(1, ops - 1)
    return f"({write_expression(draw, inside, settings)})", ops - inside


def _draw_ops(draw: random.Random, settings: ToySettings) -> int:
    ops = round(draw.lognormvariate(math.log(settings.median_ops), settings.spread))
    return min(max(ops, 1), settings.max_ops)


def _rewrite_once(expression: str, modulus: int) -> str:
    ready = _READY.search(expression)
    if ready is None:
        raise TaskError(f"cannot evaluate {expression!r}; expected numbers, + - * and matching parentheses only")
    left, operator, right = re.split(r"([-+*])", ready[0].strip("()"))
    a, b = int(left), int(right)
    value = {"+": a + b, "-": a - b, "*": a * b}[operator] % modulus
    return f"{expression[: ready.start()]}{value}{expression[ready.end() :]}"


def _expression_of(prompt: Prompt) -> str:
    if not isinstance(prompt.content, str) or not prompt.content.endswith("="):
        raise TaskError(f"prompt {prompt.id!r} is not one of the toy task's; expected plain text that ends in '='")
    return prompt.content[:-1]
