"""The drafter's training data: completions in host memory, each with the policy version that wrote it.

What always holds: the bytes held never exceed the bound; the oldest samples are dropped first, of these the shortest; a
batch mixes samples of the newest version (the first to arrive are short) with earlier ones (drawn in proportion to
their length, so mostly long) in the configured ratio, as far as there are both. Hidden states are kept for the newest
version only. The order of draws is a function of the seed. Knows tokens and bytes, not training.
"""
# T tokens of a sample, P positions with states, F = 3·D tapped states, D hidden

import hashlib
import heapq
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tlt.config import DraftingSettings
from tlt.errors import TltError
from tlt.train.restore import expect_keys

_RECORD_BYTES = 512  # of a sample besides its tensors: objects, names, entries in lists
_HELD_SHARE = 8  # at most one prompt in 8 is held out


@dataclass(frozen=True, slots=True)
class States:
    """The policy's hidden states at positions answer_start − 1 … T − 2, on the host. The last token has none."""

    features_PF: Tensor  # residual stream after each tapped layer
    hidden_PD: Tensor  # after the final norm


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the policy's answer to it."""

    tokens_T: Tensor  # int32, on the host
    answer_start: int
    prompt_id: str
    version: int  # of the policy that wrote it
    states: States | None = None

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int], prompt_id: str, version: int) -> "Sample":
        return cls(torch.tensor([*prompt, *answer], dtype=torch.int32), len(prompt), prompt_id, version)

    def __post_init__(self) -> None:
        if not 1 <= self.answer_start <= len(self.tokens_T) - 2:
            raise TltError(
                f"an answer from token {self.answer_start} of {len(self.tokens_T)}; expected a prompt of one token at "
                "least and an answer of two: there is nothing to draft in shorter ones"
            )

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens_T) - self.answer_start

    @property
    def bytes(self) -> int:
        states = 0 if self.states is None else self.states.features_PF.nbytes + self.states.hidden_PD.nbytes
        return _RECORD_BYTES + self.tokens_T.nbytes + states


