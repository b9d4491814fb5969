"""The content of a step file: rewards of all groups, some completions token by token, requests, shapes and tick costs.

JSON with times in seconds since the rollout began. Always holds: the file is not larger than its limit. A completion
that is too long loses its middle; too many completions or requests are thinned out, and the file contains their total
number. Knows nothing of disks.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tlt.loop import Step
from tlt.tasks.judging import Judged
from tlt.text import TokenTexts
from tlt.types import Key, Prompt, Rollout
from tlt.watch.trace import RequestSpan, ShapeSpan, WorkerTrace

FORMAT = 1
_TEXT_SHARE, _GROUP_SHARE, _REQUEST_SHARE, _SHAPE_SHARE = 0.6, 0.15, 0.15, 0.1  # fractions of a file, approximately
_TOKEN_BYTES, _ROLLOUT_BYTES, _REQUEST_BYTES, _SHAPE_BYTES = 30, 24, 40, 36  # bytes of one item, approximately
_COMPLETION_BYTES = 600  # fewest bytes for a completion that is kept
_MOST_QUESTION = 2000  # characters of either end of a prompt
_MOST_ID = 80  # characters of a prompt's id
_LAST = 64  # number of last requests that are always kept
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Room:
    """Limits of one file."""

    completions: int  # that are kept token by token
    tokens: int  # of each of these completions
    rollouts: int  # whose reward and length are kept
    requests: int
    shapes: int  # per worker


def encode_step(step: Step, sampled: Collection[int], texts: TokenTexts, limit: int) -> bytes:
    """Encodes the file of a step. `sampled`: indices of the groups whose completions are kept. `limit`: bytes."""
    lengths = [len(one.completion.tokens) for index in sorted(sampled) for one in step.judged[index].group.rollouts]
    room = float(limit)
    while True:
        content = _content(step, sampled, texts, _room(room, lengths, len(step.report.traces)))
        encoded = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        if len(encoded) <= limit or room < 1024:
            return encoded
        room *= 0.7


def _room(limit: float, lengths: Sequence[int], workers: int) -> _Room:
    kept = min(len(lengths), int(_TEXT_SHARE * limit / _COMPLETION_BYTES))
    return _Room(
        completions=kept,
        tokens=_most_of_each(lengths[:kept], int(_TEXT_SHARE * limit / _TOKEN_BYTES)),
        rollouts=int(_GROUP_SHARE * limit / _ROLLOUT_BYTES),
        requests=int(_REQUEST_SHARE * limit / _REQUEST_BYTES),
        shapes=int(_SHAPE_SHARE * limit / _SHAPE_BYTES / max(1, workers)),
    )


def _most_of_each(lengths: Sequence[int], tokens: int) -> int:
    """The largest limit per completion for which all together have at most `tokens` tokens."""
    for place, length in enumerate(sorted(lengths)):
        each = tokens // (len(lengths) - place)
        if length > each:
            return each
        tokens -= length
    return max(lengths, default=0)


def _content(step: Step, sampled: Collection[int], texts: TokenTexts, room: _Room) -> Json:
    traces = step.report.traces
    began = min((span.submitted for trace in traces for span in trace.requests), default=0.0)
    entropies = dict(step.update.entropies)
    places = [(index, place) for index in sorted(sampled) for place in range(len(step.judged[index].group.rollouts))]
    kept = places[: room.completions]
    most_groups = max(1, room.rollouts // max(1, len(step.judged[0].group.rollouts)))
    shown = {index for index, _ in kept} | set(range(0, len(step.judged), -(-len(step.judged) // most_groups)))
    return {
        "format": FORMAT,
        "step": step.number,
        "began": began,
        "groups_in_all": len(step.judged),
        "groups": [_group(index, step.judged[index]) for index in sorted(shown)],
        "completions_in_all": len(places),
        "completions": [
            _completion(index, place, step.judged[index].group.rollouts[place], entropies, texts, room.tokens)
            for index, place in kept
        ],
        "requests_in_all": sum(len(trace.requests) for trace in traces),
        "requests": _requests(step.judged, traces, began, room.requests),
        "shapes": [[trace.worker, _shapes(trace.shapes, began, room.shapes)] for trace in traces],
        "costs": [
            [trace.worker, cost.running, cost.shape, cost.ticks, _short(cost.measured_s, 7), _short(cost.expected_s, 7)]
            for trace in traces
            for cost in trace.costs
        ],
        "memory": [[trace.worker, trace.host_bytes, trace.device_bytes] for trace in traces],
    }


def _group(index: int, judged: Judged) -> Json:
    rollouts = judged.group.rollouts
    return {
        "group": index,
        "prompt": judged.group.prompt.id[:_MOST_ID],
        "rewards": [_short(rollout.reward, 4) for rollout in rollouts],
        "lengths": [len(rollout.completion.tokens) for rollout in rollouts],
        "finish": [rollout.completion.finish_reason for rollout in rollouts],
    }


def _completion(
    group: int,
    place: int,
    rollout: Rollout,
    entropies: dict[Key, tuple[float, ...]],
    texts: TokenTexts,
    most: int,
) -> Json:
    completion = rollout.completion
    count = len(completion.tokens)
    head = count if count <= most else most // 2
    kept = [slice(0, head), slice(max(head, count - (most - head)) if count > most else count, count)]
    entropy = entropies.get(completion.key)
    found: Json = {
        "group": group,
        "index": place,
        "reward": _short(rollout.reward, 4),
        "finish": completion.finish_reason,
        "tokens": count,
        "version": completion.policy_version,
        "head": head,  # number of tokens before the gap; all tokens if there is no gap
        "texts": [text for part in kept for text in texts.of(completion.tokens[part])],
        "logprobs": [_short(value, 3) for part in kept for value in completion.policy_logprobs[part]],
        "drafted": "".join(str(mark) for part in kept for mark in completion.drafted[part]),  # as in Completion
        "entropy": None if entropy is None else [_short(value, 3) for part in kept for value in entropy[part]],
    }
    if place == 0:
        found["question"] = _question(rollout.prompt)
        found["reference"] = _shortened(str(rollout.prompt.reference)) if rollout.prompt.reference is not None else ""
    return found


def _question(prompt: Prompt) -> str:
    content = prompt.content
    if isinstance(content, str):
        return _shortened(content)
    return _shortened("\n\n".join(f"{message.role}: {message.content}" for message in content))


def _shortened(text: str) -> str:
    return text if len(text) <= 2 * _MOST_QUESTION else f"{text[:_MOST_QUESTION]} […] {text[-_MOST_QUESTION:]}"


def _requests(judged: Sequence[Judged], traces: Sequence[WorkerTrace], began: float, most: int) -> list[list[float]]:
    """Group, place, worker, submitted, first token, finished; in the order of their ends."""
    place_of = {
        rollout.completion.key.request: (index, place)
        for index, one in enumerate(judged)
        for place, rollout in enumerate(one.group.rollouts)
    }
    spans = [(span, trace.worker) for trace in traces for span in trace.requests if span.request in place_of]
    spans.sort(key=lambda pair: pair[0].finished)
    if len(spans) > most:
        last, rest = spans[-_LAST:], spans[:-_LAST]
        spans = rest[:: -(-len(rest) // max(1, most - _LAST))] + last

    def told(span: RequestSpan, worker: int) -> list[float]:
        times = (_short(moment - began, 4) for moment in (span.submitted, span.first, span.finished))
        return [*place_of[span.request], worker, *times]

    return [told(*pair) for pair in spans]


def _shapes(spans: Sequence[ShapeSpan], began: float, most: int) -> list[list[Any]]:
    """Start, running requests, shape. Of more than `most` changes every n-th is kept."""
    kept = spans[:: -(-len(spans) // max(1, most))] if spans else ()
    return [[_short(span.start - began, 4), span.running, span.shape] for span in kept]


def _short(value: float, decimals: int) -> float:
    """Rounds a value to save bytes. Whole numbers become integers."""
    rounded = round(value, decimals)
    return int(rounded) if rounded == int(rounded) else rounded
