"""When to train the drafter: from when its accept length has dropped until training no longer gains.

Decides from accept lengths measured on the newest policy's answers. At rest it remembers the best accept length since
training last ended. Once the drafter has lost more than a fraction of it, training starts and continues over as many
steps as it needs, until it no longer gains. So a policy that is harder to draft for gets a new, lower level; a policy
that is easier is noticed by a short training every `drafting.probe` steps. A drafter that was never trained is trained
with more patience. `Pace` keeps micro-steps short. Knows numbers only: no tensors, no clock.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from tlt.config import DraftingSettings
from tlt.errors import CheckpointError

Reason = Literal["cold", "behind", "improving", "probe", "rested"]
_PATIENCE = 2  # checks in a row without gain that end training: one may be noise
_COLD_PATIENCE = 8  # the same for an untrained drafter, which starts slowly
_FIRST_TOKENS, _FEWEST_TOKENS = 512, 64  # of a micro-step
_LEAST = 0.5  # accepted draft tokens from which the required gain is computed, at least: near 0 noise would suffice


@dataclass(slots=True)
class _CadenceState:
    trained: bool  # ever, or given as trained
    training: bool = False  # continues from step to step until nothing is gained
    cold: bool = False  # this training is the first
    reached: float = 1.0  # best accept length since training last ended
    last: float = 1.0  # accept length of the last measurement
    gained: float = 0.0  # since the last check, summed over measurements on the same answers
    micro_steps: int = 0  # since the last check
    idle: int = 0  # checks in a row without gain
    rested_steps: int = 0  # steps in a row without training
    survival: float = 0.0  # best fraction of first draft tokens accepted in a rollout since training last ended


class Cadence:
    """Call `due` once per step; if it is True, `begin` with a measured accept length; during training `goes_on` with
    each further measurement."""

    def __init__(self, settings: DraftingSettings, *, cold: bool) -> None:
        self._settings = settings
        self._state = _CadenceState(trained=not cold)

    @property
    def training(self) -> bool:
        return self._state.training

    @property
    def reached(self) -> float:
        """The last measured accept length; 1 if it was never measured."""
        return self._state.last

    def due(self, survival: float = 0.0) -> bool:
        """Whether to measure the drafter's accept length now, decided from numbers that cost nothing.

        `survival`: fraction of first draft tokens accepted in the last rollout; 0: none were drafted.
        """
        state = self._state
        if state.training or not state.trained or state.last == 1.0:
            return True
        if survival and survival < state.survival * (1 - self._settings.behind):
            state.survival = survival
            return True
        state.survival = max(state.survival, survival)
        if state.rested_steps + 1 >= self._settings.probe:
            return True
        state.rested_steps += 1
        return False

    def begin(self, reached: float) -> Reason:
        """Why to train now; "rested": do not. `reached`: accept length on the newest answers."""
        state = self._state
        state.last = reached
        if state.training:
            return "improving"
        reason = self._reason_to_start(reached)
        state.reached = max(state.reached, reached)
        if reason == "rested":
            state.rested_steps += 1
        else:
            state.training, state.cold, state.rested_steps = True, reason == "cold", 0
            state.gained, state.micro_steps, state.idle = 0.0, 0, 0
        return reason

    def _reason_to_start(self, reached: float) -> Reason:
        state = self._state
        if not state.trained:
            return "cold"
        if reached - 1 < (state.reached - 1) * (1 - self._settings.behind):
            return "behind"
        return "probe" if state.rested_steps + 1 >= self._settings.probe else "rested"

    def goes_on(self, reached: float, micro_steps: int) -> bool:
        """Whether to continue, `micro_steps` later. `reached`: accept length on the same answers as in `begin`."""
        state = self._state
        state.trained = True
        state.gained += reached - state.last
        state.micro_steps += micro_steps
        state.last = reached
        if state.micro_steps >= self._settings.check:
            self._judge()
        return state.training

    def _judge(self) -> None:
        state = self._state
        worth = self._settings.gain * max(state.last - 1, _LEAST) * state.micro_steps / self._settings.check
        state.idle = 0 if state.gained >= worth else state.idle + 1
        state.gained, state.micro_steps = 0.0, 0
        if state.idle >= (_COLD_PATIENCE if state.cold else _PATIENCE):
            state.training, state.cold, state.reached, state.survival = False, False, state.last, 0.0

    def diverged(self) -> None:
        """The training since the last good drafter was discarded: the next step tries again."""
        state = self._state
        state.training, state.rested_steps = False, self._settings.probe

    def state(self) -> dict[str, Any]:
        return asdict(self._state)

    def restore(self, state: dict[str, Any]) -> None:
        known = {field.name for field in fields(_CadenceState)}
        if "trained" not in state or state.keys() - known:
            raise CheckpointError(f"the drafter's cadence has {', '.join(state)}; expected {', '.join(sorted(known))}")
        self._state = _CadenceState(**state)


class Pace:
    """Tokens of a micro-step, so that it takes at most `drafting.micro_s` seconds. Starts small and at most doubles."""

    def __init__(self, settings: DraftingSettings) -> None:
        self._settings = settings
        self.most = settings.tokens
        self.tokens = min(settings.tokens, _FIRST_TOKENS) if settings.micro_s else settings.tokens

    def took(self, tokens: int, seconds: float) -> None:
        """Sets the size from the measured time of a micro-step."""
        if not self._settings.micro_s or seconds <= 0:
            return
        affordable = int(tokens * self._settings.micro_s / seconds)
        self.tokens = min(self.most, max(_FEWEST_TOKENS, min(affordable, 2 * self.tokens)))

    def too_large(self) -> None:
        """Halves the size for good, after a micro-step ran out of memory."""
        self.tokens = self.most = max(_FEWEST_TOKENS, self.tokens // 2)
