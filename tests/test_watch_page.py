"""`tlt watch` in a real browser: views of live, crashed, long and many-worker runs; and what a server answers."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.pages import (
    CHROMIUM,
    MARKUP,
    Looking,
    completion,
    served,
    some_steps,
    told_step,
    two_workers,
    whole_story,
    write_events,
    write_long_run,
    write_step_file,
)
from tests.watching import MACHINE, step
from tlt.cli import main
from tlt.errors import TltError
from tlt.watch.events import EVENTS_FILE, RunFinished, RunResumed, StepFinished, read_run
from tlt.watch.figures import figures_of
from tlt.watch.history import counted
from tlt.watch.live import LiveRun, LiveRuns
from tlt.watch.metrics import columns_of
from tlt.watch.report import report
from tlt.watch.server import build_app
from tlt.watch.site import export

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
SMALL = ["--run.steps=3", "--task.prompts=4", "--task.group=4", "--sampling.max_tokens=40", "--run.replay_every=0"]
PATIENCE_MS = 120_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium; on Debian: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def look(browser: Any, tmp_path: Path) -> Iterator[Looking]:
    """At the runs in `tmp_path`. Whatever a page complains of fails the test."""
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.set_default_timeout(PATIENCE_MS)
    with served(tmp_path) as home:
        looking = Looking(page, home)
        yield looking
        page.close()
    assert looking.problems == []


def whole_run(directory: Path, name: str = "whole", steps: int = 6) -> Path:
    home = write_events(
        directory, name, whole_story(steps), f"--run.steps={steps}", "--spec.drafter=both", "--spec.path=new"
    )
    write_step_file(home, steps)
    return home


# ---- every view


def test_every_view_of_a_run_is_drawn(tmp_path: Path, look: Looking) -> None:
    home = whole_run(tmp_path)
    look.go("")
    assert "whole" in look.text("table.runs tbody")
    assert "6 / 6" in look.text("table.runs tbody")
    look.page.click("table.runs a")
    look.page.wait_for_selector("figure svg path.line")
    titles = look.page.eval_on_selector_all("figure h3", "nodes => nodes.map((node) => node.textContent)")
    assert titles == [figure.title for figure in figures_of(read_run(home))]
    assert "mean reward" in look.text(".tiles")
    look.go("run/whole/step/6")
    shown = look.page.eval_on_selector_all("figure h2, figure h3", "nodes => nodes.map((node) => node.textContent)")
    assert shown == ["Requests", "Workers", "Shapes", "Tick costs"]
    assert "balance: may be spent" in look.text()
    drawn = look.page.evaluate(
        "(() => { const c = document.querySelector('canvas'); const p = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; return p.filter((v, i) => i % 4 === 3 && v > 0).length; })()"
    )
    assert drawn > 10_000, "the timeline is empty"
    look.go("run/whole/step/6/completions")
    assert "3 groups, 1 of those shown without signal" in look.text()
    assert "4 of 4 completions" in look.text()
    look.go("run/whole/drafter")
    assert "it pays, then time was up" in look.text()
    assert "1.20 → 2.40" in look.text()
    look.go("run/whole/step/5/completions")
    assert "not kept" in look.text()


def test_lines_are_drawn_to_scale(tmp_path: Path, look: Looking) -> None:
    """Read back through the labels of the axis: the height of a dot is the reward of its step."""
    whole_run(tmp_path)
    look.go("run/whole")
    look.page.wait_for_selector('figure[data-title="Reward"] circle')
    read = """(figure) => ({
        labels: [...figure.querySelectorAll('text.axis[text-anchor=end]')]
            .map((label) => [Number(label.textContent), Number(label.getAttribute('y'))]),
        dots: [...figure.querySelectorAll('circle')].map((c) => Number(c.getAttribute('cy'))),
    })"""
    found = look.page.eval_on_selector('figure[data-title="Reward"]', read)
    (low, low_y), (high, high_y) = found["labels"][0], found["labels"][-1]
    values = [low + (y - low_y) / (high_y - low_y) * (high - low) for y in found["dots"]]
    assert values == pytest.approx([step(number).mean_reward for number in range(1, 7)], abs=0.002)


def test_values_are_read_with_the_keyboard_and_a_range_is_zoomed_to(tmp_path: Path, look: Looking) -> None:
    home = write_events(tmp_path, "many", [event for n in range(1, 41) for event in told_step(n)], "--run.steps=40")
    assert home.is_dir()
    look.go("run/many")
    figure = look.page.locator('figure[data-title="Reward"]')
    svg = figure.locator("svg")
    svg.focus()
    look.page.keyboard.press("ArrowRight")
    look.page.keyboard.press("ArrowRight")
    assert figure.locator(".tip").inner_text().startswith("step 2\nmean reward 0.1371 (mean ")
    assert "step 2, mean reward 0.1371" in figure.locator(".spoken").inner_text()
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    look.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
    look.page.mouse.down()
    look.page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 90)
    look.page.mouse.up()
    first, last = (int(look.page.locator(f'[aria-label="{end} step"]').input_value()) for end in ("first", "last"))
    assert 15 < first < last < 36
    points = "node => node.querySelector('path.line').getAttribute('d').split('L').length"
    assert svg.evaluate(points) == last - first + 1
    look.page.click("button:has-text('All steps')")
    assert svg.evaluate(points) == 40
    look.page.check("text=log scale")
    assert "(log)" in figure.locator("text.name").last.text_content()


def test_curves_and_settings_of_runs_are_compared(tmp_path: Path, look: Looking) -> None:
    whole_run(tmp_path, "a")
    write_events(tmp_path, "b", [event for n in (1, 2) for event in told_step(n)], "--train.learning_rate=0.5")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / EVENTS_FILE).write_text("{}\n")
    look.go("")
    assert "broken" in look.text("table.runs")
    look.page.check('[aria-label="compare a"]')
    look.page.check('[aria-label="compare b"]')
    look.page.wait_for_function("() => document.querySelectorAll('figure path.line').length === 2")
    assert "train.learning_rate" in look.text("main")
    assert "0.0 (default)" in look.text("main")
    look.page.reload()
    look.page.wait_for_function("() => document.querySelectorAll('figure path.line').length === 2")
    assert look.page.is_checked('[aria-label="compare b"]'), "the address holds what is compared"
    look.page.select_option("label:has-text('Curve') select", "policy/entropy")
    assert "policy/entropy" in look.text("figure")
    rows = "nodes => nodes.map((node) => node.textContent)"
    look.page.click("th button:has-text('run')")
    before = look.page.eval_on_selector_all("table.runs tbody th", rows)
    look.page.click("th button:has-text('run')")
    assert look.page.eval_on_selector_all("table.runs tbody th", rows) == before[::-1]


def test_completions_are_searched_coloured_and_read_token_by_token(tmp_path: Path, look: Looking) -> None:
    whole_run(tmp_path)
    look.go("run/whole/step/6/completions/0/1")
    card = look.page.locator("details.completion[open]")
    assert card.count() == 1
    assert "answer 1 with words" in " ".join(card.locator(".tokens").inner_text().split())
    assert card.locator(".tokens span.d1").count() == 2
    look.page.select_option("label:has-text('Colour') select", "entropy")
    assert card.locator(".tokens span.e1").count() == 1
    card.locator(".tokens").focus()
    look.page.keyboard.press("ArrowRight")
    look.page.keyboard.press("ArrowRight")
    assert '"1 ", log-probability −0.4' in card.locator(".token-words").inner_text()
    assert "accepted draft" in card.locator(".token-words").inner_text()
    first = look.page.locator("details.completion").first
    first.locator("summary").click()
    first.locator(".tokens").focus()
    look.page.keyboard.press("End")
    assert "accepted draft, written ahead in the step before" in first.locator(".token-words").inner_text()
    look.page.fill("input[type=search]", "answer 3")
    assert "1 of 4 completions" in look.text()
    look.page.fill("input[type=search]", "")
    look.page.fill('[aria-label="lowest reward"]', "1")
    assert "2 of 4 completions" in look.text()
    look.page.select_option("label:has-text('Ended') select", "length")
    assert "0 of 4 completions" in look.text()


# ---- what a policy writes is text


def test_markup_of_a_policy_is_text_everywhere(tmp_path: Path, look: Looking) -> None:
    home = whole_run(tmp_path)
    for address in ("", "run/whole", "run/whole/step/6", "run/whole/step/6/completions", "run/whole/drafter"):
        look.go(address)
        assert look.page.evaluate("window.pwned") is None
        assert look.page.locator("main img, main script").count() == 0
    look.go("run/whole/step/6/completions")
    assert "<script>window.pwned = 1</script>" in look.text(".question")
    assert "<script>window.pwned = 1</script>" in look.text(".tokens:not(.legend-line)")
    assert "6 tokens are not kept" in look.text(".tokens:not(.legend-line)")
    look.page.goto(report(home).as_uri())
    look.page.wait_for_selector("figure svg path.line")
    look.page.locator("details.completion").first.evaluate("node => { node.open = true; }")
    look.page.wait_for_selector(".completion .tokens")
    assert "<script>window.pwned = 1</script>" in look.text(".completion .tokens")
    assert look.page.evaluate("window.pwned") is None
    assert look.page.locator("img").count() == 0
    titles = look.page.eval_on_selector_all("figure h3", "nodes => nodes.map((node) => node.textContent)")
    assert titles == [figure.title for figure in figures_of(read_run(home))]


# ---- how it is used


def test_a_secret_in_the_address_is_all_that_is_needed(tmp_path: Path, browser: Any) -> None:
    whole_run(tmp_path)
    with served(tmp_path, secret="s3cret") as home:
        page = browser.new_page()
        look = Looking(page, f"{home}s3cret/")  # requests to any other path are problems
        assert "answer 1 with words" in look.every_view("whole", 6)["completions"]
        page.close()
    assert look.problems == []


def test_a_narrow_window_light_and_dark(tmp_path: Path, browser: Any) -> None:
    """Nothing is wider than the window, whose colours are the system's."""
    whole_run(tmp_path)
    paper = r"getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number)"
    with served(tmp_path) as home:
        for scheme, low, high in (("light", 200, 255), ("dark", 0, 60)):
            page = browser.new_page(viewport={"width": 360, "height": 700}, color_scheme=scheme)
            look = Looking(page, home)
            look.every_view("whole", 6)
            assert all(low <= part <= high for part in page.evaluate(paper))
            page.close()
            assert look.problems == []


