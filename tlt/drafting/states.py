"""The policy's hidden states for drafter training: computed again, or kept from the rollout.

Two ways to one `DrafterBatch`, equal by test. `Recompute` runs the policy over the tokens once more: one forward pass
per token in training, nothing in the rollout, and the states are always the newest policy's. `StateKeeper` copies the
engine's states to the host: no forward pass, but (3 + 1)·hidden numbers per token to move and to store, and host work
in every tick, for which the whole rollout waits in the tail. Which is cheaper depends on the policy and the machine:
`measure_states` times both. States of a whole rollout are kept but only some are learned from, so keeping has to be
much cheaper per token.

What always holds: a drafter learns tokens of answers only, and reads the prompt before them as in rollout, except with
kept states, which begin at the prompt's last position. Kept states are used only for the version that wrote them. The
policy is read, never written.
"""
# T packed positions, F = 3·D tapped states, D hidden, R rows of a tick, S positions of a row, P positions of an answer

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tlt.config import RunConfig
from tlt.drafting.buffer import Sample, States
from tlt.engine.features import Features
from tlt.model.device import upload
from tlt.model.slices import forward_packed
from tlt.model.transformer import Transformer
from tlt.spec.align import Aligned, align
from tlt.spec.eagle import TAPS, gather_taps
from tlt.train.drafter import DrafterBatch
from tlt.types import Completion, Key


@dataclass(frozen=True, slots=True)
class SamplePiece:
    """Positions first … end − 1 of a sample, which also has the token at `end`."""

    sample: Sample
    first: int
    end: int

    @classmethod
    def whole(cls, sample: Sample, most: int | None = None) -> "SamplePiece":
        """The answer of a sample, or its first `most` positions, with the prompt before it.

        Kept states do not include the prompt's: there the piece starts at the prompt's last position.
        """
        last, end = sample.answer_start - 1, len(sample.tokens_T) - 1  # of the prompt, of the sample
        first = 0 if sample.states is None else last
        return cls(sample, first, end if most is None else min(end, last + most))

    @property
    def positions(self) -> int:
        return self.end - self.first


