"""The glossary: replaced identifiers do not come back, and a class name is defined once in the package.

Checks names in code only (tokens and module names). Comments, docstrings and strings are free text.
"""

import ast
import io
import keyword
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import tlt

ROOT = Path(tlt.__file__).parents[1]
FOLDERS = ("tlt", "tests", "benchmarks", "examples")

# Replaced identifier → the field's word.
REPLACED = {
    "Stay": "RunningRequest",
    "Flight": "InFlightTick",
    "Drawn": "TickOutput",
    "Landing": "OutputBuffer",
    "PageBook": "PageAllocator",
    "PrefixShelf": "PrefixCache",
    "Census": "PageStats",
    "census": "page_stats",
    "Thrift": "CapturePolicy",
    "Stand": "BatchSizeState",
    "Ledger": "Budget",
    "ledger": "budget",
    "Outlook": "PrecapturePlan",
    "outlook": "precapture_plan",
    "Corrections": "CostResiduals",
    "corrections": "residuals",
    "Newcomers": "IngestCost",
    "TunerPolicy": "ShapePolicy",
    "chooser": "shape_policy",
    "chooser_of": "shape_policy_of",
    "Lesson": "TickFeedback",
    "Roll": "LifecycleQueue",
    "Grove": "TreeBuilder",
    "grove": "builder",
    "Soil": "DraftInputs",
    "soil": "inputs",
    "Planted": "StartedTrees",
    "plant": "start_trees",
    "deepen": "expand",
    "GrownTrees": "BuiltTrees",
    "Keeper": "HiddenStateSink",
    "NoKeeper": "NoSink",
    "Part": "Segment",
    "play": "run_segments",
    "MOST_HELD_BACK": "MAX_REMAINING_BIAS",
    "Sharpness": "BetaCalibrator",
    "Light": "QuantizedMatrix",
    "lighten": "quantize",
    "reads_light": "reads_quantized",
    "Weighed": "PreNormed",
    "twin": "dispatch",
    "Fellows": "Peers",
    "fellows": "peers",
    "Crew": "ActorGroup",
    "crew": "actors",
    "Desk": "SessionLeader",
    "GradientDesk": "SessionLeader",
    "desk": "coordinator or session leader",
    "seat": "worker_id",
    "seats": "worker_ids",
    "Beat": "Heartbeat",
    "beat": "heartbeat",
    "RollReport": "WorkerRolloutReport",
    "WorkerRing": "AllReduceGroup",
    "RingBroken": "AllReduceBroken",
    "Meeting": "Rendezvous",
    "Parted": "LeftSession",
    "Lifeline": "RayLiveness",
    "lifeline": "liveness",
    "mail": "inbox",
    "bury": "drop",
    "recall": "load_prior",
    "recall_worth": "prior_weight",
    "foresee": "choose_next",
    "once_s": "one_off_s",
    "foreseen": "expected",
    "booked": "charged",
    "rehearse": "warm_up",
    "Walked": "AcceptResult",
    "Track": "RankHits",
    "spoilt": "diverged",
    "DrafterSpoilt": "DrafterDiverged",
    "strayed": "since_good",
    "wish": "requested",
    "buried": "lost",
    "stay": "req",
    "to_come": "remaining_ticks",
    "due_s": "host_extend_s",
    "forever": "infinite_ticks",
    "SUPPOSED": "ASSUMED_HIT_FACTORS",
    "TAKEN_IN": "PASS_SIZES",
    "MUCH_ROOM": "PROMPT_MEAN_SIZES",
    "grove_of": "builder_of",
    "taking_in": "extend_segment",
    "caught_up_s": "draft_extend_s",
    "looked_into": "compared_rows",
    "Recalled": "EnteringRows",
    "AheadDrafting": "AheadTexts",
    "SuffixDrafter": "SuffixIndex",
    "NoSink": "HiddenStateSink",
}

# Class names that several modules of the package still define. Remove a name here when it is unique.
REPEATED = frozenset({"Piece"})


def identifiers(source: str) -> dict[str, int]:
    """Every identifier of a module, with the line of its first use."""
    found: dict[str, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            found.setdefault(token.string, token.start[0])
    return found


def replaced_words(path: str, source: str) -> list[str]:
    """A complaint for each replaced identifier in a module and its name. A leading underscore does not matter."""
    stem = Path(path).stem
    named = {stem.removeprefix("test_"): 1, **identifiers(source)}
    lines = {name.strip("_"): line for name, line in named.items()}
    return [f"{path}:{lines[word]}: {word}; use {REPLACED[word]}" for word in REPLACED if word in lines]


def classes(source: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def repeated_classes(sources: Mapping[str, str]) -> set[str]:
    """Names of classes that more than one module defines, or one module twice."""
    names = [name for source in sources.values() for name in classes(source)]
    return {name for name in names if names.count(name) > 1}


def sources(folders: Iterable[str]) -> dict[str, str]:
    files = (file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))
    return {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}


def test_replaced_identifiers_do_not_come_back() -> None:
    found = [line for path, source in sources(FOLDERS).items() for line in replaced_words(path, source)]
    assert found == [], "\n".join(found)


def test_class_names_are_unique_in_the_package() -> None:
    repeated = repeated_classes(sources(["tlt"]))
    assert repeated - REPEATED == set(), "rename one of each: a class name is defined once in the package"


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("tlt/a.py", "class Stay:\n    pass\n", ["tlt/a.py:1: Stay; use RunningRequest"]),
        ("tlt/a.py", "x = 1\nself._twin = 3\n", ["tlt/a.py:2: twin; use dispatch"]),
        ("tlt/spec/grove.py", "", ["tlt/spec/grove.py:1: grove; use builder"]),
        ("tlt/a.py", "# the stay of a twin\nlabel = 'twin'\n", []),
        ("tlt/a.py", "stayed = 1\n", []),
    ],
)
def test_a_replaced_identifier_is_noticed(path: str, source: str, expected: list[str]) -> None:
    assert replaced_words(path, source) == expected


def test_a_repeated_class_is_noticed() -> None:
    assert repeated_classes({"a": "class A: ...\nclass B: ...", "b": "class A: ..."}) == {"A"}
    assert repeated_classes({"a": "class A: ...\nclass A: ..."}) == {"A"}
