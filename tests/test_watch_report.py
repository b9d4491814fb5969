"""The report: its numbers are those of the events, its drawing is to scale, and it needs nothing but itself."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.watching import config_of, events_of_steps, rollout, step, whole_run, write_run
from tlt.cli import main
from tlt.watch.chart import Figure
from tlt.watch.events import (
    EVENTS_FILE,
    CheckpointsPlanned,
    DrafterSwapped,
    DrafterTrained,
    Event,
    ReplayCompared,
    RunFailed,
    RunResumed,
    ShapesChosen,
    TrainingForecast,
    read_run,
)
from tlt.watch.figures import figures_of, survival
from tlt.watch.metrics import columns_of
from tlt.watch.report import page, write_report
from tlt.watch.summary import duration, in_words, last_lines, summarise
from tlt.watch.verdict import whole_steps
from tlt.watch.workers import WorkerSpans


def figure(directory: Path, title: str) -> Figure:
    return next(one for one in figures_of(read_run(directory)) if one.title == title)


def values(directory: Path, metric: str) -> list[float | None]:
    return columns_of(read_run(directory)).values[metric]


# ---- numbers


def test_lines_are_columns_of_the_numbers_of_the_events(tmp_path: Path) -> None:
    directory = whole_run(tmp_path)
    assert columns_of(read_run(directory)).steps == list(range(1, 13))
    for title, metrics in {
        "Reward": {"reward/mean": "mean_reward"},
        "Accept length": {"rollout/accept_length": "accept_length"},
        "Completion lengths": {"length/max": "length_max", "length/p90": "length_p90", "length/p50": "length_p50"},
    }.items():
        assert figure(directory, title).metrics == list(metrics)
        for metric, field in metrics.items():
            assert values(directory, metric) == [getattr(step(number), field) for number in range(1, 13)]


def test_every_column_is_drawn_or_told_elsewhere(tmp_path: Path) -> None:
    """A metric that no figure names gets a figure of its own."""
    config = config_of(tmp_path)
    directory = write_run(config, [step(n, kl=0.25, mismatch_max=0.5, truncated=0.1) for n in (1, 2)])
    shown = {metric for one in figures_of(read_run(directory)) for metric in one.metrics}
    assert {"policy/kl", "policy/mismatch_mean", "policy/learning_rate", "policy/loss"} <= shown
    assert figure(directory, "policy/mismatch_max").metrics == ["policy/mismatch_max"]


def test_a_new_drafter_is_marked_where_it_first_drafts(tmp_path: Path) -> None:
    """The engine gets it at the end of a step: of the last one's nobody has drafted."""
    swaps = [DrafterSwapped(1, 1), DrafterSwapped(7, 2), DrafterSwapped(12, 3)]
    directory = write_run(config_of(tmp_path), [*events_of_steps(0, 12), *swaps])
    told = [mark.title for mark in figure(directory, "Accept length").marks]
    assert told == ["drafter 1 from step 2 on", "drafter 2 from step 8 on"]


def test_staleness_is_counted_in_updates(tmp_path: Path) -> None:
    """A drafter that learned from the rollouts of step 2 drafts in step 3, after one update."""
    swaps = [DrafterSwapped(2, 1), DrafterSwapped(5, 2)]
    directory = write_run(config_of(tmp_path), [*(step(n, staleness=0.25) for n in range(1, 8)), *swaps])
    assert values(directory, "sum/drafter_staleness") == [None, None, 1, 2, 3, 1, 2]
    assert values(directory, "policy/staleness") == [0.25] * 7
    assert figure(directory, "Drafter staleness").topic == "Speculation"
    assert figure(directory, "Staleness").topic == "Policy update"


def test_phases_add_up_to_the_step(tmp_path: Path) -> None:
    directory = whole_run(tmp_path)
    shown = figure(directory, "Time per phase")
    assert shown.stacked
    each = [values(directory, metric)[0] or 0.0 for metric in shown.metrics]
    assert each == pytest.approx([4.0, 0.25, 2.0, 0.5, 0.125, 0.125])
    assert sum(each) == pytest.approx(step(1).step_s)


