"""The size that is told before the first checkpoint is that of the files it is then made of."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tlt
from tests.training import LEARNED, small
from tlt.checkpoint_size import checkpoint_bytes, checkpoints_planned
from tlt.model.weights import hf_tensors, load_policy
from tlt.policy import TINY_POLICY
from tlt.resume import STATE
from tlt.train.optimizer import MasterAdamW
from tlt.watch.console import notice
from tlt.watch.events import CheckpointSaved, CheckpointsPlanned
from tlt.watch.history import events_of

# every answer teaches something, whatever it was rewarded
HEADER = 10_000  # bytes of names in a file, at most
LORA = ["--train.lora_rank=4"]
LEARNS = ["--drafting.forced_share=1", "--run.steps=1", "--grpo.kl=0.1"]


def written(path: Path) -> tuple[int, int]:
    """Bytes of tensors: of the weights, and of the rest."""
    found = {file: file.stat().st_size for file in path.rglob("*.safetensors")}
    state = sum(size for file, size in found.items() if any(file.match(pattern) for pattern in STATE))
    return sum(found.values()) - state, state


@pytest.mark.parametrize(
    "flags",
    [
        LEARNED,
        [*LEARNED, "--draft.vocab=16", "--draft.mlp=0.5", "--model.dtype=float32"],
        LORA,
        [*LORA, "--checkpoint.merge"],
    ],
    ids=["drafter", "small drafter", "lora", "merged"],
)
def test_a_checkpoint_is_as_large_as_was_told(tmp_path: Path, flags: list[str]) -> None:
    run = tlt.train(small(tmp_path, *LEARNS, *flags))
    (told,) = events_of(run, CheckpointsPlanned)
    (saved,) = events_of(run, CheckpointSaved)
    kinds = [type(record.event) for record in run.events]
    assert kinds.index(CheckpointsPlanned) < kinds.index(CheckpointSaved)
    weights, state = written(Path(saved.path))
    assert told.weights_bytes == pytest.approx(weights, rel=0.01, abs=HEADER)
    assert told.optimizer_bytes == pytest.approx(state, rel=0.01, abs=HEADER)


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)


def test_half_precision_has_float32_copies(tmp_path: Path) -> None:
    """No run in bfloat16 here, whose matrix products not every CPU has: the very weights and their optimizer."""
    model = load_policy(TINY_POLICY, dtype=torch.bfloat16)
    adam = MasterAdamW(model, weight_decay=0.0)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    adam.gather()
    adam.update(1e-3, 1.0)
    parts = (hf_tensors(model), adam.state())
    weights, state = (sum(tensor.nbytes for tensor in tensors_of(part)) for part in parts)
    told = checkpoint_bytes(small(tmp_path, "--model.dtype=bfloat16"))
    assert told == (weights, pytest.approx(state, rel=1e-4))  # but for Adam's counts of steps
    assert sum(told) == 14 * sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("flags", "weights", "states"),
    [
        ((), 3, 3),  # two kept and one that is written
        (("--checkpoint.keep=5", "--checkpoint.keep_optimizer=2"), 6, 3),
        (("--checkpoint.every=0",), 1, 1),  # only one is ever written
        (("--checkpoint.every=30",), 2, 2),
    ],
)
def test_all_that_is_there_at_a_time(tmp_path: Path, flags: tuple[str, ...], weights: int, states: int) -> None:
    planned = checkpoints_planned(small(tmp_path, "--run.steps=60", *flags), tmp_path / "checkpoints")
    assert planned.most_bytes == weights * planned.weights_bytes + states * planned.optimizer_bytes


def test_what_is_free_is_said_and_whether_it_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoints" / "step_1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_1" / "weights").write_bytes(bytes(10**6))
    disk = shutil.disk_usage(tmp_path)._replace(free=5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    planned = checkpoints_planned(small(tmp_path), tmp_path / "checkpoints")
    assert planned.free_bytes == 5 + 10**6  # what is there makes room for what comes
    planned = replace(planned, weights_bytes=10**9, optimizer_bytes=65 * 10**8, most_bytes=225 * 10**8)
    text, style = notice(replace(planned, free_bytes=80 * 10**9)) or ("", "")
    assert text == (
        "a checkpoint takes 7.5 GB, and 7.5 GB of host memory: weights 1.0 GB, optimizer 6.5 GB; 2 kept: up to 22.5 GB "
        "while one is written, 80.0 GB free"
    )
    assert style == "dim"
    text, style = notice(replace(planned, keep=4, free_bytes=10**9)) or ("", "")
    assert "4 kept, 2 of them with the optimizer: up to 22.5 GB" in text
    assert text.endswith("too little for " + planned.path + "; lower checkpoint.keep or checkpoint.keep_optimizer")
    assert style == "bold yellow"
