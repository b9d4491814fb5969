"""The recipes that come with tlt, and the files they name: found by name from any directory.

They are in the wheel or in the checkout. A file of the user takes precedence. Knows names and paths; does not read
settings.
"""

import difflib
from pathlib import Path

from tlt.errors import ConfigError, shown_names

_PACKAGED = Path(__file__).parent / "data"  # the wheel puts recipes/ and their example files there
_HOME = _PACKAGED if (_PACKAGED / "recipes").is_dir() else Path(__file__).parents[1]
_SHORT = {"gsm8k": "gsm8k_1gpu"}


def recipe_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (_HOME / "recipes").glob("*.toml")))


def recipe_summary(name: str) -> str:
    """The first sentence of a shipped recipe."""
    comment = []
    for line in recipe_text(name).splitlines():
        if not line.startswith("# "):
            break
        comment.append(line.removeprefix("# "))
    first, dot, _ = " ".join(comment).partition(". ")
    return first.rstrip(".") + "." if dot or first else ""


def recipe_path(recipe: str | Path) -> Path:
    """The file at that path, or the shipped recipe of that name; the path itself where there is neither."""
    path = Path(recipe)
    name = str(recipe).replace("-", "_")
    name = _SHORT.get(name, name)
    if path.is_file() or name not in recipe_names():
        return path
    return _HOME / "recipes" / f"{name}.toml"


def recipe_text(name: str) -> str:
    path = recipe_path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, [*recipe_names(), *_SHORT], n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(recipe_names())}"
        raise ConfigError(f"no recipe {shown_names([name])} comes with tlt; {hint}")
    return path.read_text(encoding="utf-8")


def example_file(path: str | Path) -> Path:
    """The file at that path, or the example file of that path that is shipped with the recipes."""
    given = Path(path)
    shipped = _HOME / given
    return shipped if given.parts[:1] == ("examples",) and not given.exists() and shipped.exists() else given
