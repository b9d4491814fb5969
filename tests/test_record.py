"""What was measured of a drafter: whole or refused, never of other weights, and a first guess that soon gives way."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from tests.tuning import Curve
from tlt.errors import ModelError
from tlt.spec.acceptance import Acceptance, AcceptResult, RankHits, likeliest_nodes
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.eagle_files import Origin, save_drafter
from tlt.spec.record import FILE, DraftRecord, keep_better, parse_record, read_record, record_text, write_record
from tlt.spec.shape import Shape

RECORD = DraftRecord(((0.6, 0.1 + 0.2), (0.5, 0.0)), places=12, temperature=0.7)
WORDS: dict[str, Any] = json.loads(record_text(RECORD))


# ---- the file


def test_a_record_read_back_is_the_same(tmp_path: Path) -> None:
    assert parse_record(record_text(RECORD)) == RECORD
    assert read_record(tmp_path) is None
    write_record(RECORD, tmp_path)
    assert read_record(tmp_path) == RECORD
    write_record(None, tmp_path)
    write_record(None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_chances_may_add_up_to_one_with_rounding_and_greedy_answers_count() -> None:
    DraftRecord(((0.1,) * 10,), places=1, temperature=0)
    assert sum((0.7, 0.2, 0.1 + 1e-9)) > 1
    DraftRecord(((0.7, 0.2, 0.1 + 1e-9),), places=1, temperature=0)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"places": 0}, "places is 0; expected a whole number ≥ 1"),
        ({"places": 2.5}, "places is 2.5"),
        ({"places": True}, "places is True"),
        ({"temperature": -1.0}, "temperature is -1.0; expected a finite number ≥ 0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"ranks": []}, "ranks is []; expected a row of chances per depth"),
        ({"ranks": 0.5}, "ranks is 0.5"),
        ({"ranks": [[0.5], []]}, "ranks at depth 2 is []; expected a row of chances"),
        ({"ranks": [[0.5], 0.5]}, "ranks at depth 2 is 0.5"),
        ({"ranks": [[0.5, 0.1], [0.5]]}, "ranks has 1 chances at depth 2 and 2 at depth 1; expected as many"),
        ({"ranks": [[0.5, -0.1]]}, "ranks at depth 1, rank 2 is -0.1; expected a number from 0 to 1"),
        ({"ranks": [[1.5]]}, "rank 1 is 1.5"),
        ({"ranks": [[float("nan")]]}, "rank 1 is nan"),
        ({"ranks": [["0.5"]]}, "rank 1 is '0.5'"),
        ({"ranks": [[0.5, 0.4], [0.7, 0.4]]}, "ranks at depth 2 add up to 1.1; expected at most 1"),
    ],
)
def test_what_is_not_sensible_is_refused(tmp_path: Path, wrong: dict[str, Any], expected: str) -> None:
    (tmp_path / FILE).write_text(json.dumps({**WORDS, **wrong}))
    with pytest.raises(ModelError) as caught:
        read_record(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / FILE} is no record of a drafter: ")
    assert expected in str(caught.value)
    assert "remove the file" in str(caught.value)
    with pytest.raises(ModelError):
        DraftRecord(**{**WORDS, **wrong})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"{", "it is not valid JSON"),
        (b"\xff", "can't decode"),
        (b"[1]", "it holds a list; expected an object with ['places', 'ranks', 'temperature']"),
        (b'{"ranks": [[1]], "places": 1}', "it holds the names ['places', 'ranks']"),
        (json.dumps({**WORDS, "more": 1}).encode(), "it holds the names ['more', 'places'"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, text: bytes, expected: str) -> None:
    (tmp_path / FILE).write_bytes(text)
    with pytest.raises(ModelError) as caught:
        read_record(tmp_path)
    assert expected in str(caught.value)


def test_a_record_never_outlives_the_weights_it_speaks_of(tmp_path: Path) -> None:
    policy = tiny.policy()
    drafter = Eagle(EagleConfig.of_policy(policy.config, window=16), dtype=policy.embed.dtype)
    drafter.init_weights(0)
    for record in (RECORD, None):
        save_drafter(drafter, tmp_path, policy.head_weight, Origin("tiny", ()), record=record)
        assert read_record(tmp_path) == record


def test_a_record_gives_way_to_one_of_as_many_places_and_to_no_smaller_one(tmp_path: Path) -> None:
    smaller, as_large = (replace(RECORD, places=places, temperature=0.1) for places in (11, 12))
    assert keep_better(RECORD, tmp_path) == RECORD == read_record(tmp_path)
    assert keep_better(smaller, tmp_path) == RECORD == read_record(tmp_path)
    assert keep_better(as_large, tmp_path) == as_large == read_record(tmp_path)
    (tmp_path / FILE).write_text("{")
    assert keep_better(smaller, tmp_path) == smaller == read_record(tmp_path)


def test_a_write_that_fails_leaves_no_record_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(_tensors: object, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"other")
        raise OSError("the disk is full")

    policy = tiny.policy()
    drafter = Eagle(EagleConfig.of_policy(policy.config, window=16), dtype=policy.embed.dtype)
    drafter.init_weights(0)
    write_record(RECORD, tmp_path)
    monkeypatch.setattr("tlt.spec.eagle_files.write_tensors", half)
    with pytest.raises(OSError, match="the disk is full"):
        save_drafter(drafter, tmp_path, policy.head_weight, Origin("tiny", ()), record=RECORD)
    assert read_record(tmp_path) is None


# ---- recalled


SHAPES = [
    Shape(("eagle",), depth, width, verify)
    for depth, width, verify in ((1, 1, 2), (3, 1, 4), (7, 1, 8), (15, 1, 16), (3, 4, 13), (5, 8, 32))
]
BOTH = Shape(("eagle", "suffix"), 3, 4, 16)


def table(curve: Curve, depths: int = 8, width: int = 8) -> list[tuple[float, ...]]:
    return [row[:width] for row in curve.ranks(hard=False)[:depths]]


def by_the_rule(rows: list[tuple[float, ...]], shape: Shape) -> float:
    """Straight from the table, whose last row goes on."""
    deep = [list(rows[min(depth, len(rows) - 1)][: shape.width]) for depth in range(shape.depth)]
    return 1 + sum(probability for probability, _, _ in likeliest_nodes(deep, shape.verify - 1))


@pytest.mark.parametrize("curve", [Curve(0.9), Curve(0.6, 0.9), Curve(0.98, 1.0), Curve(0.3, 0.8), Curve(0.03)])
@pytest.mark.parametrize("worth", [16.0, 64.0])
def test_lengths_follow_what_was_recalled(curve: Curve, worth: float) -> None:
    acceptance = Acceptance([*SHAPES, BOTH], horizon=1000.0)
    stranger = [acceptance.length(shape) for shape in SHAPES]
    acceptance.load_prior("eagle", table(curve), worth)
    acceptance.refresh()
    assert acceptance.evidence(("eagle",)) == pytest.approx(worth)
    assert acceptance.known(("eagle",)) == pytest.approx(worth)
    assert acceptance.evidence(("suffix",)) == acceptance.evidence(BOTH.drafters) == 0
    for shape, before in zip(SHAPES, stranger, strict=True):
        assert acceptance.length(shape) == pytest.approx(by_the_rule(table(curve), shape), rel=0.03)
        assert abs(acceptance.length(shape) - before) > 0.03


def test_a_drafter_that_is_always_right_is_expected_to_be() -> None:
    acceptance = Acceptance(SHAPES, horizon=1000.0)
    acceptance.load_prior("eagle", [(1.0, 0.0)], 8.0)
    acceptance.refresh()
    assert [acceptance.length(shape) for shape in SHAPES[:4]] == pytest.approx([2, 4, 8, 16])


def test_ranks_nobody_measured_are_those_of_a_drafter_nobody_tried_there() -> None:
    """Narrower than the shapes: half the chance of the rank before. Wider: what no shape names counts as missed."""
    narrow = Acceptance([Shape(("eagle",), 1, 3, 4)], horizon=1000.0)
    narrow.load_prior("eagle", [(0.6,)], 1e6)
    assert narrow._survival["eagle",].ranks()[0] == pytest.approx([0.6, 0.4 * 0.3, 0.4 * 0.7 * 0.15], rel=1e-3)
    wide = Acceptance([Shape(("eagle",), 1, 1, 2)], horizon=1000.0)
    wide.load_prior("eagle", [(0.6, 0.4)], 32.0)
    assert wide.evidence(("eagle",)) == pytest.approx(32.0)
    assert wide._survival["eagle",].ranks()[0] == pytest.approx([0.6])


@pytest.mark.parametrize("worth", [8.0, 32.0])
def test_a_drafter_that_turns_out_useless_is_soon_known_to_be(worth: float) -> None:
    acceptance, wide = Acceptance(SHAPES, horizon=1000.0), SHAPES[-1]
    acceptance.load_prior("eagle", table(Curve(0.6, 0.9)), worth)
    acceptance.refresh()
    assert acceptance.length(SHAPES[2]) > 2
    for _ in range(int(10 * worth)):
        acceptance.see(wide, [AcceptResult(0, (RankHits((), wide.width),))])
    acceptance.refresh()
    assert all(acceptance.length(shape) < 1.2 for shape in SHAPES[:4])


def test_a_drafter_that_turns_out_better_is_soon_known_to_be() -> None:
    acceptance, chain = Acceptance(SHAPES, horizon=1000.0), SHAPES[1]
    acceptance.load_prior("eagle", table(Curve(0.1)), 16.0)
    for _ in range(160):
        acceptance.see(chain, [AcceptResult(3, (RankHits((1, 1, 1)),))])
    acceptance.refresh()
    assert acceptance.length(chain) > 3.5


def test_what_was_recalled_is_forgotten_and_fades_like_what_was_seen() -> None:
    acceptance = Acceptance(SHAPES, horizon=1000.0)
    acceptance.load_prior("eagle", table(Curve(0.9)), 32.0)
    acceptance.changed("eagle", 3.0)
    assert acceptance.evidence(("eagle",)) == pytest.approx(3.0)
    acceptance.forget("eagle")
    assert acceptance.evidence(("eagle",)) == 0


def test_a_drafter_that_no_shape_uses_cannot_be_recalled() -> None:
    with pytest.raises(ValueError, match=r"no shape uses drafter 'suffix'; expected one of \['eagle'\]"):
        Acceptance(SHAPES, horizon=1000.0).load_prior("suffix", [(0.5,)], 8.0)
