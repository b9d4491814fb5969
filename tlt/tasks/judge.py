"""Judges: what answers earn. The user's reward runs in processes of its own, with a time limit per answer.

Every answer gets a verdict, in the order given. A reward that raises, hangs, kills its process or returns no number
ends the run with an error that names the prompt, or is counted by name and given the value the user chose: never a zero
that nobody sees. A process that hung or died is replaced. Knows nothing of what a reward computes.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import groupby
from multiprocessing.connection import wait
from typing import Protocol, Self, TypeVar

from tlt.config import TaskSettings
from tlt.errors import TaskError
from tlt.tasks.judge_wire import (
    LARGEST_FRAME,
    InvalidReply,
    read_opening_reply,
    read_scores_reply,
    receive_frame,
    send_frame,
)
from tlt.tasks.rewards import Case, Failed, FailureKind, Opening, Ready, Refused, number_of
from tlt.tasks.task import Task
from tlt.types import Completion, Prompt

_START_TIMEOUT_S = 600.0  # for the user's imports: some load a model
_SHOWN = 200  # characters of an answer in a message

Answer = tuple[Prompt, Completion]
Call = tuple[int, ...]  # the answers judged in one call, by number
Score = float | Failed
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """A reward that was none."""

    prompt: str  # its id
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an answer earns; if its reward failed, the value chosen for that case, and how it failed."""

    reward: float
    failure: Failure | None = None


class Judge(Protocol):
    """Judges answers. Entered, it is ready to judge, or raises; left, nothing of it remains."""

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *failure: object) -> None: ...


class DirectJudge:
    """The task's own reward, called in this process, for as long as it takes: tlt's own tasks, and Python callers'."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return [Verdict(self._reward(prompt, completion)) for prompt, completion in answers]

    def _reward(self, prompt: Prompt, completion: Completion) -> float:
        with ExitStack() as stack:
            stack.push(partial(_note, prompt, completion))
            reward = number_of(self._task.reward(prompt, completion))
        if isinstance(reward, Failed):
            raise TaskError(f"the reward of prompt {prompt.id} is no number: {reward.message}; repair the task")
        return reward

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        pass


class ProcessJudge:
    """The user's reward, called in `task.reward_processes` processes that are kept from one step to the next."""

    def __init__(self, settings: TaskSettings, columns: frozenset[str] = frozenset()) -> None:
        self._settings = settings
        self._columns = columns  # that every prompt brings
        self._children: list[_Child] = []
        self._takes_groups = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; judging again starts new ones."""
        while self._children:
            self._children.pop().end()

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        self._start()  # tells how it wants its calls
        cases = [case_of(prompt, completion) for prompt, completion in answers]
        verdicts: dict[int, Verdict] = {}
        for call, scores in self._scores(cases, deque(self._calls(cases))):
            for number, score in zip(call, scores, strict=True):
                verdicts[number] = self._verdict(cases[number], score)
        return [verdicts[number] for number in range(len(cases))]

    def _start(self) -> None:
        while len(self._children) < self._settings.reward_processes:
            self._children.append(self._child())

    def _child(self) -> "_Child":
        child = _Child(Opening(self._settings.reward, self._settings.reward_convention))
        missing = [name for name in child.ready.needs if name not in self._columns]
        if missing:
            child.end()
            raise TaskError(
                f"task.reward {self._settings.reward} asks for {', '.join(missing)}; "
                f"the columns of every prompt in {self._settings.path} are {', '.join(sorted(self._columns)) or 'none'}"
            )
        self._takes_groups = child.ready.takes_groups
        return child

    def _calls(self, cases: Sequence[Case]) -> Iterator[Call]:
        """One answer a call; or all answers to a prompt, as they stand beside each other."""
        if not self._takes_groups:
            return ((number,) for number in range(len(cases)))
        groups = groupby(range(len(cases)), key=lambda number: cases[number].prompt_id)
        return (tuple(numbers) for _, numbers in groups)

    def _scores(self, cases: Sequence[Case], calls: deque[Call]) -> Iterator[tuple[Call, Sequence[Score]]]:
        """Hands the calls to whoever is free; yields each as soon as it is done or has failed."""
        busy: dict[_Child, Call] = {}
        while calls or busy:
            if calls:
                self._start()  # in the place of those that hung or died
            for child in [child for child in self._children if child not in busy][: len(calls)]:
                busy[child] = call = calls.popleft()
                limit_s = self._settings.reward_timeout_s * len(call)
                child.begin(tuple(cases[number] for number in call), limit_s)
            for child in _first_to_finish(list(busy)):
                call = busy.pop(child)
                outcome = child.finish()
                if isinstance(outcome, Failed):
                    self._children.remove(child)
                    outcome = (outcome,) * len(call)
                yield call, outcome

    def _verdict(self, case: Case, score: Score) -> Verdict:
        if not isinstance(score, Failed):
            return Verdict(score)
        if self._settings.reward_errors == "stop":
            self.close()  # others may still be judging
            raise TaskError(_complaint(case, score))
        return Verdict(self._settings.failed_reward, Failure(case.prompt_id, score.kind, score.message))


class _Child:
    """One judging process. A call at a time: `begin`, then `finish` when it is over or its time is."""

    def __init__(self, opening: Opening) -> None:
        self.line, theirs = socket.socketpair()
        self._answers = 0  # that it was asked to judge, by the last call
        self._limit_s = _START_TIMEOUT_S
        with theirs:
            self._process = _starter(os.getpid()).submit(_start_process, theirs.fileno()).result()
        self.deadline = time.monotonic() + _START_TIMEOUT_S
        self._send(opening)
        self.ready = self._opened()

    def begin(self, cases: tuple[Case, ...], limit_s: float) -> None:
        self._answers, self._limit_s = len(cases), limit_s
        self.deadline = time.monotonic() + limit_s
        self._send(cases)

    def finish(self) -> Sequence[Score] | Failed:
        """The scores; Failed if there are none, and then the process has been ended."""
        return self._receive(lambda payload: read_scores_reply(payload, self._answers))

    def end(self) -> int:
        """Ends the process and what it has started, and says how it ended."""
        self.line.close()
        os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        return self._process.wait()

    def _opened(self) -> Ready:
        answer = self._receive(read_opening_reply)
        if isinstance(answer, Ready):
            return answer
        if isinstance(answer, Refused):
            self.end()
            raise TaskError(answer.message)
        raise TaskError(f"the reward's process did not start; it {answer.kind}: {answer.message}")

    def _send(self, message: object) -> None:
        with suppress(ConnectionError, TimeoutError):  # it has died or hangs, and receiving will say so
            send_frame(self.line, pickle.dumps(message), self.deadline)

    def _receive(self, read: Callable[[bytes], T]) -> T | Failed:
        try:
            return read(receive_frame(self.line, self.deadline, LARGEST_FRAME))
        except (EOFError, ConnectionError):
            return Failed("died", f"the reward ended its process ({_how(self.end())})")
        except InvalidReply as error:
            self.end()
            return Failed("died", f"the reward's process was ended, as it sent {error}")
        except TimeoutError:
            self.end()
            return Failed("timed out", f"no reward within {self._limit_s:g} s")


@cache
def _starter(process: int) -> ThreadPoolExecutor:
    """The thread of this process that starts judging processes. It stays as long as the process does: on Linux a
    judging process is killed when the thread that started it ends, and judges are called from threads of a step."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"judge-starter-{process}")


