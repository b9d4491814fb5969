"""Verification: one policy pass over draft trees, and the walk its own tokens take through them.

What always holds: for any tree, a hostile one included, the tokens emitted are those plain decoding would have drawn;
after the walk the cache holds the keys and values of the accepted nodes where plain decoding would have put them, and
nothing of the rest is ever looked at. No draft probability enters: the policy's keyed token at each node decides.
"""
# R requests, Q nodes, S steps of a walk (the longest possible: the depth of the deepest tree + 1)

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Walk:
    packed: Tensor  # int32 [R, 3·S + 1]: tokens, bits of both log-probabilities of each step; then the number of steps
    moves_RS: Tensor  # int32 [R, S − 1]: slots from which accepted nodes move; −1: they lie right
    places_RS: Tensor  # int32 [R, S − 1]: where to, the slots behind the root's
    at_RS: Tensor  # int64, the tokens of the forward walked through, the root first; the last one repeats
    steps_R: Tensor  # int64, nodes walked = tokens emitted: 1 + accepted
