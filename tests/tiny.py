"""Small real parts for tests: random policies of any dtype and a tokenizer of one character per token; and who sees
what torch is asked to do."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tlt.kernels.draft_tree.layer import NewPositions
from tlt.model.config import ModelConfig
from tlt.model.transformer import Transformer
from tlt.spec.shape import Draft
from tlt.text import Tokenizer

VOCAB = 40
EOS = 1


def policy(
    dtype: torch.dtype = torch.float64,
    *,
    seed: int = 0,
    sharpness: float = 25.0,
    family: str = "llama",
    kv_heads: int = 2,
) -> Transformer:
    """A random policy with opinions: its logits are spread enough that no two batches round to different tokens."""
    config = ModelConfig.from_hf(
        {
            "model_type": family,
            "head_dim": 8,
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2 * kv_heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
        }
    )
    model = Transformer(config, dtype=dtype)
    model.init_weights(seed)
    with torch.no_grad():
        for block in model.blocks:
            for matrix in (block.qkv, block.o, block.gate_up, block.down):
                matrix.mul_(8.0)
        assert model.head is not None
        model.head.mul_(sharpness)
    return model


class _Letters:
    """What `tlt.text.Tokenizer` needs of a tokenizer: token 2 + i is letter i, token 1 ends, token 0 pads."""

    eos_token_id = EOS
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [2 + ord(letter) - ord("A") for letter in text]

    def decode(self, tokens: list[int], **_: bool) -> str:
        return "".join(chr(ord("A") + token - 2) for token in tokens if token > EOS)


def letters() -> Tokenizer:
    return Tokenizer(_Letters(), frozenset({EOS}))


class Seen(TorchDispatchMode):
    """Which of torch's operations are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def new_positions(first_R: Tensor, count_R: Tensor, most: int) -> NewPositions:
    """Of rows for which there is room for `most` each, padding behind what they have."""
    at_T = torch.arange(len(count_R) * most, device=count_R.device)
    return NewPositions(at_T // most, at_T % most, first_R, count_R)


def depths(draft: Draft) -> list[int]:
    """The depth of each node; children of the root have depth 1."""
    found: list[int] = []
    for parent in draft.parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found