def test_what_workers_did_is_drawn_to_scale(tmp_path: Path) -> None:
    """Of the last step: worker 1 rolls for 6 of 10 s, then trains the drafter, and waits for the last second."""
    spans = [
        WorkerSpans(11, 0, "here", (("rolling", 90.0, 9.0),)),
        WorkerSpans(12, 1, "there", (("rolling", 100.0, 6.0), ("drafting", 106.0, 2.0), ("idle", 108.0, 1.0))),
        WorkerSpans(12, 0, "here", (("rolling", 100.0, 9.0),)),
        WorkerSpans(12, 0, "here", (("updating", 109.0, 1.0),)),
        WorkerSpans(12, 1, "there", (("updating", 109.0, 1.0),)),
    ]
    directory = write_run(config_of(tmp_path), [*events_of_steps(0, 12), *spans])
    shown = figure(directory, "Workers")
    assert shown.words == "What each worker did in step 12: 5.0% of their time idle."
    assert [series.label for series in shown.series] == ["rolling", "drafting", "updating", "idle"]
    drawn = [(span.title, span.start, span.length) for lane in shown.lanes for span in lane.spans]
    assert drawn == [
        ("worker 0: rolling 9.0 s", 0.0, 9.0),
        ("worker 0: updating 1.0 s", 9.0, 1.0),
        ("worker 1: rolling 6.0 s", 0.0, 6.0),
        ("worker 1: drafting 2.0 s", 6.0, 2.0),
        ("worker 1: idle 1.0 s", 8.0, 1.0),
        ("worker 1: updating 1.0 s", 9.0, 1.0),
    ]
    assert [lane.name for lane in shown.lanes] == ["0", "1"]


def test_shapes_are_shown_by_number_of_requests(tmp_path: Path) -> None:
    """Of all steps; what is rarely used is one of the others, and hovering names it."""
    rare = tuple((8, f"suffix {depth}x1/8", 2) for depth in range(1, 5))
    chosen = [
        ShapesChosen(1, ((8, "eagle 7x1/8", 30), (256, "off", 10))),
        ShapesChosen(2, ((8, "eagle 7x1/8", 30), (8, "off", 12), *rare, (256, "eagle 2x1/4~2", 30))),
    ]
    directory = write_run(config_of(tmp_path), [*events_of_steps(0, 2), *chosen])
    shown = figure(directory, "Shapes")
    labels = [series.label for series in shown.series]
    assert labels == ["eagle 7x1/8", "eagle 2x1/4~2", "suffix 1x1/8", "suffix 2x1/8", "others", "off"]
    few, many = shown.bars
    assert few.title.startswith("up to 8 requests, 80 passes\neagle 7x1/8 75.0%\noff 15.0%\nsuffix 1x1/8 2.5%")
    assert many.title == "up to 256 requests, 40 passes\neagle 2x1/4~2 75.0%\noff 25.0%"
    assert few.parts == pytest.approx([0.75, 0, 0.025, 0.025, 0.05, 0.15])
    assert many.parts == pytest.approx([0, 0.75, 0, 0, 0, 0.25])


def test_acceptance_is_shown_by_depth_over_the_steps(tmp_path: Path) -> None:
    """A figure for each drafter that something was verified of; hovering tells every depth."""
    ticks = ((8, "eagle 7x1/8", 30),)
    shares = ((0.5, 0.25), (0.75, 0.5, 0.25, 0.125))
    chosen = [ShapesChosen(n, ticks, (("eagle", share),), 3, 0.25) for n, share in enumerate(shares, start=1)]
    directory = write_run(config_of(tmp_path), [*events_of_steps(0, 3), *chosen, ShapesChosen(3, ticks)])
    shown = figure(directory, "Acceptance by depth: eagle")
    assert [series.label for series in shown.series] == ["depth 1", "depth 2", "depth 4"]
    assert "shapes changed 6 times" in shown.words
    assert "took 0.50 s" in shown.words
    assert [values(directory, metric) for metric in shown.metrics] == [
        [0.5, 0.75, None],
        [0.25, 0.5, None],
        [None, 0.125, None],
    ]
    assert [one.title for one in figures_of(read_run(directory))].count("Acceptance by depth: eagle") == 1
    assert "Acceptance by depth: eagle" in page(read_run(directory))
    unknown = write_run(config_of(tmp_path / "older"), [*events_of_steps(0, 2), ShapesChosen(1, ticks)])
    assert not any("by depth" in one.title for one in figures_of(read_run(unknown)))


