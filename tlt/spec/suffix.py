"""The model-free drafter: finds earlier occurrences of the newest tokens and drafts what followed them.

`SuffixIndex` owns the texts of every prompt (the prompt, its running and earlier completions) and an index of the
contexts of their tokens. A draft is the continuation of those positions whose preceding tokens match a request's newest
tokens longest. `SuffixDrafting` is the `Drafter` around it, and decides which texts are indexed, and when.

Always holds: drafts for a request come only from texts of its own prompt; every token held can be found by its context,
and no index entry points into a removed text; the texts have at most `memory_tokens` tokens, unless the running
requests alone have more, and those that wait to be indexed as many again; equal calls give equal drafts. Knows tokens
and counts, not tensors, policies or temperatures.

The index of a prompt is a compressed trie of reversed contexts with one leaf per token: the tokens before it, read
backwards until the context is unique (at most `max_match` tokens). A lookup walks down the trie, so neither `extend`
nor `propose` scans a text.
"""

import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heappushpop
from operator import neg
from statistics import median
from typing import Self

from tlt.config import RunConfig
from tlt.errors import ConfigError, RequestError
from tlt.policy import Policy
from tlt.spec.drafter import Drafter, Running
from tlt.spec.shape import EMPTY, Draft, Shape
from tlt.types import Key, SamplingParams

_DEEPEST = 64  # tokens of the longest branch
_RECENT = 5  # newest positions stored per shared context, and followed per draft
_SHARES = 8  # classes of the fraction of matches that agree on the next token
_OFFSET_BITS = 32  # a position is a text's number and an offset in it, packed into one integer
_OFFSET = (1 << _OFFSET_BITS) - 1

_Line = tuple[tuple[int, ...], int, int]  # continuation, length of the match before it, number of occurrences
# A candidate node: −score, parent, index among siblings, depth, token, kind of evidence, lines that continue it.
_Step = tuple[float, int, int, int, int, int, list[_Line]]


class _Fork(dict[int, "_Fork | int"]):
    """A branching node of the trie: `depth` preceding tokens are equal. Keyed by the token before those.

    A value is another fork, or a single position. Beyond max_match nothing is compared: there, positions are their own
    keys. Below the root, a fork has at least two entries and `recent` at least one.
    """

    __slots__ = ("depth", "recent")

    def __init__(self, depth: int, recent: list[int]) -> None:
        self.depth = depth
        self.recent = recent  # newest positions in this subtree, the newest last


