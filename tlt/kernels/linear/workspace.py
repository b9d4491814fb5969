"""Scratch where the programs that share one output tile of a linear layer leave their partial sums.

What always holds: the counters are all zero between kernels (the kernels reset them).
Knows sizes; knows nothing of how a kernel uses them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.kernels.linear.plan import Config


@dataclass(frozen=True)
class Workspace:
    """Scratch for split-K. Kernels that may run at the same time (two streams) need one each."""

    partials: Tensor
    counters: Tensor

    @classmethod
    def on(cls, device: torch.device, floats: int = 1 << 23, tiles: int = 1 << 14) -> "Workspace":
        return cls(
            torch.empty(floats, dtype=torch.float32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
        )

    def check(self, config: Config, programs: int, gated: bool) -> None:
        """One slot per program: its tile (two when gated), then its rows' sums of squares."""
        floats = programs * (config.block_m * config.block_n * (2 if gated else 1) + config.block_m)
        tiles = programs // config.split_k
        if floats > self.partials.numel() or tiles > self.counters.numel():
            raise ValueError(
                f"{config} needs {floats} floats and {tiles} counters of workspace, which has "
                f"{self.partials.numel()} and {self.counters.numel()}; use less split_k or a larger Workspace"
            )

    def rows(self, config: Config, tiles_n: int, gated: bool) -> int:
        """How many rows a layer of so many output tiles can have at once; a multiple of a tile's."""
        slot = config.block_m * config.block_n * (2 if gated else 1) + config.block_m
        tiles = min(self.partials.numel() // (slot * config.split_k), self.counters.numel())
        if tiles < tiles_n:
            raise ValueError(f"{config} needs {tiles_n} tiles of workspace for a few rows, which has room for {tiles}")
        return tiles // tiles_n * config.block_m


_WORKSPACES: dict[torch.device, Workspace] = {}


def shared_workspace(device: torch.device) -> Workspace:
    """The device's own workspace. The first call must come before any graph capture: graphs keep its address."""
    if device == torch.device("cuda"):  # no index: name it as a tensor does
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _WORKSPACES:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the split-K workspace was first asked for during graph capture, where it cannot be created; "
                "run the layer once, or call shared_workspace(device), before capturing"
            )
        _WORKSPACES[device] = Workspace.on(device)
    return _WORKSPACES[device]
