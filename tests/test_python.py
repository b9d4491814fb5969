"""tlt from Python: what the page shows runs, calls work as one would guess, and what is printed is a line."""

import json
import re
import shutil
import sys
import weakref
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import tlt
from tests.training import SMALL
from tlt.errors import ConfigError, ModelError, RequestError, TaskError, TltError
from tlt.fleet import LocalFleet
from tlt.library import fleet_of
from tlt.loop import Emit
from tlt.policy import TINY_POLICY
from tlt.text import Tokenizer
from tlt.types import Experience, Group, Key, Message, Prompt, Timing
from tlt.watch.events import Recorded, Run, RunStarted, StepFinished

PAGE = (Path(tlt.__file__).parents[1] / "docs" / "python.md").read_text("utf-8")
PRECISE = {"dtype": "float64", "device": "cpu", "kv_gib": 0.05}
SUMS = ["1+2=", "(3+4)*2-5=", "9-1="]


# ---- the page


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_programs_of_the_page_run_and_print_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (recipe,) = blocks("toml")
    Path(recipe.splitlines()[0].removeprefix("# ")).write_text(recipe, encoding="utf-8")
    programs = blocks("python")
    assert len(programs) == 5
    for program in programs:
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(program, "docs/python.md", "exec"), {"__name__": "page"})
        expected = re.findall(r"^ *print\(.*\)  # (.*)$", program, flags=re.MULTILINE)
        assert expected
        assert [line for line in expected if line not in printed.getvalue().splitlines()] == []


def test_the_page_lists_the_public_names() -> None:
    named = re.findall(r"^\| `(\w+)[`(]", PAGE, flags=re.MULTILINE)
    assert sorted(named) == sorted(tlt.__all__)


# ---- the engine


@pytest.fixture(scope="module")
def engine() -> Iterator[tlt.Engine]:
    with tlt.Engine.open("tiny", **PRECISE) as opened:
        yield opened


def texts(completions: list[tlt.Completion]) -> list[str]:
    return [completion.text for completion in completions]


def test_one_prompt_or_several_as_text_tokens_or_prompts(engine: tlt.Engine) -> None:
    encode = Tokenizer.load(TINY_POLICY).encode_prompt
    several = engine.generate(SUMS, temperature=0.0)
    assert texts(several) == ["3", "7*2-5=4-5=9", "8"]
    assert [completion.prompt_tokens for completion in several] == [tuple(encode(text)) for text in SUMS]
    as_tokens = [encode(text) for text in SUMS]
    as_prompts = [Prompt(text, text) for text in SUMS]
    for prompts in (as_tokens, tuple(map(tuple, as_tokens)), iter(SUMS), as_prompts):
        assert texts(engine.generate(prompts, temperature=0.0)) == texts(several)
    for one in (SUMS[1], as_tokens[1], as_prompts[1], torch.tensor(as_tokens[1]).numpy()):
        assert texts(engine.generate(one, temperature=0.0)) == ["7*2-5=4-5=9"]
    assert engine.generate([]) == []


def test_settings_as_a_record_and_as_keywords(engine: tlt.Engine) -> None:
    record = tlt.SamplingParams(temperature=0.0, max_tokens=4)
    assert texts(engine.generate(SUMS[1], record)) == ["7*2-"]
    assert texts(engine.generate(SUMS[1], record, max_tokens=7)) == ["7*2-5=4"]
    assert texts(engine.generate(SUMS[1], temperature=0, stop=["="])) == ["7*2-5="]


def test_calls_draw_anew_and_a_seed_repeats_them(engine: tlt.Engine) -> None:
    hot = {"temperature": 3.0, "max_tokens": 24}
    first, second = engine.generate(SUMS, **hot), engine.generate(SUMS, **hot)
    assert texts(first) != texts(second)
    with tlt.Engine.open("tiny", **PRECISE, temperature=3.0, seed=5) as other:
        seeded = other.generate(SUMS, max_tokens=24)
    assert texts(engine.generate(SUMS, seed=5, **hot)) == texts(seeded)
    assert texts(engine.generate(SUMS, seed=5, **hot)) == texts(seeded)
    assert texts(engine.generate(SUMS, seed=6, **hot)) != texts(seeded)


