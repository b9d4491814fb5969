"""Policies by the name they have on the Hugging Face hub, found in the cache that `hf download` fills.

Downloads nothing. A directory of that path always comes first. Names are `owner/name` or `owner/name@revision`.
"""

import os
import re
from pathlib import Path

from tlt.errors import ModelError

_NAME = re.compile(r"([\w.-]{1,96}/[\w.-]{1,96})(?:@([\w.-]{1,200}))?", re.ASCII)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def find_policy(path: str) -> Path:
    """The directory at `path`, or of the cached policy of that name. A ModelError says how to download one."""
    named = hub_name(path)
    if named is None:
        return Path(path)
    name, revision = named
    download = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    snapshot = _snapshot(cache_directory() / f"models--{name.replace('/', '--')}", revision or "main")
    if snapshot is None:
        raise ModelError(
            f"no model at {path}: expected a directory with config.json and safetensors weights, or a name in the "
            f"Hugging Face cache {cache_directory()}; to download a model of that name: {download}"
        )
    if not ((snapshot / "config.json").is_file() and any((snapshot / file).is_file() for file in _WEIGHTS)):
        raise ModelError(
            f"the download of {path} is incomplete: expected config.json and {' or '.join(_WEIGHTS)} in {snapshot}; "
            f"go on with {download}"
        )
    return snapshot


def hub_name(path: str) -> tuple[str, str | None] | None:
    """Name and revision, unless it is a path."""
    named = _NAME.fullmatch(path)
    return None if not named or path.startswith(".") or Path(path).exists() else (named[1], named[2])


def cache_directory() -> Path:
    """Where huggingface_hub keeps downloads, by the environment variables that it reads."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def _snapshot(repository: Path, revision: str) -> Path | None:
    """A branch or tag names its commit in a file under refs/; a commit names itself."""
    reference = repository / "refs" / revision
    commit = reference.read_text(encoding="ascii").strip() if reference.is_file() else revision
    if not re.fullmatch(r"[0-9a-f]{1,64}", commit):
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None