class _Archive:
    """The texts of one prompt and their index. The first max_match tokens of a text are context only."""

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        self.texts: dict[int, list[int]] = {}  # by number
        self.prompt_number = -1  # of the prompt's own text
        self.running = 0  # requests that need the prompt
        self.root = _Fork(0, [])

    def insert(self, number: int, tokens: list[int], end: int) -> None:
        """Indexes the token at `end` of a text by the tokens before it."""
        place = number << _OFFSET_BITS | end
        fork, most = self.root, self.max_match
        while True:
            depth = fork.depth
            key = tokens[end - 1 - depth] if depth < most else place
            below = fork.get(key)
            if below is None:
                fork[key] = place
                return
            recent, reach = (below.recent, below.depth) if isinstance(below, _Fork) else ([below], most)
            agreed = depth + 1
            if agreed < reach:
                agreed = self._agreement(tokens, end, recent[-1], agreed, reach)
            if agreed < reach or not isinstance(below, _Fork):
                fork[key] = parted = _Fork(agreed, [*recent[1 - _RECENT :], place])
                parted[self._key(recent[-1], agreed)] = below
                parted[self._key(place, agreed)] = place
                return
            recent.append(place)
            if len(recent) > _RECENT:
                del recent[0]
            fork = below

    def _key(self, place: int, depth: int) -> int:
        """The key under which a fork of this depth holds a position."""
        if depth == self.max_match:
            return place
        return self.texts[place >> _OFFSET_BITS][(place & _OFFSET) - 1 - depth]

    def _agreement(self, tokens: list[int], end: int, place: int, known: int, most: int) -> int:
        """Length of the match between the tokens before `end` and before a position, from `known` up to `most`."""
        other, other_end = self.texts[place >> _OFFSET_BITS], place & _OFFSET
        while known < most and tokens[end - 1 - known] == other[other_end - 1 - known]:
            known += 1
        return known

    def remove(self, number: int) -> None:
        """Removes a text and its positions in the index."""
        for end in range(self.max_match, len(self.texts[number])):
            self._remove_place(number << _OFFSET_BITS | end)
        del self.texts[number]

    def _remove_place(self, place: int) -> None:
        path: list[tuple[_Fork, int]] = []  # forks on the way down, and the keys taken
        below: _Fork | int = self.root
        while isinstance(below, _Fork):
            path.append((below, self._key(place, below.depth)))
            below = below[path[-1][1]]
        last, key = path[-1]
        del last[key]
        if len(path) > 1 and len(last) == 1:  # no longer a fork
            path.pop()
            above, key = path[-1]
            (above[key],) = last.values()
        for fork, _ in reversed(path[1:]):
            if place in fork.recent:
                fork.recent.remove(place)
                if not fork.recent:
                    fork.recent = sorted(self._some_below(fork))[-_RECENT:]

    def _some_below(self, fork: _Fork) -> Iterator[int]:
        """The newest positions of each of the newest branches: enough to refill `recent`."""
        for _, below in zip(range(_RECENT), reversed(fork.values()), strict=False):
            if isinstance(below, _Fork):
                yield from below.recent
            else:
                yield below

    def lines(self, tokens: list[int], least: int, ahead: int) -> list[_Line]:
        """Continuations of the newest positions whose context matches the end of `tokens`, the longest match first."""
        end, most = len(tokens), self.max_match
        found: list[tuple[int, list[int]]] = []  # match length, positions; the shortest first
        fork = self.root
        while (depth := fork.depth) < most:
            below = fork.get(tokens[end - 1 - depth])
            if below is None:
                break
            recent, reach = (below.recent, below.depth) if isinstance(below, _Fork) else ([below], most)
            agreed = depth + 1
            if agreed < reach:
                agreed = self._agreement(tokens, end, recent[-1], agreed, reach)
            if agreed >= least:
                found.append((agreed, recent))
            if agreed < reach or not isinstance(below, _Fork):
                break
            fork = below
        return self._follow(found, ahead)

    def _follow(self, found: list[tuple[int, list[int]]], depth: int) -> list[_Line]:
        seen: list[int] = []
        lines: dict[tuple[int, ...], _Line] = {}
        for agreed, places in reversed(found):
            for place in reversed(places):
                if place in seen:
                    continue
                seen.append(place)
                at = place & _OFFSET
                ahead = tuple(self.texts[place >> _OFFSET_BITS][at : at + depth])
                known = lines.get(ahead)
                lines[ahead] = (ahead, agreed, 1) if known is None else (ahead, known[1], known[2] + 1)
                if len(seen) == _RECENT:
                    return list(lines.values())
        return list(lines.values())

    def entries(self) -> int:
        """The number of entries of the index; walks all of it."""
        count, forks = 0, [self.root]
        while forks:
            fork = forks.pop()
            count += len(fork) + len(fork.recent)
            forks += [below for below in fork.values() if isinstance(below, _Fork)]
        return count


