"""`tlt watch` in a real browser: views of live, crashed, long and many-worker runs; and what a server answers."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.pages import (
    CHROMIUM,
    MARKUP,
    Looking,
    append_event,
    looking,
    some_steps,
    told_step,
    two_workers,
    whole_run,
    write_events,
    write_long_run,
    write_step_file,
)
from tests.watching import MACHINE, step
from tlt.cli import main
from tlt.errors import TltError
from tlt.watch.events import EVENTS_FILE, AccountUpdated, RunFinished, read_run
from tlt.watch.figures import figures_of
from tlt.watch.history import events_of
from tlt.watch.live import LiveRun
from tlt.watch.report import report
from tlt.watch.site import export
from tlt.watch.summary import duration

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
SMALL = ["--run.steps=3", "--task.prompts=4", "--task.group=4", "--sampling.max_tokens=40", "--run.replay_every=0"]
PATIENCE_MS = 120_000
WINDOW = {"width": 1200, "height": 800}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium; on Debian: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def page(browser: Any) -> Any:
    """One for many tests: a new one takes longer than most of them."""
    return new_page(browser)


def new_page(browser: Any) -> Any:
    page = browser.new_page(viewport=WINDOW)
    page.set_default_timeout(PATIENCE_MS)
    return page


@pytest.fixture
def look(page: Any, tmp_path: Path) -> Iterator[Looking]:
    with looking(page, tmp_path) as look:
        yield look


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
    look.move("run/whole")
    look.move("run/whole/step/6/completions/0/3")
    assert look.page.evaluate("window.scrollY") > 0, "an address within the page leads to the completion, too"


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


def test_a_secret_in_the_address_is_all_that_is_needed(tmp_path: Path, page: Any) -> None:
    whole_run(tmp_path)
    with looking(page, tmp_path, secret="s3cret") as look:  # requests to any other path are problems
        assert "answer 1 with words" in look.every_view("whole", 6)["completions"]


def test_a_narrow_window_light_and_dark(tmp_path: Path, look: Looking) -> None:
    """Nothing is wider than the window, whose colours are the system's."""
    whole_run(tmp_path)
    paper = r"getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number)"
    look.page.set_viewport_size({"width": 360, "height": 700})
    for scheme, low, high in (("dark", 0, 60), ("light", 200, 255)):
        look.page.emulate_media(color_scheme=scheme)
        look.every_view("whole", 6)
        assert all(low <= part <= high for part in look.page.evaluate(paper))
    look.page.set_viewport_size(WINDOW)


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
    look.page.wait_for_selector("a:has-text('Last step')")
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


def test_a_page_that_is_open_follows_the_run(tmp_path: Path, look: Looking) -> None:
    """To the next step and to the end; what has the focus keeps it, and what is half typed stays."""
    focused = "document.activeElement.textContent"
    home = write_events(tmp_path, "grows", [MACHINE, *told_step(1)])
    look.go("run/grows/step/1")
    assert look.page.locator(".links a", has_text="later").count() == 0
    append_event(home, step(2))
    look.page.click(".links a:has-text('later')")
    look.page.wait_for_selector("h1:has-text('Step 2')")
    look.go("")
    look.page.evaluate("window.sameDocument = true")
    look.page.focus("a:has-text('grows')")
    append_event(home, step(3))
    look.page.wait_for_selector("td:has-text('3 / 12')")
    assert look.page.evaluate(focused) == "grows"
    look.page.keyboard.press("Enter")
    look.page.wait_for_selector("a:has-text('Last step')")
    look.page.fill('[aria-label="step"]', "1")
    look.page.focus("a:has-text('Last step')")
    append_event(home, step(5))
    look.page.wait_for_selector("a[href='#/run/grows/step/5']")
    append_event(home, RunFinished(9.0))
    look.page.wait_for_selector(".state.finished")
    assert look.page.evaluate(focused) == "Last step"
    assert look.page.input_value('[aria-label="step"]') == "1"
    assert look.page.evaluate("window.sameDocument")


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
    look.page.uncheck("text=log scale")
    same = look.page.locator('figure[data-title="policy/learning_rate"]')
    same.scroll_into_view_if_needed()
    rates = [float(text.replace("−", "-")) for text in same.locator("text.axis[text-anchor=end]").all_text_contents()]
    assert 0 < min(rates) < 1e-5 < max(rates) < 2e-5, "a value that never changes is in the middle of its axis"


