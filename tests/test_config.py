"""Configuration: strict in what it takes, exact in what it writes, and no knob that nobody reads."""

import ast
import dataclasses
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tlt
from tlt.config import RunConfig, SpecSettings, TrainSettings
from tlt.errors import ConfigError, TltError
from tlt.recipe import (
    REMOVED,
    RENAMED,
    RETYPED,
    Knob,
    flat,
    knob_docs,
    knobs,
    load_config,
    nearest_key,
    take_flags,
    to_toml,
)

PACKAGE = Path(tlt.__file__).parent


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def message(path: Path | None = None, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- reading


def test_defaults_without_a_recipe() -> None:
    assert load_config() == RunConfig()


def test_recipe_then_flags(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[sampling]\ntemperature = 0.5\ntop_k = 7\n[task.toy]\nspread = 0\n")
    config = load_config(path, ["--sampling.temperature", "0.7", "--run.seed=-3"])
    assert (config.sampling.temperature, config.sampling.top_k, config.run.seed) == (0.7, 7, -3)
    assert config.task.toy.spread == 0.0
    assert isinstance(config.task.toy.spread, float)


def test_an_integer_stands_for_a_float_in_both_sources(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[sampling]\ntemperature = 1\n")
    assert isinstance(load_config(path).sampling.temperature, float)
    assert isinstance(load_config(None, ["--sampling.temperature", "1"]).sampling.temperature, float)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--sampling.stop", "a,b"], ("a", "b")),
        (["--sampling.stop=a", "--sampling.stop=b"], ("a", "b")),
        (["--sampling.stop", '["a,b", "\\n"]'], ("a,b", "\n")),
        (["--sampling.stop="], ()),
    ],
)
def test_lists(flags: list[str], expected: tuple[str, ...]) -> None:
    assert load_config(None, flags).sampling.stop == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--sampling.ignore_eos"], True),
        (["--sampling.ignore_eos", "--run.seed", "1"], True),
        (["--sampling.ignore_eos", "false"], False),
        (["--sampling.ignore_eos=true"], True),
    ],
)
def test_booleans(flags: list[str], expected: bool) -> None:
    assert load_config(None, flags).sampling.ignore_eos is expected