def test_all_of_it_with_a_keyboard(tmp_path: Path, look: Looking) -> None:
    """From the table of runs to the log-probability of a token."""
    whole_run(tmp_path)
    look.go("")
    press = look.page.keyboard.press
    focused = "() => document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"

    def tab_to(wanted: str) -> None:
        for _ in range(80):
            press("Tab")
            if wanted in str(look.page.evaluate(focused)):
                return
        raise AssertionError(f"{wanted} is not reached")

    tab_to("Skip to the content")
    tab_to("started")
    press("Enter")  # sorts by it, and the focus stays
    assert look.page.get_attribute("th:has-text('started')", "aria-sort") == "ascending"
    tab_to("compare whole")
    press("Space")
    look.page.wait_for_selector("figure path.line")
    press("Shift+Tab")
    tab_to("compare whole")
    tab_to("whole")
    press("Enter")
    look.page.wait_for_selector("h1:has-text('whole')")
    tab_to("Last step")
    press("Enter")
    look.page.wait_for_selector("canvas")
    tab_to("12 requests over time")
    press("ArrowDown")
    assert "first token after 0.2 s" in look.text("figure.wide .spoken")
    look.page.focus("nav a")
    tab_to("Completions")
    press("Enter")
    look.page.wait_for_selector("details.completion")
    tab_to("Tokens of the completion")
    press("End")
    assert "log-probability" in look.text(".token-words")


