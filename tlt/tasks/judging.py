"""Judging beside the rollout: a group is judged as soon as its last answer is in, while others are being written.

What always holds: a group's answers are judged together, in the order they were asked, whatever the order they came in;
a reward that stops the run stops it when the next answer is handed in, not when all are. Knows nothing of what a reward
computes, nor of the engine.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from tlt.tasks.judge import Answer, Judge, Verdict
from tlt.types import Completion, Group, Key, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class Judged:
    """A group, and how each of its rollouts was judged."""

    group: Group
    verdicts: tuple[Verdict, ...]


class Judging:
    """The judging of one step. Entered, it takes answers; left, nobody judges any more."""

    def __init__(self, judge: Judge, asked: Sequence[tuple[Prompt, Sequence[Key]]]) -> None:
        """`asked`: every prompt of the step with the keys of its answers."""
        self._judge = judge
        self._asked = [(prompt, tuple(keys)) for prompt, keys in asked]
        self._group_of = {key: index for index, (_, keys) in enumerate(self._asked) for key in keys}
        self._answers: list[dict[Key, Completion]] = [{} for _ in self._asked]
        self._verdicts: dict[int, Future[list[Verdict]]] = {}
        # One thread: it waits for processes, and the order in which a judge is asked stays the order of arrival.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judging")
        self.last_verdict_s = 0.0  # when the last group was judged, on the clock of time.perf_counter

    def hand_in(self, completion: Completion) -> None:
        self._raise_failures()
        index = self._group_of[completion.key]
        prompt, keys = self._asked[index]
        answers = self._answers[index]
        answers[completion.key] = completion
        if len(answers) == len(keys):
            batch: list[Answer] = [(prompt, answers[key]) for key in keys]
            self._verdicts[index] = self._thread.submit(self._judge_group, batch)

    def all_in(self) -> bool:
        """Whether every answer that was handed in as a whole group has been judged: nobody need wait any more."""
        return all(future.done() for future in self._verdicts.values())

    def judged(self) -> list[Judged]:
        """All groups in the order they were asked; waits for those still being judged."""
        return [self._judged(index) for index in range(len(self._asked))]

    def _judge_group(self, answers: Sequence[Answer]) -> list[Verdict]:
        verdicts = self._judge.judge(answers)
        self.last_verdict_s = time.perf_counter()
        return verdicts

    def _judged(self, index: int) -> Judged:
        prompt, keys = self._asked[index]
        answers, verdicts = self._answers[index], self._verdicts[index].result()
        rollouts = [Rollout(prompt, answers[key], verdict.reward) for key, verdict in zip(keys, verdicts, strict=True)]
        return Judged(Group(prompt, tuple(rollouts)), tuple(verdicts))

    def _raise_failures(self) -> None:
        for future in self._verdicts.values():
            if future.done():
                future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._thread.shutdown(cancel_futures=True)
