"""Drafter files: the formats of vLLM and SGLang to the letter, exact round trips, and a name in every complaint."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tlt.config import DrafterArchitecture, DraftSettings, RunConfig
from tlt.errors import ModelError
from tlt.model.config import ModelConfig, RopeConfig
from tlt.model.rope import rotary_tables
from tlt.model.transformer import Transformer
from tlt.policy import Policy
from tlt.spec.align import align
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.eagle_files import Format, Origin, check_tensors, load_drafter, new_drafter, save_drafter

POLICY = tiny.policy(torch.float32)
ORIGIN = Origin("some/policy", ("LlamaForCausalLM",))
FORMS: tuple[Format, ...] = ("flat", "speculators")
LAYER = {"flat": "midlayer", "speculators": "layers.0"}
PARTS = [
    "input_layernorm",
    "hidden_norm",
    "post_attention_layernorm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
]


def drafter(
    draft_vocab: int = 0,
    policy: Transformer = POLICY,
    dtype: torch.dtype = torch.float32,
    architecture: DrafterArchitecture = "eagle-3",
) -> Eagle:
    shape = EagleConfig.of_policy(policy.config, window=24, draft_vocab=draft_vocab, architecture=architecture)
    model = Eagle(shape, dtype=dtype)
    model.init_weights(0, torch.arange(draft_vocab) * 3 if draft_vocab else None)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm"):
                weight.normal_(1.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def save(model: Eagle, path: Path, form: Format = "flat", policy: Transformer = POLICY) -> None:
    embed = policy.embed if form == "speculators" else None
    save_drafter(model, path, policy.head_weight, ORIGIN, form=form, embed_VD=embed)


def config_of(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((path / "config.json").read_text())
    return read


def change(path: Path, **words: Any) -> None:
    (path / "config.json").write_text(json.dumps({**config_of(path), **words}))


def rewrite(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path / "model.safetensors")


def same(a: Eagle, b: Eagle) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# ---- what is written


@pytest.mark.parametrize("form", FORMS)
def test_names_and_shapes(tmp_path: Path, form: Format) -> None:
    save(drafter(10), tmp_path, form)
    shapes = {name: list(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    D, V = 32, tiny.VOCAB
    expected = {f"{LAYER[form]}.{part}.weight" for part in PARTS}
    expected |= {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    expected |= {"embed_tokens.weight"} if form == "speculators" else set()
    assert set(shapes) == expected
    assert shapes["fc.weight"] == [D, 3 * D]
    assert shapes[f"{LAYER[form]}.self_attn.q_proj.weight"] == [32, 2 * D]
    assert shapes[f"{LAYER[form]}.self_attn.k_proj.weight"] == [16, 2 * D]
    assert shapes["lm_head.weight"] == [10, D]
    assert (shapes["d2t"], shapes["t2d"]) == ([10], [V])


def test_the_vocabulary_map(tmp_path: Path) -> None:
    save(drafter(10), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert (tensors["d2t"] + torch.arange(10)).tolist() == list(range(0, 30, 3))
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == list(range(0, 30, 3))
    assert torch.equal(tensors["lm_head.weight"], POLICY.head_weight[::3][:10])


def test_the_flat_config(tmp_path: Path) -> None:
    save(drafter(10), tmp_path)
    config = config_of(tmp_path)
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "vocab_size": tiny.VOCAB,
        "draft_vocab_size": 10,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "norm_before_residual": False,
    }
    assert {name: config[name] for name in wanted} == wanted
    assert "norm_output" not in config


@pytest.mark.parametrize("draft_vocab", [0, 10])
def test_a_new_drafter_writes_its_states_at_the_scale_that_the_policys_head_reads(draft_vocab: int) -> None:
    """The head was trained on states times the policy's final norm; from a norm of ones the logits would stay flat."""
    policy = Policy(tiny.policy(torch.float32), tiny.letters(), Path("some/policy"))
    with torch.no_grad():
        policy.model.norm.fill_(4.6)
    found = new_drafter(policy, RunConfig(draft=DraftSettings(vocab=draft_vocab)))
    assert torch.equal(found.norm, policy.model.norm)
    assert found.norm.data_ptr() != policy.model.norm.data_ptr()


