"""An engine built from a configuration: speculation configured, tokens unchanged."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.test_speculation import tokens_of
from tlt.bench.options import RolloutScale
from tlt.bench.variants import VariantRunner
from tlt.config import DRAFTERS, NEW, DraftSettings, EngineSettings, RunConfig, SpecSettings
from tlt.engine.build import build_engine, make_ready, shape_policy_of, shapes_of
from tlt.engine.chunks import copied_slots
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.engine.scheduler import Copy
from tlt.errors import ConfigError, ModelError
from tlt.fleet import Worker
from tlt.kernels import compiling
from tlt.model.linear import reads_quantized
from tlt.policy import open_policy
from tlt.spec.bandit import Bandit
from tlt.spec.costs import DRAFT, EXTEND, POLICY, Measured
from tlt.spec.drafter import Drafter
from tlt.spec.eagle_files import open_drafter
from tlt.spec.record import FILE, DraftRecord, write_record
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import Fixed
from tlt.spec.speculation import Speculating
from tlt.spec.tuner import Tuner
from tlt.tasks.choose import task_of
from tlt.types import Key, SamplingParams


@pytest.mark.parametrize("shape_policy", ["tuner", "beg-mab", "fixed"])
def test_the_suffix_drafter_leaves_the_rollout_of_the_tiny_policy_as_it_is(shape_policy: str) -> None:
    config = RunConfig(sampling=SamplingParams(max_tokens=160))
    policy, task = open_policy(config.model), task_of(config)
    batch = [
        Request(Key(0, 4 * i + j), tuple(policy.tokenizer.encode_prompt(prompt.content)), config.sampling, prompt.id)
        for i, prompt in enumerate(task.sample(0, 3))
        for j in range(4)
    ]
    rollouts = []
    for spec in (SpecSettings(), SpecSettings(drafter="suffix", shape_policy=shape_policy)):  # type: ignore[arg-type]
        engine = build_engine(policy, replace(config, spec=spec))
        engine.submit(batch)
        rollouts.append(tokens_of({completion.key: completion for completion in engine.drain()}))
    assert rollouts[0] == rollouts[1]


def test_a_drafter_of_ones_own_is_one_class_and_one_entry() -> None:
    """The example's drafter drafts, alone and beside another, and the tokens are those of plain decoding."""
    from examples.custom_drafter import MostFrequent

    assert DRAFTERS["frequent"] is MostFrequent
    config = RunConfig(sampling=SamplingParams(max_tokens=60))
    policy, task = open_policy(config.model), task_of(config)
    prompts = [tuple(policy.tokenizer.encode_prompt(prompt.content)) for prompt in task.sample(0, 8)]
    found = {}
    for name in ("none", "frequent", "frequent+suffix"):
        spec = SpecSettings(drafter=name, shape_policy="fixed", depths=(3,), widths=(1,), verifies=(4,))
        shapes = shapes_of(spec)
        assert {one for shape in shapes for one in shape.drafters} == set(spec.drafters)
        engine = build_engine(policy, replace(config, spec=spec), Fixed(shapes[-1]))
        engine.submit([Request(Key(0, number), prompt, config.sampling) for number, prompt in enumerate(prompts)])
        found[name] = tokens_of({completion.key: completion for completion in engine.drain()})
        assert found[name] == found["none"]
        speculation = engine.report().speculation
        assert name == "none" or (speculation is not None and speculation.accepted > 0)
    assert shapes_of(replace(spec, drafter="eagle+suffix", path="x")) == shapes_of(
        replace(spec, drafter="both", path="x")
    )


def test_a_drafter_must_be_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = r"drafter is 'sufix\+eagle'; expected one of none, both, suffix, eagle.*did you mean suffix\?"
    with pytest.raises(ConfigError, match=expected):
        SpecSettings(drafter="sufix+eagle", path="x")
    for wrong in ("", "suffix+", "suffix+none", "both+suffix"):
        with pytest.raises(ConfigError, match="drafter is"):
            SpecSettings(drafter=wrong)

    class Unnamed(Drafter):
        pass

    for entry in (Unnamed, "math:sin", int):
        monkeypatch.setitem(DRAFTERS, "mine", entry)
        with pytest.raises(ConfigError, match=r"DRAFTERS\['mine'\] is .*; expected a subclass"):
            build_engine(open_policy(RunConfig().model), RunConfig(spec=SpecSettings(drafter="mine")))


def test_two_drafters_on_the_device_are_refused() -> None:
    class Other(Drafter):
        name, on_device = "other", True

    class Another(Other):
        name = "another"

    with pytest.raises(ConfigError, match=r"drafters \['another', 'other'\] run on the device; expected one at most"):
        Speculating([Other(), Another()], Fixed(OFF))