@pytest.mark.parametrize(
    "settings",
    [
        {"drafter": "suffix", "shape_policy": "fixed", "depths": [3]},
        {"spec": {"drafter": "both", "path": "new", "shape_policy": "fixed"}, "draft": {"window": 64}},
    ],
)
def test_speculation_changes_no_token(engine: tlt.Engine, settings: dict[str, Any]) -> None:
    plain = engine.generate(SUMS * 4, seed=9)
    with tlt.Engine.open("tiny", **PRECISE, **settings) as speculating:
        drafted = speculating.generate(SUMS * 4, seed=9)
        report = speculating.report().speculation
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert report
    assert report.verifies > 0
    assert engine.report().speculation is None


def test_an_engine_of_a_configuration(engine: tlt.Engine) -> None:
    config = tlt.load_config(engine.config, overrides={"sampling.max_tokens": 2, "sampling.temperature": 0})
    with tlt.Engine.open(config, rows=2) as opened:
        assert (opened.config.engine.rows, opened.config.sampling.max_tokens) == (2, 2)
        assert texts(opened.generate(SUMS)) == ["3", "7*", "8"]


def test_chats_go_through_the_template(tmp_path: Path) -> None:
    policy = shutil.copytree(TINY_POLICY, tmp_path / "policy")
    settings = json.loads((policy / "tokenizer_config.json").read_text())
    settings["chat_template"] = "<bos>{% for m in messages %}{{ m.content }}{% endfor %}="
    (policy / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = [{"role": "system", "content": "1+"}, {"role": "user", "content": "2"}]
    messages = [Message("system", "1+"), Message("user", "2")]
    with tlt.Engine.open(policy, **PRECISE) as opened:
        raw = opened.generate("1+2=", temperature=0.0)[0]
        asked = [*opened.generate([chat, messages], temperature=0), *opened.generate(chat, temperature=0)]
        asked += opened.generate("1+2", chat=True, temperature=0)
    assert texts(asked) == [raw.text] * 4
    assert {one.prompt_tokens for one in asked} == {raw.prompt_tokens}


@pytest.mark.parametrize(
    ("prompts", "settings", "error", "expected"),
    [
        (3, {}, RequestError, "prompts is 3; expected text, token ids, messages"),
        ({"role": "user", "content": "hi"}, {}, RequestError, "prompts is {'role'"),
        (b"1+2=", {}, RequestError, "prompts is b'1+2='; expected text"),
        (["1+2=", 3], {}, RequestError, "prompt 1 is 3; expected text, token ids or messages"),
        (["1+2=", []], {}, RequestError, "prompt 1 is []; expected text"),
        ([{"role": "user"}], {}, TaskError, "prompt 0: a message is {'role': 'user'}"),
        ([99], {}, RequestError, "token 99 is outside the policy's vocabulary of 32"),
        ("1+2=", {"chat": True}, TaskError, "has no chat template"),
        ("1+2=", {"max_tokens": 10**6}, RequestError, "more than the policy's context"),
        ("1+2=", {"temprature": 1}, ConfigError, "unknown key sampling.temprature; did you mean sampling.temperature?"),
        ("1+2=", {"top_p": 2.0}, ConfigError, "sampling.top_p is 2.0; expected a number in (0, 1]"),
    ],
)
def test_what_cannot_be_asked_is_one_line_and_harms_nobody(
    engine: tlt.Engine, prompts: Any, settings: dict[str, Any], error: type[TltError], expected: str
) -> None:
    with pytest.raises(error) as caught:
        engine.generate(prompts, **settings)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert texts(engine.generate(SUMS[0], temperature=0.0)) == ["3"]


@pytest.mark.parametrize(
    ("policy", "settings", "error", "expected"),
    [
        ("nosuch", {}, ModelError, "no model at nosuch"),
        ("tiny", {"rwos": 3}, ConfigError, "Engine.open: unknown setting rwos; did you mean engine.rows?"),
        ("tiny", {"path": "new"}, ConfigError, "unknown setting path; did you mean one of model.path, spec.path?"),
        ("tiny", {"train": {}}, ConfigError, "unknown setting train; expected a section (model, engine, spec"),
        ("tiny", {"rows": "3"}, ConfigError, "engine.rows is '3'; expected an integer"),
        ("tiny", {"drafter": "eagle"}, ConfigError, "spec.path is ''; expected the directory of a learned drafter"),
        (3, {}, ConfigError, "model.path is 3; expected a string"),
    ],
)
def test_what_cannot_be_opened(policy: Any, settings: dict[str, Any], error: type[TltError], expected: str) -> None:
    with pytest.raises(error) as caught:
        tlt.Engine.open(policy, **settings)
    assert expected in str(caught.value)


def test_a_closed_engine_has_freed_what_it_held() -> None:
    with tlt.Engine.open("tiny", **PRECISE, drafter="suffix") as opened:
        assert opened._core
        assert opened._policy
        held = [weakref.ref(one) for one in (opened._core, opened._core._runner, opened._policy.model.embed)]
    assert [ref() for ref in held] == [None] * 3
    assert repr(opened) == "Engine('tiny', closed)"
    with pytest.raises(RequestError, match=r"the engine is closed; open another"):
        opened.generate("1+2=")
    opened.close()


# ---- training


def test_a_recipe_is_a_path_or_a_configuration_with_overrides_on_top(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[run]\nsteps = 7\nseed = 3\n[task]\ngroup = 4\n", encoding="utf-8")
    opened: list[tlt.RunConfig] = []

    def stop(config: tlt.RunConfig, emit: Emit) -> LocalFleet:
        opened.append(config)
        raise TltError("far enough")

    for what in (str(recipe), recipe, tlt.load_config(recipe)):
        with pytest.raises(TltError, match="far enough"):
            tlt.train(what, overrides={"run.out": tmp_path / f"runs{len(opened)}", "run.steps": 2}, open_fleet=stop)
    assert [config.run.out for config in opened] == [f"{tmp_path}/runs{number}" for number in range(3)]
    assert [(config.run.steps, config.run.seed, config.task.group) for config in opened] == [(2, 3, 4)] * 3


def test_what_cannot_be_trained_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such recipe"):
        tlt.train(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"overrides: unknown key run\.stpes; did you mean run\.steps\?"):
        tlt.train(tlt.RunConfig(), overrides={"run.stpes": 3})


def test_several_workers_are_those_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    several = tlt.load_config(overrides={"cluster.workers": 2})
    assert fleet_of(tlt.RunConfig()).__name__ == "LocalFleet"
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray" or name.startswith("tlt.cluster")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray: pip install 'tlt-rl\[ray\]'"):
        tlt.train(several)


# ---- what is printed


def completion(text: str) -> tlt.Completion:
    many = (0,) * 5000
    return tlt.Completion(Key(0, 7), many, many, text, many, many, "length", 0, Timing(0.0, 0.0))


def run(*steps: int) -> Run:
    finished = {each.name: 0 for each in fields(StepFinished)}
    events = (RunStarted("train", 0, "0"), *(StepFinished(**finished | {"step": step}) for step in steps))
    return Run(tlt.load_config(overrides={"run.name": "mine"}), tuple(Recorded(0.0, event) for event in events))


LONG = "a long\nanswer " * 500
ROLLOUT = tlt.Rollout(Prompt("rows:3", LONG), completion(LONG), 0.5)


@pytest.mark.parametrize(
    ("record", "beginning"),
    [
        (ROLLOUT.prompt, r"Prompt('rows:3', 'a long\nanswer "),
        (ROLLOUT.completion, r"Completion('a long\nanswer "),
        (ROLLOUT, "Rollout('rows:3', Completion("),
        (Group(ROLLOUT.prompt, (ROLLOUT,) * 64), "Group(Prompt('rows:3', "),
        (Experience(ROLLOUT, 1.0), "Experience(rollout=Rollout('rows:3', "),
        (run(), "Run('mine', 0 of 100 steps, 1 events)"),
        (run(1, 2, 2, 3), "Run('mine', 3 of 100 steps, 5 events)"),
        (tlt.RunConfig(), "RunConfig()"),
        (tlt.load_config(overrides={"run.steps": 3}), "RunConfig(run.steps=3)"),
        (tlt.load_config(None, SMALL), "RunConfig(model.dtype='float64', "),
        (tlt.load_config(overrides={"task.template": "{prompt}" + LONG}), "RunConfig(task.template='{prompt}a long"),
    ],
)
def test_a_repr_is_one_short_line(record: object, beginning: str) -> None:
    assert repr(record).startswith(beginning)
    assert "\n" not in repr(record)
    assert len(repr(record)) <= 240
