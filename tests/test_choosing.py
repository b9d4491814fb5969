"""The benchmark of decisions: batches shrink to one, repeats make the same calls, and what is told adds up."""

import json
import random
import sys
from pathlib import Path

import pytest

import tlt

sys.path.insert(0, str(Path(tlt.__file__).parents[1] / "benchmarks"))

import choosing

from tlt.spec.shape import OFF, Shape


def test_decisions_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "choosing.json"
    choosing.main(f"--requests 24 --median 60 --cap 600 --rollouts 2 --repeats 2 --json {file} --commit abc".split())
    record = json.loads(file.read_text(encoding="utf-8"))
    assert (record["machine"]["commit"], record["options"]["requests"]) == ("abc", 24)
    assert list(record["results"]) == ["eagle", "both"]
    for found in record["results"].values():
        assert sum(row["ticks"] for row in found["by_requests"].values()) == found["ticks"]
        assert {"≤ 1", "≤ 32"} <= set(found["by_requests"]), "from all of them to the last"
        for what in ("choose_us", "observe_us"):
            told = found[what]
            assert 0 < told["median"] <= told["p99"] <= told["max"]
            assert told["mean"] <= found["mean_of_all_us"][what.removesuffix("_us")]
        assert 0 < found["reviews"]["share"] < 1
        assert found["reviews"]["choose_us"]["mean"] > found["choose_us"]["median"]
    assert "reviews: " in capsys.readouterr().out


def test_walks_are_thinned_as_the_engine_does_it() -> None:
    world = choosing.World(random.Random(0))
    world.begin(64, median=200.0, sigma=0.0, cap=500)
    outcome = world.tick(Shape(("eagle",), 4, 2, 7))
    assert len(outcome.walks) == outcome.batch == 64
    assert sum(bool(walked.tracks) for walked in outcome.walks) == 8
    assert outcome.behind == choosing.WINDOW, "who was never asked has everything to take in"
    written = sum(200 - left for left in world.left.values())
    assert written == 64 + sum(walked.accepted for walked in outcome.walks)
    assert (world.tick(OFF).walks, world.behind) == ((), 1)
