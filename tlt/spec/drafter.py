"""What a drafter is: someone who guesses the policy's next tokens. Wrong, stale or absent, only speed changes."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol, runtime_checkable

from torch import Tensor

from tlt.kernels.batch_state.reference import StatePlaces
from tlt.spec.costs import Measured
from tlt.spec.shape import EMPTY, Draft, Shape
from tlt.spec.suffix import SuffixDrafter
from tlt.spec.tree import Trees
from tlt.types import Key, SamplingParams


class Drafter(Protocol):
    """Told when requests begin and end; asked for a tree per running request."""

    name: str

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None: ...

    def end(self, key: Key, completion: Sequence[int]) -> None:
        """The answer is complete."""

    def catch_up(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> None:
        """Called before `propose`: takes in what is more than the last tick can have added.

        That is work done once, after a start or a pause, and not what drafting in this shape costs.
        """

    def propose(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        """A draft of at most `shape.verify − 1` nodes per request; `completions` holds the tokens written so far."""
        ...

    def start_trees(self, keys: Sequence[Key], shape: Shape) -> "StartedTrees | None":
        """Trees for the rows of these requests, on the device: launched, not waited for. None: it drafts on the host.

        May be called behind a verification whose tokens nobody has read yet.
        """


Running = Iterable[tuple[Key, Sequence[int]]]  # requests that decode, and what they have written so far


@runtime_checkable
class Indexing(Protocol):
    """A drafter that has something to read on the host after a start or a pause."""

    def due_s(self, running: Running) -> float:
        """Seconds that it would need before it could be asked about these."""


class StartedTrees(Protocol):
    """Trees that lie on the device, ready to be verified."""

    def draft(self, key: Key) -> Draft:
        """What was grown for this request, before anything was pruned; may wait for the device."""


@dataclass(frozen=True, slots=True)
class RowView:
    """What the device knows of each row of the batch: the engine's own tensors, never written here."""

    position_R: Tensor  # int64, of the newest token
    seed_R: Tensor
    request_R: Tensor
    temperature_R: Tensor
    end_R: Tensor  # int64, position of the last token that it may have
    remaining_bias: Tensor  # float32, one number: how much those with more left come first where requests share
    count: Tensor  # rows from here on are idle


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of work on the device, always the same for a role and a number of rows."""

    role: Hashable
    rows: int
    work: Callable[[int], object]  # for so many rows: perhaps for more than asked for, which are idle …
    exactly: bool = False  # … unless it must not be


class GraphRunner(Protocol):
    """Where a drafter's work on the device is played: in the engine's graphs, or just so."""

    def view(self) -> RowView: ...

    def padded(self, rows: int) -> int:
        """The number of rows that work for so many is done for."""

    def trees(self, nodes: int) -> Trees:
        """The trees that the policy verifies."""

    def run_segments(self, parts: Sequence[Segment]) -> None:
        """One piece of work after the other. Before the first, each may be run with all rows idle, to capture it."""

    def ready(self, parts: Sequence[Segment]) -> None:
        """Has their graphs captured, where there are graphs."""

    def time(self, part: Segment) -> float:
        """Seconds the work takes, all rows idle."""

    @property
    def capture_s(self) -> float:
        """Spent capturing graphs so far."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A request has come into a row."""

    row: int
    position: int  # of its next token …
    token: int  # … which this is
    prefix: tuple[int, ...]  # what comes before


@dataclass(frozen=True, slots=True)
class Piece:
    """What was read of a prefix at once; there may be several."""

    prefix: tuple[int, ...]
    start: int  # position of its first token
    first: int  # where it lies among all that was read …
    last: int  # … up to, but not with


class HiddenStateSink(Protocol):
    """Keeps states of the policy as the engine computes them, row by row, on the device."""

    taps: tuple[int, ...]  # layers whose states it wants; none: it keeps nothing

    def attach(self, runner: GraphRunner) -> None:
        """Called once, by the engine that feeds it."""

    def keep(self, taps: Sequence[Tensor], kept: StatePlaces) -> None:
        """States of the rows, and the tokens drawn from them. Part of the engine's graphs: tensor work of static shape,
        and little of it, for plain ticks do it too."""

    def prefilled(self, pieces: Sequence["Piece"], taps: Sequence[Tensor]) -> None:
        """States of what was read of prefixes that requests will enter with, one behind the other."""

    def rearrange(self, moves: Sequence[tuple[int, int]], entered: Sequence["Entered"]) -> None:
        """Rows moved (from, to), none of them in two moves; then requests entered."""

    def computed(self, steps: int, each: float) -> None:
        """A tick was launched that gives a row at most `steps` tokens, and all of them at most `each` on average."""

    def measure(self, sizes: Sequence[int]) -> list[Measured]:
        """What its own work costs for so many rows."""

    def ready(self, shape: Shape, rows: int) -> None:
        """Drafts of this shape will be asked for, of so many rows: whatever has to be captured may be now."""


class NoSink:
    taps: tuple[int, ...] = ()

    def attach(self, runner: GraphRunner) -> None:
        pass

    def keep(self, taps: Sequence[Tensor], kept: StatePlaces) -> None:
        pass

    def prefilled(self, pieces: Sequence["Piece"], taps: Sequence[Tensor]) -> None:
        pass

    def rearrange(self, moves: Sequence[tuple[int, int]], entered: Sequence["Entered"]) -> None:
        pass

    def computed(self, steps: int, each: float) -> None:
        pass

    def measure(self, sizes: Sequence[int]) -> list[Measured]:
        return []

    def ready(self, shape: Shape, rows: int) -> None:
        pass


