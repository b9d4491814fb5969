"""trackio: a reader of a run's events that writes its curves there.

Needs `pip install 'tlt-rl[trackio]'`. Asked for and not installed is an error at the start of the run. A resumed run
goes on in the trackio run of its name; a step computed again is logged again.
"""

from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any

from tlt.config import RunConfig
from tlt.errors import ConfigError, TltError
from tlt.recipe import flat
from tlt.watch.events import Recorded
from tlt.watch.metrics import metrics_of


class Trackio:
    """One trackio run for one run of ours. Where it is kept, trackio's own environment variables say."""

    name = "trackio"

    def __init__(self, config: RunConfig, resumed: bool) -> None:
        project = config.watch.trackio
        try:
            trackio: Any = import_module("trackio")
        except ImportError:
            raise ConfigError(
                f"watch.trackio is {project!r}, but trackio is not installed; pip install 'tlt-rl[trackio]', or leave "
                "it empty"
            ) from None
        try:
            with redirect_stdout(StringIO()):  # where it is and how to show it, in several lines
                self._run: Any = trackio.init(
                    project=project,
                    name=config.run.name,
                    config=flat(config),
                    resume="allow" if resumed else "never",
                    embed=False,
                )
        except (OSError, ValueError) as error:
            raise TltError(f"trackio could not be opened: {error}; leave watch.trackio empty to go without") from error

    def show(self, record: Recorded) -> None:
        if metrics := metrics_of(record.event):
            self._run.log(metrics=metrics.values, step=metrics.step)

    def close(self) -> None:
        self._run.finish()
