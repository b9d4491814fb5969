"""What a run says of its health: five lights, warnings as events, and that nothing was learned."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import tlt
from tests.training import small
from tests.watching import rollout, step
from tlt.config import RunConfig
from tlt.recipe import load_config
from tlt.tasks.toy import ToyTask
from tlt.types import Completion, Prompt
from tlt.watch.console import Lines, Progress, _Now
from tlt.watch.events import (
    AcceptanceCollapsed,
    CheckpointsPlanned,
    Evaluated,
    Event,
    HealthWarning,
    ReaderFailed,
    ReplayCompared,
    RewardsFailed,
    Run,
    StepFinished,
)
from tlt.watch.health import NAMES, Health, HealthLight, lights_of, nothing_learned, worst_of
from tlt.watch.history import events_of, steps_of
from tlt.watch.report import page
from tlt.watch.summary import last_lines, summarise
from tlt.watch.workers import WorkerLost, WorkerReturned


class Same(ToyTask):
    """Every completion earns the same, or that of one prompt in four does not."""

    def __init__(self, odd: str = "") -> None:
        super().__init__(small(Path()).task.toy, seed=0)
        self._odd = odd

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        return float(completion.key.request % 2) if prompt.id == self._odd else 0.25


@pytest.mark.parametrize("odd", [False, True])
def test_a_step_tells_the_share_of_groups_without_a_signal(tmp_path: Path, odd: bool) -> None:
    prompts = Same().sample(0, 4)
    task = Same(prompts[2].id if odd else "")
    (step,) = steps_of(tlt.train(small(tmp_path, "--run.steps=1"), task))
    assert step.no_signal == (0.75 if odd else 1.0)
    assert (step.grad_norm > 0) == odd


# ---- the lights

CONFIG = load_config(None, ["--spec.drafter=suffix"])


def lights_after(*events: Event, config: RunConfig = CONFIG) -> dict[str, HealthLight]:
    return {light.name: light for light in lights_of(config, events)}


def steps(count: int, first: int = 1, **changes: float) -> list[StepFinished]:
    """Healthy ones, but for the changes."""
    return [step(number, **changes) for number in range(first, first + count)]


def test_a_healthy_run_is_green() -> None:
    lights = lights_after(*steps(8))
    assert tuple(lights) == NAMES
    assert {light.level for light in lights.values()} == {"good"}
    assert not any(light.remedy for light in lights.values())
    assert lights_after()["learning"].says == "no step yet"
    assert lights_after(*steps(3), config=RunConfig())["speculation"].level == "off"


SILENT: dict[str, float] = {"no_signal": 1.0, "grad_norm": 0.0}
DISK = CheckpointsPlanned("there", 1, 1, 1, 1, most_bytes=10, free_bytes=5)
LOST = WorkerLost(4, 1, "rollout", "it died", 3, 1.0)
COLLAPSED = AcceptanceCollapsed(6, "eagle", "chain", 1.1, 3.4, 100)
FAULT = ReplayCompared(4, 10, 1.0, 1.0, identical=False, exact=True)


def held_out(step: int, reward: float, error: float = 0.03, name: str = "test") -> Evaluated:
    return Evaluated(step, name, 256, 256, reward, error, ((1, reward),), 9.0, 0.0, 1.0)


FELL = [held_out(0, 0.4), *steps(1), held_out(1, 0.6), *steps(1, 2), held_out(2, 0.5)]


@pytest.mark.parametrize(
    ("events", "name", "level", "says"),
    [
        (FELL, "rewards", "bad", "reward on held-out test fell from 0.600 to 0.500"),
        ([*FELL, held_out(2, 0.9, name="other")], "rewards", "bad", "reward on held-out test fell from 0.600 to 0.500"),
        (steps(3, **SILENT, reward_std=0.5), "learning", "bad", "no group had a signal for 3 steps"),
        (steps(3, **SILENT, reward_std=0.0, mean_reward=0.0), "learning", "bad", "3 steps: every completion earned 0"),
        (steps(3, grad_norm=0.0), "learning", "bad", "the gradient was 0 for 3 steps"),
        (steps(5, no_signal=0.9), "learning", "warn", "90% of the groups have no signal"),
        (steps(5, mismatch_mean=0.2), "learning", "warn", "trainer and engine differ by 0.2 nats per token"),
        ([*steps(1, entropy=1.0), *steps(5, 2, entropy=0.02)], "learning", "warn", "entropy fell from 1 to 0.02"),
        (steps(5, clipped=0.4), "learning", "warn", "40% of the tokens are clipped"),
        ([*steps(5, mean_reward=0.9), *steps(5, 6, mean_reward=0.1)], "rewards", "bad", "fell from 0.900 to 0.100"),
        ([rollout(1), RewardsFailed(1, "raised", 2, "p", ""), step(1)], "rewards", "warn", "2 of 100 rewards failed"),
        ([rollout(1), RewardsFailed(1, "raised", 20, "p", ""), step(1)], "rewards", "bad", "20 of 100 rewards failed"),
        (steps(3, reward_s=4.0, step_s=10.0), "rewards", "warn", "40% of the time goes by waiting for rewards"),
        (steps(2, truncated=0.2), "truncation", "warn", "20% of the completions ran into sampling.max_tokens (256)"),
        (steps(2, truncated=0.6), "truncation", "bad", "60% of the completions ran into sampling.max_tokens (256)"),
        ([*steps(6), COLLAPSED], "speculation", "warn", "acceptance of eagle fell from 3.40 to 1.10"),
        ([FAULT, *steps(5)], "speculation", "bad", "step 4 was decoded to other tokens without drafts"),
        (steps(5, saved_s=-1.0), "speculation", "warn", "drafts cost 5.0 s of the last 20.0 s of rollout"),
        ([DISK, *steps(1)], "machine", "bad", "more room than the disk has"),
        ([LOST, *steps(1)], "machine", "warn", "worker 1 is lost (it died)"),
        ([ReaderFailed("wandb", "x"), *steps(1)], "machine", "warn", "wandb failed and shows nothing more"),
        ([*steps(6), *steps(5, 7, tokens=100)], "machine", "warn", "25 tokens per second of rollout, once 25"),
        (
            [*steps(6, host_bytes=4 * 2**30), *steps(2, 7, host_bytes=6 * 2**30)],
            "machine",
            "warn",
            "host memory grew from 4.0 to 6.0 GiB",
        ),
    ],
)
def test_a_light_says_what_is_wrong_and_what_to_do(events: list[Event], name: str, level: str, says: str) -> None:
    lights = lights_after(*events)
    assert lights[name].level == level
    assert says in lights[name].says
    assert len(lights[name].remedy) > 20
    assert {light.level for light in lights.values() if light.name != name} == {"good"}
    assert worst_of(lights.values()) is lights[name]


@pytest.mark.parametrize(("objective", "level"), [("ppo", "warn"), ("gspo", "good"), ("cispo", "good")])
def test_only_tokens_that_lose_their_gradient_one_by_one_are_clipped_too_much(objective: str, level: str) -> None:
    config = load_config(None, overrides={"grpo.objective": objective})
    assert lights_after(*steps(5, clipped=0.4), config=config)["learning"].level == level


@pytest.mark.parametrize(
    "events",
    [
        steps(2, **SILENT),  # an accident
        [*steps(8, **SILENT), *steps(5, 9)],  # over
        [LOST, WorkerReturned(5, 1, "host", 1.0), *steps(1)],
        [RewardsFailed(1, "raised", 2, "p", ""), *steps(6)],
        [COLLAPSED, *steps(12)],
        steps(5, truncated=0.05),
        [FAULT.__class__(4, 10, 1.0, 1.0, identical=False), *steps(1)],  # rounding, where it is allowed
        steps(8, entropy=0.01),  # it was never higher
        [*FELL, *steps(1, 3), held_out(3, 0.52)],  # within two standard errors
        steps(2, saved_s=-1.0),  # an accident
        steps(2, reward_s=4.0, step_s=10.0),
        steps(5, reward_s=2.0, step_s=10.0),
    ],
)
def test_a_light_goes_back_and_does_not_cry_wolf(events: list[Event]) -> None:
    assert {light.level for light in lights_after(*events).values()} == {"good"}


def test_a_warning_comes_once_and_again_after_it_was_over() -> None:
    health = Health(CONFIG)
    told = [
        [warning.light for warning in health.see(one)]
        for one in [*steps(5, truncated=0.2), *steps(5, 6, truncated=0.9), *steps(5, 11), *steps(1, 16, truncated=1.0)]
    ]
    assert [index for index, lights in enumerate(told, start=1) if lights] == [1, 8, 16]  # look; bad; look again
    assert {light for lights in told for light in lights} == {"truncation"}


def test_a_fall_on_held_out_prompts_is_warned_of_when_it_is_seen() -> None:
    health = Health(CONFIG)
    *before, last = FELL
    assert not [warning for event in before for warning in health.see(event)]
    (warning,) = health.see(last)
    assert (warning.step, warning.light, warning.remedy[-43:]) == (
        2,
        "rewards",
        "from checkpoint step_1, whose weights are kept"[-43:],
    )


def test_what_to_do_goes_by_the_settings() -> None:
    sampling = load_config(None, ["--grpo.dynamic_sampling=4"])  # passes over groups without a signal
    assert "dynamic_sampling" in lights_after(*steps(5, no_signal=0.9))["learning"].remedy
    assert lights_after(*steps(5, no_signal=0.9), config=sampling)["learning"].level == "good"
    masked = load_config(None, ["--grpo.mask_overlong=true", "--sampling.max_tokens=99"])
    assert "grpo.mask_overlong" in lights_after(*steps(1, truncated=1.0))["truncation"].remedy
    light = lights_after(*steps(1, truncated=1.0), config=masked)["truncation"]
    assert "(99)" in light.says
    assert "mask_overlong" not in light.remedy
    still = lights_after(*steps(3, grad_norm=0.0, truncated=1.0), config=masked)["learning"]
    assert "raise sampling.max_tokens" in still.remedy


# ---- where they are shown


def shown(run: Run, lines: type[Lines] = Lines) -> str:
    console = Console(file=StringIO(), width=160)
    reader = lines(run.config, console)
    for record in run.events:
        reader.show(record)
    reader.close()
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def useless(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Every completion earns the same, for four steps."""
    flags = ("--run.steps=4", "--watch.report=true", "--checkpoint.every=0")
    return tlt.train(small(tmp_path_factory.mktemp("useless"), *flags), Same())


