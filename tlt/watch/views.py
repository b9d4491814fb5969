"""The data of the page as JSON values: all runs, one run, one step. Shared by server, export and report.

Pure except for reading step files. Does not depend on HTTP or HTML; texts are plain text.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tlt.config import RunConfig
from tlt.recipe import flat
from tlt.watch.chart import Axis, Bar, Figure, Series, to_json
from tlt.watch.console import notice
from tlt.watch.events import (
    AcceptanceCollapsed,
    AccountUpdated,
    DrafterSwapped,
    DrafterTrained,
    PhaseStarted,
    Recorded,
    RolloutProgress,
    Run,
    RunFailed,
    ShapesChosen,
    StartupPhase,
    StepFinished,
    TrainingForecast,
)
from tlt.watch.figures import figures_of, shapes_figure, workers_figure
from tlt.watch.history import counted, drafted, events_of, steps_of
from tlt.watch.live import LiveRun
from tlt.watch.metrics import Columns, columns_of
from tlt.watch.step_files import step_file, steps_kept
from tlt.watch.summary import Ends, Evaluations, Summary, duration, in_words, machine_of, started_of, summarise
from tlt.watch.verdict import in_short
from tlt.watch.workers import WorkerSpans

Json = dict[str, Any]
_AGAIN = 2  # last steps that are sent again: events of a step may come after it
_DIGITS = 6  # of a number in a column
_MOST_NOTICES = 200
_PHASES = ("rollout", "reward", "drafting", "update", "checkpoint")  # of a step, in the order of time
_COST_BARS = 24
_RECENT = 10  # steps whose longest says how long a run may be silent
_LEAST_SILENT_S, _STARTUP_S = 60.0, 300.0  # seconds without an event: in steps, before the first
_LEAST_SHARE = 0.002  # of a step: what took less cannot be seen


# ---- all runs


def run_row(name: str, live: LiveRun) -> Json:
    """A row of the table of runs."""
    run = live.run
    summary = summarise(run)
    records = counted(run.events)
    whole = summary.whole_speedup if summary.replayed or (summary.drafted and summary.estimated) else None
    rollout_s = summary.phase_s["rollout"]
    return {
        "name": name,
        "state": summary.ended,
        "failure": summary.failure,
        "taken": summary.taken,
        "planned": summary.planned,
        "started": records[0].time if records else None,
        **_heartbeat(run, live.now),
        "reward_first": summary.reward.first if summary.taken else None,
        "reward_last": summary.reward.last if summary.taken else None,
        "accept_length": summary.accept_length.last if summary.drafted else None,
        "whole_ratio": whole,
        "tokens_per_s": summary.tokens / rollout_s if rollout_s else None,
        "verb": started.verb if (started := started_of(run)) else "",
        "knobs": differences(run.config),
    }


def _heartbeat(run: Run, now: Recorded | None) -> Json:
    """The time of the last event, and the seconds without an event after which a run counts as silent."""
    last = max((record.time for record in (*run.events[-1:], now) if record), default=None)
    steps = [step.step_s for step in steps_of(run)[-_RECENT:]]
    return {"last": last, "silent_s": max(_LEAST_SILENT_S, 3 * max(steps)) if steps else _STARTUP_S}


def defaults_of(keys: Collection[str]) -> dict[str, str]:
    """The default values of these settings."""
    return {key: repr(value) for key, value in flat(RunConfig()).items() if key in keys}


def differences(config: RunConfig) -> dict[str, str]:
    """Settings that differ from the defaults."""
    usual = flat(RunConfig())
    return {key: repr(value) for key, value in flat(config).items() if value != usual[key]}


# ---- one run


def run_view(
    run: Run,
    *,
    known: Columns | None = None,
    now: Recorded | None = None,
    kept: Sequence[int] = (),
    rows: int = 0,
    lives: int = 1,
) -> Json:
    """The run view: everything except single steps. `known`: its columns; `rows`: steps that the page already has."""
    summary, columns = summarise(run), known or columns_of(run)
    first = max(0, min(rows, len(columns.steps)) - _AGAIN)
    return {
        "name": summary.name,
        "lives": lives,
        "state": summary.ended,
        "words": in_words(summary),
        "lights": [[light.name, light.level, light.says, light.remedy] for light in summary.lights],
        "tiles": [list(tile) for tile in tiles_of(summary)],
        "taken": summary.taken,
        "planned": summary.planned,
        "now": _doing(now, summary),
        **_heartbeat(run, now),
        "from": first,
        **_columns(columns, first),
        "figures": [to_json(figure) for figure in figures_of(run, columns)],
        "kept": list(kept),
        "drafter": drafter_view(run),
        "notices": _notices(run),
        "failure": [failed.message for failed in events_of(run, RunFailed)][-1:],
        "knobs": differences(run.config),
        "machine": machine_rows(run),
    }


def live_view(live: LiveRun, *, rows: int = 0, lives: int = 0) -> Json:
    """The view of a run that may go on. `rows`, `lives`: what the page already has."""
    kept = sorted(steps_kept(live.directory))
    had = rows if lives == live.lives else 0
    view = run_view(live.run, known=live.columns, now=live.now, kept=kept, rows=had, lives=live.lives)
    return {**view, "at": live.offset}


def _columns(columns: Columns, first: int) -> Json:
    values = {name: [_short(value) for value in each[first:]] for name, each in columns.values.items()}
    return {"steps": columns.steps[first:], "columns": values}


def _short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def _doing(now: Recorded | None, summary: Summary) -> Json | None:
    if now is None or summary.ended != "running":
        return None
    match now.event:
        case PhaseStarted(step=step, phase=phase):
            return {"step": step, "phase": phase, "since": now.time}
        case RolloutProgress(step=step, finished=finished, n=n, running=running, tokens=tokens):
            words = f"rollout: {finished} of {n} completions, {running} running, {tokens:,} tokens"
            return {"step": step, "phase": words, "since": now.time, "part": finished / max(1, n)}
        case StartupPhase(phase=phase):
            return {"step": 0, "phase": phase, "since": now.time}
        case _:
            return None


def tiles_of(summary: Summary) -> list[tuple[str, str, str]]:
    """Name, value and note of the numbers at the top."""
    if not summary.taken:
        return []
    tiles = [("mean reward", *_change(summary.reward, ".3f"))]
    tiles += [_evaluation(told) for told in summary.evaluations]
    if summary.drafted:
        tiles.append(("accept length", *_change(summary.accept_length, ".2f")))
        tiles += _speeds(summary) if summary.replayed or summary.estimated else []
    steps = f"{summary.taken} of {summary.planned} {'step' if summary.planned == 1 else 'steps'}"
    tiles.append(("time of all steps", duration(summary.step_s), steps))
    pace = summary.tokens / summary.phase_s["rollout"] if summary.phase_s["rollout"] else 0.0
    tiles.append(("tokens written", f"{summary.tokens:,}", f"{pace:,.0f} per second of rollout"))
    return tiles


def _evaluation(told: Evaluations) -> tuple[str, str, str]:
    first, last = told.first, told.last
    value = f"{last.mean_reward:.3f}" if first is last else f"{first.mean_reward:.3f} → {last.mean_reward:.3f}"
    return (f"reward on {first.name}", value, f"held out, ± {last.reward_error:.3f}, {last.prompts} prompts")


def _change(ends: Ends, form: str) -> tuple[str, str]:
    if not ends.apart:
        return f"{ends.first:{form}}", "of one step"
    each = "first and last step" if ends.steps == 1 else f"means of the first and last {ends.steps} steps"
    return f"{ends.first:{form}} → {ends.last:{form}}", each


def _speeds(summary: Summary) -> list[tuple[str, str, str]]:
    if summary.replayed:
        rollout, how = summary.replayed.speedup, "measured"
        note = f"against plain decoding: measured, {in_short(summary.replayed)}"
    else:
        rollout, how, note = summary.rollout_speedup, "estimated", "against plain decoding, estimated"
    whole = ("whole-step speed-up", f"{summary.whole_speedup:.2f} ×", f"all work for the drafter included, {how}")
    return [("rollout speed-up", f"{rollout:.2f} ×", note), whole]


def _notices(run: Run) -> list[list[Any]]:
    """Time, text and style of the console's notices."""
    found = [(record.time, said) for record in counted(run.events) if (said := notice(record.event))]
    return [[time, *said] for time, said in found[-_MOST_NOTICES:]]


