"""The scheduler: plans each tick of continuous batching. Pure bookkeeping; knows no tensors.

Always holds:
- Rows 0 … n−1 of the batch are occupied, without holes: the last row moves into a vacated one.
- A request waits, occupies a row (`RunningRequest`), or is over. It is completed exactly once.
- Requests sample in decode ticks only. The last token of a prompt is the first decode input; the prefill covers the
  tokens before it and is shared by all requests with that prompt.
- A plain tick is planned before the tokens of the tick in flight are read. A request that turns out to be over has
  computed one more token, which is dropped. Plans execute in order, so a freed page may be reused by the next plan.
- A verification emits as many tokens as the policy accepts. `advance` sets their number before the next plan, or after
  it if `plan` gets their upper bound (`unread`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, repeat
from math import inf

from tlt.engine.admission import Admission
from tlt.engine.pages import PageAllocator, PageStats, Prefix, PrefixCache
from tlt.engine.request import Request, RequestState
from tlt.engine.waiting import Waiting
from tlt.types import Key

_ADMISSION_BATCHES = 16  # admission waits for max_rows / 16 free rows, so that requests share a prefill run
_MAX_TICKS_HELD = 32  # most ticks that it waits


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that occupies a row of the batch, from its admission to its end or preemption."""

    state: RequestState
    row: int  # −1: vacated
    pages: list[int]  # page table
    position: int  # of the next token to compute
    left: int  # tokens that may still be launched; below 0 if a verified tree exceeded the limit
    over: bool = False  # later tokens of it are dropped


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill chunk: tokens of a prefix whose KV cache is computed, from position `start`."""

    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    prefix: tuple[int, ...]  # all tokens of the prefix


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the first `count` slots of a page."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that enters a row, with everything that the runner needs."""

    row: int
    request: Request
    token: int  # first decode input
    position: int  # of that token
    pages: tuple[int, ...]  # page table
    prefix: tuple[int, ...]  # the tokens before `token`, prefilled
    left: int  # tokens that it may still generate


@dataclass(frozen=True, slots=True)
class Plan:
    """One tick, in order of execution: chunks, copies, moves, entries, new pages, then the decode of rows 0 … n−1."""

    chunks: tuple[Chunk, ...]
    copies: tuple[Copy, ...]
    moves: tuple[tuple[int, int], ...]  # (from row, to row); no row is in two of them
    entries: tuple[Entry, ...]
    new_pages: tuple[tuple[int, int, int], ...]  # (row, index in its page table, page)
    reqs: tuple[RunningRequest, ...]  # by row
    filtered: bool  # some request uses top-k, top-p or min-p
    nodes: int = 1  # size of each request's draft tree; 1: plain decoding
    has_waiting: bool = False  # requests wait for a row

    @property
    def empty(self) -> bool:
        return not (self.chunks or self.reqs)