def test_nobody_guesses_unless_asked() -> None:
    assert shapes_of(SpecSettings()) == (OFF,)
    assert {shape.drafters for shape in shapes_of(SpecSettings(drafter="both", path="x"))} == {
        (),
        ("suffix",),
        ("eagle",),
        ("eagle", "suffix"),
    }
    with pytest.raises(ConfigError, match="verifies is"):
        SpecSettings(verifies=(1,))
    with pytest.raises(ConfigError, match="path is ''; expected the directory of a learned drafter"):
        SpecSettings(drafter="eagle")


def test_one_shape_is_the_deepest_chain_in_every_tick() -> None:
    spec = SpecSettings(drafter="both", path="x", shape_policy="fixed")
    shape_policy = shape_policy_of(spec, rows=8)
    assert {shape_policy.choose(batch) for batch in (1, 8)} == {Shape(("eagle",), depth=15, width=1, verify=16)}


def test_a_drafter_that_is_not_there_is_an_error() -> None:
    config = RunConfig(spec=SpecSettings(drafter="eagle", path="nosuch"))
    with pytest.raises(ModelError, match="nosuch"):
        build_engine(open_policy(config.model), config)


def tuner_of(spec: SpecSettings) -> Tuner:
    shape_policy = shape_policy_of(spec, rows=8)
    assert isinstance(shape_policy, Tuner)
    return shape_policy


def test_a_new_tuner_knows_what_its_drafter_was_measured_to_accept(tmp_path: Path) -> None:
    spec = SpecSettings(drafter="both", path=str(tmp_path))
    chain, other = Shape(("eagle",), 7, 1, 8), Shape(("suffix",), 7, 1, 8)
    stranger = tuner_of(spec).expected(chain, 1)[0]
    write_record(DraftRecord(((0.9, 0.05),), places=100, temperature=1.0), tmp_path)
    tuner = tuner_of(spec)
    assert tuner.expected(chain, 1)[0] == pytest.approx(1 + sum(0.9**depth for depth in range(1, 8)), rel=0.03)
    assert tuner.expected(other, 1)[0] == stranger < 1.5
    assert tuner.report().ticks == 0
    for apart in (replace(spec, path=NEW), replace(spec, drafter="eagle", path=str(tmp_path / "elsewhere"))):
        assert tuner_of(apart).expected(chain, 1)[0] == stranger
    for drafter in ("suffix", "none"):
        assert tuner_of(replace(spec, drafter=drafter)).report().ticks == 0  # has no use for it
    for shape_policy in ("beg-mab", "fixed"):
        assert not shape_policy_of(replace(spec, shape_policy=shape_policy), 8).choose(1).off


def test_a_record_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(ModelError, match=r"acceptance\.json is no record of a drafter"):
        shape_policy_of(SpecSettings(drafter="eagle", path=str(tmp_path)), rows=8)


def test_requests_share_what_is_verified_on_a_gpu_where_a_tuner_chooses() -> None:
    spec = SpecSettings(drafter="both", path="x")
    shared = {shape for shape in shapes_of(spec) if shape.share}
    assert {shape.drafters for shape in shared} == {("eagle",), ("suffix",)}
    assert not any(shape.share for shape in shapes_of(spec, exact=True))
    for shape_policy in ("beg-mab", "fixed"):
        assert not any(shape.share for shape in shapes_of(replace(spec, shape_policy=shape_policy)))
    for on_gpu in (True, False):
        tuner = shape_policy_of(spec, 8, on_gpu=on_gpu)
        assert isinstance(tuner, Tuner)
        assert shared & set(tuner._shapes) == (shared if on_gpu else set())


