"""The public names of tlt, each imported when it is first asked for, so that `import tlt` costs nothing."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlt.config import RunConfig
    from tlt.library import Engine, train
    from tlt.recipe import load_config
    from tlt.spec.drafter import Drafter
    from tlt.tasks.task import Task
    from tlt.types import Completion, Rollout, SamplingParams
    from tlt.watch.events import read_run

__version__ = "0.1.0.dev0"
__all__ = [
    "Completion",
    "Drafter",
    "Engine",
    "Rollout",
    "RunConfig",
    "SamplingParams",
    "Task",
    "load_config",
    "read_run",
    "train",
]

_HOMES = {
    "Completion": "tlt.types",
    "Drafter": "tlt.spec.drafter",
    "Engine": "tlt.library",
    "Rollout": "tlt.types",
    "RunConfig": "tlt.config",
    "SamplingParams": "tlt.types",
    "Task": "tlt.tasks.task",
    "load_config": "tlt.recipe",
    "read_run": "tlt.watch.events",
    "train": "tlt.library",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tlt' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """`tlt.train` is the function. The sub-package of that name, once imported, would take its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "train":
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
