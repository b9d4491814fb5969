"""A widened drafter reads a widened policy and names what the small one names of the small policy."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from tlt.bench.drafter_widen import widen_drafter
from tlt.config import DrafterArchitecture, EngineSettings, RunConfig, SpecSettings
from tlt.engine.build import build_engine
from tlt.engine.request import Request
from tlt.errors import ModelError
from tlt.model.config import ModelConfig
from tlt.model.transformer import Transformer
from tlt.model.widen import widen
from tlt.policy import Policy
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.eagle_files import Origin, load_drafter, save_drafter
from tlt.spec.shape import Shape
from tlt.spec.shape_policy import Fixed
from tlt.train.drafter import policy_states
from tlt.train.packing import Example, pack
from tlt.types import Completion, Key, SamplingParams

SMALL = tiny.policy(sharpness=2.0)
# a width that is no multiple, more heads of each kind, another layer, a wider MLP
SIZE = {"hidden": 56, "mlp": 100, "layers": 3, "heads": 8, "kv_heads": 4}
CONFIG = SMALL.config.reshaped(**SIZE, norm_eps=SMALL.config.norm_eps * SMALL.config.hidden / SIZE["hidden"])
WIDE = widen(SMALL, CONFIG)
IDS = torch.arange(0, tiny.VOCAB, 2)


def drafter(*, reduced: bool = False, architecture: DrafterArchitecture = "eagle-3") -> Eagle:
    vocab = len(IDS) if reduced else 0
    shape = EagleConfig.of_policy(SMALL.config, window=16, draft_vocab=vocab, architecture=architecture)
    model = Eagle(shape, dtype=torch.float64)
    model.init_weights(0, IDS if reduced else None)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm"):
                weight.copy_(torch.linspace(0.5, 1.5, len(weight)))
            else:
                weight.mul_(8.0)
    return model


def draft_logits(model: Eagle, policy: Transformer, steps: int = 3) -> list[Tensor]:
    examples = [Example(tuple((7 * i + 3 * n) % tiny.VOCAB for i in range(n)), 3) for n in (30, 9)]
    (row,) = pack(examples, 39)
    batch = policy_states(policy, row, model.config.taps)
    head = model.head_rows(policy.head_weight)
    with torch.no_grad():
        return [model.logits(g, head) for g in model.unroll(batch.aligned, batch.features_TF, policy.embed, steps)]


@pytest.mark.parametrize(("reduced", "architecture"), [(False, "eagle-3"), (True, "eagle-3"), (True, "eagle-3.1")])
def test_the_logits_stay(reduced: bool, architecture: DrafterArchitecture) -> None:
    small = drafter(reduced=reduced, architecture=architecture)
    wide = widen_drafter(small, CONFIG)
    pairs = zip(draft_logits(small, SMALL), draft_logits(wide, WIDE), strict=True)
    for step, (expected, found) in enumerate(pairs):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=f"draft step {step}")
    assert draft_logits(small, SMALL)[0].std() > 0.1, "the test must have opinions to compare"


def test_it_costs_what_a_drafter_of_that_size_costs() -> None:
    wide, fresh = widen_drafter(drafter(), CONFIG), Eagle(EagleConfig.of_policy(CONFIG, window=16))
    assert {n: p.shape for n, p in wide.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    assert wide.config.taps == drafter().config.taps
    for name in ("qkv", "gate_up"):
        matrix = getattr(wide, name)
        assert (matrix == 0).double().mean() < 0.01, f"{name} is full of zeros: hardware runs faster on those"


def test_a_narrow_mlp_stays_narrow() -> None:
    """A drafter whose MLP was to be half as wide as its policy's, in steps of 16, is that in every shape."""
    shape = EagleConfig.of_policy(SMALL.config, window=16, mlp=0.5)
    assert (SMALL.config.mlp, shape.layer.mlp) == (48, 32)
    small = Eagle(shape, dtype=torch.float64)
    small.init_weights(5)
    wide = widen_drafter(small, CONFIG, mlp=0.5)
    assert wide.config.layer == EagleConfig.of_policy(CONFIG, window=16, mlp=0.5).layer
    assert wide.down.shape == (CONFIG.hidden, 48)
    for expected, found in zip(draft_logits(small, SMALL), draft_logits(wide, WIDE), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_head_of_its_own_grows_along() -> None:
    small = drafter()
    small.register_buffer("own_head_vD", torch.randn(tiny.VOCAB, SMALL.config.hidden, dtype=torch.float64))
    expected = draft_logits(small, SMALL)[1]
    torch.testing.assert_close(draft_logits(widen_drafter(small, CONFIG), WIDE)[1], expected, rtol=1e-9, atol=1e-9)


def test_a_policy_that_is_no_widened_form_is_refused() -> None:
    with pytest.raises(ModelError, match="no widened form"):
        widen_drafter(drafter(), replace(CONFIG, layers=1))
    with pytest.raises(ModelError, match="norm_eps"):
        widen_drafter(drafter(), SMALL.config.reshaped(**SIZE, norm_eps=SMALL.config.norm_eps))


def test_it_drafts_the_same_in_the_engine(tmp_path: Path) -> None:
    """Same answers, same verifies, same accepted tokens: through files, rings, trees and all."""
    small = drafter()
    origin = Origin("tiny", ("LlamaForCausalLM",))
    save_drafter(small, tmp_path / "small", SMALL.head_weight, origin)
    save_drafter(widen_drafter(small, CONFIG), tmp_path / "wide", WIDE.head_weight, origin)
    found = [speculated(SMALL, tmp_path / "small"), speculated(WIDE, tmp_path / "wide")]
    assert found[0] == found[1]
    _, verifies, accepted = found[0]
    assert accepted > verifies, "the test must accept drafts to mean anything"


def speculated(model: Transformer, path: Path) -> tuple[list[tuple[int, ...]], int, int]:
    config = RunConfig(
        spec=SpecSettings(drafter="eagle", path=str(path), depths=(3,), widths=(4,)),
        engine=EngineSettings(rows=4, kv_gib=0.01),
    )
    engine = build_engine(Policy(model, tiny.letters(), path), config, Fixed(Shape(("eagle",), 3, 4, 13)))
    params = SamplingParams(max_tokens=40)
    engine.submit([Request(Key(0, i), (3, 4 + i, 5), params) for i in range(4)])
    done: list[Completion] = sorted(engine.drain(), key=lambda completion: completion.key.request)
    report = engine.report().speculation
    assert report is not None
    return [completion.tokens for completion in done], report.verifies, report.accepted


def test_a_saved_wide_drafter_names_the_layers_it_reads(tmp_path: Path) -> None:
    """A deeper policy would by itself be read elsewhere."""
    deep: ModelConfig = SMALL.config.reshaped(
        **{**SIZE, "layers": 9}, norm_eps=SMALL.config.norm_eps * SMALL.config.hidden / SIZE["hidden"]
    )
    small = drafter()
    save_drafter(widen_drafter(small, deep), tmp_path, widen(SMALL, deep).head_weight, Origin("tiny", ()))
    assert load_drafter(tmp_path, deep, window=16, dtype=torch.float64).config.taps == small.config.taps