def test_of_many_workers_some_are_shown(tmp_path: Path) -> None:
    spans = [WorkerSpans(1, rank, "here", (("rolling", 5.0, 1.0 + rank),)) for rank in range(60)]
    directory = write_run(config_of(tmp_path), [*events_of_steps(0, 1), *spans])
    shown = figure(directory, "Workers")
    assert "each worker (20 of 60) did in step 1: 0.0% of their time idle" in shown.words
    assert len(shown.lanes) == 20
    assert "Workers" not in [one.title for one in figures_of(read_run(whole_run(tmp_path / "alone")))]


def test_time_saved_is_called_an_estimate_and_replays_are_measured(tmp_path: Path) -> None:
    directory = whole_run(tmp_path)
    saved = figure(directory, "Time saved")
    assert [series.label for series in saved.series] == ["plain decoding (estimated)", "with TLT"]
    assert [values(directory, metric)[-1] for metric in saved.metrics] == [84.0, 48.0]
    replays = figure(directory, "Measured against plain decoding").bars
    assert [bar.title for bar in replays] == ["step 1: plain 7.0 s, TLT 4.0 s, the same tokens"] * 2
    assert [bar.parts for bar in replays] == [(7.0, 0.0), (0.0, 4.0)]


def test_survival_is_the_share_still_running() -> None:
    assert survival([5, 5, 9, 20]) == ((0.0, 1.0), (5.0, 0.5), (9.0, 0.25), (20.0, 0.0))


def test_the_distribution_counts_every_answer_once(tmp_path: Path) -> None:
    said = [bar.title for bar in figure(whole_run(tmp_path), "Length distribution").bars]
    counts = [int(re.search(r": (\d+) of 500 completions", one).group(1)) for one in said]  # type: ignore[union-attr]
    assert sum(counts) == 500  # the last five steps, 100 completions each


# ---- words


def test_the_paragraph_says_what_happened(tmp_path: Path) -> None:
    said = in_words(summarise(read_run(whole_run(tmp_path))))
    first = sum(step(number).mean_reward for number in range(1, 6)) / 5
    last = sum(step(number).mean_reward for number in range(8, 13)) / 5
    assert f"rose from {first:.3f} over the first 5 steps to {last:.3f} over the last" in said
    assert "took 12 steps" in said
    assert "1 min 24 s, of which 57% was rollout" in said
    ratios = f"rollout 1.75 ×, whole step {WHOLE:.2f} ×"
    assert f"7.0 s instead of 4.0 s ({ratios}, measured), identical token for token" in said


WHOLE = (7.0 - 0.5 - 4.0 + 7.0) / 7.0  # of a step of 7 s: half a second of drafter training is not in the plain one


def test_the_last_lines(tmp_path: Path) -> None:
    lines = last_lines(summarise(read_run(whole_run(tmp_path))), "runs/x/report.html")
    assert lines[2:] == [
        "Rollout time with TLT: 4.0 s for 1,000 tokens (1 rollout written twice).",
        "Plain decoding took: 7.0 s for the same tokens, same seeds.",
        f"Against plain training: rollout 1.75 ×, whole step {WHOLE:.2f} × as fast, with all work for the drafter.",
        "Tokens identical: yes.",
        "Report: runs/x/report.html",
    ]