def test_the_next_step_is_linked_as_soon_as_it_is_there(tmp_path: Path, look: Looking) -> None:
    home = write_events(tmp_path, "grows", [MACHINE, *told_step(1)])
    look.go("run/grows/step/1")
    assert look.page.locator(".links a", has_text="later").count() == 0
    with (home / EVENTS_FILE).open("a") as file:
        file.write(_line(step(2)))
    look.page.click(".links a:has-text('later')")
    look.page.wait_for_selector("h1:has-text('Step 2')")


def test_smoothing_and_log_scale_do_what_they_say(tmp_path: Path, look: Looking) -> None:
    write_events(tmp_path, "few", [event for n in range(1, 7) for event in told_step(n)])
    look.go("run/few")
    figure = look.page.locator('figure[data-title="Reward"]')
    figure.locator("path.line").wait_for()
    assert figure.locator("path.line").count() == 1, "few steps are not smoothed by themselves"
    look.page.select_option("label:has-text('Smoothing') select", "5")
    assert figure.locator("path.faint").count() == 1
    figure.locator("svg").focus()
    look.page.keyboard.press("End")
    mean = sum(step(number).mean_reward for number in range(2, 7)) / 5
    assert f"(mean {mean:.4g})" in figure.locator(".tip").inner_text()
    look.page.check("text=log scale")
    ticks = figure.locator("text.axis[text-anchor=end]").evaluate_all(
        "nodes => nodes.map((n) => Number(n.textContent))"
    )
    assert ticks == [0.1, 0.2, 0.5], "steps of 1, 2 and 5 that enclose 0.1 to 0.29"


