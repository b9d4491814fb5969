"""Step files: which groups of a step keep their tokens, and which files are removed when space runs out.

`steps/step_N.json` in the run's directory holds what is too large for an event. Invariants: a file is complete or
absent, and all files together stay within their limit. Does not depend on the content of a file.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

STEPS = "steps"
_NAME = re.compile(r"step_([0-9]{1,12})\.json")
_NEWEST = 8  # step files that are removed last


def sampled_groups(step: int, longest: Sequence[int], wanted: int) -> frozenset[int]:
    """Indices of the groups to keep: the one with the longest completion, and evenly spaced others that rotate over the
    steps. `longest`: tokens of the longest completion of each group."""
    groups, count = len(longest), min(wanted, len(longest))
    if count < 2:
        return frozenset({step % groups} if count else ())
    last = max(range(groups), key=longest.__getitem__)
    others = [index for index in range(groups) if index != last]
    return frozenset([last, *(others[(step + n * len(others) // (count - 1)) % len(others)] for n in range(count - 1))])


def step_file(directory: Path, step: int) -> Path:
    return directory / STEPS / f"step_{step}.json"


def steps_kept(directory: Path) -> dict[int, int]:
    """Step → bytes of its file."""
    folder = directory / STEPS
    if not folder.is_dir():
        return {}
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path.stat().st_size for match, path in sorted(found, key=str) if match}


def superfluous(sizes: Mapping[int, int], limit: int) -> list[int]:
    """Steps whose files are removed so that the others fit. The newest stay if they can; of the older ones those stay
    longest whose number is divisible by the largest power of two, so that the rest is spread over the whole run."""
    total, gone = sum(sizes.values()), []
    old, newest = sorted(sizes)[:-_NEWEST], sorted(sizes)[-_NEWEST:]
    for step in [*sorted(old, key=lambda step: (step & -step, step)), *newest]:
        if total <= limit:
            break
        total -= sizes[step]
        gone.append(step)
    return gone


class StepFiles:
    """Writes the step files of a run and removes old ones."""

    def __init__(self, directory: Path, limit_bytes: int, *, after: int = 0) -> None:
        """`after`: the last step of the checkpoint that the run resumes from; files of later steps are removed."""
        self._directory, self._limit = directory, limit_bytes
        self._sizes = steps_kept(directory)
        self._remove([step for step in self._sizes if step > after])

    def write(self, step: int, content: bytes) -> None:
        path = step_file(self._directory, step)
        self._sizes[step] = len(content)
        self._remove(superfluous(self._sizes, self._limit))
        if step not in self._sizes:  # larger than the limit alone
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".part")
        aside.write_bytes(content)
        os.replace(aside, path)

    def _remove(self, steps: Iterable[int]) -> None:
        for step in steps:
            step_file(self._directory, step).unlink(missing_ok=True)
            del self._sizes[step]
