"""`tlt watch --export DIR`: the page and its data as files, for any static server.

The paths are those that the live server answers, so that the page is the same but for one word in its document.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from tlt.errors import ConfigError, TltError
from tlt.watch.page_files import SERVED, read_page
from tlt.watch.sampling import steps_kept
from tlt.watch.tail import LiveRun, LiveRuns
from tlt.watch.views import live_view, run_row, step_view

_LIVE, _STATIC = '<meta name="tlt-live" content="yes">', '<meta name="tlt-live" content="no">'


def runs_json(runs: dict[str, LiveRun | TltError]) -> dict[str, Any]:
    rows = [
        {"name": name, "error": str(live), "state": "broken", "knobs": {}}
        if isinstance(live, TltError)
        else live.once(partial(run_row, name))
        for name, live in runs.items()
    ]
    return {"runs": rows}


def export(directory: Path, target: Path) -> int:
    """Writes the site of all runs in a directory; how many there were. Step files are those that are kept now."""
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
    """Every step that was kept, and the last one."""
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
