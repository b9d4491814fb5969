"""The report's figures: what each shows of a run, under which heading, and in which words.

Pure: a run in, figures out. Every number drawn stands in an event, or is the mean or sum of such numbers that the
figure's own words name. Steps are numbered from 1 here, as on the console.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle

from tlt.watch.events import (
    DrafterSwapped,
    Evaluated,
    ReplayCompared,
    RewardsJudged,
    RolloutFinished,
    Run,
    ShapesChosen,
    StepFinished,
)
from tlt.watch.history import counted, drafted, events_of, steps_of
from tlt.watch.lanes import Lane, LaneSpan, lane_chart
from tlt.watch.plot import Axis, Bar, Column, Line, Mark, bar_chart, line_chart
from tlt.watch.summary import PHASES, duration, evaluation_in_words, is_estimated, phase_seconds, when_evaluated
from tlt.watch.verdict import Replayed, WholeSteps, both_ratios, in_short, whole_steps
from tlt.watch.workers import WorkerSpans

_SMOOTH = 5  # steps in a running mean
_SMOOTH_FROM = 20  # steps of a run from which on running means are drawn
_MOST_BARS = 100  # bars in one figure: more steps share a bar
_LEAST_SHARE = 0.002  # of all time: a phase that took less cannot be seen
_BINS = 30  # bars of a histogram
_MOST_NAMES = 16  # named places on an axis
_LEAST_PAIRS = 4  # pairs of bars that the axis has room for, however few there are
_MOST_METRICS = 8  # that rewards tell, with a figure each
_MOST_LANES = 24  # workers in one figure
_OFF, _OTHERS = "off", "others"
_SHAPE_COLOURS = ("c1", "c3", "c4", "c2")  # of the shapes most used
_DEPTH_COLOURS = {1: "c1", 2: "c3", 4: "c4", 8: "c2"}  # depths that are drawn
_DOING = {"rolling": "c1", "drafting": "c4", "updating": "c3", "publishing": "c2", "idle": "c6"}
_PHASE_COLOURS = {"rollout": "c1", "reward": "c2", "update": "c3", "drafting": "c4", "checkpoint": "c5", "other": "c6"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a legend."""

    label: str
    colour: str
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    words: str  # what is seen, in a sentence
    legend: tuple[Entry, ...]
    svg: str


def figures_of(run: Run) -> list[Figure]:
    """Those that the run has numbers for."""
    steps = steps_of(run)
    if not steps:
        return []
    rollouts = [rollout for rollout in events_of(run, RolloutFinished) if rollout.lengths]
    evaluations = events_of(run, Evaluated)
    drawn = [
        _reward(steps),
        *_told_by_rewards(events_of(run, RewardsJudged)),
        *([_evaluations(evaluations)] if evaluations else []),
        _time(steps),
        _lengths(steps),
    ]
    drawn += [_distribution(rollouts), _still_running(rollouts)] if rollouts else []
    if any(map(drafted, steps)):
        drawn.append(_accept_length(steps, events_of(run, DrafterSwapped)))
        drawn += [_saved(steps)] if is_estimated(run.config) else []
    if replays := events_of(run, ReplayCompared):
        drawn.append(_replays(replays))
        whole = whole_steps(record.event for record in counted(run.events))
        drawn += [_whole(whole, replays)] if whole.curve and run.config.spec.drafter != "none" else []
    if chosen := events_of(run, ShapesChosen):
        used = any(shape != _OFF for one in chosen for _, shape, _ in one.ticks)
        drawn += [_shapes(chosen)] if used else []
        names = sorted({name for one in chosen for name, _ in one.by_depth})
        drawn += [_by_depth(name, chosen) for name in names]
    if spans := events_of(run, WorkerSpans):
        drawn.append(_workers(spans))
    return drawn


# ---- by step


def _reward(steps: Sequence[StepFinished]) -> Figure:
    values = [step.mean_reward for step in steps]
    lines = _with_running_mean("mean reward", steps, values, "c1")
    svg = line_chart(
        lines,
        _step_axis(),
        Axis("mean reward", (0.0,) if min(values) >= 0 else ()),
        columns=_columns(steps, lambda step: f"mean reward {step.mean_reward:.4g}, spread {step.reward_std:.3g}"),
    )
    return Figure("Reward", "Mean over all answers of a step.", _entries(lines), svg)


