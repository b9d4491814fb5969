"""The docs cannot rot: what they say of knobs, metrics, events and commands is what the code says.

`python -m tests.test_docs` writes the tables that are made from the code: docs/knobs.md, and those between marks in
docs/operations.md.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

import tlt
from tlt.cli import VERBS, _config, _parser
from tlt.config import BUILT_IN_REWARDS, RunConfig
from tlt.errors import ConfigError
from tlt.recipe import _comments, flat, knob_docs, knobs, load_config, number_range, take_flags, to_toml
from tlt.shipped import recipe_path
from tlt.watch.events import _KINDS, StepFinished
from tlt.watch.metrics import STEP_METRICS

ROOT = Path(tlt.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HOW = "run `python -m tests.test_docs`"


# ---- tables made from the code


def knobs_page() -> str:
    opening = "Every key of a recipe, and every flag: `--section.key value`. Made from `tlt/config.py`."
    lines = ["# Knobs", "", opening, ""]
    docs, values = knob_docs(), flat(RunConfig())
    sections = dict.fromkeys(key.rpartition(".")[0] for key in docs)
    homes = {knob.key.rpartition(".")[0]: knob.home for knob in knobs()}
    for section in sections:
        about = (homes[section].__doc__ or "").split("\n")[0]
        lines += [f"## [{section}]", "", about, "", "| knob | default | meaning |", "| --- | --- | --- |"]
        for key in (key for key in docs if key.rpartition(".")[0] == section):
            lines.append(f"| `{key}` | {shown(values[key])} | {in_a_cell(docs[key])} |")
        lines.append("")
    return "\n".join(lines)


def in_a_cell(text: str) -> str:
    return text.replace("|", r"\|")


def shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def metrics_table() -> str:
    meanings = _comments(StepFinished)
    rows = [f"| `{name}` | `{field}` | {in_a_cell(meanings[field])} |" for name, field in STEP_METRICS.items()]
    return "\n".join(["| name | field | meaning |", "| --- | --- | --- |", *rows])


def events_table() -> str:
    rows = [f"| `{name}` | {(kind.__doc__ or '').split(chr(10))[0]} |" for name, kind in _KINDS.items()]
    return "\n".join(["| kind | what it tells |", "| --- | --- |", *rows])


def with_tables(page: str) -> str:
    for name, table in (("metrics", metrics_table()), ("events", events_table())):
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        assert mark, f"the page has no place for {name}"
        page = f"{before}{mark}{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


def test_the_knobs_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "knobs.md").read_text("utf-8") == knobs_page(), HOW


# values of knobs that take any text as well
NAMED = {
    "model.path": ("tiny",),
    "model.device": ("auto", "cpu", "cuda", "cuda:N"),
    "task.reward": (*BUILT_IN_REWARDS, "FILE.py:FUNCTION", "http://HOST/PATH"),
    "task.rewards": ("task",),
    "spec.drafter": ("none", "suffix", "eagle", "both"),
    "spec.path": ("new",),
    "cluster.address": ("auto",),
}


def unexplained(docs: Mapping[str, str]) -> list[str]:
    """Values that may be chosen and are not explained as `value: what it does`, and numbers without a range."""
    found = []
    for knob in knobs():
        doc = docs[knob.key]
        for value in get_args(knob.type) if get_origin(knob.type) is Literal else NAMED.get(knob.key, ()):
            if not re.search(rf"(?:^|[.;] )(?:[\w:]+, )*{re.escape(value)}(?:, [\w:]+)*: [^;.]+", doc):
                found.append(f"{knob.key} {value}")
        numeric = {int, float} & {knob.type, *get_args(knob.type)}
        if numeric and not doc.endswith(f"({number_range(knob) or 'any number'})"):
            found.append(f"{knob.key} (range)")
    return found


def test_every_value_that_may_be_chosen_and_every_range_is_explained() -> None:
    assert unexplained(knob_docs()) == []


@pytest.mark.parametrize(
    ("key", "doc", "expected"),
    [
        ("task.reward_batch", "those to one prompt, or all", ["task.reward_batch group", "task.reward_batch step"]),
        ("task.reward_batch", "group: those to one prompt; step", ["task.reward_batch step"]),
        ("model.device", "auto, cpu, cuda or cuda:N", [f"model.device {value}" for value in NAMED["model.device"]]),
        ("run.steps", "steps of reinforcement learning", ["run.steps (range)"]),
        ("spec.shares", "on average, the likeliest of all", ["spec.shares (range)"]),
    ],
)
def test_a_value_that_is_not_explained_is_noticed(key: str, doc: str, expected: list[str]) -> None:
    assert unexplained({**knob_docs(), key: doc}) == expected


def test_a_range_is_what_the_section_says() -> None:
    docs = knob_docs()
    assert docs["draft.mlp"].endswith("a smaller one is faster (a number in (0, 1])")
    assert docs["spec.verifies"].endswith("(at least one number, each ≥ 2; numbers up to 128)")
    assert docs["engine.page_size"].endswith("(a power of two)")
    assert docs["sampling.stop"].endswith("the answer contains the stop text")


def test_a_comment_goes_on_below_its_knob() -> None:
    assert knob_docs()["drafting.behind"] == (
        "fraction of accepted draft tokens that may be lost before training starts again. 0: training starts after any "
        "loss; 1: a loss never starts training (a number in [0, 1])"
    )
    shown = to_toml(RunConfig(), documented=True)
    assert "\n# 1: it is never" not in shown, "it is wrapped anew"
    assert max(map(len, shown.splitlines())) <= 120


def test_the_tables_of_the_operations_page_are_what_the_code_says() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    assert with_tables(page) == page, HOW


# ---- what is mentioned exists


def mentioned(text: str) -> Iterator[str]:
    """Dotted names in code marks whose section exists, as in `train.row_tokens`."""
    sections = {knob.key.partition(".")[0] for knob in knobs()}
    for code in re.findall(r"`([^`\n]+)`", text):
        for name in re.findall(r"(?<![\w./-])(?:--)?([a-z]+(?:\.[a-z_]+)+)(?![\w/(])", code):
            if name.partition(".")[0] in sections and not name.endswith(
                (".py", ".toml", ".md", ".html", ".json", ".jsonl")
            ):
                yield name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_knob_that_is_mentioned_exists(page: Path) -> None:
    known = {knob.key for knob in knobs()}
    known |= {key.rpartition(".")[0] for key in known}
    assert [name for name in mentioned(page.read_text("utf-8")) if name not in known] == []


def test_a_knob_that_does_not_exist_is_noticed() -> None:
    text = "`train.row_token` and `--spec.path new`, `tlt/watch/events.py`"
    assert list(mentioned(text)) == ["train.row_token", "spec.path"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def commands(page: Path) -> Iterator[str]:
    for block in re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("tlt "):
                yield line.partition(" #")[0].partition(" > ")[0]


def check(command: str) -> None:
    """Parses a command as the command line would, up to the point where work begins."""
    flags, rest = take_flags(shlex.split(command)[1:])
    options, unknown = _parser().parse_known_args(rest)
    assert unknown == [], command
    assert options.verb in VERBS
    recipe = getattr(options, "recipe", None)
    if recipe and not (ROOT / recipe).exists() and recipe.startswith("recipes/"):
        raise ConfigError(f"{recipe} does not exist")
    if recipe and (ROOT / recipe).exists():
        options.recipe = str(ROOT / recipe)
        _config(options, flags)
    else:
        load_config(recipe if recipe and recipe_path(recipe).is_file() else None, flags)


def test_the_readme_is_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 900, "move details to docs/"


def test_the_docs_show_commands() -> None:
    assert sum(1 for page in PAGES for _ in commands(page)) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_is_shown_is_one(page: Path) -> None:
    for command in commands(page):
        check(command)


@pytest.mark.parametrize("command", ["tlt trian x", "tlt train recipes/none.toml", "tlt config --sampling.topk 3"])
def test_a_command_that_is_none_is_noticed(command: str) -> None:
    with pytest.raises(ConfigError):
        check(command)


# ---- what is installed

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
KINDS = (".md", ".py", ".toml", "")
TEXTS = [
    *PAGES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml")),
    *(path for folder in ("tlt", "recipes", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.*")),
]


def wrong_installs(text: str) -> list[str]:
    """What pip is told to install under a name that is another project's, or with an extra that does not exist."""
    extras = PROJECT["optional-dependencies"]
    named = re.findall(r"tlt(?:-rl)?\[[^\]\n]*\]", text) + re.findall(
        r"pip install [^\n]*?(?<![\w./-])tlt(?![\w.-])", text
    )
    return [name for name in named if not (name.startswith("tlt-rl[") and name[7:-1] in extras)]


