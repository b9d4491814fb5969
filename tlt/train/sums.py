"""Metrics of a policy update, summed on the device and read once.

Always holds: `add` launches no kernel, and only `read` waits for the device. Sums are in float64. Knows names and
numbers; does not know losses or weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.model.device import upload


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Metrics of one update. `clipped`, `kl`, `entropy`, `mismatch_mean` and `weight_mean` are means per token."""

    tokens: int
    loss: float
    grad_norm: float
    clipped: float
    kl: float
    entropy: float
    mismatch_mean: float
    mismatch_max: float
    weight_mean: float


class Sums:
    """Collects numbers on the device without adding them, as each addition is a launch. `totals` sums them."""

    NAMES = ("loss", "tokens", "clipped", "kl", "entropy", "mismatch", "trust")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counted = dict.fromkeys(self.NAMES, 0)
        self._computed: dict[str, list[Tensor]] = {name: [] for name in self.NAMES}
        self._off: list[Tensor] = []

    def add(self, **values: Tensor | int) -> None:
        for name, value in values.items():
            if isinstance(value, int):
                self._counted[name] += value
            else:
                self._computed[name].append(value)

    def see_mismatch(self, off: Tensor) -> None:
        self._off.append(off)

    def totals(self) -> Tensor:
        """The sum for each name, on the device."""
        counted = upload(torch.tensor(list(self._counted.values()), dtype=torch.float64), self._device)
        nothing = counted.new_zeros(())
        computed = [torch.stack(parts).double().sum() if parts else nothing for parts in self._computed.values()]
        return counted + torch.stack(computed)

    def read(self, totals: Tensor, norm: Tensor) -> UpdateReport:
        worst = torch.stack(self._off).amax().double() if self._off else totals.new_zeros(())
        *sums, norm_value, worst_value = torch.cat((totals, torch.stack((norm.double(), worst)))).tolist()
        named = dict(zip(self.NAMES, sums, strict=True))
        tokens = max(1.0, named["tokens"])
        return UpdateReport(
            tokens=int(named["tokens"]),
            loss=named["loss"],
            grad_norm=norm_value,
            clipped=named["clipped"] / tokens,
            kl=named["kl"] / tokens,
            entropy=named["entropy"] / tokens,
            mismatch_mean=named["mismatch"] / tokens,
            mismatch_max=worst_value,
            weight_mean=named["trust"] / tokens,
        )
