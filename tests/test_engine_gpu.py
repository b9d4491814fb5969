"""On a GPU: graphs change no token, tokens follow the policy, and a tick waits for the device once."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

from tests.tiny import letters
from tlt.config import EngineSettings
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.engine.timer import TickMarks, TickTimer
from tlt.kernels.linear import plan as linear_table
from tlt.model.attention import PackedLayout
from tlt.model.config import ModelConfig
from tlt.model.linear import rows_of
from tlt.model.transformer import Transformer
from tlt.spec.costs import DECODE, DRAFT, EXTEND, KEEP, PRUNE, VERIFY, TickTimes
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.learned import LearnedDrafting
from tlt.spec.shape import OFF, Shape
from tlt.spec.shape_policy import Fixed, SwappableShapePolicy
from tlt.spec.speculation import Speculating
from tlt.spec.suffix import SuffixDrafting
from tlt.types import Completion, Key, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def gpu_policy() -> Transformer:
    config = ModelConfig.from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": 1000,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 2048,
        }
    )
    model = Transformer(config, dtype=torch.bfloat16, device="cuda")
    model.init_weights(0)
    return model


def batch(count: int) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    settings = [
        SamplingParams(max_tokens=70),
        SamplingParams(temperature=0.0, max_tokens=33),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, max_tokens=150),
    ]
    made = []
    for index in range(count):
        if index % 4 == 0:
            length = int(torch.randint(1, 300, (), generator=generator))
            prompt = tuple(torch.randint(2, 1000, (length,), generator=generator).tolist())
        made.append(Request(Key(9, index), prompt, settings[index % 3], f"p{index // 4}"))
    return made


def completions(model: Transformer, **knobs: object) -> dict[Key, Completion]:
    engine = EngineCore(model, letters(), EngineSettings(**knobs))
    engine.submit(batch(24))
    done = {completion.key: completion for completion in engine.drain()}
    assert len(done) == 24
    return done


def test_graphs_change_no_token() -> None:
    model = gpu_policy()
    plain = completions(model, rows=24, graphs=False)
    captured = completions(model, rows=24, graphs=True)
    assert {k: c.tokens for k, c in plain.items()} == {k: c.tokens for k, c in captured.items()}


def assert_log_probs_of_the_packed_forward(model: Transformer, completions: Iterable[Completion]) -> None:
    gaps = []
    for completion in completions:
        text = torch.tensor([*completion.prompt_tokens, *completion.tokens], device="cuda")
        hidden = model(text, PackedLayout.from_lengths([len(text)], "cuda")).hidden_TD
        logprobs = model.logits(hidden).float().log_softmax(-1).detach()
        first = len(completion.prompt_tokens) - 1
        chosen = logprobs[first : first + len(completion.tokens)].gather(1, text[first + 1 :, None]).squeeze(1)
        gaps.append((chosen.cpu() - torch.tensor(completion.policy_logprobs)).abs())
    worst = torch.cat(gaps)
    assert worst.mean() < 0.02
    assert worst.max() < 0.25


def test_log_probs_are_those_of_the_packed_forward() -> None:
    model = gpu_policy()
    assert_log_probs_of_the_packed_forward(model, completions(model, rows=24).values())


@pytest.mark.parametrize("share", [0.0, 2.5])
def test_log_probs_of_verified_tokens_are_those_of_the_packed_forward(share: float) -> None:
    model = gpu_policy()
    engine, _ = learned_engine(model, lambda: Shape(("eagle",), 4, 2, 7, share), graphs=True)
    engine.submit(batch(24))
    done = engine.drain()
    assert len(done) == 24
    report = engine.report().speculation
    assert report is not None
    assert report.verifies > 1000
    assert_log_probs_of_the_packed_forward(model, done)


def test_log_probs_of_accepted_tokens_are_those_of_the_packed_forward() -> None:
    """A random drafter is seldom right: here is one who knows most of what will be written."""
    model = gpu_policy()
    _, done = with_an_oracle(model)
    assert_log_probs_of_the_packed_forward(model, done)


def with_an_oracle(model: Transformer) -> tuple[dict[Key, list[int]], list[Completion]]:
    """What plain decoding writes, and what is written with drafts that mostly say just that."""
    from tests.test_speculation import Scripted, changing, oracle

    plain = {key: list(completion.tokens) for key, completion in completions(model, rows=24).items()}
    speculation = Scripted(oracle(plain, miss=0.2), changing(4))
    engine = EngineCore(model, letters(), EngineSettings(rows=24), speculation=speculation)
    engine.submit(batch(24))
    done = engine.drain()
    assert speculation.accept_length > 1.3
    return plain, done


def test_preempted_requests_are_answered() -> None:
    """Few pages: requests lose theirs and come back. Recomputing in one piece rounds otherwise: tokens may differ."""
    model = gpu_policy()
    from tlt.model.kv import KVCache

    gib = 60.5 * KVCache.page_bytes(model.config, 16, torch.bfloat16) / 1024**3
    engine = EngineCore(model, letters(), EngineSettings(rows=24, kv_gib=gib))
    engine.submit(batch(24))
    done = engine.drain()
    assert len(done) == 24
    assert engine.report().preemptions > 0


def assert_waits_once(engine: EngineCore, max_tokens: int) -> None:
    """Once graphs are captured, no tick waits for the device but to read its tokens."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.submit([Request(Key(0, i), (5 + i, 6, 7), params, str(i)) for i in range(8)])
    for _ in range(40):
        engine.tick()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            engine.tick()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(engine.drain()) == 8


