"""Completions of several turns: behind a turn comes what the task replies, and the policy continues behind that.

What always holds: all turns of a completion have its key, and positions continue through turns and replies, so that its
tokens are a function of policy, key and replies. Tokens of replies are 0 in `loss_mask`. `max_tokens` bounds turns and
replies together: it cuts a completion and changes nothing before the cut. Replies are computed in one thread, one after
the other, while the engine writes other completions. Does not know engines or fleets.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from tlt.engine.request import Request
from tlt.errors import TaskError, shown
from tlt.tasks.task import MultiTurnTask, Task
from tlt.text import Tokenizer
from tlt.types import Completion, Key, Prompt, Timing

Reply = Callable[[Prompt, Completion], str | Sequence[int] | None]  # as `MultiTurnTask.reply`


@dataclass(frozen=True, slots=True)
class Replies:
    """The replies of a task, as tokens."""

    reply_to: Reply
    tokenizer: Tokenizer
    prompts: Mapping[Key, Prompt]  # of every completion

    def reply(self, completion: Completion) -> tuple[int, ...] | None:
        """What follows the turns so far; None: nothing."""
        prompt = self.prompts[completion.key]
        with ExitStack() as stack:
            stack.push(partial(_note, prompt, completion))
            said = self.reply_to(prompt, completion)
        if said is None:
            return None
        tokens = self.tokenizer.encode_text(said) if isinstance(said, str) else said
        if not isinstance(tokens, Sequence) or not all(type(token) is int for token in tokens):
            raise TaskError(
                f"the reply to prompt {prompt.id} is {shown(said)}; expected text, a sequence of token ids, or None"
            )
        return tuple(tokens)

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)


def _note(prompt: Prompt, completion: Completion, _: object, error: BaseException | None, __: object) -> None:
    """Adds the prompt and the completion so far to an error of the task's reply, which propagates."""
    if error:
        error.add_note(f"in the reply to prompt {prompt.id}; the completion so far is {shown(completion.text)}")


def replies_of(task: Task, tokenizer: Tokenizer, prompts: Mapping[Key, Prompt]) -> Replies | None:
    """None: the task's completions have one turn."""
    return Replies(task.reply, tokenizer, prompts) if isinstance(task, MultiTurnTask) else None


class MultiTurn:
    """The completions of a rollout, turn by turn. A context manager: leaving it drops replies under way."""

    def __init__(self, requests: Sequence[Request], replies: Replies | None) -> None:
        self._replies = replies
        self._requests = {request.key: request for request in requests} if replies else {}
        self._so_far: dict[Key, Completion] = {}  # turns and replies of unfinished completions
        self._complete: list[Completion] = []
        self._under_way: dict[Future[tuple[int, ...] | None], Completion] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replies")  # starts with the first reply

    @property
    def waiting(self) -> bool:
        """Whether replies are under way."""
        return bool(self._under_way)

    def hand_in(self, turn: Completion) -> None:
        """A completed request of this rollout."""
        if self._replies is None:
            self._complete.append(turn)
            return
        before = self._so_far.pop(turn.key, None)
        completion = _joined(before, turn, self._replies) if before else _with_mask(turn)
        if turn.finish_reason in ("length", "abort"):
            self._complete.append(completion)
        else:
            self._under_way[self._thread.submit(self._replies.reply, completion)] = completion

    def take(self, patience_s: float | None = 0.0) -> tuple[list[Completion], list[Request]]:
        """Completions that are complete, and requests for the next turns of others, each once.

        Waits up to `patience_s` for a reply if nothing else is there; None: until one is there.
        """
        if self._under_way and not self._complete:
            wait(self._under_way, timeout=patience_s, return_when=FIRST_COMPLETED)
        further = list[Request]()
        for future in [future for future in self._under_way if future.done()]:
            self._continue(self._under_way.pop(future), future.result(), further)
        complete, self._complete = self._complete, []
        return complete, further

    def _continue(self, completion: Completion, reply: tuple[int, ...] | None, further: list[Request]) -> None:
        if reply is None:
            self._complete.append(completion)
            return
        assert self._replies is not None
        request = self._requests[completion.key]
        left = request.params.max_tokens - len(completion.tokens)
        followed = _with_reply(completion, reply[:left], self._replies)
        if len(reply) >= left:
            self._complete.append(replace(followed, finish_reason="length"))
            return
        self._so_far[completion.key] = followed
        params = replace(request.params, max_tokens=left - len(reply))
        tokens, guess = followed.tokens, request.draft_tokens[len(followed.tokens) :]
        further.append(replace(request, prompt=request.prompt + tokens, params=params, draft_tokens=guess))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _with_mask(turn: Completion) -> Completion:
    return replace(turn, loss_mask=b"\1" * len(turn.tokens))


def _with_reply(completion: Completion, reply: tuple[int, ...], replies: Replies) -> Completion:
    tokens, nothing = completion.tokens + reply, (0.0,) * len(reply)
    return replace(
        completion,
        tokens=tokens,
        text=replies.text(tokens),
        logprobs=completion.logprobs + nothing,
        policy_logprobs=completion.policy_logprobs + nothing,
        drafted=completion.drafted + bytes(len(reply)),
        loss_mask=completion.loss_mask + bytes(len(reply)),
    )


def _joined(before: Completion, turn: Completion, replies: Replies) -> Completion:
    """One completion of the turns before, with the last reply, and the newest turn."""
    tokens = before.tokens + turn.tokens
    return replace(
        turn,
        prompt_tokens=before.prompt_tokens,
        tokens=tokens,
        text=replies.text(tokens),
        logprobs=before.logprobs + turn.logprobs,
        policy_logprobs=before.policy_logprobs + turn.policy_logprobs,
        drafted=before.drafted + turn.drafted,
        loss_mask=before.loss_mask + b"\1" * len(turn.tokens),
        timing=Timing(
            first_token_s=before.timing.first_token_s,
            finished_s=before.timing.finished_s + turn.timing.finished_s,
            preemptions=before.timing.preemptions + turn.timing.preemptions,
        ),
    )