class _HitRates:
    """Measured hit rates of draft tokens, per kind of evidence.

    A kind is the match length, the fraction of matches that agree, and whether a longer match disagrees.
    """

    _LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # longest match of each class but the last
    _GUESS = 4.0  # weight of the initial guess, in trials
    _WINDOW = 1024.0  # trials after which older ones fade, as the policy changes

    def __init__(self, longest: int) -> None:
        # A kind is base[match length] + shares[matches][agreeing matches] + (no longer match disagrees)
        self.base = [2 * _SHARES * bisect_left(self._LENGTHS, length) for length in range(longest + 1)]
        self.shares = [  # 1 of 1 is weaker evidence than 5 of 5
            [2 * (_SHARES * part // (whole + 1)) for part in range(whole + 1)] for whole in range(_RECENT + 1)
        ]
        self.rates: list[float] = []  # by kind
        for length in (*self._LENGTHS, longest):
            for share in range(_SHARES):
                rate = (share + 0.5) / _SHARES * length / (length + 1)
                self.rates += [rate / 2, rate]
        self._weights = [self._GUESS] * len(self.rates)

    def observe(self, kind: int, hit: bool) -> None:
        weight = self._weights[kind]
        self.rates[kind] += (hit - self.rates[kind]) / (weight + 1)
        if weight < self._WINDOW:
            self._weights[kind] = weight + 1


@dataclass(slots=True)
class _Proposal:
    """A proposed tree, and the node that the request has reached in it since."""

    draft: Draft
    kinds: tuple[int, ...]  # of evidence, per node
    reached: int = -1  # a node; −1 is the root

    def follow(self, tokens: Sequence[int], rates: _HitRates) -> bool:
        """Moves on by an emitted token; False if the tree has no such node."""
        drafted, parents = self.draft.tokens, self.draft.parents
        for token in tokens:
            here = node = self.reached
            for _ in range(parents.count(here)):
                node = parents.index(here, node + 1)
                hit = drafted[node] == token
                rates.observe(self.kinds[node], hit)
                if hit:
                    self.reached = node
            if self.reached == here:
                return False
        return True


@dataclass(slots=True)
class _Request:
    """A running completion. Its text is in its prompt's archive under its number."""

    number: int
    prompt_id: str
    archive: _Archive
    tokens: list[int]
    proposal: _Proposal | None = None


class SuffixIndex:
    """Drafts for a request from its own text, its group's completions and earlier completions of the same prompt.

    Each text is in the index as soon as it is known.
    """

    def __init__(self, memory_tokens: int, min_match: int = 1, max_match: int = 16) -> None:
        if memory_tokens < 1:
            raise ConfigError(f"memory_tokens is {memory_tokens}; expected at least 1")
        if not 1 <= min_match <= max_match:
            raise ConfigError(f"min_match is {min_match} and max_match {max_match}; expected 1 ≤ min_match ≤ max_match")
        self.memory_tokens, self.min_match, self.max_match = memory_tokens, min_match, max_match
        self.tokens = 0  # held, over all texts
        self._requests: dict[Key, _Request] = {}
        self._archives: dict[str, _Archive] = {}
        self._history: OrderedDict[int, str] = OrderedDict()  # finished texts → prompt, the oldest first
        self._numbers = 0
        self._rates = _HitRates(max_match + _DEEPEST)

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int]) -> None:
        """A request starts. Its prompt is indexed now; its completion comes by `extend`."""
        if key in self._requests:
            raise RequestError(f"{key} is running already; expected a new key, or end() of the first request before")
        archive = self._archives.setdefault(prompt_id, _Archive(self.max_match))
        archive.running += 1
        self._keep_prompt(archive, prompt_id, list(prompt))
        number = self._add_text(archive, prompt[-self.max_match :], ())
        self._requests[key] = _Request(number, prompt_id, archive, archive.texts[number])
        self._evict()

    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        """Indexes emitted tokens, and updates the hit rates by the latest proposal."""
        request = self._request(key)
        if request.proposal is not None and not request.proposal.follow(tokens, self._rates):
            request.proposal = None
        text, archive, number = request.tokens, request.archive, request.number
        for token in tokens:
            text.append(token)
            archive.insert(number, text, len(text) - 1)
        self.tokens += len(tokens)
        if self.tokens > self.memory_tokens:
            self._evict()

    def end(self, key: Key) -> None:
        """A request has ended. Its completion is kept for its prompt while there is room."""
        request = self._request(key)
        del self._requests[key]
        self._history[request.number] = request.prompt_id
        archive = request.archive
        archive.running -= 1
        if not archive.running:
            self._history[archive.prompt_number] = request.prompt_id
        self._evict()

    def forget(self, prompt_id: str) -> None:
        """Drops the finished texts of a prompt. Running requests keep their text, and the prompt."""
        archive = self._archives.get(prompt_id)
        if archive is not None:
            for number in [number for number in archive.texts if number in self._history]:
                self._drop(number)

    def propose(self, key: Key, depth: int, width: int, budget: int) -> Draft:
        """A tree of at most `budget` nodes, `depth` deep, with at most `width` children each.

        Its first node continues a longest match; the others follow by decreasing probability.
        """
        request = self._request(key)
        request.proposal = None
        asked = min(depth, width, budget) >= 1
        lines = request.archive.lines(request.tokens, self.min_match, min(depth, _DEEPEST)) if asked else []
        if not lines:
            return EMPTY
        request.proposal = self._build_tree(lines, width, budget)
        return request.proposal.draft

    def holds(self, prompt_id: str) -> bool:
        """Whether the prompt is indexed."""
        return (found := self._archives.get(prompt_id)) is not None and found.prompt_number in found.texts

    def entries(self) -> int:
        """The number of entries of all indexes. Walks all of them: not for the critical path."""
        return sum(archive.entries() for archive in self._archives.values())

    # ---- drafting

    def _build_tree(self, lines: list[_Line], width: int, budget: int) -> _Proposal:
        """Adds the likeliest candidate node until the budget is spent. The first node continues a longest match."""
        base, shares, rates = self._rates.base, self._rates.shares, self._rates.rates
        waiting = self._steps(lines, -1, 0, -1.0, len(lines))
        step = min([step for step in waiting if step[-1][0][1] == lines[0][1]])
        waiting.remove(step)
        waiting.sort()  # a sorted list is a heap
        del waiting[width - 1 :]
        taken = [step]
        for node in range(budget - 1):
            rank, _, _, ahead, _, _, lines = step
            if len(lines) > 1:
                for step in self._steps(lines, node, ahead, rank, width):
                    heappush(waiting, step)
            else:  # one continuation to copy: by far the most frequent case
                written, agreed, times = lines[0]
                if ahead < len(written):
                    kind = base[agreed + ahead] + shares[times][times] + 1
                    step = heappushpop(waiting, (rank * rates[kind], node, 0, ahead + 1, written[ahead], kind, lines))
                    taken.append(step)
                    continue
            if not waiting:
                break
            step = heappop(waiting)
            taken.append(step)
        ranks, parents, _, _, tokens, kinds, _ = zip(*taken, strict=True)
        return _Proposal(Draft(tokens, parents, tuple(map(neg, ranks))), kinds)

    def _steps(self, lines: list[_Line], node: int, ahead: int, rank: float, width: int) -> list[_Step]:
        """The likeliest children of a node of depth `ahead`."""
        ways: dict[int, list[_Line]] = {}
        going = 0
        for line in lines:
            written, _, times = line
            if ahead < len(written):
                going += times
                token = written[ahead]
                if token in ways:
                    ways[token].append(line)
                else:
                    ways[token] = [line]
        steps: list[_Step] = []
        longest = 0
        base, share, rates = self._rates.base, self._rates.shares[going], self._rates.rates
        for token, followers in ways.items():  # in the order of the lines: the longest match first
            _, agreed, times = followers[0]
            longest = longest or agreed
            if len(followers) > 1:
                times = sum([line[2] for line in followers])
            kind = base[agreed + ahead] + share[times] + (agreed == longest)
            steps.append((rank * rates[kind], node, len(steps), ahead + 1, token, kind, followers))
        if len(steps) > width:
            steps.sort()
            del steps[width:]
        return steps

    # ---- texts

    def _request(self, key: Key) -> _Request:
        request = self._requests.get(key)
        if request is None:
            raise RequestError(f"{key} is not running here; expected a key that begin() was given and end() was not")
        return request

    def _add_text(self, archive: _Archive, context: Sequence[int], tokens: Sequence[int]) -> int:
        """Adds a text after its context; returns its number."""
        number = self._numbers
        self._numbers += 1
        padding = [-1 - number] * (self.max_match - len(context))  # matches no other text
        archive.texts[number] = text = [*padding, *context, *tokens]
        for end in range(self.max_match, len(text)):
            archive.insert(number, text, end)
        self.tokens += len(text)
        return number

    def _keep_prompt(self, archive: _Archive, prompt_id: str, prompt: list[int]) -> None:
        """Adds the prompt to its archive unless it is there, and counts its user."""
        known = archive.texts.get(archive.prompt_number)
        if known is not None:
            if known[self.max_match :] == prompt:
                self._history.pop(archive.prompt_number, None)
                return
            self._history[archive.prompt_number] = prompt_id  # the prompt's text has changed: keep the old as finished
        archive.prompt_number = self._add_text(archive, (), prompt)

    def _evict(self) -> None:
        while self.tokens > self.memory_tokens and self._history:
            self._drop(next(iter(self._history)))

    def _drop(self, number: int) -> None:
        prompt_id = self._history.pop(number)
        archive = self._archives[prompt_id]
        self.tokens -= len(archive.texts[number])
        if len(archive.texts) > 1:
            archive.remove(number)
        else:
            del self._archives[prompt_id]


