"""The benchmark of decisions: batches shrink to one, repeats make the same calls, and what is told adds up."""

import json
import random
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

import tlt

sys.path.insert(0, str(Path(tlt.__file__).parents[1] / "benchmarks"))

import choosing

from tlt.spec.costs import POLICY, Measured
from tlt.spec.shape import OFF, Shape
from tlt.spec.tuner import Tuner


def test_decisions_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that counts what is done: 100 ns between two readings, and 1 µs for every shape that is compared."""
    looks, tuners, tuner_of = count(), list[Tuner](), choosing.tuner_of

    def kept(drafter: str) -> Tuner:
        tuners.append(tuner_of(drafter))
        return tuners[-1]

    def perf_counter_ns() -> int:
        return 100 * next(looks) + 1000 * sum(tuner.evaluations for tuner in tuners)

    monkeypatch.setattr("tlt.machine._commit", str)  # git cannot tell
    monkeypatch.setattr(choosing, "tuner_of", kept)
    monkeypatch.setattr(choosing, "time", SimpleNamespace(perf_counter_ns=perf_counter_ns))
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
        assert found["reviews"]["choose_us"]["mean"] > 1.0 + found["choose_us"]["median"]
    assert "reviews: " in capsys.readouterr().out


def test_walks_are_thinned_as_the_engine_does_it() -> None:
    world = choosing.ChoosingWorld(random.Random(0))
    world.begin(64, median=200.0, sigma=0.0, cap=500)
    outcome = world.tick(Shape(("eagle",), 4, 2, 7))
    assert len(outcome.results) == outcome.batch == 64
    assert sum(bool(walked.rank_hits) for walked in outcome.results) == 8
    assert outcome.lag == choosing.WINDOW, "who was never asked has everything to take in"
    written = sum(200 - left for left in world.left.values())
    assert written == 64 + sum(walked.accepted for walked in outcome.results)
    assert (world.tick(OFF).results, world.lag) == ((), 1)


def test_all_shapes_at_once_are_what_each_is_alone() -> None:
    """A review looks at all shapes together: the same lengths, seconds and rates as one by one, at any moment."""
    world, tuner = choosing.ChoosingWorld(random.Random(1)), choosing.tuner_of("both")
    looked = 0
    for _ in range(2):
        world.begin(48, median=120.0, sigma=1.0, cap=900)
        while world.left:
            batch = len(world.left)
            tuner.observe(world.tick(tuner.choose(batch, world.lag)))
            if tuner._ticks % 7 == 0:
                looked += 1
                check_all(tuner, batch)
            if tuner._ticks % 70 == 0:  # a run turns out to cost something else
                tuner.load_costs([Measured(POLICY, size, choosing.policy_s(size) * 2) for size in (8, 64)] * 5)
                check_all(tuner, batch)
    assert looked > 40
    assert tuner._acceptance._seen
    assert tuner._costs._recent


def check_all(tuner: Tuner, batch: int) -> None:
    shapes, size = tuner._shapes, tuner._costs.pad(batch)
    assert tuner._acceptance.lengths() == [tuner._acceptance.length(shape) for shape in shapes]
    found = tuner._costs.seconds_of(shapes, size)
    assert found == pytest.approx([tuner._costs.seconds(shape, size) for shape in shapes], rel=1e-12)
    known = [place for place, shape in enumerate(shapes) if shape.off or tuner._acceptance.known(shape.drafters) >= 1.0]
    assert tuner._known_places(size) == known
