"""Claims have records: what a page names exists, is of committed code, and says what the page says.

Figures of the README are computed from their records here, so that neither changes without the other.
"""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import tlt

ROOT = Path(tlt.__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
Record = dict[str, Any]


@cache
def record(name: str) -> Record:
    found: Record = json.loads((RECORDS / f"{name}.json").read_text("utf-8"))
    return found


def commit_of(found: Record) -> str:
    return str(found.get("commit") or found.get("machine", {}).get("commit") or "")


def hardware_of(found: Record) -> str:
    """Older records have it in other places."""
    machine, runs = found.get("machine", {}), found.get("runs")
    first = runs[0] if isinstance(runs, list) and runs else {}
    return str(machine.get("device") or found.get("hardware") or found.get("gpu") or first.get("hardware") or "")


def complaints(name: str, found: Record) -> Iterator[str]:
    commit = commit_of(found)
    if not re.match(r"[0-9a-f]{7,40}(,|$)", commit):
        yield f"{name}: its commit is {commit!r}; expected that of committed code"
    if not hardware_of(found):
        yield f"{name}: names no hardware"
    if re.search(r'"(peer_ms|peer_tokens_per_s)": [\d.]', json.dumps(found)) and not found.get("peer"):
        yield f"{name}: compares with another engine and does not say where its figures are from"


def named(text: str) -> list[str]:
    return re.findall(r"benchmarks/results/([\w.]+)\.json", text)


def blocks(text: str) -> list[str]:
    """Paragraphs, and items of a list each for itself."""
    return [block for paragraph in text.split("\n\n") for block in re.split(r"\n(?=- )", paragraph)]


def sections(text: str) -> list[str]:
    return re.split(r"\n(?=## )", text)


def commits_not_named(parts: list[str]) -> list[str]:
    """Records that are linked to where the commit they are of is not named."""
    return [name for part in parts for name in named(part) if commit_of(record(name))[:7] not in unlinked(part)]


def unlinked(block: str) -> str:
    """A file's name is no word of the text."""
    return re.sub(r"\]\([^)]*\)", "]", block)


# ---- records


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_is_of_committed_code_on_named_hardware(path: Path) -> None:
    assert list(complaints(path.stem, record(path.stem))) == []


def test_a_record_that_does_not_say_what_it_is_of_is_noticed() -> None:
    machine = {"device": "CPU", "commit": "8dfdb9d-dirty"}
    assert len(list(complaints("x", {"machine": machine}))) == 1
    assert len(list(complaints("x", {"machine": machine | {"commit": "unknown"}}))) == 1
    assert len(list(complaints("x", {"note": "tried"}))) == 2
    compared = {"machine": machine | {"commit": "8dfdb9d"}, "sections": {"step": [{"peer_ms": 4.76}]}}
    assert len(list(complaints("x", compared))) == 1
    assert list(complaints("x", compared | {"peer": {"engine": "vLLM"}})) == []


def git(*words: str, asked: str = "") -> str:
    return subprocess.run(["git", *words], cwd=ROOT, input=asked, capture_output=True, text=True, check=False).stdout


def test_commits_of_records_are_in_the_history() -> None:
    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("the whole history is not here")
    found = {commit_of(record(path.stem)).partition(",")[0] for path in RECORDS.glob("*.json")}
    asked = "\n".join(f"{commit}^{{commit}}" for commit in sorted(found))
    assert [line for line in git("cat-file", "--batch-check", asked=asked).splitlines() if " commit " not in line] == []


# ---- pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_records_that_a_page_names_exist(page: Path) -> None:
    assert [name for name in named(page.read_text("utf-8")) if not (RECORDS / f"{name}.json").exists()] == []


def orphans(kept: list[str], pages: list[str]) -> list[str]:
    wanted = {name for page in pages for name in named(page)}
    return [name for name in kept if name not in wanted]


def test_every_record_is_named_by_a_page() -> None:
    kept = [path.stem for path in RECORDS.glob("*.json")]
    assert orphans(kept, [page.read_text("utf-8") for page in PAGES]) == []
    assert orphans(["x", "y"], ["[y](../benchmarks/results/y.json)"]) == ["x"]


def test_the_lab_page_stays_short() -> None:
    assert len((ROOT / "docs" / "lab.md").read_text("utf-8").split()) <= 3000


def test_the_readme_names_the_commit_of_every_record() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(named(text)) >= 7
    assert commits_not_named(blocks(text)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_section_of_any_page_names_the_commits_of_its_records(page: Path) -> None:
    assert commits_not_named(sections(page.read_text("utf-8"))) == []


def test_a_record_without_its_commit_is_noticed() -> None:
    link = "[record](benchmarks/results/speculation_c_7b_c269349_h200.json)"
    assert commits_not_named(blocks(f"Fast ({link}, c269349).")) == []
    assert commits_not_named(blocks(f"Fast ({link}).\n\nAt c269349.")) == ["speculation_c_7b_c269349_h200"]


# ---- figures


def seconds(found: Record, variant: str) -> float:
    return float(next(run["makespan_s"] for run in found["runs"] if run["variant"] == variant))


def of_time(found: Record, variant: str, field: str) -> float:
    return float(next(row[field] for row in found["time"] if row["variant"] == variant))


def warm(found: Record) -> list[float]:
    """Seconds and speed-up of a warm tuner's rollout."""
    return [seconds(found, WARM), of_time(found, WARM, "speedup")]


def ratios(found: Record) -> list[float]:
    return [run["plain s"] / run["tuner, warm s"] for run in found["rollouts"]["runs"]]


def with_tlt(found: Record) -> Record:
    """Totals of the training bench."""
    rows: list[Record] = found["sections"]["totals"]["records"]
    return next(row for row in rows if row["variant"] == "tlt")


def simulated(found: Record) -> list[float]:
    return [one["compared"]["speedup"]["measured"] for one in (found, *found["earlier_runs"])]


def medians(found: Record, case: str) -> list[float]:
    return [found["never_slower"][case][name] for name in ("tuner", "warm_tuner")]


def printed(found: Record, *ways: str) -> list[float]:
    return [second for way in ways for second in found["rollout_s"][way]]


C, A, B = (f"speculation_{name}_h200" for name in ("c_7b_c269349", "a_7b_c269349", "b_7b_4ff056a"))
VLLM, QWEN = "beside_vllm_c_7b_f6c738e_h200", "train_gsm8k_qwen_1.5b_1b67285_h200"
USELESS, TINY = "speculation_b_never_useless_7b_222edd7_h200", "simulated_tiny_cpu"
WARM, OVER = "tuner, warm", ("rollout_speedup", "speedup")

# Words of the README, and the figures that its record has for them.
FIGURES: list[tuple[str, str, Callable[[Record], list[Any]]]] = [
    (QWEN, "first {} steps", lambda r: [with_tlt(r)["steps"]]),
    (QWEN, "rollout **{:.2f} ×**, whole step **{:.2f} ×**", lambda r: [with_tlt(r)[of] for of in OVER]),
    (QWEN, "drafter training ({:.1f} % of the time)", lambda r: [100 * with_tlt(r)["drafting_share"]]),
    (QWEN, "(tokens per verification) of {:.2f}", lambda r: [with_tlt(r)["accept_last"]]),
    (C, "median {} tokens, longest {:,}", lambda r: [r["answers"][of] for of in ("median", "max")]),
    (C, "| {:.1f} s | {:.1f} s, **{:.2f} ×**", lambda r: [seconds(r, "plain"), *warm(r)]),
    (C, "plain decoding ends after {:.1f} s, TLT after {:.1f} s", lambda r: [seconds(r, "plain"), warm(r)[0]]),
    (C, "{:.1f} tokens in 1,000 of the", lambda r: [r["divergence"][WARM]["per_1000_tokens"]]),
    (C, "of the {:.2f} × rollout", lambda r: [warm(r)[1]]),
    (
        VLLM,
        "vLLM plain {} s, **vLLM with the same drafter {} to {} s** | {} s | **{} s**",
        lambda r: printed(r, "vllm, plain", "vllm, our drafter", "tlt, plain", "tlt, warm"),
    ),
    (VLLM, "{} s plainly and {} s with TLT", lambda r: printed(r, "tlt exact, plain", "tlt exact, with speculation")),
    (B, "(median {} tokens), six seeds", lambda r: [r["answers"]["median"]]),
    (B, "**{:.2f} ×** ({:.2f} to {:.2f})", lambda r: [r["rollouts"]["speedup"], min(ratios(r)), max(ratios(r))]),
    (A, "hard to predict | 1 | **{:.2f} ×**", lambda r: [warm(r)[1]]),
    (USELESS, "learned nothing | 1 | **{:.3f} ×**", lambda r: [medians(r, "useless")[1]]),
    (TINY, "{:.2f} to {:.2f} ×", lambda r: [min(simulated(r)), max(simulated(r))]),
]


@pytest.mark.parametrize(("name", "words", "figures"), FIGURES, ids=[words for _, words, _ in FIGURES])
def test_the_readme_says_what_its_record_says(name: str, words: str, figures: Callable[[Record], list[Any]]) -> None:
    assert words.format(*figures(record(name))) in readme()
    assert f"results/{name}.json" in readme()


def readme() -> str:
    return " ".join((ROOT / "README.md").read_text("utf-8").split())


WATCHING = "watching_6c2fe5d_cpu"


def test_the_cost_of_recording_is_that_of_its_record() -> None:
    text = " ".join((ROOT / "docs" / "watch.md").read_text("utf-8").split())
    turns, steps = record(WATCHING)["turns"], record(WATCHING)["steps"]
    for variant, words in {"no step files": "no step files", "recorded": "as it is", "watched": "watched"}.items():
        spent = sorted(turn["process_s"] for turn in turns[variant])
        assert f"| {words} | {median(spent):.1f} ({spent[0]:.1f} to {spent[-1]:.1f}) |" in text
    files, events, whole = (
        median(turn[kind] for turn in turns["recorded"]) / steps for kind in ("step files", "events", "process_s")
    )
    told = f"{1000 * files:.1f} ms of processor time per step for the step file and {1000 * events:.1f} ms for events"
    assert f"{told}, together {(files + events) / whole:.2%} of a step".replace("%", " %") in text
    assert (files + events) / whole < 0.005


def test_no_speed_up_of_the_readme_is_left_unchecked() -> None:
    words_said = " ".join(words.format(*figures(record(name))) for name, words, figures in FIGURES)
    checked = set(re.findall(r"\d+\.\d+", words_said))
    claimed = set(re.findall(r"(\d+\.\d+)\**(?= ×)", readme()))
    assert claimed <= checked
