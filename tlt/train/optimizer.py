"""Optimizer and schedule: AdamW on float32 master weights, and a learning rate with warm-up and optional cosine decay.

Always holds: half-precision weights have a master copy, so that small updates are not rounded away; weights in float32
or wider are their own masters. Gradients of several passes are summed in the masters' precision. Weights change in
`step` only, and in place: other holders of the tensors see the update. A weight may be a shard (DTensor); copies and
sums use its local part. Does not know losses, rows or models.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tlt.errors import CheckpointError
from tlt.train.restore import expect_keys, expect_list, expect_tensors

_ADDED_AT_ONCE = 2**25  # numbers; in float32 an eighth of a gibibyte
FINAL_SHARE = 0.1  # fraction of the peak learning rate at the end of the cosine


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rates by step."""

    peak: float
    warmup_steps: int = 0  # steps over which the rate rises linearly
    decay_steps: int = 0  # step at which a cosine reaches a tenth of the peak; 0: the rate is constant after warm-up


def learning_rate(step: float, schedule: Schedule) -> float:
    """The rate of step `step`, counted from 0. Fractions interpolate, for schedules that follow time."""
    if step < schedule.warmup_steps:
        return schedule.peak * (step + 1) / schedule.warmup_steps
    if not schedule.decay_steps:
        return schedule.peak
    falling = max(1, schedule.decay_steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / falling)
    return schedule.peak * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))