def test_pip_is_told_the_name_of_the_distribution() -> None:
    assert PROJECT["name"] == "tlt-rl"
    assert PROJECT["scripts"] == {"tlt": "tlt.__main__:command"}
    texts = {path: path.read_text("utf-8") for path in TEXTS if path.is_file() and path.suffix in KINDS}
    assert sum("tlt-rl[" in text for text in texts.values()) > 5
    assert {path: found for path, text in texts.items() if (found := wrong_installs(text))} == {}


@pytest.mark.parametrize("text", ["pip install 'tlt[ray]'", "needs tlt[data]", "pip install tlt", "tlt-rl[rya]"])
def test_another_name_is_noticed(text: str) -> None:
    assert len(wrong_installs(text)) >= 1


def test_the_right_name_and_a_checkout_are_left_alone() -> None:
    assert (
        wrong_installs("pip install 'tlt-rl[ray]', pip install tlt-rl, pip install -e ./tlt, pip install torch") == []
    )


# ---- recipes


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.name)
def test_recipes_say_nothing_idle(path: Path) -> None:
    """A recipe is valid, begins by saying what it is for, and names its run after itself."""
    config = load_config(path)
    assert path.read_text("utf-8").startswith("# ")
    assert config.run.name == path.stem.replace("_", "-")


def test_the_example_files_of_a_recipe_exist() -> None:
    config = load_config(ROOT / "recipes" / "smollm2_cpu.toml")
    assert (ROOT / config.task.path).exists()
    assert (ROOT / config.task.reward.partition(":")[0]).exists()


def test_the_reward_of_the_example_is_the_one_the_docs_explain() -> None:
    from examples.brief.reward import compute_score

    assert compute_score("", "A volcano is a mountain that spits fire.", "volcano") == 1.0
    assert compute_score("", "A volcano is " + "very " * 27 + "hot.", "volcano") == pytest.approx(15 / 31)
    assert compute_score("", "A mountain that spits fire.", "volcano") == 0.0
    assert compute_score("", "A volcano is", "volcano") == 0.0


if __name__ == "__main__":
    (ROOT / "docs" / "knobs.md").write_text(knobs_page(), encoding="utf-8")
    operations = ROOT / "docs" / "operations.md"
    operations.write_text(with_tables(operations.read_text("utf-8")), encoding="utf-8")