COUNTED = {"compared": 970, "differing": 2, "at_once": 64, "sample_at_once": 16, "sample_compared": 900}


@pytest.mark.parametrize(
    ("counted", "console", "tile"),
    [
        ({**COUNTED, "sample_differing": 2}, "this is rounding", "2.1 in 1,000 tokens differ by rounding"),
        ({**COUNTED, "sample_differing": 2, "exact": True}, "Tokens identical: NO", "OTHER TOKENS"),
        ({}, "Tokens identical: no; how many differ is not on record", "not all tokens the same"),
    ],
)
def test_other_tokens_are_never_passed_over(tmp_path: Path, counted: dict[str, int], console: str, tile: str) -> None:
    replay = ReplayCompared(1, 1000, tlt_s=1.0, plain_s=2.0, identical=False, **counted)  # type: ignore[arg-type]
    run = read_run(write_run(config_of(tmp_path), [*events_of_steps(0, 2), replay]))
    lines = last_lines(summarise(run), "")
    assert any(console in line for line in lines)
    assert any("2.0 s for the same requests, same seeds" in line for line in lines)
    assert console in in_words(summarise(run))
    assert tile in page(run)
    shown = figure(tmp_path / "shown", "Measured against plain decoding")
    assert f"0 of 1 identical token for token, {tile}" in shown.words
    assert any(tile in bar.title for bar in shown.bars)


def test_whole_steps_are_compared_with_everything_that_speculation_needs(tmp_path: Path) -> None:
    """Training that no replayed step happens to hold is charged to them all the same."""
    planned = CheckpointsPlanned("", 60, 40, 1, 1, 100, 1000, drafter_bytes=25)
    quiet = {"drafting_s": 0.0, "checkpoint_s": 0.0, "rollout_s": 4.0, "step_s": 10.0}
    first = step(1, **{**quiet, "drafting_s": 4.0, "checkpoint_s": 4.0, "step_s": 18.0})
    events = [
        *(planned, DrafterSwapped(1, 1, seconds=1.0), first),
        *(ReplayCompared(2, 9, tlt_s=4.0, plain_s=8.0, identical=True), step(2, **quiet)),
        step(3, **quiet),
        *(ReplayCompared(4, 9, tlt_s=4.0, plain_s=6.0, identical=True), step(4, **quiet)),
    ]
    found = whole_steps(events)
    assert found.beside_s == 4.0 + 1.0 + 0.25 * 4.0
    ratios = [14.0 / (10.0 + 6.0 / 2), (14.0 + 12.0) / (20.0 + 2 * 6.0 / 4)]
    assert found.curve == tuple(zip((2, 4), map(pytest.approx, ratios), strict=True))
    assert found.measured == pytest.approx(ratios[-1])
    assert whole_steps([first]).measured is None
    run = read_run(write_run(config_of(tmp_path, "--spec.drafter=suffix"), events))
    both = f"rollout 1.75 ×, whole step {ratios[-1]:.2f} ×"
    assert any(both in line for line in last_lines(summarise(run), ""))
    assert both in in_words(summarise(run))
    drawn = figure(tmp_path / "shown", "Whole steps against plain training")
    assert [values(tmp_path / "shown", metric)[-1] for metric in drawn.metrics] == pytest.approx([ratios[-1], 1.75])
    assert "whole-step speed-up" in page(run)


def test_a_forecast_is_told_in_the_report(tmp_path: Path) -> None:
    told = TrainingForecast(1, pays=False, gain=-0.001, steps_left=40)
    run = read_run(write_run(config_of(tmp_path), [told, *events_of_steps(0, 2)]))
    assert "No drafter training: expected -0.1% over the 40 steps left at step 1." in in_words(summarise(run))


def test_accept_lengths_are_pooled_over_verifies(tmp_path: Path) -> None:
    """A step that hardly drafted says little."""
    pairs = [(2.0, 1), (4.0, 3), (3.0, 300), (9.0, 100)]
    steps = [
        step(number, accept_length=length, verifies=count) for number, (length, count) in enumerate(pairs, start=1)
    ]
    found = summarise(read_run(write_run(config_of(tmp_path), [*steps]))).accept_length
    assert (found.first, found.last) == (pytest.approx(3.5), pytest.approx(4.5))


