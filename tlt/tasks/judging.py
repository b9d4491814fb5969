"""Judging during the rollout: a group is judged when its last completion arrives, while other groups are decoded.

Groups that arrive while the judge is busy are then given to it together, and it may judge them beside each other. With
`by_step` all groups are judged in one call, once the last completion has arrived.

Always holds: the completions of a group are judged together, in the order of their keys, whatever the order of
arrival. A reward failure that stops the run raises at the next `hand_in`. Does not know rewards or the engine.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Self

from tlt.tasks.judge import Judge, PromptedCompletion, Verdict
from tlt.types import Completion, Group, Key, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class Judged:
    """A group, and the verdict on each of its rollouts."""

    group: Group
    verdicts: tuple[Verdict, ...]


class Judging:
    """The judging of one step. A context manager: leaving it cancels the judging that has not begun."""

    def __init__(self, judge: Judge, asked: Sequence[tuple[Prompt, Sequence[Key]]], *, by_step: bool = False) -> None:
        """`asked`: every prompt of the step with the keys of its completions."""
        self._judge, self._by_step = judge, by_step
        self._prompts = [(prompt, tuple(keys)) for prompt, keys in asked]
        self._group_of = {key: index for index, (_, keys) in enumerate(self._prompts) for key in keys}
        self._completions: list[dict[Key, Completion]] = [{} for _ in self._prompts]
        self._arrived: SimpleQueue[int] = SimpleQueue()  # complete groups that the judge has not got yet
        self._calls: list[Future[dict[int, list[Verdict]]]] = []  # of the judge; each judges some of the groups
        # One thread is enough, as it only waits for processes, and it keeps the groups in order of arrival.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judging")
        self.last_verdict_s = 0.0  # when the last group was judged, on the clock of time.perf_counter

    def hand_in(self, completion: Completion) -> None:
        self._raise_failures()
        index = self._group_of[completion.key]
        keys = self._prompts[index][1]
        completions = self._completions[index]
        completions[completion.key] = completion
        if len(completions) == len(keys) and not self._by_step:
            self._arrived.put(index)
            self._calls.append(self._thread.submit(self._judge_arrived))
        elif self._by_step and all(map(self._is_complete, range(len(self._prompts)))):
            self._calls.append(self._thread.submit(self._judge_groups, range(len(self._prompts))))

    def all_in(self) -> bool:
        """Whether every complete group has been judged."""
        return all(call.done() for call in self._calls)

    def judged(self) -> list[Judged]:
        """All groups in the order of the prompts. Waits for unfinished judging."""
        verdicts = {index: found for call in self._calls for index, found in call.result().items()}
        return [self._judged(index, verdicts[index]) for index in range(len(self._prompts))]

    def _is_complete(self, index: int) -> bool:
        return len(self._completions[index]) == len(self._prompts[index][1])

    def _judge_arrived(self) -> dict[int, list[Verdict]]:
        """Groups of one prompt each: a judge takes neighbours with the same prompt for one group."""
        groups: dict[str, int] = {}
        for _ in range(self._arrived.qsize()):
            index = self._arrived.get()
            if groups.setdefault(self._prompts[index][0].id, index) != index:
                self._arrived.put(index)  # for the next call: there are as many calls as groups
        return self._judge_groups(groups.values())

    def _judge_groups(self, groups: Iterable[int]) -> dict[int, list[Verdict]]:
        groups = list(groups)
        if not groups:
            return {}
        batch: list[PromptedCompletion] = [
            (self._prompts[index][0], self._completions[index][key])
            for index in groups
            for key in self._prompts[index][1]
        ]
        verdicts = iter(self._judge.judge(batch))
        self.last_verdict_s = time.perf_counter()
        return {index: list(islice(verdicts, len(self._prompts[index][1]))) for index in groups}

    def _judged(self, index: int, verdicts: Sequence[Verdict]) -> Judged:
        prompt, keys = self._prompts[index]
        completions = self._completions[index]
        pairs = zip(keys, verdicts, strict=True)
        rollouts = tuple(Rollout(prompt, completions[key], verdict.reward) for key, verdict in pairs)
        return Judged(Group(prompt, rollouts), tuple(verdicts))

    def _raise_failures(self) -> None:
        for call in self._calls:
            if call.done():
                call.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._thread.shutdown(cancel_futures=True)
