"""The programs under examples/ do what they say."""

import pytest

from examples.grpo_in_one_file import train


def test_grpo_in_one_file_learns_and_drafts_change_no_reward(capsys: pytest.CaptureFixture[str]) -> None:
    rewards = train(3)
    assert rewards[-1] > rewards[0] + 0.05
    said = capsys.readouterr().out
    assert "step 3: reward" in said
    assert "accept length" in said
    assert train(1, drafter="none")[0] == rewards[0]
