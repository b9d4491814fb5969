"""The bench measures what it says: its arithmetic, its comparisons, and one failing section does not stop the rest."""

import json
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tlt.bench.options
from tests.tiny import EOS, VOCAB, letters, policy
from tlt.bench import bandwidth, fidelity, overheads, peers, steps
from tlt.bench.bandwidth import read_bandwidth
from tlt.bench.lab import Lab, check_shape
from tlt.bench.options import FULL, QUICK, SECTIONS, BenchOptions, read_options
from tlt.bench.peer_file import PeerFile, read_peer
from tlt.bench.report import BenchReport, Clock, Subject
from tlt.cli import main
from tlt.config import RunConfig
from tlt.engine.graphs import GraphPool, PoolReport
from tlt.errors import ConfigError, ModelError, TaskError
from tlt.machine import GIB, Machine, describe
from tlt.model.attention import PackedLayout
from tlt.model.config import ModelConfig
from tlt.model.shapes import MODEL_SHAPES, shape_config
from tlt.model.transformer import Transformer
from tlt.model.widen import wide_config
from tlt.tasks.token_prompts import token_prompts
from tlt.types import SamplingParams

SMALL = replace(
    QUICK,
    batches=(1, 3),
    short=2,
    long=6,
    contexts=(16, 40),
    context_batches=(1, 2),
    naturals=(4, 6),
    peer_prompts=4,
    cap=24,
    fidelity_cap=24,
    features_cap=24,
    ticks=4,
    sync_batch=3,
    read_gib=0.001,
    budget_s=600.0,
)
PROMPTS = [tuple(2 + (7 * i + j) % (VOCAB - 2) for j in range(3 + i)) for i in range(SMALL.rows)]
MACHINE = describe(torch.device("cpu"), commit="abc")


def lab(dtype: torch.dtype = torch.float64, peer: PeerFile | None = None, **sampling: Any) -> Lab:
    config = RunConfig(sampling=SamplingParams(**sampling))
    return Lab(policy(dtype), letters(), PROMPTS, config, SMALL, MACHINE, peer)


def words(**given: Any) -> Namespace:
    absent = dict.fromkeys(("shape", "prompts", "json", "commit", "peer", "batches", "cap", "budget", "sections"))
    switches = dict.fromkeys(("raw", "quick", "full", "peers", "no_peers"), False)
    return Namespace(**{"what": "engine", **absent, **switches, **given})


# ---- options


def test_sections_are_chosen_and_kept_in_order() -> None:
    assert read_options(words()).sections == SECTIONS
    assert read_options(words(sections="step,floor")).sections == ("floor", "step")
    assert read_options(words(sections="step", peers=True)).sections == ("step", "peers")
    assert "peers" not in read_options(words(no_peers=True)).sections