def machine_rows(run: Run) -> list[tuple[str, str]]:
    machine, started = machine_of(run), started_of(run)
    rows: list[tuple[str, str]] = []
    if machine:
        memory = f", {machine.device_memory_gib:g} GiB" if machine.device_memory_gib else ""
        rows += [("device", f"{machine.device}{memory}"), ("processor", f"{machine.cpu}, {machine.cores} cores")]
        rows += [(name, version) for name, version in machine.versions.items() if version and name != "tlt"]
        rows += [("commit", machine.commit), ("command", machine.command)]
    if started:
        rows += [("tlt", started.version), ("seed", str(started.seed))]
    return rows


def drafter_view(run: Run) -> Json:
    """When the drafter was trained and why, or why not."""
    swaps = {swap.version: swap.step for swap in events_of(run, DrafterSwapped)}
    trained = [
        {
            "step": one.step,
            "version": one.version,
            "micro_steps": one.micro_steps,
            "tokens": one.tokens,
            "loss_before": one.loss_before,
            "loss_after": one.loss_after,
            "accept_before": one.accept_before,
            "accept_after": one.accept_after,
            "seconds": one.seconds,
            "reason": one.reason,
            "drafts_from": swaps[one.version] + 1 if one.version in swaps else None,
        }
        for one in events_of(run, DrafterTrained)
    ]
    said = [event for kind in (TrainingForecast, AcceptanceCollapsed) for event in events_of(run, kind)]
    words = [(getattr(event, "step", 0), told[0]) for event in said if (told := notice(event))]
    return {
        "drafter": run.config.spec.drafter,
        "frozen": run.config.drafting.frozen,
        "drafted": any(map(drafted, steps_of(run))),
        "trained": trained,
        "said": [list(one) for one in sorted(words)],
    }


