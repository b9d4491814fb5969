"""The learning rate that a run takes by itself, and what is said of it at the start."""

from pathlib import Path

import pytest

import tlt
from tests.tiny import policy
from tests.training import small
from tlt.config import GrpoSettings, TrainSettings
from tlt.event_builders import learning_rate_planned
from tlt.model.weights import weights_count
from tlt.train.policy import PolicyTrainer
from tlt.train.rates import usual_rate
from tlt.watch.console import notice
from tlt.watch.events import LearningRatePlanned, StartupFinished
from tlt.watch.history import events_of, steps_of


@pytest.mark.parametrize(
    ("weights", "rank", "rate", "kind"),
    [
        (500_000_000, 0, 1e-6, "all weights"),
        (7_000_000_000, 8, 3e-5, "adapters of rank 8"),
        (500_000, 0, 5e-4, "all weights of a tiny policy"),
        (500_000, 4, 5e-4, "adapters of rank 4 of a tiny policy"),
    ],
)
def test_the_rate_goes_by_what_is_trained(weights: int, rank: int, rate: float, kind: str) -> None:
    assert (usual_rate(weights, rank).rate, usual_rate(weights, rank).kind) == (rate, kind)


def test_weights_are_counted_from_the_config() -> None:
    model = policy()
    assert weights_count(model.config) == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(("given", "expected"), [(0.0, 5e-4), (2e-3, 2e-3)])
def test_the_trainer_takes_it_unless_one_is_given(given: float, expected: float) -> None:
    trainer = PolicyTrainer(policy(), TrainSettings(learning_rate=given), GrpoSettings())
    assert trainer.update([]).learning_rate == expected


@pytest.mark.parametrize("given", [0.0, 2e-3])
def test_it_is_told_before_the_first_step(tmp_path: Path, given: float) -> None:
    run = tlt.train(small(tmp_path, "--run.steps=1", f"--train.learning_rate={given}"))
    (told,) = events_of(run, LearningRatePlanned)
    kinds = [type(record.event) for record in run.events]
    assert kinds.index(LearningRatePlanned) < kinds.index(StartupFinished)
    assert told == LearningRatePlanned(given or 5e-4, "all weights of a tiny policy", 5e-4, given=bool(given))
    assert steps_of(run)[0].learning_rate == told.rate


@pytest.mark.parametrize(
    ("given", "rank", "text", "style"),
    [
        (0.0, 0, "learning rate 1e-06 for all weights, the usual one; train.learning_rate sets another", "dim"),
        (2e-6, 0, "learning rate 2e-06 for all weights, as given; 1e-06 is usual", "dim"),
        (1e-3, 0, "1e-06 is usual: this may destroy the policy", "bold yellow"),
        (3e-4, 16, "learning rate 0.0003 for adapters of rank 16, as given; 3e-05 is usual", "dim"),
    ],
)
def test_the_console_says_it(given: float, rank: int, text: str, style: str) -> None:
    said = notice(learning_rate_planned(TrainSettings(learning_rate=given, lora_rank=rank), 10**9))
    assert said is not None
    assert said[0].endswith(text)
    assert said[1] == style