def test_a_run_without_a_signal_says_so_in_its_events(useless: Run) -> None:
    (warning,) = [one for one in events_of(useless, HealthWarning) if one.light == "learning"]
    assert (warning.step, warning.light, warning.bad) == (3, "learning", True)
    assert warning.message == "no group had a signal for 3 steps: every completion earned 0.25"


def test_and_on_the_console(useless: Run) -> None:
    told = shown(useless)
    assert "● learning  ● rewards  ● truncation" in told.partition("mean reward")[0]  # above the first heading
    assert "learning: no group had a signal for 3 steps: every completion earned 0.25; read the completions" in told


def test_and_in_its_last_lines_and_report(useless: Run) -> None:
    summary = summarise(useless)
    first = last_lines(summary, "there")[0]
    assert first.startswith(
        "Nothing was learned: in 4 steps no group had a signal, as all completions to a prompt earned"
    )
    html = page(useless)
    assert '<li class="bad"><i></i><div><b>learning<span>: bad</span></b>no group had a signal for 4 steps' in html
    assert html.index('class="lights"') < html.index('class="words"')
    assert "Nothing was learned" in html
    assert "What was warned of" in html


def test_the_live_part_has_the_lights_and_what_to_do_first() -> None:
    health = Health(CONFIG)
    for one in steps(5, truncated=0.9):
        health.see(one)
    console = Console(file=StringIO(), width=200)
    console.print(_Now(Progress(12), health))
    assert isinstance(console.file, StringIO)
    told = console.file.getvalue().splitlines()
    assert told[0].strip() == "● learning  ● rewards  ■ truncation  ● speculation  ● machine"
    assert told[1].startswith(
        "truncation: 90% of the completions ran into sampling.max_tokens (256); raise sampling.max"
    )


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], ""),
        (steps(4), ""),
        (steps(1, **SILENT), "Nothing was learned: in 1 step no group had a signal"),
        ([*steps(9, **SILENT), *steps(1, 10)], "Next to nothing was learned, in 1 of 10 steps: in 9 steps no group"),
        ([*steps(3, **SILENT), *steps(7, 4)], ""),
        (steps(4, grad_norm=0.0), "Nothing was learned: the gradient was 0. To change that, give prompts"),
    ],
)
def test_nothing_learned_is_a_sentence(told: list[StepFinished], expected: str) -> None:
    found = nothing_learned(told)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)
