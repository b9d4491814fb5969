"""`tlt warmup`: supervised training of a policy on a file of prompts and answers, or on a task's own solutions.

Owns the order of things: load, train while showing progress and writing events, save. What a run saves is an ordinary
Hugging Face directory with the tokenizer of the policy it started from. Decides nothing about learning.
"""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tlt import __version__
from tlt.config import RunConfig
from tlt.errors import TaskError
from tlt.model.weights import save_policy
from tlt.policy import open_policy
from tlt.tasks.choose import BUILT_IN, built_in
from tlt.tasks.steps import StepsTask
from tlt.tasks.toy import ToyTask
from tlt.text import Tokenizer
from tlt.train.packing import Example, pack
from tlt.train.supervised import Pair, StepResult, SupervisedTrainer, batches, encode_pair, endless, read_pairs
from tlt.watch.events import RunFinished, WarmupStep
from tlt.watch.log import start_run

TOKENS_PER_ROW = 32768  # bounds the activations in memory: larger batches accumulate gradients over several rows
_TASK_PAGE = 64  # prompts asked of a task at a time


def warmup(config: RunConfig, data: str) -> None:
    """Trains `config.model` on `data`, a JSONL file or the name of a task, and saves the result."""
    policy = open_policy(config.model)
    model, tokenizer = policy.model, policy.tokenizer
    row_tokens = min(config.warmup.tokens_per_batch, TOKENS_PER_ROW)
    examples = _examples(config, data, tokenizer, longest=min(row_tokens, model.config.max_positions))
    trainer = SupervisedTrainer(model, config.warmup)
    target = Path(config.warmup.save or Path(config.run.out) / config.run.name / "policy")
    started = time.perf_counter()
    with start_run(config, "warmup", __version__) as log, _Display(config.warmup.steps) as display:
        stream = islice(batches(examples, config.warmup.tokens_per_batch), config.warmup.steps)
        step_started = time.perf_counter()
        for step, result in enumerate(trainer.steps(pack(batch, row_tokens) for batch in stream), start=1):
            seconds = time.perf_counter() - step_started
            step_started += seconds
            log.emit(WarmupStep(step=step, loss=result.loss, tokens=result.answer_tokens, seconds=seconds))
            display.show(result, seconds)
        save_policy(model, target, tokenizer_from=policy.source)
        log.emit(RunFinished(seconds=time.perf_counter() - started))
    Console().print(f"saved {target}", highlight=False, soft_wrap=True)


def _examples(config: RunConfig, data: str, tokenizer: Tokenizer, longest: int) -> Iterator[Example]:
    if data in BUILT_IN:
        # not the seed of rollouts: those prompts stay unseen
        pairs = _task_pairs(built_in(data, config, seed=-1 - config.run.seed))
        return (encode_pair(pair, tokenizer, longest) for pair in pairs)
    if not Path(data).is_file():
        tasks = " or ".join(f"`{name}`" for name in BUILT_IN)
        raise TaskError(f"{data}: no such file; expected a JSONL file of prompts and answers, or the task {tasks}")
    return endless([encode_pair(pair, tokenizer, longest) for pair in read_pairs(data)], config.run.seed)


def _task_pairs(task: ToyTask | StepsTask) -> Iterator[Pair]:
    page = 0
    while True:
        for prompt in task.sample(page, _TASK_PAGE):
            yield Pair(prompt.content, task.solution(prompt), origin=prompt.id)
        page += 1


class _Display:
    """A progress bar with the loss and the pace."""

    def __init__(self, steps: int) -> None:
        columns = (TextColumn("warm-up"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("loss {task.fields[loss]}  {task.fields[pace]} tokens/s"))
        self._task = self._progress.add_task("warm-up", total=steps, loss="–", pace="–")

    def show(self, result: StepResult, seconds: float) -> None:
        pace = f"{result.tokens / seconds:,.0f}"
        self._progress.update(self._task, advance=1, loss=f"{result.loss:.4f}", pace=pace)

    def __enter__(self) -> "_Display":
        self._progress.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._progress.stop()