class NoDrafter:
    """Proposes nothing."""

    name = "none"

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        pass

    def end(self, key: Key, completion: Sequence[int]) -> None:
        pass

    def catch_up(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> None:
        pass

    def propose(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        return [EMPTY] * len(keys)

    def start_trees(self, keys: Sequence[Key], shape: Shape) -> StartedTrees | None:
        return None


_COMPLETIONS_KEPT = 16  # finished answers per prompt that wait to be indexed
_PAST = Key(0, 1 << 64)  # no request has this key: finished answers are indexed under it, one after the other

_TOKEN_S = 4e-6  # to index one, before that was timed …
_TIMED, _TIMES = 256, 5  # … with so many at once at least; of so many times of late the one in the middle

_Finished = tuple[Sequence[int], Sequence[int]]  # prompt and answer


class SuffixDrafting:
    """The model-free drafter behind the protocol. Texts are indexed when somebody first asks about their prompt.

    While nobody speculates (a full batch decodes plainly) it costs a list append per answer and nothing per token.
    """

    name = "suffix"

    def __init__(self, memory_tokens: int) -> None:
        self._suffix = SuffixDrafter(memory_tokens)
        self._memory_tokens = memory_tokens
        self._waiting: dict[Key, tuple[str, Sequence[int]]] = {}  # begun, not indexed yet
        self._indexed: dict[Key, int] = {}  # tokens of the answer that the index has
        self._finished: OrderedDict[str, deque[_Finished]] = OrderedDict()  # never indexed; by prompt, latest last
        self._kept_tokens = 0  # in them
        self._token_s: deque[float] = deque([_TOKEN_S], maxlen=_TIMES)

    def due_s(self, running: Running) -> float:
        return median(self._token_s) * self._due(running)

    def _due(self, running: Running) -> int:
        """Tokens: what they have written since they were indexed; or else all of it, with what was finished there, and
        their prompts, unless these are known."""
        due, prompts = 0, dict[str, int]()
        for key, completion in running:
            due += len(completion) - self._indexed.get(key, 0)
            if key in self._waiting:
                prompt_id, prompt = self._waiting[key]
                prompts[prompt_id] = 0 if self._suffix.holds(prompt_id) else len(prompt)
        finished = (self._finished.get(prompt_id, ()) for prompt_id in prompts)
        return due + sum(prompts.values()) + sum(len(completion) for kept in finished for _, completion in kept)

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._waiting[key] = (prompt_id, prompt)

    def end(self, key: Key, completion: Sequence[int]) -> None:
        if key in self._indexed:
            self._suffix.extend(key, completion[self._indexed.pop(key) :])
            self._suffix.end(key)
            return
        prompt_id, prompt = self._waiting.pop(key)
        self._keep(prompt_id, (prompt, tuple(completion)))

    def catch_up(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> None:
        lag = [
            (key, completion)
            for key, completion in zip(keys, completions, strict=True)
            if key in self._waiting or len(completion) - self._indexed[key] > shape.depth + 1
        ]
        if not lag:
            return
        due, started = self._due(lag), time.perf_counter()
        for key, completion in lag:
            if key in self._waiting:
                self._index(key)
            self._extend(key, completion)
        if due >= _TIMED:
            self._token_s.append((time.perf_counter() - started) / due)

    def propose(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        drafts = []
        for key, completion in zip(keys, completions, strict=True):
            self._extend(key, completion)
            drafts.append(self._suffix.propose(key, shape.depth, shape.width, shape.verify - 1))
        return drafts

    def start_trees(self, keys: Sequence[Key], shape: Shape) -> StartedTrees | None:
        return None

    def _extend(self, key: Key, completion: Sequence[int]) -> None:
        self._suffix.extend(key, completion[self._indexed[key] :])
        self._indexed[key] = len(completion)

    def _keep(self, prompt_id: str, finished: _Finished) -> None:
        """Until somebody asks about the prompt. No more than the index could hold: the oldest prompts go."""
        kept = self._finished.setdefault(prompt_id, deque())
        self._finished.move_to_end(prompt_id)
        kept.append(finished)
        self._kept_tokens += _size(finished)
        if len(kept) > _COMPLETIONS_KEPT:
            self._kept_tokens -= _size(kept.popleft())
        while self._kept_tokens > self._memory_tokens:
            self._give_up(next(iter(self._finished)))

    def _give_up(self, prompt_id: str) -> Sequence[_Finished]:
        gone = self._finished.pop(prompt_id, ())
        self._kept_tokens -= sum(map(_size, gone))
        return gone

    def _index(self, key: Key) -> None:
        """The request, and whatever its group has finished."""
        prompt_id, prompt = self._waiting.pop(key)
        for earlier_prompt, completion in self._give_up(prompt_id):
            self._suffix.begin(_PAST, prompt_id, earlier_prompt)
            self._suffix.extend(_PAST, completion)
            self._suffix.end(_PAST)
        self._suffix.begin(key, prompt_id, prompt)
        self._indexed[key] = 0


def _size(finished: _Finished) -> int:
    prompt, completion = finished
    return len(prompt) + len(completion)