class Buffer:
    """`add` samples as they come, `draw` batches of them."""

    def __init__(self, settings: DraftingSettings, *, seed: int = 0) -> None:
        self._settings = settings
        self._limit = settings.buffer_mib * 2**20
        self._seed = seed
        self._samples: dict[int, Sample] = {}  # by serial number
        self._leaving: list[
            tuple[int, int, int]
        ] = []  # heap of (version, answer tokens, serial): drop order of samples
        self._stateful: list[tuple[int, int]] = []  # heap of (answer tokens, serial): drop order of states
        self._next = 0  # serial number
        self.version = -1  # newest policy version of any sample
        self.bytes = 0
        self.dropped = 0  # samples
        self._books = _DrawState()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """In the order they came."""
        return tuple(self._samples.values())

    def add(self, samples: Iterable[Sample]) -> None:
        """Adds samples. Makes room by dropping states first, then the oldest samples, of these the shortest."""
        for sample in samples:
            if sample.version > self.version:
                self._new_version(sample.version)
            if sample.version != self.version or sample.bytes > self._limit:
                sample = replace(sample, states=None)
            if sample.bytes > self._limit:
                self.dropped += 1
                continue
            self._put(sample)
            self._shrink()
            self._books.sorted_out = False

    def _put(self, sample: Sample) -> None:
        serial, self._next = self._next, self._next + 1
        self._samples[serial] = sample
        heapq.heappush(self._leaving, (sample.version, sample.answer_tokens, serial))
        if sample.states is not None:
            heapq.heappush(self._stateful, (sample.answer_tokens, serial))
        self.bytes += sample.bytes

    def _new_version(self, version: int) -> None:
        """Drops all states: they are of an older policy."""
        self.version = version
        while self._stateful:
            self._forget_states()

    def _forget_states(self) -> None:
        _, serial = heapq.heappop(self._stateful)
        sample = self._samples.get(serial)
        if sample is not None:
            self._samples[serial] = replace(sample, states=None)
            self.bytes += self._samples[serial].bytes - sample.bytes

    def _shrink(self) -> None:
        while self.bytes > self._limit:
            if self._stateful:
                self._forget_states()
                continue
            _, _, serial = heapq.heappop(self._leaving)
            self.bytes -= self._samples.pop(serial).bytes
            self.dropped += 1

    # ---- drawing

    def draw(self, tokens: int) -> list[Sample]:
        """Distinct samples of at most `tokens` tokens in total, or one longer sample. Empty if there are none.

        Samples of the newest version are drawn in rounds, each once per round; earlier ones in proportion to length.
        """
        if not self._books.sorted_out:
            self._sort_out()
        books, drawn, used = self._books, list[int](), 0
        while self._samples:
            fresh = self._fresh_next()
            serial = self._upcoming(fresh)
            size = len(self._samples[serial].tokens_T)
            if serial in drawn or (drawn and used + size > tokens):
                break
            drawn.append(serial)
            used += size
            books.upcoming.pop(fresh)
            books.taken[fresh] += size
        return [self._samples[serial] for serial in drawn]

    def _sort_out(self) -> None:
        """After samples have changed: lists those of the newest version, and the lengths of the others."""
        fresh = [serial for serial, sample in self._samples.items() if sample.version == self.version]
        earlier = [serial for serial, sample in self._samples.items() if sample.version != self.version]
        lengths = accumulate(self._samples[serial].answer_tokens for serial in earlier)
        self._books = _DrawState(True, fresh, earlier, list(lengths), draws=self._books.draws)

    def _fresh_next(self) -> bool:
        """Whether the next draw is of the newest version: of the kind whose fraction of the tokens is too low."""
        books = self._books
        if not books.fresh or not books.earlier:
            return bool(books.fresh)
        total = books.taken[True] + books.taken[False]
        return books.taken[True] < self._settings.fresh * total or (total == 0 and self._settings.fresh > 0)

    def _upcoming(self, fresh: bool) -> int:
        """The next sample of this kind. Stays the same until it is taken."""
        books = self._books
        if fresh not in books.upcoming:
            books.draws += 1
            rng = random.Random(f"buffer/{self._seed}/{books.draws}")
            if fresh:
                if not books.round:
                    books.round = rng.sample(books.fresh, len(books.fresh))
                books.upcoming[fresh] = books.round.pop()
            else:
                (books.upcoming[fresh],) = rng.choices(books.earlier, cum_weights=books.lengths)
        return books.upcoming[fresh]

    # ---- saving

    def state(self) -> dict[str, Any]:
        """Everything but the hidden states, which can be computed again."""
        return {
            "samples": samples_state(self.samples),
            "serials": list(self._samples),
            "counts": (self._next, self.version, self.dropped),
            "books": asdict(self._books),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        expect_keys(state, ("samples", "serials", "counts", "books"), "the drafter's answers")
        self._samples, self._leaving, self._stateful, self.bytes = {}, [], [], 0
        for serial, sample in zip(state["serials"], samples_of(state["samples"]), strict=True):
            self._next = serial
            self._put(sample)
        self._next, self.version, self.dropped = state["counts"]
        self._books = _DrawState(**state["books"])
        if self.bytes > self._limit:  # the bound was lowered meanwhile
            self._shrink()
            self._books.sorted_out = False


def samples_state(samples: Sequence[Sample]) -> dict[str, Any]:
    """Samples without their states, as one tensor and a list."""
    tokens = [torch.empty(0, dtype=torch.int32), *(sample.tokens_T for sample in samples)]
    facts = [(len(sample.tokens_T), sample.answer_start, sample.prompt_id, sample.version) for sample in samples]
    return {"tokens": torch.cat(tokens), "facts": facts}


def samples_of(state: Mapping[str, Any]) -> list[Sample]:
    found, start = [], 0
    for length, answer_start, prompt_id, version in state["facts"]:
        found.append(Sample(state["tokens"][start : start + length].clone(), answer_start, prompt_id, version))
        start += length
    return found


@dataclass(slots=True)
class _DrawState:
    """Which samples can be drawn, and what was drawn so far."""

    sorted_out: bool = False  # the lists below are up to date
    fresh: list[int] = field(default_factory=list)  # serial numbers of samples of the newest version
    earlier: list[int] = field(default_factory=list)  # of the others
    lengths: list[int] = field(default_factory=list)  # cumulative answer lengths of the others
    round: list[int] = field(default_factory=list)  # of the newest version, not yet drawn in this round
    upcoming: dict[bool, int] = field(default_factory=dict)  # next sample, by whether it is of the newest version
    taken: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # tokens, by kind
    draws: int = 0


def hold_out(samples: Sequence[Sample], tokens: int) -> list[Sample]:
    """Samples to measure on: all of some prompts, at most one prompt in eight, about `tokens` tokens.

    Answers to one prompt resemble each other: a drafter trained on some of them would be measured too high on the rest.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_id, []).append(sample)
    if len(groups) == 1:
        groups = {str(number): [sample] for number, sample in enumerate(samples)}
    order = sorted(groups, key=lambda name: hashlib.sha256(name.encode()).digest())  # the first to arrive are short
    held: list[Sample] = []
    for name in order[: max(1, len(order) // _HELD_SHARE)]:
        if sum(len(sample.tokens_T) for sample in held) < tokens:
            held += groups[name]
    return held
