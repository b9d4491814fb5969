"""Prompts' states on their way from prefill to the rows whose requests enter with them: a bounded memory.

A drafter that starts in the middle of a text it has never seen guesses badly; so what the policy computed of a prompt
is kept until the requests that share it have entered. Knows prefixes, states, and who enters where; knows nothing of
drafters.
"""
# S positions, F states of one

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
    """Rows that enter with one prefix, and where the states that were kept of it go: E rows, N = E · S places."""

    row_E: np.ndarray
    first: int  # position that has a state
    slot_S: np.ndarray
    token_ES: np.ndarray  # drawn from each state

    @classmethod
    def of(cls, prefix: tuple[int, ...], entered: Sequence[Entered], kept: int, window: int) -> "Recalled":
        first = len(prefix) - kept
        token_ES = np.empty((len(entered), kept), dtype=np.int64)
        if kept:
            token_ES[:, :-1] = prefix[first + 1 :]
            token_ES[:, -1] = [entry.token for entry in entered]
        slot_S = np.arange(first, len(prefix)) % window
        return cls(np.array([entry.row for entry in entered]), first, slot_S, token_ES)

    def columns(self) -> tuple[np.ndarray, ...]:
        """Rows, first positions; row, slot and token of every place."""
        rows, kept = self.token_ES.shape
        held_E = np.full(rows, self.first)
        return self.row_E, held_E, np.repeat(self.row_E, kept), np.tile(self.slot_S, rows), self.token_ES.ravel()