def longest_piece(lengths: Sequence[int], total: int) -> int:
    """The longest piece allowed so that all pieces together have at most `total` positions. Only long ones are cut."""
    left = total
    for place, length in enumerate(sorted(lengths)):
        count = len(lengths) - place
        if length * count > left:
            return max(2, left // count)  # a single token holds nothing to draft
        left -= length
    return max(lengths)


def aligned_pieces(pieces: Sequence[SamplePiece]) -> Aligned:
    """Aligns concatenated pieces. Only tokens of answers are learned."""
    tokens_T = torch.cat([piece.sample.tokens_T[piece.first : piece.end] for piece in pieces]).long()
    learn_T = torch.cat([torch.arange(piece.first, piece.end) >= piece.sample.answer_start for piece in pieces])
    last_C = torch.stack([piece.sample.tokens_T[piece.end] for piece in pieces]).long()
    return align(tokens_T, learn_T, [piece.positions for piece in pieces], last_C)


class StateSource(Protocol):
    def batch(self, pieces: Sequence[SamplePiece]) -> DrafterBatch:
        """The pieces, in any order, with the policy's hidden states, on the policy's device."""


class Recompute:
    """Runs the policy over each piece and everything before it."""

    def __init__(self, policy: Transformer, taps: Sequence[int]) -> None:
        self._policy = policy
        self._taps = tuple(taps)

    @torch.no_grad()
    def batch(self, pieces: Sequence[SamplePiece]) -> DrafterBatch:
        device, lengths = self._policy.embed.device, [piece.end for piece in pieces]
        tokens_T = upload(torch.cat([piece.sample.tokens_T[: piece.end] for piece in pieces]).long(), device)
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        spans = [torch.arange(start + p.first, start + p.end) for start, p in zip(starts, pieces, strict=False)]
        kept_T = upload(torch.cat(spans), device)
        out = forward_packed(self._policy, tokens_T, lengths, self._taps)
        taps = [tap.index_select(0, kept_T) for tap in out.taps]
        return DrafterBatch(aligned_pieces(pieces), gather_taps(taps), out.hidden_TD.index_select(0, kept_T))


class Kept:
    """Uses the states kept in the rollout if a sample has them, and computes the others again."""

    def __init__(self, otherwise: Recompute, device: torch.device) -> None:
        self._otherwise = otherwise
        self._device = device

    def batch(self, pieces: Sequence[SamplePiece]) -> DrafterBatch:
        kept = [(piece, piece.sample.states) for piece in pieces if piece.sample.states is not None]
        bare = [piece for piece in pieces if piece.sample.states is None]
        if not kept:
            return self._otherwise.batch(bare)
        features_TF = upload(torch.cat([_rows(piece, states.features_PF) for piece, states in kept]), self._device)
        hidden_TD = upload(torch.cat([_rows(piece, states.hidden_PD) for piece, states in kept]), self._device)
        if bare:
            computed = self._otherwise.batch(bare)
            features_TF = torch.cat((computed.features_TF, features_TF.to(computed.features_TF.dtype)))
            hidden_TD = torch.cat((computed.hidden_TD, hidden_TD.to(computed.hidden_TD.dtype)))
        return DrafterBatch(aligned_pieces([*bare, *(piece for piece, _ in kept)]), features_TF, hidden_TD)


def _rows(piece: SamplePiece, states_PX: Tensor) -> Tensor:
    start = piece.sample.answer_start - 1
    return states_PX[piece.first - start : piece.end - start]


# ---- keeping


class StateKeeper:
    """The engine's `on_features`: copies the hidden states of every running request to the host, up to `limit` bytes.

    A request that does not fit loses its states only. Copies overlap the next tick; `collect` waits for them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.wanted = True  # whether a drafter will learn from requests that begin now
        self._blocks: dict[Key, list[tuple[int, Tensor]]] = {}  # (first position, [S, F + D]) in the order written
        self._lost: set[Key] = set()
        self._copied: torch.cuda.Event | None = None
        self.bytes = 0

    def __call__(self, features: Features) -> None:
        if not self.wanted:
            return
        keys = [req.state.request.key for req in features.reqs]
        self.keep(keys, features.first, (*features.taps, features.hidden))

    @torch.no_grad()
    def keep(self, keys: Sequence[Key], first: Sequence[int], states: Sequence[Tensor]) -> None:
        """Adds the states of each request's positions from `first` on, [R, S, D] each: tapped layers, then the last."""
        block_RSX = torch.cat(tuple(states), dim=-1)  # a copy: the engine's tensors are valid for one tick
        if block_RSX.is_cuda:
            host = torch.empty(block_RSX.shape, dtype=block_RSX.dtype, pin_memory=True)
            block_RSX = host.copy_(block_RSX, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        size = block_RSX[0].nbytes
        for row, key in enumerate(keys):
            self._keep(key, first[row], block_RSX[row], size)

    def _keep(self, key: Key, first: int, rows_SX: Tensor, size: int) -> None:
        if key in self._lost:
            return
        if self.bytes + size > self._limit:
            self._drop(key)
            self._lost.add(key)
        else:
            self._blocks.setdefault(key, []).append((first, rows_SX))
            self.bytes += size

    def _drop(self, key: Key) -> list[tuple[int, Tensor]]:
        blocks = self._blocks.pop(key, [])
        self.bytes -= sum(rows_SX.nbytes for _, rows_SX in blocks)
        return blocks

    def collect(self, completion: Completion) -> States | None:
        """Removes and returns the states of a completion; None if they were lost."""
        return self.take(completion.key, len(completion.prompt_tokens) - 1, len(completion.tokens))

    def take(self, key: Key, start: int, positions: int) -> States | None:
        self._lost.discard(key)
        blocks = self._drop(key)
        if not blocks:
            return None
        if self._copied is not None:
            self._copied.synchronize()
        states_PX = blocks[0][1].new_empty((positions, blocks[0][1].shape[1]))
        known_P = torch.zeros(positions, dtype=torch.bool)
        for first, rows_SX in blocks:  # later blocks overwrite the positions of rejected drafts
            at = slice(first - start, min(first - start + len(rows_SX), positions))
            states_PX[at] = rows_SX[: max(0, at.stop - at.start)]
            known_P[at] = True
        if not bool(known_P.all()):
            return None
        width = states_PX.shape[1] // (TAPS + 1) * TAPS
        return States(states_PX[:, :width].contiguous(), states_PX[:, width:].contiguous())


def keeper_of(policy: Transformer, taps: Sequence[int], config: RunConfig) -> StateKeeper | None:
    """The receiver of the engine's states, by `drafting.states`; None where they are computed again."""
    wanted = config.drafting.states
    if wanted == "auto" and (policy.embed.is_cuda or policy.parallel.size > 1):
        wanted = "recompute"  # an engine with a receiver reads every tick before the next; that cost is not measured
    elif wanted == "auto":
        most = _MEASURED_TOKENS[policy.embed.device.type]
        running, tokens = min(_TAIL, config.engine.rows), min(config.drafting.tokens, most)
        wanted = "keep" if measure_states(policy, taps, running=running, tokens=tokens).keep else "recompute"
    return StateKeeper(config.drafting.buffer_mib * 2**20) if wanted == "keep" else None


# ---- measuring

_TAIL = 16  # running requests in the tail of a rollout
_MEASURED_TOKENS = {"cpu": 128, "cuda": 1024}
_LEARNED_SHARE = 0.25  # most of a rollout's tokens that a step trains the drafter on, as a fraction


@dataclass(frozen=True, slots=True)
class StateCosts:
    """Seconds per token of the two ways, everything included."""

    recompute_s: float  # per token learned from
    keep_s: float  # per token of the rollout

    @property
    def keep(self) -> bool:
        return self.keep_s < _LEARNED_SHARE * self.recompute_s


def measure_states(policy: Transformer, taps: Sequence[int], *, running: int, tokens: int) -> StateCosts:
    """Times both ways on this machine, for answers of `tokens` tokens in batches of `running` requests."""
    tokens = min(tokens, policy.config.max_positions)
    sample = Sample(torch.arange(tokens, dtype=torch.int32) % policy.config.vocab, 1, "", 0)
    recompute = Recompute(policy, taps)

    def keep() -> None:
        keeper, keys = StateKeeper(2**62), [Key(0, row) for row in range(running)]
        states = [policy.embed.detach()[:running, None]] * (TAPS + 1)
        for position in range(tokens - 1):
            keeper.keep(keys, [position] * running, states)
        kept = [replace(sample, states=keeper.take(key, 0, tokens - 1)) for key in keys]
        for one in kept:
            Kept(recompute, policy.embed.device).batch([SamplePiece.whole(one)])

    device = policy.embed.device
    return StateCosts(
        recompute_s=_seconds(lambda: recompute.batch([SamplePiece.whole(sample)]), device) / tokens,
        keep_s=_seconds(keep, device) / (tokens * running),
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of a second run; the first may compile or allocate."""
    for _ in range(2):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
    return seconds
