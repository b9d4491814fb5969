"""The engine answers every request once, with the tokens plain decoding gives, whatever the batch, pages and order."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.tiny import EOS, VOCAB, letters, policy
from tlt.config import EngineSettings
from tlt.engine.admission import ADMISSIONS, Admission
from tlt.engine.engine import EngineCore
from tlt.engine.pages import PageAllocator
from tlt.engine.request import Request, RequestState
from tlt.engine.sampler import SamplingRows, sample
from tlt.engine.scheduler import Scheduler
from tlt.errors import ConfigError, RequestError
from tlt.model.attention import PackedLayout
from tlt.model.transformer import Transformer
from tlt.recipe import load_config
from tlt.types import Completion, Key, SamplingParams

MODEL = policy()
MIXED = (
    SamplingParams(temperature=1.0, max_tokens=40),
    SamplingParams(temperature=0.0, max_tokens=23),
    SamplingParams(temperature=0.6, top_k=5, max_tokens=31),
    SamplingParams(temperature=1.2, top_p=0.8, max_tokens=50),
)


def requests(count: int, group: int = 1, params: Sequence[SamplingParams] = MIXED, seed: int = 5) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        if index % group == 0:
            length = int(torch.randint(1, 60, (), generator=generator))
            prompt = tuple(torch.randint(2, VOCAB, (length,), generator=generator).tolist())
        made.append(Request(Key(seed, index), prompt, params[index % len(params)], f"prompt {index // group}"))
    return made


@torch.no_grad()
def one_by_one(request: Request, model: Transformer = MODEL) -> tuple[list[int], list[float], list[float]]:
    """Plain decoding, nothing shared with the engine but model and sampler: the whole text is computed each time."""
    tokens: list[int] = []
    logprobs: list[float] = []
    policy_logprobs: list[float] = []
    while len(tokens) < request.params.max_tokens and EOS not in tokens:
        text = torch.tensor([*request.prompt, *tokens])
        logits = model.logits(model(text, PackedLayout.from_lengths([len(text)])).hidden_TD[-1:])
        drawn = sample(logits, SamplingRows.of([request.key], [len(text)], [request.params]))
        tokens.append(int(drawn.token_R))
        logprobs.append(float(drawn.logprob_R))
        policy_logprobs.append(float(drawn.policy_logprob_R))
    return tokens, logprobs, policy_logprobs


def run(batch: Sequence[Request], model: Transformer = MODEL, **knobs: object) -> dict[Key, Completion]:
    engine = EngineCore(model, letters(), EngineSettings(**knobs))
    engine.submit(batch)
    completions = engine.drain()
    assert len(completions) == len(batch)
    return {completion.key: completion for completion in completions}


def kv_gib(pages: int, page_size: int, model: Transformer = MODEL) -> float:
    from tlt.model.kv import KVCache

    return (pages + 0.5) * KVCache.page_bytes(model.config, page_size, model.embed.dtype) / 1024**3


EXPECTED = {request.key: one_by_one(request)[0] for request in requests(12, group=3)}


def test_tokens_and_log_probs_are_those_of_plain_decoding() -> None:
    batch = requests(12, group=3)
    for request, completion in ((r, run(batch)[r.key]) for r in batch[:4]):
        tokens, logprobs, policy_logprobs = one_by_one(request)
        assert list(completion.tokens) == tokens
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert completion.policy_logprobs == pytest.approx(policy_logprobs, abs=1e-5)
        assert completion.finish_reason == ("eos" if tokens[-1] == EOS else "length")
        assert completion.text == letters().decode(tokens)


@pytest.mark.parametrize(
    ("rows", "page_size", "pages", "prefill", "admission"),
    [
        (1, 16, 200, 512, "fifo"),
        (5, 4, 200, 7, "longest"),
        (12, 1, 900, 512, "longest"),
        (12, 16, 9, 64, "fifo"),  # so few pages that requests are preempted
        (7, 4, 31, 5, "longest"),
    ],
)
def test_nothing_about_the_batch_changes_a_token(
    rows: int, page_size: int, pages: int, prefill: int, admission: str
) -> None:
    got = run(
        requests(12, group=3),
        rows=rows,
        page_size=page_size,
        kv_gib=kv_gib(pages, page_size),
        prefill_tokens=prefill,
        admission=admission,
    )
    assert {key: list(completion.tokens) for key, completion in got.items()} == EXPECTED


def test_preemption_really_happens_and_is_told() -> None:
    engine = EngineCore(MODEL, letters(), EngineSettings(rows=12, kv_gib=kv_gib(9, 16)))
    engine.submit(requests(12, group=3))
    completions = engine.drain()
    assert engine.report().preemptions > 0
    assert sum(completion.timing.preemptions for completion in completions) == engine.report().preemptions


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)
@given(
    arrivals=st.lists(st.integers(0, 6), min_size=12, max_size=12),
    rows=st.integers(1, 13),
    page_size=st.sampled_from([2, 8, 16]),
    spare=st.integers(0, 12),
    prefill=st.integers(1, 80),
    admission=st.sampled_from(["fifo", "longest"]),
)
def test_any_arrival_any_pressure_same_tokens(
    arrivals: list[int], rows: int, page_size: int, spare: int, prefill: int, admission: str
) -> None:
    """Requests come while others run; the cache may hold barely one of them."""
    longest = 60 + 50
    pages = -(-longest // page_size) + 1 + spare
    knobs = EngineSettings(
        rows=rows, page_size=page_size, kv_gib=kv_gib(pages, page_size), prefill_tokens=prefill, admission=admission
    )
    engine = EngineCore(MODEL, letters(), knobs)
    got: list[Completion] = []
    for request, pause in zip(requests(12, group=3), arrivals, strict=True):
        engine.submit([request])
        for _ in range(pause):
            got += engine.tick() if not engine.idle else []
    got += engine.drain()
    assert {completion.key: list(completion.tokens) for completion in got} == EXPECTED
    page_stats = engine.report().pages
    assert page_stats.used == 0
    assert page_stats.free + page_stats.cached == pages


def test_a_group_computes_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    from tlt.engine.runner import Runner

    original = Runner._prefill

    def counting(self: Runner, chunks: Sequence[object]) -> None:
        computed.extend(len(chunk.tokens) for chunk in chunks)  # type: ignore[attr-defined]
        original(self, chunks)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "_prefill", counting)
    prompt = tuple(range(2, 32))
    run([Request(Key(0, i), prompt, SamplingParams(max_tokens=3), "p") for i in range(8)], page_size=4)
    assert sum(computed) == len(prompt) - 1


def test_a_group_shares_the_pages_of_its_prompt() -> None:
    """All full ones are there once, whoever reads them; of the rest everybody has its own."""
    prompt, params = tuple(range(2, 32)), SamplingParams(max_tokens=9, ignore_eos=True)
    engine = EngineCore(MODEL, letters(), EngineSettings(page_size=4))
    engine.submit([Request(Key(0, i), prompt, params, "p") for i in range(8)])
    while engine.running < 8:
        engine.tick()
    tables = [req.pages for req in engine._scheduler._reqs]
    full = (len(prompt) - 1) // 4
    assert {tuple(pages[:full]) for pages in tables} == {tuple(tables[0][:full])}
    assert len({page for pages in tables for page in pages[full:]}) == sum(len(pages[full:]) for pages in tables)
    assert engine.report().pages.used <= full + 1 + 8 * max(len(pages[full:]) for pages in tables)


def test_stop_texts_end_an_answer_where_they_are_complete() -> None:
    free = run(requests(6, params=[SamplingParams(max_tokens=40)]))
    for key, completion in free.items():
        text = completion.text
        if len(text) < 12:
            continue
        stop = text[5:8]
        params = SamplingParams(max_tokens=40, stop=("ZZZZ", stop))
        request = next(r for r in requests(6, params=[params]) if r.key == key)
        cut = run([request])[key]
        assert cut.finish_reason == "stop"
        assert cut.text == text[: text.index(stop) + len(stop)]
        assert cut.tokens == completion.tokens[: len(cut.tokens)]
        return
    pytest.fail("no answer was long enough to test with")


def test_max_tokens_and_ignored_ends() -> None:
    batch = requests(6, params=[SamplingParams(max_tokens=60, ignore_eos=True)])
    got = run(batch)
    assert all(len(c.tokens) == 60 and c.finish_reason == "length" for c in got.values())
    assert any(EOS in c.tokens[:-1] for c in got.values()), "the test needs an answer that goes past its end"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ()}, "the prompt has no tokens"),
        ({"prompt": (3, VOCAB)}, f"token {VOCAB} is outside the policy's vocabulary of {VOCAB}"),
        ({"prompt": (3,) * 500}, "make 540, more than the policy's context of 512"),
        ({"params": SamplingParams(max_tokens=400)}, "the whole cache holds 320"),
        ({"params": {"temperature": 1}}, "params is a dict; expected SamplingParams"),
        ({"key": Key(5, 0)}, r"key \(seed 5, request 0\) is already in flight"),
    ],
)
def test_bad_requests_are_refused_and_others_go_on(change: dict[str, object], message: str) -> None:
    engine = EngineCore(MODEL, letters(), EngineSettings(kv_gib=kv_gib(21, 16)))
    good = requests(3)
    engine.submit(good)
    engine.tick()
    bad = replace(Request(Key(5, 99), (3, 4), MIXED[0]), **change)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=message):
        engine.submit([Request(Key(5, 98), (3,), MIXED[0]), bad])
    got = {completion.key: list(completion.tokens) for completion in engine.drain()}
    assert got == {request.key: one_by_one(request)[0] for request in good}


def test_sampling_settings_that_mean_nothing_are_refused() -> None:
    for bad in ({"stop": ["list"]}, {"stop": (3,)}, {"temperature": -1}, {"top_p": 0.0}, {"max_tokens": 0}):
        with pytest.raises(RequestError, match=r"expected"):
            SamplingParams(**bad)  # type: ignore[arg-type]


def test_penalties_are_refused_by_name() -> None:
    """What depends on the text so far is not offered: a draft tree's branches would each have a text of their own."""
    with pytest.raises(TypeError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=1.1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"unknown key sampling\.repetition_penalty"):
        load_config(flags=["--sampling.repetition_penalty", "1.1"])


