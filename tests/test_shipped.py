"""Recipes that come with tlt: found by name from anywhere, printed by `tlt init`, and packed into the wheel."""

import tomllib
from pathlib import Path

import pytest

import tlt
from tlt.cli import main
from tlt.config import TaskSettings
from tlt.errors import ConfigError
from tlt.recipe import load_config
from tlt.shipped import example_file, recipe_names, recipe_path, recipe_summary
from tlt.tasks.files import FileTask

ROOT = Path(tlt.__file__).parents[1]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_recipe_is_found_by_its_name_and_says_what_it_is_for() -> None:
    assert set(recipe_names()) == {path.stem for path in (ROOT / "recipes").glob("*.toml")} >= {"quickstart"}
    for name in recipe_names():
        assert load_config(name) == load_config(ROOT / "recipes" / f"{name}.toml")
        assert len(recipe_summary(name)) > 20
    assert recipe_summary("quickstart").endswith("learns arithmetic from its rewards.")


def test_a_name_may_be_that_of_the_run_or_a_short_one() -> None:
    assert recipe_path("gsm8k") == recipe_path("gsm8k-1gpu") == ROOT / "recipes" / "gsm8k_1gpu.toml"


def test_a_file_of_the_users_comes_first(tmp_path: Path) -> None:
    (tmp_path / "quickstart").write_text("[run]\nsteps = 3\n")
    assert load_config("quickstart").run.steps == 3
    (tmp_path / "quickstart").unlink()
    (tmp_path / "quickstart").mkdir()  # a directory is no recipe
    assert load_config("quickstart").run.name == "quickstart"


def test_a_name_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"quickstrat: no such recipe; expected a TOML file, or .* quickstart"):
        load_config("quickstrat")


def test_init_prints_a_recipe_that_reads_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["init", "gsm8k"]) == 0
    printed = capsys.readouterr().out
    assert printed == (ROOT / "recipes" / "gsm8k_1gpu.toml").read_text("utf-8")
    (tmp_path / "my.toml").write_text(printed)
    assert load_config("my.toml") == load_config("gsm8k")


def test_init_without_a_name_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(recipe_names())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["init", "quickstat"], "no recipe quickstat comes with tlt; did you mean quickstart?"),
        (["init", "gsm"], "no recipe gsm comes with tlt; did you mean gsm8k?"),
        (["init", "x"], "no recipe x comes with tlt; there are "),
        (["init", "gsm8k", "--run.seed", "1"], "tlt init takes no settings, found --run.seed"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    assert main(arguments) == 2
    assert expected in capsys.readouterr().err


def test_the_example_files_of_a_recipe_are_found_from_anywhere() -> None:
    task = load_config("smollm2_cpu").task
    assert len(FileTask(TaskSettings(name="files", path=task.path)).prompts) == 64
    assert example_file(task.reward.partition(":")[0]).is_file()
    assert example_file("examples/none.py") == Path("examples/none.py")


def test_a_file_of_the_users_comes_before_an_example(tmp_path: Path) -> None:
    path = Path("examples/brief/questions.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text('{"question": "1+1?"}\n')
    assert example_file(path) == path


def test_the_wheel_takes_along_what_is_looked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {f"tlt/data/{source}": source for source in packed} == {target: source for source, target in packed.items()}
    task = load_config("smollm2_cpu").task
    for named in ("recipes/quickstart.toml", task.path, task.reward.partition(":")[0]):
        assert any(Path(named).is_relative_to(source) for source in packed)
        assert (ROOT / named).is_file()
