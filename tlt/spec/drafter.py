"""What a drafter is: it guesses the policy's next tokens. A wrong, stale or absent guess changes only the speed.

`Drafter` is the whole contract. Every method has a default that does nothing, so that a drafter on the host needs only
`begin`, `extend` and `draft`. `tlt.config.DRAFTERS` names the drafters that `spec.drafter` accepts.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, Self

from torch import Tensor

from tlt.config import DRAFTERS, RunConfig, SpecSettings
from tlt.errors import ConfigError
from tlt.kernels.batch_state.reference import StatePlaces
from tlt.policy import Policy
from tlt.spec.costs import DRAFT, Measured
from tlt.spec.eagle import Eagle
from tlt.spec.record import DraftRecord
from tlt.spec.shape import EMPTY, Draft, Shape
from tlt.spec.tree import Trees
from tlt.types import Key, SamplingParams


@dataclass(frozen=True, slots=True)
class RowView:
    """The device state of each row of the batch. The tensors are the engine's; drafters never write them."""

    position_R: Tensor  # int64, of the newest token
    seed_R: Tensor
    request_R: Tensor
    temperature_R: Tensor
    end_R: Tensor  # int64, position of the last token that it may have
    remaining_bias: Tensor  # float32 scalar: priority of long remaining requests in a shared verify budget
    count: Tensor  # rows from here on are idle


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of work on the device. Role and number of rows determine it."""

    role: Hashable
    rows: int
    work: Callable[[int], object]  # takes the number of rows, which may be larger than `rows`: the others are idle
    exactly: bool = False  # the work must run over `rows` rows and no more
    timed_as: str = DRAFT  # the part of a tick that its seconds count towards


class GraphRunner(Protocol):
    """Runs a drafter's work on the device, as CUDA graphs of the engine or eagerly."""

    def view(self) -> RowView: ...

    def padded(self, rows: int) -> int:
        """The padded number of rows that the work for `rows` rows runs over."""

    def trees(self, nodes: int) -> Trees:
        """The trees that the policy verifies."""

    def run_segments(self, parts: Sequence[Segment]) -> None:
        """Runs the segments in order. A segment may first run with all rows idle, which captures it."""

    def ready(self, parts: Sequence[Segment]) -> None:
        """Captures the segments' graphs, where the engine uses graphs."""

    def time(self, part: Segment) -> float:
        """Seconds that the segment takes with all rows idle."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A request has entered a row."""

    row: int
    position: int  # of its newest token
    token: int  # its newest token
    prefix: tuple[int, ...]  # the tokens before it


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of a prefix that one prefill pass computed."""

    prefix: tuple[int, ...]
    start: int  # position of its first token
    first: int  # index of its first state in the pass
    last: int  # index behind its last state


class HiddenStateSink:
    """Receives the policy's hidden states as the engine computes them, row by row, on the device. Here: keeps none."""

    taps: tuple[int, ...] = ()  # layers whose states it receives

    def attach(self, runner: GraphRunner) -> None:
        """Called once, by the engine."""

    def keep(self, taps: Sequence[Tensor], kept: StatePlaces) -> None:
        """States of the rows, and the tokens drawn from them. Runs inside the engine's graphs, in plain ticks too: the
        work must be small and its shapes static."""

    def prefilled(self, pieces: Sequence[Piece], taps: Sequence[Tensor]) -> None:
        """States of the prefixes that requests will enter with, packed one behind the other."""

    def rearrange(self, moves: Sequence[tuple[int, int]], entered: Sequence[Entered]) -> None:
        """Rows moved (from, to), each in at most one move; then requests entered."""

    def computed(self, steps: int, each: float) -> None:
        """A tick was launched that writes at most `steps` tokens per row, and at most `each` on average."""


Running = Collection[tuple[Key, Sequence[int]]]  # requests that decode, and what they have written so far