class MasterAdamW:
    """AdamW in float32 or wider. Weight decay applies to matrices, not to vectors.

    Call `gather` after each backward pass. After the last one call `norm`, then either `step` or `forget`. No method
    waits for the device.
    """

    def __init__(self, model: nn.Module, *, weight_decay: float, betas: tuple[float, float] = (0.9, 0.95)) -> None:
        named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._names, self._weights = list(named), list(named.values())
        self._masters = [self._master_of(weight) for weight in self._weights]
        # tensors whose gradient is the sum over passes
        self._sums = [self._sum_of(weight, m) for weight, m in zip(self._weights, self._masters, strict=True)]
        matrices = [master for master in self._masters if master.dim() > 1]
        vectors = [master for master in self._masters if master.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, fused=True)

    def _master_of(self, weight: Tensor) -> Tensor:
        wide = wide_dtype(weight)
        return weight if weight.dtype == wide else weight.detach().to(wide).clone().requires_grad_()

    def _sum_of(self, weight: Tensor, master: Tensor) -> Tensor:
        return master

    @torch.no_grad()
    def gather(self) -> None:
        """Adds the weights' gradients to the sums, as sums in half precision would lose digits."""
        first, later = _Sums(), _Sums()
        for weight, held in zip(self._weights, self._sums, strict=True):
            if held is weight or weight.grad is None:
                continue
            (later if held.grad is not None else first).add(weight, held)
            weight.grad = None
        if first.grads:
            torch._foreach_copy_(first.sums, first.grads)
        later.add_up()

    def gradients(self) -> list[Tensor]:
        """The gathered gradients, zeros where there is none. May be changed in place before `norm`."""
        for held in self._sums:
            if held.grad is None:
                held.grad = torch.zeros_like(held)
        return [held.grad for held in self._sums if held.grad is not None]

    def norm(self) -> Tensor:
        """The norm of the gathered gradients, on the device."""
        norm = torch.nn.utils.get_total_norm([held.grad for held in self._sums if held.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm  # of all shards

    def step(self, rate: float, clip: float, norm: Tensor, unless: Tensor | None = None) -> None:
        """One update with the gathered gradients, scaled down if their norm is above `clip`.

        `unless`: a number on the device. If it is 1, the device skips the update; the host does not wait for it.
        """
        torch.nn.utils.clip_grads_with_norm_(self._sums, clip, norm)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._advance(unless)
        self.forget()

    def _advance(self, unless: Tensor | None) -> None:
        self._adam.found_inf = unless  # type: ignore[attr-defined]  # torch's attribute for loss scaling
        self._adam.step()
        self._write_back()

    def forget(self) -> None:
        """Drops the gathered gradients."""
        for tensor in (*self._sums, *self._weights):
            tensor.grad = None

    def update(self, rate: float, clip: float) -> Tensor:
        """`norm` and `step` in one call. Returns the norm."""
        norm = self.norm()
        self.step(rate, clip, norm)
        return norm

    @torch.no_grad()
    def change(self, change: Callable[[Sequence[Tensor]], bool]) -> None:
        """Lets `change` write into the masters; if it did, the weights follow."""
        if change([master.detach() for master in self._masters]):
            self._write_back()

    def state(self) -> dict[str, Any]:
        """The state that an exact continuation needs besides the weights. Live tensors: copy them to keep them."""
        masters = [m.detach() for w, m in zip(self._weights, self._masters, strict=True) if m.dtype != w.dtype]
        return {"masters": masters, "adam": self._adam.state_dict()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`; weight decay stays as configured. Half-precision weights are written from their masters."""
        self._expect(state)
        pairs = list(zip(self._weights, self._masters, strict=True))
        for master, saved in zip([m for w, m in pairs if m.dtype != w.dtype], state["masters"], strict=True):
            master.copy_(saved)
        for weight, master in pairs:
            if master is not weight and master.dtype == weight.dtype:
                master.copy_(weight)
        decays = [group["weight_decay"] for group in self._adam.param_groups]
        self._adam.load_state_dict(dict(state["adam"]))
        for group, decay in zip(self._adam.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        self.forget()
        self._write_back()

    def _expect(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError unless the state fits the weights."""
        expect_keys(state, ("masters", "adam"), "the optimizer's state")
        expect_keys(state["adam"], ("state", "param_groups"), "Adam's state")
        saved, ours = (
            [len(group["params"]) for group in adam["param_groups"]]
            for adam in (state["adam"], self._adam.state_dict())
        )
        if saved != ours:
            raise CheckpointError(f"Adam's state is of {saved} matrices and vectors, expected {ours}")
        named = list(zip(self._names, self._weights, self._masters, strict=True))
        expect_list(
            state["masters"], {n: m for n, w, m in named if m.dtype != w.dtype}, "float32 copies of the weights"
        )
        names = {id(master): name for name, _, master in named}
        moments = state["adam"]["state"]
        if not moments:
            return  # saved before the first step
        masters = [master for group in self._adam.param_groups for master in group["params"]]
        for index, master in enumerate(masters):
            what = f"Adam's moments of {names[id(master)]}"
            expect_keys(moments, (index,), what)
            expect_keys(moments[index], ("step", "exp_avg", "exp_avg_sq"), what)
            wanted = {"exp_avg": master, "exp_avg_sq": master}
            expect_tensors({name: moments[index][name] for name in wanted}, wanted, what)

    @torch.no_grad()
    def _write_back(self) -> None:
        halves = [(w, m) for w, m in zip(self._weights, self._masters, strict=True) if m is not w]
        if halves:
            torch._foreach_copy_([_local(weight) for weight, _ in halves], [_local(master) for _, master in halves])


class _Sums:
    """Gradients and the sums they are added to."""

    def __init__(self) -> None:
        self.grads: list[Tensor] = []
        self.sums: list[Tensor] = []

    def add(self, weight: Tensor, master: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = torch.empty_like(master)
        self.grads.append(_local(weight.grad))
        self.sums.append(_local(master.grad))

    def add_up(self) -> None:
        """Converts gradients in batches first: `_foreach_add_` on mixed dtypes would launch one kernel per tensor."""
        start = numbers = 0
        for end, grad in enumerate(self.grads, start=1):
            numbers += grad.numel()
            if numbers >= _ADDED_AT_ONCE or end == len(self.grads):
                alike = [torch.empty_like(one) for one in self.sums[start:end]]
                torch._foreach_copy_(alike, self.grads[start:end])
                torch._foreach_add_(self.sums[start:end], alike)
                start, numbers = end, 0


def _local(tensor: Tensor) -> Tensor:
    """The tensor's local memory as a plain tensor. DTensor has no rule for `_foreach_copy_`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wide_dtype(weight: Tensor) -> torch.dtype:
    """Of a weight's master: float32 or wider."""
    return torch.promote_types(weight.dtype, torch.float32)
