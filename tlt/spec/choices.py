"""Which shapes a tuner has to choose from. Pure numbers: whether one pays is measured."""

from collections.abc import Iterable, Sequence
from itertools import product

from tlt.spec.shape import OFF, Shape

_FILLED = 1.25  # a tree may have a little more room than nodes come to be
_SHARED_WIDTH = 2
_LEAST_SHARE, _MOST_SHARE = 0.25, 0.75  # of the nodes that a tree may have


def candidates(
    drafters: Iterable[Iterable[str]],
    depths: Iterable[int],
    widths: Iterable[int],
    verifies: Iterable[int],
    shares: Sequence[float] = (),
) -> tuple[Shape, ...]:
    """Off, and every sensible shape: a tree can hold one branch of full depth, and has no room it could never fill.

    Where the requests of one drafter share what is verified, a tree can hold all that is grown, and on average holds
    clearly less, but no small part; and the third guess of a token is none of the likeliest. Such trees have room for a
    power of two, which costs nothing: what verifies them then serves all that share as much.
    """
    found, most = {OFF}, max(verifies := tuple(verifies), default=1)
    sets = {tuple(sorted(names)) for names in drafters}
    for names, depth, width in product(sets, depths, widths):
        room = 1 + width * depth * len(names)  # a level keeps `width` nodes
        if names and width >= 1:
            fitting = [verify for verify in verifies if depth < verify <= _FILLED * room]
            found.update(Shape(names, depth, width, verify) for verify in fitting)
        padded = 1 << (room - 1).bit_length()
        if len(names) == 1 and 1 <= width <= _SHARED_WIDTH and padded <= most:
            sensible = [share for share in shares if _LEAST_SHARE * room <= share <= _MOST_SHARE * room]
            found.update(Shape(names, depth, width, padded, float(share)) for share in sensible)
    return tuple(sorted(found))
