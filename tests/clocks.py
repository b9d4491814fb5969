"""A clock for tests: time passes only where the test says so."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def used_by(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def passes_in(self, monkeypatch: pytest.MonkeyPatch, owner: type | ModuleType, name: str, seconds: float) -> None:
        """So many seconds in every call of this method or function."""
        work: Callable[..., Any] = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            self.now += seconds
            return work(*given, **named)

        monkeypatch.setattr(owner, name, timed)
