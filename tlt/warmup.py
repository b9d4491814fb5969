"""`tlt warmup`: supervised training of a policy on a file of prompts and answers, or on a task's own solutions.

Owns the sequence: load, train with progress and events, save. Saves a Hugging Face directory with the tokenizer of the
initial policy. A target that cannot be written is refused before the training. If saving fails nevertheless, the policy
is written to another place.
"""

import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from os.path import isfile
from pathlib import Path

from rich.console import Console

from tlt import __version__
from tlt.config import RunConfig
from tlt.errors import TaskError, TltError
from tlt.model.weights import hf_tensors, save_policy
from tlt.outputs import check_new, keep, write_new
from tlt.policy import Policy, open_policy
from tlt.tasks.choose import BUILT_IN, built_in
from tlt.tasks.steps import StepsTask
from tlt.tasks.toy import ToyTask
from tlt.text import Tokenizer
from tlt.train.packing import Example, pack
from tlt.train.supervised import Pair, SupervisedTrainer, batches, encode_pair, endless, read_pairs
from tlt.watch.directory import POLICY, held
from tlt.watch.events import RunFinished, StartupFinished, StartupPhase, WarmupStep
from tlt.watch.log import EventLog
from tlt.watch.progress import WorkProgress
from tlt.watch.session import Watched

TOKENS_PER_ROW = 32768  # limits activation memory: larger batches accumulate gradients over several rows
_TASK_PAGE = 64  # prompts per call of a task's `sample`


def warmup(config: RunConfig, data: str) -> None:
    """Trains `config.model` on `data`, a file or the name of a task, and saves the result."""
    console = Console(highlight=False)
    with held(config, "warmup") as directory:
        target = Path(config.warmup.save or directory / POLICY)
        check_new(target, "--out", directory=True)  # before the training
        with Watched(config, "warmup", __version__, console=console) as log:
            _Warmup(config, log, target, console).go(data)


class _Warmup:
    """From opening the policy to saving it."""

    def __init__(self, config: RunConfig, log: EventLog, target: Path, console: Console) -> None:
        self._config, self._log, self._target, self._console = config, log, target, console

    def go(self, data: str) -> None:
        started, row_tokens = time.perf_counter(), min(self._config.warmup.tokens_per_batch, TOKENS_PER_ROW)
        self._log.emit(StartupPhase(f"opening the policy {self._config.model.path}"))
        policy = open_policy(self._config.model)
        size = sum(weight.nbytes for weight in hf_tensors(policy.model).values())
        check_new(self._target, "--out", size, directory=True)
        self._log.emit(StartupPhase(f"reading {data}"))
        longest = min(row_tokens, policy.model.config.max_positions)
        examples = _examples(self._config, data, policy.tokenizer, longest)
        self._log.emit(StartupFinished(seconds=time.perf_counter() - started))
        self._train(policy, examples, row_tokens)
        write_new(self._target, partial(_save, policy))
        self._console.print(f"saved {self._target}", soft_wrap=True)
        self._log.emit(RunFinished(seconds=time.perf_counter() - started))

    def _train(self, policy: Policy, examples: Iterator[Example], row_tokens: int) -> None:
        settings = self._config.warmup
        trainer = SupervisedTrainer(policy.model, settings)
        stream = islice(batches(examples, settings.tokens_per_batch), settings.steps)
        step_started, reached = time.perf_counter(), ""
        with WorkProgress("steps", settings.steps, self._console, time.perf_counter) as shown:
            for step, result in enumerate(trainer.steps(pack(batch, row_tokens) for batch in stream), start=1):
                seconds = time.perf_counter() - step_started
                step_started += seconds
                self._tell(WarmupStep(step, result.loss, result.answer_tokens, seconds), policy)
                reached = f"loss {result.loss:.4f}, {result.tokens / seconds:,.0f} tokens/s"
                shown.at(step, reached)
        self._console.print(f"{settings.steps} steps, {reached}", soft_wrap=True)

    def _tell(self, event: WarmupStep, policy: Policy) -> None:
        """Emits the event. If that fails, saves the policy and ends the training."""
        try:
            self._log.emit(event)
        except TltError as error:
            kept = keep(self._target.name, partial(_save, policy), first=(self._target.resolve().parent,))
            raise TltError(f"{error}. The policy after step {event.step}: {kept}") from error


def _save(policy: Policy, place: Path) -> None:
    save_policy(policy.model, place, tokenizer_from=policy.source)


def _examples(config: RunConfig, data: str, tokenizer: Tokenizer, longest: int) -> Iterator[Example]:
    if data in BUILT_IN:
        # another seed than that of rollouts, so that their prompts are not trained on
        pairs = _task_pairs(built_in(data, config, seed=-1 - config.run.seed))
        return (encode_pair(pair, tokenizer, longest) for pair in pairs)
    if not isfile(data):
        tasks = " or ".join(f"`{name}`" for name in BUILT_IN)
        raise TaskError(f"{data}: no such file; expected a file of prompts and answers, or the task {tasks}")
    return endless([encode_pair(pair, tokenizer, longest) for pair in read_pairs(data)], config.run.seed)


def _task_pairs(task: ToyTask | StepsTask) -> Iterator[Pair]:
    page = 0
    while True:
        for prompt in task.sample(page, _TASK_PAGE):
            yield Pair(prompt.content, task.solution(prompt), origin=prompt.id)
        page += 1