def _start_process(line: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tlt.tasks.judge_child", str(line), str(os.getpid())],
        pass_fds=[line],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what the user's code prints goes where errors go
        start_new_session=True,  # Ctrl-C is ours; and its processes end with it
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def case_of(prompt: Prompt, completion: Completion) -> Case:
    content = prompt.content
    return Case(
        prompt_id=prompt.id,
        prompt=content if isinstance(content, str) else [asdict(message) for message in content],
        answer=completion.text,
        tokens=completion.tokens,
        reference=prompt.reference,
        source=str(prompt.extra.get("data_source", prompt.id.rpartition(":")[0])),
        columns=dict(prompt.extra),
    )


def _first_to_finish(children: Sequence[_Child]) -> list[_Child]:
    """Waits until some have an answer or have run out of time; at least one."""
    over: list[_Child] = []
    while not over:
        patience = max(0.0, min(child.deadline for child in children) - time.monotonic())
        heard = wait([child.line for child in children], timeout=patience)
        now = time.monotonic()
        over = [child for child in children if child.line in heard or child.deadline <= now]
    return over


def _how(code: int) -> str:
    names = {known.value: known.name for known in signal.Signals}  # not of every real-time signal
    return f"signal {names.get(-code, -code)}" if code < 0 else f"exit code {code}"


def _complaint(case: Case, failed: Failed) -> str:
    more_time = "give it more time with task.reward_timeout_s, " if failed.kind == "timed out" else ""
    return (
        f"the reward of prompt {case.prompt_id} {'is' if failed.kind == 'no number' else 'has'} {failed.kind}\n"
        f"{failed.message}\n"
        f"the answer begins {_beginning(case.answer)}\n"
        f"repair the reward, {more_time}"
        'or count such answers with task.reward_errors = "count"'
    )


def _note(prompt: Prompt, completion: Completion, _: object, error: BaseException | None, __: object) -> None:
    """The task may be the user's: its error passes on, and says what it happened on."""
    if error:
        error.add_note(f"in the reward of prompt {prompt.id}; the answer begins {_beginning(completion.text)}")


def _beginning(answer: str) -> str:
    return repr(answer[:_SHOWN] + "…" * (len(answer) > _SHOWN))