def test_nan_logits_fail_their_request_alone() -> None:
    model = policy()
    poisoned = 7
    with torch.no_grad():
        model.embed[poisoned] = float("nan")
    clean = [r for r in requests(8) if poisoned not in r.prompt]
    fine = [r for r in clean if poisoned not in one_by_one(r, model)[0][:-1]]
    sick = Request(Key(5, 1000), (3, poisoned, 4), MIXED[0])
    engine = EngineCore(model, letters())
    engine.submit([*fine[:3], sick])
    answered: list[Completion] = []
    while not engine.idle:
        answered += engine.tick()
    assert {c.key: list(c.tokens) for c in answered} == {r.key: one_by_one(r, model)[0] for r in fine[:3]}
    with pytest.raises(RequestError, match="request 1000: the policy's logits at position 3 are NaN"):
        engine.drain()


def test_a_new_policy_version_reuses_nothing_of_the_old() -> None:
    """Same tensors, new values, mid-rollout: what comes after is what the new policy says of the text so far."""
    model, other = policy(seed=0), policy(seed=1)
    engine = EngineCore(model, letters(), version=3)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    batch = requests(3, params=[params])
    engine.submit(batch)
    for _ in range(10):
        engine.tick()
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            ours.copy_(theirs)
    engine.load_policy(4)
    for completion in engine.drain():
        assert completion.policy_version == 4
        request = next(r for r in batch if r.key == completion.key)
        before = completion.tokens[:10]
        rest = one_by_one_from(request, before, other)
        assert list(completion.tokens) == [*before, *rest]
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()], "nothing was copied"


