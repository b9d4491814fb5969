"""Reads and writes drafter directories, in the two formats that vLLM and SGLang load: EAGLE-3 flat, and speculators.

`tlt` saves drafters in the flat format, with a few keys under `tlt` in config.json, so every saved drafter works in
those engines as it is; only a run's checkpoints leave the policy's head out, and `tlt draft export` adds it. Names and
shapes are checked when reading and when writing, because neither engine reports missing tensors; an error names the
tensor. A drafter that is missing or does not fit the policy is an error, never a random drafter; so are NaN or infinite
weights, read or written. Tensors of the policy are never changed. The acceptance record lies beside the weights, if
these weights were measured.
"""
# V policy's vocabulary, v draft vocabulary, D hidden

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tlt.config import NEW, DraftSettings, RunConfig
from tlt.errors import ModelError, check_reachable, shown
from tlt.model.config import ModelConfig
from tlt.model.weights import Place, read_tensors, write_tensors
from tlt.policy import Policy
from tlt.spec.eagle import TAPS, Eagle, EagleConfig, layer_source, taps
from tlt.spec.record import DraftRecord, write_record
from tlt.strict_json import read_object

Format = Literal["flat", "speculators"]
FORMATS: tuple[Format, ...] = get_args(Format)
FLAT_ARCHITECTURE, SPECULATORS_ARCHITECTURE = "LlamaForCausalLMEagle3", "Eagle3Speculator"
LAYER_PREFIX: dict[Format, str] = {"flat": "midlayer.", "speculators": "layers.0."}
HEAD, EMBED, D2T, T2D = "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"
_IDS = (
    "eagle_aux_hidden_state_layer_ids"  # vLLM: number of layers run; SGLang's eagle_config: index of the layer, from 0
)
_PROPOSED = 5  # default draft tokens for a server that reads the speculators format
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_DTYPES = ("bfloat16", "float16", "float32", "float64")  # of weights
_KINDS: dict[str, type] = {"tlt": dict, "eagle_config": dict, "transformer_layer_config": dict, "architectures": list}
_NORMS = ("fc_norm", "norm_output")  # fields of EagleConfig, and keys that vLLM reads
_OTHER_NORMS = ("norm_before_residual", "norm_before_fc")
_KINDS |= {"draft_vocab_size": int, **dict.fromkeys((*_NORMS, *_OTHER_NORMS), bool)}
_OWN_KINDS = {"policy": str, "window": int, "headless": bool, "own_head": bool}
_KIND_WORDS = {dict: "an object", list: "a list", int: "an integer", bool: "true or false", str: "text"}


@dataclass(frozen=True, slots=True)
class Origin:
    """The policy of a drafter, as its files name it."""

    policy: str  # path or name, as the user gave it
    architectures: tuple[str, ...]  # of the policy's config.json
    prompts: int = 0  # number of training prompts, from the first of the file on, that it learned from; 0: unknown


def places(config: EagleConfig, form: Format) -> dict[str, Place]:
    """Name in the file → place in the model, for every tensor that the drafter owns."""
    layer, prefix = config.layer, LAYER_PREFIX[form]
    D, M = layer.hidden, layer.mlp
    q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    return {
        "fc.weight": Place("fc", 0, (D, TAPS * D)),
        f"{prefix}input_layernorm.weight": Place("embed_norm", 0, (D,)),
        f"{prefix}hidden_norm.weight": Place("feature_norm", 0, (D,)),
        f"{prefix}self_attn.q_proj.weight": Place("qkv", 0, (q, 2 * D)),
        f"{prefix}self_attn.k_proj.weight": Place("qkv", q, (kv, 2 * D)),
        f"{prefix}self_attn.v_proj.weight": Place("qkv", q + kv, (kv, 2 * D)),
        f"{prefix}self_attn.o_proj.weight": Place("o", 0, (D, q)),
        f"{prefix}post_attention_layernorm.weight": Place("mlp_norm", 0, (D,)),
        f"{prefix}mlp.gate_proj.weight": Place("gate_up", 0, (M, D)),
        f"{prefix}mlp.up_proj.weight": Place("gate_up", M, (M, D)),
        f"{prefix}mlp.down_proj.weight": Place("down", 0, (D, M)),
        "norm.weight": Place("norm", 0, (D,)),
        **{f"fc_norm.{tap}.weight": Place("fc_norm", tap * D, (D,)) for tap in range(TAPS if config.fc_norm else 0)},
    }


