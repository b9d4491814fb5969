"""Weights & Biases: a reader of a run's events that writes its curves there.

Needs `pip install 'tlt-rl[wandb]'`. Asked for and not installed, or not reachable at the start, is an error: somebody
is there to put it right. A resumed run goes on in the same W&B run, whose id is kept in the run's directory; every
number is drawn over `step`, so that a step computed again lands where it was.
"""

from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any

from tlt.config import RunConfig
from tlt.errors import ConfigError, TltError
from tlt.recipe import flat
from tlt.watch.events import Recorded, RunFailed
from tlt.watch.metrics import metrics_of

ID_FILE = "wandb_id"


class Wandb:
    """One W&B run for one run of ours, however often it is resumed."""

    name = "W&B"

    def __init__(self, config: RunConfig, directory: Path, resumed: bool) -> None:
        try:
            wandb: Any = import_module("wandb")
        except ImportError:
            raise ConfigError(
                f"watch.wandb is {config.watch.wandb!r}, but wandb is not installed; pip install 'tlt-rl[wandb]', "
                "or leave it empty"
            ) from None
        try:
            self._run: Any = wandb.init(
                project=config.watch.wandb,
                name=config.run.name,
                id=_id(directory / ID_FILE, config.run.name, resumed),
                resume="allow",
                config=flat(config),
                dir=str(directory),
            )
        except (wandb.Error, OSError) as error:
            raise TltError(
                f"W&B could not be reached: {error}; log in with `wandb login`, set WANDB_MODE=offline to send the run "
                "later, or leave watch.wandb empty"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._failed = False

    def show(self, record: Recorded) -> None:
        self._failed = self._failed or isinstance(record.event, RunFailed)
        if metrics := metrics_of(record.event):
            self._run.log({"step": metrics.step, **metrics.values})

    def close(self) -> None:
        self._run.finish(exit_code=1 if self._failed else 0)


def _id(kept: Path, name: str, resumed: bool) -> str:
    if resumed and kept.exists():
        return kept.read_text(encoding="utf-8").strip()
    fresh = f"{name}-{token_hex(4)}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(fresh + "\n", encoding="utf-8")
    return fresh