@torch.no_grad()
def one_by_one_from(request: Request, before: tuple[int, ...], model: Transformer) -> list[int]:
    tokens = list(before)
    while len(tokens) < request.params.max_tokens:
        text = torch.tensor([*request.prompt, *tokens])
        logits = model.logits(model(text, PackedLayout.from_lengths([len(text)])).hidden_TD[-1:])
        tokens.append(int(sample(logits, SamplingRows.of([request.key], [len(text)], [request.params])).token_R))
    return tokens[len(before) :]


@torch.no_grad()
def test_features_are_the_hidden_states_of_generated_positions() -> None:
    seen: dict[Key, list[tuple[torch.Tensor, ...]]] = {}

    def keep(features: object) -> None:
        for row, req in enumerate(features.reqs):  # type: ignore[attr-defined]
            states = (*(tap[row].clone() for tap in features.taps), features.hidden[row].clone())  # type: ignore[attr-defined]
            seen.setdefault(req.state.request.key, []).append(states)

    engine = EngineCore(MODEL, letters(), taps=(1, 2), on_features=keep)
    batch = requests(4)
    engine.submit(batch)
    for completion in engine.drain():
        text = torch.tensor([*completion.prompt_tokens, *completion.tokens])
        out = MODEL(text, PackedLayout.from_lengths([len(text)]), taps=(1, 2))
        first = len(completion.prompt_tokens) - 1
        for offset, states in enumerate(seen[completion.key]):
            for got, expected in zip(states, (*out.taps, out.hidden_TD), strict=True):
                assert torch.allclose(got, expected[first + offset], atol=1e-8)
        assert len(seen[completion.key]) == len(completion.tokens)