# ---- writing


def save_drafter(
    model: Eagle,
    path: Path | str,
    head_VD: Tensor,
    origin: Origin,
    *,
    form: Format = "flat",
    embed_VD: Tensor | None = None,
    record: DraftRecord | None = None,
) -> None:
    """Writes a drafter directory with the policy's head rows; in speculators format its embedding too (`embed_VD`).

    `record`: the measured acceptance of these weights, if they were measured.
    """
    tensors = file_tensors(model, head_VD, form, embed_VD)
    config = flat_config(model, origin) if form == "flat" else speculators_config(model, origin)
    write_drafter(tensors, config, model.config, Path(path), form, record)


def write_drafter(
    tensors: Mapping[str, Tensor],
    words: Mapping[str, Any],
    config: EagleConfig,
    directory: Path,
    form: Format = "flat",
    record: DraftRecord | None = None,
) -> None:
    """Writes tensors (of `file_tensors` or `own_tensors`) and a config, after checking that they fit. Removes the
    record of earlier weights first."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_tensors(shapes, config, form, str(directory), headless=words["tlt"]["headless"])
    cure = "nothing was written: train again, with a lower draft.learning_rate if the training diverged"
    check_finite(tensors, f"the drafter to be saved as {directory}", cure)
    directory.mkdir(parents=True, exist_ok=True)
    write_record(None, directory)
    write_tensors(tensors, directory)
    (directory / "config.json").write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")
    write_record(record, directory)


def own_tensors(ours: Mapping[str, Tensor], config: EagleConfig, form: Format = "flat") -> dict[str, Tensor]:
    """The drafter's own tensors under their names in the file, from those of an `Eagle` by its own names."""
    tensors = {name: place.of(ours) for name, place in places(config, form).items()}
    if config.reduced:  # vLLM refuses the map of a drafter with the full vocabulary
        ids_v = ours["token_of_draft_v"].cpu()
        tensors[D2T] = ids_v - torch.arange(len(ids_v))
        tensors[T2D] = torch.zeros(config.layer.vocab, dtype=torch.bool).index_fill_(0, ids_v, True)
    return tensors


def file_tensors(model: Eagle, head_VD: Tensor, form: Format, embed_VD: Tensor | None = None) -> dict[str, Tensor]:
    """Every tensor of the file under its name, on the CPU."""
    tensors = own_tensors({**dict(model.named_parameters()), **dict(model.named_buffers())}, model.config, form)
    tensors[HEAD] = model.head_rows(head_VD).to(model.fc.dtype)
    if embed_VD is not None:
        tensors[EMBED] = embed_VD.to(model.fc.dtype, copy=True)  # for a tied embedding, the file holds both copies
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def flat_config(model: Eagle, origin: Origin, *, headless: bool = False) -> dict[str, Any]:
    """The contents of config.json. `headless`: the file has no LM head, and only tlt can read it."""
    return {
        "architectures": [FLAT_ARCHITECTURE],
        **_layer_words(model),
        "draft_vocab_size": model.config.draft_vocab,
        "norm_before_residual": False,
        **_norm_words(model.config),
        **_tap_words(model.config),
        "tlt": _own_words(model, origin, headless),
    }


