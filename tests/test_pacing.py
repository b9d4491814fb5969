"""A drafter within a time: pieces that fit, a schedule that time moves along, and a command that keeps its limit."""

import io
import random
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import tiny
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

import tlt.draft as draft
from tests.clocks import Clock
from tlt.cli import main
from tlt.config import DraftSettings, RunConfig
from tlt.draft import Trained, draft_train
from tlt.engine.engine import EngineCore
from tlt.errors import ConfigError
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.train.drafter import DrafterBatch, DrafterTrainer, policy_states
from tlt.train.kept_states import KeptStates
from tlt.train.optimizer import FINAL_SHARE
from tlt.train.pacing import Spent, TimeLimit
from tlt.train.packing import Example, pack
from tlt.train.supervised import StepResult
from tlt.types import SamplingParams
from tlt.watch.progress import WorkProgress

# ---- a time limit


@pytest.mark.parametrize(
    ("seconds", "pieces", "begun"),
    [
        (10.0, [3.0] * 9, 3),  # after 9 s no fourth one fits
        (9.0, [3.0] * 9, 3),  # three fit exactly
        (10.0, [3.0] * 2, 2),
        (10.0, [6.0, 1.0], 1),  # judged by the last one
        (10.0, [1.0, 6.0, 1.0], 2),
        (10.0, [99.0, 1.0], 1),  # the first one is begun while time is left …
        (0.0, [0.0], 0),
        (-5.0, [0.0], 0),  # … and not otherwise
        (inf, [1e9] * 5, 5),
    ],
)
def test_a_piece_is_begun_if_one_like_the_last_fits(seconds: float, pieces: list[float], begun: int) -> None:
    clock, taken = Clock(), 0
    for piece in TimeLimit(clock.now + seconds, clock.perf_counter).fitting(pieces):
        taken += 1
        clock.now += piece
    assert taken == begun


def test_larger_pieces_are_expected_to_take_longer() -> None:
    clock, sizes = Clock(), iter([1.0, 1.0, 5.0])
    limit = TimeLimit(clock.now + 6.5, clock.perf_counter)
    for _ in limit.fitting("abcdef", lambda: next(sizes)):
        clock.now += 1.0
    assert clock.now == 102.0, "a piece of five times the size would end after 7 s"


def test_progress_goes_from_nothing_to_all() -> None:
    clock = Clock()
    limit, endless, over = (TimeLimit(clock.now + seconds, clock.perf_counter) for seconds in (8.0, inf, 0.0))
    seen = []
    for _ in range(4):
        seen.append((limit.progress, limit.left_s, endless.progress, over.progress))
        clock.now += 4.0
    assert seen == [(0.0, 8.0, 0.0, 1.0), (0.5, 4.0, 0.0, 1.0), (1.0, 0.0, 0.0, 1.0), (1.0, -4.0, 0.0, 1.0)]


def test_a_limit_counts_from_when_the_command_began() -> None:
    clock = Clock()
    spent = Spent(clock.perf_counter, 40.0, began_s=clock.now - 4.0)
    clock.now += 1.0
    assert spent.on("opening") == 5.0
    assert spent.until(0.5).left_s == 15.0
    assert spent.until(1.0, less_s=5.0).left_s == 30.0
    assert spent.within(0.2).left_s == 7.0
    clock.now += 2.0
    spent.on("answers")
    clock.now += 2.0
    spent.on("opening")
    assert str(spent) == "opening 7.0 s, answers 2.0 s"
    assert Spent(clock.perf_counter, 0.0).until(0.5, less_s=1.0).left_s == inf


# ---- the schedule

POLICY = tiny.policy()
SHAPE = EagleConfig.of_policy(POLICY.config, window=16)
SETTINGS = DraftSettings(steps=200, single_steps=130, warmup_steps=2, unroll=2)


def batch() -> DrafterBatch:
    source = random.Random(1)
    (row,) = pack([Example(tuple(source.choices(range(tiny.VOCAB), k=24)), 8)], 24)
    return policy_states(POLICY, row, SHAPE.taps)


def steps_by(limit: TimeLimit, clock: Clock, seconds: float, settings: DraftSettings) -> tuple[list[StepResult], int]:
    """Every step takes so long; what came of them, and how many unrolled."""
    drafter = Eagle(SHAPE, dtype=torch.float64)
    drafter.init_weights(seed=0)
    trainer = DrafterTrainer(drafter, POLICY.head_weight, POLICY.embed, settings, progress=lambda: limit.progress)
    results = []
    for one in limit.fitting([batch()] * settings.steps):
        results.append(trainer.micro_step(one))
        clock.now += seconds
    return results, trainer.unrolled_steps