def test_what_the_drafter_learned_is_told(tmp_path: Path) -> None:
    def trained(number: int, before: float, after: float) -> DrafterTrained:
        return DrafterTrained(number, number, 9, 900, 1.0, 0.5, 0.1, "cold", before, after)

    events = [trained(1, 1.03, 1.5), step(1), trained(2, 1.4, 2.25), step(2)]
    summary = summarise(read_run(write_run(config_of(tmp_path, "--draft.unroll=3"), events)))
    assert any("3 tokens ahead: 1.03" in line and "2.25 at the end" in line for line in last_lines(summary, ""))
    assert "1.03 were to be expected before" in in_words(summary)


def test_steps_that_drafted_nothing_do_not_count_as_accepting_nothing(tmp_path: Path) -> None:
    accepts = [1.0, 2.0, 1.0, 3.0, 1.0]
    steps = [step(number, accept_length=accept) for number, accept in enumerate(accepts, start=1)]
    run = read_run(write_run(config_of(tmp_path), list(steps)))
    assert (summarise(run).accept_length.first, summarise(run).accept_length.last) == (2.0, 3.0)
    shown = next(one for one in figures_of(run) if one.title == "Accept length")
    assert shown.metrics == ["rollout/accept_length"]
    assert columns_of(run).values["rollout/accept_length"] == [None, 2.0, None, 3.0, None]
    assert "3 of 5 steps drafted nothing" in shown.words


def test_without_replays_the_saving_is_an_estimate(tmp_path: Path) -> None:
    run = read_run(write_run(config_of(tmp_path), events_of_steps(0, 4)))
    assert "saved 12.0 s of rollout (rollout 1.75 ×, whole step 1.36 ×" in in_words(summarise(run))
    slower = [step(number, saved_s=-1.0) for number in range(1, 5)]
    run = read_run(write_run(config_of(tmp_path), list(slower)))
    assert "cost 4.0 s of rollout (rollout 0.75 ×, whole step 0.79 ×" in in_words(summarise(run))


SPECULATES = ("--spec.drafter=suffix", "--spec.chooser=tuner")


def titles_and_words(directory: Path, events: Sequence[Event], *flags: str) -> tuple[list[str], str, str]:
    """Of a run: the titles of its figures, its paragraph, and its last lines as one text."""
    run = read_run(write_run(config_of(directory, *flags), list(events)))
    summary = summarise(run)
    return [one.title for one in figures_of(run)], in_words(summary), "\n".join(last_lines(summary, ""))


def test_plain_decoding_is_called_that(tmp_path: Path) -> None:
    plain = [step(number, accept_length=1.0, saved_s=0.0) for number in range(1, 4)]
    off, words, last = titles_and_words(tmp_path / "off", plain)
    assert not {"Accept length", "Shapes", "Time saved"} & set(off)
    assert "Speculation was off: rollouts were decoded plainly." in words
    assert "Speculation was off" in last
    unused = [*plain, ShapesChosen(1, ((8, "off", 30), (16, "off", 2)))]
    kept_off, words, last = titles_and_words(tmp_path / "unused", unused, *SPECULATES)
    assert kept_off == off  # a chart of passes that are all off shows nothing
    assert "Nothing was drafted: no draft was expected to pay" in words
    assert "Nothing was drafted: no draft was expected to pay" in last


def test_drafts_that_nobody_accepted_were_drafted(tmp_path: Path) -> None:
    """Their accept length is that of plain decoding, 1."""
    refused = [step(number, accept_length=1.0, saved_s=-0.5, verifies=40) for number in range(1, 3)]
    events = [*refused, ShapesChosen(1, ((8, "suffix 3x1/4", 30), (8, "off", 12)))]
    shown, words, last = titles_and_words(tmp_path, events, *SPECULATES)
    assert {"Accept length", "Shapes", "Time saved"} <= set(shown)
    assert "Drafts were verified, and next to none of their tokens were accepted." in words
    assert "speculation cost 1.0 s of rollout" in words
    assert "Accept length: 1.00 tokens per verify in the first step with drafts, 1.00 in the last." in last
    assert "Nothing was drafted" not in words + last


