"""Online training of the drafter: collects completions, takes micro-steps, publishes better drafters.

What always holds: training changes a copy (the learner), so a stop between any two micro-steps leaves a usable drafter,
and the next call continues from the learner. A drafter is published only if its accept length on held-out answers is
not below the last one's (the first one of a cold start always). After a non-finite loss, or out of memory, the learner
is reset to the last good drafter, the result carries an alarm, and the run continues. The policy's tensors are read,
never written. Does not know engines or other workers: the caller gives the time limit and averages gradients.
"""

import copy
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tlt.config import NEW, DraftingSettings, DraftSettings, RunConfig
from tlt.drafting.buffer import Buffer, Sample, hold_out, samples_of, samples_state
from tlt.drafting.cadence import Cadence, Pace
from tlt.drafting.deadline import Deadline
from tlt.drafting.in_update import MicroBatch, batch_of, plan_update, steps_within
from tlt.drafting.planner import DrafterStatus
from tlt.drafting.session import NOTHING, DraftingResult, Session
from tlt.drafting.states import Kept, Recompute, SamplePiece, StateKeeper, StateSource, longest_piece
from tlt.model.device import DeviceTimer
from tlt.model.transformer import Output, Transformer
from tlt.policy import Policy
from tlt.spec.eagle import Eagle, draft_vocabulary
from tlt.train.drafter import Averaging, DrafterBatch, DrafterDiverged, DrafterTrainer, drafter_loss
from tlt.train.drafter_measure import Expected, expected
from tlt.train.packing import PackedRow, plan_rows
from tlt.train.supervised import StepResult
from tlt.types import Completion

_PATIENCE = 2  # checks without a better drafter after which the learner is reset to the last good one
_RECENT = 5  # micro-steps and measurements whose median predicts the next one
_WARM_UP_TOKENS = 256  # of a sequence
_TIMED_TOKENS = 512  # most tokens of a timed pass on a CPU
_SESSIONS = 3  # inside updates, from which it is known how long a micro-step takes
_FIRST_STEPS = 2  # micro-steps in an update while their duration is unknown


@dataclass(frozen=True, slots=True)
class _Upcoming:
    """The data of the next micro-step."""

    pieces: list[SamplePiece]
    batch: DrafterBatch | None  # None: hidden states not computed yet


