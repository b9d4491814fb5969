"""Hugging Face directories in and out: every tensor has one name there and one place here.

Loading is strict: a missing, unexpected or misshapen tensor is an error that names it; nothing is left at random.
Saving writes the names and the config that were read, with the dtype that is written: a round trip in one dtype gives
equal files in content.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from os.path import isfile
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlt.errors import ModelError, check_reachable, shown
from tlt.model.config import ModelConfig
from tlt.model.stream import Read, write_safetensors
from tlt.model.transformer import Transformer
from tlt.strict_json import read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 1000**3
# Tables older checkpoints carry and everyone computes afresh.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
_DTYPE_KEYS = ("torch_dtype", "dtype")  # every version of transformers reads the first, newer ones write the second
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pt", ".pth")

_DTYPES = (
    "BF16",
    "F16",
    "F32",
    "F64",
)  # of weights, as safetensors calls them: the others are quantized, or no numbers
_HEAD = "lm_head.weight"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file's tensor lives: rows [start, start + rows) of one of our parameters."""

    parameter: str
    start: int
    shape: tuple[int, ...]

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors[self.parameter][self.start : self.start + self.shape[0]]


def places(config: ModelConfig) -> dict[str, Place]:
    """Hugging Face name → place, for every tensor of a policy."""
    D, M, d = config.hidden, config.mlp, config.head_dim
    q, kv = config.heads * d, config.kv_heads * d
    found = {
        "model.embed_tokens.weight": Place("embed", 0, (config.vocab, D)),
        "model.norm.weight": Place("norm", 0, (D,)),
    }
    if not config.tied:
        found[_HEAD] = Place("head", 0, (config.vocab, D))
    for i in range(config.layers):
        hf, ours = f"model.layers.{i}.", f"blocks.{i}."

        def put(name: str, parameter: str, start: int, *shape: int, hf: str = hf, ours: str = ours) -> None:
            found[hf + name] = Place(ours + parameter, start, shape)

        put("input_layernorm.weight", "attn_norm", 0, D)
        put("post_attention_layernorm.weight", "mlp_norm", 0, D)
        for name, start, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
            put(f"self_attn.{name}_proj.weight", "qkv", start, rows, D)
            if config.qkv_bias:
                put(f"self_attn.{name}_proj.bias", "qkv_bias", start, rows)
        put("self_attn.o_proj.weight", "o", 0, D, q)
        if config.o_bias:
            put("self_attn.o_proj.bias", "o_bias", 0, D)
        if config.qk_norm:
            put("self_attn.q_norm.weight", "q_norm", 0, d)
            put("self_attn.k_norm.weight", "k_norm", 0, d)
        for name, parameter, start, shape in (
            ("gate", "gate_up", 0, (M, D)),
            ("up", "gate_up", M, (M, D)),
            ("down", "down", 0, (D, M)),
        ):
            put(f"mlp.{name}_proj.weight", parameter, start, *shape)
            if config.mlp_bias:
                put(f"mlp.{name}_proj.bias", f"{parameter}_bias", start, shape[0])
    return found


def weights_count(config: ModelConfig) -> int:
    """Numbers in a policy's weights."""
    return sum(prod(place.shape) for place in places(config).values())


def read_config(path: Path | str) -> ModelConfig:
    file = Path(path) / "config.json"
    check_reachable(file, ModelError)
    if not isfile(file):
        raise ModelError(f"no model at {path}: expected a directory with config.json and safetensors weights")
    source = read_object(file, ModelError, "copy the model again")
    try:
        return ModelConfig.from_hf(source)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None


