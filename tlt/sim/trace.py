"""Length traces: the prompts of a step and the lengths of their completions, read from a run or drawn at random.

What always holds: every prompt has a completion, every completion a token. Does not know costs.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Any

from tlt.config import RunConfig
from tlt.errors import ConfigError, shown
from tlt.strict_json import InvalidJson, parse
from tlt.watch.directory import ROLLOUTS
from tlt.watch.events import RolloutFinished, StepFinished, read_run
from tlt.watch.history import counted

_PROMPT_TOKENS = 128  # if the trace does not tell
_SAME_PROMPT = 0.5  # fraction of the variance of drawn log lengths that the completions of a prompt share


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """A prompt and its completions."""

    lengths: tuple[int, ...]  # tokens of each completion
    prompt_tokens: int = _PROMPT_TOKENS


@dataclass(frozen=True, slots=True)
class Trace:
    """One step."""

    asked: tuple[TracedPrompt, ...]
    cap: int  # most tokens of a completion
    source: str  # where the trace is from, for people
    rollout_s: float | None = None  # measured seconds of the rollout; None: unknown
    workers: int = 1  # of the measured rollout
    drafter: str = ""  # `spec.drafter` of the measured rollout
    rest_s: float | None = None  # measured seconds of the step beside the rollout; None: unknown

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(length for asked in self.asked for length in asked.lengths)


def trace_of(wanted: str, config: RunConfig) -> Trace:
    """The trace of a run's directory or a JSONL file, or a drawn one: `median=400,sigma=1,cap=8192`."""
    if "=" in wanted and not exists(wanted):
        return draw_trace(wanted, config)
    path = Path(wanted)
    if isdir(path):
        if isfile(path / ROLLOUTS):
            return _of_rollout(path)
        return _of_training(path)
    if not isfile(path):
        raise ConfigError(
            f"--lengths {wanted} is not there; expected a run's directory, a JSONL file with `prompt` and `tokens`, or "
            "a distribution as in median=400,sigma=1,cap=8192"
        )
    asked = _by_prompt(_rows(path))
    return Trace(asked, max(config.sampling.max_tokens, *(max(one.lengths) for one in asked)), str(path))


# ---- measured


def _of_rollout(path: Path) -> Trace:
    """From the completions that `tlt rollout` wrote."""
    run = read_run(path)
    told = [record.event for record in run.events if isinstance(record.event, RolloutFinished)]
    seconds = told[-1].seconds if told else None
    asked = _by_prompt(_rows(path / ROLLOUTS))
    config = run.config
    return Trace(asked, config.sampling.max_tokens, str(path), seconds, config.cluster.workers, config.spec.drafter)


def _of_training(path: Path) -> Trace:
    """The last step of `tlt train`. Its events list lengths in the order of the requests."""
    run = read_run(path)
    events = [record.event for record in counted(run.events)]
    rollouts = {event.step: event for event in events if isinstance(event, RolloutFinished)}
    steps = [event for event in events if isinstance(event, StepFinished) and event.step in rollouts]
    if not steps or not rollouts[steps[-1].step].lengths:
        raise ConfigError(f"{path} has not finished a step yet; expected at least one")
    last = steps[-1]
    told = rollouts[last.step]
    groups = _grouped(told.lengths, run.config.task.group if told.n == len(told.lengths) else 1)
    some = "" if told.n == len(told.lengths) else f" ({len(told.lengths)} of its {told.n} answers)"
    return Trace(
        asked=tuple(TracedPrompt(group) for group in groups),
        cap=run.config.sampling.max_tokens,
        source=f"{path}, step {last.step}{some}",
        rollout_s=last.rollout_s if not some else None,
        workers=run.config.cluster.workers,
        drafter=run.config.spec.drafter,
        rest_s=last.step_s - last.rollout_s,
    )


def _grouped(lengths: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(lengths[first : first + size]) for first in range(0, len(lengths), size)]


def _rows(file: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if line.strip():
            rows.append(_row(line, f"{file}, line {number}"))
    if not rows:
        raise ConfigError(f"{file} is empty; expected a line per answer")
    return rows


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = parse(line)
    except InvalidJson as error:
        raise ConfigError(f"{where} {error}") from None
    if not isinstance(row, dict) or "prompt" not in row or "tokens" not in row:
        raise ConfigError(f"{where} is {shown(row)}; expected an object with `prompt` and `tokens`")
    for name in ("tokens", "prompt_tokens"):
        value = row.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{where}: `{name}` is {shown(value)}; expected a whole number ≥ 1")
    return row


def _by_prompt(rows: Sequence[dict[str, Any]]) -> tuple[TracedPrompt, ...]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(json.dumps(row["prompt"]), []).append(row)
    return tuple(
        TracedPrompt(tuple(row["tokens"] for row in group), group[0].get("prompt_tokens", _PROMPT_TOKENS))
        for group in groups.values()
    )


# ---- drawn


def draw_trace(wanted: str, config: RunConfig) -> Trace:
    """Draws lengths from a log-normal distribution. Half of the variance is common to a prompt's completions. `rest`:
    seconds of a step beside its rollout, on one worker."""
    numbers = _numbers(wanted)
    median, sigma, cap = numbers["median"], numbers["sigma"], int(numbers["cap"])
    prompt_tokens = int(numbers.get("prompt", _PROMPT_TOKENS))
    luck = random.Random(f"lengths/{config.run.seed}/{wanted}")
    asked = []
    for _ in range(config.task.prompts):
        shared = luck.gauss(0.0, sigma * sqrt(_SAME_PROMPT))
        own = (luck.gauss(0.0, sigma * sqrt(1 - _SAME_PROMPT)) for _ in range(config.task.group))
        lengths = (round(exp(log(median) + shared + each)) for each in own)
        asked.append(TracedPrompt(tuple(max(1, min(cap, length)) for length in lengths), prompt_tokens))
    return Trace(tuple(asked), cap, f"drawn: {wanted}", rest_s=numbers.get("rest"))


def _numbers(wanted: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in wanted.split(","):
        name, _, value = part.partition("=")
        lowest = {"median": 1.0, "sigma": 0.0, "cap": 1.0, "prompt": 1.0, "rest": 0.0}.get(name.strip())
        try:
            found[name.strip()] = float(value)
        except ValueError:
            lowest = None
        if lowest is None or not lowest <= found[name.strip()] < 1e9:
            raise ConfigError(
                f"--lengths: {part!r} in {wanted!r}; expected median, sigma, cap, prompt or rest, and a number"
            )
    missing = {"median", "sigma", "cap"} - found.keys()
    if missing:
        raise ConfigError(f"--lengths {wanted!r} lacks {sorted(missing)}; expected as in median=400,sigma=1,cap=8192")
    return found
