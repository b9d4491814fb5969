"""What a tuner may come to use: at every batch size the best shape, and what would be if drafters guessed worse.

What was measured of a drafter holds for the answers it was measured on; those that are left in a rollout's tail are
long because they are odd, and harder to guess. Many shapes are within a few percent of the best, so a few of them serve
whatever comes. What always holds: of whatever is supposed, something is named at each size that loses little, or
plain decoding is best. Pure reckoning.
"""

from collections.abc import Mapping, Sequence

from tlt.spec.shape import Shape

SUPPOSED = (0.88, 0.76)  # times as many guesses that are right
_NEAR = 0.03  # that what is named already may lose


def precapture_plan(
    shapes: Sequence[Shape],
    known: Sequence[int],
    seconds: Mapping[int, Sequence[float]],
    lengths: Sequence[Sequence[float]],
) -> list[tuple[Shape, int]]:
    """Shapes and batch sizes, what is likeliest first. `known`: places of those something is known about; `seconds` of
    a tick of each shape, by size; `lengths`: its accept lengths as they are known, then as they are supposed."""
    named: dict[int, list[int]] = {size: [] for size in seconds}
    found = []
    for supposed in lengths:
        for size, costs in seconds.items():
            rates = {place: supposed[place] / costs[place] for place in known}
            best = max(rates, key=rates.__getitem__)
            near = any(rates[place] >= (1.0 - _NEAR) * rates[best] for place in named[size])
            if not shapes[best].off and not near:
                named[size].append(best)
                found.append((shapes[best], size))
    return found