def _told_by_rewards(told: Sequence[RewardsJudged]) -> Iterator[Figure]:
    """One figure for several rewards, and one for each metric: they may have any scale."""
    parts = list(dict.fromkeys(name for one in told for name in one.parts))
    if parts:
        lines = [
            Line(name, [(one.step, one.parts[name]) for one in told if name in one.parts], colour)
            for name, colour in zip(parts, cycle(_SHAPE_COLOURS), strict=False)
        ]
        columns = [
            Column(one.step, f"step {one.step}: " + ", ".join(f"{name} {mean:.3g}" for name, mean in one.parts.items()))
            for one in told
        ]
        svg = line_chart(lines, _step_axis(), Axis("mean"), columns=columns)
        yield Figure(
            "Rewards, each",
            "Mean of each reward over all answers of a step, before it is weighted.",
            _entries(lines),
            svg,
        )
    for name in list(dict.fromkeys(name for one in told for name in one.metrics))[:_MOST_METRICS]:
        points = [(one.step, one.metrics[name]) for one in told if name in one.metrics]
        columns = [Column(step, f"step {step}: {value:.4g}") for step, value in points]
        svg = line_chart([Line(name, points, "c1")], _step_axis(), Axis(name), columns=columns)
        yield Figure(f"Told by rewards: {name}", "Mean over the answers of a step.", (), svg)


def _evaluations(told: Sequence[Evaluated]) -> Figure:
    by_name: dict[str, list[Evaluated]] = {}
    for one in {(one.name, one.step): one for one in told}.values():
        by_name.setdefault(one.name, []).append(one)
    lines = [
        Line(name, [(one.step, one.mean_reward) for one in each], colour)
        for (name, each), colour in zip(by_name.items(), cycle(_SHAPE_COLOURS), strict=False)
    ]
    steps = sorted({one.step for one in told})
    columns = [
        Column(step, f"after step {step}: " + ", ".join(evaluation_in_words(one) for one in told if one.step == step))
        for step in steps
    ]
    lowest = min(one.mean_reward for one in told)
    y = Axis("mean reward", (0.0,) if lowest >= 0 else ())
    svg = line_chart(lines, _step_axis(), y, columns=columns)
    best = [one for one in told if one.best]
    words = "Mean reward on prompts that are not trained on."
    if best:
        words += f" The best policy is that {when_evaluated(best[-1])}."
    return Figure("Evaluation", words, _entries(lines), svg)


def _accept_length(steps: Sequence[StepFinished], swaps: Sequence[DrafterSwapped]) -> Figure:
    some = [step for step in steps if drafted(step)]
    last = steps[-1].step
    # handed to the engine at the end of a step: it drafts in the next one
    marks = [Mark(swap.step + 1, f"drafter {swap.version} from step {swap.step + 1} on") for swap in swaps]
    marks = [mark for mark in marks if mark.x <= last]
    lines = _with_running_mean("accept length", some, [step.accept_length for step in some], "c4")
    svg = line_chart(
        lines,
        Axis("step", (1.0, float(last)), whole=True),
        Axis("tokens per verify", (1.0,)),
        columns=_columns(some, lambda step: f"accept length {step.accept_length:.3f}"),
        marks=marks,
        rule=1.0,
    )
    words = "Tokens gained from one pass of the policy, its own included. 1 is plain decoding."
    if len(some) < len(steps):
        words += f" {len(steps) - len(some)} of {len(steps)} steps drafted nothing: no draft was expected to pay."
    if marks:
        words += " A triangle is a new version of the drafter."
    return Figure("Accept length", words, _entries(lines), svg)


def _lengths(steps: Sequence[StepFinished]) -> Figure:
    wanted = (("longest", "length_max", "c2"), ("90th percentile", "length_p90", "c4"), ("median", "length_p50", "c1"))
    lines = [
        Line(label, [(step.step, float(getattr(step, name))) for step in steps], colour)
        for label, name, colour in wanted
    ]

    def say(step: StepFinished) -> str:
        cut = f", {step.truncated:.1%} cut off" if step.truncated else ""
        return f"median {step.length_p50}, p90 {step.length_p90}, longest {step.length_max} tokens{cut}"

    svg = line_chart(lines, _step_axis(), Axis("tokens", (0.0,), whole=True), columns=_columns(steps, say))
    cut = sum(step.truncated for step in steps) / len(steps)
    words = "Tokens of an answer: half of the answers are no longer than the median."
    if cut == 1:
        words += " All of them ran into the limit."
    elif cut > 0:
        share = f"{cut:.1%}" if cut >= 0.001 else "less than 0.1%"
        words += f" On average {share} of a step's answers ran into the limit."
    return Figure("Answer lengths", words, _entries(lines), svg)