def test_a_recipe_may_name_a_drafter_that_a_flag_leaves_out(tmp_path: Path) -> None:
    """To compare; and what a run wrote down of such a configuration is read back."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[spec]\ndrafter = "both"\npath = "here"\n')
    config = load_config(recipe, ["--spec.drafter=suffix"])
    assert (config.spec.drafter, config.spec.path) == ("suffix", "here")
    recipe.write_text(to_toml(config))
    assert load_config(recipe) == config
    assert load_config(recipe, ["--spec.path="]).spec.path == ""


def test_overrides_of_a_recipe_and_of_a_configuration(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[run]\nsteps = 7\nseed = 2\n")
    overrides = {"run.steps": 3, "sampling": {"stop": ["a"], "temperature": 1}, "task": {"toy": {"pool": 5}}}
    config = load_config(path, overrides=overrides)
    assert (config.run.steps, config.run.seed, config.sampling.stop, config.task.toy.pool) == (3, 2, ("a",), 5)
    assert isinstance(config.sampling.temperature, float)
    assert load_config(load_config(path), overrides=overrides) == config
    assert load_config(path, ["--run.steps=4"], overrides={"run.steps": 3}).run.steps == 4
    assert load_config(config) == config


def test_overrides_take_sections_paths_and_tuples_as_python_has_them(tmp_path: Path) -> None:
    section = SpecSettings(drafter="suffix", depths=(1, 3))
    config = load_config(overrides={"spec": section, "model.path": tmp_path, "sampling.stop": ("a", "b")})
    assert (config.spec, config.model.path, config.sampling.stop) == (section, str(tmp_path), ("a", "b"))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"run.stps": 3}, "overrides: unknown key run.stps; did you mean run.steps?"),
        ({"steps": 3}, "overrides: unknown key steps; did you mean run.steps?"),
        ({"rnu": {"steps": 3}}, "overrides: unknown section [rnu]; did you mean [run]?"),
        ({"run.steps": "3"}, "overrides: run.steps is '3'; expected an integer"),
        ({"run.steps": 0}, "overrides: run.steps is 0; expected at least 1"),
        ({"run": 3}, "overrides: run is 3; expected a section, [run]"),
        ({"spec.path": "new"}, "overrides: spec.path is 'new'; expected nothing, as spec.drafter is none"),
        ({3: 4}, 'overrides is {3: 4}; expected a mapping, {"run.steps": 3}'),
        (["--run.steps=3"], "overrides is ['--run.steps=3']; expected a mapping, {\"run.steps\": 3}"),
    ],
)
def test_a_wrong_override_is_refused(overrides: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    assert str(caught.value).startswith(expected)


def test_what_is_no_recipe_is_refused() -> None:
    wrong: Any = {"run.steps": 3}
    with pytest.raises(ConfigError, match=r"the recipe is \{'run.steps': 3\}; expected the path .* overrides"):
        load_config(wrong)


def test_flags_are_parted_from_the_rest() -> None:
    arguments = ["tiny", "--sampling.ignore_eos", "hello", "--run.seed", "-1", "--raw", "--", "--run.seed"]
    flags, rest = take_flags(arguments)
    assert flags == ["--sampling.ignore_eos=true", "--run.seed=-1"]
    assert rest == ["tiny", "hello", "--raw", "--", "--run.seed"]


# ---- refusing


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[sampling]\ntemprature = 1", "unknown key sampling.temprature; did you mean sampling.temperature?"),
        ("[run]\ntop_p = 1", "unknown key run.top_p; did you mean sampling.top_p?"),
        ("zzzz = 1", "unknown key zzzz; `tlt config` lists what there is"),
        ("[samplign]\ntop_k = 1", "unknown section [samplign]; did you mean [sampling]?"),
        ("[task.tov]\nspread = 1", "unknown section [task.tov]; did you mean [task.toy]?"),
        ("[qqqq]\n", "unknown section [qqqq]; expected one of run, model, task, sampling"),
        ("sampling = 3", "sampling is 3; expected a section, [sampling]"),
        ("[sampling]\ntop_k = true", "sampling.top_k is True; expected an integer"),
        ("[sampling]\ntop_k = 1.0", "sampling.top_k is 1.0; expected an integer"),
        ("[sampling]\ntemperature = true", "sampling.temperature is True; expected a finite number"),
        ("[sampling]\ntemperature = nan", "sampling.temperature is nan; expected a finite number"),
        ("[sampling]\nignore_eos = 1", "sampling.ignore_eos is 1; expected true or false"),
        ("[sampling]\nstop = 'a'", "sampling.stop is 'a'; expected a list, each item a string"),
        ("[sampling]\nstop = ['a', 1]", "sampling.stop is 1; expected a string"),
        ("[sampling]\ntemperature = -1", "sampling.temperature is -1.0; expected a finite number ≥ 0"),
        ("[model]\ndtype = 'bfloat61'", "did you mean bfloat16?"),
        ("[model]\ndevice = 'gpu'", "model.device is 'gpu'; expected auto, cpu, cuda or cuda:N"),
        ("[task.toy]\nmax_ops = 0", "task.toy.max_ops is 0; expected at least 1"),
        ("[run\n", "is not valid TOML"),
    ],
)
def test_a_wrong_recipe_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = recipe(tmp_path, text)
    said = message(path)
    assert said.startswith(f"{path}: ")
    assert expected in said


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--sampling.topk", "1"], "--sampling.topk: unknown key sampling.topk; did you mean sampling.top_k?"),
        (["--sampling.top_k", "many"], "--sampling.top_k: sampling.top_k is 'many'; expected an integer"),
        (["--sampling.top_k=1e3"], "expected an integer"),
        (["--sampling.temperature=nan"], "expected a finite number"),
        (["--sampling.ignore_eos=1"], "expected true or false"),
        (["--sampling.stop=[a"], "expected a list, each item a string"),
        (["--sampling.top_p", "0"], "--sampling.top_p: sampling.top_p is 0.0; expected a number in (0, 1]"),
        (["--sampling.top_k"], "--sampling.top_k needs a value"),
        (["--sampling.top_k", "--run.seed", "1"], "--sampling.top_k needs a value"),
        (["stray"], "unexpected argument 'stray'"),
        (["--spec.drafter=suffix", "--spec.path=/nope"], "--spec.path: spec.path is '/nope'; expected nothing, as"),
        (["--spec.path=new"], "as spec.drafter is none: set spec.drafter to eagle or both"),
    ],
)
def test_a_wrong_flag_is_refused(flags: list[str], expected: str) -> None:
    assert expected in message(None, *flags)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "...", "/tmp/run", "a/b", "../run", "a\\b", "a\n", "two words", "x" * 201, "é" * 101],
)
def test_a_run_is_named_like_a_directory(tmp_path: Path, name: str) -> None:
    """It is one, below `run.out` and nowhere else, and suffixes fit behind it."""
    expected = f"run.name is {name!r}; expected letters, digits, '_', '-' or '.', not dots alone, 200 bytes at most"
    assert expected in message(None, f"--run.name={name}")
    assert expected in message(recipe(tmp_path, f"[run]\nname = {json.dumps(name)}"))


@pytest.mark.parametrize("name", ["run", "v1.2", "..a", "x" * 200, "lauf-größe_2"])
def test_names_of_runs(name: str) -> None:
    assert load_config(None, [f"--run.name={name}"]).run.name == name


def test_a_run_is_not_kept_where_no_directory_can_be() -> None:
    assert "run.out is 'a\\x00b'; expected UTF-8 text without NUL" in message(None, "--run.out=a\0b")


def test_a_bad_flag_is_not_blamed_on_the_recipe(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[sampling]\ntop_p = 0.5\n")
    assert message(path, "--sampling.top_p", "2").startswith("--sampling.top_p: ")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "no such recipe" in message(tmp_path / "missing.toml")
    assert "cannot be read" in message(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in message(tmp_path / "bytes.toml")


def test_nearest_key_finds_a_key_without_its_section() -> None:
    assert nearest_key("temperature") == "sampling.temperature"
    assert nearest_key("something-else-entirely") is None


# ---- writing


TEXT = st.characters(exclude_categories=["Cs"], exclude_characters="\0")  # what a file can hold


def any_value(knob: Knob) -> st.SearchStrategy[Any]:
    if knob.type == tuple[int, ...]:
        return st.lists(st.integers(2, 128), min_size=1, max_size=3).map(tuple)
    if knob.type == tuple[float, ...]:
        return st.lists(st.floats(1.0, 128.0, exclude_min=True), max_size=3).map(tuple)
    if get_origin(knob.type) is tuple:
        return st.lists(st.text(TEXT, min_size=1), max_size=3).map(tuple)
    if get_origin(knob.type) is Literal:
        return st.sampled_from(get_args(knob.type))
    kinds = {bool: st.booleans(), str: st.text(TEXT), int: st.integers(-(2**63), 2**63 - 1)}
    return kinds.get(knob.type, st.floats(allow_nan=False, allow_infinity=False))


def with_value(config: Any, key: str, value: Any) -> Any:
    name, _, tail = key.partition(".")
    return dataclasses.replace(config, **{name: with_value(getattr(config, name), tail, value) if tail else value})


@pytest.fixture(scope="module")
def docs_read_once() -> Iterator[None]:
    """Reading the comments takes longer than all the rest, and they stay the same."""
    docs = knob_docs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tlt.recipe.knob_docs", lambda: docs)
        yield


@pytest.mark.usefixtures("docs_read_once")
@settings(max_examples=25)
@given(data=st.data())
def test_what_is_written_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    config = RunConfig()
    for knob in data.draw(st.lists(st.sampled_from(list(knobs())), max_size=4)):
        try:
            config = with_value(config, knob.key, data.draw(any_value(knob)))
        except TltError:
            continue  # out of the knob's range
    path = tmp_path_factory.mktemp("config") / "config.toml"
    for documented in (False, True):
        path.write_text(to_toml(config, documented), encoding="utf-8", newline="")
        assert load_config(path) == config


def test_every_knob_is_documented_and_written() -> None:
    assert [key for key, doc in knob_docs().items() if not doc or doc.startswith(" (")] == []  # (…): its range alone
    written = tomllib.loads(to_toml(RunConfig()))
    for knob in knobs():
        table: Any = written
        for name in knob.key.split("."):
            table = table[name]


# ---- every knob is read by somebody


class Reads:
    """Which knobs a set of sources reads. A read is an attribute of an expression that is known to hold a section:
    `config.sampling` from a name annotated RunConfig, a name or field annotated with the section's class, or a name
    assigned from either. Text, keywords, writes and attributes of other things are not reads."""

    def __init__(self, sources: list[str]) -> None:
        self.sections = {key for key, _ in sections(RunConfig, "")}
        self.by_class = {kind.__name__: key for key, kind in sections(RunConfig, "")} | {"RunConfig": ""}
        trees = [list(ast.walk(ast.parse(source))) for source in sources]
        self.keys: set[str] = set()
        everywhere = {pair for tree in trees for pair in self.annotated(tree, ast.AnnAssign)}
        for tree in trees:
            # (name, section it may hold)
            self.holders: set[tuple[str, str]] = everywhere | self.annotated(tree, ast.arg)
            for _ in range(2):  # a name may be assigned from a name assigned further down
                self.follow_assignments(tree)
            self.collect(tree)

    def annotated(self, tree: list[ast.AST], kind: type[ast.arg] | type[ast.AnnAssign]) -> set[tuple[str, str]]:
        found = set()
        for node in tree:
            if isinstance(node, kind) and node.annotation is not None:
                holder = node.arg if isinstance(node, ast.arg) else tail_name(node.target)
                classes = {tail_name(part) for part in ast.walk(node.annotation)} & self.by_class.keys()
                found |= {(holder, self.by_class[name]) for name in classes}
        return found

    def follow_assignments(self, tree: list[ast.AST]) -> None:
        for node in tree:
            if isinstance(node, ast.Assign):
                for target, value in assigned(node):
                    self.holders |= {(tail_name(target), key) for key in self.sections_held(value)}

    def sections_held(self, node: ast.expr) -> set[str]:
        """The sections an expression may hold, by dotted key; "" is the whole configuration."""
        if isinstance(node, ast.BoolOp):
            return {key for value in node.values for key in self.sections_held(value)}
        held = {key for name, key in self.holders if name == tail_name(node)}
        if isinstance(node, ast.Attribute):
            held |= {f"{parent}.{node.attr}".strip(".") for parent in self.sections_held(node.value)} & self.sections
        return held

    def collect(self, tree: list[ast.AST]) -> None:
        for node in tree:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                self.keys |= {f"{section}.{node.attr}" for section in self.sections_held(node.value) if section}


def sections(kind: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Dotted key and class of every section."""
    for name, type_ in get_type_hints(kind).items():
        if dataclasses.is_dataclass(type_):
            yield f"{key}.{name}".strip("."), type_
            yield from sections(type_, f"{key}.{name}".strip("."))


def assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What gets what; `a, b = x, y` is two of them."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def tail_name(node: ast.AST) -> str:
    """`x` of x and of a.b.x."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def test_every_knob_is_read_by_some_module() -> None:
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if path != PACKAGE / "config.py"]
    assert {knob.key for knob in knobs()} - Reads(sources).keys == set()


@pytest.mark.parametrize(
    "source",
    [
        "def f(config: RunConfig): return config.sampling.top_k",
        "def f(sampling: SamplingParams): return sampling.top_k",
        "def f(params: SamplingParams | None): return params.top_k",
        "class A:\n  params: SamplingParams\ndef f(a): return a.params.top_k",
        "def f(self, config: RunConfig):\n  self.shape = config.sampling\n  return self.shape.top_k",
        "def f(config: RunConfig, given: SamplingParams):\n  x = given or config.sampling\n  return x.top_k",
        "def f(self, config: RunConfig):\n  self.a, self.b = 1, config\n  return self.b.sampling.top_k",
    ],
)
def test_a_read_is_seen(source: str) -> None:
    assert Reads([source]).keys & {knob.key for knob in knobs()} == {"sampling.top_k"}


@pytest.mark.parametrize(
    "source",
    [
        "top_k = 3",
        "'config.sampling.top_k'  # config.sampling.top_k",
        "def f(other: Other): return other.top_k",
        "def f(engine: Engine): return engine.sampling.top_k",
        "def f(config: RunConfig): config.sampling.top_k = 3",
        "def f(config: RunConfig): return config.sampling",
        "def f(config: RunConfig): return replace(config.sampling, top_k=3)",
        "def f(config: RunConfig):\n  a, b = config.sampling, 1\n  return b.top_k",
    ],
)
def test_what_is_no_read_is_not_taken_for_one(source: str) -> None:
    assert Reads([source]).keys & {knob.key for knob in knobs()} == set()


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_a_renamed_key_is_still_read_and_warned_of(old: str, tmp_path: Path) -> None:
    section, _, name = old.partition(".")
    value = {"chooser": '"fixed"', "light": "false"}[name]
    recipe = tmp_path / "old.toml"
    recipe.write_text(f"[{section}]\n{name} = {value}\n")
    with pytest.warns(FutureWarning, match=f"old.toml: {old} is now {RENAMED[old]}"):
        from_file = load_config(recipe)
    with pytest.warns(FutureWarning, match=RENAMED[old]):
        from_flags = load_config(flags=take_flags([f"--{old}", value.strip('"')])[0])
    with pytest.warns(FutureWarning, match=RENAMED[old]):
        from_overrides = load_config(overrides={old: value.strip('"') if '"' in value else False})
    assert flat(from_file)[RENAMED[old]] == (value.strip(chr(34)) if name == "chooser" else False)
    assert from_file == from_flags == from_overrides != RunConfig()


@pytest.mark.parametrize("key", sorted(RETYPED))
def test_old_values_of_a_knob_are_still_read_and_warned_of(key: str, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    for old, present in RETYPED[key].items():
        text = str(old).lower()
        recipe = tmp_path / "old.toml"
        recipe.write_text(f"[{section}]\n{name} = {text}\n")
        flags = [[f"--{key}", text], [f"--{key}={text}"], *([[f"--{key}"], [f"--{key}", "--run.seed=0"]] * old)]
        sources = [{"recipe": recipe}, {"overrides": {key: old}}, {"overrides": {section: {name: old}}}]
        for source in [*sources, *({"flags": take_flags(each)[0]} for each in flags)]:
            with pytest.warns(FutureWarning, match=f"{key} {text} is now {present}; the next version refuses {text}"):
                found = load_config(**source)  # type: ignore[arg-type]
            assert flat(found)[key] == present
            assert load_config(flags=[f"--{key}={present}"]) == found
    with pytest.raises(ConfigError, match=f"{name} is True; expected auto, always or never"):
        TrainSettings(checkpoint_activations=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("old", sorted(REMOVED))
def test_knobs_that_are_gone_change_nothing_for_a_version(old: str, tmp_path: Path) -> None:
    section, _, name = old.partition(".")
    (tmp_path / "old.toml").write_text(f"[{section}]\n{name} = 0.5\n")
    for sources in ({"recipe": tmp_path / "old.toml"}, {"flags": [f"--{old}=0.5"]}, {"overrides": {old: 0.5}}):
        with pytest.warns(FutureWarning, match=f"{old} is ignored"):
            assert load_config(**sources) == RunConfig()  # type: ignore[arg-type]