def speculators_config(model: Eagle, origin: Origin) -> dict[str, Any]:
    return {
        "architectures": [SPECULATORS_ARCHITECTURE],
        "speculators_model_type": "eagle3",
        "torch_dtype": _dtype_word(model),
        "draft_vocab_size": model.config.draft_vocab,
        "norm_before_residual": False,
        "transformer_layer_config": _layer_words(model),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _PROPOSED}],
            "verifier": {"name_or_path": origin.policy, "architectures": list(origin.architectures)},
        },
        **_norm_words(model.config),
        **_tap_words(model.config),
        "tlt": _own_words(model, origin, headless=False),
    }


def _layer_words(model: Eagle) -> dict[str, Any]:
    return {**layer_source(model.config.layer), "torch_dtype": _dtype_word(model)}


def _dtype_word(model: Eagle) -> str:
    return str(model.fc.dtype).removeprefix("torch.")


def _norm_words(config: EagleConfig) -> dict[str, Any]:
    """The keys of EAGLE-3.1, which older engines do not know; none for EAGLE-3."""
    return {name: True for name in _NORMS if getattr(config, name)}


def _tap_words(config: EagleConfig) -> dict[str, Any]:
    """The keys for tapped layers; none for the engines' default, as they count layers differently."""
    layers = config.policy_layers
    if layers >= 7 and config.taps == (2, layers // 2, layers - 3):
        return {}
    return {_IDS: list(config.taps), "eagle_config": {_IDS: [tap - 1 for tap in config.taps]}}


def _own_words(model: Eagle, origin: Origin, headless: bool) -> dict[str, Any]:
    return {
        "policy": origin.policy,
        "policy_architectures": list(origin.architectures),
        "window": model.config.window,
        "own_head": model.own_head_vD is not None,
        "headless": headless,
        **({"learned_prompts": origin.prompts} if origin.prompts else {}),
    }


# ---- reading


def load_drafter(
    path: Path | str,
    policy: ModelConfig,
    *,
    window: int,
    head_VD: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eagle:
    """The drafter of a directory in either format, checked against the policy for which it will draft.

    `window` is used for files that do not name one. A file of another trainer may have an LM head of its own: if it
    differs from the policy's `head_VD`, it is kept, frozen, instead of the policy's rows.
    """
    directory = Path(path)
    source = read_drafter_config(directory)
    form = format_of(source, directory)
    config = drafter_config(source, form, policy, window, directory)
    tensors = dict(read_tensors(directory))
    headless = bool((source.get("tlt") or {}).get("headless"))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_tensors(shapes, config, form, str(directory), headless=headless)
    _check_dtypes(tensors, directory)
    check_finite(tensors, f"drafter {directory}", "train it again, or copy it again")
    model = Eagle(config, dtype=dtype, device=device)
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, place in places(config, form).items():
            place.of(ours).copy_(tensors[name])
    if config.reduced:
        model.set_vocabulary(_vocabulary(tensors, config, directory).to(device))
    _keep_own_head(model, source, tensors, head_VD)
    return model


def read_drafter_config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    check_reachable(file, ModelError)
    if not isfile(file):
        raise ModelError(f"no drafter at {directory}: expected a directory with config.json and model.safetensors")
    source = read_object(file, ModelError, "copy the drafter again")
    _check_kinds(file, "", source, _KINDS)
    _check_kinds(file, "tlt.", source.get("tlt") or {}, _OWN_KINDS)
    dtype = source.get("torch_dtype")
    if dtype is not None and dtype not in _DTYPES:
        raise ModelError(f"{file}: torch_dtype is {shown(dtype)}; expected one of {', '.join(_DTYPES)}")
    return {name: value for name, value in source.items() if value is not None}


def _check_kinds(file: Path, prefix: str, words: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        value = words.get(name)
        if value is not None and type(value) is not kind:
            raise ModelError(f"{file}: {prefix}{name} is {shown(value)}; expected {_KIND_WORDS[kind]}")


def format_of(source: Mapping[str, Any], directory: Path) -> Format:
    if source.get("speculators_model_type") == "eagle3":
        return "speculators"
    if FLAT_ARCHITECTURE in (source.get("architectures") or ()):
        return "flat"
    raise ModelError(
        f"{directory} is no EAGLE-3 drafter: architectures is {shown(source.get('architectures'))}; "
        f"expected {FLAT_ARCHITECTURE}, or speculators_model_type eagle3"
    )


def drafter_config(
    source: Mapping[str, Any], form: Format, policy: ModelConfig, window: int, directory: Path
) -> EagleConfig:
    """The drafter's configuration from its directory. Raises ModelError if it does not fit the policy."""
    words: dict[str, Any] = dict(source if form == "flat" else source.get("transformer_layer_config") or {})
    missing = [name for name in _REQUIRED if name not in words]
    missing += [name for name in ("draft_vocab_size",) if name not in source]
    if missing:
        raise ModelError(f"{directory}/config.json does not say {', '.join(missing)}; expected an EAGLE-3 config")
    for name in _OTHER_NORMS:
        if source.get(name):
            raise ModelError(f"{directory}: {name} is true; only drafters without it are supported")
    try:
        layer = ModelConfig.from_hf({**words, "model_type": "llama", "tie_word_embeddings": False})
    except ModelError as error:
        raise ModelError(f"{directory}/config.json: {error}") from None
    if layer.qkv_bias or layer.mlp_bias or layer.layers != 1:
        raise ModelError(f"{directory}: expected one layer without biases, found {layer.layers} with or without")
    for word, has, needs in (
        ("hidden size", layer.hidden, policy.hidden),
        ("vocabulary", layer.vocab, policy.vocab),
    ):
        if has != needs:
            raise ModelError(
                f"{directory} has {word} {has}, the policy {needs}: this drafter belongs to another policy"
            )
    if not 1 <= source["draft_vocab_size"] <= layer.vocab:
        raise ModelError(f"{directory}: draft_vocab_size is {source['draft_vocab_size']}; expected 1 to {layer.vocab}")
    chosen = _taps_of(source, policy, directory)
    said = (source.get("tlt") or {}).get("window") or window
    if said < 1:
        raise ModelError(f"{directory}: tlt.window is {said}; expected at least 1")
    # at most the longest sequence: each row of the batch keeps that many keys and values
    norms = {name: bool(source.get(name)) for name in _NORMS}
    window = min(said, policy.max_positions)
    return EagleConfig(layer, chosen, window, source["draft_vocab_size"], policy.layers, **norms)


def _taps_of(source: Mapping[str, Any], policy: ModelConfig, directory: Path) -> tuple[int, int, int]:
    shifted = (source.get("eagle_config") or {}).get(_IDS)
    ids = source.get(_IDS, shifted)
    if ids is None:
        return taps(policy)
    if not isinstance(ids, list) or any(type(layer) is not int for layer in ids):
        raise ModelError(f"{directory} reads layers {shown(ids)}; expected a list of {TAPS} integers")
    if _IDS not in source:
        ids = [layer + 1 for layer in ids]
    if len(ids) != TAPS or not 0 <= min(ids) <= max(ids) <= policy.layers:
        raise ModelError(f"{directory} reads layers {shown(ids)}; expected {TAPS} of the policy's {policy.layers}")
    return ids[0], ids[1], ids[2]


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]], config: EagleConfig, form: Format, origin: str, *, headless: bool = False
) -> None:
    """Raises unless names and shapes are exactly those of the format, without the head of a headless file."""
    V, v, D = config.layer.vocab, config.draft_vocab, config.layer.hidden
    wanted = {name: place.shape for name, place in places(config, form).items()}
    wanted |= {HEAD: (v, D), D2T: (v,), T2D: (V,), EMBED: (V, D)}
    optional = {EMBED} if form == "flat" else set()
    optional |= set() if config.reduced else {D2T, T2D}
    optional |= {HEAD} if headless else set()
    problems = [f"unexpected {name}" for name in shapes if name not in wanted]
    problems += [f"missing {name}" for name in wanted if name not in shapes and name not in optional]
    problems += [
        f"{name} has shape {list(shapes[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    if problems:
        raise ModelError(f"drafter {origin} does not fit the {form} format: {'; '.join(problems)}")


def _check_dtypes(tensors: Mapping[str, Tensor], directory: Path) -> None:
    weights = {getattr(torch, name) for name in _DTYPES}
    allowed = {D2T: {torch.int64, torch.int32}, T2D: {torch.bool, torch.uint8, torch.int64}}
    for name, tensor in tensors.items():
        expected = allowed.get(name, weights)
        if tensor.dtype not in expected:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in expected))
            raise ModelError(f"drafter {directory}: {name} holds {tensor.dtype}; expected one of {names}")