def test_the_scale_follows_the_device_unless_told() -> None:
    assert read_options(words()).scale(on_gpu=False) == QUICK
    assert read_options(words()).scale(on_gpu=True) == FULL
    assert read_options(words(quick=True)).scale(on_gpu=True) == QUICK
    assert read_options(words(full=True, cap="300", batches="2,5")).scale(on_gpu=False) == replace(
        FULL, cap=300, features_cap=300, batches=(2, 5)
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"what": "drafter"}, "tlt bench engine"),
        ({"sections": "steps"}, "did you mean step?"),
        ({"batches": "1,x"}, "--batches is 'x'"),
        ({"cap": "0"}, "--cap is '0'"),
        ({"peers": True, "no_peers": True}, "exclude each other"),
        ({"prompts": "none.jsonl"}, "none.jsonl: no such file"),
    ],
)
def test_mistakes_in_options(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_options(words(**given))


def test_the_command_line_reaches_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    import tlt.bench.engine

    seen: list[Any] = []
    monkeypatch.setattr(tlt.bench.engine, "bench_engine", lambda *arguments: seen.extend(arguments))
    arguments = [
        "bench",
        "engine",
        "tiny",
        "--sections",
        "floor",
        "--no-peers",
        "--engine.page_size",
        "8",
        "--json",
        "x",
    ]
    assert main(arguments) == 0
    config, options = seen
    assert config.model.path == "tiny"
    assert config.engine.page_size == 8
    assert options == BenchOptions(sections=("floor",), json=Path("x"))


# ---- prompts


class Speaker:
    """Stands in for a tokenizer with a chat template: a token per character, a chat opens with token 1."""

    has_chat_template = True

    def encode_prompt(self, content: Any) -> list[int]:
        return list(content.encode()) if isinstance(content, str) else [1, *content[0].content.encode()]


def test_prompts_of_a_file_go_through_the_template_and_round_again(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"question": "ab", "answer": "x"}\n\n{"prompt": "c"}\n')
    speaker: Any = Speaker()
    assert token_prompts(speaker, 3, file, raw=False) == [(1, 97, 98), (1, 99), (1, 97, 98)]
    assert token_prompts(speaker, 1, file, raw=True) == [(97, 98)]


def test_built_in_prompts_are_all_different_and_stay_the_same() -> None:
    speaker: Any = Speaker()
    made = token_prompts(speaker, 64, None, raw=False)
    assert len(set(made)) == 64
    assert token_prompts(speaker, 8, None, raw=False) == made[:8]
    assert bytes(token_prompts(speaker, 1, None, raw=True)[0]).endswith(b"=")  # the toy task


@pytest.mark.parametrize("line", ["", '{"text": "a"}', '{"prompt": 3}', "[1]", "{"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    speaker: Any = Speaker()
    with pytest.raises(TaskError, match="expected"):
        token_prompts(speaker, 1, file, raw=False)


# ---- the floor, and figures of another engine


def test_the_floor_counts_what_a_step_reads() -> None:
    bench = lab(torch.float32)
    d, m, attended, kv = 32, 48, 32, 16
    layer = d + (attended + 2 * kv) * d + d * attended + d + 3 * m * d
    assert bench.weight_bytes == 4 * (2 * layer + d + VOCAB * d)
    assert bench.kv_bytes_per_token == 4 * 2 * 2 * kv
    read = bench.weight_bytes + 3 * 10 * bench.kv_bytes_per_token
    assert bench.floor_ms(3, 10) == pytest.approx(1e3 * read / bench.bandwidth)


def test_bandwidth_is_what_is_read_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a tenth of a second whenever it is read: in between the memory is read four times."""
    looks = count()
    monkeypatch.setattr(bandwidth, "time", SimpleNamespace(perf_counter=lambda: 0.1 * next(looks)))
    assert read_bandwidth(torch.device("cpu"), 0.01) == pytest.approx(4 * 0.01 * GIB / 0.1, rel=0.01)


PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"
TINY_PEER = {
    "engine": "other 1.2",
    "date": "2026-11-15",
    "device": "CPU",
    "versions": {"torch": "2"},
    "method": "the same",
    "same_lease": True,
    "model": {"hidden": 32, "layers": 2, "mlp": 48, "vocab": VOCAB},
    "cap": SMALL.cap,
    "step_ms": {"1": 2.5},
    "tokens_per_s": {"6": 10},
}


def peer_of(directory: Path, **changes: Any) -> PeerFile:
    file = directory / "peer.json"
    file.write_text(json.dumps(TINY_PEER | changes))
    return read_peer(file)


def test_figures_of_another_engine_stand_beside_ours_with_their_source(tmp_path: Path) -> None:
    bench = lab(peer=peer_of(tmp_path))
    first, other = steps.step(bench)
    label = "other 1.2, measured 2026-11-15, in the same lease"
    assert (first.peer, first.peer_ms) == (label, 2.5)
    assert first.times_peer == pytest.approx(2.5 / first.step_ms)
    assert (other.peer, other.peer_ms, other.times_peer) == ("", None, None)
    natural = list(steps.natural(bench))
    assert [(one.peer, one.peer_tokens_per_s) for one in natural] == [("", None), (label, 10.0)]
    file = tmp_path / "bench.json"
    written = report(file, peer=bench.peer)
    written.section("step", iter([first, other]), Clock())
    content = json.loads(file.read_text())
    assert content["peer"] == TINY_PEER
    assert content["sections"]["step"]["records"][0]["peer"] == label


def test_without_such_a_file_nothing_is_compared(tmp_path: Path) -> None:
    assert all(record.peer_ms is None for record in steps.step(lab()))
    assert "peer" not in json.loads(report_file(tmp_path).read_text())
    apart = peer_of(tmp_path, same_lease=False, cap=SMALL.cap + 1)
    assert "NOT in the same lease" in apart.label
    assert all(record.peer_tokens_per_s is None for record in steps.natural(lab(peer=apart)))  # another cap


def test_the_table_says_where_the_figures_come_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(tmp_path / "bench.json").section("step", steps.step(lab(peer=peer_of(tmp_path, same_lease=False))), Clock())
    assert "measured 2026-11-15, NOT in the same lease" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"engine": ""}, "engine is ''; expected the engine's name and version"),
        ({"date": None}, "date is None; expected when it was measured"),
        ({"same_lease": 1}, "same_lease is 1; expected true or false"),
        ({"cap": True}, "cap is True"),
        ({"versions": {}}, "versions is {}"),
        ({"model": {"hidden": 32}}, "expected whole numbers for hidden, layers, mlp, vocab"),
        ({"step_ms": {"one": 1.0}}, "step_ms has 'one': 1.0; expected a positive figure by number"),
        ({"step_ms": {"1": -1.0}}, "step_ms has '1': -1.0"),
        ({"tokens_per_s": {"1": "x"}}, "tokens_per_s has '1': 'x'"),
    ],
)
def test_a_peer_file_without_its_source_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        peer_of(tmp_path, **changes)


def test_a_peer_on_another_device_or_model_is_refused(tmp_path: Path) -> None:
    peer = peer_of(tmp_path)
    peer.check("CPU", policy().config, Path("peer.json"))
    with pytest.raises(ConfigError, match="is of a CPU, and this is a NVIDIA H200; leave --peer out"):
        peer.check("NVIDIA H200", policy().config, Path("peer.json"))
    with pytest.raises(ConfigError, match=r"is of a model with .*'layers': 3"):
        peer_of(tmp_path, model=TINY_PEER["model"] | {"layers": 3}).check("CPU", policy().config, Path("peer.json"))  # type: ignore[operator]


@pytest.mark.parametrize(("name", "shape"), [("135m", None), ("7b", "7B")])
def test_the_kept_figures_of_vllm_are_of_the_benchmarks_models(name: str, shape: str | None) -> None:
    source = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    }
    small = ModelConfig.from_hf(source)
    file = PEERS / f"vllm_0.26.0_{name}_h200.json"
    peer = read_peer(file)
    peer.check("NVIDIA H200", wide_config(small, shape) if shape else small, file)
    assert not peer.same_lease


# ---- sections on a tiny policy


def test_steps_and_contexts_are_measured_for_every_batch() -> None:
    bench = lab()
    records = list(steps.step(bench))
    assert [record.batch for record in records] == [1, 3]
    assert [record.context for record in records] == [3 + 4, 4 + 4]
    for record in records:
        assert record.over_floor == pytest.approx(record.step_ms / record.floor_ms)
        assert record.tokens_per_s == pytest.approx(1e3 * record.batch / record.step_ms)
        assert record.floor_ms > record.weights_floor_ms
    pairs = {(record.batch, record.context) for record in steps.context(bench)}
    assert pairs == {(1, 20), (1, 44), (2, 20), (2, 44)}


def test_natural_answers_are_counted() -> None:
    bench = lab()
    records = list(steps.natural(bench))
    run = bench.natural_once(6, SMALL.cap)
    assert [record.prompts for record in records] == [4, 6]
    assert records[1].tokens == sum(run.lengths)
    assert records[1].longest == max(run.lengths) <= SMALL.cap
    assert records[1].at_cap == sum(EOS not in completion.tokens for completion in run.completions)


def test_log_probs_agree_and_a_wrong_one_would_show() -> None:
    bench = lab()
    [record] = fidelity.logprobs(bench)
    completions = bench.natural_once(4, SMALL.fidelity_cap).completions
    assert record.tokens == sum(len(completion.tokens) for completion in completions)
    assert record.largest_difference < 1e-5
    moved = [replace(completions[0], policy_logprobs=tuple(p - 0.5 for p in completions[0].policy_logprobs))]
    with torch.no_grad():
        wrong = fidelity._compare(bench, [*moved, *completions[1:]], "rollout")
    assert wrong.largest_difference == pytest.approx(0.5, abs=1e-4)


def test_the_trainers_path_leaves_the_model_trainable() -> None:
    model = policy()
    with fidelity._as_in_training(model):
        out = model(torch.tensor([2, 3]), PackedLayout.from_lengths([2])).hidden_TD
        assert torch.is_grad_enabled()
        assert not out.requires_grad
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_identity_counts_divergences() -> None:
    [record] = fidelity.identity(lab())
    assert (record.identical, record.divergences, record.per_token) == (4, 0, 0.0)
    assert record.other_rows < record.rows


def test_features_change_no_token_and_reach_the_ring() -> None:
    bench = lab()
    [record] = overheads.features(bench)
    run = bench.natural(bench.engine(4), 4, SMALL.features_cap)
    assert record.same_tokens
    assert record.features == run.tokens  # on a CPU no tick runs ahead
    assert record.percent == pytest.approx(100 * (record.with_s / record.without_s - 1))


def test_the_host_is_watched_and_left_as_it_was() -> None:
    bench = lab()
    [record] = overheads.sync(bench)
    assert record.host_us >= record.plan_us + record.launch_us + record.observe_us > 0
    assert record.replay_ms is None
    engine = bench.engine(3)
    engine.submit(bench.requests(3, max_tokens=9, ignore_eos=True))
    overheads._host_work(bench, engine, 2)
    assert "tick" not in vars(engine)
    assert len(engine.drain()) == 3


class FakePool:
    """What a graph pool is asked by a tick, without graphs: a captured function is kept and called again."""

    capture_s = 0.0
    recording = False

    def __init__(self) -> None:
        self.functions: dict[Any, Any] = {}

    def has(self, key: Any) -> bool:
        return key in self.functions

    def capture(self, key: Any, function: Any) -> None:
        self.functions[key] = function

    def replay(self, key: Any) -> Any:
        return self.functions[key]()

    def report(self) -> PoolReport:
        return PoolReport(len(self.functions), memory_bytes=0, capture_s=0.0, replays=0, eager=0)


def test_the_graph_of_a_tick_is_found() -> None:
    bench = lab()
    engine: Any = bench.engine(3)
    assert overheads._pool(engine) is None  # on a CPU
    engine._runner._pool = pool = FakePool()
    engine.submit(bench.requests(2, max_tokens=9, ignore_eos=True))
    engine.tick()
    assert overheads._key_of_a_tick(engine, pool) in pool.functions
    assert "replay" not in vars(pool)
    assert set(dir(GraphPool)) >= {"has", "capture", "replay", "report"}


# ---- peers


def test_transformers_reads_our_tensors_and_writes_what_we_write() -> None:
    bench = lab(torch.float32, temperature=0.0)
    theirs = peers.transformers_model(bench.model)
    tokens = torch.tensor(PROMPTS[5])
    with torch.no_grad():
        ours = bench.model.logits(bench.model(tokens, PackedLayout.from_lengths([len(tokens)])).hidden_TD)
        assert torch.allclose(theirs(tokens[None]).logits[0], ours, atol=1e-4 * float(ours.abs().max()))
    assert theirs.model.embed_tokens.weight.data_ptr() == bench.model.embed.data_ptr()
    job = peers._Job(theirs, PROMPTS[:4], SMALL.cap, 0.0, [EOS], bench.device, budget_s=600.0)
    expected = sorted(bench.natural_once(4, SMALL.cap).lengths)
    for run in (lambda job: peers.generate(job, cache=None, compiled=False), peers.continuous):
        assert sorted(run(job).lengths) == expected


def test_a_peer_that_cannot_run_says_why() -> None:
    def fails(_: Any) -> peers.PeerAnswers:
        raise ValueError("no such attention\nmore")

    job = peers._Job(None, PROMPTS[:4], SMALL.cap, 1.0, [EOS], torch.device("cpu"), budget_s=1.0)
    peer = peers._measure("theirs", fails, job, ours=10.0)
    assert peer.note == "not available: ValueError: no such attention"
    assert peer.tokens_per_s is None
    assert peers._measure("theirs", lambda _: peers.PeerAnswers([4, 6], 2.0, 0.0), job, ours=10.0).times_peer == 2.0


def test_lengths_of_a_padded_batch() -> None:
    job = peers._Job(None, PROMPTS[:3], 4, 1.0, [EOS], torch.device("cpu"), budget_s=1.0)
    written = torch.tensor([[5, EOS, EOS, EOS], [5, 6, 7, EOS], [5, 6, 7, 8]])
    assert peers._lengths(written, job) == ([2, 4, 4], 0)
    assert peers._lengths(written[:, :3], job) == ([2, 3, 3], 2)  # stopped before the cap


# ---- the report


def report(file: Path, machine: Machine = MACHINE, peer: PeerFile | None = None) -> BenchReport:
    subject = Subject("tiny", "as it is", "built in", 3.0, 0, 1.0)
    return BenchReport(machine, subject, policy().config, SMALL, file, peer=peer)


def report_file(directory: Path) -> Path:
    report(directory / "empty.json")
    return directory / "empty.json"


def test_git_knows_the_commit_better_than_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name given by hand must not hide that files were changed."""
    monkeypatch.setattr("tlt.machine._commit", lambda: "0123456789ab-dirty")
    assert describe(torch.device("cpu"), "abc").commit == "0123456789ab-dirty"
    monkeypatch.setattr("tlt.machine._commit", lambda: "")
    assert describe(torch.device("cpu"), "abc").commit == "abc"
    assert describe(torch.device("cpu"), None).commit == "unknown"


def test_a_failing_section_leaves_its_error_and_the_others_go_on(tmp_path: Path) -> None:
    def fails() -> Iterator[Any]:
        yield steps.EngineStart(1.0, 0.0, 0, 0.0, "cold")
        raise torch.OutOfMemoryError("out of memory")

    file = tmp_path / "results" / "bench.json"
    written, clock = report(file), Clock()
    assert not written.section("start", fails(), clock)
    assert written.section("floor", steps.floor(lab()), clock)
    content = json.loads(file.read_text())
    assert content["sections"]["start"]["error"] == "OutOfMemoryError: out of memory"
    assert content["sections"]["start"]["records"][0]["first_token_s"] == 1.0
    assert content["sections"]["floor"]["records"][0]["dtype"] == "float64"
    assert content["machine"] == asdict(MACHINE)
    assert {"commit", "torch", "triton", "transformers", "tlt", "date", "command"} <= set(content["machine"])


def test_a_bug_is_not_swallowed(tmp_path: Path) -> None:
    def fails() -> Iterator[Any]:
        raise KeyError("bug")
        yield

    with pytest.raises(KeyError):
        report(tmp_path / "bench.json").section("start", fails(), Clock())


def test_an_unknown_shape_is_refused_before_anything_is_loaded() -> None:
    from tlt.bench.engine import bench_engine

    with pytest.raises(ConfigError, match=r"predefined: 1\.5B, 7B, Qwen2\.5-1\.5B, Qwen3-4B"):
        bench_engine(RunConfig(), BenchOptions(shape="3B"))
    with pytest.raises(ConfigError, match=r"predefined: 1\.5B, 7B$"):
        check_shape("Qwen3-4B")
    with pytest.raises(ModelError, match="no model at"):
        bench_engine(replace(RunConfig(), model=replace(RunConfig().model, path="nowhere")), BenchOptions())


# ---- the shapes of known policies


def test_named_shapes_have_the_sizes_of_their_policies() -> None:
    billions = {"Qwen2.5-1.5B": 1.54, "Qwen3-4B": 4.02, "Qwen2.5-7B": 7.62, "Llama-3.1-8B": 8.03, "Qwen3-8B": 8.19}
    billions["Qwen2.5-14B"] = 14.77  # as their model cards say
    assert list(MODEL_SHAPES) == list(billions)
    for name, expected in billions.items():
        model = Transformer(shape_config(name), device="meta")
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e9 * expected, rel=4e-3), name


def test_the_engine_is_measured_in_a_named_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = MODEL_SHAPES["Qwen2.5-1.5B"] | {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 5000}
    monkeypatch.setitem(MODEL_SHAPES, "Qwen2.5-1.5B", sizes)
    monkeypatch.setattr(tlt.bench.options, "QUICK", SMALL)
    small = ["--model.device", "cpu", "--engine.kv_gib", "0.05", "--json", str(tmp_path / "x.json")]
    assert main(["bench", "engine", "--shape", "Qwen2.5-1.5B", "--sections", "floor,step", "--no-peers", *small]) == 0
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["subject"]["shape"] == "random weights in the shape of Qwen2.5-1.5B"
    (floor,) = written["sections"]["floor"]["records"]
    assert floor["parameters"] == sum(p.numel() for p in Transformer(shape_config("Qwen2.5-1.5B")).parameters())
    assert written["sections"]["step"]["records"][0]["step_ms"] > 0
