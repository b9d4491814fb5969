"""Checkpoints of the drafter alone: its own tensors and its trainer's state, written in the background.

What always holds: none of the policy's tensors are saved; training waits for a copy to host memory only; a checkpoint
is complete or absent; a failed write raises at the next call of any method. Reading restores every bit. The directory
is a drafter's as `tlt` reads it (`spec.path`, `tlt draft export`), with the trainer's files beside it.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tlt.drafting.trainer import OnlineDrafter
from tlt.errors import CheckpointError
from tlt.spec.eagle_files import HEAD, Origin, flat_config, load_drafter, own_tensors, write_drafter
from tlt.train.checkpoint import Checkpoints, load_state, save_state
from tlt.train.host_copy import HostCopy
from tlt.train.restore import expect_keys, expect_tensors, reading

TRAINER = "trainer"  # name of the trainer's files
_STATE = ("version", "counts", "learner", "trainer", "cadence", "buffer", "arrived", "held")


def write_checkpoint(drafter: OnlineDrafter, origin: Origin, directory: Path, *, buffer: bool = False) -> None:
    """Writes the drafter and its trainer into a directory, at once."""
    write_contents(contents_of(drafter, origin, buffer), directory)


def read_checkpoint(drafter: OnlineDrafter, directory: Path) -> None:
    """Restores what `write_checkpoint` or a `DrafterSaver` wrote."""
    state, ours = load_state(directory, TRAINER), drafter.drafter
    saved = load_drafter(
        directory, drafter.policy.config, window=ours.config.window, dtype=ours.fc.dtype, device=ours.fc.device
    )
    for knob, what, found, wanted in (
        ("draft.mlp", "an MLP of {}", saved.config.layer.mlp, ours.config.layer.mlp),
        ("draft.vocab", "a vocabulary of {}", saved.config.draft_vocab, ours.config.draft_vocab),
        ("spec.path", "layers {} of the policy to read", saved.config.taps, ours.config.taps),
    ):
        if found != wanted:
            raise CheckpointError(
                f"the drafter in {directory} has {what.format(found)}, this run's has {wanted}; expected the same: "
                f"give {knob} as it was, or start anew"
            )
    owned = {**dict(saved.named_parameters()), **dict(saved.named_buffers())}
    with reading(directory / TRAINER):
        expect_keys(state, _STATE, "the drafter's state")
        expect_tensors(state["learner"], drafter.weights(), "the weights in training")
        drafter.restore({**state, "good": {name: owned[name] for name in drafter.weights()}})


class DrafterSaver:
    """Writes checkpoints `step_N` of the drafter in the background, one at a time."""

    def __init__(self, directory: Path | str, origin: Origin, *, keep: int = 2) -> None:
        self._checkpoints = Checkpoints(directory, keep)
        self._origin = origin
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter-checkpoint")
        self._pending: Future[Path] | None = None
        self._host = HostCopy()

    def save(self, step: int, drafter: OnlineDrafter, *, buffer: bool = False) -> None:
        """Copies to the host and returns. Waits for the last write, and raises if that failed."""
        self.wait()
        contents = self._host.take(contents_of(drafter, self._origin, buffer))
        self._pending = self._thread.submit(self._checkpoints.write, step, partial(write_contents, contents))

    def wait(self) -> Path | None:
        """Waits for the last write and returns its directory. Raises its error, once."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else None

    def close(self) -> None:
        """Waits for the last write and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def contents_of(drafter: OnlineDrafter, origin: Origin, buffer: bool) -> dict[str, Any]:
    """The contents of a checkpoint: live tensors and plain values."""
    model = drafter.drafter
    own_head = {} if model.own_head_vD is None else {HEAD: model.own_head_vD}
    state = drafter.state(buffer=buffer)
    return {
        "tensors": {**own_tensors(state.pop("good"), model.config), **own_head},
        "words": flat_config(model, origin, headless=model.own_head_vD is None),
        "state": state,
        "config": model.config,
    }


def write_contents(contents: Mapping[str, Any], directory: Path) -> None:
    tensors = {name: tensor.cpu().contiguous() for name, tensor in contents["tensors"].items()}
    write_drafter(tensors, contents["words"], contents["config"], directory)
    save_state(contents["state"], directory, TRAINER)
