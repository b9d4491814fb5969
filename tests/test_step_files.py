"""Step files: tokens, log-probabilities, entropies and draft marks of a real run, within bounds, removed in turn."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tlt
from tests.test_policy import experiences
from tests.test_telling import eager
from tests.tiny import policy
from tests.training import LEARNED, small
from tlt.config import GrpoSettings, TrainSettings
from tlt.loop import Loop, Step
from tlt.model.attention import PackedLayout
from tlt.policy import source_of
from tlt.text import TextStream, Tokenizer, TokenTexts
from tlt.train.policy import PolicyTrainer
from tlt.types import Rollout
from tlt.watch.events import AccountUpdated, ReaderFailed
from tlt.watch.history import events_of, steps_of
from tlt.watch.step_files import StepFiles, sampled_groups, step_file, steps_kept, superfluous

SPECULATING = [*LEARNED, "--spec.depths=2", "--spec.widths=1", "--spec.verifies=4"]


def read(directory: Path, step: int) -> Any:
    return json.loads(step_file(directory, step).read_text(encoding="utf-8"))


def by_the_first_policy(step: Callable[[Loop, int], Step]) -> Callable[[Loop, int], Step]:
    """Steps whose completions say that policy version 0 wrote them."""

    def old(one: Rollout) -> Rollout:
        return replace(one, completion=replace(one.completion, policy_version=0))

    def taken(loop: Loop, number: int) -> Step:
        done = step(loop, number)
        groups = [replace(one.group, rollouts=tuple(map(old, one.group.rollouts))) for one in done.judged]
        return replace(
            done, judged=tuple(replace(one, group=group) for one, group in zip(done.judged, groups, strict=True))
        )

    return taken


def test_a_run_keeps_some_completions_token_by_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.fleet.shape_policy_of", eager)
    monkeypatch.setattr("tlt.loop.Loop.step", by_the_first_policy(Loop.step))
    run = tlt.train(small(tmp_path, *SPECULATING, "--run.steps=2", "--watch.groups=2"))
    directory = Path(run.config.run.out) / run.config.run.name
    assert list(steps_kept(directory)) == [1, 2]
    found = read(directory, 2)
    group, prompts = run.config.task.group, run.config.task.prompts
    assert len(found["groups"]) == found["groups_in_all"] == prompts
    assert len(found["completions"]) == min(2, prompts) * group
    drafted = 0
    for one in found["completions"]:
        told = found["groups"][one["group"]]
        assert one["reward"] == told["rewards"][one["index"]]
        assert one["tokens"] == told["lengths"][one["index"]] == len(one["texts"]) == len(one["logprobs"])
        assert len(one["drafted"]) == one["tokens"]
        assert all(value <= 0 for value in one["logprobs"])
        learned = len(set(told["rewards"])) > 1  # others have no advantage, and the update leaves them out
        assert (one["entropy"] is not None) == learned
        if learned:
            assert len(one["entropy"]) == one["tokens"]
            assert all(value >= 0 for value in one["entropy"])
        drafted += one["drafted"].count("1")
    assert 0 < drafted < sum(one["tokens"] for one in found["completions"])
    assert len(found["requests"]) == found["requests_in_all"] == prompts * group
    assert all(0 <= submitted <= first <= finished for *_, submitted, first, finished in found["requests"])
    (worker, spans), *others = found["shapes"]
    assert (worker, others) == (0, [])
    assert {shape for _, _, shape in spans} == {"off", "eagle+suffix 2x1/4"}
    assert {shape for _, _, shape, *_ in found["costs"]} == {"off", "eagle+suffix 2x1/4"}
    assert found["memory"][0][1] > 2**20
    assert {one["version"] for one in found["completions"]} == {0}
    assert [one.staleness for one in steps_of(run)] == [0.0, 1.0]
    last = steps_of(run)[-1]
    assert last.host_bytes == found["memory"][0][1]
    assert last.entropy > 0
    account = events_of(run, AccountUpdated)[-1]
    assert account.step == 2
    assert set(account.spent_s) == {
        "training",
        "measuring",
        "swapping",
        "captures",
        "catching up",
        "states",
        "writing ahead",
    }


def test_accepted_drafts_are_marked_and_all_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups kept: marks and accept length are two ways to count the same tokens."""
    monkeypatch.setattr("tlt.fleet.shape_policy_of", eager)
    run = tlt.train(small(tmp_path, *SPECULATING, "--run.steps=1", "--watch.groups=99", "--drafting.frozen=true"))
    (step,) = steps_of(run)
    found = read(Path(run.config.run.out) / run.config.run.name, 1)
    marked = sum(one["drafted"].count("1") for one in found["completions"])
    accepted = round((step.accept_length - 1) * step.verifies)
    cut = run.config.task.prompts * run.config.task.group * 2  # an answer may end within an accepted branch
    assert accepted - cut <= marked <= accepted
    assert marked > 0


def test_no_step_files_where_none_are_wanted(tmp_path: Path) -> None:
    run = tlt.train(small(tmp_path, "--run.steps=1", "--watch.groups=0"))
    assert not (Path(run.config.run.out) / run.config.run.name / "steps").exists()


