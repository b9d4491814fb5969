"""Hidden states of prompts, from their prefill until the requests that share the prompt enter the batch.

A drafter that starts in the middle of a text it has not processed drafts badly, so the policy's states of a prompt are
kept for its requests, in bounded memory. Knows prefixes, states and rows; does not know drafters.
"""
# S positions, F numbers of one position's states

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
    """States of the last `window` positions of each prefix; the oldest prefixes are dropped beyond 512 MiB."""

    def __init__(self, window: int, none_SF: Tensor) -> None:
        self._window = window
        self._none_SF = none_SF  # an empty tensor of the same dtype, width and device
        self._kept: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._bytes = 0

    def add(self, prefix: tuple[int, ...], start: int, states_SF: Tensor) -> None:
        """Adds the states of the next chunk. A chunk that does not continue the one before replaces it."""
        before = self._kept.pop(prefix, self._none_SF)
        self._bytes -= before.nbytes
        useful = max(0, len(prefix) - self._window)  # earlier positions are outside every window
        if start > useful and len(before) == start - useful:
            states_SF = torch.cat((before, states_SF))
        else:
            states_SF = states_SF[max(0, useful - start) :].clone()  # a view would keep the whole pass alive
        self._kept[prefix] = states_SF
        self._bytes += states_SF.nbytes
        while self._bytes > _MOST_BYTES and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes

    def states(self, prefix: tuple[int, ...]) -> Tensor:
        """The states of a prefix's last positions; empty if none are kept."""
        return self._kept.get(prefix, self._none_SF)

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0


@dataclass(frozen=True, slots=True)
class EnteringRows:
    """Entering requests, grouped by prefix, and the kept states of each prefix. Only the states are on the device."""

    columns_7E: np.ndarray
    token_N: np.ndarray
    states: list[Tensor]

    @classmethod
    def of(cls, entered: Sequence[Entered], prompts: PromptStates) -> "EnteringRows":
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
        """Number of known positions → number of entering rows."""
        return Counter(self.columns_7E[2].tolist())

    def sent(self, device: torch.device) -> NewRows:
        """Sends the columns to the device in one copy, without waiting for it."""
        columns_7E, token_N = upload_columns([self.columns_7E.ravel(), self.token_N], device)
        return NewRows(columns_7E.view(self.columns_7E.shape), token_N, self.states, int(self.columns_7E[2].max()))