# ---- runs of all kinds


def test_a_run_is_watched_while_it_goes_on(tmp_path: Path, look: Looking) -> None:
    """A child process trains; the page follows without being loaded again."""
    command = [sys.executable, "-m", "tlt", "train", str(RECIPE), f"--run.out={tmp_path}", "--run.name=live", *SMALL]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    try:
        look.go("")
        look.page.wait_for_selector("table.runs a")
        look.page.click("table.runs a")
        look.page.wait_for_function("() => /[1-3] of 3 steps/.test(document.querySelector('header').innerText)")
        look.page.evaluate("window.sameDocument = true")
        look.page.wait_for_selector(".state.finished")
        assert "3 of 3 steps" in look.text("header")
        assert look.page.evaluate("window.sameDocument")
        look.page.wait_for_selector('figure[data-title="Reward"] circle:nth-of-type(3)')
        said = look.every_view("live", 3)
        assert "4 groups" in said["completions"]
        assert look.page.locator("details.completion").count() == 0
        look.go("run/live/step/3/completions")
        assert look.page.locator("details.completion").count() == 8
        look.go("run/live/step/3")
        assert "16 requests over time" in str(look.page.get_attribute("canvas", "aria-label"))
    finally:
        child.wait()
    assert child.returncode == 0


def test_a_run_that_was_killed_is_shown_as_far_as_it_got(tmp_path: Path, look: Looking) -> None:
    """kill -9 of a child process in the middle of a run. At first it seems to run; after a long silence it does not."""
    flags = [f"--run.out={tmp_path}", "--run.name=killed", *SMALL, "--run.steps=500"]
    command = [sys.executable, "-m", "tlt", "train", str(RECIPE), *flags]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    try:
        look.go("")
        look.page.wait_for_selector("table.runs a")
        look.page.click("table.runs a")
        look.page.wait_for_function("() => /[2-9] of 500 steps/.test(document.querySelector('header').innerText)")
    finally:
        child.kill()
        child.wait()
    with (tmp_path / "killed" / EVENTS_FILE).open("a") as file:
        file.write('{"time": 1.0, "kind": "StepFin')  # torn, as a power cut leaves it
    said = look.every_view("killed", 2)
    assert "running" in said["runs"]
    assert "its end is not on record" in said["run"]
    assert "Requests" in said["step"]
    look.page.clock.set_fixed_time(time.time() + 3600)
    look.go("run/killed")
    assert look.text(".state") == "silent"
    assert "the last event was 60 min ago; the run was killed, or it waits" in look.text(".now")
    look.go("")
    assert "silent" in look.text("table.runs")


def test_what_is_not_there_is_said(tmp_path: Path, look: Looking) -> None:
    write_events(tmp_path, "killed", some_steps(3))
    look.go("run/killed/step/3")
    assert "were not kept" in look.text()
    look.go("run/killed/step/9")
    assert "step 9 is not over" in look.text("#trouble")
    look.problems = [said for said in look.problems if "404" not in said]  # what was asked for is not there
    look.go("run/gone")
    assert "there is no run 'gone' here" in look.text("#trouble")
    look.problems = [said for said in look.problems if "404" not in said]


def test_lanes_and_requests_of_two_workers(tmp_path: Path, look: Looking) -> None:
    home = write_events(
        tmp_path, "two", [*told_step(1), *two_workers(1), *told_step(2), *two_workers(2), RunFinished(9.0)]
    )
    write_step_file(home, 1, workers=2)
    look.every_view("two", 1)
    for address in ("run/two", "run/two/step/1"):
        look.go(address)
        look.page.locator('figure[data-title="Workers"]').scroll_into_view_if_needed()
        look.page.wait_for_selector('figure[data-title="Workers"] rect')
        assert look.page.locator('figure[data-title="Workers"] rect').count() == 4
    assert "What each worker did in step 1: 6.2% of their time idle" in look.text()
    texts = "nodes => nodes.map((node) => node.textContent)"
    legend = look.page.eval_on_selector_all('figure[data-title="Workers"] .legend li', texts)
    assert legend == ["rolling", "drafting", "idle"]
    look.page.click("summary:has-text('memory of each worker')")
    rows = look.page.eval_on_selector_all("details:has-text('memory of each worker') tr", texts)
    assert rows[1:] == ["062.2 s1 GiB–", "162.7 s1 GiB–"]