@pytest.mark.parametrize(
    "shape", [Shape(), *(Shape(who, 4, 2, 7) for who in (("eagle",), ("suffix",), ("eagle", "suffix")))], ids=str
)
def test_who_comes_in_makes_nobody_wait(shape: Shape) -> None:
    """Prompts are computed, their states recalled and rows moved while the device is still at the tick before."""
    engine, _ = learned_engine(gpu_policy(), lambda: shape, graphs=True)
    assert_waits_once(engine, max_tokens=400)  # captures what is needed
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    prompt = range(2, 90) if shape.off else range(2, 8)  # a drafter that has much to take in does wait, to be timed
    later = [Request(Key(1, i), (5 + i, *prompt), params, f"later {i}") for i in range(12)]
    engine.submit(replace(one, params=replace(params, max_tokens=5 + i)) for i, one in enumerate(later[:8]))
    for _ in range(2):
        engine.tick()
    done = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.submit(later[8:])
        for _ in range(16):  # the first ones end meanwhile, and others take their rows
            done += len(engine.tick())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert done >= 4
    assert done + len(engine.drain()) == 12


def test_a_steady_tick_waits_for_nothing_but_its_tokens() -> None:
    engine = EngineCore(gpu_policy(), letters(), EngineSettings(rows=8))
    assert_waits_once(engine, max_tokens=120)


def test_features_cost_no_token() -> None:
    model = gpu_policy()
    seen = []
    engine = EngineCore(
        model,
        letters(),
        EngineSettings(rows=24),
        taps=(1, 2),
        on_features=lambda features: seen.append(features.hidden.shape[0]),
    )
    engine.submit(batch(24))
    with_features = {completion.key: completion.tokens for completion in engine.drain()}
    assert with_features == {key: completion.tokens for key, completion in completions(model, rows=24).items()}
    assert sum(seen) >= sum(len(tokens) for tokens in with_features.values())


@pytest.mark.parametrize("length", [6, 300])  # by our kernels, by the library
@torch.no_grad()
def test_tapping_changes_no_bit(length: int) -> None:
    """The stream behind a tap is written elsewhere, and the tap is what the next layer read."""
    model, streams = gpu_policy(), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: streams.append(rows_of(inputs[0]).clone()))
    tokens, layout = torch.arange(length, device="cuda"), PackedLayout.from_lengths([length], "cuda")
    expected = model(tokens, layout)
    found = model(tokens, layout, taps=(0, 1, 2))
    assert torch.equal(found.hidden_TD, expected.hidden_TD)
    for tap, before, now in zip(found.taps, streams[:3], streams[3:], strict=True):
        assert torch.equal(tap, before)
        assert torch.equal(tap, now)


def test_speculation_keeps_the_tokens_up_to_rounding() -> None:
    """Other batch shapes round otherwise in bfloat16; few tokens may turn, and drafts must really be accepted."""
    plain, written = with_an_oracle(gpu_policy())
    done = {completion.key: list(completion.tokens) for completion in written}
    tokens = turned = 0
    for key, expected in plain.items():
        agreed = next((i for i, (a, b) in enumerate(zip(done[key], expected, strict=False)) if a != b), len(expected))
        tokens += agreed + 1
        turned += done[key] != expected
    assert turned / tokens < 0.03, f"{turned} answers left their course within {tokens} tokens"


def learned_engine(
    model: Transformer, shapes: Callable[[], Shape], graphs: bool, quantized: bool = False
) -> tuple[EngineCore, LearnedDrafting]:
    from tests.test_learned import Always

    learned = LearnedDrafting(drafter_of(model), model, rows=24, quantized=quantized)
    always = Always(lambda running: shapes() if running else Shape())
    speculation = Speculating([learned, SuffixDrafting(10_000)], always, deepest=8)
    return EngineCore(model, letters(), EngineSettings(rows=24, graphs=graphs), speculation=speculation), learned


