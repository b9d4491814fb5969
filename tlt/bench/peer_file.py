"""Figures of another engine, from a file: compared only where model, device and cap are equal, with their source.

A file names the engine, when, where and how it was measured, and whether in the same lease: on the same machine, right
before or after. Without such a file nothing is compared. Its contents go into the record.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.errors import ConfigError, shown
from tlt.model.config import ModelConfig
from tlt.strict_json import read_object

SHORT_PROMPT = 512  # tokens: a peer's steps are measured after shorter prompts
_SIZES = ("hidden", "layers", "mlp", "vocab")
_CURE = "expected a file like those in benchmarks/peers"


@dataclass(frozen=True, slots=True)
class PeerFile:
    """One engine's figures for one model on one device."""

    engine: str  # and its version
    date: str
    device: str
    versions: Mapping[str, Any]  # of software that affects the figures
    method: str
    same_lease: bool
    model: Mapping[str, int]  # its sizes
    step_ms: Mapping[int, float]  # batch → decode step, prompts shorter than SHORT_PROMPT
    tokens_per_s: Mapping[int, float]  # number of prompts → rate with completions of natural length
    cap: int  # most tokens of these completions
    content: Mapping[str, Any]  # of the file, for the record

    @property
    def label(self) -> str:
        """The source, shown beside every figure."""
        where = "in the same lease" if self.same_lease else "NOT in the same lease"
        return f"{self.engine}, measured {self.date}, {where}"

    def check(self, device_name: str, config: ModelConfig, file: Path) -> None:
        """Raises ConfigError if device or model differ from ours."""
        if self.device not in device_name:
            raise ConfigError(f"--peer {file} is of a {self.device}, and this is a {device_name}; leave --peer out")
        ours = {name: getattr(config, name) for name in _SIZES}
        if dict(self.model) != ours:
            raise ConfigError(f"--peer {file} is of a model with {dict(self.model)}, and this one has {ours}")


def read_peer(file: Path) -> PeerFile:
    content = read_object(file, ConfigError, _CURE)

    def need(name: str, kind: type | tuple[type, ...], what: str) -> Any:
        value = content.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool) or value in ("", {}):
            raise ConfigError(f"{file}: {name} is {shown(value)}; expected {what}; {_CURE}")
        return value

    return PeerFile(
        engine=need("engine", str, "the engine's name and version"),
        date=need("date", str, "when it was measured"),
        device=need("device", str, "the device's name"),
        versions=need("versions", dict, "versions by name"),
        method=need("method", str, "how it was measured"),
        same_lease=need("same_lease", bool, "true or false"),
        model=_model(need, file),
        step_ms=_figures(need, "step_ms", file),
        tokens_per_s=_figures(need, "tokens_per_s", file),
        cap=need("cap", int, "the most tokens of an answer"),
        content=content,
    )


_Need = Callable[[str, type | tuple[type, ...], str], Any]


def _model(need: _Need, file: Path) -> dict[str, int]:
    found = need("model", dict, f"an object of {', '.join(_SIZES)}")
    if found.keys() != set(_SIZES) or not all(type(size) is int for size in found.values()):
        raise ConfigError(f"{file}: model is {shown(found)}; expected whole numbers for {', '.join(_SIZES)}")
    return dict(found)


def _figures(need: _Need, name: str, file: Path) -> dict[int, float]:
    """Figures by whole numbers, which are text in JSON."""
    found = need(name, dict, "an object of figures by number")
    for number, figure in found.items():
        if not number.isdecimal() or type(figure) not in (int, float) or not 0 < figure < float("inf"):
            raise ConfigError(f"{file}: {name} has {number!r}: {shown(figure)}; expected a positive figure by number")
    return {int(number): float(figure) for number, figure in found.items()}