def test_a_run_goes_on_where_they_cannot_be_written(tmp_path: Path) -> None:
    config = small(tmp_path, "--run.steps=2")
    directory = Path(config.run.out) / config.run.name
    directory.mkdir(parents=True)
    (directory / "steps").write_text("in the way")
    run = tlt.train(config)
    (failed,) = events_of(run, ReaderFailed)
    assert failed.reader == "steps/"
    assert [step.step for step in steps_of(run)] == [1, 2]


def test_a_file_is_no_larger_than_its_limit(tmp_path: Path) -> None:
    flags = ["--run.steps=1", "--watch.groups=99", "--watch.step_kib=16", "--task.prompts=16", "--task.group=8"]
    run = tlt.train(small(tmp_path, *flags))
    directory = Path(run.config.run.out) / run.config.run.name
    assert steps_kept(directory)[1] <= 16 * 1024
    found = read(directory, 1)
    cut = [one for one in found["completions"] if one["tokens"] > len(one["texts"])]
    assert cut, "the test must leave something out to mean anything"
    assert all(one["head"] == len(one["texts"]) // 2 for one in cut)


def test_entropies_are_the_policys() -> None:
    """Each token's, against the definition, and only of those that were asked for; of two epochs, the first."""
    model = policy(torch.float64)
    given = [replace(one, sampled=index in (1, 3)) for index, one in enumerate(experiences(model))]
    expected = {}
    for one in (given[1], given[3]):
        completion = one.rollout.completion
        tokens = torch.tensor(completion.prompt_tokens + completion.tokens)
        with torch.no_grad():
            logits = model.logits(model(tokens, PackedLayout.from_lengths([len(tokens)])).hidden_TD)
        log_p = torch.log_softmax(logits[len(completion.prompt_tokens) - 1 : -1], dim=-1)
        expected[completion.key] = pytest.approx((-(log_p.exp() * log_p).sum(-1)).tolist(), abs=1e-6)
    train = TrainSettings(learning_rate=1e-3, epochs=2, row_tokens=16)
    told = dict(PolicyTrainer(model, train, GrpoSettings(mismatch_limit=0)).update(given).entropies)
    assert told == expected


# ---- which are kept


def test_groups_take_turns() -> None:
    """All but the one that the step waited for: it is always kept."""
    longest = [5, 5, 90, 5, 5, 5, 5, 5]
    kept = [sampled_groups(step, longest, 2) for step in range(8)]
    assert all(len(one) == 2 and 2 in one for one in kept)
    assert set().union(*kept) == set(range(8))
    assert sampled_groups(5, [1, 1, 1], 99) == {0, 1, 2}
    assert sampled_groups(5, [1], 3) == {0}
    assert sampled_groups(5, [1, 2, 3], 0) == frozenset()


def test_older_steps_are_kept_more_and_more_sparsely() -> None:
    sizes = dict.fromkeys(range(1, 201), 10)
    gone = superfluous(sizes, 500)
    left = sorted(set(sizes) - set(gone))
    assert len(left) == 50
    assert left[-8:] == list(range(193, 201))
    assert max(b - a for a, b in pairwise(left)) <= 8
    assert superfluous(sizes, 2000) == []
    assert superfluous(dict.fromkeys(range(1, 11), 10), 35) == [1, 2, 3, 4, 5, 6, 7], "of the newest, the last ones"


def test_files_stay_within_their_limit_and_a_resumed_run_begins_where_it_was(tmp_path: Path) -> None:
    files = StepFiles(tmp_path, 1000)
    for step in range(1, 41):
        files.write(step, b"x" * 50)
    assert sum(steps_kept(tmp_path).values()) <= 1000
    assert step_file(tmp_path, 40).read_bytes() == b"x" * 50
    StepFiles(tmp_path, 1000, after=38)
    assert max(steps_kept(tmp_path)) == 38
    assert not list((tmp_path / "steps").glob("*.part"))
    files = StepFiles(tmp_path, 1000, after=38)
    for step, size in ((39, 700), (40, 400), (41, 1001)):
        files.write(step, b"x" * size)
        assert sum(steps_kept(tmp_path).values()) <= 1000, "however large the newest are"


# ---- text of tokens


def test_texts_of_tokens_are_the_text() -> None:
    tokenizer = Tokenizer.load(source_of(tlt.load_config().model))
    tokens = tokenizer.encode_text("1 + 2 = 3\n(4*5)")
    texts = TokenTexts(tokenizer)
    assert "".join(texts.of(tokens)) == tokenizer.decode(tokens)
    assert len(texts.of(tokens)) == len(tokens)


class Bytes:
    """A tokenizer of bytes: a character may need several tokens."""

    eos_ids = frozenset[int]()

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Any) -> str:
        return bytes(tokens).decode("utf-8", "replace")


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    tokenizer: Any = Bytes()
    tokens = tokenizer.encode_text("aé∑<b>")
    assert TokenTexts(tokenizer).of(tokens) == ["a", "", "é", "", "", "∑", "<", "b", ">"]
    assert TokenTexts(tokenizer).of([0xE2, 0x88]) == ["", "�"]
    assert "".join(TokenTexts(tokenizer).of(tokens)) == TextStream(tokenizer).feed(tokens)
