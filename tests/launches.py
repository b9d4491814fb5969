"""Counts what a GPU would be given to do: torch operations that compute, and launches of our kernels."""

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Views and room for results are free. What the interpreter does to run a kernel is one launch; kernels are counted
    only with a monkeypatch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        super().__init__()
        self._names: Counter[str] = Counter()
        self._in_kernel = False
        if monkeypatch is not None:
            self._count_kernels(monkeypatch)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._in_kernel and not func.is_view and "empty" not in func.name():
            self._names[func.name()] += 1
        return func(*args, **(kwargs or {}))

    def taken(self) -> Counter[str]:
        """Since this was last asked."""
        names, self._names = self._names, Counter()
        return names

    def _count_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import interpreter  # not installed everywhere

        run = interpreter.GridExecutor.__call__

        def counted(executor: Any, *given: Any, **options: Any) -> Any:
            self._names[executor.fn.__name__] += 1
            self._in_kernel = True
            try:
                return run(executor, *given, **options)
            finally:
                self._in_kernel = False

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
