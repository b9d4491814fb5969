"""The command line: fast help, and one clear line with the right exit code for every mistake."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tlt
from tlt.cli import VERBS, main
from tlt.config import RunConfig
from tlt.errors import ModelError, StateLost
from tlt.recipe import load_config

HEAVY = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "rich", "ray", "triton"}


def put_in_place(monkeypatch: pytest.MonkeyPatch, verb: str, work: Callable[..., None]) -> None:
    """Stands in for the module that does a verb's work."""
    module = ModuleType(f"tlt.{verb}")
    setattr(module, verb, work)
    monkeypatch.setitem(sys.modules, f"tlt.{verb}", module)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    seen: list[tuple[Any, ...]] = []
    for verb in ("generate", "rollout", "warmup"):
        put_in_place(monkeypatch, verb, lambda *arguments, verb=verb: seen.append((verb, *arguments)))
    return seen


def recipe(tmp_path: Path, text: str) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The one line a failing command says."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tlt: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("arguments", [["--help"], ["rollout", "--help"], ["config"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "tlt", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "tlt" in imported
    assert imported & HEAVY == set()
    assert "temperature" in result.stdout or "usage: tlt" in result.stdout


def test_generate(calls: list[tuple[Any, ...]]) -> None:
    assert main(["generate", "some/model", "Hello", "--sampling.temperature", "0.5", "--raw"]) == 0
    expected = load_config(None, ["--model.path=some/model", "--sampling.temperature=0.5"])
    assert calls == [("generate", expected, "Hello", True)]


def test_a_prompt_may_look_like_a_flag(calls: list[tuple[Any, ...]]) -> None:
    assert main(["generate", "tiny", "--run.seed", "3", "--", "--run.seed"]) == 0
    assert calls == [("generate", load_config(None, ["--run.seed=3"]), "--run.seed", False)]


def test_rollout(calls: list[tuple[Any, ...]], tmp_path: Path) -> None:
    path = recipe(tmp_path, "[task]\nprompts = 3\n")
    assert main(["rollout", path, "--run.seed=7"]) == 0
    assert calls == [("rollout", load_config(path, ["--run.seed=7"]))]


def test_warmup(calls: list[tuple[Any, ...]], tmp_path: Path) -> None:
    path = recipe(tmp_path, "[warmup]\nsteps = 3\n")
    assert main(["warmup", "tiny", "toy", "--out", "there", "--recipe", path]) == 0
    assert calls == [("warmup", load_config(path, ["--model.path=tiny", "--warmup.save=there"]), "toy")]


def test_the_shipped_recipes_are_valid() -> None:
    recipes = list((Path(tlt.__file__).parents[1] / "recipes").glob("*.toml"))
    assert recipes
    for path in recipes:
        load_config(path)


def test_config_prints_what_can_be_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "--sampling.top_k=3"]) == 0
    printed = capsys.readouterr().out
    assert "top_k = 3  # keep the k most probable tokens" in printed
    assert load_config(recipe(tmp_path, printed)) == load_config(None, ["--sampling.top_k=3"]) != RunConfig()


def test_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []
    module = ModuleType("tlt.reinforce")
    module.train = lambda config, task, **how: seen.append((config, how["resume"], how["resume_from"]))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tlt.reinforce", module)
    path = recipe(tmp_path, "[run]\nsteps = 3\n")
    config = load_config(path)
    assert main(["train", path, "--run.seed=7"]) == main(["train", path, "--resume"]) == 0
    assert main(["train", path, "--resume-from", "step_2"]) == 0
    assert seen == [
        (load_config(path, ["--run.seed=7"]), False, ""),
        (config, True, ""),
        (config, False, "step_2"),
    ]


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_run_that_lost_its_state_goes_on_from_its_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: int
) -> None:
    """By itself, as often as `cluster.restarts` allows; then it ends with the error."""
    resumed: list[bool] = []
    named: list[str] = []

    def train(config: RunConfig, task: None, *, resume: bool, resume_from: str, **_: object) -> None:
        resumed.append(resume)
        named.append(resume_from)
        if len(resumed) <= lost:
            raise StateLost("worker 1 died with its part of the policy")

    module = ModuleType("tlt.reinforce")
    module.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tlt.reinforce", module)
    path = recipe(tmp_path, "[cluster]\nrestarts = 2\n")
    assert (main(["train", path, "--resume-from=step_2"]) == 0) == (lost < 3)
    assert named == ["step_2", "", ""][: len(named)]  # what was written since is newer
    assert resumed == [False, True, True][: lost + 1]
    told = capsys.readouterr().err
    assert told.count("worker 1 died with its part of the policy: going on from the last checkpoint") == min(lost, 2)
    assert ("tlt: error: worker 1 died" in told) == (lost == 3)


def test_train_checks_its_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no such recipe" in refused(capsys, "train", str(tmp_path / "none.toml"))
    bad = recipe(tmp_path, "[sampling]\ntemprature = 1\n")
    assert "did you mean sampling.temperature?" in refused(capsys, "train", bad)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rolout", "x.toml"], "invalid choice: 'rolout'"),
        (["rollout"], "arguments are required: RECIPE; see tlt rollout --help"),
        (["generate", "tiny"], "arguments are required: PROMPT"),
        (["generate", "tiny", "hi", "there"], "unexpected argument there"),
        (
            ["generate", "tiny", "hi", "--temperature", "1"],
            "argument --temperature; did you mean --sampling.temperature?",
        ),
        (["generate", "tiny", "hi", "--ra"], "unexpected argument --ra"),
        (["generate", "tiny", "hi", "--sampling.top_k", "x"], "--sampling.top_k: sampling.top_k is 'x'"),
        (["generate", "", "hi"], "model.path is ''"),
        (["warmup", "tiny", "toy", "--out"], "--out: expected one argument"),
        (["config", "--recipe", "none.toml"], "none.toml: no such recipe"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    assert expected in refused(capsys, *arguments)


def test_an_error_of_the_work_ends_with_its_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object) -> None:
        raise ModelError("x: no config.json")

    put_in_place(monkeypatch, "generate", work)
    assert refused(capsys, "generate", "x", "hi", code=1) == "tlt: error: x: no config.json\n"


def test_interrupted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: object) -> None:
        raise KeyboardInterrupt

    put_in_place(monkeypatch, "generate", work)
    assert main(["generate", "tiny", "hi"]) == 130
    assert capsys.readouterr().err == "tlt: interrupted\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: object) -> None:
        raise ZeroDivisionError

    put_in_place(monkeypatch, "generate", work)
    with pytest.raises(ZeroDivisionError):
        main(["generate", "tiny", "hi"])


def test_no_verb_prints_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in VERBS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"tlt {tlt.__version__}\n"


INTERRUPTED = {
    "in exec": """
import tlt.cli
from tlt.__main__ import command

def main():
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        print("tlt: interrupted", file=sys.stderr)
        return 130

tlt.cli.main = main
""",
    "in an import": """
from tlt.__main__ import command

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "tlt.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
""",
}


@pytest.mark.parametrize("where", INTERRUPTED)
def test_an_interrupt_ends_with_130_wherever_it_comes(tmp_path: Path, where: str) -> None:
    """As a module: there Python 3.11 remembers an interrupt of what ran by `exec`, though it was caught."""
    script = f"import sys, atexit\natexit.register(print, 'cleaned up')\n{INTERRUPTED[where]}\nsys.exit(command())"
    (tmp_path / "interrupted.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "tlt: interrupted\n")
