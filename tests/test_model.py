"""The one model definition says what transformers says, for every family, packed or alone, and its files round-trip."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from tlt.errors import ModelError
from tlt.model.attention import PackedLayout
from tlt.model.config import SUPPORTED, ModelConfig
from tlt.model.transformer import Transformer
from tlt.model.weights import hf_tensors, load_policy, read_config, save_policy, write_tensors
from tlt.model.widen import wide_config, widen

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-untied-biased": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama-linear": LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "llama-llama3": LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SMALL, head_dim=16, sliding_window=None),
    "mistral-window": MistralConfig(**SMALL, sliding_window=7),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2-yarn": Qwen2Config(**SMALL, rope_parameters=YARN),
    "qwen2-window": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "smollm3": SmolLM3Config(**SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2),
}
LENGTHS = (9, 1, 30, 17)


def make(config: PreTrainedConfig, directory: Path) -> torch.nn.Module:
    """A random transformers model, saved; weights larger than usual so that every part matters."""
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    theirs.save_pretrained(directory)
    return theirs


def our_logits(model: Transformer, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    layout = PackedLayout.from_lengths([len(row) for row in rows])
    logits = model.logits(model(torch.cat(rows), layout).hidden_TD)
    return list(logits.split([len(row) for row in rows]))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = make(FAMILIES[name], tmp_path)
    ours = load_policy(tmp_path)
    rows = [torch.randint(0, 97, (length,)) for length in LENGTHS]
    packed = our_logits(ours, rows)
    for row, got in zip(rows, packed, strict=True):
        expected = theirs(row[None]).logits[0]
        assert relative(got, expected) < 1e-4
        assert relative(our_logits(ours, [row])[0], expected) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_files_round_trip_exactly(name: str, tmp_path: Path) -> None:
    make(FAMILIES[name], tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    save_policy(load_policy(tmp_path / "a"), tmp_path / "b", tokenizer_from=tmp_path / "a")
    first, second = (load_file(tmp_path / side / "model.safetensors") for side in "ab")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert json.loads((tmp_path / "a/config.json").read_text()) == json.loads((tmp_path / "b/config.json").read_text())
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", ["torch_dtype", "dtype", ""])
@torch.no_grad()
def test_transformers_loads_the_very_weights_that_were_saved(tmp_path: Path, key: str, dtype: torch.dtype) -> None:
    """Whatever dtype the policy was read in: a small update is not rounded away by a config that names another."""
    make(FAMILIES["llama"], tmp_path / "a")
    words = json.loads((tmp_path / "a" / "config.json").read_text())
    words = {name: value for name, value in words.items() if name not in ("torch_dtype", "dtype")}
    (tmp_path / "a" / "config.json").write_text(json.dumps({**words, **({key: "float16"} if key else {})}))
    ours = load_policy(tmp_path / "a", dtype=dtype)
    for weight in ours.parameters():
        weight.mul_(1 + 1e-6)
    save_policy(ours, tmp_path / "b")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "b").state_dict()
    for name, tensor in hf_tensors(ours).items():
        assert theirs[name].dtype == dtype
        assert torch.equal(theirs[name], tensor)
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert {name: written[name] for name in ("torch_dtype", "dtype") if name in written} == {
        key or "torch_dtype": str(dtype).removeprefix("torch.")
    }


def test_sharded_files_load(tmp_path: Path) -> None:
    theirs = make(FAMILIES["llama"], tmp_path / "a")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    model = load_policy(tmp_path / "theirs")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    (tmp_path / "ours").mkdir()
    write_tensors(hf_tensors(model), tmp_path / "ours", shard_bytes=60_000)
    (tmp_path / "ours" / "config.json").write_text((tmp_path / "a" / "config.json").read_text())
    again = load_policy(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    next((tmp_path / "ours").glob("model-00002*")).unlink()
    with pytest.raises(ModelError, match=r"model-00002.*copy them"):
        load_policy(tmp_path / "ours")


def test_saving_again_in_other_pieces_leaves_nothing_of_the_old(tmp_path: Path) -> None:
    make(FAMILIES["llama"], tmp_path)
    model = load_policy(tmp_path)
    for shard_bytes in (60_000, 10**9, 60_000):
        with torch.no_grad():
            model.norm.add_(1.0)
        write_tensors(hf_tensors(model), tmp_path, shard_bytes)
        assert torch.equal(load_policy(tmp_path).norm, model.norm)
        either = [tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"]
        assert [file.exists() for file in either] == [shard_bytes == 10**9, shard_bytes != 10**9]
    either[1].write_text("{}")
    with pytest.raises(ModelError, match=r"index.json is no index of weight files.*copy it again"):
        load_policy(tmp_path)


def damaged(directory: Path, change: str) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    if change == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif change == "unexpected":
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
    elif change == "misshapen":
        tensors["model.norm.weight"] = torch.zeros(3)
    else:
        tensors["lm_head.weight"] = torch.zeros(97, 48)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"missing model\.layers\.1\.mlp\.up_proj\.weight"),
        ("unexpected", r"unexpected model\.layers\.9"),
        ("misshapen", r"model\.norm\.weight has shape \[3\], expected \[48\]"),
        ("head", "lm_head.weight differs from the embedding"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: str, message: str, tmp_path: Path) -> None:
    make(FAMILIES["llama"], tmp_path)
    damaged(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load_policy(tmp_path)


def test_what_cannot_be_a_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model at .*nosuch"):
        read_config(tmp_path / "nosuch")
    with pytest.raises(ModelError, match=f"'gpt2'; supported: {', '.join(SUPPORTED)}"):
        ModelConfig.from_hf({"model_type": "gpt2"})
    with pytest.raises(ModelError, match="rope type is 'dynamic'"):
        ModelConfig.from_hf({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    with pytest.raises(ModelError, match="hidden_act is 'gelu'"):
        ModelConfig.from_hf({"model_type": "llama", "hidden_act": "gelu"})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="no weights in"):
        load_policy(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    small = json.dumps({"model_type": "llama", **SMALL})
    (tmp_path / "config.json").write_text(small)
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        load_policy(tmp_path)


def test_older_configs_mean_the_same() -> None:
    today = ModelConfig.from_hf({"model_type": "llama", "rope_parameters": dict(LLAMA3)})
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    older = ModelConfig.from_hf({"model_type": "llama", "rope_theta": 1e4, "rope_scaling": scaling})
    assert today == older


@pytest.mark.parametrize("name", ["llama", "llama-untied-biased", "qwen2", "qwen3", "smollm3"])
@torch.no_grad()
def test_widening_changes_the_size_and_not_the_function(name: str, tmp_path: Path) -> None:
    make(FAMILIES[name], tmp_path / "small")
    small = load_policy(tmp_path / "small")
    size = {"hidden": 120, "mlp": 200, "layers": 6, "heads": 12, "kv_heads": 4}
    config = small.config.reshaped(**size, norm_eps=small.config.norm_eps * 48 / 120)
    wide = widen(small, config)
    rows = [torch.randint(0, 97, (length,)) for length in LENGTHS]
    for a, b in zip(our_logits(wide, rows), our_logits(small, rows), strict=True):
        assert relative(a, b) < 1e-4
    assert wide.blocks[5].gate_up.std() > 0.01, "added layers must cost what layers cost"
    save_policy(wide, tmp_path / "wide")
    again = load_policy(tmp_path / "wide")
    assert again.config == wide.config
    assert relative(our_logits(again, rows)[2], our_logits(small, rows)[2]) < 1e-4


def test_predefined_shapes_have_their_size() -> None:
    small = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        }
    )
    counts = {}
    for shape in ("1.5B", "7B"):
        wide = Transformer(wide_config(small, shape), device="meta")
        counts[shape] = sum(p.numel() for p in wide.parameters())
    assert 1.4e9 < counts["1.5B"] < 1.6e9
    assert 6.8e9 < counts["7B"] < 7.0e9


def test_widening_refuses_what_it_cannot_keep(tmp_path: Path) -> None:
    make(FAMILIES["llama"], tmp_path)
    small = load_policy(tmp_path)
    narrow = small.config.reshaped(hidden=24, mlp=80, layers=4, heads=6, kv_heads=3, norm_eps=1e-6)
    with pytest.raises(ModelError, match=r"hidden is 24, at least 48 .* must stay 3"):
        widen(small, narrow)


@torch.no_grad()
def test_taps_are_the_residual_stream(tmp_path: Path) -> None:
    theirs = make(FAMILIES["llama"], tmp_path)
    ours = load_policy(tmp_path)
    tokens = torch.randint(0, 97, (12,))
    expected = theirs(tokens[None], output_hidden_states=True).hidden_states
    out = ours(tokens, PackedLayout.from_lengths([12]), taps=(2, 0, 3))
    for tap, got in zip((2, 0, 3), out.taps, strict=True):
        assert relative(got, expected[tap][0]) < 1e-4
    assert relative(out.hidden_TD, expected[4][0]) < 1e-4


@torch.no_grad()
def test_one_layer_of_each_kind_stands_for_those_like_it(tmp_path: Path) -> None:
    """First, last, tapped, with and without rotation: meanwhile, and never afterwards."""
    make(FAMILIES["smollm3"], tmp_path)
    config = load_policy(tmp_path).config
    config = replace(config, layers=9, rotary_layers=(True, True, True, False) * 2 + (True,), windows=(0,) * 9)
    model, ran, norms = Transformer(config), list[int](), list[torch.Tensor | None]()
    model.init_weights(1)
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
        block.register_forward_pre_hook(lambda _, given: norms.append(given[3]))  # of the layer that reads the result
    tokens, layout = torch.randint(0, 97, (12,)), PackedLayout.from_lengths([12])
    taps = (2, 5, 9)
    whole = model(tokens, layout, taps)
    norms.clear()
    with model.one_layer_of_each_kind(taps):
        model(tokens, layout, taps)
    assert ran == [*range(9), 0, 1, 2, 3, 5, 8]
    assert norms[-1] is None
    assert all(norm is model.blocks[reader].attn_norm for norm, reader in zip(norms[:-1], ran[-5:], strict=True))
    assert torch.equal(model(tokens, layout, taps).hidden_TD, whole.hidden_TD)


def test_gradients_do_not_cross_sequences(tmp_path: Path) -> None:
    make(FAMILIES["qwen3"], tmp_path)
    model = load_policy(tmp_path, dtype=torch.float64)
    rows = [torch.randint(0, 97, (length,)) for length in LENGTHS]

    def gradient(batch: list[torch.Tensor]) -> torch.Tensor:
        model.zero_grad()
        sum(logits.logsumexp(-1).sum() for logits in our_logits(model, batch)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    together = gradient(rows)
    alone = sum(gradient([row]) for row in rows)
    assert torch.allclose(together, alone, rtol=1e-9, atol=1e-9)
    model.checkpoint_activations = True
    assert torch.allclose(gradient(rows), together, rtol=1e-12, atol=1e-12)