# ---- one step


def step_view(live: LiveRun, step: int) -> Json | None:
    """A step's numbers, figures and file; None if it is not finished."""
    run = live.run
    finished = next((one for one in steps_of(run) if one.step == step), None)
    if finished is None:
        return None
    file = read_step(step_file(live.directory, step))
    chosen = [one for one in events_of(run, ShapesChosen) if one.step == step]
    account = [one for one in events_of(run, AccountUpdated) if one.step == step]
    figures = [_lanes(finished, live.lanes_of(step)), *([shapes_figure(chosen)] if chosen and chosen[0].ticks else [])]
    figures += [_costs(file["costs"])] if file and file.get("costs") else []
    numbers = live.columns
    place = numbers.steps.index(step)
    return {
        "step": step,
        "numbers": {
            name: _short(values[place]) for name, values in numbers.values.items() if values[place] is not None
        },
        "figures": [to_json(figure) for figure in figures],
        "account": _account_rows(account[-1], run.config.cluster.workers) if account else [],
        "file": file,
    }


def read_step(path: Path) -> Json | None:
    """A step file; None if it was not kept."""
    try:
        found: Json = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found


def _lanes(step: StepFinished, lanes: Sequence[WorkerSpans]) -> Figure:
    """Activity of each worker; of a single worker the phases of the step."""
    if lanes:
        return workers_figure(step.step, [(one.worker, one.spans) for one in lanes])
    spans, at = [], 0.0
    for phase in _PHASES:
        seconds = float(getattr(step, f"{phase}_s"))
        if seconds > _LEAST_SHARE * step.step_s:
            spans.append((phase, at, seconds))
        at += seconds
    return workers_figure(step.step, [(0, spans or [("rollout", 0.0, step.step_s or 1e-9)])])


def _costs(costs: Sequence[Sequence[Any]]) -> Figure:
    """The most frequent timed ticks, measured beside expected, over all workers."""
    sums: dict[tuple[int, str], list[float]] = {}
    for _, running, shape, ticks, measured_s, expected_s in costs:
        found = sums.setdefault((running, shape), [0.0, 0.0, 0.0])
        for place, value in enumerate((ticks, ticks * measured_s, ticks * expected_s)):
            found[place] += value
    most = sorted(sums, key=lambda key: -sums[key][1])[:_COST_BARS]
    bars, names = [], []
    for place, (running, shape) in enumerate(sorted(most)):
        ticks, measured_s, expected_s = sums[running, shape]
        measured_ms, expected_ms = 1000 * measured_s / ticks, 1000 * expected_s / ticks
        said = f"up to {running} running, {shape}: {ticks:.0f} ticks timed\nmeasured {measured_ms:.3g} ms"
        said += f", expected {expected_ms:.3g} ms" if expected_ms else ", nobody estimates"
        bars += [
            Bar(place - 0.36, 0.36, (measured_ms, 0.0), said),
            Bar(place, 0.36, (0.0, expected_ms), said),
        ]
        names.append((float(place), f"{running}·{'off' if shape == 'off' else shape.rpartition(' ')[2]}"))
    words = (
        "Milliseconds of a tick, by requests in it and shape: as timed in this rollout, and as the cost model has it."
    )
    x = Axis("requests, up to · shape", (-0.5, max(len(most), 4) - 0.5), names=tuple(names))
    series = (Series("measured", "c1"), Series("expected", "c5"))
    return Figure("Tick costs", words, x, Axis("ms", (0.0,)), series, bars=tuple(bars))


def _account_rows(account: AccountUpdated, workers: int) -> list[tuple[str, str]]:
    counted = "rollouts" if account.rollouts_only or workers > 1 else "steps"
    whose = "" if workers == 1 else f" (mean of {workers} workers)"
    rows = [
        (f"time of all {counted} so far, had they been plain{whose}", account.plain_s),
        ("saved in rollouts", account.saved_s),
        *((f"spent on {kind}", seconds) for kind, seconds in account.spent_s.items()),
        ("balance: may be spent", account.balance_s),
    ]
    return [(name, duration(seconds)) for name, seconds in rows]
