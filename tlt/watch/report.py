"""`report.html`: one page that tells a run, made from its events alone.

Self-contained: style and drawings stand in the file, nothing is fetched, nothing runs. Written aside and renamed, so
that a reader never sees half of it. What is said in words comes from `tlt.watch.summary`, what is drawn from
`tlt.watch.figures`.
"""

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from tlt.config import RunConfig
from tlt.errors import TltError
from tlt.recipe import flat, to_toml
from tlt.watch.events import AnswerShown, HealthWarning, Run, RunFailed, StepFinished, read_run
from tlt.watch.figures import Figure, figures_of
from tlt.watch.health import HealthLight
from tlt.watch.history import counted, events_of, steps_of
from tlt.watch.metrics import STEP_METRICS
from tlt.watch.summary import Ends, Evaluations, Summary, duration, in_words, machine_of, started_of, summarise
from tlt.watch.verdict import in_short

REPORT_FILE = "report.html"
_MOST_ROWS = 400  # of the table of steps


def write_report(run: Run, directory: str | Path) -> Path:
    """Writes the run's page into its directory, and says where it is."""
    target = Path(directory) / REPORT_FILE
    aside = target.with_name(f".{REPORT_FILE}.{os.getpid()}")  # a run may end while `tlt report` tells it
    text = page(run)
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, target)
    except OSError as error:
        raise TltError(
            f"the report {target} cannot be written ({error.strerror}); the run's events are whole: make room, or see "
            f"that the directory can be written to, then `tlt report {directory}`"
        ) from error
    return target


def report(directory: str | Path) -> Path:
    """The page of the run in a directory, made from what it has told so far."""
    run = read_run(directory)
    started = started_of(run)
    if started and started.verb != "train":
        raise TltError(f"{directory}: holds a run of `tlt {started.verb}`; a report tells runs of `tlt train`")
    return write_report(run, directory)