class StartedTrees(Protocol):
    """Draft trees that lie on the device, ready to be verified."""

    def draft(self, key: Key) -> Draft:
        """The tree of this request before pruning; may wait for the device."""


class Drafter:
    """A draft tree per running request and tick. The class attributes declare its kind."""

    name = ""  # in `spec.drafter`, in shapes and in reports
    on_device = False  # its trees lie on the device, and it reads the policy's hidden states; at most one per engine
    learned = False  # it has weights that a trainer improves
    version = 0  # of these weights

    @classmethod
    def build(cls, policy: Policy, config: RunConfig) -> Self:
        """The drafter as it is configured for this policy."""
        return cls()

    # ---- every drafter

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """A request begins. Requests with the same `prompt_id` complete the same prompt."""

    def end(self, key: Key, completion: Sequence[int]) -> None:
        """The request is complete."""

    def extend(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> None:
        """Draft-extend: processes tokens beyond those of one tick. Called before `draft`.

        It is one-off work after a start or a pause, and is timed apart from what drafting in this shape costs.
        """

    def draft(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        """A draft of at most `shape.verify − 1` nodes per request; `completions` holds the tokens written so far."""
        return [EMPTY] * len(keys)

    def host_extend_s(self, running: Running) -> float:
        """Seconds that `extend` would need on the host for these requests."""
        return 0.0

    # ---- drafters on the device

    @property
    def state_sink(self) -> HiddenStateSink:
        """Receives the policy's hidden states."""
        return HiddenStateSink()

    def start_trees(self, keys: Sequence[Key], shape: Shape) -> StartedTrees | None:
        """Trees for the rows of these requests, launched on the device and not waited for. None: it drafts on the host.

        May be called behind a verification whose tokens are still unread.
        """
        return None

    def lag(self, rows: int) -> int:
        """Positions per row, on average over so many rows, that `extend` must ingest before it can draft."""
        return 0

    def ingested(self) -> float:
        """Prompt positions of new requests per row, on average, that this tick ingested in passes of their own.

        Each such tick is returned once; 0 for a normal tick.
        """
        return 0.0

    @property
    def arrived(self) -> int:
        """Prompt positions that new requests have brought so far."""
        return 0

    def compile(self, shapes: Sequence[Shape]) -> None:
        """Compiles its kernels for these shapes before the first request."""

    def ready(self, shape: Shape, rows: int) -> None:
        """Captures the graphs that drafts of this shape need for so many rows."""

    def measure(self, sizes: Sequence[int]) -> list[Measured]:
        """What its runs on the device cost for these numbers of rows."""
        return []

    # ---- drafters that learn

    @classmethod
    def prior(cls, spec: SpecSettings) -> DraftRecord | None:
        """What the policy was measured to accept of it; None: nothing was measured."""
        return None

    @property
    def model(self) -> Eagle | None:
        """The weights that a trainer improves; None: there are none."""
        return None

    def policy_changed(self) -> None:
        """The policy's tensors hold another version: hidden states of the old one are void."""

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Other weights, between two ticks. Touches only its own tensors; the same version again changes nothing."""
        raise ValueError(f"drafter {self.name} has no weights; expected a learned drafter to load them into")


def drafter_class(name: str) -> type[Drafter]:
    """The class that `DRAFTERS` has under this name."""
    entry = DRAFTERS[name]
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(import_module(module), attribute)
    if not (isinstance(entry, type) and issubclass(entry, Drafter) and entry.name == name):
        raise ConfigError(f"DRAFTERS[{name!r}] is {entry!r}; expected a subclass of tlt.Drafter with name = {name!r}")
    return entry


def build_drafters(policy: Policy, config: RunConfig) -> list[Drafter]:
    """The drafters that `spec.drafter` names."""
    return [drafter_class(name).build(policy, config) for name in config.spec.drafters]


def learned_drafter() -> str:
    """The name of the first drafter in `DRAFTERS` that learns."""
    return next(name for name in DRAFTERS if drafter_class(name).learned)
