"""Options of `tlt serve`: address, API key and limits. Imports nothing heavy, so that they are checked first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tlt.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `tlt serve` that are not knobs of a run."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    name: str = ""  # of the policy in /v1/models; "": as it was opened
    api_key: str = ""  # "": calls need no key
    queue: int = 2048  # completions running or waiting, at most
    body_mib: int = 16  # largest request body; weights may be larger
    logprobs: Literal["raw", "processed"] = "raw"  # raw: of the policy; processed: with temperature and filters


_BOUNDS = {"port": (0, 65535), "queue": (1, 10**6)}


def read_options(given: Mapping[str, str], api_key: str) -> ServeOptions:
    """From the texts of a command line."""
    values: dict[str, Any] = dict(given)
    for name, (low, high) in _BOUNDS.items():
        text = given.get(name, str(low))
        if not (text.isdecimal() and len(text) <= 9 and low <= int(text) <= high):
            raise ConfigError(f"--{name} is {shown(text)}; expected a whole number from {low} to {high}")
        if name in given:
            values[name] = int(text)
    if given.get("logprobs", "raw") not in ("raw", "processed"):
        raise ConfigError(f"--logprobs is {shown(given['logprobs'])}; expected raw or processed")
    return ServeOptions(**values, api_key=api_key)
