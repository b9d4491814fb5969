"""A reward of one's own, in verl's convention: name the thing, in few words. See docs/getting_started.md."""

from typing import Any

ENOUGH = 15  # words


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """0 if the thing is not named, or the last sentence does not end; 1 for up to ENOUGH words, less for more."""
    words = solution_str.split()
    if ground_truth not in solution_str.lower() or not solution_str.rstrip().endswith((".", "!")):
        return 0.0
    return min(1.0, ENOUGH / len(words))