@pytest.mark.slow
def test_a_real_run_of_two_workers(tmp_path: Path, look: Looking) -> None:
    pytest.importorskip("ray", reason="several workers need Ray: install tlt-rl[ray]")
    flags = [f"--run.out={tmp_path}", "--run.name=two", "--cluster.workers=2", *SMALL]
    assert main(["train", str(RECIPE), *flags]) == 0
    look.go("run/two/step/3")
    assert look.page.locator('figure[data-title="Workers"] text.axis[text-anchor=end]').count() == 2
    assert "16 requests over time" in str(look.page.get_attribute("canvas", "aria-label"))


def test_a_long_run_stays_within_bounds(tmp_path: Path, look: Looking) -> None:
    """2,000 steps of 64 groups: what is sent, what is kept and what is drawn does not grow with them as they do."""
    home = write_long_run(tmp_path, steps=2000, groups=64, answers=8)
    sent: dict[str, int] = {}
    look.page.on(
        "response", lambda answer: sent.update({answer.url.split("?")[0].rpartition("/")[2]: len(answer.body())})
    )
    look.go("run/long")
    look.page.wait_for_selector('figure[data-title="Reward"] path.line')
    assert sent["run.json"] < 2_500_000
    assert look.nodes() < 5_000
    line = "nodes => Math.max(...nodes.map((node) => node.getAttribute('d').length))"
    assert look.page.eval_on_selector_all("path.line", line) < 20_000
    first = look.ask("data/long/run.json")
    had = f"rows={len(first['steps'])}&lives={first['lives']}&at={first['at']}"
    assert look.ask(f"data/long/run.json?{had}") == {"unchanged": True}
    with (home / EVENTS_FILE).open("a") as file:
        file.write(_line(step(2001)))
    later = look.ask(f"data/long/run.json?{had}")
    assert later["steps"] == [1999, 2000, 2001]
    assert len(json.dumps(later)) < 100_000
    look.page.wait_for_function("() => document.querySelector('header').innerText.includes('2001 of 2001')")
    assert look.heap_mb() < 32
    look.every_view("long", 2000)
    look.go("run/long/step/2000")
    assert "512 requests over time" in str(look.page.get_attribute("canvas", "aria-label"))
    assert look.nodes() < 2_000
    look.go("run/long/step/2000/completions")
    assert look.nodes() < 5_000
    for _ in range(3):  # without loading the page again
        for address in ("run/long", "run/long/step/2000", "run/long/drafter", ""):
            look.move(address)
    assert look.heap_mb() < 32, "views that were left are let go"
    live = LiveRun(home)
    live.refresh()
    kept = [record for record in live.run.events if getattr(record.event, "lengths", ())]
    assert len(kept) == 10


def _line(event: StepFinished) -> str:
    fields = {name: getattr(event, name) for name in type(event).__dataclass_fields__}
    return json.dumps({"time": 3e9, "format": 2, "kind": "StepFinished", "fields": fields}) + "\n"


# ---- without a browser