def check_finite(tensors: Mapping[str, Tensor], origin: str, cure: str) -> None:
    """Raises if a number is NaN or infinite: no engine would report such a drafter."""
    broken = {name: int((~tensor.isfinite()).sum()) for name, tensor in tensors.items()}
    found = [f"{name} ({count} of {tensors[name].numel()})" for name, count in broken.items() if count]
    if found:
        raise ModelError(
            f"{origin} holds values that are NaN or infinite, in {', '.join(found)}; expected finite weights: {cure}"
        )


def _vocabulary(tensors: Mapping[str, Tensor], config: EagleConfig, directory: Path) -> Tensor:
    """Draft id → policy id. The file has it in two forms, which must agree."""
    ids_v = tensors[D2T].long() + torch.arange(config.draft_vocab)
    marked_v = tensors[T2D].bool().nonzero().squeeze(1)
    if not torch.equal(ids_v, marked_v):
        raise ModelError(f"drafter {directory}: {D2T} and {T2D} name different tokens; write the file again")
    return ids_v


def _keep_own_head(
    model: Eagle, source: Mapping[str, Any], tensors: Mapping[str, Tensor], head_VD: Tensor | None
) -> None:
    """Drafters of tlt share the policy's head, which may have changed since; others' heads are kept if they differ."""
    own = source.get("tlt")
    if HEAD not in tensors:
        return
    head_vD = tensors[HEAD].to(model.fc)
    if own is None and head_VD is not None:
        differs = not torch.equal(head_vD, model.head_rows(head_VD).to(model.fc.dtype))
    else:
        differs = bool(own and own.get("own_head"))
    if differs:
        model.register_buffer("own_head_vD", head_vD)


