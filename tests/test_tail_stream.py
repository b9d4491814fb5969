"""The benchmark of training during a rollout's tail: its exchange rate is right, and all of it runs on a CPU."""

import json
import sys
from pathlib import Path

import pytest

import tlt

sys.path.insert(0, str(Path(tlt.__file__).parents[1] / "benchmarks"))

import tail_stream


def test_one_after_the_other_exchanges_a_second_for_a_second() -> None:
    # 100 ticks of 10 ms and 4 micro-steps of 250 ms, in turns
    assert tail_stream.exchange(2.0, 100, 0.01, 4, 0.25) == pytest.approx(1.0)
    # the same micro-steps while half of the ticks' time was lost, and while none was
    assert tail_stream.exchange(1.0, 50, 0.01, 4, 0.25) == pytest.approx(0.5)
    assert tail_stream.exchange(1.0, 100, 0.01, 4, 0.25) == pytest.approx(0.0)
    # what makes both slower than in turns costs more than it gives
    assert tail_stream.exchange(3.0, 100, 0.01, 4, 0.25) == pytest.approx(2.0)
    assert tail_stream.exchange(1.0, 50, 0.01, 0, 0.25) is None


@pytest.mark.slow
def test_ticks_and_micro_steps_are_measured_alone_and_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.machine._commit", str)  # git cannot tell
    file, interval_s = tmp_path / "tail.json", sys.getswitchinterval()
    assert tail_stream.main(["--quick", "--json", str(file), "--commit", "abc"]) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["machine"]["commit"] == "abc"
    assert [row["shape"] for row in found["rows"]] == ["eagle 7x1/8", "off"]
    for row in found["rows"]:
        assert row["batch"] == 2
        assert row["context"] > found["scale"]["prompt"]
        assert row["captured ms"] == 0.0
        assert min(row["tick ms"], row["micro ms"], row["tick ms beside"], row["host slowdown"]) > 0
        assert row["slowdown"] == pytest.approx(row["tick ms beside"] / row["tick ms"])
        # per second of both: 1 − slowdown⁻¹ of the rollout is lost
        lost_s, gained_s = 1 - 1 / row["slowdown"], row["micro/s beside"] * row["micro ms"] / 1e3
        assert row["exchange"] == (pytest.approx(lost_s / gained_s) if row["micro steps"] else None)
    assert sys.getswitchinterval() == interval_s


def test_a_spent_budget_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tail.json"
    assert tail_stream.main(["--quick", "--json", str(file), "--budget", "0"]) == 0
    assert not file.exists()
    assert capsys.readouterr().out.count("is left out") == 2
