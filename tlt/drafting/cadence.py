"""When to train the drafter: when what it reaches has fallen behind, and no longer than it still gains.

Owns one decision, from accept lengths measured on the newest policy's answers. At rest it remembers the best it has
seen since training last ended; once the drafter has lost more than a share of that, training starts, and goes on, over
as many steps as it needs, until it no longer gains. A policy that became harder to draft for sets its own new level
that way; one that became easier is found out by training a little every so many steps. A drafter that has never been
trained is trained, with more patience. `Pace` keeps micro-steps short. Knows numbers only: no tensors, no clock.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from tlt.config import DraftingSettings
from tlt.errors import CheckpointError

Reason = Literal["cold", "behind", "improving", "probe", "rested"]
_PATIENCE = 2  # judgements in a row without gain that end training: one may be noise
_COLD_PATIENCE = 8  # a drafter that knows nothing yet starts slowly
_FIRST_TOKENS, _FEWEST_TOKENS = 512, 64  # of a micro-step
_LEAST = 0.5  # accepted draft tokens of which a share must be gained, at least: near 0 any noise would do


@dataclass(slots=True)
class _Books:
    trained: bool  # ever, or given as trained
    training: bool = False  # goes on from step to step until nothing is gained
    cold: bool = False  # this training is the first
    reached: float = 1.0  # best accept length since training last ended
    last: float = 1.0  # accept length when it was last asked for
    gained: float = 0.0  # since the last judgement, always between measurements on the same answers
    micro_steps: int = 0  # since then
    idle: int = 0  # judgements in a row without gain
    rested_steps: int = 0
    survival: float = 0.0  # best share of first draft tokens accepted in a rollout since training last ended


class Cadence:
    """Ask `due` once per step; where it says so, `begin` with what the drafter reaches; during training tell `goes_on`
    what it reaches now."""

    def __init__(self, settings: DraftingSettings, *, cold: bool) -> None:
        self._settings = settings
        self._books = _Books(trained=not cold)

    @property
    def training(self) -> bool:
        return self._books.training

    @property
    def reached(self) -> float:
        """Accept length, as it was last measured; 1 if it never was."""
        return self._books.last

    def due(self, survival: float = 0.0) -> bool:
        """Whether it is worth measuring what the drafter reaches, by numbers that cost nothing.

        `survival`: share of its first draft tokens accepted in the last rollout; 0: none were drafted.
        """
        books = self._books
        if books.training or not books.trained or books.last == 1.0:
            return True
        if survival and survival < books.survival * (1 - self._settings.behind):
            books.survival = survival
            return True
        books.survival = max(books.survival, survival)
        if books.rested_steps + 1 >= self._settings.probe:
            return True
        books.rested_steps += 1
        return False

    def begin(self, reached: float) -> Reason:
        """Why to train now: anything but "rested" says yes. `reached`: accept length on the newest answers."""
        books = self._books
        books.last = reached
        if books.training:
            return "improving"
        reason = self._reason_to_start(reached)
        books.reached = max(books.reached, reached)
        if reason == "rested":
            books.rested_steps += 1
        else:
            books.training, books.cold, books.rested_steps = True, reason == "cold", 0
            books.gained, books.micro_steps, books.idle = 0.0, 0, 0
        return reason

    def _reason_to_start(self, reached: float) -> Reason:
        books = self._books
        if not books.trained:
            return "cold"
        if reached - 1 < (books.reached - 1) * (1 - self._settings.behind):
            return "behind"
        return "probe" if books.rested_steps + 1 >= self._settings.probe else "rested"

    def goes_on(self, reached: float, micro_steps: int) -> bool:
        """Whether to go on, after so many more micro-steps led to this, measured on what `begin` was told of."""
        books = self._books
        books.trained = True
        books.gained += reached - books.last
        books.micro_steps += micro_steps
        books.last = reached
        if books.micro_steps >= self._settings.check:
            self._judge()
        return books.training

    def _judge(self) -> None:
        books = self._books
        worth = self._settings.gain * max(books.last - 1, _LEAST) * books.micro_steps / self._settings.check
        books.idle = 0 if books.gained >= worth else books.idle + 1
        books.gained, books.micro_steps = 0.0, 0
        if books.idle >= (_COLD_PATIENCE if books.cold else _PATIENCE):
            books.training, books.cold, books.reached, books.survival = False, False, books.last, 0.0

    def spoilt(self) -> None:
        """What was learned since had to be thrown away: the next step tries again."""
        books = self._books
        books.training, books.rested_steps = False, self._settings.probe

    def state(self) -> dict[str, Any]:
        return asdict(self._books)

    def restore(self, state: dict[str, Any]) -> None:
        known = {field.name for field in fields(_Books)}
        if "trained" not in state or state.keys() - known:
            raise CheckpointError(f"the drafter's cadence has {', '.join(state)}; expected {', '.join(sorted(known))}")
        self._books = _Books(**state)


class Pace:
    """How many tokens a micro-step takes, so that it lasts no longer than it may. Starts small and doubles at most."""

    def __init__(self, settings: DraftingSettings) -> None:
        self._settings = settings
        self.most = settings.tokens
        self.tokens = min(settings.tokens, _FIRST_TOKENS) if settings.micro_s else settings.tokens

    def took(self, tokens: int, seconds: float) -> None:
        """A micro-step of so many tokens took so long."""
        if not self._settings.micro_s or seconds <= 0:
            return
        affordable = int(tokens * self._settings.micro_s / seconds)
        self.tokens = min(self.most, max(_FEWEST_TOKENS, min(affordable, 2 * self.tokens)))

    def too_large(self) -> None:
        """A micro-step of this size cannot be done: none will be as large again."""
        self.tokens = self.most = max(_FEWEST_TOKENS, self.tokens // 2)
