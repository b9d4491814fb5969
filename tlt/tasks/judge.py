"""Judges compute the rewards of completions. The user's reward runs in separate processes, with a time limit.

Every completion gets a verdict, in the order given. A reward that raises, hangs, ends its process or returns no number
is an error that names the prompt, or it is counted and replaced by `task.failed_reward`. It is never a silent zero. A
process that hung or died is replaced. Does not know what a reward computes.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
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
from tlt.tasks.remote import is_remote, longest_s
from tlt.tasks.rewards import Case, Failed, FailureKind, Opening, Ready, Refused, Scored, scored_of
from tlt.types import Completion, Prompt

_START_TIMEOUT_S = 600.0  # limit of the user's imports, which may load a model
_SHOWN = 200  # characters of a completion in a message

PromptedCompletion = tuple[Prompt, Completion]
Call = tuple[int, ...]  # indices of the completions judged in one call
Score = Scored | Failed
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed reward."""

    prompt: str  # id of the prompt
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reward of a completion. If the reward failed, `task.failed_reward` and the failure."""

    reward: float
    failure: Failure | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # of several rewards each, before it is weighted
    metrics: Mapping[str, float] = field(default_factory=dict)  # what rewards told beside themselves
    applies: bool = True  # False: one of several rewards does not judge this completion


class Judge(Protocol):
    """Judges completions. A context manager: entering starts it or raises; leaving stops its processes."""

    def judge(self, completions: Sequence[PromptedCompletion]) -> list[Verdict]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *failure: object) -> None: ...


class Rewards(Protocol):
    """What can be judged in this process: a task, or a part of one."""

    def reward(self, prompt: Prompt, completion: Completion) -> float | Mapping[str, float]: ...


class DirectJudge:
    """Calls the reward of a built-in task or of a task passed from Python in this process, without a time limit."""

    def __init__(self, task: Rewards) -> None:
        self._task = task

    def judge(self, completions: Sequence[PromptedCompletion]) -> list[Verdict]:
        return [self._verdict(prompt, completion) for prompt, completion in completions]

    def _verdict(self, prompt: Prompt, completion: Completion) -> Verdict:
        with ExitStack() as stack:
            stack.push(partial(_note, prompt, completion))
            scored = scored_of(self._task.reward(prompt, completion))
        if isinstance(scored, Failed):
            raise TaskError(f"the reward of prompt {prompt.id} is no number: {scored.message}; repair the task")
        return Verdict(scored.reward, metrics=scored.metrics)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        pass


class ProcessJudge:
    """Calls the user's reward in `task.reward_processes` processes, which are kept between steps."""

    def __init__(
        self, settings: TaskSettings, columns: frozenset[str] = frozenset(), *, one_of_several: bool = False
    ) -> None:
        self._settings, self._one_of_several = settings, one_of_several
        self._columns = columns  # columns that every prompt has
        self._children: list[_Child] = []
        self._takes_groups = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes. A later `judge` starts new ones."""
        while self._children:
            self._children.pop().end()

    def judge(self, completions: Sequence[PromptedCompletion]) -> list[Verdict]:
        self._start()  # also sets `_takes_groups`
        cases = [case_of(prompt, completion) for prompt, completion in completions]
        verdicts: dict[int, Verdict] = {}
        for call, scores in self._scores(cases, deque(self._calls(cases))):
            for number, score in zip(call, scores, strict=True):
                verdicts[number] = self._verdict(cases[number], score)
        return [verdicts[number] for number in range(len(cases))]

    def _start(self) -> None:
        while len(self._children) < self._settings.reward_processes:
            self._children.append(self._child())

    def _child(self) -> "_Child":
        own = self._settings
        convention, pattern, limit_s = own.reward_convention, own.reward_format, own.reward_timeout_s
        child = _Child(Opening(own.reward, convention, pattern, limit_s, own.reward_retries, self._one_of_several))
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
        """One completion per call. If the reward takes several: those to the same prompt, or all of them."""
        if not self._takes_groups:
            return ((number,) for number in range(len(cases)))
        if self._settings.reward_batch == "step":
            return iter([tuple(range(len(cases)))])
        groups = groupby(range(len(cases)), key=lambda number: cases[number].prompt_id)
        return (tuple(numbers) for _, numbers in groups)

    def _scores(self, cases: Sequence[Case], calls: deque[Call]) -> Iterator[tuple[Call, Sequence[Score]]]:
        """Gives each call to an idle child. Yields a call as soon as it has finished or failed."""
        busy: dict[_Child, Call] = {}
        while calls or busy:
            if calls:
                self._start()  # replaces children that hung or died
            for child in [child for child in self._children if child not in busy][: len(calls)]:
                busy[child] = call = calls.popleft()
                child.begin(tuple(cases[number] for number in call), self._limit_s(len(call)))
            for child in _first_to_finish(list(busy)):
                call = busy.pop(child)
                outcome = child.finish()
                if isinstance(outcome, Failed):
                    self._children.remove(child)
                    outcome = (outcome,) * len(call)
                yield call, outcome

    def _limit_s(self, completions: int) -> float:
        """Of a server every attempt may take this long, and it keeps the time itself."""
        attempt_s = self._settings.reward_timeout_s * completions
        if not is_remote(self._settings.reward):
            return attempt_s
        return longest_s(attempt_s, self._settings.reward_retries)

    def _verdict(self, case: Case, score: Score) -> Verdict:
        if not isinstance(score, Failed):
            return Verdict(score.reward, metrics=score.metrics, applies=score.applies)
        if self._settings.reward_errors == "stop":
            self.close()  # others may still be judging
            raise TaskError(_complaint(case, score))
        return Verdict(self._settings.failed_reward, Failure(case.prompt_id, score.kind, score.message))


class _Child:
    """One judging process. Runs one call at a time: `begin`, then `finish` on its reply or at its deadline."""

    def __init__(self, opening: Opening) -> None:
        self.line, theirs = socket.socketpair()
        self._count = 0  # completions in the last call
        self._limit_s = _START_TIMEOUT_S
        with theirs:
            self._process = _starter(os.getpid()).submit(_start_process, theirs.fileno()).result()
        self.deadline = time.monotonic() + _START_TIMEOUT_S
        self._send(opening)
        self.ready = self._opened()

    def begin(self, cases: tuple[Case, ...], limit_s: float) -> None:
        self._count, self._limit_s = len(cases), limit_s
        self.deadline = time.monotonic() + limit_s
        self._send(cases)

    def finish(self) -> Sequence[Score] | Failed:
        """The scores. Failed if the process sent none; the process has ended then."""
        return self._receive(lambda payload: read_scores_reply(payload, self._count))

    def end(self) -> int:
        """Kills the process and its children. Returns the exit code."""
        self.line.close()
        os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so the pid cannot belong to another process
        return self._process.wait()

    def _opened(self) -> Ready:
        reply = self._receive(read_opening_reply)
        if isinstance(reply, Ready):
            return reply
        if isinstance(reply, Refused):
            self.end()
            raise TaskError(reply.message)
        raise TaskError(f"the reward's process did not start; it {reply.kind}: {reply.message}")

    def _send(self, message: object) -> None:
        with suppress(ConnectionError, TimeoutError):  # a dead or hanging process is reported by `_receive`
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
    """The thread that starts judging processes; it lives as long as this process. On Linux a judging process is killed
    when the thread that started it ends, and judges are called from short-lived threads."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"judge-starter-{process}")