def test_the_speculators_config(tmp_path: Path) -> None:
    save(drafter(10), tmp_path, "speculators")
    config = config_of(tmp_path)
    assert config["speculators_model_type"] == "eagle3"
    assert config["architectures"] == ["Eagle3Speculator"]
    assert (config["draft_vocab_size"], config["norm_before_residual"]) == (10, False)
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert config["speculators_config"] == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"name_or_path": "some/policy", "architectures": ["LlamaForCausalLM"]},
    }


def deep_policy(layers: int) -> Transformer:
    source = {**POLICY.config.source, "num_hidden_layers": layers}
    model = Transformer(ModelConfig.from_hf(source))
    model.init_weights(0)
    return model


def test_layers_are_named_only_where_the_engines_would_choose_others(tmp_path: Path) -> None:
    deep, shallow = deep_policy(9), POLICY
    save(drafter(policy=deep), tmp_path / "deep", policy=deep)
    assert "eagle_aux_hidden_state_layer_ids" not in config_of(tmp_path / "deep")
    assert "eagle_config" not in config_of(tmp_path / "deep")
    assert load_drafter(tmp_path / "deep", deep.config, window=1).config.taps == (2, 4, 6)
    save(drafter(policy=shallow), tmp_path / "shallow")
    config = config_of(tmp_path / "shallow")
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]  # layers that have run
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 0, 1]  # outputs of layers


def test_layers_named_for_the_other_engine_are_understood(tmp_path: Path) -> None:
    deep = deep_policy(9)
    save(drafter(policy=deep), tmp_path, policy=deep)
    change(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 6]})
    assert load_drafter(tmp_path, deep.config, window=1).config.taps == (3, 5, 7)


def test_long_context_policies_keep_their_rotation(tmp_path: Path) -> None:
    parameters = {"factor": 4.0, "original_max_position_embeddings": 128}
    config = replace(POLICY.config, rope=RopeConfig(5e5, "yarn", parameters))
    policy = Transformer(config)
    policy.init_weights(0)
    model = drafter(policy=policy)
    save(model, tmp_path, policy=policy)
    assert config_of(tmp_path)["rope_scaling"] == {"rope_type": "yarn", **parameters}
    loaded = load_drafter(tmp_path, config, window=24)
    assert torch.equal(loaded.cos_PR, rotary_tables(config)[0])