def load_policy(
    path: Path | str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """A policy with the weights of a Hugging Face directory, converted to `dtype`."""
    directory = Path(path)
    config = read_config(directory)
    check_headers(config, directory)  # before memory is taken for what the config promises
    model = Transformer(config, dtype=dtype, device=device)
    load_tensors(model, read_tensors(directory), origin=str(directory))
    return model


@torch.no_grad()
def load_tensors(model: Transformer, tensors: Iterator[tuple[str, Tensor]], *, origin: str) -> None:
    """Copies (name, tensor) pairs into the model; raises unless they are exactly what the model needs."""
    wanted = places(model.config)
    ours = dict(model.named_parameters())
    seen: set[str] = set()
    problems: list[str] = []
    tied_head: Tensor | None = None
    for name, tensor in tensors:
        if name.endswith(_IGNORED_SUFFIX):
            continue
        seen.add(name)
        problem = _misfit(name, tuple(tensor.shape), model.config, wanted)
        if problem:
            problems.append(problem)
        elif name in wanted:
            wanted[name].of(ours).copy_(tensor)
        else:
            tied_head = tensor  # some writers store it twice: fine as long as it is the embedding
    problems += [f"missing {name}" for name in wanted if name not in seen]
    if tied_head is not None and not problems and not _same(tied_head, model.embed):
        problems.append("lm_head.weight differs from the embedding although tie_word_embeddings is true")
    if problems:
        raise ModelError(_complaint(origin, problems))


@torch.no_grad()
def check_finite(model: Transformer, origin: Path) -> None:
    """Raises if a weight is NaN or infinite, by one sum of each tensor and one look at all of them."""
    tensors = hf_tensors(model)
    sums = [tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors.values()]
    bad = [name for name, finite in zip(tensors, torch.stack(sums).isfinite().tolist(), strict=True) if not finite]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ModelError(
            f"{origin}: {bad[0]}{more} holds NaN or infinite values; expected numbers: copy the weights again, or use "
            "an earlier checkpoint"
        )


@torch.no_grad()
def copy_some(model: Transformer, tensors: Mapping[str, Tensor]) -> None:
    """Copies tensors into the model, which may be some of those it has. None is copied where one does not fit."""
    wanted, ours = places(model.config), dict(model.named_parameters())
    problems = [_misfit(name, tuple(tensor.shape), model.config, wanted) for name, tensor in tensors.items()]
    problems = [problem for problem in problems if problem]
    if problems:
        raise ModelError(_complaint("the tensors", problems))
    for name in tensors.keys() & wanted.keys():  # else the head of a policy whose embedding it is
        wanted[name].of(ours).copy_(tensors[name])


@torch.no_grad()
def load_some(model: Transformer, file: Path) -> None:
    """Copies a safetensors file's tensors into the model, which may be some of those it has. None is copied where one
    does not fit."""
    wanted, ours = places(model.config), dict(model.named_parameters())
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            headers = {name: _header(opened, name) for name in names}
            problems = [_misfit(name, shape, model.config, wanted) for name, (_, shape) in headers.items()]
            problems += [f"{name} has dtype {dtype}" for name, (dtype, _) in headers.items() if dtype not in _DTYPES]
            problems = [problem for problem in problems if problem]
            if problems or not names:
                raise ModelError(_complaint("the tensors", problems or ["there are none"]))
            for name in names:
                if name in wanted:  # else the head of a policy whose embedding it is
                    wanted[name].of(ours).copy_(opened.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"the tensors cannot be read as safetensors: {error}; send them again") from error


def check_headers(config: ModelConfig, directory: Path) -> None:
    """The names, shapes and dtypes that `load_tensors` will meet, from the files' headers alone."""
    wanted = places(config)
    seen: set[str] = set()
    problems: list[str] = []
    for name, (dtype, shape) in _each(directory, _header):
        if name.endswith(_IGNORED_SUFFIX):
            continue
        seen.add(name)
        if dtype not in _DTYPES:
            problems.append(f"{name} has dtype {dtype}, expected one of {', '.join(_DTYPES)}")
        problem = _misfit(name, shape, config, wanted)
        problems += [problem] if problem else []
    problems += [f"missing {name}" for name in wanted if name not in seen]
    if problems:
        raise ModelError(_complaint(str(directory), problems))


def _misfit(name: str, shape: tuple[int, ...], config: ModelConfig, wanted: Mapping[str, Place]) -> str:
    """What is wrong with a file's tensor; nothing of one that the model needs, or of a second copy of the embedding."""
    if name == _HEAD and config.tied:
        return ""
    if name not in wanted:
        return f"unexpected {name}"
    if shape != wanted[name].shape:
        return f"{name} has shape {list(shape)}, expected {list(wanted[name].shape)}"
    return ""


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the directory's safetensors files, one at a time."""
    return _each(directory, lambda opened, name: opened.get_tensor(name))


def _header(opened: Any, name: str) -> tuple[str, tuple[int, ...]]:
    part = opened.get_slice(name)
    return part.get_dtype(), tuple(part.get_shape())


def _each(directory: Path, read: Callable[[Any, str], T]) -> Iterator[tuple[str, T]]:
    """The names in the directory's safetensors files, each once, with what `read` takes from the open file."""
    seen: set[str] = set()
    for file in _weight_files(directory):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    if name in seen:
                        raise ModelError(f"{file} holds {name}, as another file of {directory} does; keep one of them")
                    seen.add(name)
                    yield name, read(opened, name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read as safetensors: {error}; copy it again") from error


def save_policy(model: Transformer, path: Path | str, *, tokenizer_from: Path | str | None = None) -> None:
    """Writes a Hugging Face directory; `tokenizer_from` names the directory whose other files come along untouched."""
    write_policy(hf_tensors(model), model.config, path, tokenizer_from=tokenizer_from)


def write_policy(
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    path: Path | str,
    *,
    tokenizer_from: Path | str | None = None,
) -> None:
    """As `save_policy`, from the tensors of `hf_tensors` or copies of them."""
    write_companions(config, next(iter(tensors.values())).dtype, path, tokenizer_from=tokenizer_from)
    write_tensors(tensors, Path(path))


def write_companions(
    config: ModelConfig, dtype: torch.dtype, path: Path | str, *, tokenizer_from: Path | str | None = None
) -> None:
    """Everything of a Hugging Face directory but the weights."""
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    if tokenizer_from is not None:
        _copy_companions(Path(tokenizer_from), directory)
    words = {**config.source, **_dtype_words(dtype, config.source)}
    (directory / "config.json").write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")


def _dtype_words(dtype: torch.dtype, source: Mapping[str, Any]) -> dict[str, str]:
    """What is written, not what was read: transformers and vLLM load weights in the dtype that config.json names."""
    word = str(dtype).removeprefix("torch.")
    return dict.fromkeys([key for key in _DTYPE_KEYS if key in source] or _DTYPE_KEYS[:1], word)


def hf_tensors(model: Transformer) -> dict[str, Tensor]:
    """The policy's own tensors, or parts of them, under Hugging Face's names."""
    ours = dict(model.named_parameters())
    return {name: place.of(ours).detach() for name, place in places(model.local).items()}


def write_tensors(
    tensors: Mapping[str, Tensor], directory: Path, shard_bytes: int = SHARD_BYTES, read: Read | None = None
) -> None:
    """One file, or shards with an index where the weights exceed `shard_bytes`. `read`: see `write_safetensors`."""
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        write_safetensors(directory / SINGLE, shards[0], read)
        (directory / INDEX).unlink(missing_ok=True)  # of an earlier save: readers would follow it
        return
    index: dict[str, Any] = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": {}}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / name, shard, read)
        index["weight_map"].update(dict.fromkeys(shard, name))
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (directory / SINGLE).unlink(missing_ok=True)  # likewise


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if isfile(index):
        names = _named_files(index)
        absent = [name for name in names if not isfile(directory / name)]
        if absent:
            raise ModelError(f"{index} names files that are not there: {', '.join(absent)}; copy them beside it")
        return [directory / name for name in names]
    if isfile(directory / SINGLE):
        return [directory / SINGLE]
    raise ModelError(f"no weights in {directory}: expected {SINGLE}, or shards with {INDEX}")


def _named_files(index: Path) -> list[str]:
    """A name is that of a file beside the index: one that leads elsewhere is refused."""
    words = read_object(index, ModelError, "copy it again").get("weight_map")
    if not isinstance(words, dict) or not words:
        raise ModelError(f"{index} is no index of weight files: weight_map is {shown(words)}; copy it again")
    for name in words.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,200}\.safetensors", name):
            raise ModelError(
                f"{index} names the file {shown(name)}; expected the name of a .safetensors file beside the index"
            )
    return sorted(set(words.values()))


def _copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, generation config and whatever else belongs to a policy but is not its weights."""
    if source.resolve() == target.resolve():
        return
    for file in source.iterdir():
        if file.is_file() and file.name != "config.json" and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy2(file, target / file.name)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.to(b.device, b.dtype), b)


def _complaint(origin: str, problems: list[str], shown: int = 8) -> str:
    more = f" and {len(problems) - shown} more" if len(problems) > shown else ""
    return f"weights of {origin} do not fit its config: {'; '.join(problems[:shown])}{more}"