def test_what_did_not_change_is_not_said_to_go_from_here_to_there(tmp_path: Path) -> None:
    same = [step(number, mean_reward=0.3252, length_mean=20.2, accept_length=2.5) for number in range(1, 5)]
    almost = [replace(one, mean_reward=one.mean_reward - 1e-5 * one.step) for one in same]
    for name, steps in (("same", same), ("almost", almost)):
        _, words, _ = titles_and_words(tmp_path / name, steps)
        assert "Mean reward was 0.325 over the first 2 steps and over the last, while" in words
        assert "while completions stayed at 20 tokens on average." in words
        assert "A verify gave 2.50 tokens on average, the policy's own included." in words


def test_one_step_is_not_compared_with_itself(tmp_path: Path) -> None:
    text = page(read_run(write_run(config_of(tmp_path / "page", "--run.steps=1"), [step(1)])))
    assert "0.100<small>of one step</small>" in text
    assert "1 of 1 step<" in text
    _, words, last = titles_and_words(tmp_path, [step(1)])
    assert "Mean reward was 0.100, with completions of 50 tokens on average. It took 7.0 s" in words
    assert "Mean reward: 0.100 in the only step." in last
    assert "Accept length: 1.50 tokens per verify in the only step with drafts." in last


def test_a_chooser_without_costs_estimates_nothing(tmp_path: Path) -> None:
    steps = [step(number, saved_s=0.0) for number in range(1, 4)]
    shown, words, last = titles_and_words(tmp_path, steps, "--spec.drafter=suffix", "--spec.chooser=fixed")
    assert "Time saved" not in shown
    assert "cost table" not in words + last
    assert "rollout speed-up" not in page(read_run(tmp_path / "shown"))


def test_a_replay_of_plain_decoding_is_no_speed_up(tmp_path: Path) -> None:
    plain = [step(number, accept_length=1.0, saved_s=0.0) for number in range(1, 3)]
    replay = ReplayCompared(1, 1000, tlt_s=4.0, plain_s=3.9, identical=True)
    _, words, last = titles_and_words(tmp_path, [*plain, replay])
    assert "× as fast" not in words + last
    assert "Rollout time: 4.0 s for 1,000 tokens (1 rollout written twice), 3.9 s for the same tokens" in last


def test_answers_that_all_run_into_the_limit_have_no_tail(tmp_path: Path) -> None:
    events = [replace(rollout(1), lengths=(9, 64, 64)), step(1, truncated=1.0)]
    directory = write_run(config_of(tmp_path), events)
    assert figure(directory, "Completion lengths").words.endswith("All of them ran into the limit.")
    words = figure(directory, "Still running").words
    assert words == "Half of the completions or more are as long as the longest: 64 tokens."