class OnlineDrafter:
    """Call `learn_from` with completions and `train` until it is time to stop; load `weights()` into the engine.

    `eagle`: the drafter to start from, which is copied. `cold`: it is untrained. `keeper`: receives the engine's hidden
    states. `average`: averages gradients over workers that train one drafter, each on its own completions; all of them
    must take the same number of micro-steps. `before_change` is called before the drafter or its trainer's state
    change. The policy's tensors are expected to be updated in place.
    """

    def __init__(
        self,
        policy: Transformer,
        eagle: Eagle,
        draft: DraftSettings,
        drafting: DraftingSettings,
        *,
        seed: int = 0,
        cold: bool = False,
        keeper: StateKeeper | None = None,
        average: Averaging | None = None,
        before_change: Callable[[], object] = lambda: None,
    ) -> None:
        self.policy = policy
        self._before_change = before_change
        self._draft = draft
        self._drafting = drafting
        self._keeper, self._average, self._cold, self._seed = keeper, average, cold, seed
        self._good = copy.deepcopy(eagle).requires_grad_(False)
        self._learner = copy.deepcopy(eagle).requires_grad_(True)
        self._trainer = DrafterTrainer(
            self._learner, policy.head_weight, policy.embed, draft, endless=True, average=average
        )
        self._trainer.start_over(0 if cold else draft.single_steps)
        again = Recompute(policy, eagle.config.taps)
        self._source: StateSource = Kept(again, policy.embed.device) if keeper else again
        self._buffer = Buffer(drafting, seed=seed)
        self._cadence = Cadence(drafting, cold=cold)
        self._pace = Pace(drafting)
        self._arrived: list[Sample] = []  # since the last training
        self._held: list[Sample] = []  # of the newest version, to measure on
        self._upcoming: _Upcoming | None = None
        self._since_good = self._cuts = 0  # micro-steps since the last good drafter; long answers cut so far
        self._micro_steps: deque[tuple[float, int]] = deque(maxlen=_RECENT)  # seconds and tokens of the last ones
        self._looks_s: deque[float] = deque(maxlen=_RECENT)  # of the last measurements
        self._in_updates: deque[tuple[float, int]] = deque(maxlen=_SESSIONS)  # seconds and micro-steps inside updates
        # inside updates, since the last measurement
        self._unchecked = self._unchecked_tokens = 0  # micro-steps, tokens
        self.version = 0  # of the published drafter; grows by one with each better one

    @classmethod
    def of(
        cls,
        policy: Policy,
        eagle: Eagle,
        config: RunConfig,
        *,
        keeper: StateKeeper | None = None,
        average: Averaging | None = None,
        before_change: Callable[[], object] = lambda: None,
    ) -> "OnlineDrafter":
        """By a configuration. A keeper (`states.keeper_of`) must be the engine's receiver of hidden states."""
        cold, seed = config.spec.path == NEW, config.run.seed
        return cls(
            *(policy.model, eagle, config.draft, config.drafting),
            seed=seed,
            cold=cold,
            keeper=keeper,
            average=average,
            before_change=before_change,
        )

    # ---- data

    def learn_from(self, completions: Sequence[Completion], version: int, prompt_ids: Sequence[str] = ()) -> None:
        """Adds completions of this policy version. Those of one token are left out: there is nothing to draft.

        Completions with the same prompt id form a group; without ids, those with the same prompt.
        """
        ids = prompt_ids or [f"{hash(completion.prompt_tokens):x}" for completion in completions]
        for completion, prompt_id in zip(completions, ids, strict=True):
            states = self._keeper.collect(completion) if self._keeper else None
            if len(completion.tokens) > 1:
                sample = Sample.of(completion.prompt_tokens, completion.tokens, prompt_id, version)
                self._arrived.append(replace(sample, states=states))

    def sort_arrived(self) -> None:
        """Divides new completions: some of a newer version are held out for measuring, the others are trained on."""
        arrived, self._arrived = self._arrived, []
        self._upcoming = None if arrived else self._upcoming
        newest = max((sample.version for sample in arrived), default=-1)
        if newest > max((sample.version for sample in self._held), default=-1):
            self._buffer.add(self._held)
            self._held = hold_out([sample for sample in arrived if sample.version == newest], self._drafting.held_out)
        held = {id(sample) for sample in self._held}
        self._buffer.add([sample for sample in arrived if id(sample) not in held])

    # ---- training

    @property
    def steps_taken(self) -> int:
        """Micro-steps since the drafter was made."""
        return self._trainer.steps_taken

    def able(self) -> bool:
        """Whether there are completions to learn from and others to measure on."""
        self.sort_arrived()
        return bool(self._held) and len(self._buffer) > 0

    def status(self, survival: float = 0.0) -> DrafterStatus:
        """Call once per step. `survival`: fraction of first draft tokens accepted in the last rollout; 0: none."""
        inside, look_s = self.learns_in_updates, self._look_s
        micro_s = self._update_s if inside else self._micro_s
        return DrafterStatus(
            accept_length=self._cadence.reached,
            due=self._cadence.due(survival),
            micro_tokens=self._drafting.tokens if inside else self._usual_tokens,
            micro_s=micro_s,
            look_s=look_s,
            least_s=micro_s + look_s * self._asks_first if inside else self._drafting.check * micro_s + 2 * look_s,
        )

    @property
    def _asks_first(self) -> bool:
        """Whether a measurement comes first and decides if there is a reason to train."""
        return not (self._cadence.training or self._untried)

    @property
    def learns_in_updates(self) -> bool:
        """Whether training for which other work waits takes place inside policy updates."""
        return self._drafting.states == "update" and self._average is None

    @property
    def _untried(self) -> bool:
        """Whether the drafter was untrained at the start and none has been published yet."""
        return self._cold and self.version == 0

    @property
    def _usual_tokens(self) -> int:
        known = [tokens for _, tokens in self._micro_steps]
        return round(median(known)) if known else self._pace.tokens

    @property
    def _update_s(self) -> float:
        """Mean, for some micro-steps wait for the host and take several times as long as most."""
        micro_steps = sum(count for _, count in self._in_updates)
        return sum(seconds for seconds, _ in self._in_updates) / micro_steps if micro_steps else 0.0

    @property
    def _micro_s(self) -> float:
        return median(seconds for seconds, _ in self._micro_steps) if self._micro_steps else 0.0

    @property
    def _look_s(self) -> float:
        return median(self._looks_s) if self._looks_s else 0.0

    def train(self, until: Callable[[], bool], *, extra_s: float = 0.0) -> DraftingResult:
        """Takes micro-steps until `until` is True and `extra_s` seconds have passed, or the drafter stops gaining.

        Does nothing while the drafter has not fallen behind. `until` is called before every micro-step. After the last
        one the drafter is measured, which takes less time than a micro-step, and published if it is not worse.
        """
        started = time.perf_counter()
        session, deadline = Session(), Deadline(until, extra_s)
        ended, alarm = self._guarded(lambda: self._learn(session, deadline))
        return session.result(self.version, ended, alarm, time.perf_counter() - started, deadline.waited_s)

    def in_update(self, seconds: float) -> "UpdateTraining":
        """Training inside the next policy update, for about `seconds` seconds."""
        return UpdateTraining(self, seconds)

    def _guarded(self, work: Callable[[], str]) -> tuple[str, str]:
        """How the work ended, and the error if there was one: then the learner is reset to the last good drafter."""
        self._before_change()
        try:
            return work(), ""
        except DrafterDiverged as error:
            ended, alarm = "diverged", str(error)
        except torch.OutOfMemoryError as error:
            self._pace.too_large()
            ended, alarm = "no memory", f"micro-steps have {self._pace.tokens} tokens from now on: {error}"
        self._return_to_good()
        self._cadence.diverged()
        return ended, alarm

    def _learn(self, session: Session, deadline: Deadline) -> str:
        """Trains, and returns how it ended."""
        if not self.able():
            return "no answers"
        started = time.perf_counter()
        session.held = self._held_batches()
        session.before = session.best = self._measure(self._good, session.held)
        self._looked(session, time.perf_counter() - started)
        session.began = self._cadence.begin(session.before.accept_length)
        if session.began == "rested":
            return "rested"
        if self._cold and not self._trainer.steps_taken:
            self._choose_vocabulary()
        going_on = True
        while going_on and not deadline.over(self._ahead_s):
            self._micro_step(session, deadline)
            if session.unchecked >= self._drafting.check:
                going_on = self._check(session, self._looked_at(session))
        if session.unchecked:
            going_on = self._check(session, self._looked_at(session))
        return "stopped" if going_on else "no gain"

    def _looked_at(self, session: Session) -> Expected:
        """Measures the learner."""
        started = time.perf_counter()
        found = self._measure(self._learner, session.held)
        self._looked(session, time.perf_counter() - started)
        return found

    def _looked(self, session: Session, seconds: float) -> None:
        session.measuring_s += seconds
        self._looks_s.append(seconds)

    @property
    def _ahead_s(self) -> float:
        """Expected seconds of one more micro-step and the measurement after it."""
        return self._micro_s + self._look_s

    def _micro_step(self, session: Session, deadline: Deadline) -> None:
        """One micro-step. The data of the next one is prepared while the device computes, if there is time for one."""
        started = time.perf_counter()
        this = self._upcoming or self._next()
        result = self._trainer.launch(this.batch or self._source.batch(this.pieces))
        session.micro_steps += 1
        self._upcoming = None if deadline.near(self._micro_s + self._ahead_s) else self._next()
        tokens = result().tokens
        session.tokens += tokens
        session.unchecked += 1
        self._since_good += 1
        seconds = time.perf_counter() - started
        self._micro_steps.append((seconds, tokens))
        self._pace.took(sum(piece.end for piece in this.pieces), seconds)

    def _check(self, session: Session, found: Expected) -> bool:
        """Publishes the learner if it is not worse than the last drafter. True: continue training."""
        micro_steps, session.unchecked = session.unchecked, 0
        if self._untried or found.accept_length >= session.best.accept_length:
            _copy_into(self._good, self._learner)
            self.version += 1
            self._since_good, session.best, session.published = 0, found, True
        elif self._since_good >= _PATIENCE * self._drafting.check:
            self._return_to_good()
        return self._cadence.goes_on(found.accept_length, micro_steps)

    def _return_to_good(self) -> None:
        self._upcoming = None
        self._unchecked = self._unchecked_tokens = 0
        _copy_into(self._learner, self._good)
        self._trainer.start_over(self._trainer.steps_taken)
        self._since_good = 0

    def _choose_vocabulary(self) -> None:
        """Fills the reduced vocabulary of an untrained drafter with the most frequent tokens of the completions."""
        if self._learner.config.reduced:
            written = torch.cat([sample.tokens_T[sample.answer_start :] for sample in self._buffer.samples]).long()
            counts_V = torch.bincount(written, minlength=self.policy.config.vocab)
            ids_v = draft_vocabulary(counts_V, self._learner.config.draft_vocab)
            self._learner.set_vocabulary(ids_v.to(self.policy.embed.device))

    def warm_up(self) -> None:
        """Runs a micro-step and a measurement on made-up data, which compiles and times them, and drops the results.

        Gradients are not averaged with other workers.
        """
        self._timed_pass(_WARM_UP_TOKENS, self._draft.unroll)
        wanted, held = self._drafting.tokens, self._drafting.held_out
        most = wanted if self.policy.embed.is_cuda else _TIMED_TOKENS  # on a CPU time is proportional to tokens
        for _ in range(2):  # the first pass of a size may compile
            micro_s, look_s = self._timed_pass(min(wanted, most), self._trainer.unrolled)
            if min(held, most) != min(wanted, most):
                _, look_s = self._timed_pass(min(held, most), 1)
        micro_s *= wanted / min(wanted, most)
        self._micro_steps.append((micro_s, wanted))
        self._in_updates.append((micro_s, 1))
        self._looks_s.append(look_s * held / min(held, most))

    def _timed_pass(self, tokens: int, unrolled: int) -> tuple[float, float]:
        """Seconds of a micro-step of `tokens` tokens, without its optimizer step, and of a measurement on them."""
        shared = (self.policy.head_weight, self.policy.embed, self._draft)
        tokens_T = torch.arange(_WARM_UP_TOKENS, dtype=torch.int32) % self.policy.config.vocab
        pieces = [SamplePiece.whole(Sample(tokens_T, 1, "", 0))] * max(1, tokens // _WARM_UP_TOKENS)
        states, micro, look = (DeviceTimer(self.policy.embed.device) for _ in range(3))
        with states:
            batch = self._source.batch(pieces)
        with micro:
            drafter_loss(self._learner, batch, *shared, unrolled)[0].backward()  # type: ignore[no-untyped-call]
        self._learner.zero_grad(set_to_none=True)
        with look:
            expected(self._good, [batch], *shared)
        states_s = 0.0 if self.learns_in_updates else states.seconds
        return states_s + micro.seconds, states_s + look.seconds

    # ---- batches

    def _next(self) -> _Upcoming:
        """On a GPU with hidden states, so that the device works while the host reads the last micro-step's result."""
        pieces = self._draw()
        return _Upcoming(pieces, self._source.batch(pieces) if self.policy.embed.is_cuda else None)

    def _draw(self) -> list[SamplePiece]:
        """The samples of the next micro-step, the longest first."""
        budget = self._pace.tokens
        pieces = [SamplePiece.whole(sample) for sample in self._buffer.draw(budget)]
        if len(pieces) == 1 and pieces[0].positions > budget:
            self._cuts += 1
            whole = pieces[0]
            first = random.Random(f"cut/{self._seed}/{self._cuts}").randint(whole.first, whole.end - budget)
            return [SamplePiece(whole.sample, first, first + budget)]
        return sorted(pieces, key=lambda piece: -piece.positions)

    def _held_batches(self) -> list[DrafterBatch]:
        """`held_out` tokens of the held-out answers, in batches no longer than a micro-step's if possible."""
        most = longest_piece([sample.answer_tokens for sample in self._held], self._drafting.held_out)
        pieces = sorted((SamplePiece.whole(sample, most) for sample in self._held), key=lambda piece: -piece.positions)
        room = max(self._pace.most, *(piece.end for piece in pieces))
        rows = plan_rows([piece.end for piece in pieces], room)
        return [self._source.batch([pieces[index] for index in row]) for row in rows]

    def _measure(self, model: Eagle, held: Sequence[DrafterBatch]) -> Expected:
        found = expected(model, held, self.policy.head_weight, self.policy.embed, self._draft)
        if self._average is None:
            return found
        sums = torch.tensor([found.loss, found.accept_length, 1.0], dtype=torch.float64) * found.tokens
        sums = sums.to(self.policy.embed.device)
        self._average.mean([sums])  # all workers must decide alike
        loss, accept_length, tokens = sums.tolist()
        return Expected(loss / max(tokens, 1e-9), accept_length / max(tokens, 1e-9), found.tokens)

    # ---- publishing and saving

    @property
    def drafter(self) -> Eagle:
        """The published drafter; its tensors change in place."""
        return self._good

    def weights(self) -> dict[str, Tensor]:
        """The published drafter's tensors, by their names in `Eagle`. Live: copy them before the next training."""
        return _owned(self._good)

    def state(self, *, buffer: bool = True) -> dict[str, Any]:
        """The state that `restore` needs, in live tensors and plain values. `buffer`: with the training data."""
        return {
            "version": self.version,
            "counts": (self._since_good, self._cuts, self._unchecked, self._unchecked_tokens),
            "good": _owned(self._good),
            "learner": _owned(self._learner),
            "trainer": self._trainer.state(),
            "cadence": self._cadence.state(),
            "buffer": self._buffer.state() if buffer else None,
            "arrived": samples_state([*self._held, *self._arrived]) if buffer else None,
            "held": len(self._held),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._before_change()
        self.version = state["version"]
        self._since_good, self._cuts, self._unchecked, self._unchecked_tokens = state["counts"]
        for model, name in ((self._good, "good"), (self._learner, "learner")):
            load_weights(model, state[name])
        self._trainer.restore(state["trainer"])
        self._cadence.restore(state["cadence"])
        if state["buffer"] is not None:
            self._buffer.restore(state["buffer"])
            samples = samples_of(state["arrived"])
            self._held, self._arrived = samples[: state["held"]], samples[state["held"] :]


class UpdateTraining:
    """Drafter training inside one policy update (`tlt.train.policy.RowObserver`): pass it to the update, then call
    `finish`. An error of the drafter does not fail the update.

    Sessions are short: the drafter is measured and published once in `drafting.check` micro-steps of several sessions.
    """

    def __init__(self, drafter: OnlineDrafter, seconds: float) -> None:
        self.taps: tuple[int, ...] = drafter.drafter.config.taps
        self._drafter, self._seconds = drafter, seconds
        self._session = Session()
        self._batches: dict[int, list[MicroBatch]] = {}  # by row
        self._held: MicroBatch | None = None
        self._asks_first = False  # whether a measurement says if there is a reason to train
        self._measures = False  # whether the drafter is measured at the end
        self._row = 0  # number of the next row
        self._ended, self._alarm = "no answers", ""
        self._looks, self._steps = list[DeviceTimer](), list[DeviceTimer]()
        self._pending: list[Callable[[], StepResult]] = []  # launched micro-steps

    def begin(self, rows: Sequence[PackedRow]) -> None:
        drafter = self._drafter
        if not len(drafter._buffer):
            return
        settings, trainer = drafter._drafting, drafter._trainer
        self._asks_first = drafter._asks_first
        most, measures = self._steps_to_take()
        seed = f"update/{drafter._seed}/{trainer.steps_taken}"
        plan = plan_update(rows, settings.tokens, settings.held_out, most, seed)
        for batch in plan.learned:
            self._batches.setdefault(batch.row, []).append(batch)
        if plan.held is not None:
            self._held, self._ended = plan.held, "stopped"
        self._measures = measures and drafter._unchecked + len(plan.learned) >= settings.check

    def _steps_to_take(self) -> tuple[int, bool]:
        drafter = self._drafter
        check, micro_s, look_s = drafter._drafting.check, drafter._update_s, drafter._look_s
        if not micro_s:
            return _FIRST_STEPS, drafter._unchecked + _FIRST_STEPS >= check
        looks = 1 if drafter._untried or self._asks_first else 2  # of the learner, and of what it is compared with
        return steps_within(
            self._seconds - look_s * self._asks_first, micro_s, look_s, drafter._unchecked, check, looks
        )

    def see(self, row: PackedRow, states: Output) -> None:
        number, self._row = self._row, self._row + 1
        if self._ended == "stopped":
            self._ended, self._alarm = self._drafter._guarded(lambda: self._learn(number, row, states))

    def _learn(self, number: int, row: PackedRow, states: Output) -> str:
        drafter, session = self._drafter, self._session
        if number == 0 and self._held is not None:
            if self._asks_first or self._measures:
                session.held = [batch_of(self._held, row, states)]
            if self._asks_first and not self._has_reason():
                return "rested"
            if drafter._untried and not drafter._trainer.steps_taken:
                drafter._choose_vocabulary()
        for batch in self._batches.get(number, ()):
            with DeviceTimer(states.hidden_TD.device) as timer:
                self._pending.append(drafter._trainer.launch(batch_of(batch, row, states)))
            self._steps.append(timer)
        return "stopped"

    def _has_reason(self) -> bool:
        session = self._session
        session.before = session.best = self._looked_at(self._drafter._good)
        session.began = self._drafter._cadence.begin(session.before.accept_length)
        return session.began != "rested"

    def _looked_at(self, model: Eagle) -> Expected:
        drafter = self._drafter
        with DeviceTimer(drafter.policy.embed.device) as timer:
            found = drafter._measure(model, self._session.held)
        self._looks.append(timer)
        return found

    def finish(self) -> DraftingResult:
        """Waits for the micro-steps. If a check is due, measures the drafter and publishes it if it is not worse."""
        drafter, session = self._drafter, self._session
        if self._pending and not self._alarm:
            self._ended, self._alarm = drafter._guarded(self._take_stock)
        looks_s, steps_s = ([timer.seconds for timer in timers] for timers in (self._looks, self._steps))
        drafter._looks_s.extend(looks_s)
        if steps_s:
            drafter._in_updates.append((sum(steps_s), len(steps_s)))
        session.measuring_s = sum(looks_s)
        seconds = session.measuring_s + sum(steps_s)
        return session.result(drafter.version, self._ended, self._alarm, seconds, seconds)

    def _take_stock(self) -> str:
        drafter, session = self._drafter, self._session
        results = [result() for result in self._pending]
        session.micro_steps, session.tokens = len(results), sum(result.tokens for result in results)
        drafter._since_good += len(results)
        drafter._unchecked += len(results)
        drafter._unchecked_tokens += session.tokens
        if self._measures:
            return self._check()
        reached = drafter._cadence.reached
        session.began = session.began if self._asks_first else "improving"
        session.before = session.best = Expected(results[-1].loss, reached, 0)
        return "stopped"

    def _check(self) -> str:
        drafter, session = self._drafter, self._session
        if not self._asks_first:  # otherwise it was measured on the same answers before the first micro-step
            session.before = session.best = NOTHING if drafter._untried else self._looked_at(drafter._good)
            session.began = drafter._cadence.begin(session.before.accept_length)
        session.unchecked, session.tokens = drafter._unchecked, drafter._unchecked_tokens
        drafter._unchecked = drafter._unchecked_tokens = 0
        return "stopped" if drafter._check(session, self._looked_at(drafter._learner)) else "no gain"


def load_weights(model: Eagle, weights: Mapping[str, Tensor]) -> None:
    """Copies `OnlineDrafter.weights()` into a drafter of the same shape, in place."""
    with torch.no_grad():
        for name, tensor in _owned(model).items():
            tensor.copy_(weights[name])


def _copy_into(target: Eagle, source: Eagle) -> None:
    load_weights(target, _owned(source))


def _owned(model: Eagle) -> dict[str, Tensor]:
    """The drafter's own tensors, without those of the policy."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return tensors if model.token_of_draft_v is None else {**tensors, "token_of_draft_v": model.token_of_draft_v}