def test_an_export_is_the_same_page(tmp_path: Path, browser: Any, capsys: pytest.CaptureFixture[str]) -> None:
    whole_run(tmp_path / "runs")
    site = tmp_path / "site"
    assert main(["watch", str(tmp_path / "runs"), "--export", str(site)]) == 0
    assert capsys.readouterr().out.startswith(f"{site}: 1 run; ")
    files = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    threading.Thread(target=files.serve_forever, daemon=True).start()
    page = browser.new_page()
    look = Looking(page, f"http://127.0.0.1:{files.server_port}/")
    for address, words in {
        "": "whole",
        "run/whole": "mean reward",
        "run/whole/step/6": "Tick costs",
        "run/whole/step/6/completions": "4 of 4 completions",
        "run/whole/drafter": "it pays",
    }.items():
        look.go(address)
        assert words in look.text()
    page.close()
    files.shutdown()
    assert look.problems == []
    assert main(["watch", str(tmp_path / "runs"), "--export", str(site)]) == 2
    assert "not an empty directory" in capsys.readouterr().err
    with pytest.raises(TltError, match="holds no run"):
        export(tmp_path / "nothing", tmp_path / "other")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_only_what_is_there_is_answered_and_nothing_can_be_changed(tmp_path: Path) -> None:
    whole_run(tmp_path / "runs")
    (tmp_path / "secret.json").write_text("{}")
    with TestClient(build_app(tmp_path / "runs"), base_url="http://localhost") as client:
        assert client.get("/").status_code == 200
        assert "default-src 'none'" in client.get("/").headers["content-security-policy"]
        assert client.get("/data/runs.json").json()["runs"][0]["name"] == "whole"
        for path in ("/data/../secret.json", "/data/%2e%2e/run.json", "/data/whole/events.jsonl", "/report.js", "/x"):
            assert client.get(path).status_code == 404
        assert client.get("/data/whole/run.json?rows=x&lives=-1&at=9e9").json()["from"] == 0
        for method in ("POST", "PUT", "DELETE"):
            assert client.request(method, "/data/whole/run.json").status_code == 405
        assert client.get("/", headers={"host": "evil.example"}).status_code == 400, (
            "a page elsewhere may ask in our name"
        )
    with TestClient(build_app(tmp_path / "runs", secret="s3cret")) as client:
        assert client.get("/").status_code == 404
        assert client.get("/data/runs.json").status_code == 404
        assert client.get("/s3cret/data/runs.json").status_code == 200
        assert client.get("/s3cret/").text.startswith("<!doctype html>")


def test_the_command_says_where_it_listens_and_ends_when_told(tmp_path: Path) -> None:
    whole_run(tmp_path)
    command = [sys.executable, "-m", "tlt", "watch", str(tmp_path), "--port", "0", "--host", "0.0.0.0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = child.stdout.readline()
    found = re.fullmatch(r"tlt watch: http://[\w.-]+:(\d+)/([\w-]{24})/\n", said)
    assert found
    with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/{found[2]}/") as answer:
        assert answer.status == 200
    child.send_signal(signal.SIGINT)
    assert child.wait() == 0
    assert child.stderr is not None
    assert "Traceback" not in child.stderr.read()
    child.stdout.close()
    child.stderr.close()


def test_mistakes_with_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["watch", str(tmp_path / "no")], "is no directory"),
        (["watch", str(tmp_path), "--port", "http"], "expected a number up to 65535"),
        (["watch", "--run.seed", "1"], "takes no settings, found --run.seed"),
        (["watch", str(tmp_path), "--host", "no.such.host.invalid"], "choose others"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err


# ---- reading on


def test_what_is_read_on_is_what_is_read_at_once(tmp_path: Path) -> None:
    """A run that is resumed, line by line: the numbers are those of the whole file."""
    home = write_events(tmp_path, "shown", [*some_steps(2), *whole_story(5)[:-1]])
    write_events(tmp_path, "shown", [RunResumed(3, "there"), step(4, mean_reward=0.75), RunFinished(1.0)])
    text = (home / EVENTS_FILE).read_bytes()
    (home / EVENTS_FILE).write_bytes(b"")
    live = LiveRun(home)
    assert live.columns.steps == []
    for place in range(0, len(text), 997):
        with (home / EVENTS_FILE).open("ab") as file:
            file.write(text[place : place + 997])
        live.refresh()
        assert live.columns == columns_of(live.run), "columns are carried on from one look to the next"
    whole = [record.event for record in counted(read_run(home).events) if isinstance(record.event, StepFinished)]
    found = [record.event for record in counted(live.run.events) if isinstance(record.event, StepFinished)]
    assert found == whole
    assert live.lives == 2
    assert not live.refresh()
    (home / EVENTS_FILE).write_bytes(text[: text.index(b"\n") + 1])  # cut short: read again from the start
    live.refresh()
    assert (live.lives, len(live.run.events)) == (1, 1)


def test_a_directory_of_one_run_is_that_run(tmp_path: Path) -> None:
    home = whole_run(tmp_path)
    assert list(LiveRuns(home).refreshed()) == ["whole"]
    assert LiveRuns(tmp_path).one("../whole") is None
    assert completion(0, 1)["tokens"] == 3
    assert MARKUP.startswith("<script>")
