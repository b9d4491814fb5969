"""The house keeps its shape: imports point down the floors, words need nothing, files and functions stay small.

Each rule is a function from modules to complaints, and each is shown a tiny package that breaks it.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tlt

ROOT = Path(tlt.__file__).parents[1]

# From the ground up. A name covers what is below it, unless a longer name says otherwise.
FLOORS: dict[str, tuple[str, ...]] = {
    "words": (
        "tlt.types",
        "tlt.errors",
        "tlt.signals",
        "tlt.recipe",
        "tlt.config",
        "tlt.strict_json",
        "tlt.tasks.task",
        "tlt.watch.event",
        "tlt.watch.events",
        "tlt.watch.workers",
        "tlt.watch.history",
        "tlt.watch.log",
        "tlt.watch.directory",
        "tlt.watch.trace",
        "tlt.watch.step_files",
        "tlt.outputs",
        "tlt.shipped",
        "tlt.verb_help",
    ),
    "kernels": ("tlt.kernels",),
    "model": ("tlt.model",),
    "parts": ("tlt.train", "tlt.spec", "tlt.text", "tlt.tasks", "tlt.policy", "tlt.watch", "tlt.machine"),
    "machines": ("tlt.engine", "tlt.drafting", "tlt.sync"),
    "house": (
        "tlt.loop",
        "tlt.fleet",
        "tlt.following",
        "tlt.reinforce",
        "tlt.checkpoint_size",
        "tlt.memory_plan",
        "tlt.plan",
        "tlt.replay",
        "tlt.multi_turn",
        "tlt.writing_ahead",
        "tlt.evaluate",
        "tlt.resume",
        "tlt.event_builders",
        "tlt.step_file",
        "tlt.sim",
        "tlt.simulate",
        "tlt.dispatch",
        "tlt.generate",
        "tlt.rollout",
        "tlt.warmup",
        "tlt.draft",
        "tlt.tune_kernels",
    ),
    "doors": (
        "tlt.cli",
        "tlt.bench",
        "tlt.__main__",
        "tlt.library",
        "tlt.cluster",
        "tlt.watch.server",
        "tlt.watch.command",
        "tlt.serve",
        "tlt.integrations",
    ),
}
# Modules that need nothing but the standard library (and each other).
PLAIN = {
    "tlt.writing_ahead",
    *FLOORS["words"],
    "tlt.engine.admission",
    "tlt.engine.chunks",
    "tlt.engine.request",
    "tlt.engine.scheduler",
    "tlt.engine.waiting",
    "tlt.engine.pages",
    "tlt.spec.acceptance",
    "tlt.spec.ahead",
    "tlt.spec.backlog",
    "tlt.spec.bandit",
    "tlt.spec.costs",
    "tlt.spec.record",
    "tlt.spec.shape",
    "tlt.spec.budget",
    "tlt.spec.shape_policy",
    "tlt.spec.tuner",
    "tlt.drafting.cadence",
    "tlt.drafting.deadline",
    "tlt.drafting.forecast",
    "tlt.drafting.group_size",
    "tlt.drafting.idle",
    "tlt.drafting.planner",
    "tlt.dispatch",
    "tlt.memory_plan",
    "tlt.cluster.interference",
    "tlt.cluster.timeline",
    "tlt.kernels.linear.plan",
    "tlt.kernels.linear.tuning",
    "tlt.model.config",
    "tlt.model.shapes",
    "tlt.sim",
    "tlt.train.rates",
    "tlt.serve.options",
    "tlt.serve.protocol",
    "tlt.bench.compare",
    "tlt.bench.options",
    "tlt.watch.metrics",
    "tlt.watch.summary",
    "tlt.watch.verdict",
    "tlt.watch.health",
    "tlt.watch.chart",
    "tlt.watch.figures",
}
# may catch everything: to report it to a person, or to the run
BORDERS = {"tlt.cli", "tlt.tasks.judge_child", "tlt.text", "tlt.watch.readers"}
LONGEST_FUNCTION, LONGEST_FILE = 60, 600  # lines
LONGEST_KERNEL = 100  # a Triton kernel: one program, whose stages share tiles held in registers


@dataclass(frozen=True)
class Module:
    name: str  # dotted; a package's __init__ has the package's name
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    def __str__(self) -> str:
        return self.name


def read_package() -> list[Module]:
    found = []
    for path in sorted((ROOT / "tlt").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found.append(Module(".".join(parts[:-1] if is_package else parts), path.read_text("utf-8"), is_package))
    return found


PACKAGE = read_package()


# ---- what imports what


def imported(module: Module, known: set[str]) -> Iterator[str]:
    """Dotted names a module imports, wherever in it the import stands. `from a import b` is a.b if that is a module.

    `from tlt import __version__` is no import: whoever asks has the package already, and its version needs no module.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            names = [alias.name for alias in node.names if (base, alias.name) != ("tlt", "__version__")]
            yield from (f"{base}.{name}" if f"{base}.{name}" in known else base for name in names)


def absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    up = node.level - module.is_package
    home = module.name.split(".")
    return ".".join([*home[: len(home) - up], *([node.module] if node.module else [])])


def arrows(modules: list[Module]) -> dict[str, set[str]]:
    """Module → the modules of this package that it imports."""
    known = {module.name for module in modules}
    return {m.name: {name for name in imported(m, known) if name.partition(".")[0] == "tlt"} for m in modules}


def floor_of(name: str) -> int | None:
    """How high a module lives; None for one that has been given no floor."""
    if name == "tlt":
        return len(FLOORS) - 1  # the package itself is a door
    covering = [
        (len(prefix), level)
        for level, prefixes in enumerate(FLOORS.values())
        for prefix in prefixes
        if name == prefix or name.startswith(prefix + ".")
    ]
    return max(covering)[1] if covering else None


# ---- the rules


def imports_that_point_up(modules: list[Module]) -> Iterator[str]:
    for name, targets in arrows([module for module in modules if module.source.strip()]).items():
        here = floor_of(name)
        if here is None:
            yield f"{name} has no floor: give it one in FLOORS"
            continue
        for target in targets:
            there = floor_of(target)
            if there is None or there > here:
                yield f"{name} imports {target}, which is above it or nowhere"


def cycles(modules: list[Module]) -> Iterator[str]:
    try:
        TopologicalSorter(arrows(modules)).prepare()
    except CycleError as error:
        yield " → ".join(error.args[1])


def plain_modules_that_need_more(modules: list[Module]) -> Iterator[str]:
    known = {module.name for module in modules}
    for module in (module for module in modules if module.name in PLAIN):
        for name in imported(module, known):
            if name not in PLAIN and name.partition(".")[0] not in sys.stdlib_module_names:
                yield f"{module} imports {name}"


def ray_outside_the_cluster(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        inside = (module.name + ".").startswith("tlt.cluster.") or module.name == "tlt.integrations.verl"
        if not inside and any(name.partition(".")[0] == "ray" for name in imported(module, set())):
            yield f"{module} imports ray"


def production_that_imports_the_benchmarks(modules: list[Module]) -> Iterator[str]:
    for name, targets in arrows(modules).items():
        if name != "tlt.cli" and not name.startswith("tlt.bench"):
            yield from (f"{name} imports {target}" for target in sorted(targets) if target.startswith("tlt.bench"))


def packages_that_hold_code(modules: list[Module]) -> Iterator[str]:
    yield from (m.name for m in modules if m.is_package and m.name != "tlt" and m.source.strip())


def names_that_say_nothing(modules: list[Module]) -> Iterator[str]:
    empty_words = {"util", "utils", "helper", "helpers", "common", "misc"}
    yield from (m.name for m in modules if empty_words & set(m.name.split(".")))


def files_without_a_docstring(modules: list[Module]) -> Iterator[str]:
    yield from (m.name for m in modules if m.source.strip() and not ast.get_docstring(m.tree))


def broad_excepts(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        if module.name in BORDERS or module.name.startswith("tlt.cluster."):
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler):
                caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"Exception"}
                if caught & {"Exception", "BaseException"}:
                    yield f"{module}, line {node.lineno}"


