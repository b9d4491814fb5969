"""How far a learned drafter is trusted: now and then, which β would have named the tokens drawn at its trees' roots.

`candidates.BetaCalibrator` counts; this module decides when to look and fetches the numbers from the device without
making the host wait for them.
"""
# N rows looked at, v draft tokens, B values of β

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.spec.candidates import BetaCalibrator, DrawKeys, beta_hits

MOST_ROWS = 16  # looked at
_EVERY = 16  # drafts between two looks


@dataclass(frozen=True, slots=True)
class Roots:
    """What the first rows' roots were named from, and before which tick."""

    logits_Nv: Tensor
    draws: DrawKeys
    ready_N: Tensor
    tick: int


class BetaProbe:
    """Now and then, which β would have named the tokens drawn at the roots; read when it has arrived."""

    def __init__(self) -> None:
        self.beta_calibrator = BetaCalibrator()
        self.roots: Roots | None = None
        self._drafts = 0
        self._coming: tuple[Tensor, torch.cuda.Event | None] | None = None

    def forget(self) -> None:
        """Rows have moved: what was grown in them belongs to others now."""
        self.roots = None

    def wants_roots(self) -> bool:
        self._drafts += 1
        return self._drafts % _EVERY == 1 and self._coming is None

    def root(self, logits_Rv: Tensor, draws: DrawKeys, ready_R: Tensor, tick: int) -> None:
        """`draws`: of the tokens before those that the roots name."""
        rows = len(draws.seed_N)
        parts = (draws.seed_N.clone(), draws.request_N.clone(), draws.position_N + 1, draws.temperature_N.clone())
        self.roots = Roots(logits_Rv[:rows].clone(), DrawKeys(*parts), ready_R[:rows].clone(), tick)  # the rows go on

    def look(self, token_N: Tensor, token_of_draft_v: Tensor | None) -> None:
        self._coming = fetch(self._counted(token_N, token_of_draft_v))

    def run_idle(self, logits_Rv: Tensor, draws: DrawKeys, ready_R: Tensor, token_of_draft_v: Tensor | None) -> None:
        """Once, for nobody: what is launched then is compiled, and nothing is learned."""
        self.root(logits_Rv, draws, ready_R, 0)
        self._counted(torch.zeros_like(draws.seed_N), token_of_draft_v)

    def _counted(self, token_N: Tensor, token_of_draft_v: Tensor | None) -> Tensor:
        """[B + 1]: how often each β would have been right, of how many."""
        roots, self.roots = self.roots, None
        assert roots is not None
        hits_NB = beta_hits(roots.logits_Nv, roots.draws, token_N, token_of_draft_v=token_of_draft_v)
        hits_B = (hits_NB & roots.ready_N[:, None]).sum(0)
        return torch.cat((hits_B, roots.ready_N.sum()[None]))

    def read(self) -> None:
        if self._coming is not None and _there(self._coming[1]):
            *hits, nodes = self._coming[0].tolist()
            self.beta_calibrator.observe(hits, nodes)
            self._coming = None


def _there(arrived: torch.cuda.Event | None) -> bool:
    return arrived is None or bool(arrived.query())  # type: ignore[no-untyped-call]


def fetch(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy of device numbers, on its way to the host, and the event of its arrival."""
    if not values.is_cuda:
        return values.clone(), None
    landed = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    landed.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(values.device))
    return landed, arrived
