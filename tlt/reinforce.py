"""`tlt train`: trains a policy from rewards, step by step, and resumes a stopped run from its checkpoint.

Owns the run: its directory, its checkpoints and the order of work around a step. Always holds: a checkpoint exists only
if the events of all its steps are on disk. So a run that is stopped at any moment and resumed has the events of every
step, equal to those of an uninterrupted run. There is no random state to save: prompts are a function of the step, and
tokens of policy, seed and request. A resumed run is slower for a while, because it has lost tick costs, acceptance
rates, the texts of the suffix drafter and, unless `checkpoint.buffer` is set, the drafter's training data. Does not
know how a step is computed.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tlt import __version__
from tlt.checkpoint_size import checkpoints_planned
from tlt.config import RunConfig
from tlt.errors import ConfigError
from tlt.evaluate import Evaluation, fitting
from tlt.event_builders import (
    answer_shown,
    learning_rate_planned,
    memory_planned,
    rewards_failed,
    rewards_judged,
    rollout_finished,
    shapes_chosen,
    step_finished,
)
from tlt.fleet import LocalFleet
from tlt.loop import Emit, Fleet, Loop, Step, sampled_of
from tlt.machine import describe
from tlt.model.weights import read_config, weights_count
from tlt.plan import plan_or_refuse
from tlt.policy import device_of, source_of
from tlt.resume import ResumePoint, checkpoints_of, resumed, starting_point, write_record
from tlt.signals import raise_if_terminated, sigterm_raises
from tlt.step_file import encode_step
from tlt.tasks.choose import judge_of, task_of
from tlt.tasks.context import fit_task
from tlt.tasks.files import FileTask
from tlt.tasks.held_out import HeldOut, held_out_of
from tlt.tasks.judge import Judge
from tlt.tasks.task import Task
from tlt.text import Tokenizer, TokenTexts
from tlt.train.adapter import is_adapter
from tlt.train.checkpoint import Checkpoints
from tlt.watch.directory import TRAIN, directory_of, held
from tlt.watch.events import (
    CheckpointSaved,
    Evaluated,
    MachineDescribed,
    NothingLeft,
    PhaseStarted,
    PromptsFitted,
    PromptsPlanned,
    ReaderFailed,
    Run,
    RunFinished,
    StartupFinished,
    StartupPhase,
    read_run,
)
from tlt.watch.health import HealthReader
from tlt.watch.history import events_of
from tlt.watch.log import EventLog
from tlt.watch.session import Watched
from tlt.watch.step_files import StepFiles

OpenFleet = Callable[[RunConfig, Emit], Fleet]


def train(
    config: RunConfig,
    task: Task | None = None,
    *,
    eval_task: Task | None = None,
    resume: bool = False,
    resume_from: str = "",
    open_fleet: OpenFleet = LocalFleet,
) -> Run:
    """Trains `config.model` on `task` (default: the configured one) and returns the run's events.

    `eval_task`: has the held-out prompts if `eval.paths` is empty. `resume`: continues from the run's newest complete
    checkpoint, or starts anew if there is none. `resume_from`: name of the checkpoint to continue from, as in
    "step_20". The next checkpoint written then removes later ones.
    """
    _check(config, open_fleet)
    resume = resume or bool(resume_from)
    with ExitStack() as stack:
        stack.enter_context(sigterm_raises())
        directory = stack.enter_context(held(config, TRAIN, resume=resume))
        checkpoints = checkpoints_of(config)
        start = starting_point(checkpoints, resume_from)
        log = stack.enter_context(Watched(config, TRAIN, __version__, resumed=resume))
        if resume:
            log.emit(resumed(config, start))
        for damaged in start.passed_over if start else ():
            log.emit(damaged)
        if start and _nothing_left(config, start, directory):
            log.emit(NothingLeft(start.step, config.run.steps))
            log.emit(RunFinished(seconds=0.0))
            return read_run(directory)
        run = _Run(config, checkpoints, log)
        log.emit(StartupPhase("reading the prompts"))
        held_out = held_out_of(config, task, eval_task) if config.eval.every else []
        task = task or task_of(config)
        # first: a reward that cannot be loaded fails before the policy is opened
        judge = stack.enter_context(judge_of(task, config))
        for one in held_out:
            stack.enter_context(one.judge)
        run.go(task, judge, held_out, start, open_fleet)
    return read_run(directory)


def _nothing_left(config: RunConfig, start: ResumePoint, directory: Path) -> bool:
    """Whether all steps are done, and the last one is evaluated if the recipe demands it."""
    if start.step < config.run.steps:
        return False
    return not config.eval.every or any(told.step == start.step for told in events_of(read_run(directory), Evaluated))


class _Run:
    """The part of a run in one process: from the start or a checkpoint to the last step."""

    def __init__(self, config: RunConfig, checkpoints: Checkpoints, log: EventLog) -> None:
        self._config, self._log = config, log
        self._checkpoints, self._saver = checkpoints, _Saver(checkpoints, log)
        self._started = time.perf_counter()
        self._health = HealthReader(config)
        log.add_reader(self._health)

    def go(
        self, task: Task, judge: Judge, held_out: list[HeldOut], start: ResumePoint | None, open_fleet: OpenFleet
    ) -> None:
        self._describe()
        source = source_of(self._config.model)
        context = read_config(source).max_positions
        tokenizer = Tokenizer.load(source)
        held_out, eval_tokenizer = fitting(self._config, held_out, tokenizer, context, self._log.emit)
        evaluation = Evaluation(self._config, held_out, eval_tokenizer, self._log.emit, self._evaluated(start))
        tokenizer = self._fit(task, tokenizer, context)
        self._log.emit(learning_rate_planned(self._config.train, weights_count(read_config(source))))
        self._log.emit(memory_planned(plan_or_refuse(self._config)))
        self._log.emit(checkpoints_planned(self._config, self._checkpoints.directory))
        raise_if_terminated()
        fleet = open_fleet(self._config, self._log.emit)
        try:
            with sigterm_raises():  # again: a second SIGTERM must not interrupt the cleanup below
                restored = self._restore(fleet, start)
                self._log.emit(StartupFinished(seconds=time.perf_counter() - self._started))
                loop = Loop(self._config, task, tokenizer, judge, fleet, self._log.emit)
                self._evaluate(evaluation, fleet, restored)
                self._keeper = StepKeeper(self._config, tokenizer, after=restored)
                for taken in range(restored, self._config.run.steps):
                    raise_if_terminated()
                    self._step(loop, taken)
                    self._evaluate(evaluation, fleet, taken + 1)
                self._saver.wait()
        finally:
            self._saver.close()
            fleet.close()
        self._log.emit(RunFinished(seconds=time.perf_counter() - self._started))

    def _step(self, loop: Loop, taken: int) -> None:
        started = time.perf_counter()
        step = loop.step(taken)
        self._tell(step)
        computed = time.perf_counter()
        every, steps = self._config.checkpoint.every, self._config.run.steps
        saves = step.number == steps or (every and step.number % every == 0)
        fill = self._copy(loop.fleet, step.number) if saves else None
        checkpoint_s = time.perf_counter() - computed
        step_s = time.perf_counter() - started - step.times.replay
        self._log.emit(step_finished(step, checkpoint_s=checkpoint_s, step_s=step_s))
        self._warn()
        if fill:  # after the event: a run resumed from this checkpoint does not compute the step again
            self._saver.save(step.number, fill)
        self._saver.tell()

    def _warn(self) -> None:
        for warning in self._health.take_warnings():
            self._log.emit(warning)

    def _tell(self, step: Step) -> None:
        verdicts = [verdict for one in step.judged for verdict in one.verdicts]
        for failure in rewards_failed(step.number, verdicts):
            self._log.emit(failure)
        if told := rewards_judged(step.number, verdicts):
            self._log.emit(told)
        self._log.emit(rollout_finished(step.number, step.rollouts, step.times.rollout))
        self._log.emit(answer_shown(step.number, step.rollouts[0]))
        if step.report.chosen:
            self._log.emit(shapes_chosen(step.number, step.report))
        if failed := self._keeper.keep(step):
            self._log.emit(failed)

    def _fit(self, task: Task, tokenizer: Tokenizer, context: int) -> Tokenizer:
        """Applies `task.long_prompts`: long prompts are refused, left out, or cut by the returned tokenizer."""
        before = len(task.prompts) if isinstance(task, FileTask) else 0
        fitted = fit_task(task, tokenizer, self._config, context)
        if fitted.long:
            choice = self._config.task.long_prompts
            self._log.emit(PromptsFitted("training", fitted.long, before, fitted.limit, choice))
        if isinstance(task, FileTask):
            asked, run = self._config.task, self._config.run
            turns = self._config.grpo.dynamic_sampling + 1
            self._log.emit(PromptsPlanned(asked.path, len(task.prompts), asked.prompts, run.steps, turns))
        return fitted.tokenizer

    # ---- evaluations

    def _evaluate(self, evaluation: Evaluation, fleet: Fleet, step: int) -> None:
        """Runs the evaluation that is due at this step, if any. The checkpoint of the best policy is kept."""
        started = time.perf_counter()
        if evaluation.due(step):
            evaluation.run(step, fleet.evaluate)
            self._warn()
        self._checkpoints.best = best = evaluation.best
        if best == step > self._saver.newest:
            self._saver.save(step, self._copy(fleet, step))
        fleet.leave_out(time.perf_counter() - started)

    def _evaluated(self, start: ResumePoint | None) -> tuple[Evaluated, ...]:
        """Evaluations of the run that is resumed."""
        return events_of(read_run(directory_of(self._config, TRAIN)), Evaluated) if start else ()

    # ---- checkpoints

    def _copy(self, fleet: Fleet, step: int) -> Callable[[Path], None]:
        """Copies the state after the step. The returned function writes it."""
        self._log.emit(PhaseStarted(step, "checkpoint"))
        self._saver.wait()  # the copy reuses the memory of the last one
        write_fleet = fleet.snapshot()

        def fill(directory: Path) -> None:
            write_fleet(directory)
            write_record(self._config, step, directory)

        return fill

    def _restore(self, fleet: Fleet, start: ResumePoint | None) -> int:
        """Restores the checkpoint. Returns the number of steps taken."""
        if start is None:
            return 0
        self._log.emit(StartupPhase(f"reading {start.path}"))
        fleet.restore(start.path, start.step)
        self._checkpoints.go_on_from(start.step)
        self._saver.newest = start.step
        return start.step

    def _describe(self) -> None:
        found = describe(device_of(self._config.model.device), None)
        named = {"python": found.python, "torch": found.torch, "cuda": found.cuda, "triton": found.triton}
        self._log.emit(
            MachineDescribed(
                device=found.device,
                device_memory_gib=found.device_memory_gib,
                cpu=found.cpu,
                cores=found.cores,
                versions={**named, "tlt": found.tlt},
                commit=found.commit,
                command=found.command,
            )
        )


class StepKeeper:
    """Writes the step files, if configured. After a write error the run continues without them."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, *, after: int) -> None:
        self._watch = config.watch
        self._wanted = self._watch.groups > 0
        self._files = StepFiles(directory_of(config, TRAIN), self._watch.disk_mib * 2**20, after=after)
        self._texts = TokenTexts(tokenizer)

    def keep(self, step: Step) -> ReaderFailed | None:
        if not self._wanted:
            return None
        sampled = sampled_of(step.number, step.judged, self._watch.groups)
        limit = min(self._watch.step_kib * 2**10, self._watch.disk_mib * 2**20)
        content = encode_step(step, sampled, self._texts, limit)
        try:
            self._files.write(step.number, content)
        except OSError as error:
            self._wanted = False
            return ReaderFailed("steps/", f"{error.strerror}: {error.filename}")
        return None


