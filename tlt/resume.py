"""Chooses the checkpoint from which a run resumes.

Always holds: a run resumes from a checkpoint only if all its files match their checksums. A damaged checkpoint is
skipped in favour of the newest older undamaged one, which is an event. A named checkpoint is never replaced by another.
"""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tlt import __version__
from tlt.config import RunConfig
from tlt.drafting.saving import TRAINER
from tlt.errors import CheckpointError, ConfigError, shown
from tlt.fleet import ADAPTER, DRAFTER
from tlt.recipe import flat, load_config, to_toml
from tlt.strict_json import read_object
from tlt.train.checkpoint import Checkpoints
from tlt.train.checksums import SUMS
from tlt.train.policy_files import OPTIMIZER, POLICY
from tlt.watch.directory import CHECKPOINTS, TRAIN, directory_of
from tlt.watch.events import CONFIG_FILE, CheckpointDamaged, RunResumed

_RECORD = "run.json"  # in a checkpoint: format, number of steps, version of tlt
_FORMAT = 2
STATE = (f"{OPTIMIZER}/*", f"{DRAFTER}/{TRAINER}.*")  # files that only a resumed run needs
_MOST_SHOWN = 3  # problems listed per checkpoint


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint from which a run resumes."""

    step: int  # steps taken
    path: Path
    passed_over: tuple[CheckpointDamaged, ...] = ()  # newer, damaged checkpoints, newest first


def checkpoints_of(config: RunConfig) -> Checkpoints:
    directory = directory_of(config, TRAIN) / CHECKPOINTS
    kept = config.checkpoint
    return Checkpoints(directory, kept.keep, keep_state=kept.keep_optimizer, state=STATE)


def starting_point(checkpoints: Checkpoints, resume_from: str = "") -> ResumePoint | None:
    """The checkpoint to resume from. None if there is none. `resume_from` names one, as in `step_20`."""
    if resume_from:
        return _named(checkpoints, resume_from)
    return _newest_whole(checkpoints) if checkpoints.steps() else None


def _named(checkpoints: Checkpoints, name: str) -> ResumePoint:
    steps = {checkpoints.path(step).name: step for step in checkpoints.steps()}
    if name not in steps:
        there = ", ".join(steps) or "none"
        raise ConfigError(f"--resume-from is {name!r}; expected a checkpoint in {checkpoints.directory}: {there}")
    step = steps[name]
    problems = checkpoints.problems(step)
    if problems:
        others = ", ".join(other for other in steps if other != name)
        cure = f"name another with --resume-from ({others})" if others else _weights_of(checkpoints, {step: problems})
        raise CheckpointError(f"{checkpoints.path(step)} cannot be resumed from: {_in_words(problems)}; {cure}")
    return _start(checkpoints, step)


def _newest_whole(checkpoints: Checkpoints) -> ResumePoint:
    found: dict[int, dict[str, str]] = {}
    for step in reversed(checkpoints.steps()):
        problems = checkpoints.problems(step)
        if not problems:
            return _start(checkpoints, step, found)
        found[step] = problems
    each = "; ".join(f"{checkpoints.path(step).name}: {_in_words(problems)}" for step, problems in found.items())
    raise CheckpointError(
        f"no checkpoint in {checkpoints.directory} can be resumed from: {each}. Restore one from a copy, "
        f"{_weights_of(checkpoints, found)}, or remove {checkpoints.directory} to begin anew"
    )


def _start(checkpoints: Checkpoints, step: int, damaged: dict[int, dict[str, str]] | None = None) -> ResumePoint:
    path = checkpoints.path(step)
    record = read_object(
        path / _RECORD, CheckpointError, f"{path} is no checkpoint of a run: remove it and resume again"
    )
    if record.get("format") != _FORMAT:
        raise CheckpointError(f"{path} has format {shown(record.get('format'))}; this version of tlt reads {_FORMAT}")
    passed_over = (
        CheckpointDamaged(str(checkpoints.path(later)), _in_words(problems))
        for later, problems in (damaged or {}).items()
    )
    return ResumePoint(step, path, tuple(passed_over))


def _in_words(problems: dict[str, str]) -> str:
    more = len(problems) - _MOST_SHOWN
    return ", ".join(list(problems.values())[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _weights_of(checkpoints: Checkpoints, found: dict[int, dict[str, str]]) -> str:
    """A remedy for the error message: the policy of a checkpoint may be undamaged while its optimizer is not."""
    for step, name in product(found, (POLICY, ADAPTER)):
        path, problems = checkpoints.path(step) / name, found[step]
        if path.is_dir() and SUMS not in problems and not any(file.startswith(f"{name}/") for file in problems):
            return f"start a new run from weights that are whole with --model.path {path} --run.name NEW"
    return "start a new run with another run.name"


def write_record(config: RunConfig, taken: int, directory: Path) -> None:
    """Writes the configuration and the record of a checkpoint."""
    (directory / CONFIG_FILE).write_text(to_toml(config), encoding="utf-8")
    record = {"format": _FORMAT, "steps": taken, "tlt": __version__}
    (directory / _RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")


def resumed(config: RunConfig, start: ResumePoint | None) -> RunResumed:
    """The RunResumed event, with the settings that differ from the checkpoint's."""
    if start is None:
        return RunResumed(0, "")
    now = flat(config)
    try:
        before = flat(load_config(start.path / CONFIG_FILE))
    except ConfigError:  # written by another version, with other settings
        before = now
    changed = [f"{key} {before[key]!r} → {now[key]!r}" for key in now if before[key] != now[key]]
    return RunResumed(start.step, str(start.path), tuple(changed))
