"""The drafter's part of a checkpoint: its own tensors and its trainer's state.

What always holds: none of the policy's tensors are saved. Reading restores every bit. The directory is a drafter's as
`tlt` reads it (`spec.path`, `tlt draft export`), with the trainer's files beside it. Does not know when checkpoints are
written, nor threads.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt.drafting.trainer import OnlineDrafter
from tlt.errors import CheckpointError
from tlt.spec.eagle_files import HEAD, Origin, flat_config, load_drafter, own_tensors, write_drafter
from tlt.train.checkpoint import load_state, save_state
from tlt.train.restore import expect_keys, expect_tensors, reading

TRAINER = "trainer"  # name of the trainer's files
_STATE = ("version", "counts", "learner", "trainer", "cadence", "buffer", "arrived", "held")


def read_checkpoint(drafter: OnlineDrafter, directory: Path) -> None:
    """Restores what `write_contents` wrote."""
    state, ours = load_state(directory, TRAINER), drafter.drafter
    saved = load_drafter(
        directory, drafter.policy.config, window=ours.config.window, dtype=ours.fc.dtype, device=ours.fc.device
    )
    for knob, what, found, wanted in (
        ("draft.mlp", "an MLP of {}", saved.config.layer.mlp, ours.config.layer.mlp),
        ("draft.architecture", "norms of the architecture {}", saved.config.architecture, ours.config.architecture),
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