def _start_process(line: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tlt.tasks.judge_child", str(line), str(os.getpid())],
        pass_fds=[line],
        stdin=subprocess.DEVNULL,
        stdout=2,  # output of the user's code goes to stderr
        start_new_session=True,  # Ctrl-C does not reach it, and `end` kills its whole process group
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def case_of(prompt: Prompt, completion: Completion) -> Case:
    content = prompt.content
    return Case(
        prompt_id=prompt.id,
        prompt=content if isinstance(content, str) else [asdict(message) for message in content],
        completion=completion.text,
        tokens=completion.tokens,
        reference=prompt.reference,
        source=str(prompt.extra.get("data_source", prompt.id.rpartition(":")[0])),
        columns=dict(prompt.extra),
    )


def _first_to_finish(children: Sequence[_Child]) -> list[_Child]:
    """Waits until at least one child has replied or reached its deadline."""
    over: list[_Child] = []
    while not over:
        patience = max(0.0, min(child.deadline for child in children) - time.monotonic())
        readable = wait([child.line for child in children], timeout=patience)
        now = time.monotonic()
        over = [child for child in children if child.line in readable or child.deadline <= now]
    return over


def _how(code: int) -> str:
    names = {known.value: known.name for known in signal.Signals}  # lacks most real-time signals
    return f"signal {names.get(-code, -code)}" if code < 0 else f"exit code {code}"


def _complaint(case: Case, failed: Failed) -> str:
    more_time = "give it more time with task.reward_timeout_s, " if failed.kind == "timed out" else ""
    return (
        f"the reward of prompt {case.prompt_id} {'is' if failed.kind == 'no number' else 'has'} {failed.kind}\n"
        f"{failed.message}\n"
        f"the completion begins {_beginning(case.completion)}\n"
        f"repair the reward, {more_time}"
        'or count such completions with task.reward_errors = "count"'
    )


def _note(prompt: Prompt, completion: Completion, _: object, error: BaseException | None, __: object) -> None:
    """Adds the prompt and the completion's beginning to an error of the task's reward, which propagates."""
    if error:
        error.add_note(f"in the reward of prompt {prompt.id}; the completion begins {_beginning(completion.text)}")


def _beginning(completion: str) -> str:
    return repr(completion[:_SHOWN] + "…" * (len(completion) > _SHOWN))
