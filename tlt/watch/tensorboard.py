"""TensorBoard files of a run: a reader of its events that writes curves and the lengths of the answers.

Needs `pip install 'tlt-rl[watch]'`. Asked for and not installed is an error at the start of the run.
"""

from pathlib import Path
from typing import Any

from tlt.errors import ConfigError
from tlt.watch.events import Recorded, RolloutFinished, RunResumed
from tlt.watch.metrics import metrics_of


class TensorBoard:
    """Writes into one directory. A resumed run takes back the steps that it computes again."""

    name = "TensorBoard"

    def __init__(self, directory: Path) -> None:
        try:
            from torch import tensor
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "watch.tensorboard is true, but TensorBoard is not installed; pip install 'tlt-rl[watch]', "
                "or set it false"
            ) from None
        self._open: Any = SummaryWriter
        self._as_array: Any = tensor
        self._directory = str(directory)
        self._writer: Any = None

    def show(self, record: Recorded) -> None:
        event = record.event
        if isinstance(event, RunResumed):
            self.close()
            self._writer = self._open(self._directory, purge_step=event.step + 1)
        if isinstance(event, RolloutFinished) and event.lengths:
            lengths = self._as_array(event.lengths)
            self._written().add_histogram("length/all", lengths, event.step, walltime=record.time)
        if metrics := metrics_of(event):
            for name, value in metrics.values.items():
                self._written().add_scalar(name, value, metrics.step, walltime=record.time)
            self._written().flush()  # a run may be killed at any moment

    def _written(self) -> Any:
        if self._writer is None:
            self._writer = self._open(self._directory, purge_step=0)  # what an earlier run of that name left
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