def test_a_drafter_that_came_too_late_has_no_triangle(tmp_path: Path) -> None:
    directory = write_run(config_of(tmp_path), [*events_of_steps(0, 2), DrafterSwapped(2, 1)])
    assert "triangle" not in figure(directory, "Accept length").words


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0.00 s"),
        (0.456, "0.46 s"),
        (8.31, "8.3 s"),
        (59.97, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (12000, "3 h 20 min"),
        (-2.5, "−2.5 s"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


# ---- the page


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    text = write_report(read_run(whole_run(tmp_path)), tmp_path).read_text()
    named = text.replace('"http://www.w3.org/2000/svg"', "")  # a name, which nobody fetches
    assert re.findall(r"https?:|//\w|<link|<img|@import|url\(|\bsrc=|\bhref=|\bfetch\(|^import ", named, re.M) == []
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert policy[1].startswith("default-src 'none';"), "nothing may be fetched"
    script = text.split('<script type="module">')[1].split("</script>")[0]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy[1], "it would not run"
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_what_users_wrote_is_text_not_markup(tmp_path: Path) -> None:
    text = page(read_run(whole_run(tmp_path)))
    assert "a processor &lt;x&gt;" in text
    assert "<x>" not in text
    config = config_of(tmp_path, "--task.name=files", "--task.path=<u>.jsonl")
    assert "<u>" not in page(read_run(write_run(config, events_of_steps(0, 1))))


def test_the_page_holds_the_configuration_and_the_machine(tmp_path: Path) -> None:
    text = page(read_run(whole_run(tmp_path)))
    assert "a processor" in text
    assert "abc123" in text
    assert "<code>run.name</code></th><td><code>&#x27;shown&#x27;</code>" in text
    assert "temperature = 1.0" in text
    assert "<code>sampling.temperature</code>" not in text  # as it is by default


@pytest.mark.parametrize("steps", [0, 1, 2, 500])
def test_runs_of_any_length_can_be_told(tmp_path: Path, steps: int) -> None:
    directory = write_run(config_of(tmp_path, f"--run.steps={max(1, steps)}"), events_of_steps(0, steps))
    text = page(read_run(directory))
    data = re.search(r'id="run-data">(.*?)</script>', text, re.S)
    assert data
    assert json.loads(data[1])["steps"] == list(range(1, steps + 1))
    assert "NaN" not in data[1]
    assert ("nothing to draw yet" in text) == (steps == 0)


# ---- the verb


def test_a_crashed_run_can_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(config_of(tmp_path), events_of_steps(0, 3))
    with (directory / EVENTS_FILE).open("a") as file:
        file.write('{"time": 1.0, "kind": "StepFin')  # torn
    assert main(["report", str(directory)]) == 0
    assert capsys.readouterr().out == f"{directory / 'report.html'}\n"
    assert "has taken 3 of 12 steps; its end is not on record" in (directory / "report.html").read_text()


def test_a_resumed_run_is_told_as_one(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    write_run(config, [*events_of_steps(0, 5), RunFailed("KeyboardInterrupt", "")])
    run = read_run(write_run(config, [RunResumed(3, "there"), step(4, mean_reward=0.7777)]))
    columns = columns_of(run)
    assert columns.steps == [1, 2, 3, 4]
    assert columns.values["reward/mean"][3] == 0.7777
    assert "It was resumed once." in in_words(summarise(run))


def test_mistakes_with_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "holds no events.jsonl" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--run.seed", "1"]) == 2
    assert "takes no settings, found --run.seed" in capsys.readouterr().err


# ---- what the policy learns from


def test_signals_of_learning_are_drawn(tmp_path: Path) -> None:
    known = {"no_signal": 0.25, "truncated": 0.125, "groups": 10, "groups_learned": 6}
    events: list[Event] = [step(number, **known) for number in range(1, 4)]
    drawn = {figure.title: figure for figure in figures_of(read_run(write_run(config_of(tmp_path), events)))}
    assert drawn["Signal"].metrics == ["reward/no_signal", "length/truncated"]
    assert drawn["Prompts"].words.endswith("of 30 prompts asked, 18 had a signal and were learned from.")
    assert drawn["Engine against trainer"].metrics == ["policy/mismatch_mean"]
    assert not {name for name in drawn if "/" in name} & {"rollout/groups", "reward/no_signal", "policy/mismatch_mean"}


def test_what_was_not_counted_is_not_drawn(tmp_path: Path) -> None:
    assert not {"Signal", "Prompts"} & {figure.title for figure in figures_of(read_run(whole_run(tmp_path)))}
    all_learned: list[Event] = [step(1, groups=6, groups_learned=6)]
    drawn = {figure.title for figure in figures_of(read_run(write_run(config_of(tmp_path / "all"), all_learned)))}
    assert {"Signal", "Prompts"} & drawn == {"Signal"}
