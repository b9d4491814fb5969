"""Checkpoints of the drafter: bit-equal, in the background, without the policy, and never a silent failure."""

import errno
import json
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_drafting_trainer import DRAFT, DRAFTING, after, answers, eagle

from tlt.drafting import saving
from tlt.drafting.saving import DrafterSaver, read_checkpoint, write_checkpoint
from tlt.drafting.trainer import OnlineDrafter
from tlt.errors import CheckpointError
from tlt.model.transformer import Transformer
from tlt.model.weights import read_tensors
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.eagle_files import HEAD, Origin, load_drafter
from tlt.spec.record import DraftRecord, read_record, write_record
from tlt.train.checkpoint import load_state, save_state

ORIGIN = Origin("somewhere", ("LlamaForCausalLM",))


@pytest.fixture(scope="module")
def policy() -> Transformer:
    return tiny.policy(torch.float32)


def trained(policy: Transformer, draft_vocab: int = 0) -> OnlineDrafter:
    drafter = OnlineDrafter(policy, eagle(policy, draft_vocab), DRAFT, DRAFTING, cold=True)
    drafter.learn_from(answers(policy), 0)
    drafter.train(after(6))
    return drafter


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[DrafterSaver]:
    made = DrafterSaver(tmp_path / "drafter", ORIGIN)
    yield made
    made.close()


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


def test_a_drafter_of_another_width_is_refused(policy: Transformer, saver: DrafterSaver) -> None:
    saver.save(1, trained(policy, 0))
    path = saver.wait()
    assert path is not None
    narrow = Eagle(EagleConfig.of_policy(policy.config, window=16, mlp=0.5), dtype=policy.embed.dtype)
    narrow.init_weights(0)
    with pytest.raises(CheckpointError, match=r"an MLP of 48, this run's has 32; expected the same: give draft.mlp"):
        read_checkpoint(OnlineDrafter(policy, narrow, DRAFT, DRAFTING), path)


def test_a_drafter_with_another_vocabulary_is_refused(policy: Transformer, tmp_path: Path) -> None:
    write_checkpoint(trained(policy, 12), ORIGIN, tmp_path)
    with pytest.raises(CheckpointError, match=r"a vocabulary of 12, this run's has \d+; .* give draft.vocab as it was"):
        read_checkpoint(OnlineDrafter(policy, eagle(policy), DRAFT, DRAFTING), tmp_path)


def test_a_drafter_that_reads_other_layers_is_refused(policy: Transformer, tmp_path: Path) -> None:
    write_checkpoint(trained(policy), ORIGIN, tmp_path)
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
    write_checkpoint(trained(policy), ORIGIN, tmp_path, buffer=True)
    state = deepcopy(load_state(tmp_path, "trainer"))  # not mapped from the file
    change, told = STATES[damaged]
    change(state)
    save_state(state, tmp_path, "trainer")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/trainer does not fit this run: {told}"):
        read_checkpoint(OnlineDrafter(policy, eagle(policy), DRAFT, DRAFTING), tmp_path)


@pytest.mark.parametrize("draft_vocab", [0, 12])
def test_a_checkpoint_read_back_is_the_same_bit_by_bit_and_goes_on_the_same(
    policy: Transformer, saver: DrafterSaver, draft_vocab: int
) -> None:
    first = trained(policy, draft_vocab)
    saver.save(3, first, buffer=True)
    path = saver.wait()
    assert path is not None
    second = OnlineDrafter(policy, eagle(policy, draft_vocab), DRAFT, DRAFTING)
    read_checkpoint(second, path)
    assert_same(second, first)
    for drafter in (first, second):
        drafter.learn_from(answers(policy, start=100), 1)
        drafter.train(after(5))
    assert_same(second, first)


def test_only_what_the_drafter_owns_is_written(policy: Transformer, tmp_path: Path) -> None:
    drafter = trained(policy)
    write_checkpoint(drafter, ORIGIN, tmp_path)
    assert set(load_state(tmp_path, "trainer")) | {"good"} == set(drafter.state())
    weights = sum(tensor.nbytes for tensor in drafter.weights().values())
    written = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert written < 1.1 * 4 * weights + 30_000  # given out, learner, two moments; float32 is its own master
    words = json.loads((tmp_path / "config.json").read_text())
    assert words["tlt"]["headless"]
    assert HEAD not in dict(read_tensors(tmp_path))


def test_the_directory_is_a_drafter_that_tlt_opens(policy: Transformer, tmp_path: Path) -> None:
    drafter = trained(policy)
    write_checkpoint(drafter, ORIGIN, tmp_path)
    opened = load_drafter(tmp_path, policy.config, window=99)
    assert opened.config == drafter.drafter.config
    for mine, theirs in zip(opened.parameters(), drafter.drafter.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_was_measured_of_other_weights_goes(policy: Transformer, tmp_path: Path) -> None:
    write_record(DraftRecord(((0.5,),), 9, 1.0), tmp_path)
    write_checkpoint(trained(policy), ORIGIN, tmp_path)
    assert read_record(tmp_path) is None


def test_training_goes_on_while_a_checkpoint_is_written(
    policy: Transformer, saver: DrafterSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write is held up until training has changed everything; what is read back is what was saved."""
    go_on = threading.Event()

    def slowly(state: object, directory: Path, name: str) -> None:
        assert go_on.wait(300)
        save_state(state, directory, name)  # type: ignore[arg-type]

    monkeypatch.setattr(saving, "save_state", slowly)
    drafter = trained(policy)
    kept = {name: value.clone() for name, value in flat(drafter.state()).items() if isinstance(value, torch.Tensor)}
    saver.save(1, drafter, buffer=True)
    drafter.learn_from(answers(policy, start=100), 1)
    drafter.train(after(5))
    go_on.set()
    path = saver.wait()
    assert path is not None
    second = OnlineDrafter(policy, eagle(policy), DRAFT, DRAFTING)
    read_checkpoint(second, path)
    found = flat(second.state())
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", ["save", "wait", "close"])
def test_a_disk_that_is_full_is_heard_of_at_the_next_call_and_the_last_checkpoint_stays(
    policy: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    drafter = trained(policy)
    saver = DrafterSaver(tmp_path, ORIGIN)
    saver.save(1, drafter)
    saver.wait()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "save_state", full)
    saver.save(2, drafter)
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: saver.save(3, drafter),
        "wait": saver.wait,
        "close": saver.close,
    }
    with pytest.raises(CheckpointError, match=r"step_2 cannot be written: No space left.*step_1, is intact"):
        calls[asked]()
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_1"]
    if asked != "close":
        saver.save(4, drafter)  # said once, it goes on
        saver.close()
        assert (tmp_path / "step_4").is_dir()
    other = OnlineDrafter(policy, eagle(policy), DRAFT, replace(DRAFTING))
    read_checkpoint(other, tmp_path / "step_1")
    assert other.version == drafter.version
