"""The figures of a run: data, titles and captions.

Pure: a run in, figures out. Every number drawn is in an event, or is the mean or sum that the caption states. Most
figures name columns of `columns_of`; a metric that no figure names gets a figure of its own.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from tlt.watch.chart import STEPS, Axis, Bar, Figure, Lane, LaneSpan, Mark, Series, lines, points
from tlt.watch.events import DrafterSwapped, Evaluated, ReplayCompared, RolloutFinished, Run, ShapesChosen, StepFinished
from tlt.watch.history import drafted, events_of, steps_of
from tlt.watch.metrics import DRAFTER_STALENESS, PLAIN_SUM, REPLAY_RATIO, ROLLOUT_SUM, WHOLE_RATIO, Columns, columns_of
from tlt.watch.summary import PHASES, duration, evaluation_in_words, is_estimated, when_evaluated
from tlt.watch.verdict import Replayed, in_short
from tlt.watch.workers import WorkerSpans

POOLED = 5  # steps in the distribution of lengths
_LEAST_SHARE = 0.002  # of all time: a phase that took less cannot be seen
_BINS = 30  # bars of a histogram
_MOST_NAMES = 16  # named places on an axis
_LEAST_PAIRS = 4  # pairs of bars that the axis has room for, however few there are
_MOST_LANES = 24  # workers in one figure
_MOST_METRICS = 8  # that rewards tell, with a figure each
_OFF, _OTHERS = "off", "others"
_COLOURS = ("c1", "c3", "c4", "c2")  # of what has no colour of its own
_DOING = {
    "rolling": "c1",
    "drafting": "c4",
    "writing ahead": "c5",
    "updating": "c3",
    "publishing": "c2",
    "idle": "c6",
}
_PHASE_COLOURS = {"rollout": "c1", "reward": "c2", "update": "c3", "drafting": "c4", "checkpoint": "c5", "other": "c6"}
_GIB = 2.0**30
_UNDRAWN = {  # columns that other figures or numbers of the page tell
    *("length/mean", "rollout/tokens", "rollout/verifies", "rollout/saved_s", "policy/version", "reward/std"),
    *("rollout/groups", "rollout/groups_learned", "reward/no_signal", "policy/weight_mean"),
    *("length/truncated", "drafter/version", "drafter/seconds", "rollout/replay_speedup"),
}
Values = dict[str, list[float | None]]  # columns by their names
SPECULATION = "Speculation"
_TOPICS = {"policy": "Policy update", "drafter": SPECULATION, "rollout": SPECULATION, "memory": "Machine"}
_TOLD_GROUPS = ("acceptance", "account", "eval", "sum", "time", "rewards", "metrics")  # likewise, of columns


def figures_of(run: Run, known: Columns | None = None) -> list[Figure]:
    """The figures that the run has data for. `known`: its columns, if computed already."""
    steps = steps_of(run)
    if not steps:
        return []
    columns = (known or columns_of(run)).values
    drawn = {
        "Learning": _learning(run, steps, columns),
        "Time": _times(run, steps),
        "Completion lengths": _all_lengths(run, steps),
        SPECULATION: _speculation(run, steps, columns),
        "Policy update": _policy(columns),
        "Machine": _memory(columns),
    }
    for topic, figure in _others(columns, [figure for each in drawn.values() for figure in each]):
        drawn[topic].append(figure)
    return [replace(figure, topic=topic) for topic, each in drawn.items() for figure in each]


def _learning(run: Run, steps: Sequence[StepFinished], columns: Values) -> list[Figure]:
    evaluations = events_of(run, Evaluated)
    drawn = [_reward(steps), *_told_by_rewards(columns), *_signal(steps, columns)]
    return [*drawn, _evaluations(evaluations)] if evaluations else drawn


def _times(run: Run, steps: Sequence[StepFinished]) -> list[Figure]:
    spans = events_of(run, WorkerSpans)
    return [_time(steps), _speed(), *([_workers(spans)] if spans else [])]


def _all_lengths(run: Run, steps: Sequence[StepFinished]) -> list[Figure]:
    rollouts = [rollout for rollout in events_of(run, RolloutFinished) if rollout.lengths]
    return [_lengths(steps), *([_distribution(rollouts), _still_running(rollouts)] if rollouts else [])]


def _speculation(run: Run, steps: Sequence[StepFinished], columns: Values) -> list[Figure]:
    drawn = []
    if any(map(drafted, steps)):
        drawn.append(_accept_length(steps, events_of(run, DrafterSwapped)))
        drawn += [_saved()] if is_estimated(run.config) else []
    if any(columns.get("rollout/ahead_tokens", ())):
        words = "Where the tokens came from; the rest is one for each pass of the policy."
        series = lines(
            ("accepted drafts", "c4", "rollout/drafted_share"), ("written ahead", "c5", "rollout/ahead_share")
        )
        drawn.append(Figure("Sources of tokens", words, STEPS, Axis("share", (0.0, 1.0), percent=True), series))
    if replays := events_of(run, ReplayCompared):
        drawn.append(_replays(replays))
        speculates = run.config.spec.drafter != "none"
        drawn += [_whole()] if any(value is not None for value in columns[WHOLE_RATIO]) and speculates else []
    chosen = events_of(run, ShapesChosen)
    if any(shape != _OFF for one in chosen for _, shape, _ in one.ticks):
        drawn.append(shapes_figure(chosen))
    drawn += [_by_depth(name, chosen) for name in sorted({name for one in chosen for name, _ in one.by_depth})]
    if any(columns.get(DRAFTER_STALENESS, ())):
        words = "Updates of the policy since the rollouts that the drafter in use was trained on."
        series = lines(("drafter", "c4", DRAFTER_STALENESS))
        drawn.append(Figure("Drafter staleness", words, STEPS, Axis("updates", (0.0,)), series))
    return [*drawn, _account()] if "account/balance_s" in columns else drawn


# ---- by step


def _reward(steps: Sequence[StepFinished]) -> Figure:
    y = Axis("mean reward", (0.0,) if min(step.mean_reward for step in steps) >= 0 else ())
    series = lines(("mean reward", "c1", "reward/mean"))
    return Figure("Reward", "Mean over all completions of a step.", STEPS, y, series)


def _told_by_rewards(columns: Values) -> list[Figure]:
    """One figure for all rewards, and one for each metric, as scales differ."""
    parts = [name for name in columns if name.startswith("rewards/")]
    metrics = [name for name in columns if name.startswith("metrics/")]
    series = lines(*((_last_part(name), colour, name) for name, colour in zip(parts, cycle(_COLOURS), strict=False)))
    words = "Mean of each reward over all completions of a step, before it is weighted."
    drawn = [Figure("Rewards, each", words, STEPS, Axis("mean"), series)] if parts else []
    return drawn + [
        Figure(
            f"Told by rewards: {_last_part(name)}",
            "Mean over the completions of a step.",
            STEPS,
            Axis(_last_part(name)),
            lines((_last_part(name), "c1", name)),
        )
        for name in metrics[:_MOST_METRICS]
    ]


def _last_part(metric: str) -> str:
    return metric.partition("/")[2]


def _evaluations(told: Sequence[Evaluated]) -> Figure:
    by_name: dict[str, dict[int, Evaluated]] = {}
    for one in told:
        by_name.setdefault(one.name, {})[one.step] = one
    series = tuple(
        Series(
            name,
            _COLOURS[index % len(_COLOURS)],
            points=tuple((float(one.step), one.mean_reward) for one in each.values()),
        )
        for index, (name, each) in enumerate(by_name.items())
    )
    best = [one for one in told if one.best]
    words = "Mean reward on prompts that are not trained on. "
    words += "; ".join(evaluation_in_words(list(each.values())[-1]) for each in by_name.values()) + "."
    words += f" The best policy is that {when_evaluated(best[-1])}." if best else ""
    return Figure("Evaluation", words, STEPS, Axis("mean reward"), series)


def _accept_length(steps: Sequence[StepFinished], swaps: Sequence[DrafterSwapped]) -> Figure:
    some, last = [step for step in steps if drafted(step)], steps[-1].step
    # handed to the engine at the end of a step: it drafts in the next one
    marks = tuple(
        Mark(swap.step + 1, f"drafter {swap.version} from step {swap.step + 1} on")
        for swap in swaps
        if swap.step < last
    )
    words = "Tokens gained from one pass of the policy, its own included. 1 is plain decoding."
    if len(some) < len(steps):
        words += f" {len(steps) - len(some)} of {len(steps)} steps drafted nothing: no draft was expected to pay."
    words += " A triangle is a new version of the drafter." if marks else ""
    series = lines(("accept length", "c4", "rollout/accept_length"))
    return Figure("Accept length", words, STEPS, Axis("tokens per verify", (1.0,)), series, marks=marks, rule=1.0)


def _lengths(steps: Sequence[StepFinished]) -> Figure:
    series = lines(
        ("longest", "c2", "length/max"), ("90th percentile", "c4", "length/p90"), ("median", "c1", "length/p50")
    )
    cut = sum(step.truncated for step in steps) / len(steps)
    words = "Tokens of a completion: half of the completions are no longer than the median."
    if cut == 1:
        words += " All of them ran into the limit."
    elif cut > 0:
        share = f"{cut:.1%}" if cut >= 0.001 else "less than 0.1%"
        words += f" On average {share} of a step's completions ran into the limit."
    return Figure("Completion lengths", words, STEPS, Axis("tokens", (0.0,), whole=True), series)


def _speed() -> Figure:
    series = lines(("tokens per second", "c3", "rollout/tokens_per_s"))
    return Figure("Rollout speed", "Tokens of all completions per second of rollout.", STEPS, Axis("tokens/s"), series)


def _signal(steps: Sequence[StepFinished], columns: Values) -> list[Figure]:
    """Groups with a learning signal. Events of earlier versions do not count groups."""
    if not any(columns.get("rollout/groups", ())):
        return []
    shares = [("groups without a signal", "c1", "reward/no_signal"), ("completions cut off", "c2", "length/truncated")]
    words = "Groups whose completions all have the same reward teach nothing; completions are cut off at the limit."
    drawn = [Figure("Signal", words, STEPS, Axis("share", (0.0, 1.0), percent=True), lines(*shares))]
    asked, learned = (sum(getattr(step, name) for step in steps) for name in ("groups", "groups_learned"))
    if asked > learned:
        counts = [("asked", "c5", "rollout/groups"), ("learned from", "c1", "rollout/groups_learned")]
        words = f"Dynamic sampling: of {asked:,} prompts asked, {learned:,} had a signal and were learned from."
        drawn.append(Figure("Prompts", words, STEPS, Axis("prompts", (0.0,), whole=True), lines(*counts)))
    return drawn


def _policy(columns: Values) -> list[Figure]:
    """Numbers of the update that were measured."""
    wanted = [
        ("Entropy", "Of the policy over the completions' tokens.", "nats per token", "policy/entropy"),
        ("KL divergence", "To the reference policy.", "nats per token", "policy/kl"),
        ("Gradient norm", "Before clipping.", "norm", "policy/grad_norm"),
        ("Clipped tokens", "Share of the completion tokens whose ratio was clipped.", "share", "policy/clipped"),
        (
            "Engine against trainer",
            "Mean difference of their log-probabilities before the update: what rounding makes of the same weights.",
            "nats per token",
            "policy/mismatch_mean",
        ),
        (
            "Staleness",
            "Updates of the policy between a completion and its use, mean over the completions.",
            "updates",
            "policy/staleness",
        ),
    ]
    return [
        Figure(title, words, STEPS, Axis(unit, percent=unit == "share"), lines((title, "c1", name)))
        for title, words, unit, name in wanted
        if any(columns.get(name, ()))
    ]


def _memory(columns: Values) -> list[Figure]:
    memory = [("workers' processes", "c1", "memory/host_bytes"), ("GPU, most reserved", "c3", "memory/device_bytes")]
    there = [one for one in memory if any(columns.get(one[2], ()))]
    words = "After each rollout: all workers' processes together; the largest GPU reservation of any worker."
    return [Figure("Memory", words, STEPS, Axis("GiB", (0.0,), scale=_GIB), lines(*there))] if there else []


def _others(columns: Values, drawn: Sequence[Figure]) -> list[tuple[str, Figure]]:
    """A figure for every column that no other figure shows, with its topic."""
    shown = {metric for figure in drawn for metric in figure.metrics} | _UNDRAWN
    found = []
    for name, values in columns.items():
        group, _, last = name.partition("/")
        if name not in shown and any(values) and group not in _TOLD_GROUPS:
            figure = Figure(name, "", STEPS, Axis(last), lines((name, "c1", name)))
            found.append((_TOPICS.get(group, "Learning"), figure))
    return found


# ---- time


def _time(steps: Sequence[StepFinished]) -> Figure:
    whole = sum(step.step_s for step in steps)
    known = {phase: sum(getattr(step, f"{phase}_s") for step in steps) for phase in PHASES}
    spent = {**known, "other": whole - sum(known.values())}
    phases = [phase for phase, seconds in spent.items() if seconds > _LEAST_SHARE * whole]
    unit, name = time_unit(max(step.step_s for step in steps))
    series = lines(*((phase, _PHASE_COLOURS[phase], f"time/{phase}_s") for phase in phases))
    y = Axis(f"{name} per step", (0.0,), scale=unit)
    return Figure("Time per phase", "Where the time of a step went.", STEPS, y, series, stacked=True)


def _saved() -> Figure:
    series = lines(("plain decoding (estimated)", "c5", PLAIN_SUM), ("with TLT", "c3", ROLLOUT_SUM))
    words = "Plain decoding is reckoned from the costs of plain passes that the engine measured during this run."
    y = Axis("seconds of rollout, added up", (0.0,))
    return Figure("Time saved", words, STEPS, y, series, between=(0, 1))


def _replays(replays: Sequence[ReplayCompared]) -> Figure:
    unit, name = time_unit(max(max(replay.plain_s, replay.tlt_s) for replay in replays))
    bars: list[Bar] = []
    for index, replay in enumerate(replays):
        times = f"plain {duration(replay.plain_s)}, TLT {duration(replay.tlt_s)}"
        said = f"step {replay.step}: {times}, {in_short(Replayed.of([replay]))}"
        bars.append(Bar(index - 0.36, 0.36, (replay.plain_s / unit, 0.0), said))
        bars.append(Bar(index, 0.36, (0.0, replay.tlt_s / unit), said))
    stride = -(-len(replays) // _MOST_NAMES)
    names = tuple((float(index), str(replays[index].step)) for index in range(0, len(replays), stride))
    x = Axis("step", (-0.5, max(len(replays), _LEAST_PAIRS) - 0.5), names=names)
    words = "Same requests, same seeds, written both ways"
    whole = Replayed.of(replays)
    if whole.identical:
        words += ": all tokens identical."
    else:
        same = sum(replay.identical for replay in replays)
        words += f"; {same} of {len(replays)} identical token for token, {in_short(whole)}."
    series = (Series("plain", "c5"), Series("with TLT", "c3"))
    return Figure("Measured against plain decoding", words, x, Axis(name, (0.0,)), series, bars=tuple(bars))


def _whole() -> Figure:
    """Ratios of rollout and whole step, each over the replayed steps so far."""
    series = lines(("whole step", "c3", WHOLE_RATIO), ("rollout alone", "c5", REPLAY_RATIO))
    words = "Of the steps replayed so far. A whole step has everything in it, training and saving the drafter included."
    y = Axis("times as fast as plain", (1.0,))
    return Figure("Whole steps against plain training", words, STEPS, y, series, rule=1.0)


def _account() -> Figure:
    series = lines(
        ("saved in rollouts", "c3", "account/saved_s"),
        ("spent on the drafter", "c2", "account/spent_s"),
        ("balance", "c1", "account/balance_s"),
    )
    words = "Seconds of the whole run so far. Work that steps wait for is done only as far as the balance allows."
    return Figure("Account of speculation", words, STEPS, Axis("seconds", (0.0,)), series)


# ---- speculation


def shapes_figure(chosen: Sequence[ShapesChosen]) -> Figure:
    """Shares of ticks by batch size and shape, over the given steps; rarely used shapes are pooled."""
    ticks: dict[int, Counter[str]] = {}
    for one in chosen:
        for requests, shape, count in one.ticks:
            ticks.setdefault(requests, Counter())[shape] += count
    used = sum(ticks.values(), Counter[str]())
    first = [shape for shape, _ in used.most_common() if shape != _OFF][: len(_COLOURS)]
    colours = dict(zip([*first, _OTHERS, _OFF], [*_COLOURS[: len(first)], "c5", "c6"], strict=True))
    names = {shape: shape if shape in colours else _OTHERS for shape in used}
    colours = {name: colour for name, colour in colours.items() if name in names.values()}
    bars = []
    for place, requests in enumerate(sorted(ticks)):
        here = ticks[requests]
        whole = here.total()
        parts = tuple(sum(here[shape] for shape in here if names[shape] == name) / whole for name in colours)
        said = "\n".join(f"{shape} {count / whole:.1%}" for shape, count in here.most_common(8))
        bars.append(Bar(place - 0.4, 0.8, parts, f"{_requests(requests)}, {whole} passes\n{said}"))
    sizes = tuple((float(place), str(requests)) for place, requests in enumerate(sorted(ticks)))
    x = Axis("requests being written, up to", (-0.5, max(len(ticks), _LEAST_PAIRS) - 0.5), names=sizes)
    words = "How each pass speculated, by how many requests it served: drafters, depth x width / nodes verified."
    series = tuple(Series(name, colour) for name, colour in colours.items())
    return Figure("Shapes", words, x, Axis("share of passes", (0.0, 1.0), percent=True), series, bars=tuple(bars))


def _by_depth(drafter: str, chosen: Sequence[ShapesChosen]) -> Figure:
    """Acceptance over the steps, at a few depths."""
    deepest = max(len(fractions) for one in chosen for name, fractions in one.by_depth if name == drafter)
    some = [depth for depth in (1, 2, 4, 8) if depth <= deepest]
    series = lines(
        *((f"depth {d}", colour, f"acceptance/{drafter}/{d}") for d, colour in zip(some, _COLOURS, strict=False))
    )
    switches, one_off_s = sum(one.switches for one in chosen), sum(one.one_off_s for one in chosen)
    words = (
        f"Share of {drafter}'s tokens that the policy accepted, of drafts it had followed so far, as the tuner knew it "
        f"after each step. In the whole run shapes changed {switches:,} times, and drafters catching up and graphs "
        f"captured for them took {duration(one_off_s)}."
    )
    y = Axis("accepted", (0.0, 1.0), percent=True)
    return Figure(f"Acceptance by depth: {drafter}", words, STEPS, y, series)


def _requests(most: int) -> str:
    return "1 request" if most == 1 else f"up to {most} requests"


def _workers(told: Sequence[WorkerSpans]) -> Figure:
    """Lanes of the last step that has them."""
    step = max(spans.step for spans in told)
    return workers_figure(step, [(one.worker, one.spans) for one in told if one.step == step])


def workers_figure(step: int, told: Sequence[tuple[int, Sequence[tuple[str, float, float]]]]) -> Figure:
    """Lanes of at most `_MOST_LANES` workers, evenly chosen. `told`: worker; (activity, start, seconds)."""
    by_worker: dict[int, list[tuple[str, float, float]]] = {}
    for worker, spans in told:
        by_worker.setdefault(worker, []).extend(spans)
    every = [span for spans in by_worker.values() for span in spans]
    begun, ended = min(start for _, start, _ in every), max(start + seconds for _, start, seconds in every)
    unit, name = time_unit(ended - begun)

    def shown(worker: int, span: tuple[str, float, float]) -> LaneSpan:
        what, start, seconds = span
        title = f"worker {worker}: {what} {duration(seconds)}"
        colour = _DOING.get(what) or _PHASE_COLOURS.get(what, "c5")
        return LaneSpan((start - begun) / unit, seconds / unit, colour, title)

    chosen = sorted(by_worker)[:: -(-len(by_worker) // _MOST_LANES)]
    lanes = tuple(Lane(str(worker), tuple(shown(worker, span) for span in by_worker[worker])) for worker in chosen)
    idle = sum(seconds for what, _, seconds in every if what == "idle") / sum(seconds for _, _, seconds in every)
    part = f" ({len(lanes)} of {len(by_worker)})" if len(lanes) < len(by_worker) else ""
    words = f"What each worker{part} did in step {step}: {idle:.1%} of their time idle."
    found = {what for what, _, _ in every}
    legend = {what: colour for what, colour in (_DOING | _PHASE_COLOURS).items() if what in found}
    series = tuple(Series(what, colour) for what, colour in legend.items())
    return Figure("Workers", words, Axis(f"{name} since the step began"), Axis("worker"), series, lanes=lanes)


# ---- lengths


def _distribution(rollouts: Sequence[RolloutFinished]) -> Figure:
    last, which = _last(rollouts)
    longest = max(last)
    width = max(1, -(-longest // _BINS))
    counts = [0] * (longest // width + 1)
    for length in last:
        counts[length // width] += 1
    bars = tuple(
        Bar(
            index * width,
            width,
            (count / len(last),),
            f"{index * width} to {(index + 1) * width - 1} tokens: {count} of {len(last)} completions",
        )
        for index, count in enumerate(counts)
    )
    x, y = Axis("tokens", whole=True), Axis("share of completions", (0.0,), percent=True)
    words = f"{len(last):,} completions of {which}."
    return Figure("Length distribution", words, x, y, (Series("completions", "c1"),), bars=bars)


def _still_running(rollouts: Sequence[RolloutFinished]) -> Figure:
    last, which = _last(rollouts)
    series = [Series(which, "c1", points=survival(last), stepwise=True)]
    if len(rollouts) >= 2 * POOLED:
        first = Series(f"the first {POOLED} steps", "c5", points=survival(_pooled(rollouts[:POOLED])), stepwise=True)
        series.insert(0, first)
    half, all_ = sorted(last)[len(last) // 2], max(last)
    if half < all_:
        words = f"The tail: half of the completions are done after {half} tokens, the last one after {all_}."
    else:
        words = f"Half of the completions or more are as long as the longest: {all_} tokens."
    y = Axis("still being written", (0.0, 1.0), percent=True)
    return Figure("Still running", words, Axis("tokens", whole=True), y, tuple(series))


def survival(lengths: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """(tokens, fraction of the completions that are longer), a point wherever the fraction changes."""
    ordered, total = sorted(lengths), len(lengths)
    left = {length: total - rank for rank, length in enumerate(ordered, start=1)}
    return ((0.0, 1.0), *points(list(map(float, left)), [count / total for count in left.values()]))


def _last(rollouts: Sequence[RolloutFinished]) -> tuple[list[int], str]:
    some = rollouts[-POOLED:]
    if len(some) == 1:
        return _pooled(some), f"step {some[0].step}"
    return _pooled(some), f"the last {len(some)} steps"


def _pooled(rollouts: Sequence[RolloutFinished]) -> list[int]:
    return [length for rollout in rollouts for length in rollout.lengths]


def time_unit(seconds: float) -> tuple[float, str]:
    if seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")