def test_drafts_are_light_only_where_a_gpu_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU:
        """As much of a matrix as is asked about."""

        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda")

    assert RunConfig().spec.quantized
    assert not reads_quantized(torch.zeros(1, dtype=torch.bfloat16))
    for capability, expected in (((8, 6), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert reads_quantized(OnGPU()) == expected  # type: ignore[arg-type]


def test_a_drafter_from_nothing_is_as_wide_as_asked() -> None:
    config = RunConfig(spec=SpecSettings(drafter="eagle", path=NEW), draft=DraftSettings(mlp=0.25, window=24))
    policy = open_policy(config.model)
    found = open_drafter(policy, config).config
    assert (found.layer.mlp, found.window) == (policy.model.config.mlp // 4, 24)


def test_settings_that_allow_no_tree_are_refused() -> None:
    with pytest.raises(ConfigError, match="allow no tree"):
        shapes_of(SpecSettings(drafter="suffix", depths=(3,), widths=(1,), verifies=(16,), shares=()))
    with pytest.raises(ConfigError, match="widths is"):
        SpecSettings(widths=(32,))


def test_more_sizes_than_the_bandit_has_ranges_for_are_refused() -> None:
    sizes, more = tuple(range(2, 8)), tuple(range(2, 9))
    spec = SpecSettings(
        drafter="suffix", shape_policy="beg-mab", depths=(1,), widths=tuple(range(1, 8)), verifies=sizes
    )
    assert isinstance(shape_policy_of(spec, 64), Bandit)
    with pytest.raises(ConfigError, match="verifies has 7 sizes"):
        shape_policy_of(replace(spec, verifies=more), 64)


@pytest.mark.parametrize("top_k", [0, 5])
def test_graphs_of_all_trees_that_could_pay_are_captured_at_start_up(top_k: int) -> None:
    """Nothing has to be known of the drafter; where there are no graphs, nothing is captured."""
    asked: list[tuple[Shape, int, bool]] = []
    spec = SpecSettings(drafter="eagle", path=NEW)
    config = RunConfig(engine=EngineSettings(rows=4), spec=spec, sampling=SamplingParams(top_k=top_k))
    measured = [
        Measured(role, size, s) for role, s in ((POLICY, 1e-2), (EXTEND, 1e-4), (DRAFT, 1e-4)) for size in (1, 64)
    ]
    tuner = shape_policy_of(spec, 4, measured)
    for pool in (None, object()):
        engine: Any = SimpleNamespace(
            report=lambda pool=pool: SimpleNamespace(graphs=pool),
            ready=lambda shape, size, filtered: asked.append((shape, size, filtered)),
        )
        make_ready(engine, tuner, config)
        assert bool(asked) == (pool is not None)
    assert {size for _, size, _ in asked} == {1, 2, 4}
    assert {filtered for _, _, filtered in asked} == {top_k > 0}
    assert {shape.verify for shape, _, _ in asked} >= {2, 4, 8, 16}


def test_a_drafter_that_has_learned_nothing_is_not_tried_before_it_has() -> None:
    shape = Shape(("eagle",), 3, 1, 4)
    config = RunConfig(engine=EngineSettings(rows=2), spec=SpecSettings(drafter="eagle", path=NEW))
    policy = open_policy(config.model)
    tuner = shape_policy_of(config.spec, config.engine.rows)
    assert isinstance(tuner, Tuner)
    stranger = tuner.expected(shape, 1)[0]
    build_engine(policy, config, tuner)
    new = tuner.expected(shape, 1)[0]
    tuner.drafter_changed("eagle")
    assert 1.0 <= new < 1.01 < tuner.expected(shape, 1)[0] <= stranger


def test_numbers_next_to_nothing_count_as_zero_on_a_cpu() -> None:
    """A CPU computes with them a hundred times slower, and softmax and its gradients are full of them."""
    tiny = torch.full((64,), 1e-37)
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU has no such switch")
    assert (tiny * 1e-3 != 0).all()
    open_policy(replace(RunConfig().model, device="cpu"))
    assert (tiny * 1e-3 == 0).all()


@pytest.mark.parametrize(("drafter", "works"), [("none", 1), ("suffix", 1), ("eagle", 2)])
def test_what_an_engine_runs_is_compiled_when_it_is_built(
    monkeypatch: pytest.MonkeyPatch, drafter: str, works: int
) -> None:
    """The policy's part, and a learned drafter's, before anything is timed."""
    order: list[str] = []
    measure = EngineCore.measure
    monkeypatch.setattr(compiling, "compile_ahead", lambda work: order.append("compiled"))
    monkeypatch.setattr(EngineCore, "measure", lambda engine: (order.append("measured"), measure(engine))[1])
    path = NEW if drafter == "eagle" else ""
    config = RunConfig(spec=SpecSettings(drafter=drafter, path=path), engine=EngineSettings(rows=2, kv_gib=0.01))
    build_engine(open_policy(config.model), config)
    assert order == ["compiled"] * works + ["measured"] * (drafter != "none")


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_engines_to_compare_with_are_compiled_for_what_is_asked(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or those that decode plainly would capture graphs while they are timed."""
    compiled: list[bool] = []
    monkeypatch.setattr(EngineCore, "compile", lambda engine, *, filtered=False: compiled.append(filtered))
    config = RunConfig(engine=EngineSettings(rows=4), sampling=SamplingParams(max_tokens=8, top_p=top_p))
    Worker(config).plain_engine()
    VariantRunner(open_policy(config.model), config, [(3, 4, 5)], RolloutScale(1, 2, 8, 1))
    assert compiled == [top_p < 1.0] * 4


def test_as_many_slots_of_a_page_are_copied_as_are_held() -> None:
    copies = [Copy(3, 7, 2), Copy(0, 1, 4)]
    assert copied_slots(copies, 4) == ([[12, 13, -1, -1], [0, 1, 2, 3]], [[28, 29, -1, -1], [4, 5, 6, 7]])