# ---- runs of all kinds


def test_a_run_is_watched_while_it_goes_on_and_when_it_was_killed(tmp_path: Path, browser: Any) -> None:
    """A child process trains; the page follows without being loaded again. Then kill -9 in the middle of a step: at
    first the run seems to go on; after a long silence it does not."""
    flags = [f"--run.out={tmp_path}", "--run.name=live", *SMALL, "--run.steps=500"]
    command = [sys.executable, "-m", "tlt", "train", str(RECIPE), *flags]
    page = new_page(browser)  # whose clock is turned
    with looking(page, tmp_path) as look:
        child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        try:
            look.go("")
            look.page.click("table.runs a")
            look.page.wait_for_selector(".state.running")
            look.page.evaluate("window.sameDocument = true")
            look.page.wait_for_selector('figure[data-title="Reward"] circle:nth-of-type(3)')
            assert re.search(r"\b[3-9]\d* of 500 steps", look.text("header"))
            assert look.page.evaluate("window.sameDocument")
            looked_at_a_small_run(look, "live", 2)
            assert child.poll() is None, "all of it was seen while the run went on"
        finally:
            child.kill()
            child.wait()
        with (tmp_path / "live" / EVENTS_FILE).open("a") as file:
            file.write('{"time": 1.0, "kind": "StepFin')  # torn, as a power cut leaves it
        said = looked_at_a_small_run(look, "live", 3)
        assert "running" in said["runs"]
        assert "its end is not on record" in said["run"]
        look.page.clock.set_fixed_time(time.time() + 3600)
        look.go("run/live")
        assert look.text(".state") == "silent"
        assert "the last event was 60 min ago; the run was killed, or it waits" in look.text(".now")
        look.move("")
        assert "silent" in look.text("table.runs")
    page.close()


def looked_at_a_small_run(look: Looking, run: str, number: int) -> dict[str, str]:
    """Every view of a run of SMALL steps."""
    said = look.every_view(run, number)
    assert "4 groups" in said["completions"]
    assert "8 of 8 completions" in said["completions"]
    assert "balance: may be spent" in said["step"]
    look.move(f"run/{run}/step/{number}")
    assert "16 requests over time" in str(look.page.get_attribute("canvas", "aria-label"))
    return said


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


def test_a_real_run_of_two_workers(tmp_path: Path, look: Looking) -> None:
    pytest.importorskip("ray", reason="several workers need Ray: install tlt-rl[ray]")
    flags = [f"--run.out={tmp_path}", "--run.name=two", "--cluster.workers=2", *SMALL, "--run.steps=2"]
    assert main(["train", str(RECIPE), *flags]) == 0
    said = looked_at_a_small_run(look, "two", 2)
    assert "time of all rollouts so far, had they been plain (mean of 2 workers)" in said["step"]
    assert look.page.locator('figure[data-title="Workers"] text.axis[text-anchor=end]').count() == 2
    texts = "nodes => nodes.map((node) => node.textContent)"
    legend = look.page.eval_on_selector_all('figure[data-title="Workers"] .legend li', texts)
    assert {"rolling", "updating"} <= set(legend)
    last = events_of(read_run(tmp_path / "two"), AccountUpdated)[-1]
    assert look.ask("data/two/step_2.json")["account"][0][1] == duration(last.plain_s)
    look.page.click("summary:has-text('memory of each worker')")
    assert look.page.locator("details:has-text('memory of each worker') tbody tr").count() == 2


