"""Log-probabilities in the formats of /v1/completions, /v1/chat/completions and /inference/v1/generate."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tlt.serve.messages import ServeOutput
from tlt.text import Tokenizer

Row = tuple[tuple[int, float], ...]  # (token, log-probability) of the likeliest tokens of a position


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of consecutive tokens. None: nothing precedes the first token of a text."""

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    top: tuple[Row | None, ...]  # likeliest first; empty rows where none were requested


def of_output(output: ServeOutput, prompt: Sequence[int], *, echo: bool, top: int, processed: bool) -> TokenLogprobs:
    """Of the output's tokens, and before them of the prompt's if it is echoed.

    `processed`: under the distribution that was sampled (temperature and filters) instead of the policy's own."""
    drawn = output.logprobs if processed else output.policy_logprobs
    count = len(output.tokens)
    rows: tuple[Row | None, ...] = ((),) * count
    if output.scores and count and top:
        scored = tuple(row[:top] for row in output.scores.top[-count:])
        rows = tuple(map(_with_drawn, scored, output.tokens, drawn))
    if not echo:
        return TokenLogprobs(output.tokens, drawn, rows)
    assert output.scores is not None
    before = len(prompt) - 1
    own = output.scores.logprobs[:before]
    known = [_with_drawn(row[:top], token, p) if top else () for row, token, p in _prompt_rows(output, prompt)]
    return TokenLogprobs((*prompt, *output.tokens), (None, *own, *drawn), (None, *known, *rows))


def _prompt_rows(output: ServeOutput, prompt: Sequence[int]) -> Iterator[tuple[Row, int, float]]:
    assert output.scores is not None
    rows = output.scores.top or ((),) * len(output.scores.logprobs)
    return zip(rows, prompt[1:], output.scores.logprobs, strict=False)


def _with_drawn(row: Row, token: int, logprob: float) -> Row:
    """The likeliest tokens, the text's own among them with its own number."""
    return tuple((t, logprob if t == token else p) for t, p in row) if token in dict(row) else (*row, (token, logprob))


def token_name(token: int) -> str:
    return f"token_id:{token}"


def _names(tokenizer: Tokenizer, as_ids: bool, tokens: Sequence[int]) -> list[str]:
    return [token_name(token) if as_ids else tokenizer.piece(token) for token in tokens]


def for_completions(found: TokenLogprobs, tokenizer: Tokenizer, offset: int, *, as_ids: bool) -> dict[str, Any]:
    names = _names(tokenizer, as_ids, found.tokens)
    offsets = []
    for token in found.tokens:
        offsets.append(offset)
        offset += len(tokenizer.piece(token))
    top = [None if row is None else _by_name(row, tokenizer, as_ids) for row in found.top]
    return {"tokens": names, "token_logprobs": list(found.logprobs), "top_logprobs": top, "text_offset": offsets}


def _by_name(row: Row, tokenizer: Tokenizer, as_ids: bool) -> dict[str, float]:
    """Of several tokens with one text the likeliest counts."""
    named: dict[str, float] = {}
    for token, logprob in row:
        name = token_name(token) if as_ids else tokenizer.piece(token)
        named[name] = max(logprob, named.get(name, logprob))
    return named


def for_chat(found: TokenLogprobs, tokenizer: Tokenizer, *, as_ids: bool) -> dict[str, Any]:
    content = []
    for token, logprob, row in zip(found.tokens, found.logprobs, found.top, strict=True):
        top = [_entry(other, value, tokenizer, as_ids) for other, value in row or ()]
        content.append({**_entry(token, logprob, tokenizer, as_ids), "top_logprobs": top})
    return {"content": content}


def for_tokens(found: TokenLogprobs) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": token_name(token),
                "token_id": token,
                "logprob": logprob,
                "top_logprobs": [{"token": token_name(t), "token_id": t, "logprob": p} for t, p in row or ()],
            }
            for token, logprob, row in zip(found.tokens, found.logprobs, found.top, strict=True)
        ]
    }


def _entry(token: int, logprob: float | None, tokenizer: Tokenizer, as_ids: bool) -> dict[str, Any]:
    text = tokenizer.piece(token)
    name = token_name(token) if as_ids else text
    return {"token": name, "logprob": logprob, "bytes": list(text.encode())}