class _Saver:
    """Writes checkpoints in a thread, one at a time. A failure raises at the next call."""

    def __init__(self, checkpoints: Checkpoints, log: EventLog) -> None:
        self._checkpoints, self._log = checkpoints, log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[CheckpointSaved] | None = None
        self.newest = 0  # step of the newest checkpoint, written or in progress; 0: none

    def save(self, step: int, fill: Callable[[Path], None]) -> None:
        self.wait()
        self.newest = step
        self._pending = self._thread.submit(self._write, step, fill)

    def _write(self, step: int, fill: Callable[[Path], None]) -> CheckpointSaved:
        started = time.perf_counter()
        self._log.sync()  # first: after a power cut, no checkpoint may lack the events of its steps
        path = self._checkpoints.write(step, fill)
        return CheckpointSaved(step, str(path), time.perf_counter() - started)

    def tell(self) -> None:
        """Emits the event of the last checkpoint if it is complete."""
        if self._pending and self._pending.done():
            self.wait()

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending:
            self._log.emit(pending.result())

    def close(self) -> None:
        """Completes the checkpoint in progress and emits its event, also if the run was stopped by an error."""
        self._thread.shutdown()
        if self._pending and not self._pending.exception():
            self.wait()


def _check(config: RunConfig, open_fleet: OpenFleet) -> None:
    """Checks that need no files: raises ConfigError before anything is loaded or written."""
    if config.task.group < 2:
        raise ConfigError(
            f"task.group is {config.task.group}: an answer is learned from by comparing it with others to the same "
            "prompt; set task.group to 2 or more, 8 for instance"
        )
    if config.train.lora_rank and is_adapter(Path(config.model.path)):
        raise ConfigError(
            f"train.lora_rank is {config.train.lora_rank} and model.path {config.model.path} is an adapter, and "
            "one of an adapter would be learned. Give the policy/ that checkpoint.merge writes beside it, or "
            "go on with the run it is from: --resume"
        )
    if config.cluster.workers > 1 and open_fleet is LocalFleet:
        raise ConfigError(
            f"cluster.workers is {config.cluster.workers}, and one worker was asked to train; "
            "give open_fleet = tlt.cluster.ray_fleet.RayFleet, or use the command `tlt train`"
        )
