"""`tlt rollout`: a policy answers a task's prompts and is judged. One rollout of a training step, on its own.

Writes the run's directory: config.toml, events.jsonl and rollouts.jsonl (a line per answer).
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tlt import __version__
from tlt.config import RunConfig
from tlt.engine.build import build_engine
from tlt.engine.request import Request
from tlt.policy import Policy, open_policy
from tlt.spec.alarm import Alarm
from tlt.tasks.choose import judge_of, task_of
from tlt.tasks.judge import Judge, Verdict
from tlt.tasks.task import Task
from tlt.types import Completion, Key, Prompt, Rollout
from tlt.watch.events import AcceptanceCollapsed, EventLog, RewardsFailed, RolloutFinished, RunFinished, start_run

ROLLOUTS_FILE = "rollouts.jsonl"
_CHECKED = 16  # answers written a second time, in another batch, to compare
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Lengths:
    p50: int
    p90: int
    p99: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Lengths":
        ordered = sorted(lengths)

        def at(share: float) -> int:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        return cls(at(0.5), at(0.9), at(0.99), ordered[-1])


def rollout(config: RunConfig) -> None:
    """Samples the prompts of step 0, answers and judges them, and says how it went."""
    task = task_of(config)
    with judge_of(task) as judge:  # first: a reward that cannot be loaded is told before a policy is
        _roll_out(config, task, judge)


def _roll_out(config: RunConfig, task: Task, judge: Judge) -> None:
    console = Console(highlight=False)
    started = time.perf_counter()
    policy = open_policy(config.model)
    asked = _requests(config, policy, task)
    with start_run(config, "rollout", __version__) as log:
        answered_from = time.perf_counter()
        completions = _answer(policy, config, [request for _, request in asked], console, partial(_sound, log))
        seconds = time.perf_counter() - answered_from
        answers = [(prompt, completions[request.key]) for prompt, request in asked]
        verdicts = judge.judge(answers)
        rollouts = [Rollout(*answer, verdict.reward) for answer, verdict in zip(answers, verdicts, strict=True)]
        failures = _report_failures(log, verdicts)
        lengths = Lengths.of([len(rollout.completion.tokens) for rollout in rollouts])
        log.emit(
            RolloutFinished(
                step=0,
                n=len(rollouts),
                mean_reward=_mean_reward(rollouts),
                length_p50=lengths.p50,
                length_p90=lengths.p90,
                length_max=lengths.longest,
                tokens=sum(len(rollout.completion.tokens) for rollout in rollouts),
                seconds=seconds,
            )
        )
        directory = Path(config.run.out) / config.run.name
        _write(rollouts, verdicts, directory / ROLLOUTS_FILE)
        log.emit(RunFinished(seconds=time.perf_counter() - started))
    _tell(console, config, rollouts, lengths, seconds)
    for kind, count in failures.items():
        console.print(
            f"{count} rewards failed ({kind}): each counts as {config.task.failed_reward:g}.", style="bold red"
        )
    _tell_identity(console, policy, config, [request for _, request in asked], completions)
    console.print(f"Everything is in [bold]{directory}/[/bold]: config.toml, events.jsonl, {ROLLOUTS_FILE}.")


def _requests(config: RunConfig, policy: Policy, task: Task) -> list[tuple[Prompt, Request]]:
    """`task.group` requests for every prompt, numbered in order."""
    asked: list[tuple[Prompt, Request]] = []
    for prompt in task.sample(0, config.task.prompts):
        tokens = tuple(policy.tokenizer.encode_prompt(prompt.content))
        for _ in range(config.task.group):
            key = Key(config.run.seed, len(asked))
            asked.append((prompt, Request(key, tokens, config.sampling, prompt.id)))
    return asked


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


def _sound(log: EventLog, alarm: Alarm) -> None:
    log.emit(
        AcceptanceCollapsed(
            step=0,
            drafter=alarm.drafter,
            shape=str(alarm.shape),
            recent=alarm.recent,
            usual=alarm.usual,
            verifies=alarm.verifies,
        )
    )


def _report_failures(log: EventLog, verdicts: Sequence[Verdict]) -> Counter[str]:
    """An event for each way in which rewards failed; how many failed in each."""
    failures = [verdict.failure for verdict in verdicts if verdict.failure]
    counts = Counter[str](failure.kind for failure in failures)
    for kind, count in counts.items():
        first = next(failure for failure in failures if failure.kind == kind)
        log.emit(RewardsFailed(step=0, kind=kind, count=count, prompt=first.prompt, message=first.message))
    return counts


def _mean_reward(rollouts: Sequence[Rollout]) -> float:
    return sum(rollout.reward for rollout in rollouts) / len(rollouts)


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


def _tell(console: Console, config: RunConfig, rollouts: Sequence[Rollout], lengths: Lengths, seconds: float) -> None:
    tokens = sum(len(rollout.completion.tokens) for rollout in rollouts)
    table = Table(
        title=f"Rollout of {config.model.path} on {config.task.name}", title_justify="left", show_header=False
    )
    table.add_row("answers", f"{len(rollouts)} ({config.task.prompts} prompts × {config.task.group})")
    table.add_row("mean reward", f"{_mean_reward(rollouts):.3f}")
    table.add_row(
        "answer length", f"median {lengths.p50}, p90 {lengths.p90}, p99 {lengths.p99}, longest {lengths.longest}"
    )
    table.add_row("time", f"{seconds:.1f} s, {tokens} tokens, {tokens / seconds:.0f} tokens/s")
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
