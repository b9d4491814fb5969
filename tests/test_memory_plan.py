"""The memory plan: the sizes of real models and trainers, figures worked out by hand, and what it says does not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tlt.plan
from tests.tiny import policy as tiny_policy
from tests.training import LEARNED, small
from tlt.cli import main
from tlt.config import ClusterSettings, EngineSettings, GrpoSettings, RunConfig, SamplingParams, TrainSettings
from tlt.errors import ConfigError
from tlt.memory_plan import (
    GIB,
    MemoryPlan,
    Sizes,
    activation_bytes,
    adapter_weights,
    block_weights,
    memory_plan,
    outer_weights,
    refusal,
    remedies,
    remedy_lines,
)
from tlt.model.attention import PackedLayout
from tlt.model.config import ModelConfig
from tlt.model.kv import KVCache
from tlt.model.parallel import Ranks
from tlt.model.shapes import MODEL_SHAPES
from tlt.model.slices import slice_of
from tlt.model.transformer import Transformer
from tlt.plan import kv_bytes_beside_training, settled, sizes_of
from tlt.policy import open_policy
from tlt.recipe import load_config
from tlt.spec.drafter import build_drafters
from tlt.train.policy import PolicyTrainer
from tlt.types import Completion, Experience, Key, Prompt, Rollout, Timing

SEVEN = ModelConfig.from_hf(MODEL_SHAPES["Qwen2.5-7B"])
WEIGHTS = 7_615_616_512  # of it
CONFIG = RunConfig(sampling=SamplingParams(max_tokens=1024), train=TrainSettings(row_tokens=8192))


def kept(plan: MemoryPlan) -> dict[str, int]:
    return {part.name: part.bytes for part in plan.kept}


def on(gib: float, config: RunConfig = CONFIG, policy: ModelConfig = SEVEN) -> MemoryPlan:
    return memory_plan(config, Sizes(policy, 2, int(gib * GIB)))


@pytest.mark.parametrize(
    "source",
    [
        *MODEL_SHAPES.values(),
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
        {"model_type": "smollm3", "num_hidden_layers": 3},
    ],
)
def test_weights_are_counted_without_making_them(source: dict[str, object]) -> None:
    config = ModelConfig.from_hf(source)
    real = Transformer(config, dtype=torch.bfloat16, device="meta") if config.layers < 4 else None
    counted = config.layers * block_weights(config) + outer_weights(config)
    if real is None:  # a policy of many layers is one of few layers, several times
        few = ModelConfig.from_hf({**source, "num_hidden_layers": 2})
        real = Transformer(few, device="meta")
        counted = few.layers * block_weights(few) + outer_weights(few)
    assert counted == sum(weight.numel() for weight in real.parameters())


def test_what_seven_billion_weights_keep() -> None:
    found = kept(on(141))
    assert found == {"policy": 2 * WEIGHTS, "float32 masters": 4 * WEIGHTS, "Adam's moments": 8 * WEIGHTS}
    sharded = replace(CONFIG, cluster=ClusterSettings(workers=4, shard=True))
    quarter = WEIGHTS // 4
    assert kept(on(141, sharded)) == {
        "policy": 2 * WEIGHTS,
        "1/4 of the policy that is trained": 2 * quarter,
        "float32 masters": 4 * quarter,
        "Adam's moments": 8 * quarter,
    }
    lora = replace(CONFIG, train=replace(CONFIG.train, lora_rank=16), grpo=GrpoSettings(kl=0.1))
    adapters = adapter_weights(SEVEN, 16)
    found = kept(on(141, lora))
    assert found["adapters"] + found["Adam's moments"] == 12 * adapters
    assert "reference policy (grpo.kl)" not in found, "it is the policy without its adapters"
    whole = kept(on(141, replace(lora, train=replace(lora.train, lora_rank=0))))
    assert whole["reference policy (grpo.kl)"] == 2 * WEIGHTS


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trainer_keeps_what_was_said(dtype: torch.dtype, rank: int) -> None:
    model = tiny_policy(dtype)
    settings = TrainSettings(lora_rank=rank)
    trainer = PolicyTrainer(model, settings, GrpoSettings())
    weights = list(trainer._optimizer._masters)
    for master in weights:
        master.grad = torch.ones_like(master)
    trainer._optimizer.step(1e-3, 1.0, trainer._optimizer.norm())
    held = {id(p): p for p in (*model.parameters(), *weights)}
    held |= {id(base): base for base in (trainer._lora._bases if trainer._lora else ())}
    for state in trainer._optimizer.state()["adam"]["state"].values():
        held |= {id(state[name]): state[name] for name in ("exp_avg", "exp_avg_sq")}
    plan = memory_plan(RunConfig(train=settings), Sizes(model.config, dtype.itemsize, 0))
    assert plan.kept_bytes == sum(tensor.nbytes for tensor in held.values())


def test_a_drafter_that_learns_counts_too(tmp_path: Path) -> None:
    config = small(tmp_path, *LEARNED, "--model.dtype=float32")
    (drafter,) = [one for one in build_drafters(open_policy(config.model), config) if one.learned]
    assert drafter.model is not None
    weights = sum(weight.numel() for weight in drafter.model.parameters())
    found = kept(memory_plan(config, sizes_of(config)))
    assert found["drafter"] == weights * (4 + 1)
    assert found["drafter in training, its best copy and moments"] == weights * (4 + 4 + 8)
    frozen = replace(config, drafting=replace(config.drafting, frozen=True))
    assert "drafter in training, its best copy and moments" not in kept(memory_plan(frozen, sizes_of(frozen)))


def test_activations_are_those_that_autograd_keeps() -> None:
    """In float32, whose layers are not fused."""
    source = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
    config = ModelConfig.from_hf({**source, "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 32})
    model, tokens, found = Transformer(config), 256, dict[int, torch.UntypedStorage]()
    model.init_weights(0)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.zeros(tokens, dtype=torch.int64), PackedLayout.from_lengths((tokens,)))
    weights = {weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())}
    measured = sum(storage.nbytes() for place, storage in found.items() if place not in weights)
    assert measured / (tokens * config.layers) == pytest.approx(activation_bytes(config, 4), rel=0.1)


def test_checkpointed_layers_keep_their_input_alone() -> None:
    rows, layer = CONFIG.train.row_tokens, activation_bytes(SEVEN, 2)
    train = replace(CONFIG.train, lora_rank=1, checkpoint_activations="never")
    plain = on(141, replace(CONFIG, train=train))
    less = on(141, replace(CONFIG, train=replace(train, checkpoint_activations="always")))
    saved = rows * ((SEVEN.layers - 1) * layer - SEVEN.layers * SEVEN.hidden * 2)
    assert plain.peak.bytes - less.peak.bytes == saved


def chosen(gib: float, name: str, **knobs: Any) -> MemoryPlan:
    """The plan of the shipped recipe on a GPU of this size."""
    return on(gib, load_config("gsm8k_1gpu", overrides=knobs), ModelConfig.from_hf(MODEL_SHAPES[name]))


LORA = {"train.lora_rank": 16}
SHARDS = {"cluster.workers": 8, "cluster.shard": True}


@pytest.mark.parametrize(
    ("name", "knobs", "recomputes"),
    [
        ("Qwen2.5-1.5B", {}, {40: True, 80: True, 139: False}),
        ("Qwen2.5-1.5B", LORA, {40: True, 80: True, 110: False}),
        ("Qwen2.5-1.5B", {"train.row_tokens": 4096}, {80: True, 96: False}),
        ("Qwen2.5-1.5B", {"engine.kv_gib": 4.0}, {40: True, 80: False}),
        ("Qwen2.5-1.5B", {"engine.sleep": "always"}, {64: True, 80: False}),
        ("Qwen2.5-7B", {}, {139: True, 180: True, 400: False}),
        ("Qwen2.5-7B", LORA, {80: True, 139: True, 288: False}),
        ("Qwen2.5-7B", {"train.offload": True}, {139: True, 288: False}),
        ("Qwen2.5-7B", SHARDS, {80: True, 139: True, 288: False}),
        ("Qwen2.5-7B", {**SHARDS, "engine.sleep": "always"}, {80: True, 139: False}),
    ],
)
def test_activations_are_kept_where_there_is_clear_room(
    name: str, knobs: dict[str, Any], recomputes: dict[int, bool]
) -> None:
    for gib, expected in recomputes.items():
        plan = chosen(gib, name, **knobs)
        assert plan.recomputes is expected, gib
        keeps, less = (
            chosen(gib, name, **knobs, **{"train.checkpoint_activations": knob}) for knob in ("never", "always")
        )
        assert plan == (less if expected else keeps)
        assert plan.phases[0].name.endswith("layers recomputed" if expected else "activations kept")
        assert plan.kv_bytes == less.kv_bytes, "no smaller for the activations"
        update = keeps.phases[0]
        needed = keeps.kept_bytes + keeps.reserve_bytes + update.bytes + (0 if update.asleep else less.kv_bytes)
        assert (needed > 0.9 * gib * GIB) is expected


def test_a_choice_between_activations_is_advice_only_where_it_was_made() -> None:
    def advised(knob: str) -> list[str]:
        policy = ModelConfig.from_hf(MODEL_SHAPES["Qwen2.5-1.5B"])
        config = load_config("gsm8k_1gpu", overrides={"train.checkpoint_activations": knob})
        return [line.partition(":")[0] for line in remedy_lines(config, Sizes(policy, 2, 40 * GIB))]

    flag = "--train.checkpoint_activations always"
    assert flag in advised("never")
    assert flag not in advised("auto"), "layers are recomputed already"


def test_what_the_plan_decides_is_settled_before_a_worker_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("quickstart", overrides={"model.device": "cpu"})
    assert settled(config) == replace(
        config,
        engine=replace(config.engine, sleep="never"),
        train=replace(config.train, checkpoint_activations="never"),
    )
    gpu, policy = load_config("gsm8k_1gpu", overrides={"model.device": "cuda"}), MODEL_SHAPES["Qwen2.5-1.5B"]
    for gib, chosen in ((60, "always"), (139, "never")):
        sizes = Sizes(ModelConfig.from_hf(policy), 2, gib * GIB)
        monkeypatch.setattr(tlt.plan, "device_of", torch.device)
        monkeypatch.setattr(tlt.plan, "sizes_of", lambda config, sizes=sizes: sizes)
        found = settled(gpu)
        assert (found.train.checkpoint_activations, found.engine.sleep) == (chosen, "never")
        assert memory_plan(found, sizes) == memory_plan(gpu, sizes), "the cache is sized by the same plan"


def test_keys_and_values_get_what_is_left_and_no_more_than_rows_can_fill() -> None:
    lora = replace(CONFIG, train=replace(CONFIG.train, lora_rank=16), engine=EngineSettings(rows=64))
    small_gpu, large_gpu = on(80, lora), on(500, lora)
    assert small_gpu.fits
    assert small_gpu.kv_bytes == min(small_gpu.left_bytes, small_gpu.most_kv_bytes)
    everything = small_gpu.kept_bytes + small_gpu.peak.bytes + small_gpu.kv_bytes + small_gpu.reserve_bytes
    assert everything <= 80 * GIB
    page = 2 * SEVEN.layers * 16 * SEVEN.kv_heads * SEVEN.head_dim * 2
    assert large_gpu.kv_bytes == large_gpu.most_kv_bytes == 64 * page * ((1024 + 4096) // 16 + 1)
    assert on(80, replace(lora, engine=EngineSettings(kv_gib=3.0))).kv_bytes == 3 * GIB
    halves = on(160, replace(lora, cluster=ClusterSettings(workers=2, gpus_per_worker=0.5)))
    assert halves == small_gpu


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_an_engine_of_several_ranks_is_planned_by_its_slices(family: str) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32}
    policy = ModelConfig.from_hf({"model_type": family, "intermediate_size": 48, "vocab_size": 90, **sizes, **biases})
    whole = Transformer(policy, dtype=torch.bfloat16)
    whole.init_weights(0)
    part = slice_of(whole, Ranks(1, 4, None, None))
    theirs = {parameter.data_ptr() for parameter in whole.parameters()}
    own = sum(parameter.nbytes for parameter in part.parameters() if parameter.data_ptr() not in theirs)
    one, four = (
        on(80, replace(CONFIG, cluster=ClusterSettings(workers=4, tensor_parallel=ranks)), policy) for ranks in (1, 4)
    )
    assert kept(four) == kept(one) | {"1/4 of the policy's layers, for the engine": own}
    shards = ClusterSettings(workers=4, tensor_parallel=4, shard=True)
    divided = on(80, replace(CONFIG, cluster=shards), policy)
    held = sum(parameter.nbytes for parameter in part.parameters())
    assert kept(divided)["embedding, head and 1/4 of the layers"] == held
    assert "policy" not in kept(divided)
    page_bytes = KVCache.page_bytes(part.local, CONFIG.engine.page_size, torch.bfloat16)
    assert four.least_kv_bytes * 4 == one.least_kv_bytes
    assert four.least_kv_bytes % page_bytes == 0
    rollout = [plan.phases[1].bytes for plan in (one, four)]
    assert rollout[1] < rollout[0]


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    assert not on(141).fits
    told = refusal(CONFIG, Sizes(SEVEN, 2, 141 * GIB))
    assert "\n" not in told
    assert "and has 141.0 GiB" in told
    assert "float32 masters 28.4 GiB" in told
    assert "--train.lora_rank 16: needs" in told
    for flags, plan in remedies(CONFIG, Sizes(SEVEN, 2, 141 * GIB)):
        assert plan.needed_bytes <= on(141).needed_bytes, flags
    assert "take a smaller policy" in refusal(CONFIG, Sizes(SEVEN, 2, 8 * GIB))


def test_an_engine_is_built_with_what_others_left() -> None:
    plan = on(80, replace(CONFIG, train=replace(CONFIG.train, lora_rank=16)))
    at_start = sum(part.bytes for part in plan.kept if not part.later)
    free = 80 * GIB - at_start
    assert kv_bytes_beside_training(plan, free) == plan.kv_bytes
    assert kv_bytes_beside_training(plan, plan.later_bytes + plan.least_kv_bytes) == plan.least_kv_bytes
    with pytest.raises(ConfigError, match="see what else uses the GPU"):
        kv_bytes_beside_training(plan, plan.later_bytes)


def test_the_command_prints_the_table_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", "--gpu", "80"]) == 0
    told = capsys.readouterr().out
    assert "Adam's moments" in told
    assert "the GPU  " in told
    assert main(["plan", "quickstart", "--gpu", "0.5"]) == ConfigError.exit_code
    told = capsys.readouterr()
    assert "the GPU, which is too small" in told.out
    assert "the run needs" in told.err
    assert main(["plan", "quickstart", "--gpu", "much"]) == ConfigError.exit_code
    assert "expected the memory of one GPU in GiB" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("checkpointed", ["never", "always"])
def test_an_update_takes_what_was_said(checkpointed: str, rank: int) -> None:
    """The most that torch allocates in a step of a policy of 0.4 billion weights, beside the plan."""
    config = ModelConfig.from_hf({**MODEL_SHAPES["Qwen2.5-1.5B"], "num_hidden_layers": 4})
    model = Transformer(config, dtype=torch.bfloat16, device="cuda")
    model.init_weights(0)
    train = TrainSettings(row_tokens=4096, lora_rank=rank, checkpoint_activations=checkpointed)  # type: ignore[arg-type]
    trainer = PolicyTrainer(model, train, GrpoSettings(mismatch_limit=0.0))
    tokens, zeros = tuple(range(4088)), (0.0,) * 4088
    completions = [
        Completion(Key(0, n), tuple(range(8)), tokens, "", zeros, zeros, "eos", 0, Timing(0, 0)) for n in range(2)
    ]
    given = [
        Experience(Rollout(Prompt("", ""), one, 0.0), gain) for one, gain in zip(completions, (1, -1), strict=True)
    ]
    trainer.update(given)
    torch.cuda.reset_peak_memory_stats()
    trainer.update(given)
    total = torch.cuda.get_device_properties(0).total_memory
    plan = memory_plan(RunConfig(train=train), Sizes(config, 2, total))
    (update,) = [phase.bytes for phase in plan.phases if phase.name.startswith("update")]
    assert torch.cuda.max_memory_allocated() == pytest.approx(plan.kept_bytes + update, rel=0.05)


def test_a_policy_is_planned_by_its_name_without_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gsm8k_1gpu", "--gpu", "80", "--model.path", "Qwen2.5-7B"]) in (0, 2)
    told = capsys.readouterr()
    assert "Qwen2.5-7B, 7,615,616,512 weights" in told.out + told.err