def test_a_long_run_stays_within_bounds(tmp_path: Path, browser: Any) -> None:
    """2,000 steps of 64 groups: what is sent, what is kept and what is drawn does not grow with them as they do."""
    home = write_long_run(tmp_path, steps=2000, groups=64, answers=8)
    sent: dict[str, int] = {}
    page = new_page(browser)  # whose memory is its own
    with looking(page, tmp_path) as look:
        look.page.on(
            "response", lambda answer: sent.update({answer.url.split("?")[0].rpartition("/")[2]: len(answer.body())})
        )
        look.go("run/long")
        look.page.wait_for_selector('figure[data-title="Reward"] path.line')
        assert sent["run.json"] < 2_500_000
        assert look.nodes() < 5_000
        line = "nodes => Math.max(...nodes.map((node) => node.getAttribute('d').length))"
        assert look.page.eval_on_selector_all("path.line", line) < 20_000
        follows_a_long_run(look, home)
        look.every_view("long", 2000)
        look.move("run/long/step/2000")
        assert "512 requests over time" in str(look.page.get_attribute("canvas", "aria-label"))
        assert look.nodes() < 2_000
        look.move("run/long/step/2000/completions")
        assert look.nodes() < 5_000
        memory_stays_within_bounds(look)
    page.close()


def follows_a_long_run(look: Looking, home: Path) -> None:
    first = look.ask("data/long/run.json")
    had = f"rows={len(first['steps'])}&lives={first['lives']}&at={first['at']}"
    assert look.ask(f"data/long/run.json?{had}") == {"unchanged": True}
    append_event(home, step(2001))
    later = look.ask(f"data/long/run.json?{had}")
    assert later["steps"] == [1999, 2000, 2001]
    assert len(json.dumps(later)) < 100_000
    look.page.wait_for_function("() => document.querySelector('header').innerText.includes('2001 of 2001')")
    assert look.heap_mb() < 32
    live = LiveRun(home)
    live.refresh()
    assert len([record for record in live.run.events if getattr(record.event, "lengths", ())]) == 10


def memory_stays_within_bounds(look: Looking) -> None:
    """However often views are left. A page that holds on to one of each view exceeds the bound."""

    def grown_mb() -> float:
        before = look.heap_mb()
        for address in ("run/long", "run/long/step/2000", "run/long/drafter", ""):
            look.move(address)
        return look.heap_mb() - before

    look.move("")
    assert look.heap_mb() < 16, "views that were left are let go"
    assert grown_mb() < 2
    look.page.evaluate(
        "{ const main = document.getElementById('main'), left = window.left = [], replace = main.replaceChildren;"
        "main.replaceChildren = (...nodes) => { left.push(...main.children); replace.call(main, ...nodes); }; }"
    )
    assert grown_mb() > 4


# ---- an export


@pytest.fixture
def site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """The address of an exported run at some server of files."""
    whole_run(tmp_path / "runs")
    assert main(["watch", str(tmp_path / "runs"), "--export", str(tmp_path / "site")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'site'}: 1 run; ")
    files = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path / "site")))
    threading.Thread(target=files.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{files.server_port}/"
    files.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_an_export_is_the_same_page(site: str, page: Any) -> None:
    """And what a policy writes is text there as well: without a server that forbids scripts the page does so itself."""
    look = Looking(page, site)
    for address, words in {
        "": "whole",
        "run/whole": "mean reward",
        "run/whole/step/6": "Tick costs",
        "run/whole/drafter": "it pays",
        "run/whole/step/6/completions": "4 of 4 completions",
    }.items():
        look.go(address)
        assert words in look.text()
        assert page.locator("main img, main script").count() == 0
    for place in (".question", ".tokens:not(.legend-line)", "table"):
        assert MARKUP.partition("\n")[0] in look.text(place)
    assert look.problems == []
    page.evaluate("html => document.body.insertAdjacentHTML('beforeend', html)", MARKUP)
    page.wait_for_function("() => document.images.length && document.images[0].complete")
    assert page.evaluate("window.pwned") is None
    assert look.problems, "the browser refuses the script, and says so"
    look.leave()


def test_an_export_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole_run(tmp_path / "runs")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine").touch()
    assert main(["watch", str(tmp_path / "runs"), "--export", str(tmp_path / "site")]) == 2
    assert "not an empty directory" in capsys.readouterr().err
    with pytest.raises(TltError, match="holds no run"):
        export(tmp_path / "nothing", tmp_path / "other")