def code_from_model_directories(modules: list[Module]) -> Iterator[str]:
    """Transformers runs Python files of a model directory if it is allowed to, and asks on the terminal if not told."""
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".from_pretrained", ".from_config")):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if given.get("trust_remote_code") != "False":
                    yield f"{module}, line {node.lineno}, does not say trust_remote_code=False"


def long_functions(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                is_kernel = any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
                if lines > (LONGEST_KERNEL if is_kernel else LONGEST_FUNCTION):
                    yield f"{module}.{node.name} has {lines} lines"


def long_files(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        if (lines := module.source.count("\n")) > LONGEST_FILE:
            yield f"{module} has {lines} lines"


def plain(name: str, source: str = '"""Doc."""\n', is_package: bool = False) -> Module:
    return Module(name, source, is_package)


Rule = Callable[[list[Module]], Iterator[str]]

# Each rule beside packages that break it.
RULES: list[tuple[Rule, list[list[Module]]]] = [
    (
        imports_that_point_up,
        [
            [plain("tlt.model.layers", "from tlt.engine.engine import Engine")],
            [plain("tlt.model.layers", "def f():\n    import tlt.cli")],
            [plain("tlt.types", "if TYPE_CHECKING:\n    from tlt.model import layers"), plain("tlt.model.layers")],
            [plain("tlt.tasks.task", "from .toy import ToyTask"), plain("tlt.tasks.toy")],
            [plain("tlt.text", "from tlt import __version__, Completion"), plain("tlt", is_package=True)],
            [plain("tlt.nowhere")],
        ],
    ),
    (
        cycles,
        [
            [plain("tlt.types", "import tlt.errors"), plain("tlt.errors", "def f():\n    from tlt import types")],
            [plain("tlt.model.a", "from tlt.model import b"), plain("tlt.model.b", "from tlt.model.a import x")],
        ],
    ),
    (
        plain_modules_that_need_more,
        [
            [plain("tlt.types", "import torch.nn")],
            [plain("tlt.config", "def f():\n    from numpy import array")],
            [plain("tlt.engine.scheduler", "from tlt.model.layers import Norm"), plain("tlt.model.layers")],
        ],
    ),
    (ray_outside_the_cluster, [[plain("tlt.fleet", "import ray.util")], [plain("tlt.loop", "from ray import get")]]),
    (
        production_that_imports_the_benchmarks,
        [
            [plain("tlt.reinforce", "def f():\n    from tlt.bench.lab import Lab"), plain("tlt.bench.lab")],
            [plain("tlt.cluster.host", "from tlt.bench import lab"), plain("tlt.bench.lab")],
        ],
    ),
    (packages_that_hold_code, [[plain("tlt.engine", "x = 1", is_package=True)]]),
    (names_that_say_nothing, [[plain("tlt.engine.utils")], [plain("tlt.common.x")]]),
    (files_without_a_docstring, [[plain("tlt.types", "x = 1")]]),
    (
        broad_excepts,
        [
            [plain("tlt.policy", f"try:\n    x\nexcept{what}:\n    pass")]
            for what in ("", " Exception", " BaseException as error", " (KeyError, Exception)")
        ],
    ),
    (
        code_from_model_directories,
        [
            [plain("tlt.text", f"AutoTokenizer.from_pretrained(path{more})")]
            for more in ("", ", trust_remote_code=True", ", trust_remote_code=trusted", ", **{}")
        ],
    ),
    (
        long_functions,
        [
            [plain("tlt.text", "def f():\n" + "    x\n" * LONGEST_FUNCTION)],
            [plain("tlt.text", "class A:\n  @property\n  def f():\n" + "    x\n" * LONGEST_FUNCTION)],
            [plain("tlt.kernels.x", "@triton.jit\ndef f():\n" + "    x\n" * LONGEST_KERNEL)],
        ],
    ),
    (long_files, [[plain("tlt.text", "x\n" * (LONGEST_FILE + 1))]]),
]


@pytest.mark.parametrize("rule", [rule for rule, _ in RULES], ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: Rule) -> None:
    assert list(rule(PACKAGE)) == []


@pytest.mark.parametrize(("rule", "broken"), [(rule, broken) for rule, all_ in RULES for broken in all_])
def test_the_rule_can_be_broken(rule: Rule, broken: list[Module]) -> None:
    assert len(list(rule(broken))) == 1


def test_what_is_allowed_is_not_refused() -> None:
    allowed = [
        plain("tlt.cli", "try:\n    from tlt.types import Key\nexcept Exception:\n    pass"),
        plain("tlt.tasks.judge_child", "try:\n    x\nexcept BaseException:\n    pass"),
        plain("tlt.cluster.ray_fleet", "import ray\nfrom tlt.fleet import Worker"),
        plain("tlt.fleet", "from tlt import __version__\nfrom tlt.engine import engine"),
        plain("tlt.engine.engine", "import torch\nfrom tlt.engine import scheduler"),
        plain(
            "tlt.engine.scheduler", "import heapq\nfrom tlt.engine.request import Request\nfrom tlt.types import Key"
        ),
        plain("tlt.engine.request"),
        plain("tlt.types"),
    ]
    for rule in (imports_that_point_up, cycles, plain_modules_that_need_more, ray_outside_the_cluster, broad_excepts):
        assert list(rule(allowed)) == []


# ---- what benchmarks and examples import


def names_of(module: Module) -> set[str]:
    """Everything that `from module import …` may name."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def imports_of_nothing(path: str, source: str, modules: dict[str, Module]) -> Iterator[str]:
    """Names that a script imports from the package and that are not there: no test runs most of the scripts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tlt."):
            if node.module not in modules:
                yield f"{path}:{node.lineno}: no module {node.module}"
                continue
            for alias in node.names:
                if f"{node.module}.{alias.name}" not in modules and alias.name not in names_of(modules[node.module]):
                    yield f"{path}:{node.lineno}: no {alias.name} in {node.module}"


def test_what_benchmarks_and_examples_import_exists() -> None:
    modules = {module.name: module for module in PACKAGE}
    scripts = [path for folder in ("benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(scripts) > 20
    found = [line for path in scripts for line in imports_of_nothing(path.name, path.read_text("utf-8"), modules)]
    assert found == [], "\n".join(found)


def test_an_import_of_nothing_is_noticed() -> None:
    modules = {
        "tlt.a": plain("tlt.a", "class A: ...\nB: int = 1\n"),
        "tlt.b": plain("tlt.b"),
        "tlt.b.c": plain("tlt.b.c"),
    }
    source = "from tlt.a import A, B, C\nfrom tlt.b import c\nfrom tlt.d import D\nfrom numpy import x\n"
    assert list(imports_of_nothing("x.py", source, modules)) == ["x.py:1: no C in tlt.a", "x.py:3: no module tlt.d"]


# ---- the page that describes the house


def modules_listed(page: str) -> list[str]:
    return re.findall(r"^- `(tlt/[\w/]+\.py)`: .*\.$", page, flags=re.MULTILINE)


def test_the_structure_page_lists_what_is_there() -> None:
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "tlt").rglob("*.py") if path.read_text().strip()}
    listed = modules_listed((ROOT / "docs" / "structure.md").read_text("utf-8"))
    assert len(listed) == len(set(listed))
    assert set(listed) == there


def test_a_line_of_the_structure_page_is_recognised() -> None:
    page = "- `tlt/a.py`: Says a.\n- `tlt/b/c.py`:\n- tlt/d.py: no code marks.\n"
    assert modules_listed(page) == ["tlt/a.py"]


# ---- the public surface

SURFACE = {
    "Completion": "(key: tlt.types.Key, prompt_tokens: tuple[int, ...], tokens: tuple[int, ...], text: str, "
    "logprobs: tuple[float, ...], policy_logprobs: tuple[float, ...], "
    "finish_reason: Literal['eos', 'stop', 'length', 'abort'], policy_version: int, timing: tlt.types.Timing, "
    "drafted: bytes = b'', loss_mask: bytes = b'') -> None",
    "Engine": "(policy: tlt.policy.Policy, config: tlt.config.RunConfig) -> None",
    "Rollout": "(prompt: tlt.types.Prompt, completion: tlt.types.Completion, reward: float) -> None",
    "RunConfig": "(run: tlt.config.RunSettings = <factory>, model: tlt.config.ModelSettings = <factory>, "
    "task: tlt.config.TaskSettings = <factory>, sampling: tlt.types.SamplingParams = <factory>, "
    "eval: tlt.config.EvalSettings = <factory>, "
    "engine: tlt.config.EngineSettings = <factory>, spec: tlt.config.SpecSettings = <factory>, "
    "warmup: tlt.config.WarmupSettings = <factory>, draft: tlt.config.DraftSettings = <factory>, "
    "train: tlt.config.TrainSettings = <factory>, grpo: tlt.config.GrpoSettings = <factory>, "
    "drafting: tlt.config.DraftingSettings = <factory>, checkpoint: tlt.config.CheckpointSettings = <factory>, "
    "watch: tlt.config.WatchSettings = <factory>, cluster: tlt.config.ClusterSettings = <factory>) -> None",
    "SamplingParams": "(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, max_tokens: int = 256, "
    "stop: tuple[str, ...] = (), ignore_eos: bool = False, min_p: float = 0.0, "
    "stop_token_ids: tuple[int, ...] = ()) -> None",
    "load_config": "(recipe: str | pathlib.Path | tlt.config.RunConfig | None = None, flags: Sequence[str] = (), *, "
    "overrides: Mapping[str, Any] | None = None) -> tlt.config.RunConfig",
    "read_run": "(directory: str | pathlib.Path) -> tlt.watch.events.Run",
    "train": "(recipe: str | pathlib.Path | tlt.config.RunConfig, task: tlt.tasks.task.Task | None = None, *, "
    "overrides: Mapping[str, Any] | None = None, eval_task: tlt.tasks.task.Task | None = None, resume: bool = False, "
    "resume_from: str = '', open_fleet: 'OpenFleet | None' = None) -> tlt.watch.events.Run",
}


def test_public_names() -> None:
    assert sorted(tlt.__all__) == sorted([*SURFACE, "Drafter", "Task"])
    assert set(tlt.__all__) <= set(dir(tlt))
    for name in tlt.__all__:
        assert getattr(tlt, name).__name__ == name


@pytest.mark.parametrize("name", SURFACE)
def test_public_signatures(name: str) -> None:
    assert signature_of(getattr(tlt, name)) == SURFACE[name]


def signature_of(function: Callable[..., object]) -> str:
    text = str(inspect.signature(function))
    return text.replace("typing.", "").replace("collections.abc.", "").replace("pathlib._local.", "pathlib.")


METHODS = {
    "open": "(policy: str | pathlib.Path | tlt.config.RunConfig = 'tiny', **settings: Any) -> Self",
    "generate": "(self, prompts: ONE | Iterable[ONE], params: tlt.types.SamplingParams | None = None, *, "
    "chat: bool = False, seed: int | None = None, **sampling: Any) -> list[tlt.types.Completion]",
    "report": "(self) -> tlt.engine.engine.EngineReport",
    "weights_changed": "(self) -> None",
    "close": "(self) -> None",
}
ONE = "str | tlt.types.Prompt | Sequence[int] | Sequence[tlt.types.Message | Mapping[str, str]]"


def test_the_methods_of_the_engine() -> None:
    public = {name for name in vars(tlt.Engine) if not name.startswith("_")} - {"model"}  # a property
    found = {name: signature_of(getattr(tlt.Engine, name)) for name in public}
    assert found == {name: signature.replace("ONE", ONE) for name, signature in METHODS.items()}


def test_the_two_methods_of_a_task() -> None:
    methods = {name: list(inspect.signature(getattr(tlt.Task, name)).parameters) for name in ("sample", "reward")}
    assert methods == {"sample": ["self", "step", "count"], "reward": ["self", "prompt", "completion"]}


def test_an_unknown_public_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="it offers Completion"):
        _ = tlt.Trajectory
