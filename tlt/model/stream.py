"""Writing safetensors files tensor by tensor: no more than one of them is in host memory at a time.

Always holds: `safetensors` reads what is written here. Does not know what the tensors are.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

_WORDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNED = 8  # bytes, to which the header is padded

Read = Callable[[str], Tensor]


def write_safetensors(file: Path, tensors: Mapping[str, Tensor], read: Read | None = None) -> None:
    """Writes a file. `read` gives the values by name, where `tensors` only has shapes and dtypes ("meta")."""
    read = read or tensors.__getitem__
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    words = json.dumps(header, separators=(",", ":")).encode()
    words += b" " * (-len(words) % _ALIGNED)
    with file.open("wb") as out:
        out.write(len(words).to_bytes(8, "little") + words)
        for name, tensor in tensors.items():
            values = read(name).detach().cpu().contiguous()
            if values.nbytes != tensor.nbytes:
                raise ValueError(f"{name} has {values.nbytes} bytes, expected {tensor.nbytes}")
            out.write(values.reshape(-1).view(torch.uint8).numpy().data)
