"""`report.html`: a run on one page, made from its events and step files alone.

Self-contained: style, data and script are in the file, nothing is fetched, and the content security policy forbids all
other scripts. Written to a temporary file and renamed, so a partial page is never read. Sentences come from
`tlt.watch.summary`, figures from `tlt.watch.figures`; the page's `draw.js` draws them.
"""

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from tlt.config import RunConfig
from tlt.errors import TltError
from tlt.recipe import to_toml
from tlt.watch.events import AnswerShown, HealthWarning, Run, RunFailed, StepFinished, read_run
from tlt.watch.health import HealthLight
from tlt.watch.history import counted, events_of, steps_of
from tlt.watch.metrics import STEP_METRICS
from tlt.watch.site import bundled, read_page
from tlt.watch.step_files import step_file, steps_kept
from tlt.watch.summary import Summary, in_words, started_of, summarise
from tlt.watch.views import differences, machine_rows, read_step, run_view, tiles_of

REPORT_FILE = "report.html"
_MOST_ROWS = 400  # of the table of steps
_MOST_COMPLETIONS = 120_000  # bytes of the completions of one step
Json = dict[str, Any]


def write_report(run: Run, directory: str | Path) -> Path:
    """Writes the run's page into its directory and returns its path."""
    target = Path(directory) / REPORT_FILE
    aside = target.with_name(f".{REPORT_FILE}.{os.getpid()}")  # a run may end while `tlt report` tells it
    text = page(run, kept_completions(Path(directory)))
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
    """Writes the page of the run in a directory from its events so far."""
    run = read_run(directory)
    started = started_of(run)
    if started and started.verb != "train":
        raise TltError(f"{directory}: holds a run of `tlt {started.verb}`; a report tells runs of `tlt train`")
    return write_report(run, directory)


def page(run: Run, completions: Sequence[Json] = ()) -> str:
    summary = summarise(run)
    title = escape(summary.name)
    style, script = read_page("style.css"), bundled("draw.js", "report.js")
    view = run_view(run)
    data = {"steps": view["steps"], "columns": view["columns"], "figures": view["figures"], "completions": completions}
    without = "The figures are drawn by a script in this page; the numbers of every step stand in the table below."
    body = "\n".join(
        [
            f"<main><header><h1>{title}</h1><span>{escape(_when(run, summary))}</span></header>",
            *_health(summary.lights),
            f'<p class="words">{escape(in_words(summary))}</p>',
            *_tiles(summary),
            f'<div id="figures"><noscript><p>{without}</p></noscript></div>',
            *_details(run, completions),
            "</main>",
            f'<script type="application/json" id="run-data">{_inert(data)}</script>',
            f'<script type="module">{script}</script>',
        ]
    )
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{title}: a run of tlt</title>\n<style>{style}</style>"
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def _inert(data: Json) -> str:
    """JSON that cannot close its script element, whatever text it holds."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def kept_completions(directory: Path) -> list[Json]:
    """One group each of the first, the middle and the last kept step, within `_MOST_COMPLETIONS` bytes."""
    steps = list(steps_kept(directory))
    found = []
    for step in sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else ():
        file = read_step(step_file(directory, step))
        if not file or not file["completions"]:
            continue
        group, room, some = file["completions"][0]["group"], _MOST_COMPLETIONS, []
        for one in file["completions"]:
            room -= len(json.dumps(one))
            if one["group"] != group or room < 0:
                break
            some.append(one)
        found.append({"step": step, "question": file["completions"][0].get("question", ""), "completions": some})
    return found


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
    tiles = tiles_of(summary)
    if not tiles:
        return
    yield '<dl class="tiles">'
    for name, value, note in tiles:
        words = f"{escape(value)}<small>{escape(note)}</small>"
        yield f'<div class="tile"><dt>{escape(name)}</dt><dd>{words}</dd></div>'
    yield "</dl>"


# ---- details


def _details(run: Run, completions: Sequence[Json]) -> Iterator[str]:
    yield "<section>"
    for failed in events_of(run, RunFailed):
        if "\n" in failed.message:
            yield _folded("What stopped it", f"<pre>{escape(failed.message)}</pre>", open_=True)
    if warnings := events_of(run, HealthWarning):
        yield _folded("What was warned of", _warnings(warnings))
    if answers := events_of(run, AnswerShown):
        yield _folded("What the policy writes", _answers(answers), open_=True)
    if completions:
        yield _folded("Completions, token by token", '<div id="completions"></div>', open_=True)
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
    """Completions of the first, the middle and the last step."""
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
    rows = [
        f'<tr><th scope="row"><code>{key}</code></th><td><code>{escape(value)}</code></td></tr>'
        for key, value in differences(config).items()
    ]
    return f"<table><tbody>{''.join(rows)}</tbody></table>" if rows else "<p>Nothing.</p>"


def _machine(run: Run) -> str:
    rows = machine_rows(run)
    cells = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(said)}</td></tr>' for name, said in rows)
    return f"<table><tbody>{cells}</tbody></table>" if rows else "<p>Not on record.</p>"
