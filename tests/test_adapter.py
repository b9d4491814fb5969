"""LoRA runs write PEFT adapters: in peft they give the policy's own logits, and a run goes on from them exactly."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tlt
from tests.tiny import policy
from tests.training import numbers, small
from tlt.cli import main
from tlt.config import ModelSettings
from tlt.errors import CheckpointError, ConfigError, ModelError
from tlt.model.attention import PackedLayout
from tlt.model.transformer import Transformer
from tlt.model.weights import hf_tensors, load_policy, read_config, save_policy
from tlt.policy import TINY_POLICY, open_policy
from tlt.train.adapter import CONFIG, WEIGHTS, AdapterWords, merge_adapter, write_adapter
from tlt.train.lora import Lora

PROMPT = torch.tensor([3, 7, 1, 12, 9, 4])
LORA = ("--train.lora_rank=3", "--train.lora_alpha=12", "--run.steps=2", "--checkpoint.merge=true", "--grpo.kl=0.1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a LoRA run with the merged policy beside the adapter."""
    out = tmp_path_factory.mktemp("lora")
    tlt.train(small(out, *LORA, "--checkpoint.every=1", "--checkpoint.keep=5"))
    return out / "run" / "checkpoints" / "step_2"


def logits(model: Transformer) -> Tensor:
    with torch.no_grad():
        hidden = model(PROMPT, PackedLayout.from_lengths((len(PROMPT),), "cpu")).hidden_TD
        return hidden @ model.head_weight.T


def assert_as_transformers(found: Tensor, directory: Path) -> None:
    """Which computes angles and norms in float32."""
    ours = logits(load_policy(directory, dtype=torch.float64))
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_has_an_adapter_and_a_merged_policy(trained: Path) -> None:
    words = json.loads((trained / "adapter" / CONFIG).read_text())
    assert (words["r"], words["lora_alpha"], words["peft_type"]) == (3, 12, "LORA")
    assert words["base_model_name_or_path"] == str(TINY_POLICY)
    modes = {(trained / "adapter" / file).stat().st_mode for file in (CONFIG, WEIGHTS)}
    assert len(modes) == 1, "whoever may read one may read the other"
    assert words["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    adapter, merged = load_file(trained / "adapter" / WEIGHTS), load_file(trained / "policy" / "model.safetensors")
    base = hf_tensors(load_policy(TINY_POLICY, dtype=torch.float64))
    assert json.loads((trained / "policy" / "config.json").read_text())["dtype"] == "float64"
    changed = 0
    for name, weight in merged.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in adapter:
            a, b = adapter.pop(f"{key}A.weight"), adapter.pop(f"{key}B.weight")
            assert a.dtype == b.dtype == weight.dtype
            torch.testing.assert_close(weight, base[name] + 4.0 * b @ a, rtol=1e-12, atol=1e-12)
            changed += not torch.equal(weight, base[name])
        else:
            assert torch.equal(weight, base[name])
    assert not adapter
    assert changed == 7 * read_config(TINY_POLICY).layers


def test_peft_loads_it_with_equal_logits(trained: Path) -> None:
    """The adapter by peft, the merged policy by transformers, and both by tlt."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float64)
    merged = AutoModelForCausalLM.from_pretrained(trained / "policy", dtype="auto")
    with torch.no_grad():
        before = base(PROMPT[None]).logits[0]
        adapted = peft.PeftModel.from_pretrained(base, str(trained / "adapter"), autocast_adapter_dtype=False)
        found = adapted(PROMPT[None]).logits[0]
        assert merged.dtype == torch.float64
        torch.testing.assert_close(found, merged(PROMPT[None]).logits[0], rtol=1e-9, atol=1e-9)
    assert_as_transformers(found, trained / "policy")
    assert (found - before).abs().max() > 1e-3


def test_the_merged_policy_is_loaded_by_transformers(trained: Path) -> None:
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(trained / "policy", dtype="auto")
    with torch.no_grad():
        found = merged(PROMPT[None]).logits[0]
    assert_as_transformers(found, trained / "policy")


def test_an_adapter_opens_as_a_policy(trained: Path) -> None:
    settings = ModelSettings(path=str(trained / "adapter"), dtype="float64", device="cpu")
    opened = open_policy(settings)
    assert opened.source == TINY_POLICY
    expected = logits(load_policy(trained / "policy", dtype=torch.float64))
    torch.testing.assert_close(logits(opened.model), expected, rtol=1e-12, atol=1e-12)


def test_state_of_what_is_trained_alone(trained: Path) -> None:
    """Adam's moments and the adapters themselves: nothing of the size of the policy."""
    adapter = (trained / "adapter" / WEIGHTS).stat().st_size
    assert (
        (trained / "optimizer" / "state.safetensors").stat().st_size
        < 4 * adapter
        < (trained / "policy" / "model.safetensors").stat().st_size
    )


def test_without_merge_there_is_no_policy_and_the_run_goes_on_exactly(tmp_path: Path, trained: Path) -> None:
    flags = [flag for flag in LORA if "merge" not in flag and "steps" not in flag]
    tlt.train(small(tmp_path, *flags, "--run.steps=1"))
    there = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in (there / "step_1").iterdir() if path.is_dir()) == ["adapter", "optimizer"]
    run = tlt.train(small(tmp_path, *flags, "--run.steps=2"), resume=True)
    assert numbers(run) == numbers(tlt.read_run(trained.parents[1]))
    ours, theirs = (load_file(path / "adapter" / WEIGHTS) for path in (there / "step_2", trained))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_adapters_of_another_policy_are_not_gone_on_from(tmp_path: Path) -> None:
    flags = ["--train.lora_rank=2", "--run.steps=1"]
    tlt.train(small(tmp_path, *flags))
    other = load_policy(TINY_POLICY, dtype=torch.float64)
    with torch.no_grad():
        other.blocks[1].down[3, 4] += 0.01
    save_policy(other, tmp_path / "other", tokenizer_from=TINY_POLICY)
    with pytest.raises(CheckpointError, match=r"learned on other weights than model\.path has now"):
        tlt.train(small(tmp_path, "--run.steps=2", flags[0], f"--model.path={tmp_path / 'other'}"), resume=True)
    with pytest.raises(ConfigError, match=r"saved with adapters but train\.lora_rank is 0"):
        tlt.train(small(tmp_path, "--run.steps=2"), resume=True)