# ---- as a configuration asks


def open_drafter(policy: Policy, config: RunConfig) -> Eagle:
    """The drafter at `spec.path`; "new": an untrained one."""
    if config.spec.path == NEW:
        return new_drafter(policy, config)
    model = policy.model
    return load_drafter(
        config.spec.path,
        model.config,
        window=config.draft.window,
        head_VD=model.head_weight,
        dtype=model.embed.dtype,
        device=model.embed.device,
    )


def drafter_shape(policy: ModelConfig, draft: DraftSettings) -> EagleConfig:
    """The configuration of a new drafter for this policy."""
    return EagleConfig.of_policy(
        policy,
        window=draft.window,
        draft_vocab=draft.vocab,
        mlp=draft.mlp,
        architecture=draft.architecture,
    )


def new_drafter(policy: Policy, config: RunConfig, token_of_draft_v: Tensor | None = None) -> Eagle:
    """An untrained drafter. `token_of_draft_v`: its reduced vocabulary; by default the first tokens, which the trainer
    replaces by the most frequent ones once there are completions."""
    model, shape = policy.model, drafter_shape(policy.model.config, config.draft)
    drafter = Eagle(shape, dtype=model.embed.dtype, device=model.embed.device)
    if token_of_draft_v is None and shape.reduced:
        token_of_draft_v = torch.arange(shape.draft_vocab)
    drafter.init_weights(config.run.seed, token_of_draft_v, model.norm)
    return drafter
