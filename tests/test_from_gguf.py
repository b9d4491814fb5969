"""GGUF files are read as their format defines them (`examples/from_gguf.py`)."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from examples.from_gguf import QUANTS, Quant, convert, dequantize
from tlt.errors import ModelError
from tlt.model.weights import load_policy
from tlt.text import Tokenizer

F = np.float32
Scalar = Callable[[bytes, int], np.float32]  # a block, the number of a value in it


def half(block: bytes, at: int) -> np.float32:
    return F(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def scale_and_min(packed: bytes, group: int) -> tuple[np.float32, np.float32]:
    """llama.cpp's get_scale_min_k4."""
    if group < 4:
        return F(packed[group] & 63), F(packed[group + 4] & 63)
    scale = packed[group + 4] & 15 | (packed[group - 4] >> 6) << 4
    return F(scale), F(packed[group + 4] >> 4 | (packed[group] >> 6) << 4)


def q4_0(block: bytes, i: int) -> np.float32:
    byte = block[2 + i % 16]
    return half(block, 0) * F((byte & 15 if i < 16 else byte >> 4) - 8)


def q4_1(block: bytes, i: int) -> np.float32:
    byte = block[4 + i % 16]
    return half(block, 0) * F(byte & 15 if i < 16 else byte >> 4) + half(block, 2)