def _with_running_mean(label: str, steps: Sequence[StepFinished], values: Sequence[float], colour: str) -> list[Line]:
    numbers = [step.step for step in steps]
    raw = Line(label, list(zip(numbers, values, strict=True)), colour, faint=len(steps) >= _SMOOTH_FROM)
    if not raw.faint:
        return [raw]
    means = [sum(part) / len(part) for part in (values[max(0, i - _SMOOTH + 1) : i + 1] for i in range(len(values)))]
    return [raw, Line(f"mean of the last {_SMOOTH}", list(zip(numbers, means, strict=True)), colour)]


# ---- time


def _time(steps: Sequence[StepFinished]) -> Figure:
    each = [phase_seconds(step) for step in steps]
    whole = sum(step.step_s for step in steps)
    phases = [phase for phase in (*PHASES, "other") if sum(parts[phase] for parts in each) > _LEAST_SHARE * whole]
    share = -(-len(steps) // _MOST_BARS)  # steps that share a bar
    unit, name = _time_unit(max(step.step_s for step in steps))
    bars = []
    for start in range(0, len(steps), share):
        some, parts = steps[start : start + share], each[start : start + share]
        means = {phase: sum(part[phase] for part in parts) / len(parts) for phase in phases}
        title = f"step {some[0].step}" + (f" to {some[-1].step}, mean" if len(some) > 1 else "")
        said = "\n".join(f"{phase} {duration(seconds)}" for phase, seconds in means.items() if seconds)
        mean = sum(step.step_s for step in some) / len(some)
        values = [means[phase] / unit for phase in phases]
        bars.append(Bar(some[0].step - 0.5, float(len(some)), values, f"{title}: {duration(mean)}\n{said}"))
    colours = [_PHASE_COLOURS[phase] for phase in phases]
    svg = bar_chart(bars, colours, _step_axis(), Axis(f"{name} per step", (0.0,)))
    words = "Where the time of a step went." + (f" A bar is the mean of {share} steps." if share > 1 else "")
    return Figure("Time per phase", words, tuple(map(Entry, phases, colours)), svg)


def _saved(steps: Sequence[StepFinished]) -> Figure:
    spent = list(accumulate(step.rollout_s for step in steps))
    plain = list(accumulate(step.rollout_s + step.saved_s for step in steps))
    unit, name = _time_unit(max(spent[-1], plain[-1]))
    numbers = [step.step for step in steps]

    def line(label: str, seconds: Sequence[float], colour: str) -> Line:
        return Line(label, [(n, s / unit) for n, s in zip(numbers, seconds, strict=True)], colour)

    lines = [line("plain decoding (estimated)", plain, "c5"), line("with TLT", spent, "c3")]
    columns = [
        Column(n, f"up to step {n}: {duration(a)} with TLT, {duration(b)} plain (estimated)")
        for n, a, b in zip(numbers, spent, plain, strict=True)
    ]
    y = Axis(f"{name} of rollout, added up", (0.0,))
    svg = line_chart(lines, _step_axis(), y, columns=columns, between=(0, 1))
    words = "Plain decoding is reckoned from the costs of plain passes that the engine measured during this run."
    return Figure("Time saved", words, _entries(lines), svg)


def _replays(replays: Sequence[ReplayCompared]) -> Figure:
    unit, name = _time_unit(max(max(replay.plain_s, replay.tlt_s) for replay in replays))
    bars = []
    for index, replay in enumerate(replays):
        times = f"plain {duration(replay.plain_s)}, TLT {duration(replay.tlt_s)}"
        said = f"step {replay.step}: {times}, {in_short(Replayed.of([replay]))}"
        bars.append(Bar(index - 0.36, 0.36, (replay.plain_s / unit, 0.0), said))
        bars.append(Bar(index, 0.36, (0.0, replay.tlt_s / unit), said))
    stride = -(-len(replays) // _MOST_NAMES)
    names = tuple((float(index), str(replays[index].step)) for index in range(0, len(replays), stride))
    x = Axis("step", (-0.5, max(len(replays), _LEAST_PAIRS) - 0.5), names=names)
    svg = bar_chart(bars, ("c5", "c3"), x, Axis(name, (0.0,)))
    words = "Same requests, same seeds, written both ways"
    whole = Replayed.of(replays)
    if whole.identical:
        words += ": all tokens identical."
    else:
        same = sum(replay.identical for replay in replays)
        words += f"; {same} of {len(replays)} identical token for token, {in_short(whole)}."
    return Figure("Measured against plain decoding", words, (Entry("plain", "c5"), Entry("with TLT", "c3")), svg)


def _whole(whole: WholeSteps, replays: Sequence[ReplayCompared]) -> Figure:
    """Both ratios, each over the replayed steps so far."""
    told = {replay.step: Replayed.of(replays[: index + 1]).speedup for index, replay in enumerate(replays)}
    rollouts = [(step, told[step]) for step, _ in whole.curve if step in told]
    lines = [
        Line("whole step", [(float(step), ratio) for step, ratio in whole.curve], "c3"),
        Line("rollout alone", [(float(step), ratio) for step, ratio in rollouts], "c5"),
    ]
    columns = [
        Column(step, f"up to step {step}: {both_ratios(told.get(step, 1.0), ratio)}") for step, ratio in whole.curve
    ]
    y = Axis("times as fast as plain", (1.0,))
    svg = line_chart(lines, _step_axis(), y, columns=columns, rule=1.0)
    words = "Of the steps replayed so far. A whole step has everything in it, training and saving the drafter included."
    return Figure("Whole steps against plain training", words, _entries(lines), svg)


def _shapes(chosen: Sequence[ShapesChosen]) -> Figure:
    """Shares of the ticks of all steps, by number of requests; of many shapes the most used, and the rest together."""
    ticks: dict[int, Counter[str]] = {}
    for one in chosen:
        for requests, shape, count in one.ticks:
            ticks.setdefault(requests, Counter())[shape] += count
    used = sum(ticks.values(), Counter[str]())
    first = [shape for shape, _ in used.most_common() if shape != _OFF][: len(_SHAPE_COLOURS)]
    colours = dict(zip([*first, _OTHERS, _OFF], [*_SHAPE_COLOURS[: len(first)], "c5", "c6"], strict=True))
    names = {shape: shape if shape in colours else _OTHERS for shape in used}
    bars = []
    for place, requests in enumerate(sorted(ticks)):
        here = ticks[requests]
        whole = here.total()
        parts = [sum(here[shape] for shape in here if names[shape] == name) / whole for name in colours]
        said = "\n".join(f"{shape} {count / whole:.1%}" for shape, count in here.most_common(8))
        bars.append(Bar(place - 0.4, 0.8, parts, f"{_requests(requests)}, {whole} passes\n{said}"))
    sizes = tuple((float(place), str(requests)) for place, requests in enumerate(sorted(ticks)))
    x = Axis("requests being written, up to", (-0.5, max(len(ticks), _LEAST_PAIRS) - 0.5), names=sizes)
    svg = bar_chart(bars, list(colours.values()), x, Axis("share of passes", (0.0, 1.0), percent=True))
    words = "How each pass speculated, by how many requests it served: drafters, depth x width / nodes verified."
    entries = tuple(Entry(name, colour) for name, colour in colours.items() if name in names.values())
    return Figure("Shapes", words, entries, svg)


def _by_depth(drafter: str, chosen: Sequence[ShapesChosen]) -> Figure:
    """Over the steps, at a few depths; hovering names them all."""
    told = [(one.step, shares) for one in chosen for name, shares in one.by_depth if name == drafter]
    deepest = max(len(shares) for _, shares in told)
    lines = [
        Line(f"depth {depth}", [(step, shares[depth - 1]) for step, shares in told if depth <= len(shares)], colour)
        for depth, colour in _DEPTH_COLOURS.items()
        if depth <= deepest
    ]
    columns = [
        Column(step, f"step {step}: " + ", ".join(f"{share:.1%}" for share in shares) + " at depth 1, 2, …")
        for step, shares in told
    ]
    svg = line_chart(lines, _step_axis(), Axis("accepted", (0.0, 1.0), percent=True), columns=columns)
    switches, one_off_s = sum(one.switches for one in chosen), sum(one.one_off_s for one in chosen)
    words = (
        f"Share of {drafter}'s tokens that the policy accepted, of drafts it had followed so far, as the tuner knew it "
        f"after each step. In the whole run shapes changed {switches:,} times, and drafters catching up and graphs "
        f"captured for them took {duration(one_off_s)}."
    )
    return Figure(f"Acceptance by depth: {drafter}", words, _entries(lines), svg)


def _requests(most: int) -> str:
    return "1 request" if most == 1 else f"up to {most} requests"


def _workers(told: Sequence[WorkerSpans]) -> Figure:
    """Of the last step that anybody told of; of many workers a few, evenly chosen."""
    step = max(spans.step for spans in told)
    by_worker: dict[int, list[tuple[str, float, float]]] = {}
    for spans in told:
        if spans.step == step:
            by_worker.setdefault(spans.worker, []).extend(spans.spans)
    every = [span for spans in by_worker.values() for span in spans]
    begun, ended = min(start for _, start, _ in every), max(start + seconds for _, start, seconds in every)
    unit, name = _time_unit(ended - begun)

    def shown(worker: int, span: tuple[str, float, float]) -> LaneSpan:
        what, start, seconds = span
        title = f"worker {worker}: {what} {duration(seconds)}"
        return LaneSpan((start - begun) / unit, seconds / unit, _DOING.get(what, "c5"), title)

    chosen = sorted(by_worker)[:: -(-len(by_worker) // _MOST_LANES)]
    lanes = [Lane(str(worker), [shown(worker, span) for span in by_worker[worker]]) for worker in chosen]
    idle = sum(seconds for what, _, seconds in every if what == "idle") / sum(seconds for _, _, seconds in every)
    part = f" ({len(lanes)} of {len(by_worker)})" if len(lanes) < len(by_worker) else ""
    words = f"What each worker{part} did in step {step}: {idle:.1%} of their time idle."
    entries = tuple(Entry(what, colour) for what, colour in _DOING.items() if any(what == span[0] for span in every))
    return Figure("Workers", words, entries, lane_chart(lanes, Axis(f"{name} since the step began")))


# ---- lengths


def _distribution(rollouts: Sequence[RolloutFinished]) -> Figure:
    last, which = _last(rollouts)
    longest = max(last)
    width = max(1, -(-longest // _BINS))
    counts = [0] * (longest // width + 1)
    for length in last:
        counts[length // width] += 1
    bars = [
        Bar(
            index * width,
            width,
            (count / len(last),),
            f"{index * width} to {(index + 1) * width - 1} tokens: {count} of {len(last)} answers",
        )
        for index, count in enumerate(counts)
    ]
    svg = bar_chart(bars, ("c1",), Axis("tokens", whole=True), Axis("share of answers", (0.0,), percent=True))
    return Figure("Length distribution", f"{len(last):,} answers of {which}.", (), svg)


def _still_running(rollouts: Sequence[RolloutFinished]) -> Figure:
    last, which = _last(rollouts)
    first = _pooled(rollouts[: min(_SMOOTH, len(rollouts))])
    wanted = [(which, last, "c1")]
    if len(rollouts) >= 2 * _SMOOTH:
        wanted.insert(0, (f"the first {_SMOOTH} steps", first, "c5"))
    lines = [Line(label, survival(lengths), colour, steps=True) for label, lengths, colour in wanted]
    longest = max(max(lengths) for _, lengths, _ in wanted)
    marks = sorted({round(longest * part / 60) for part in range(61)})
    columns = [
        Column(at, f"after {at} tokens: " + ", ".join(f"{_alive(ls, at):.1%} ({label})" for label, ls, _ in wanted))
        for at in marks
    ]
    svg = line_chart(
        lines, Axis("tokens", whole=True), Axis("still being written", (0.0, 1.0), percent=True), columns=columns
    )
    half, all_ = sorted(last)[len(last) // 2], max(last)
    if half < all_:
        words = f"The tail: half of the answers are done after {half} tokens, the last one after {all_}."
    else:
        words = f"Half of the answers or more are as long as the longest: {all_} tokens."
    return Figure("Still running", words, _entries(lines), svg)


def survival(lengths: Sequence[int]) -> list[tuple[float, float]]:
    """(tokens, share of the answers that are longer), a point wherever the share changes."""
    ordered, total = sorted(lengths), len(lengths)
    left = {length: total - rank for rank, length in enumerate(ordered, start=1)}
    return [(0.0, 1.0), *((float(length), count / total) for length, count in left.items())]


def _alive(lengths: Sequence[int], at: int) -> float:
    return sum(length > at for length in lengths) / len(lengths)


def _last(rollouts: Sequence[RolloutFinished]) -> tuple[list[int], str]:
    some = rollouts[-_SMOOTH:]
    if len(some) == 1:
        return _pooled(some), f"step {some[0].step}"
    return _pooled(some), f"the last {len(some)} steps"


def _pooled(rollouts: Sequence[RolloutFinished]) -> list[int]:
    return [length for rollout in rollouts for length in rollout.lengths]


# ---- small words


def _step_axis() -> Axis:
    return Axis("step", whole=True)


def _columns(steps: Sequence[StepFinished], say: Callable[[StepFinished], str]) -> list[Column]:
    return [Column(step.step, f"step {step.step}: {say(step)}") for step in steps]


def _entries(lines: Sequence[Line]) -> tuple[Entry, ...]:
    """None for a single line: the axis names it."""
    return tuple(Entry(line.label, line.colour, line.faint) for line in lines if len(lines) > 1)


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")
