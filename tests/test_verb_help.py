"""`tlt VERB --help`: a verb's own arguments, and the knobs that it reads with kind, range and default."""

import re

import pytest

from tlt.cli import VERBS, main
from tlt.recipe import knobs


def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setenv("COLUMNS", "300")  # one line for each
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--help"])
    assert stopped.value.code == 0
    return "\n".join(" ".join(line.split()) for line in capsys.readouterr().out.splitlines())


COMMANDS = [(verb,) for verb in VERBS] + [(name, subject) for name, verb in VERBS.items() for subject in verb.subjects]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_verb_shows_its_arguments_and_the_knobs_of_its_sections(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    told, verb = help_of(capsys, monkeypatch, *words), VERBS[words[0]]
    assert told.startswith(f"usage: tlt {' '.join(words)}")
    body = re.split("arguments:|options:", told, maxsplit=1)[-1].splitlines()
    subject = words[1] if len(words) > 1 else None
    for name, meaning, *subjects in verb.arguments:
        shown = not subject or (name != "what" and (not subjects or subject in " ".join(subjects).split()))
        begins = name if name.startswith("-") else name.upper()
        line = next((line for line in body if line.startswith(f"{begins} ")), "")
        assert line.endswith(meaning) == bool(line) == shown, name
    sections = verb.sections_of.get(subject or "", verb.sections)
    for knob in knobs():
        read = any(knob.key == section or knob.key.startswith(f"{section}.") for section in sections)
        assert (f"--{knob.key} " in told) == read, knob.key


def test_sections_name_knobs() -> None:
    keys = [knob.key for knob in knobs()]
    for verb in VERBS.values():
        for section in (*verb.sections, *(one for own in verb.sections_of.values() for one in own)):
            assert any(key == section or key.startswith(f"{section}.") for key in keys), section
        assert {word for _, _, *of in verb.arguments for word in " ".join(of).split()} <= set(verb.subjects)


def test_a_verb_that_takes_a_recipe_says_which_knobs_it_reads() -> None:
    for name, verb in VERBS.items():
        if {"recipe", "--recipe"} & {argument[0] for argument in verb.arguments}:
            assert verb.sections, name


@pytest.mark.parametrize(
    "line",
    [
        "--train.learning_rate X ",
        "--run.steps N steps of reinforcement learning (at least 1); default 100",
        "--grpo.loss {token,sequence,constant,sum}",
        "--engine.graphs {true,false}",
        "--spec.depths N,N,… draft tokens per branch (at least one number, each ≥ 1); default 1,2,3,7,15",
        "--model.path TEXT ",
        '--watch.wandb TEXT Weights & Biases project to write to; "" writes to none; default ""',
    ],
)
def test_a_knob_is_told_with_kind_range_and_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    assert line in help_of(capsys, monkeypatch, "train")


def test_subjects_are_listed_until_one_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = help_of(capsys, monkeypatch, "draft")
    assert "tlt draft measure: measure a drafter" in told
    assert "train, measure: a file with" in told
    assert "tlt draft measure:" not in help_of(capsys, monkeypatch, "draft", "train")
    assert "usage: tlt draft [" in help_of(capsys, monkeypatch, "draft", "trian")