def test_the_schedule_comes_to_its_end_with_the_time() -> None:
    clock = Clock()
    results, unrolled = steps_by(TimeLimit(clock.now + 20.0, clock.perf_counter), clock, 1.0, SETTINGS)
    rates = [result.learning_rate for result in results]
    assert len(results) == 20
    assert unrolled == 7, "single steps have their share of the time, 130 / 200, and no more"
    assert rates[0] == pytest.approx(rates[1] / 2, rel=0.01)
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert FINAL_SHARE < rates[-1] / max(rates) < FINAL_SHARE + 0.02


def test_where_time_is_plenty_the_schedule_is_that_of_the_steps() -> None:
    settings = replace(SETTINGS, steps=12, single_steps=8)
    clock = Clock()
    limited, unlimited = (
        steps_by(TimeLimit(clock.now + seconds, clock.perf_counter), clock, 1.0, settings) for seconds in (13.0, inf)
    )
    assert limited == unlimited
    assert (len(limited[0]), limited[1]) == (12, 4)


# ---- the command

SMALL = DraftSettings(answers=8, held_out=4, steps=12, single_steps=6, unroll=3, tokens_per_batch=64, warmup_steps=2)
CONFIG = RunConfig(draft=SMALL, sampling=SamplingParams(max_tokens=12))
OPENING_S, TICK_S, STATES_S, MEASURED_S, STEP_S, SAVING_S = 2.0, 0.1, 0.05, 0.2, 0.5, 0.1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Moved on by what takes time: opening, ticks, states, measuring, steps by what they unroll, saving."""
    clock = Clock()
    clock.passes_in(monkeypatch, EngineCore, "tick", TICK_S)
    clock.passes_in(monkeypatch, draft, "open_policy", OPENING_S)
    clock.passes_in(monkeypatch, draft, "policy_states", STATES_S)
    clock.passes_in(monkeypatch, draft, "accept_length", MEASURED_S)
    clock.passes_in(monkeypatch, draft, "save_drafter", SAVING_S)
    launch = DrafterTrainer.launch

    def step(self: DrafterTrainer, batch: DrafterBatch) -> object:
        unrolled = self.unrolled
        result = launch(self, batch)
        clock.now += STEP_S * unrolled
        return result

    monkeypatch.setattr(DrafterTrainer, "launch", step)
    return clock


def train(clock: Clock, out: Path, seconds: float, **draft: object) -> tuple[Trained, float, dict[str, Tensor]]:
    """What it says, seconds it took, and the weights it saved."""
    config = replace(CONFIG, draft=replace(SMALL, seconds=seconds, **draft))  # type: ignore[arg-type]
    began = clock.now
    trained = draft_train(config, "toy", str(out), clock=clock.perf_counter)
    return trained, clock.now - began, load_file(out / "model.safetensors")


@pytest.mark.parametrize("seconds", [6.0, 8.0, 11.0, 14.0])
def test_the_limit_is_kept_by_steps_that_are_real(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    taken: list[DrafterTrainer] = []
    launch = DrafterTrainer.launch
    monkeypatch.setattr(DrafterTrainer, "launch", lambda self, batch: (taken.append(self), launch(self, batch))[1])
    trained, took, _ = train(clock, tmp_path / "drafter", seconds)
    assert 1 <= trained.steps < SMALL.steps
    assert len(taken) == trained.steps == taken[0].steps_taken, "every step is one of the drafter's own"
    assert len(set(taken)) == 1
    assert 0.6 * seconds < took <= seconds
    said = capsys.readouterr().out
    assert f"{trained.steps} of 12 steps fit into {seconds:g} s: for more, raise draft.seconds" in said


def test_a_limit_that_is_long_enough_changes_nothing(tmp_path: Path, clock: Clock) -> None:
    (limited, took, weights), (unlimited, _, same) = (
        train(clock, tmp_path / str(seconds), seconds) for seconds in (40.0, 0.0)
    )
    assert took < 40.0
    assert limited == unlimited
    assert limited.steps == SMALL.steps
    assert all(torch.equal(weights[name], same[name]) for name in same)


def test_answers_end_where_half_of_the_time_behind_opening_is_over(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those to learn from and those to measure on are cut alike; of the latter there are some."""
    clock.passes_in(monkeypatch, EngineCore, "tick", 1.0)
    trained, took, _ = train(clock, tmp_path / "drafter", 20.0)
    assert trained.after.tokens > 0
    assert took <= 20.0
    assert "0 of 12 answers are whole, others were cut short or not begun, for lack of time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "measuring_s", "missing"),
    [(1.0, 0.0, "writing answers"), (2.2, 0.0, "writing answers"), (8.0, 3.0, "a step"), (8.0, 9.0, "a step")],
)
def test_a_limit_that_leaves_no_time_to_learn_is_an_error(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float, measuring_s: float, missing: str
) -> None:
    clock.passes_in(monkeypatch, draft, "accept_length", measuring_s)
    with pytest.raises(ConfigError) as caught:
        train(clock, tmp_path / "drafter", seconds)
    assert f"draft.seconds is {seconds:g}, which left no time for {missing} (so far: opening 2.0 s" in str(caught.value)
    assert "raise it, or lower draft.answers, draft.held_out or sampling.max_tokens" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_drafter_that_has_learned_nothing_is_told_loudly(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    train(clock, tmp_path / "nothing", 0.0, learning_rate=1e-9)
    assert "this drafter has learned next to nothing" in capsys.readouterr().out
    train(clock, tmp_path / "something", 0.0, steps=60, single_steps=60, learning_rate=2e-3)
    assert "learned next to nothing" not in capsys.readouterr().out


@pytest.mark.parametrize(("filling_s", "kept"), [(0.0, True), (1e6, False)])
def test_states_are_kept_if_there_is_time_to_compute_them(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, filling_s: float, kept: bool
) -> None:
    made: list[object] = []
    original = KeptStates.__init__

    def noticed(self: KeptStates, *given: object) -> None:
        made.append(self)
        original(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(KeptStates, "__init__", noticed)
    monkeypatch.setattr("tlt.draft.filling_s", lambda *_: filling_s)
    train(clock, tmp_path / "drafter", 600.0, steps=40, single_steps=40)
    assert bool(made) == kept


# ---- sizes


def test_sizes_that_are_left_to_the_device() -> None:
    on_gpu, on_cpu = (draft._sized(DraftSettings(held_out=7), on_gpu=on_gpu) for on_gpu in (True, False))
    assert (on_gpu.answers, on_gpu.held_out, on_gpu.tokens_per_batch) == (512, 7, 2048)
    assert (on_cpu.answers, on_cpu.held_out, on_cpu.tokens_per_batch) == (128, 7, 1024)


# ---- what is shown


def lines_of(seconds: list[float], *, terminal: bool = False, total: int = 100, most_s: float = inf) -> list[str]:
    """Of a piece of work that takes so long, piece by piece."""
    clock, file = Clock(), io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    with WorkProgress("answers", total, console, clock.perf_counter) as shown:
        for done, piece in enumerate(seconds, 1):
            clock.now += piece
            shown.at(done, "9 running", most_s=most_s)
    return file.getvalue().splitlines()


def test_a_pipe_is_told_now_and_then() -> None:
    lines = lines_of([1.0] * 20)
    assert lines[0] == "answers: 0 of 100"
    assert lines[1] == "answers: 5 of 100, 9 running, 5.0 s, about 1 min 35 s left"
    assert [line.split()[1] for line in lines[2:]] == ["11", "18"], "less and less often"
    assert "about 3.0 s left" in lines_of([6.0], most_s=3.0)[1], "a limit may end it first"


def test_a_terminal_shows_a_bar() -> None:
    shown = "\n".join(lines_of([6.0], terminal=True))
    assert "answers" in shown
    assert "1/100" in shown
    assert "9 running, 6.0 s, about 9 min 54 s left" in shown
    assert "answers: 0 of 100" not in shown


def test_the_command_says_how_far_it_is(tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    train(clock, tmp_path / "drafter", 0.0, steps=20)
    said = capsys.readouterr().out
    assert "answers: 0 of 12\n" in said
    assert "drafter steps: 0 of 20\n" in said
    assert ", loss " in said
    assert " left\n" in said


def test_an_impossible_limit_ends_the_command_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "drafter"), "--draft.seconds=0.001"]
    assert main(["draft", "train", "tiny", "--prompts", "toy", *out]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert error.startswith("tlt: error: draft.seconds is 0.001, which left no time for writing answers")
    assert error.count("\n") == 1
