"""What a learned drafter grew for one tick, as the host sees it: drafts by request, before anything was pruned.

The copy arrives by itself; whoever asks before waits for it. Requests that came since have no draft.
"""
# R rows, L nodes grown

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from tlt.spec.shape import EMPTY, Draft, Shape
from tlt.types import Key

NOT_READY = -2  # first parent of a row from which nothing can be grown yet


@dataclass(slots=True)
class BuiltTrees:
    shape: Shape
    tick: int  # before which it was grown
    row_of: Mapping[Key, int]  # when it was grown
    packed_R3L: np.ndarray  # int32 on the host: tokens, parents, bits of scores
    arrived: torch.cuda.Event | None
    cleared: set[Key] = field(default_factory=set)  # who was preempted and is back at once: nothing is verified

    def draft(self, key: Key) -> Draft:
        row = self.row_of.get(key)
        if row is None or key in self.cleared:
            return EMPTY
        if self.arrived is not None:
            self.arrived.synchronize()
            self.arrived = None
        packed_3L = self.packed_R3L[row]
        tokens, parents, _ = packed_3L.tolist()
        if parents[0] == NOT_READY:
            return EMPTY
        chances = np.exp(packed_3L[2].view(np.float32))
        return Draft(tuple(tokens), tuple(parents), tuple(chances.tolist()))
