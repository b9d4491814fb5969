"""Prompts' states on their way from prefill to the rows whose requests enter with them: a bounded memory.

A drafter that starts in the middle of a text it has never seen guesses badly; so what the policy computed of a prompt
is kept until the requests that share it have entered. Knows prefixes, states, and who enters where; knows nothing of
drafters.
"""
# S positions, F states of one

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tlt.kernels.batch_state.reference import NewRows
from tlt.model.device import upload_columns
from tlt.spec.drafter import Entered

_MOST_BYTES = 2**29


class PromptStates:
    """States of prefixes whose requests may still enter, those of the last `window` positions; a bounded memory."""

    def __init__(self, window: int, none_SF: Tensor) -> None:
        self._window = window
        self._none_SF = none_SF  # an empty tensor of their kind
        self._kept: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._bytes = 0

    def add(self, prefix: tuple[int, ...], start: int, states_SF: Tensor) -> None:
        """The next piece. A piece that does not go on from the one before starts anew."""
        before = self._kept.pop(prefix, self._none_SF)
        self._bytes -= before.nbytes
        useful = max(0, len(prefix) - self._window)  # positions before are beyond every window
        if start > useful and len(before) == start - useful:
            states_SF = torch.cat((before, states_SF))
        else:
            states_SF = states_SF[max(0, useful - start) :].clone()  # a view would keep all of them alive
        self._kept[prefix] = states_SF
        self._bytes += states_SF.nbytes
        while self._bytes > _MOST_BYTES and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes

    def states(self, prefix: tuple[int, ...]) -> Tensor:
        """Of its last positions; none if they were not kept."""
        return self._kept.get(prefix, self._none_SF)

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0


@dataclass(frozen=True, slots=True)
class Recalled:
    """Who enters where, prefix by prefix, and what was kept of each: still on the host, but for the states."""

    columns_7E: np.ndarray
    token_N: np.ndarray
    states: list[Tensor]

    @classmethod
    def of(cls, entered: Sequence[Entered], prompts: PromptStates) -> "Recalled":
        together: dict[tuple[int, ...], list[Entered]] = {}
        for entry in entered:
            together.setdefault(entry.prefix, []).append(entry)
        columns, tokens, states = list[tuple[int, ...]](), list[int](), list[Tensor]()
        for own, (prefix, sharing) in enumerate(together.items()):
            kept = prompts.states(prefix)
            first, place = len(prefix) - len(kept), (len(kept), len(tokens))
            columns += [(entry.row, first, *place, entry.token, own, kept.data_ptr()) for entry in sharing]
            tokens += [*prefix[first + 1 :], 0] if len(kept) else []
            states.append(kept)
        return cls(np.array(columns, dtype=np.int64).T, np.array(tokens, dtype=np.int64), states)

    @property
    def rows_by_positions(self) -> Counter[int]:
        """How many newcomers have so many that are known."""
        return Counter(self.columns_7E[2].tolist())

    def sent(self, device: torch.device) -> NewRows:
        """In one copy, without waiting for it."""
        columns_7E, token_N = upload_columns([self.columns_7E.ravel(), self.token_N], device)
        return NewRows(columns_7E.view(self.columns_7E.shape), token_N, self.states, int(self.columns_7E[2].max()))