def test_an_adapter_of_an_adapter_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is an adapter, and one of an adapter would be learned"):
        tlt.train(small(tmp_path, "--train.lora_rank=2", f"--model.path={trained / 'adapter'}"))


# ---- files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = policy(torch.float32)
    save_policy(model, tmp_path / "base", tokenizer_from=TINY_POLICY)
    lora = Lora(model, rank=2)
    for b in lora.b:
        torch.nn.init.normal_(b, std=0.1)
    write_adapter(lora.peft_tensors(), AdapterWords(str(tmp_path / "base"), None, 2, 1.0), tmp_path / "adapter")
    return tmp_path / "adapter"


def words(**changes: object) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        file = directory / CONFIG
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return damage


def without(part: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        save_file({name: tensor for name, tensor in tensors.items() if part not in name}, directory / WEIGHTS)

    return damage


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (words(peft_type="IA3"), "peft_type is 'IA3'; expected 'LORA'"),
        (words(use_dora=True), "use_dora is True; tlt reads plain LoRA adapters, False"),
        (words(rank_pattern={"q_proj": 4}), "rank_pattern is {'q_proj': 4}"),
        (words(r="2"), "r is '2' and lora_alpha 2; expected a rank"),
        (words(r=3), "has shapes [2, 32] and [32, 2], expected [3, 32] and [32, 3]"),
        (words(base_model_name_or_path=None), "base_model_name_or_path is None; expected the policy's path or name"),
        (words(base_model_name_or_path="nobody/nothing"), "hf download nobody/nothing"),
        (without("layers.0.self_attn.q_proj.lora_A"), "layers.0.self_attn.q_proj.lora_A.weight, unexpected none"),
        (without("lora"), "expected an A and a B for each module"),
        (lambda directory: (directory / WEIGHTS).unlink(), f"expected {WEIGHTS}; copy the adapter again"),
        (lambda directory: (directory / WEIGHTS).write_bytes(b"x"), "cannot be read as safetensors"),
    ],
)
def test_an_adapter_that_does_not_fit_is_told(
    saved: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], told: str
) -> None:
    damage(saved)
    assert main(["generate", str(saved), "1+2=", "--raw", "--model.device=cpu"]) == ModelError.exit_code
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_an_adapter_of_some_modules_changes_these_alone(saved: Path) -> None:
    without("self_attn")(saved)
    model = load_policy(saved.parent / "base")
    before = {name: tensor.clone() for name, tensor in hf_tensors(model).items()}
    merge_adapter(model, saved)
    for name, tensor in hf_tensors(model).items():
        assert torch.equal(tensor, before[name]) != ("mlp" in name and name.endswith("_proj.weight")), name