Guesses = dict[tuple[Key, int], tuple[int, ...]]  # by request and tokens written


def guesses(engine: EngineCore, learned: LearnedDrafting, most: int) -> Guesses:
    """What will be drafted from now on, so many tokens of each tree."""
    propose, seen = engine._speculation.propose, Guesses()

    def spy(keys, completions, shape):  # type: ignore[no-untyped-def]
        drafts = propose(keys, completions, shape)
        for key, completion in zip(keys, completions, strict=True):
            seen[key, len(completion)] = learned.start_trees(keys, shape).draft(key).tokens[:most]
        return drafts

    engine._speculation.propose = spy  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("share", [0.0, 2.5])
def test_trees_grown_in_graphs_are_those_grown_without(share: float) -> None:
    """And whatever is grown, the tokens stay, up to rounding."""
    model = gpu_policy()
    new_pages: list[Guesses] = []
    done: list[dict[Key, tuple[int, ...]]] = []
    for graphs in (False, True):
        ticks = iter(range(10**6))
        engine, learned = learned_engine(
            model,
            lambda: Shape() if next(ticks) % 9 < 3 else Shape(("eagle",), 4, 2, 7, share),  # noqa: B023
            graphs,
        )
        new_pages.append(guesses(engine, learned, 2))
        engine.submit(batch(24))
        done.append({completion.key: completion.tokens for completion in engine.drain()})
    common = [place for place in new_pages[0] if place in new_pages[1]]
    assert len(common) > 100
    assert sum(new_pages[0][place] == new_pages[1][place] for place in common) > 0.9 * len(common)
    plain = {key: completion.tokens for key, completion in completions(model, rows=24).items()}
    for tokens in done:
        assert sum(tokens[key] == expected for key, expected in plain.items()) > 12


@pytest.mark.parametrize("share", [0.0, 2.5])
@pytest.mark.parametrize("drafters", [("eagle",), ("suffix",), ("eagle", "suffix")], ids="+".join)
def test_a_steady_verify_tick_waits_for_nothing_but_its_tokens(drafters: tuple[str, ...], share: float) -> None:
    """Whoever drafts on the host reads the tokens, and the learned drafter's trees, as they arrive: that is no wait for
    whatever else the device does."""
    engine, _ = learned_engine(gpu_policy(), lambda: Shape(drafters, 4, 2, 7, share), graphs=True)
    assert_waits_once(engine, max_tokens=400)


def test_drafts_in_8_bits_are_nearly_those_in_16(monkeypatch: pytest.MonkeyPatch) -> None:
    """And follow the drafter's tensors when these change; tokens stay, up to rounding."""
    monkeypatch.setattr(linear_table, "LEAST_QUANTIZED", {16: 0, 32: 0})  # a tiny drafter's matrices are small
    model = gpu_policy()
    plain = {key: completion.tokens for key, completion in completions(model, rows=24).items()}
    new_pages: list[Guesses] = []
    for quantized, loaded in ((False, True), (True, True), (False, False)):
        engine, learned = learned_engine(model, lambda: Shape(("eagle",), 4, 1, 5), graphs=True, quantized=quantized)
        assert bool(learned.drafter._quantized) == quantized
        if loaded:
            other = Eagle(learned.drafter.config, dtype=torch.bfloat16, device="cuda")
            other.init_weights(4)
            with torch.no_grad():
                for weight in other.parameters():
                    weight.mul_(2.0)
            learned.load(dict(other.named_parameters()), version=1)
        new_pages.append(guesses(engine, learned, 1))
        engine.submit(batch(24))
        done = {completion.key: completion.tokens for completion in engine.drain()}
        assert sum(done[key] == expected for key, expected in plain.items()) > 12
    common = [place for place in new_pages[0] if place in new_pages[1] and place in new_pages[2]]
    assert len(common) > 100
    alike, others = (sum(new_pages[0][at] == guessed[at] for at in common) / len(common) for guessed in new_pages[1:])
    assert alike > 0.6, f"{alike:.2f} of the guesses in 8 bits are those in 16"
    assert alike - others > 0.1, f"{others:.2f} are those of the drafter before it changed"