# ---- as a drafter

_COMPLETIONS_KEPT = 16  # finished completions per prompt that wait to be indexed
_PAST = Key(0, 1 << 64)  # finished completions are indexed under this key, one at a time; no request has it

_TOKEN_S = 4e-6  # seconds to index a token, until it was timed
_TIMED, _TIMES = 256, 5  # fewest tokens of a timing; number of timings whose median is used

_Finished = tuple[Sequence[int], Sequence[int]]  # prompt and completion


class SuffixDrafting(Drafter):
    """`SuffixIndex` as a drafter. A text is indexed when a draft for its prompt is first asked for.

    While all ticks are plain it costs a list append per completion and nothing per token.
    """

    name = "suffix"

    @classmethod
    def build(cls, policy: Policy, config: RunConfig) -> Self:
        return cls(config.spec.memory_tokens)

    def __init__(self, memory_tokens: int) -> None:
        self._suffix = SuffixIndex(memory_tokens)
        self._memory_tokens = memory_tokens
        self._waiting: dict[Key, tuple[str, Sequence[int]]] = {}  # begun, not yet indexed
        self._indexed: dict[Key, int] = {}  # tokens of the completion that are indexed
        self._finished: OrderedDict[str, deque[_Finished]] = OrderedDict()  # not indexed; by prompt, newest last
        self._kept_tokens = 0  # of `_finished`
        self._token_s: deque[float] = deque([_TOKEN_S], maxlen=_TIMES)

    def host_extend_s(self, running: Running) -> float:
        return median(self._token_s) * self._due(running)

    def _due(self, running: Running) -> int:
        """Tokens still to index: of indexed requests what they wrote since; of the others all of it, their prompts
        unless indexed already, and the finished completions of these prompts."""
        due, prompts = 0, dict[str, int]()
        for key, completion in running:
            due += len(completion) - self._indexed.get(key, 0)
            if key in self._waiting:
                prompt_id, prompt = self._waiting[key]
                prompts[prompt_id] = 0 if self._suffix.holds(prompt_id) else len(prompt)
        finished = (self._finished.get(prompt_id, ()) for prompt_id in prompts)
        return due + sum(prompts.values()) + sum(len(completion) for kept in finished for _, completion in kept)

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._waiting[key] = (prompt_id, prompt)

    def end(self, key: Key, completion: Sequence[int]) -> None:
        if key in self._indexed:
            self._suffix.extend(key, completion[self._indexed.pop(key) :])
            self._suffix.end(key)
            return
        prompt_id, prompt = self._waiting.pop(key)
        self._keep(prompt_id, (prompt, tuple(completion)))

    def extend(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> None:
        lag = [
            (key, completion)
            for key, completion in zip(keys, completions, strict=True)
            if key in self._waiting or len(completion) - self._indexed[key] > shape.depth + 1
        ]
        if not lag:
            return
        due, started = self._due(lag), time.perf_counter()
        for key, completion in lag:
            if key in self._waiting:
                self._index(key)
            self._extend(key, completion)
        if due >= _TIMED:
            self._token_s.append((time.perf_counter() - started) / due)

    def draft(self, keys: Sequence[Key], completions: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        drafts = []
        for key, completion in zip(keys, completions, strict=True):
            self._extend(key, completion)
            drafts.append(self._suffix.propose(key, shape.depth, shape.width, shape.verify - 1))
        return drafts

    def _extend(self, key: Key, completion: Sequence[int]) -> None:
        self._suffix.extend(key, completion[self._indexed[key] :])
        self._indexed[key] = len(completion)

    def _keep(self, prompt_id: str, finished: _Finished) -> None:
        """Keeps a finished completion for later. Beyond the memory limit the oldest prompts are dropped."""
        kept = self._finished.setdefault(prompt_id, deque())
        self._finished.move_to_end(prompt_id)
        kept.append(finished)
        self._kept_tokens += _size(finished)
        if len(kept) > _COMPLETIONS_KEPT:
            self._kept_tokens -= _size(kept.popleft())
        while self._kept_tokens > self._memory_tokens:
            self._give_up(next(iter(self._finished)))

    def _give_up(self, prompt_id: str) -> Sequence[_Finished]:
        gone = self._finished.pop(prompt_id, ())
        self._kept_tokens -= sum(map(_size, gone))
        return gone

    def _index(self, key: Key) -> None:
        """Indexes the request's prompt and the finished completions of its group."""
        prompt_id, prompt = self._waiting.pop(key)
        for earlier_prompt, completion in self._give_up(prompt_id):
            self._suffix.begin(_PAST, prompt_id, earlier_prompt)
            self._suffix.extend(_PAST, completion)
            self._suffix.end(_PAST)
        self._suffix.begin(key, prompt_id, prompt)
        self._indexed[key] = 0


def _size(finished: _Finished) -> int:
    prompt, completion = finished
    return len(prompt) + len(completion)
