"""Opens a policy from its directory, on the configured device and in the configured dtype.

A directory may hold an adapter alone (PEFT): then its policy is opened, and the adapter merged.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from tlt.config import ModelSettings
from tlt.errors import ConfigError
from tlt.model.config import ModelConfig
from tlt.model.hub import find_policy, hub_name
from tlt.model.parallel import Alone
from tlt.model.shapes import MODEL_SHAPES, shape_config
from tlt.model.transformer import Transformer
from tlt.model.weights import check_finite, load_policy, read_config
from tlt.text import Tokenizer
from tlt.train.adapter import is_adapter, merge_adapter, read_words

TINY_POLICY = Path(__file__).parent / "data" / "tiny_policy"


@dataclass(frozen=True, slots=True)
class Policy:
    model: Transformer
    tokenizer: Tokenizer
    source: Path  # its directory


def open_policy(settings: ModelSettings) -> Policy:
    """The policy at `settings.path`; "tiny" names the one shipped with tlt."""
    named, source = _named(settings), source_of(settings)
    device = _ready_device(settings)
    model = load_policy(source, dtype=_dtype(settings.dtype, device), device=device)
    if is_adapter(named):
        merge_adapter(model, named)
    check_finite(model, source)
    return Policy(model, Tokenizer.load(source, vocab=model.config.vocab), source)


def open_slice(settings: ModelSettings, parallel: Alone) -> Policy:
    """A rank's slice of the policy, without values: a trainer whose shards are read from the directory brings them."""
    named, source = _named(settings), source_of(settings)
    if is_adapter(named):
        raise ConfigError(
            f"model.path {settings.path} is an adapter, and cluster.shard and cluster.tensor_parallel are on; expected "
            "a policy with the adapter merged, as with both no worker holds a policy to merge it into"
        )
    device = _ready_device(settings)
    config = read_config(source)
    model = Transformer(config, dtype=_dtype(settings.dtype, device), device=device, parallel=parallel)
    return Policy(model, Tokenizer.load(source, vocab=config.vocab), source)


def _ready_device(settings: ModelSettings) -> torch.device:
    device = device_of(settings.device)
    if device.type == "cpu":
        # Flush denormals (below 1e-38) to zero, in this thread and its child threads. They are frequent in softmax and
        # its gradients, and a CPU computes with them about a hundred times slower.
        torch.set_flush_denormal(True)
    return device


def source_of(settings: ModelSettings) -> Path:
    """The directory of the policy and its tokenizer; a name on the Hugging Face hub is looked up in the local cache."""
    named = _named(settings)
    if not is_adapter(named):
        return named
    words = read_words(named)
    return find_policy(f"{words.base}@{words.revision}" if words.revision else words.base)


def base_name(settings: ModelSettings) -> tuple[str, str | None]:
    """What an adapter calls its policy: its name on the Hugging Face hub and the revision, or else its directory."""
    return hub_name(settings.path) or (str(source_of(settings).resolve()), None)


def _named(settings: ModelSettings) -> Path:
    """The directory of the policy, or of an adapter of it."""
    return TINY_POLICY if settings.path == "tiny" else find_policy(settings.path)


def config_of(settings: ModelSettings) -> ModelConfig:
    """The policy's configuration. `settings.path` may also be a name of `MODEL_SHAPES`, for which no file is needed."""
    if settings.path in MODEL_SHAPES and not Path(settings.path).exists():
        return shape_config(settings.path)
    return read_config(source_of(settings))


def device_of(name: str) -> torch.device:
    """`auto` takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"model.device is {name!r} but torch sees no GPU here; use cpu or auto")
    index = name.partition(":")[2]
    if index and int(index) >= torch.cuda.device_count():
        raise ConfigError(f"model.device is {name!r} but torch sees {torch.cuda.device_count()} GPUs here, from cuda:0")
    return torch.device(name)


def dtype_of(settings: ModelSettings) -> torch.dtype:
    """The policy's dtype on this machine."""
    return _dtype(settings.dtype, device_of(settings.device))


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "float64" and device.type == "cuda":
        raise ConfigError("model.dtype is 'float64' on a GPU, where attention has no kernel for it; use float32 or cpu")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