class Scheduler:
    def __init__(
        self, allocator: PageAllocator, page_size: int, max_rows: int, prefill_tokens: int, admission: Admission
    ) -> None:
        self._allocator = allocator
        self._prefix_cache = PrefixCache(allocator, page_size)
        self._page_size = page_size
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._admission = admission
        self._awaited_prefixes: Counter[tuple[int, ...]] = (
            Counter()
        )  # prefix → waiting requests that will start from it
        self._nodes = 1  # tokens per request in the tick being planned
        self._unread = 0  # most tokens per request that the tick in flight may emit
        self._blocked = False  # admission failed for lack of pages, and none were freed since
        self._waiting = Waiting(admission.rank)
        self._ticks_held = 0  # ticks for which free rows were held back
        self._preempted: list[RequestState] = []  # in order of submission; they enter before new requests
        self._reqs: list[RunningRequest] = []
        self._retired: dict[RunningRequest, list[int]] = {}  # requests whose last token is in flight → pages to keep
        self._moves: list[tuple[int, int]] = []
        self._filtered = 0  # running requests with top-k, top-p or min-p

    # ---- state

    @property
    def running(self) -> int:
        return len(self._reqs)

    @property
    def remaining_ticks(self) -> float:
        """Upper bound of the plain ticks until all requests are completed; infinite while requests wait for a row."""
        if self._waiting or self._preempted:
            return inf
        return max((req.left for req in self._reqs if not req.over), default=0)

    @property
    def written(self) -> list[tuple[Key, list[int]]]:
        """Key and tokens so far of every running request."""
        return [(req.state.request.key, req.state.tokens) for req in self._reqs]

    @property
    def page_stats(self) -> PageStats:
        return self._prefix_cache.page_stats()

    def check_integrity(self) -> None:
        """Raises AssertionError if no request runs and a page is neither free nor cached: it has leaked."""
        page_stats = self.page_stats
        if not self._reqs and (page_stats.used or page_stats.free + page_stats.cached != self._allocator.total):
            raise AssertionError(f"pages leaked: {page_stats} of {self._allocator.total} with no request running")

    # ---- events

    def submit(self, state: RequestState) -> None:
        self._waiting.add(state)
        self._awaited_prefixes[state.prefix] += 1

    def finish(self, req: RunningRequest, *, keep: bool = True) -> None:
        """Ends a complete request. Frees its row and pages; `request.keep` moves its full pages to the prefix cache."""
        self._admission.finished(req.state.request, len(req.state.tokens))
        self._waiting.rank_changed(req.state.request.prompt_id)
        if keep and req.state.request.keep:
            self._keep(req.state, self._retired.get(req) or req.pages)
        self._leave(req)

    def abort(self, state: RequestState) -> None:
        """Ends a request in any state. Frees its row and pages."""
        req = next((req for req in chain(self._reqs, self._retired) if req.state is state), None)
        if req is not None:
            self._leave(req)
            return
        (self._preempted if state.preemptions else self._waiting).remove(state)
        own = self._prefix_cache.find(state.prefix)
        if own is not None and own.private:
            self._prefix_cache.drop(own)
        self._no_longer_awaits(state.prefix)
        self._blocked = False

    def forget_cache(self) -> None:
        """Drops the whole KV cache, because the policy changed. Running requests are preempted."""
        for req in list(self._reqs):
            self._preempt(req)
        for req, pages in self._retired.items():
            self._allocator.release(pages)
            self._retired[req] = []
        self.drop_prefixes()

    def drop_prefixes(self) -> None:
        """Empties the prefix cache: later admissions prefill their prompts again."""
        self._prefix_cache.clear()
        self._blocked = False

    def advance(self, reqs: Iterable[RunningRequest], steps: Iterable[int]) -> None:
        """Advances each request by the tokens that its verified tree emitted."""
        for req, count in zip(reqs, steps, strict=False):
            req.position += count
            req.left -= count

    def plan(self, nodes: int = 1, unread: int = 0) -> Plan:
        """Plans the next tick. `nodes`: tokens per request in it.

        `unread`: most tokens per request that the unread tick in flight may emit.
        """
        self._nodes, self._unread = nodes, unread
        self._retire()
        new_pages = self._allocate_pages()
        moves, self._moves = net_moves(self._moves, len(self._reqs)), []
        chunks, copies, entries = self._admit()
        self._allocator.release([copy.source for copy in copies])
        reqs = tuple(self._reqs)
        if nodes == 1:
            self.advance(reqs, repeat(1))
        has_waiting = bool(self._waiting or self._preempted)
        return Plan(chunks, copies, moves, entries, new_pages, reqs, self._filtered > 0, nodes, has_waiting)

    # ---- leaving

    def _retire(self) -> None:
        """Vacates the rows of requests whose last token is in flight."""
        for req in [req for req in self._reqs if req.left <= 0]:
            self._retired[req] = list(req.pages) if req.state.request.keep else []
            self._allocator.share(self._retired[req])
            self._vacate(req)

    def _leave(self, req: RunningRequest) -> None:
        req.over = True
        if req.row >= 0:
            self._vacate(req)
        if retained := self._retired.pop(req, []):
            self._allocator.release(retained)
            self._blocked = False

    def _keep(self, state: RequestState, pages: list[int]) -> None:
        """Caches the full pages of prompt and completion as a prefix. The last token is not in the KV cache yet."""
        full = len(state.prefix) // self._page_size
        tokens = state.prefix[: full * self._page_size]
        of_prompt = (len(state.request.prompt) - 1) // self._page_size  # full pages of the prompt, cached already
        if of_prompt < full <= len(pages) and self._prefix_cache.find(tokens) is None:
            self._allocator.share(pages[:full])
            self._prefix_cache.put(Prefix(tokens, pages[:full], len(tokens)), shared=True)

    def _vacate(self, req: RunningRequest) -> None:
        """Frees row and pages. The last row moves into the hole."""
        self._allocator.release(req.pages)
        self._blocked = False
        last = self._reqs.pop()
        if last is not req:
            self._moves.append((last.row, req.row))
            last.row = req.row
            self._reqs[last.row] = last
        req.row, req.pages = -1, []
        self._filtered -= req.state.request.params.filtered

    def _preempt(self, req: RunningRequest) -> None:
        """Frees row and pages of a running request. It prefills its tokens again when it re-enters."""
        self._leave(req)
        req.state.preemptions += 1
        self._preempted.append(req.state)
        self._awaited_prefixes[req.state.prefix] += 1
        self._preempted.sort(key=lambda state: state.order)

    # ---- pages of running requests

    def _allocate_pages(self) -> tuple[tuple[int, int, int], ...]:
        """Allocates pages for the next positions of every running request. Preempts the youngest if pages run out."""
        size, further = self._page_size, self._unread + self._nodes
        needy = [req for req in self._reqs if req.position + further > len(req.pages) * size]
        given: list[tuple[RunningRequest, int]] = []
        for req in needy:
            lacking = self._pages_for(req.position + further) - len(req.pages)
            while not req.over and not self._room(lacking):
                self._preempt(max(self._reqs, key=lambda req: req.state.order))
            if not req.over:
                given += [(req, len(req.pages) + index) for index in range(lacking)]
                req.pages += self._allocator.take(lacking)
        return tuple((req.row, index, req.pages[index]) for req, index in given if not req.over)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _room(self, pages: int, keep: Prefix | None = None) -> bool:
        """Drops cached prefixes until `pages` pages are free: first those that no waiting request needs."""
        if self._allocator.free >= pages:
            return True
        prefixes = [prefix for prefix in self._prefix_cache.oldest_first() if prefix is not keep]
        unwanted = (prefix for prefix in prefixes if prefix.tokens not in self._awaited_prefixes)
        # while several requests run, dropping an awaited prefix is worse than preempting the youngest request
        awaited = [prefix for prefix in prefixes if len(self._reqs) <= 1 and prefix.tokens in self._awaited_prefixes]
        for prefix in chain(unwanted, awaited):
            self._prefix_cache.drop(prefix)
            if self._allocator.free >= pages:
                return True
        return False

    # ---- admission

    def _admit(self) -> tuple[tuple[Chunk, ...], tuple[Copy, ...], tuple[Entry, ...]]:
        chunks: list[Chunk] = []
        copies: list[Copy] = []
        entries: list[Entry] = []
        budget = self._prefill_tokens
        for state in self._candidates():
            prefix = self._prefix(state)
            if prefix is not None and not prefix.complete:
                if budget:
                    budget -= self._advance(prefix, budget, chunks)
                if not prefix.complete:
                    self._ticks_held = _MAX_TICKS_HELD  # continue this prefill in the next tick
                    break
            if prefix is None or not self._enter(state, prefix, copies, entries):
                self._blocked = True  # later requests wait too: a large request must not starve
                break
        return tuple(chunks), tuple(copies), tuple(entries)

    def _candidates(self) -> list[RequestState]:
        """Requests that may enter now, preempted ones first.

        Free rows are held back until several requests can enter together: a prefill costs one run of the policy for any
        number of them.
        """
        free = self._max_rows - len(self._reqs)
        if free <= 0 or self._blocked:
            return []
        together = min(self._max_rows // _ADMISSION_BATCHES, len(self._preempted) + len(self._waiting))
        if free < together and self._ticks_held < _MAX_TICKS_HELD:
            self._ticks_held += 1
            return []
        self._ticks_held = 0
        resuming = self._preempted[:free]
        return resuming + self._waiting.first(free - len(resuming))

    def _prefix(self, state: RequestState) -> Prefix | None:
        """The prefix that this request starts from: cached, or new with allocated pages; None: too few pages."""
        tokens = state.prefix
        found = self._prefix_cache.find(tokens)
        if found is not None:
            return found
        shared = self._shared_start(state)
        self._allocator.share(shared)  # before making room, which could drop the prefix they come from
        pages = self._pages_for(len(tokens)) - len(shared)
        entry = self._pages_for(len(tokens) % self._page_size + self._nodes)
        if not self._room(pages + entry + len(self._reqs)):  # the entry's own pages, and one more per running request
            self._allocator.release(shared)
            return None
        prefix = Prefix(tokens, shared + self._allocator.take(pages), len(shared) * self._page_size, bool(state.tokens))
        self._prefix_cache.put(prefix, shared=state.request.keep and not prefix.private)
        return prefix

    def _shared_start(self, state: RequestState) -> list[int]:
        """Full pages computed already: of kept texts, or of a resumed request's own prompt."""
        if state.request.keep:
            return self._prefix_cache.longest_start(state.prefix)
        prompt = self._prefix_cache.find(state.request.prompt[:-1]) if state.tokens else None
        if prompt is None or not prompt.complete:
            return []
        return prompt.pages[: len(prompt.tokens) // self._page_size]

    def _advance(self, prefix: Prefix, budget: int, chunks: list[Chunk]) -> int:
        """Plans the next chunk of a prefix. Returns its number of tokens."""
        count = min(budget, len(prefix.tokens) - prefix.done)
        piece = prefix.tokens[prefix.done : prefix.done + count]
        chunks.append(Chunk(piece, prefix.done, tuple(prefix.pages), prefix.tokens))
        prefix.done += count
        return count

    def _enter(self, state: RequestState, prefix: Prefix, copies: list[Copy], entries: list[Entry]) -> bool:
        """Gives the request a row: shares the prefix's full pages, copies the partial one. False: too few pages."""
        full, rest = divmod(len(prefix.tokens), self._page_size)
        shared = prefix.pages[:full]
        self._allocator.share(shared)
        needed = self._pages_for(len(prefix.tokens) + self._nodes) - full
        if not self._room(needed, keep=prefix):
            self._allocator.release(shared)
            return False
        own = self._allocator.take(needed)
        if rest:
            copies.append(Copy(prefix.pages[full], own[0], rest))
            self._allocator.share(
                [prefix.pages[full]]
            )  # until the plan is complete: no chunk may reuse the source before the copy
        request = state.request
        req = RunningRequest(
            state,
            row=len(self._reqs),
            pages=shared + own,
            position=len(prefix.tokens),
            left=request.params.max_tokens - len(state.tokens),
        )
        self._reqs.append(req)
        self._filtered += request.params.filtered
        pages = tuple(req.pages)
        entries.append(Entry(req.row, request, state.last_token, req.position, pages, prefix.tokens, req.left))
        self._no_longer_waiting(state)
        if prefix.private:
            self._prefix_cache.drop(prefix)
        return True

    def _no_longer_waiting(self, state: RequestState) -> None:
        (self._preempted if state.preemptions else self._waiting).remove(state)
        self._admission.started(state.request)
        self._waiting.rank_changed(state.request.prompt_id)
        self._no_longer_awaits(state.prefix)

    def _no_longer_awaits(self, prefix: tuple[int, ...]) -> None:
        self._awaited_prefixes[prefix] -= 1
        if not self._awaited_prefixes[prefix]:
            del self._awaited_prefixes[prefix]


def net_moves(moves: Iterable[tuple[int, int]], reqs: int) -> tuple[tuple[int, int], ...]:
    """Composes swap-with-last moves (from, to) into the net moves of the surviving rows.

    Many requests may end in one tick, and a moved request may end too. Only net moves are executed, because the state
    that a drafter keeps per row is large.
    """
    origin: dict[int, int] = {}
    for source, target in moves:
        origin[target] = origin.pop(source, source)
    return tuple((source, target) for target, source in origin.items() if target < reqs)
