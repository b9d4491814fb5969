"""`tlt rollout`: decodes a task's prompts and judges the completions. The rollout of one training step, on its own.

Writes a directory of its own, out/name-rollout: config.toml, events.jsonl and rollouts.jsonl (a line per answer).
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tlt import __version__
from tlt.config import RunConfig
from tlt.engine.build import build_engine
from tlt.engine.request import Request
from tlt.evaluate import answered
from tlt.event_builders import Lengths, acceptance_collapsed, lengths_of, mean_reward, rewards_failed, rollout_finished
from tlt.loop import ask
from tlt.model.weights import read_config
from tlt.outputs import write_new
from tlt.policy import Policy, open_policy, source_of
from tlt.tasks.choose import judge_of, task_of
from tlt.tasks.context import fit_task, refuse_long_prompts
from tlt.tasks.judge import Verdict
from tlt.tasks.task import Task
from tlt.text import Tokenizer
from tlt.types import Prompt, Rollout
from tlt.watch.directory import ROLLOUTS, held
from tlt.watch.events import RewardsFailed, RunFinished, StartupFinished, StartupPhase
from tlt.watch.log import EventLog
from tlt.watch.session import Watched

_CHECKED = 16  # answers written a second time, in another batch, to compare
_BARS = " ▁▂▃▄▅▆▇█"


def rollout(config: RunConfig) -> None:
    """Decodes and judges the prompts of step 1, and prints a summary."""
    console = Console(highlight=False)
    with held(config, "rollout") as directory:
        with Watched(config, "rollout", __version__, console=console) as log:
            summary = _roll_out(config, log, console, directory / ROLLOUTS)
        _print_summary(console, config, summary, directory)


@dataclass(frozen=True, slots=True)
class _Summary:
    """The data of the printed summary."""

    policy: Policy
    requests: list[Request]
    rollouts: list[Rollout]
    failures: list[RewardsFailed]
    seconds: float


def _roll_out(config: RunConfig, log: EventLog, console: Console, file: Path) -> _Summary:
    started = time.perf_counter()
    log.emit(StartupPhase("reading the prompts"))
    task = task_of(config)
    with judge_of(task, config) as judge:  # first: a reward that cannot be loaded fails before the policy is opened
        asked = _ask(config, task)
        log.emit(StartupPhase(f"opening the policy {config.model.path}"))
        policy = open_policy(config.model)
        engine = build_engine(policy, config, on_phase=lambda phase: log.emit(StartupPhase(phase)))
        log.emit(StartupFinished(seconds=time.perf_counter() - started))
        requests = [request for _, request in asked]

        began = time.perf_counter()
        completions = {completion.key: completion for completion in answered(engine, requests, console)}
        seconds = time.perf_counter() - began
        for alarm in engine.alarms:
            log.emit(acceptance_collapsed(1, alarm))
        answers = [(prompt, completions[request.key]) for prompt, request in asked]
        verdicts = judge.judge(answers)
    rollouts = [Rollout(*answer, verdict.reward) for answer, verdict in zip(answers, verdicts, strict=True)]
    failures = rewards_failed(1, verdicts)
    for failure in failures:
        log.emit(failure)
    log.emit(rollout_finished(1, rollouts, seconds))
    write_new(file, lambda place: _write(rollouts, verdicts, place))
    log.emit(RunFinished(seconds=time.perf_counter() - started))
    return _Summary(policy, requests, rollouts, failures, seconds)


def _ask(config: RunConfig, task: Task) -> list[tuple[Prompt, Request]]:
    """Each request with its prompt. Raises TaskError if a prompt leaves no room for a completion."""
    source = source_of(config.model)
    fitted = fit_task(task, Tokenizer.load(source), config, context := read_config(source).max_positions)
    asked = ask(0, config, task, fitted.tokenizer)
    if config.task.long_prompts == "refuse":  # those of tasks that are no file, too
        refuse_long_prompts([one.prompt for one in asked], fitted.tokenizer, context, config.sampling.max_tokens)
    return [(one.prompt, request) for one in asked for request in one.requests]


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
                "parts": dict(verdict.parts),
                "metrics": dict(verdict.metrics),
                "failure": asdict(verdict.failure) if verdict.failure else None,
                "tokens": len(completion.tokens),
                "finish_reason": completion.finish_reason,
            }
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")


# ---- printing


def _print_summary(console: Console, config: RunConfig, summary: _Summary, directory: Path) -> None:
    _print_table(console, config, summary.rollouts, summary.seconds)
    for failure in summary.failures:
        console.print(
            f"{failure.count} rewards failed ({failure.kind}): each counts as {config.task.failed_reward:g}.",
            style="bold red",
        )
    _print_identity(console, config, summary)
    console.print(f"Everything is in [bold]{directory}/[/bold]: config.toml, events.jsonl, {ROLLOUTS}.", soft_wrap=True)


def _print_table(console: Console, config: RunConfig, rollouts: Sequence[Rollout], seconds: float) -> None:
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
    """The long tail as a sparkline: running requests over the course of the rollout."""
    lengths = [len(rollout.completion.tokens) for rollout in rollouts]
    longest = max(lengths)
    alive = [sum(length > longest * column / width for length in lengths) for column in range(width)]
    return "".join(_BARS[max(1, round(count / len(lengths) * (len(_BARS) - 1)))] for count in alive)


def _print_identity(console: Console, config: RunConfig, summary: _Summary) -> None:
    """Decodes some requests again in another batch and counts equal completions: sampling is keyed."""
    requests, half = summary.requests, _CHECKED // 2
    some = list(dict.fromkeys([*requests[:half], *requests[-half:]]))  # without duplicates
    before = {rollout.completion.key: rollout.completion.tokens for rollout in summary.rollouts}
    again = list(answered(build_engine(summary.policy, config), some, console))
    same = sum(completion.tokens == before[completion.key] for completion in again)
    console.print(
        f"{same} of {len(again)} answers written again in a batch of their own came out token for token the same."
    )