@torch.no_grad()
def test_log_probs_equal_the_trainers_in_float32() -> None:
    model = policy(torch.float32, sharpness=4.0)
    batch = requests(16, group=4, params=[SamplingParams(max_tokens=60)])
    worst = 0.0
    for completion in run(batch, model, rows=16).values():
        text = torch.tensor([*completion.prompt_tokens, *completion.tokens])
        hidden = model(text, PackedLayout.from_lengths([len(text)])).hidden_TD
        logprobs = model.logits(hidden).log_softmax(-1)
        first = len(completion.prompt_tokens)
        for offset, token in enumerate(completion.tokens):
            worst = max(worst, abs(float(logprobs[first - 1 + offset, token]) - completion.policy_logprobs[offset]))
    assert worst < 1e-4


def test_every_admission_answers_all_and_longest_goes_first() -> None:
    from tlt.engine.admission import LongestFirst

    order = LongestFirst()
    batch = requests(9, group=3, params=[SamplingParams(max_tokens=20)])
    assert [r.key.request for r in sorted(batch, key=order.rank)][:1] == [0]
    for probe in batch[::3]:
        order.started(probe)
    for request, length in zip(batch[::3], (5, 19, 11), strict=True):
        order.finished(request, length)
    waiting = [r for r in batch if r.key.request % 3]
    ranked = [r.prompt_id for r in sorted(waiting, key=order.rank)]
    assert [name for name, _ in itertools.groupby(ranked)] == ["prompt 1", "prompt 2", "prompt 0"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_longest_first_ends_a_rollout_sooner(seed: int) -> None:
    """The scheduler alone, with lengths made up: a second epoch over prompts whose answers are known to differ."""
    dice = random.Random(seed)
    typical = [dice.lognormvariate(3.5, 1.0) for _ in range(32)]
    completions = [(prompt, max(1, int(typical[prompt] * dice.lognormvariate(0, 0.3)))) for prompt in [*range(32)] * 8]
    ticks = {}
    for name, admission in ADMISSIONS.items():
        order = admission()
        for prompt, length in reversed(completions):  # another epoch's, not the very same
            order.finished(numbered(prompt, prompt), int(length * dice.uniform(0.7, 1.4)))
        ticks[name] = ticks_of_a_rollout(order, completions, rows=48)
    longest = max(length for _, length in completions)
    least = max(longest, sum(length for _, length in completions) / 48)
    assert ticks["longest"] < 1.1 * least
    assert ticks["longest"] < 0.95 * ticks["fifo"]


def numbered(number: int, prompt: int) -> Request:
    return Request(Key(0, number), (2 + prompt, 3, 4), SamplingParams(max_tokens=5000), f"prompt {prompt}")


def ticks_of_a_rollout(admission: Admission, completions: Sequence[tuple[int, int]], rows: int) -> int:
    scheduler = Scheduler(PageAllocator(10**5), 16, rows, 10**5, admission)
    lengths = {}
    for number, (prompt, length) in enumerate(completions):
        state = RequestState(numbered(number, prompt), number, 0.0)
        lengths[state.request.key] = length
        scheduler.submit(state)
    ticks, left = 0, len(completions)
    while left:
        ticks += 1
        for req in scheduler.plan().reqs:
            req.state.tokens.append(5)
            if len(req.state.tokens) == lengths[req.state.request.key]:
                scheduler.finish(req)
                left -= 1
    return ticks
