"""Who comes first where requests share: those that have most left to write, once nobody waits for a row any more."""

from dataclasses import replace

import pytest

from tests.test_engine import MODEL, kv_gib, requests
from tests.test_learned import AHEAD, drafting, engine_with, plain, shape_of
from tests.test_speculation import tokens_of
from tests.tiny import letters
from tlt.config import EngineSettings
from tlt.engine import rows as engine_rows
from tlt.engine.engine import EngineCore
from tlt.spec.shape import Shape
from tlt.types import Completion, SamplingParams


@pytest.mark.parametrize(("count", "pages"), [(14, 800), (14, 48), (5, 62)])  # few pages: preempted, they come back
def test_the_device_knows_where_every_request_must_end(count: int, pages: int) -> None:
    """Through moves, preemptions and resumptions; and that there is no hurry while others wait for a row."""
    engine = EngineCore(MODEL, letters(), EngineSettings(rows=5, page_size=4, kv_gib=kv_gib(pages, 4)))
    engine.submit(
        requests(count, group=2, params=[SamplingParams(max_tokens=n, ignore_eos=True) for n in (30, 60, 60)])
    )
    view, scheduler, seen = engine._runner._rows.view(), engine._scheduler, set()
    done = []
    while not engine.idle:
        done += engine.tick()
        if scheduler._moves:
            continue  # the device is told with the next plan
        for req in scheduler._reqs:
            assert int(view.end_R[req.row]) == req.position + req.left
            assert int(view.position_R[req.row]) == req.position
        if scheduler._reqs:
            has_waiting = bool(scheduler._waiting or scheduler._preempted)
            seen.add((has_waiting, float(view.remaining_bias)))
    assert seen == {(True, 0.0), (False, engine_rows.FAVOUR)}
    assert (sum(one.timing.preemptions for one in done) > 0) == (pages < 800)


@AHEAD
def test_who_is_behind_catches_up_and_the_batch_ends_earlier(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """The same tokens in fewer ticks. At such temperatures the noise decides, which drafters know, and drafts mostly
    come true, those of the cooler requests less often."""
    params = [SamplingParams(max_tokens=120, ignore_eos=True, temperature=heat) for heat in (6.0, 12.0, 100.0)]
    batch = requests(12, seed=4, params=params)
    shape, expected = replace(shape_of(3, 1, 4), share=2.0), plain(batch)
    ticks, lasted = {}, {}
    for remaining_bias in (0.0, engine_rows.FAVOUR):
        monkeypatch.setattr(engine_rows, "FAVOUR", remaining_bias)
        engine = engine_with(drafting(), lambda running: shape if running else Shape(), ahead, rows=12)
        engine.submit(batch)
        ended: list[int] = []
        done: list[Completion] = []
        while not engine.idle:
            done += engine.tick()
            ended += [engine.report().ticks] * (len(done) - len(ended))
        ticks[remaining_bias], lasted[remaining_bias] = ended[-1], ended[-1] - ended[0]
        assert tokens_of({one.key: one for one in done}) == expected
    none, some = sorted(ticks)
    assert ticks[some] < 0.95 * ticks[none]
    assert lasted[some] < 0.4 * lasted[none], "they end closer to each other"
