"""The drafter's part of a checkpoint: bit-equal, without the policy, and never a silent failure."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_drafting_trainer import DRAFT, DRAFTING, after, answers, eagle

from tlt.drafting.saving import contents_of, read_checkpoint, write_contents
from tlt.drafting.trainer import OnlineDrafter
from tlt.errors import CheckpointError
from tlt.model.transformer import Transformer
from tlt.model.weights import read_tensors
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.eagle_files import HEAD, Origin, load_drafter
from tlt.spec.record import DraftRecord, read_record, write_record
from tlt.train.checkpoint import load_state, save_state
from tlt.train.host_copy import HostCopy

ORIGIN = Origin("somewhere", ("LlamaForCausalLM",))


@pytest.fixture(scope="module")
def policy() -> Transformer:
    return tiny.policy(torch.float32)


def trained(policy: Transformer, draft_vocab: int = 0) -> OnlineDrafter:
    drafter = OnlineDrafter(policy, eagle(policy, draft_vocab), DRAFT, DRAFTING, cold=True)
    drafter.learn_from(answers(policy), 0)
    drafter.train(after(6))
    return drafter


def write_checkpoint(drafter: OnlineDrafter, directory: Path, *, buffer: bool = False) -> None:
    write_contents(contents_of(drafter, ORIGIN, buffer), directory)


def flat(value: object, name: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in flat(part, f"{name}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for key, part in enumerate(value) for k, v in flat(part, f"{name}.{key}").items()}
    return {name: value}


def assert_same(found: OnlineDrafter, wanted: OnlineDrafter) -> None:
    mine, theirs = flat(found.state()), flat(wanted.state())
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value) if isinstance(value, torch.Tensor) else mine[name] == value, name


def test_a_drafter_of_another_width_is_refused(policy: Transformer, tmp_path: Path) -> None:
    write_checkpoint(trained(policy, 0), tmp_path)
    narrow = Eagle(EagleConfig.of_policy(policy.config, window=16, mlp=0.5), dtype=policy.embed.dtype)
    narrow.init_weights(0)
    with pytest.raises(CheckpointError, match=r"an MLP of 48, this run's has 32; expected the same: give draft.mlp"):
        read_checkpoint(OnlineDrafter(policy, narrow, DRAFT, DRAFTING), tmp_path)


def test_a_drafter_with_another_vocabulary_is_refused(policy: Transformer, tmp_path: Path) -> None:
    write_checkpoint(trained(policy, 12), tmp_path)
    with pytest.raises(CheckpointError, match=r"a vocabulary of 12, this run's has \d+; .* give draft.vocab as it was"):
        read_checkpoint(OnlineDrafter(policy, eagle(policy), DRAFT, DRAFTING), tmp_path)


def test_a_drafter_of_another_architecture_is_refused(policy: Transformer, tmp_path: Path) -> None:
    write_checkpoint(trained(policy), tmp_path)
    other = Eagle(EagleConfig.of_policy(policy.config, window=16, architecture="eagle-3.1"), dtype=policy.embed.dtype)
    other.init_weights(0)
    with pytest.raises(CheckpointError, match=r"architecture eagle-3, .* give draft.architecture as it was"):
        read_checkpoint(OnlineDrafter(policy, other, DRAFT, DRAFTING), tmp_path)


def test_a_drafter_that_reads_other_layers_is_refused(policy: Transformer, tmp_path: Path) -> None:
    write_checkpoint(trained(policy), tmp_path)
    other = Eagle(replace(eagle(policy).config, taps=(0, 0, 1)), dtype=policy.embed.dtype)
    other.init_weights(0)
    with pytest.raises(CheckpointError, match=r"this run's has \(0, 0, 1\); .* give spec.path as it was"):
        read_checkpoint(OnlineDrafter(policy, other, DRAFT, DRAFTING), tmp_path)


STATES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no version": (lambda s: s.pop("version"), "the drafter's state: version is missing"),
    "shape": (
        lambda s: s["learner"].update(fc=torch.ones(2)),
        r"the weights in training: fc is float32 \[2\], expected float32",
    ),
    "trainer": (lambda s: s["trainer"].pop("steps"), "the drafter's trainer: steps is missing, found optimizer"),
    "cadence": (lambda s: s["cadence"].update(mood=1), "the drafter's cadence has .*mood; expected cold"),
    "buffer": (lambda s: s["buffer"].pop("serials"), "the drafter's answers: serials is missing"),
}


@pytest.mark.parametrize("damaged", STATES)
def test_a_trainer_that_does_not_fit_is_named(policy: Transformer, tmp_path: Path, damaged: str) -> None:
    write_checkpoint(trained(policy), tmp_path, buffer=True)
    state = deepcopy(load_state(tmp_path, "trainer"))  # not mapped from the file
    change, told = STATES[damaged]
    change(state)
    save_state(state, tmp_path, "trainer")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/trainer does not fit this run: {told}"):
        read_checkpoint(OnlineDrafter(policy, eagle(policy), DRAFT, DRAFTING), tmp_path)


@pytest.mark.parametrize("draft_vocab", [0, 12])
def test_a_checkpoint_read_back_is_the_same_bit_by_bit_and_goes_on_the_same(
    policy: Transformer, tmp_path: Path, draft_vocab: int
) -> None:
    first = trained(policy, draft_vocab)
    write_checkpoint(first, tmp_path, buffer=True)
    second = OnlineDrafter(policy, eagle(policy, draft_vocab), DRAFT, DRAFTING)
    read_checkpoint(second, tmp_path)
    assert_same(second, first)
    for drafter in (first, second):
        drafter.learn_from(answers(policy, start=100), 1)
        drafter.train(after(5))
    assert_same(second, first)


def test_only_what_the_drafter_owns_is_written(policy: Transformer, tmp_path: Path) -> None:
    drafter = trained(policy)
    write_checkpoint(drafter, tmp_path)
    assert set(load_state(tmp_path, "trainer")) | {"good"} == set(drafter.state())
    weights = sum(tensor.nbytes for tensor in drafter.weights().values())
    written = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert written < 1.1 * 4 * weights + 30_000  # given out, learner, two moments; float32 is its own master
    words = json.loads((tmp_path / "config.json").read_text())
    assert words["tlt"]["headless"]
    assert HEAD not in dict(read_tensors(tmp_path))


def test_the_directory_is_a_drafter_that_tlt_opens(policy: Transformer, tmp_path: Path) -> None:
    drafter = trained(policy)
    write_checkpoint(drafter, tmp_path)
    opened = load_drafter(tmp_path, policy.config, window=99)
    assert opened.config == drafter.drafter.config
    for mine, theirs in zip(opened.parameters(), drafter.drafter.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_was_measured_of_other_weights_goes(policy: Transformer, tmp_path: Path) -> None:
    write_record(DraftRecord(((0.5,),), 9, 1.0), tmp_path)
    write_checkpoint(trained(policy), tmp_path)
    assert read_record(tmp_path) is None


def test_training_goes_on_after_a_copy_and_the_copy_is_written(policy: Transformer, tmp_path: Path) -> None:
    """Training changes everything before the copy is written; what is read back is what was copied."""
    drafter = trained(policy)
    kept = {name: value.clone() for name, value in flat(drafter.state()).items() if isinstance(value, torch.Tensor)}
    copied = HostCopy().begin(contents_of(drafter, ORIGIN, True)).result()
    drafter.learn_from(answers(policy, start=100), 1)
    drafter.train(after(5))
    write_contents(copied, tmp_path)
    second = OnlineDrafter(policy, eagle(policy), DRAFT, DRAFTING)
    read_checkpoint(second, tmp_path)
    found = flat(second.state())
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())  # type: ignore[arg-type]
    changed = flat(drafter.state())
    assert not all(torch.equal(changed[name], tensor) for name, tensor in kept.items() if name in changed)  # type: ignore[arg-type]
