"""Between host and device: tensors sent and numbers fetched without making either wait for the other.

What always holds: sending queues behind nothing but what was launched before it, and the host goes on at once; fetching
waits for what computed the numbers, not for what was launched after. Knows tensors; knows nothing of what they mean.
"""

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device | str) -> Tensor:
    """Sends a host tensor to a device without waiting for what the device is still doing."""
    device = torch.device(device)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class Reading:
    """Numbers on their way from the device. Asking for them waits for what computed them, not for what came after."""

    def __init__(self, numbers: Tensor) -> None:
        self._host = numbers
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    def values(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