@pytest.mark.parametrize("architecture", get_args(DrafterArchitecture))
def test_the_file_alone_says_what_the_drafter_computes(tmp_path: Path, architecture: DrafterArchitecture) -> None:
    """A reader with nothing but the file's tensors, in the words of the format, gets the drafter's own logits."""
    policy = tiny.policy(torch.float64)
    model = drafter(10, policy, torch.float64, architecture)
    save(model, tmp_path, policy=policy)
    tokens = torch.randint(tiny.VOCAB, (14,), generator=torch.Generator().manual_seed(0))
    features = torch.randn(14, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    aligned = align(tokens, torch.ones(14, dtype=torch.bool), (14,))
    g = model.unroll(aligned, features, policy.embed, 1)[0]
    found = model.logits(g, model.head_rows(policy.head_weight))[:-1]
    expected = read_like_an_engine(tmp_path, policy.embed.detach()[tokens[1:]], features[:-1])
    torch.testing.assert_close(found, expected)


def read_like_an_engine(path: Path, embedded: Tensor, features: Tensor) -> Tensor:
    file, words = load_file(path / "model.safetensors"), config_of(path)
    heads, width = words["num_attention_heads"], words["head_dim"]

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], file[f"{name}.weight"], words["rms_norm_eps"])

    def project(x: Tensor, name: str) -> Tensor:
        return x @ file[f"midlayer.{name}_proj.weight"].T

    if words.get("fc_norm"):
        features = torch.cat([norm(tap, f"fc_norm.{n}") for n, tap in enumerate(features.chunk(3, -1))], dim=-1)
    state = features @ file["fc.weight"].T
    both = torch.cat((norm(embedded, "midlayer.input_layernorm"), norm(state, "midlayer.hidden_norm")), dim=-1)
    q, k, v = (project(both, f"self_attn.{part}").view(len(both), -1, width).transpose(0, 1) for part in "qkv")
    angle = torch.arange(len(both))[:, None] / words["rope_theta"] ** (torch.arange(0, width, 2) / width)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    group = heads // len(k)
    k, v = turn(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    attended = functional.scaled_dot_product_attention(turn(q), k, v, is_causal=True)
    state = state + project(attended.transpose(0, 1).flatten(1), "self_attn.o")
    normed = norm(state, "midlayer.post_attention_layernorm")
    state = state + project(functional.silu(project(normed, "mlp.gate")) * project(normed, "mlp.up"), "mlp.down")
    return norm(state, "norm") @ file["lm_head.weight"].T


# ---- round trips


@pytest.mark.parametrize("draft_vocab", [0, 10])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "architecture"), [(torch.float32, "eagle-3.1"), (torch.bfloat16, "eagle-3")])
def test_a_round_trip_is_exact(
    tmp_path: Path, form: Format, draft_vocab: int, dtype: torch.dtype, architecture: DrafterArchitecture
) -> None:
    model = drafter(draft_vocab, architecture=architecture).to(dtype)
    before = [parameter.detach().clone() for parameter in POLICY.parameters()]
    save(model, tmp_path / "first", form)
    loaded = load_drafter(tmp_path / "first", POLICY.config, window=1, head_VD=POLICY.head_weight, dtype=dtype)
    assert same(model, loaded)
    assert loaded.config == model.config
    other: Format = "flat" if form == "speculators" else "speculators"
    save(loaded, tmp_path / "other", other)
    save(load_drafter(tmp_path / "other", POLICY.config, window=1, dtype=dtype), tmp_path / "again", form)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    assert all(torch.equal(old, new) for old, new in zip(before, POLICY.parameters(), strict=True))


