"""`tlt rollout`: a policy answers a task's prompts and is judged. One rollout of a training step, on its own.

Writes the run's directory: config.toml, events.jsonl and rollouts.jsonl (a line per answer).
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tlt import __version__
from tlt.config import RunConfig
from tlt.engine.build import build_engine
from tlt.engine.request import Request
from tlt.loop import ask
from tlt.policy import Policy, open_policy
from tlt.spec.alarm import Alarm
from tlt.tasks.choose import judge_of, task_of
from tlt.tasks.judge import Judge, Verdict
from tlt.tasks.task import Task
from tlt.telling import Lengths, acceptance_collapsed, lengths_of, mean_reward, rewards_failed, rollout_finished
from tlt.types import Completion, Key, Rollout
from tlt.watch.events import RunFinished
from tlt.watch.log import start_run

ROLLOUTS_FILE = "rollouts.jsonl"
_CHECKED = 16  # answers written a second time, in another batch, to compare
_BARS = " ▁▂▃▄▅▆▇█"


def rollout(config: RunConfig) -> None:
    """Samples the prompts of step 1, answers and judges them, and says how it went."""
    task = task_of(config)
    with judge_of(task) as judge:  # first: a reward that cannot be loaded is told before a policy is
        _roll_out(config, task, judge)


def _roll_out(config: RunConfig, task: Task, judge: Judge) -> None:
    console = Console(highlight=False)
    started = time.perf_counter()
    policy = open_policy(config.model)
    asked = [(one.prompt, request) for one in ask(0, config, task, policy.tokenizer) for request in one.requests]
    with start_run(config, "rollout", __version__) as log:
        answered_from = time.perf_counter()
        requests = [request for _, request in asked]
        completions = _answer(policy, config, requests, console, lambda alarm: log.emit(acceptance_collapsed(1, alarm)))
        seconds = time.perf_counter() - answered_from
        answers = [(prompt, completions[request.key]) for prompt, request in asked]
        verdicts = judge.judge(answers)
        rollouts = [Rollout(*answer, verdict.reward) for answer, verdict in zip(answers, verdicts, strict=True)]
        failures = rewards_failed(1, verdicts)
        for failure in failures:
            log.emit(failure)
        log.emit(rollout_finished(1, rollouts, seconds))
        directory = Path(config.run.out) / config.run.name
        _write(rollouts, verdicts, directory / ROLLOUTS_FILE)
        log.emit(RunFinished(seconds=time.perf_counter() - started))
    _tell(console, config, rollouts, seconds)
    for failure in failures:
        console.print(
            f"{failure.count} rewards failed ({failure.kind}): each counts as {config.task.failed_reward:g}.",
            style="bold red",
        )
    _tell_identity(console, policy, config, requests, completions)
    console.print(f"Everything is in [bold]{directory}/[/bold]: config.toml, events.jsonl, {ROLLOUTS_FILE}.")


def _answer(
    policy: Policy,
    config: RunConfig,
    requests: Sequence[Request],
    console: Console,
    on_alarm: Callable[[Alarm], None],
) -> dict[Key, Completion]:
    columns = (TextColumn("rollout"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    engine = build_engine(policy, config)
    engine.submit(requests)
    done: dict[Key, Completion] = {}
    heard = 0  # alarms
    with Progress(*columns, TextColumn("{task.fields[tail]}"), console=console, transient=True) as progress:
        bar = progress.add_task("rollout", total=len(requests), tail="")
        while not engine.idle:
            for completion in engine.tick():
                done[completion.key] = completion
            while heard < len(engine.alarms):
                on_alarm(engine.alarms[heard])
                heard += 1
            progress.update(bar, completed=len(done), tail=f"{engine.running} running")
    done.update((completion.key, completion) for completion in engine.drain())  # raises if a request failed
    return done


def _write(rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], file: Path) -> None:
    with file.open("w", encoding="utf-8") as lines:
        for rollout, verdict in zip(rollouts, verdicts, strict=True):
            completion = rollout.completion
            record = {
                "prompt": rollout.prompt.id,
                "request": completion.key.request,
                "content": rollout.prompt.content
                if isinstance(rollout.prompt.content, str)
                else [asdict(message) for message in rollout.prompt.content],
                "answer": completion.text,
                "reward": rollout.reward,
                "failure": asdict(verdict.failure) if verdict.failure else None,
                "tokens": len(completion.tokens),
                "finish_reason": completion.finish_reason,
            }
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")


# ---- telling


def _tell(console: Console, config: RunConfig, rollouts: Sequence[Rollout], seconds: float) -> None:
    lengths = Lengths.of(lengths_of(rollouts))
    table = Table(
        title=f"Rollout of {config.model.path} on {config.task.name}", title_justify="left", show_header=False
    )
    table.add_row("answers", f"{len(rollouts)} ({config.task.prompts} prompts × {config.task.group})")
    table.add_row("mean reward", f"{mean_reward(rollouts):.3f}")
    table.add_row(
        "answer length", f"median {lengths.p50}, p90 {lengths.p90}, p99 {lengths.p99}, longest {lengths.longest}"
    )
    table.add_row("time", f"{seconds:.1f} s, {lengths.total} tokens, {lengths.total / seconds:.0f} tokens/s")
    table.add_row("still running", f"{_still_running(rollouts)}  over time")
    console.print(table)
    best = next((rollout for rollout in rollouts if rollout.reward > 0), rollouts[0])
    console.print(f"One answer (reward {best.reward:g}):", style="bold")
    content = best.prompt.content
    asked = content if isinstance(content, str) else content[-1].content + "\n"
    console.print(f"{asked}{best.completion.text}", markup=False, style="dim")


def _still_running(rollouts: Sequence[Rollout], width: int = 32) -> str:
    """The long tail as a line: how many answers were still being written as the rollout went on."""
    lengths = [len(rollout.completion.tokens) for rollout in rollouts]
    longest = max(lengths)
    alive = [sum(length > longest * column / width for length in lengths) for column in range(width)]
    return "".join(_BARS[max(1, round(count / len(lengths) * (len(_BARS) - 1)))] for count in alive)


def _tell_identity(
    console: Console,
    policy: Policy,
    config: RunConfig,
    requests: Sequence[Request],
    completions: dict[Key, Completion],
) -> None:
    """Sampling is keyed: the same requests in another batch must give the same tokens."""
    some = list(dict.fromkeys([*requests[: _CHECKED // 2], *requests[-_CHECKED // 2 :]]))  # each once, however few
    again = _answer(policy, config, some, console, on_alarm=lambda _: None)  # the run's log is closed
    same = sum(completion.tokens == completions[key].tokens for key, completion in again.items())
    console.print(
        f"{same} of {len(again)} answers written again in a batch of their own came out token for token the same."
    )