def test_what_is_compiled_beforehand_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel runs; rows and the drafter's memory are as new; what is drafted then is what would have been."""
    from triton.compiler import CompiledKernel

    model, shape = gpu_policy(), Shape(("eagle",), 4, 2, 7, 2.5)
    new_pages: list[Guesses] = []
    for compiled in (False, True):
        engine, learned = learned_engine(model, lambda: shape, graphs=True)
        if compiled:
            tensors = [*states_of(learned._memory), *states_of(engine._runner._rows)]
            before = [tensor.clone() for tensor in tensors]
            with monkeypatch.context() as patch:
                patch.setattr(CompiledKernel, "run", property(lambda kernel: _not_now))
                learned.compile([shape, Shape(("eagle",), 4, 2, 7)])
                engine._runner.compile(8, 5)
            torch.cuda.synchronize()
            assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, before, strict=True))
        new_pages.append(guesses(engine, learned, 2))
        engine.submit(batch(24))
        assert len(engine.drain()) == 24
    common = [place for place in new_pages[0] if place in new_pages[1]]
    assert len(common) > 100
    assert sum(new_pages[0][place] == new_pages[1][place] for place in common) > 0.9 * len(common)


def _not_now(*launch: object) -> None:
    raise AssertionError("a kernel was launched")


def states_of(owner: object) -> list[torch.Tensor]:
    """Every tensor it has."""
    names = getattr(owner, "__slots__", None) or vars(owner)
    return [value for name in names if isinstance(value := getattr(owner, name), torch.Tensor)]


def drafter_of(model: Transformer) -> Eagle:
    drafter = Eagle(EagleConfig.of_policy(model.config, window=64), dtype=torch.bfloat16, device="cuda")
    drafter.init_weights(3)
    return drafter


@pytest.mark.parametrize("graphs", [True, False])
def test_parts_of_ticks_are_timed_on_the_device(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plainly, then in one shape: every part has a time, and all of them fit into the tick."""
    model, shape, told = gpu_policy(), Shape(("eagle",), 3, 2, 6), list[TickTimes]()
    learned, read = LearnedDrafting(drafter_of(model), model, rows=16), TickTimer.read

    def reading(timer: TickTimer, tick: TickMarks) -> TickTimes:
        told.append(read(timer, tick))
        return told[-1]

    monkeypatch.setattr(TickTimer, "read", reading)
    policy = SwappableShapePolicy()
    engine = EngineCore(
        model, letters(), EngineSettings(rows=16, graphs=graphs), speculation=Speculating([learned], policy, deepest=8)
    )
    usual = {DECODE: {DECODE}, VERIFY: {VERIFY, EXTEND, DRAFT, PRUNE}}
    for kind, chosen in ((DECODE, OFF), (VERIFY, shape)):
        policy.now = Fixed(chosen)
        for seed in range(3):  # graphs are captured in the first two
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            engine.submit([Request(Key(seed, row), (3, 4, 5 + row), params, f"{row}") for row in range(16)])
            told.clear()
            engine.drain()
        settled = [times for times in told if times.seconds is not None and not times.one_off_s]
        settled = [times for times in settled if times.parts.keys() == usual[kind]]
        assert len(settled) > 10
        beside = sorted(1.0 - sum(times.parts.values()) / times.seconds for times in settled if times.seconds)
        middle = settled[len(settled) // 2]
        print(f"graphs {graphs}, {kind}: {middle}, beside {beside[len(beside) // 2]:.1%}")
        assert all(seconds > 0.0 for times in settled for seconds in times.parts.values())
        assert beside[0] > -0.02, "parts overlap nowhere"


def test_what_timing_a_part_costs_the_host() -> None:
    """Printed, with `-s`: a plain tick has one part, one that speculates four."""
    timer = TickTimer(torch.device("cuda"), lambda: 0.0)
    end = torch.cuda.Event(enable_timing=True)
    for name, work in (("first", 200), ("then", 2000)):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(work):
            for part in (EXTEND, DRAFT, PRUNE, VERIFY):
                with timer.part(part):
                    pass
            end.record()
            marks = timer.launched(end)
            end.synchronize()
            times = timer.read(marks)
        each_s = (time.perf_counter() - started) / work / 4
        print(f"{name}: {1e6 * each_s:.1f} µs for each part")
    assert times.parts.keys() == {EXTEND, DRAFT, PRUNE, VERIFY}


def test_keeping_states_is_timed_before_anybody_comes() -> None:
    model = gpu_policy()
    learned = LearnedDrafting(drafter_of(model), model, rows=16)
    engine = EngineCore(model, letters(), EngineSettings(rows=16), speculation=Speculating([learned], Fixed(OFF)))
    found = [measured for measured in engine.measure() if measured.role == KEEP]
    print(found)
    assert len(found) == 2
    assert all(measured.seconds > 0.0 for measured in found)
