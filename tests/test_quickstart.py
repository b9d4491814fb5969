"""The first command a newcomer runs, for real: what it promises to show, and what it says at the end."""

from pathlib import Path

import pytest

from tlt.cli import main
from tlt.watch.events import ReplayCompared, StepFinished, read_run

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"


@pytest.mark.slow
def test_reward_and_accept_length_rise_and_tokens_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(RECIPE), f"--run.out={tmp_path}"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Tokens identical: yes." in told
    for words in ("Mean reward: ", "Accept length: ", "Rollout time with TLT: ", "Plain decoding took: ", "Report: "):
        assert words in told
    run = read_run(tmp_path / "quickstart")
    steps = [recorded.event for recorded in run.events if isinstance(recorded.event, StepFinished)]
    replays = [recorded.event for recorded in run.events if isinstance(recorded.event, ReplayCompared)]
    assert len(steps) == 28
    assert len(replays) == 4
    assert all(replay.identical for replay in replays)
    assert sum(step.mean_reward for step in steps[-5:]) > sum(step.mean_reward for step in steps[:5])
    drafted = [step.accept_length for step in steps if step.verifies]
    assert sum(drafted[-5:]) > sum(drafted[:5])
    assert (tmp_path / "quickstart" / "report.html").is_file()


@pytest.mark.slow
def test_the_same_recipe_on_two_workers_earns_the_same_rewards(tmp_path: Path) -> None:
    """One flag more on the command line: Ray, two processes, and the tokens of one."""
    pytest.importorskip("ray", reason="several workers need Ray: install tlt-rl[ray]")
    rewards = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        more = [f"--run.out={out}", f"--cluster.workers={workers}", "--run.steps=2", "--run.replay_every=0"]
        assert main(["train", str(RECIPE), *more]) == 0
        events = [recorded.event for recorded in read_run(out / "quickstart").events]
        rewards.append([event.mean_reward for event in events if isinstance(event, StepFinished)])
    assert len(rewards[0]) == 2
    assert rewards[0] == rewards[1]