def test_a_drafter_from_elsewhere_keeps_the_head_it_trained(tmp_path: Path) -> None:
    save(drafter(10), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = config_of(tmp_path)
    del config["tlt"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shared = load_drafter(tmp_path, POLICY.config, window=77, head_VD=POLICY.head_weight)
    assert shared.own_head_vD is None
    assert shared.config.window == 77
    tensors["lm_head.weight"] += 1.0
    rewrite(tmp_path, tensors)
    own = load_drafter(tmp_path, POLICY.config, window=77, head_VD=POLICY.head_weight)
    assert torch.equal(own.head_rows(POLICY.head_weight), tensors["lm_head.weight"])
    assert "own_head_vD" not in dict(own.named_parameters())
    save(own, tmp_path / "again")
    assert same(own, load_drafter(tmp_path / "again", POLICY.config, window=1))


def test_a_head_that_has_moved_since_is_still_the_policys(tmp_path: Path) -> None:
    save(drafter(10), tmp_path)
    loaded = load_drafter(tmp_path, POLICY.config, window=1, head_VD=POLICY.head_weight + 1.0)
    assert loaded.own_head_vD is None


def test_a_policy_whose_embedding_is_its_head_exports_both(tmp_path: Path) -> None:
    tied = Transformer(ModelConfig.from_hf({**POLICY.config.source, "tie_word_embeddings": True}))
    tied.init_weights(0)
    save(drafter(policy=tied), tmp_path, "speculators", tied)
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tied.embed)
    assert torch.equal(tensors["embed_tokens.weight"], tied.embed)


@pytest.mark.parametrize("form", FORMS)
def test_a_drafter_that_names_every_token_is_written_without_a_map(tmp_path: Path, form: Format) -> None:
    """vLLM has no place for one and refuses the file; others write it, and it says nothing new."""
    save(drafter(), tmp_path, form)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not {"d2t", "t2d"} & set(tensors)
    every = {"d2t": torch.zeros(tiny.VOCAB, dtype=torch.int64), "t2d": torch.ones(tiny.VOCAB, dtype=torch.bool)}
    rewrite(tmp_path, {**tensors, **every})
    assert same(load_drafter(tmp_path, POLICY.config, window=1), drafter())


# ---- refusing


def complaint(path: Path, policy: ModelConfig = POLICY.config) -> str:
    with pytest.raises(ModelError) as caught:
        load_drafter(path, policy, window=1)
    return str(caught.value)


def test_no_drafter_is_never_a_random_one(tmp_path: Path) -> None:
    assert "no drafter at" in complaint(tmp_path / "nowhere")
    save(drafter(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "no weights in" in complaint(tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_that_is_missing_misshapen_or_unknown_is_named(tmp_path: Path, form: Format) -> None:
    save(drafter(10), tmp_path, form)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"{LAYER[form]}.self_attn.k_proj.weight"
    rewrite(tmp_path, {key: value for key, value in tensors.items() if key != name})
    assert f"missing {name}" in complaint(tmp_path)
    rewrite(tmp_path, {**tensors, name: torch.zeros(3, 64)})
    assert f"{name} has shape [3, 64], expected [16, 64]" in complaint(tmp_path)
    rewrite(tmp_path, {**tensors, "stray.weight": torch.zeros(1)})
    assert "unexpected stray.weight" in complaint(tmp_path)
    rewrite(tmp_path, {key: value for key, value in tensors.items() if key != "d2t"})
    assert "missing d2t" in complaint(tmp_path)


def test_what_is_written_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"missing embed_tokens\.weight"):
        save_drafter(drafter(), tmp_path, POLICY.head_weight, ORIGIN, form="speculators")
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \[7, 32\], expected \[40, 32\]"):
        save_drafter(drafter(), tmp_path, POLICY.head_weight[:7], ORIGIN)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ModelError, match="unexpected x"):
        check_tensors({"x": (1,)}, drafter().config, "flat", "here")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, value: float) -> None:
    """When they are read and when they are written: then what was there before stays."""
    save(drafter(10), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    broken = {**tensors, "fc.weight": tensors["fc.weight"].clone()}
    broken["fc.weight"][3, :5] = value
    rewrite(tmp_path, broken)
    expected = f"holds values that are NaN or infinite, in fc.weight (5 of {32 * 96}); expected finite weights"
    assert f"drafter {tmp_path} {expected}: train it again, or copy it again" in complaint(tmp_path)
    rewrite(tmp_path, tensors)
    diverged = drafter(10)
    with torch.no_grad():
        diverged.fc[3, :5] = value
    with pytest.raises(ModelError) as caught:
        save(diverged, tmp_path)
    assert f"the drafter to be saved as {tmp_path} {expected}: nothing was written" in str(caught.value)
    assert "a lower draft.learning_rate" in str(caught.value)
    assert same(load_drafter(tmp_path, POLICY.config, window=24), drafter(10))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"hidden_size": 64}, "has hidden size 64, the policy 32"),
        ({"vocab_size": 41}, "has vocabulary 41, the policy 40"),
        ({"draft_vocab_size": 41}, "draft_vocab_size is 41; expected 1 to 40"),
        ({"architectures": ["LlamaForCausalLM"]}, "is no EAGLE-3 drafter"),
        ({"norm_before_residual": True}, "norm_before_residual is true"),
        ({"attention_bias": True}, "one layer without biases"),
        ({"num_hidden_layers": 2}, "one layer without biases"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "reads layers [1, 2, 9]"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(tmp_path: Path, words: dict[str, Any], expected: str) -> None:
    save(drafter(10), tmp_path)
    change(tmp_path, **words)
    assert expected in complaint(tmp_path)


def test_a_config_that_says_too_little_is_refused(tmp_path: Path) -> None:
    save(drafter(10), tmp_path)
    config = config_of(tmp_path)
    del config["draft_vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "does not say draft_vocab_size" in complaint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "is not valid JSON" in complaint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "expected an object" in complaint(tmp_path)


def test_maps_that_disagree_are_refused(tmp_path: Path) -> None:
    save(drafter(10), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["t2d"][1] = True
    tensors["t2d"][0] = False
    rewrite(tmp_path, tensors)
    assert "d2t and t2d name different tokens" in complaint(tmp_path)
