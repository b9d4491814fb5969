"""Judging during the rollout: a group is judged when its last completion arrives, while other groups are decoded.

Always holds: the completions of a group are judged together, in the order of their keys, whatever the order of
arrival. A reward failure that stops the run raises at the next `hand_in`. Does not know rewards or the engine.
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
    """A group, and the verdict on each of its rollouts."""

    group: Group
    verdicts: tuple[Verdict, ...]


class Judging:
    """The judging of one step. A context manager: leaving it cancels the judging that has not begun."""

    def __init__(self, judge: Judge, asked: Sequence[tuple[Prompt, Sequence[Key]]]) -> None:
        """`asked`: every prompt of the step with the keys of its completions."""
        self._judge = judge
        self._prompts = [(prompt, tuple(keys)) for prompt, keys in asked]
        self._group_of = {key: index for index, (_, keys) in enumerate(self._prompts) for key in keys}
        self._completions: list[dict[Key, Completion]] = [{} for _ in self._prompts]
        self._verdicts: dict[int, Future[list[Verdict]]] = {}
        # One thread is enough, as it only waits for processes, and it keeps the groups in order of arrival.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judging")
        self.last_verdict_s = 0.0  # when the last group was judged, on the clock of time.perf_counter

    def hand_in(self, completion: Completion) -> None:
        self._raise_failures()
        index = self._group_of[completion.key]
        prompt, keys = self._prompts[index]
        completions = self._completions[index]
        completions[completion.key] = completion
        if len(completions) == len(keys):
            batch: list[Answer] = [(prompt, completions[key]) for key in keys]
            self._verdicts[index] = self._thread.submit(self._judge_group, batch)

    def all_in(self) -> bool:
        """Whether every complete group has been judged."""
        return all(future.done() for future in self._verdicts.values())

    def judged(self) -> list[Judged]:
        """All groups in the order of the prompts. Waits for unfinished judging."""
        return [self._judged(index) for index in range(len(self._prompts))]

    def _judge_group(self, answers: Sequence[Answer]) -> list[Verdict]:
        verdicts = self._judge.judge(answers)
        self.last_verdict_s = time.perf_counter()
        return verdicts

    def _judged(self, index: int) -> Judged:
        prompt, keys = self._prompts[index]
        completions, verdicts = self._completions[index], self._verdicts[index].result()
        pairs = zip(keys, verdicts, strict=True)
        rollouts = tuple(Rollout(prompt, completions[key], verdict.reward) for key, verdict in pairs)
        return Judged(Group(prompt, rollouts), tuple(verdicts))

    def _raise_failures(self) -> None:
        for future in self._verdicts.values():
            if future.done():
                future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._thread.shutdown(cancel_futures=True)