def grouped(block: bytes, i: int, value: int) -> np.float32:
    scale, least = scale_and_min(block[4:16], i // 32)
    return half(block, 0) * scale * F(value) - half(block, 2) * least


def nibble(packed: bytes, i: int, run: int) -> int:
    """Runs of bytes hold twice as many values: the lower halves of all bytes, then the upper halves."""
    byte = packed[i // (2 * run) * run + i % run]
    return byte & 15 if i % (2 * run) < run else byte >> 4


def q5_k(block: bytes, i: int) -> np.float32:
    fifth_bit = block[16 + i % 32] >> i // 32 & 1
    return grouped(block, i, nibble(block[48:], i, 32) + 16 * fifth_bit)


def q6_k(block: bytes, i: int) -> np.float32:
    upper = block[128 + 32 * (i // 128) + i % 32] >> i % 128 // 32 * 2 & 3
    value = nibble(block[:128], i, 64) + 16 * upper - 32
    return half(block, 208) * F(signed(block[192 + i // 16])) * F(value)


BY_DEFINITION: dict[str, Scalar] = {
    "F32": lambda block, i: F(struct.unpack("<f", block)[0]),
    "F16": lambda block, i: half(block, 0),
    "BF16": lambda block, i: F(struct.unpack("<f", b"\0\0" + block)[0]),
    "Q8_0": lambda block, i: half(block, 0) * F(signed(block[2 + i])),
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q4_K": lambda block, i: grouped(block, i, nibble(block[16:], i, 32)),
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


@pytest.mark.parametrize("quant", QUANTS.values(), ids=lambda quant: quant.name)
@given(data=st.data())
def test_blocks_hold_what_the_format_says(quant: Quant, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    blocks = np.random.default_rng(seed).integers(0, 256, (3, quant.size), dtype=np.uint8)
    for at in HALVES.get(quant.name, []):
        scale = data.draw(st.floats(-2, 2, width=16))
        blocks[:, at : at + 2] = np.frombuffer(struct.pack("<e", scale), np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = [BY_DEFINITION[quant.name](row.tobytes(), i) for row in blocks for i in range(quant.values)]
    found = dequantize(torch.from_numpy(blocks.reshape(-1)), quant, torch.float32)
    assert np.array_equal(found.numpy(), np.array(expected, F), equal_nan=True)


# A whole file, written by hand.

HEADS, KV_HEADS, HIDDEN, MLP, VOCAB = 2, 1, 32, 64, 266
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = [chr(b) for b in BYTES] + [chr(256 + i) for i in range(256 - len(BYTES))]  # byte-level BPE's 256
TOKENS = [
    *LETTERS,
    "12",
    "th",
    "<|endoftext|>",
    "<|im_end|>",
    "<|fim_pad|>",
    "<tool_call>",
    *(f"[PAD{i}]" for i in range(4)),
]
KINDS = [1] * 258 + [3, 3, 3, 4] + [5] * 4


Tensors = dict[str, tuple[tuple[int, ...], int, bytes]]  # name → (shape, ggml type, bytes)
Parts = tuple[dict[str, object], Tensors]  # metadata and tensors


def packed(value: object) -> bytes:
    """A metadata value after its type."""
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value.encode())) + value.encode()
    if isinstance(value, list):
        items = [packed(item) for item in value]
        return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def write_gguf(path: Path, metadata: dict[str, object], tensors: Tensors) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(packed(name)[4:] + packed(value) for name, value in metadata.items())
    body = b""
    for name, (shape, kind, content) in tensors.items():
        head += packed(name)[4:] + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(body))
        body += content + b"\0" * (-len(content) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)


def shapes(family: str) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for part, rows, columns in (
        *(("attn_q", HIDDEN, HIDDEN), ("attn_k", kv, HIDDEN), ("attn_v", kv, HIDDEN), ("attn_output", HIDDEN, HIDDEN)),
        *(("ffn_gate", MLP, HIDDEN), ("ffn_up", MLP, HIDDEN), ("ffn_down", HIDDEN, MLP)),
    ):
        found[f"blk.0.{part}.weight"] = (rows, columns)
        if family == "qwen2" and part in ("attn_q", "attn_k", "attn_v"):
            found[f"blk.0.{part}.bias"] = (rows,)
    return found | {"blk.0.attn_norm.weight": (HIDDEN,), "blk.0.ffn_norm.weight": (HIDDEN,)}


@pytest.fixture
def parts() -> Parts:
    """Metadata and tensors of a small Qwen2."""
    return metadata_of("qwen2"), tensors_of("qwen2")


def metadata_of(family: str) -> dict[str, object]:
    shape = {"block_count": 1, "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": MLP}
    attention = {"head_count": HEADS, "head_count_kv": KV_HEADS, "layer_norm_rms_epsilon": 1e-6}
    tokenizer = {"model": "gpt2", "pre": "qwen2" if family == "qwen2" else "smollm", "tokens": TOKENS}
    tokenizer |= {"token_type": KINDS, "merges": ["1 2", "t h"]}
    tokenizer |= {"eos_token_id": 259, "padding_token_id": 258, "bos_token_id": 258}
    return {
        "general.architecture": family,
        **{f"{family}.{name}": value for name, value in shape.items()},
        **{f"{family}.attention.{name}": value for name, value in attention.items()},
        f"{family}.rope.freq_base": 1e6,
        **{f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()},
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def tensors_of(family: str) -> Tensors:
    draw = np.random.default_rng(1)
    return {name: (s, 0, draw.standard_normal(s, F).tobytes()) for name, s in shapes(family).items()}


def stored(tensors: Tensors, name: str) -> torch.Tensor:
    shape, _, content = tensors[name]
    return torch.tensor(np.frombuffer(content, F).reshape(shape))


def test_a_qwen2_file_becomes_a_policy_with_its_tokenizer(parts: Parts, tmp_path: Path) -> None:
    metadata, tensors = parts
    scale = struct.pack("<e", 0.5)
    tensors["blk.0.attn_v.weight"] = ((16, 32), 8, b"".join(scale + bytes(range(32)) for _ in range(16)))  # Q8_0
    write_gguf(tmp_path / "m.gguf", metadata, tensors)
    convert(tmp_path / "m.gguf", tmp_path / "out", "float32")
    written = load_file(tmp_path / "out" / "model.safetensors")
    layer = "model.layers.0.self_attn."
    assert torch.equal(written["model.embed_tokens.weight"], stored(tensors, "token_embd.weight"))
    assert torch.equal(written[layer + "q_proj.weight"], stored(tensors, "blk.0.attn_q.weight"))
    assert torch.equal(written[layer + "k_proj.bias"], stored(tensors, "blk.0.attn_k.bias"))
    assert torch.equal(written[layer + "v_proj.weight"], (torch.arange(32) / 2).expand(16, 32))
    config = load_policy(tmp_path / "out").config
    assert (config.tied, config.qkv_bias, config.rope.theta, config.norm_eps) == (True, True, 1e6, 1e-6)
    tokenizer = Tokenizer.load(tmp_path / "out", vocab=config.vocab)
    assert tokenizer.eos_ids == {258, 259}
    assert tokenizer.eos_id == 259
    assert tokenizer.has_chat_template
    tokens = tokenizer.encode_text("the 12<|fim_pad|><tool_call><|im_end|>")
    assert tokens[-3:] == [260, 261, 259]
    assert TOKENS.index("th") in tokens
    assert TOKENS.index("12") not in tokens  # digits stand alone
    assert tokenizer.decode(tokens) == "the 12<|fim_pad|><tool_call>"
    file = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))  # transformers builds its own of it
    assert file.encode("e\u0301 12 the").ids == tokenizer.encode_text("é 12 the")
    assert max(tokenizer.encode_text("[PAD0]")) < 258


def test_an_output_matrix_of_its_own_is_kept(parts: Parts, tmp_path: Path) -> None:
    metadata, tensors = parts
    head = -stored(tensors, "token_embd.weight")
    tensors["output.weight"] = (tuple(head.shape), 0, head.numpy().tobytes())
    write_gguf(tmp_path / "m.gguf", metadata, tensors)
    convert(tmp_path / "m.gguf", tmp_path / "out", "float16")
    policy = load_policy(tmp_path / "out")
    assert not policy.config.tied
    assert torch.equal(dict(policy.named_parameters())["head"], head.half().float())


def test_the_rotary_pairs_of_a_llama_are_put_apart(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    write_gguf(tmp_path / "m.gguf", metadata_of("llama"), tensors)
    convert(tmp_path / "m.gguf", tmp_path / "out", "float32")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        pairs = stored(tensors, f"blk.0.attn_{name}.weight").view(heads, 8, 2, HIDDEN)
        expected = torch.cat((pairs[:, :, 0], pairs[:, :, 1]), dim=1).flatten(0, 1)
        assert torch.equal(written[f"model.layers.0.self_attn.{name}_proj.weight"], expected)
    assert torch.equal(written["model.layers.0.self_attn.v_proj.weight"], stored(tensors, "blk.0.attn_v.weight"))
    assert load_policy(tmp_path / "out").config.family == "llama"
    assert TOKENS.index("12") not in Tokenizer.load(tmp_path / "out").encode_text("12")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 259


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m, t: m.update({"general.architecture": "gemma"}), "'gemma' model; supported: llama, qwen2"),
        (lambda m, t: t.update({"token_embd.weight": ((1, 32), 6, b"0" * 22)}), "type 6; supported: F32 .*Q6_K"),
        (lambda m, t: t.update({"rope_freqs.weight": ((1,), 0, b"0000")}), "a tensor rope_freqs.weight"),
        (lambda m, t: t.update({"zero.weight": ((9,), 0, b"")}), "a tensor zero.weight"),
        (lambda m, t: t.update({"output.weight": ((900, 32), 0, b"")}), "ends inside output.weight"),
        (lambda m, t: m.pop("qwen2.block_count"), "does not say qwen2.block_count"),
        (lambda m, t: m.update({"qwen2.rope.scaling.type": "yarn"}), "scales positions by 'yarn'"),
        (lambda m, t: m.update({"tokenizer.ggml.pre": "llama-bpe"}), "'llama-bpe'.*; supported"),
    ],
)
def test_what_is_not_supported_is_named(
    parts: Parts, change: Callable[..., object], complaint: str, tmp_path: Path
) -> None:
    metadata, tensors = parts
    change(metadata, tensors)
    write_gguf(tmp_path / "m.gguf", metadata, tensors)
    with pytest.raises(ModelError, match=complaint):
        convert(tmp_path / "m.gguf", tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + struct.pack("<IQQ", 3, 1, 2**60), b"PK\3\4" + b"0" * 40])
def test_a_file_that_is_none_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf (is no whole GGUF file|begins with b'PK)"):
        convert(tmp_path / "m.gguf", tmp_path / "out", "float32")
