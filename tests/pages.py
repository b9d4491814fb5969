"""Runs made up for the page, a server for them, and a browser that looks at it and notes what goes wrong."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from tests.watching import MACHINE, config_of, events_of_steps, rollout, step
from tlt.watch.events import (
    EVENTS_FILE,
    FORMAT,
    AccountUpdated,
    AnswerShown,
    DrafterSwapped,
    DrafterTrained,
    Event,
    ReplayCompared,
    RewardsFailed,
    RunFinished,
    ShapesChosen,
    TrainingForecast,
)
from tlt.watch.log import start_run
from tlt.watch.server import build_app
from tlt.watch.step_files import step_file
from tlt.watch.workers import WorkerSpans

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# What a screen reader would stumble over: an outline with gaps, controls and pictures without names.
UNSOUND = """() => {
    const levels = [...document.querySelectorAll('h1, h2, h3, h4')].map((node) => Number(node.tagName[1]));
    const gaps = levels.filter((level, place) => level > (levels[place - 1] || 0) + 1);
    const named = (node) => node.getAttribute('aria-label') || node.textContent || (node.labels && node.labels.length);
    const silent = [...document.querySelectorAll('a, button, input, select, summary, [tabindex="0"], [role=img], th')]
        .filter((node) => !named(node)).map((node) => node.outerHTML.slice(0, 100));
    const heads = document.querySelectorAll('h1').length === 1 && document.querySelectorAll('main').length === 1;
    return [...gaps, ...silent, ...(heads ? [] : ['not one h1 and one main'])];
}"""
MARKUP = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>\n\"&amp;"


@contextmanager
def served(directory: Path, secret: str = "") -> Iterator[str]:
    """The address of a server for these runs."""
    config = uvicorn.Config(build_app(directory, secret=secret), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join()


class Looking:
    """A page of the browser. `problems`: errors of scripts, of the console and of requests, and calls elsewhere."""

    def __init__(self, page: Any, home: str) -> None:
        self.page, self.home = page, home
        self.problems: list[str] = []
        self.visits = 0
        self._heard: dict[str, Callable[[Any], None]] = {
            "pageerror": lambda error: self.problems.append(str(error)),
            "console": self._said,
            "requestfailed": self._failed,
            "request": lambda request: self._asked(request.url),
        }
        for event, hear in self._heard.items():
            page.on(event, hear)

    def leave(self) -> None:
        """The page is another test's from now on."""
        self.page.goto("about:blank")
        for event, hear in self._heard.items():
            self.page.remove_listener(event, hear)

    def _said(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            self.problems.append(said.text)

    def _failed(self, request: Any) -> None:
        if "ERR_ABORTED" not in str(request.failure):  # by leaving the page
            self.problems.append(f"{request.url}: {request.failure}")

    def _asked(self, url: str) -> None:
        if not url.startswith((self.home, "data:", "file:", "about:")):
            self.problems.append(f"asked for {url}")

    def go(self, address: str) -> None:
        """Until the view is drawn, or says that it cannot be."""
        self.visits += 1
        self.page.goto(f"{self.home}?{self.visits}#/{address}")  # a change behind # alone would not load the page again
        self.page.wait_for_selector("body[data-ready]")

    def move(self, address: str) -> None:
        """To another view without loading the page again."""
        before = int(self.page.get_attribute("body", "data-ready"))
        self.page.evaluate(f"location.hash = '#/{address}'")
        self.page.wait_for_function(f"() => Number(document.body.dataset.ready) > {before}")

    def ask(self, path: str) -> Any:
        """What the server answers."""
        return self.page.request.get(self.home + path).json()

    def text(self, selector: str = "main") -> str:
        return str(self.page.inner_text(selector))

    def nodes(self) -> int:
        return int(self.page.evaluate("document.querySelectorAll('*').length"))

    def heap_mb(self) -> float:
        """Memory of the page's script after a garbage collection."""
        session = self.page.context.new_cdp_session(self.page)
        session.send("HeapProfiler.collectGarbage")
        used = session.send("Runtime.getHeapUsage")["usedSize"]
        session.detach()
        return float(used) / 1e6

    def every_view(self, run: str, step: int) -> dict[str, str]:
        """The text of all five views, by name. Each has content, a sound outline, and names for all its controls."""
        views = {
            "runs": "",
            "run": f"run/{run}",
            "step": f"run/{run}/step/{step}",
            "completions": f"run/{run}/step/{step}/completions",
            "drafter": f"run/{run}/drafter",
        }
        said = {}
        for name, address in views.items():
            (self.move if said else self.go)(address)
            assert self.page.is_hidden("#trouble"), self.text("#trouble")
            assert self.page.evaluate(UNSOUND) == [], name
            assert self.page.evaluate(OVERFLOW) <= 0, f"{name} is wider than the window"
            said[name] = self.text()
        return said


@contextmanager
def looking(page: Any, directory: Path, secret: str = "") -> Iterator[Looking]:
    """At the runs in this directory. Whatever the page complains of fails the test."""
    with served(directory, secret) as home:
        look = Looking(page, f"{home}{secret}/" if secret else home)
        yield look
        look.leave()
    assert look.problems == []


# ---- runs


def write_events(directory: Path, name: str, events: list[Event], *flags: str) -> Path:
    config = config_of(directory, f"--run.name={name}", *flags)
    with start_run(config, "train", "0.1") as log:
        for event in events:
            log.emit(event)
    return directory / name


def append_event(home: Path, event: Event) -> None:
    fields = {name: getattr(event, name) for name in type(event).__dataclass_fields__}
    line = {"time": 3e9, "format": FORMAT, "kind": type(event).__name__, "fields": fields}
    with (home / EVENTS_FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def told_step(number: int, **changes: float) -> list[Event]:
    """A step with everything that a run with a drafter tells."""
    ticks = ((8, "eagle 7x1/8", 30), (64, "off", 40), (64, "suffix 3x1/4", 4))
    chosen = ShapesChosen(number, ticks, (("eagle", (0.8, 0.6, 0.4)), ("suffix", (0.5,))), 5, 0.1)
    spent = {"training": 0.2 * number, "measuring": 0.05 * number, "swapping": 0.01 * number}
    memory = {"host_bytes": 2 * 2**30, "device_bytes": 0, "entropy": 0.9 / number, "kl": 0.01, "verifies": 100}
    account = AccountUpdated(number, 7.0 * number, 1.5 * number, spent, 0.5 * number)
    return [rollout(number), chosen, account, step(number, **{**memory, **changes})]


def whole_story(steps: int = 6) -> list[Event]:
    later: dict[int, list[Event]] = {
        2: [
            DrafterTrained(2, 1, 40, 9000, 3.2, 2.1, 1.5, "it pays, then time was up", 1.2, 2.4),
            DrafterSwapped(2, 1, 0.01),
        ],
        3: [ReplayCompared(3, 1000, tlt_s=4.0, plain_s=7.0, identical=True)],
        4: [RewardsFailed(4, "raised", 2, "p", MARKUP)],
    }
    events: list[Event] = [MACHINE, TrainingForecast(1, True, 0.12, steps - 1, 40, 2.0, 9.0)]
    for number in range(1, steps + 1):
        events += [*told_step(number), AnswerShown(number, "p", MARKUP, MARKUP, 1.0, 3), *later.get(number, [])]
    return [*events, RunFinished(90.0)]


def completion(group: int, index: int, text: str = "one two three", **changes: Any) -> dict[str, Any]:
    texts = [part + " " for part in text.split(" ")]
    count = len(texts)
    found = {
        "group": group,
        "index": index,
        "reward": float(index % 2),
        "finish": "eos" if index % 2 else "length",
        "tokens": count,
        "version": 3,
        "head": count,
        "texts": texts,
        "logprobs": [-0.4 * place for place in range(count)],
        "drafted": "".join("01"[place % 2] for place in range(count)),
        "entropy": [0.3 * place for place in range(count)],
    }
    return {**found, **changes}


def write_step_file(directory: Path, number: int, *, workers: int = 1, groups: int = 3, answers: int = 4) -> None:
    """Group 1 has the same reward everywhere; group 0 is kept token by token."""
    requests = [
        [g, a, (g * answers + a) % workers, 0, 0.2, 1.0 + 0.1 * g + 0.5 * a]
        for g in range(groups)
        for a in range(answers)
    ]
    kept = [completion(0, index, f"answer {index} with words") for index in range(answers)]
    kept[0] = {**completion(0, 0, "unused"), "texts": ["plain ", MARKUP, " end"], "tokens": 9, "head": 2}
    kept[0] |= {"logprobs": [-0.1, -2.0, -0.5], "entropy": [0.1, 2.0, 0.5], "drafted": "012"}
    kept[0] |= {"question": f"What is {MARKUP}?", "reference": MARKUP}
    file = {
        "format": 1,
        "step": number,
        "began": 1000.0,
        "groups_in_all": groups,
        "groups": [
            {
                "group": g,
                "prompt": f"{MARKUP}{g}",
                "rewards": [1.0 if g == 1 else float(a % 2) for a in range(answers)],
                "lengths": [3 + a for a in range(answers)],
                "finish": ["eos"] * answers,
            }
            for g in range(groups)
        ],
        "completions_in_all": answers,
        "completions": kept,
        "requests_in_all": len(requests),
        "requests": requests,
        "shapes": [[w, [[0, 9, "off"], [0.9, 4, "eagle 7x1/8"], [1.6, 2, "suffix 3x1/4"]]] for w in range(workers)],
        "costs": [[w, 8, "eagle 7x1/8", 30, 0.011, 0.012] for w in range(workers)] + [[0, 64, "off", 40, 0.02, 0.0]],
        "memory": [[w, 2**30, 0] for w in range(workers)],
    }
    path = step_file(directory, number)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(file), encoding="utf-8")


def whole_run(directory: Path, name: str = "whole", steps: int = 6) -> Path:
    home = write_events(
        directory, name, whole_story(steps), f"--run.steps={steps}", "--spec.drafter=both", "--spec.path=new"
    )
    write_step_file(home, steps)
    return home


def two_workers(number: int, at: float = 1e9) -> list[Event]:
    return [
        WorkerSpans(number, 0, "here", (("rolling", at, 4.0),)),
        WorkerSpans(number, 1, "here", (("rolling", at, 2.0), ("drafting", at + 2.0, 1.5), ("idle", at + 3.5, 0.5))),
    ]


def write_long_run(directory: Path, steps: int, groups: int, answers: int) -> Path:
    """So many steps of so many groups, written as lines at once."""
    home = write_events(directory, "long", [MACHINE], f"--run.steps={steps + 1}")
    lengths = [40 + (37 * place) % 900 for place in range(groups * answers)]
    told: Callable[[Event], dict[str, Any]] = lambda event: {
        name: getattr(event, name) for name in type(event).__dataclass_fields__
    }
    lines = []
    for number in range(1, steps + 1):
        reward = 0.5 + 0.4 * number / steps + 0.05 * ((number * 7919) % 13 - 6) / 6
        for event in told_step(number, mean_reward=reward):
            fields = told(event)
            if "lengths" in fields:
                fields["lengths"] = lengths
            line = {"time": 1e9 + number, "format": 2, "kind": type(event).__name__, "fields": fields}
            lines.append(json.dumps(line))
    with (home / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    write_step_file(home, steps, workers=4, groups=groups, answers=answers)
    return home


def some_steps(count: int) -> list[Event]:
    return [MACHINE, *events_of_steps(0, count)]