def page(run: Run) -> str:
    summary = summarise(run)
    title = escape(summary.name)
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    body = "\n".join(
        [
            f"<header><h1>{title}</h1><span>{escape(_when(run, summary))}</span></header>",
            *_health(summary.lights),
            f'<p class="words">{escape(in_words(summary))}</p>',
            *_tiles(summary),
            '<div class="figures">',
            *(_figure(figure) for figure in figures_of(run)),
            "</div>",
            *_details(run),
        ]
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: a run of tlt</title>\n<style>\n{style}</style>"
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def _when(run: Run, summary: Summary) -> str:
    records = counted(run.events)
    if not records:
        return "nothing on record"
    first = datetime.fromtimestamp(records[0].time, UTC)
    text = f"{first:%Y-%m-%d %H:%M} UTC"
    return f"{text}, {summary.ended}" if summary.ended != "running" else f"{text}, no end on record"


# ---- the lights and the numbers at the top


def _health(lights: Sequence[HealthLight]) -> Iterator[str]:
    yield '<ul class="lights">'
    for light in lights:
        remedy = f"<small>{escape(light.remedy)}</small>" if light.remedy else ""
        level = {"off": "off", "good": "good", "warn": "look at this", "bad": "bad"}[light.level]
        name = f"<b>{escape(light.name)}<span>: {level}</span></b>"
        yield f'<li class="{light.level}"><i></i><div>{name}{escape(light.says)}{remedy}</div></li>'
    yield "</ul>"


def _tiles(summary: Summary) -> Iterator[str]:
    if not summary.taken:
        return
    tiles = [("mean reward", *_change(summary.reward, ".3f"))]
    tiles += [_evaluation(told) for told in summary.evaluations]
    if summary.drafted:
        tiles.append(("accept length", *_change(summary.accept_length, ".2f")))
        tiles += _speeds(summary) if summary.replayed or summary.estimated else []
    steps = f"{summary.taken} of {summary.planned} {'step' if summary.planned == 1 else 'steps'}"
    tiles.append(("time of all steps", duration(summary.step_s), steps))
    pace = summary.tokens / summary.phase_s["rollout"] if summary.phase_s["rollout"] else 0.0
    tiles.append(("tokens written", f"{summary.tokens:,}", f"{pace:,.0f} per second of rollout"))
    yield '<dl class="tiles">'
    for name, value, note in tiles:
        words = f"{escape(value)}<small>{escape(note)}</small>"
        yield f'<div class="tile"><dt>{escape(name)}</dt><dd>{words}</dd></div>'
    yield "</dl>"


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


# ---- figures and details


def _figure(figure: Figure) -> str:
    entries = "".join(
        f'<li class="{entry.colour}{" faint" if entry.faint else ""}"><i></i><b>{escape(entry.label)}</b></li>'
        for entry in figure.legend
    )
    caption = f"<figcaption><h2>{escape(figure.title)}</h2><p>{escape(figure.words)}</p></figcaption>"
    return f'<figure>{caption}<ul class="legend">{entries}</ul>{figure.svg}</figure>'


def _details(run: Run) -> Iterator[str]:
    yield "<section>"
    for failed in events_of(run, RunFailed):
        if "\n" in failed.message:
            yield _folded("What stopped it", f"<pre>{escape(failed.message)}</pre>", open_=True)
    if warnings := events_of(run, HealthWarning):
        yield _folded("What was warned of", _warnings(warnings))
    if answers := events_of(run, AnswerShown):
        yield _folded("What the policy writes", _answers(answers), open_=True)
    if steps := steps_of(run):
        yield _folded("Numbers of every step", _step_table(steps))
    yield _folded("What differs from the defaults", _differences(run.config), open_=True)
    yield _folded("Machine and versions", _machine(run), open_=True)
    yield _folded("The whole configuration", f"<pre>{escape(to_toml(run.config))}</pre>")
    yield "</section>"
    yield "<footer>Made from events.jsonl. <code>tlt report</code> makes it again.</footer>"


def _folded(title: str, body: str, open_: bool = False) -> str:
    return f"<details{' open' if open_ else ''}><summary>{escape(title)}</summary>{body}</details>"


def _warnings(warnings: Sequence[HealthWarning]) -> str:
    rows = "".join(
        f'<tr><th scope="row">step {one.step}</th>'
        f"<td>{escape(one.light)}: {escape(one.message)}; {escape(one.remedy)}</td></tr>"
        for one in warnings[-_MOST_ROWS:]
    )
    return f"<table><tbody>{rows}</tbody></table>"


def _answers(answers: Sequence[AnswerShown]) -> str:
    """One from the beginning, the middle and the end of the run."""
    some = sorted({0, len(answers) // 2, len(answers) - 1})
    return "".join(_answer(answers[index]) for index in some)


def _answer(shown: AnswerShown) -> str:
    heading = f"Step {shown.step}, reward {shown.reward:.3g}, {shown.tokens} tokens"
    texts = f'<p class="asked">{escape(shown.question)}</p><p>{escape(shown.answer)}</p>'
    return f'<div class="answer"><h3>{heading}</h3>{texts}</div>'


def _step_table(steps: Sequence[StepFinished]) -> str:
    stride = -(-len(steps) // _MOST_ROWS)
    shown = [*steps[::stride], *([steps[-1]] if (len(steps) - 1) % stride else [])]
    head = "".join(f'<th scope="col">{name.replace("/", " ")}</th>' for name in STEP_METRICS)
    rows = "".join(
        f'<tr><th scope="row">{step.step}</th>'
        + "".join(f"<td>{_number(getattr(step, field))}</td>" for field in STEP_METRICS.values())
        + "</tr>"
        for step in shown
    )
    note = f"<p>Every {stride}th step; all of them are in events.jsonl.</p>" if stride > 1 else ""
    head = f'<thead><tr><th scope="col">step</th>{head}</tr></thead>'
    return f'{note}<div class="scroll"><table class="numbers">{head}<tbody>{rows}</tbody></table></div>'


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _differences(config: RunConfig) -> str:
    usual = flat(RunConfig())
    rows = [
        f'<tr><th scope="row"><code>{key}</code></th><td><code>{escape(repr(value))}</code></td></tr>'
        for key, value in flat(config).items()
        if value != usual[key]
    ]
    return f"<table><tbody>{''.join(rows)}</tbody></table>" if rows else "<p>Nothing.</p>"


def _machine(run: Run) -> str:
    machine, started = machine_of(run), started_of(run)
    rows: list[tuple[str, str]] = []
    if machine:
        memory = f", {machine.device_memory_gib:g} GiB" if machine.device_memory_gib else ""
        rows += [("device", f"{machine.device}{memory}"), ("processor", f"{machine.cpu}, {machine.cores} cores")]
        rows += [(name, version) for name, version in machine.versions.items() if version and name != "tlt"]
        rows += [("commit", machine.commit), ("command", machine.command)]
    if started:
        rows += [("tlt", started.version), ("seed", str(started.seed))]
    cells = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(said)}</td></tr>' for name, said in rows)
    return f"<table><tbody>{cells}</tbody></table>" if rows else "<p>Not on record.</p>"
