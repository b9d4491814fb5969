"""The files of the page, and `tlt watch --export DIR`: page and data as files for any static server.

The exported paths are those of the live server, so the page is the same, but for two lines of its document: it is not
live, and forbids foreign scripts itself.
"""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from tlt.errors import ConfigError, TltError
from tlt.watch.live import LiveRun, LiveRuns
from tlt.watch.step_files import steps_kept
from tlt.watch.views import defaults_of, live_view, run_row, step_view

PAGE = Path(__file__).with_name("page")
SERVED = {  # what the live page and an export consist of, with their media types
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "draw.js": "text/javascript; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
}
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./[\w.]+";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=function|class|const)", re.MULTILINE)
POLICY = (  # of the page's content: its own scripts, styles and data, and nothing else
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
_LIVE = '<meta name="tlt-live" content="yes">'
_STATIC = f'<meta name="tlt-live" content="no">\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">'


def read_page(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def bundled(*names: str) -> str:
    """Modules concatenated into one script; each must follow those that it imports."""
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", read_page(name))) for name in names)


def runs_json(runs: dict[str, LiveRun | TltError]) -> dict[str, Any]:
    rows = [
        {"name": name, "error": str(live), "state": "broken", "knobs": {}}
        if isinstance(live, TltError)
        else live.once(partial(run_row, name))
        for name, live in runs.items()
    ]
    return {"runs": rows, "defaults": defaults_of({key for row in rows for key in row["knobs"]})}


def export(directory: Path, target: Path) -> int:
    """Writes the site of all runs in a directory and returns their number. Includes the step files that exist now."""
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise ConfigError(f"--export {target}: exists and is not an empty directory; give another, or remove it")
    runs = LiveRuns(directory).refreshed()
    if not runs:
        raise ConfigError(f"{directory}: holds no run; expected the directory of runs, or of one run")
    for name in SERVED:
        text = read_page(name)
        _write(target / name, text.replace(_LIVE, _STATIC) if name == "index.html" else text)
    _write_json(target / "data" / "runs.json", runs_json(runs))
    for name, live in runs.items():
        if isinstance(live, LiveRun):
            _export_run(live, target / "data" / name)
    return len(runs)


def _export_run(live: LiveRun, target: Path) -> None:
    """Writes every kept step, and the last one."""
    view = live_view(live)
    _write_json(target / "run.json", view)
    for step in {*steps_kept(live.directory), *view["steps"][-1:]}:
        if told := step_view(live, step):
            _write_json(target / f"step_{step}.json", told)


def _write_json(path: Path, value: Any) -> None:
    _write(path, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TltError(f"{path} cannot be written ({error.strerror}); make room, or choose another place") from error
