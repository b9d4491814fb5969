"""The scheduler: who computes what in the next tick. Pure bookkeeping, no tensors.

What always holds:
- Rows 0 … n−1 of the batch are occupied, with no holes: a row that is vacated is filled by the last one.
- A request is waiting, staying in a row, or over; it is answered exactly once.
- Every request samples in decode ticks only: a prompt's last token is its first decode input, so that what is
  prefilled is the prompt without that token, shared by all requests with that prompt.
- Plain ticks are planned before the tokens of the tick in flight are known: a stay that turns out to be over computes
  one token more, which is dropped. Work is executed in plan order, so that a page may change hands between two plans.
- A tick that verifies draft trees emits as many tokens as the policy accepts. `advance` tells how many, before the next
  plan is made or, where that plan is told how many they may be at most (`unread`), after it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from math import inf

from tlt.engine.admission import Admission
from tlt.engine.pages import Census, PageBook, Prefix, PrefixShelf
from tlt.engine.request import Progress, Request
from tlt.engine.waiting import Waiting
from tlt.types import Key

_TOGETHER = 16  # rows per request that is waited for, so that they enter together …
_PATIENCE = 32  # … for so many ticks


@dataclass(slots=True, eq=False)
class Stay:
    """One stay of a request in a row of the batch, from admission to its end or preemption."""

    progress: Progress
    row: int
    pages: list[int]
    position: int  # of the next token to compute
    left: int  # tokens that may still be launched; below 0 where a verified tree ran past the limit
    over: bool = False  # tokens that come later belong to nobody


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute keys and values of these tokens of a prefix, from position `start`."""

    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    prefix: tuple[int, ...]  # all of it


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `count` slots of a page."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A request enters a row: all the runner must know of it."""

    row: int
    request: Request
    token: int
    position: int
    pages: tuple[int, ...]
    prefix: tuple[int, ...]  # what was computed before the token
    left: int  # tokens that it may write


@dataclass(frozen=True, slots=True)
class Plan:
    """One tick, in the order it is executed: chunks, copies, moves, entries, grown pages, then decode rows 0 … n−1."""

    chunks: tuple[Chunk, ...]
    copies: tuple[Copy, ...]
    moves: tuple[tuple[int, int], ...]  # (from row, to row); no row is in two of them
    entries: tuple[Entry, ...]
    grown: tuple[tuple[int, int, int], ...]  # (row, index in its page table, page)
    stays: tuple[Stay, ...]  # row → whose token will come out
    filtered: bool  # some request uses top-k or top-p
    nodes: int = 1  # of each request's tree; 1 = plain decoding
    waited_for: bool = False  # others will enter when these leave

    @property
    def empty(self) -> bool:
        return not (self.chunks or self.stays)


class Scheduler:
    def __init__(
        self, book: PageBook, page_size: int, max_rows: int, prefill_tokens: int, admission: Admission
    ) -> None:
        self._book = book
        self._shelf = PrefixShelf(book)
        self._page_size = page_size
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._admission = admission
        self._awaited: Counter[tuple[int, ...]] = Counter()  # prefixes that waiting requests will start from
        self._nodes = 1  # tokens each request computes in the tick being planned
        self._unread = 0  # tokens of each that a tick in flight may have written, at most
        self._blocked = False  # nothing was freed since a request found no room
        self._waiting = Waiting(admission.rank)
        self._held = 0  # ticks for which free rows were left free
        self._resuming: list[Progress] = []  # preempted: they go before anyone new
        self._stays: list[Stay] = []
        self._moves: list[tuple[int, int]] = []
        self._filtered = 0  # stays with top-k or top-p

    # ---- what callers ask

    @property
    def running(self) -> int:
        return len(self._stays)

    @property
    def to_come(self) -> float:
        """Plain ticks after which all are answered at the latest; infinite while anybody waits."""
        if self._waiting or self._resuming:
            return inf
        return max((stay.left for stay in self._stays if not stay.over), default=0)

    @property
    def written(self) -> list[tuple[Key, list[int]]]:
        """Of every request that runs, all that was read of its answer."""
        return [(stay.progress.request.key, stay.progress.tokens) for stay in self._stays]

    @property
    def census(self) -> Census:
        return self._shelf.census()

    def check_integrity(self) -> None:
        """When nothing runs, every page is free or cached: anything else has leaked."""
        census = self.census
        if not self._stays and (census.used or census.free + census.cached != self._book.total):
            raise AssertionError(f"pages leaked: {census} of {self._book.total} with no request running")

    # ---- what callers tell

    def submit(self, progress: Progress) -> None:
        self._waiting.add(progress)
        self._awaited[progress.prefix] += 1

    def finish(self, stay: Stay) -> None:
        """The answer is complete: the row and the pages are free at once."""
        self._admission.finished(stay.progress.request, len(stay.progress.tokens))
        self._waiting.rank_changed(stay.progress.request.prompt_id)
        if not stay.over:
            self._leave(stay)

    def forget_cache(self) -> None:
        """The policy changed: no key or value computed before may be used again."""
        for stay in list(self._stays):
            self._preempt(stay)
        self._shelf.clear()

    def advance(self, stays: Iterable[Stay], steps: Iterable[int]) -> None:
        """Each stay's verified tree emitted so many tokens."""
        for stay, count in zip(stays, steps, strict=False):
            stay.position += count
            stay.left -= count

    def plan(self, nodes: int = 1, unread: int = 0) -> Plan:
        """Decides the next tick, in which each request computes that many tokens.

        Each may stand up to `unread` tokens further than is known: so many may come out of the tick before.
        """
        self._nodes, self._unread = nodes, unread
        self._retire()
        grown = self._grow()
        moves, self._moves = lasting(self._moves, len(self._stays)), []
        chunks, copies, entries = self._admit()
        self._book.release([copy.source for copy in copies])
        stays = tuple(self._stays)
        if nodes == 1:
            self.advance(stays, repeat(1))
        waited_for = bool(self._waiting or self._resuming)
        return Plan(chunks, copies, moves, entries, grown, stays, self._filtered > 0, nodes, waited_for)

    # ---- leaving

    def _retire(self) -> None:
        """Stays whose last token is in flight need no row any more."""
        for stay in [stay for stay in self._stays if stay.left <= 0]:
            self._vacate(stay)

    def _leave(self, stay: Stay) -> None:
        stay.over = True
        if stay.row >= 0:
            self._vacate(stay)

    def _vacate(self, stay: Stay) -> None:
        """Frees row and pages; the last row moves into the hole."""
        self._book.release(stay.pages)
        self._blocked = False
        last = self._stays.pop()
        if last is not stay:
            self._moves.append((last.row, stay.row))
            last.row = stay.row
            self._stays[last.row] = last
        stay.row, stay.pages = -1, []
        self._filtered -= stay.progress.request.params.filtered

    def _preempt(self, stay: Stay) -> None:
        """Takes pages and row away; the request will compute its prefix again and go on with the same tokens."""
        self._leave(stay)
        stay.progress.preemptions += 1
        self._resuming.append(stay.progress)
        self._awaited[stay.progress.prefix] += 1
        self._resuming.sort(key=lambda progress: progress.order)

    # ---- growing

    def _grow(self) -> tuple[tuple[int, int, int], ...]:
        """Pages for every stay whose next positions have none; the youngest give way when pages run out."""
        size, further = self._page_size, self._unread + self._nodes
        needy = [stay for stay in self._stays if stay.position + further > len(stay.pages) * size]
        given: list[tuple[Stay, int]] = []
        for stay in needy:
            lacking = self._pages_for(stay.position + further) - len(stay.pages)
            while not stay.over and not self._room(lacking):
                self._preempt(max(self._stays, key=lambda stay: stay.progress.order))
            if not stay.over:
                given += [(stay, len(stay.pages) + index) for index in range(lacking)]
                stay.pages += self._book.take(lacking)
        return tuple((stay.row, index, stay.pages[index]) for stay, index in given if not stay.over)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _room(self, pages: int, keep: Prefix | None = None) -> bool:
        """Makes that many pages free by dropping cached prefixes, if it can: first those nobody waits for."""
        if self._book.free >= pages:
            return True
        shelf = [prefix for prefix in self._shelf.oldest_first() if prefix is not keep]
        for prefix in sorted(shelf, key=lambda prefix: prefix.tokens in self._awaited):
            if prefix.tokens in self._awaited and len(self._stays) > 1:
                break  # while others run, giving up computed prompts is worse than preempting the youngest
            self._shelf.drop(prefix)
            if self._book.free >= pages:
                return True
        return False

    # ---- entering

    def _admit(self) -> tuple[tuple[Chunk, ...], tuple[Copy, ...], tuple[Entry, ...]]:
        chunks: list[Chunk] = []
        copies: list[Copy] = []
        entries: list[Entry] = []
        budget = self._prefill_tokens
        for progress in self._candidates():
            prefix = self._prefix(progress)
            if prefix is not None and not prefix.complete:
                if budget:
                    budget -= self._advance(prefix, budget, chunks)
                if not prefix.complete:
                    self._held = _PATIENCE  # it is gone on with in the next tick
                    break
            if prefix is None or not self._enter(progress, prefix, copies, entries):
                self._blocked = True  # those behind it wait too, so that nobody is overtaken for ever
                break
        return tuple(chunks), tuple(copies), tuple(entries)

    def _candidates(self) -> list[Progress]:
        """Those that may enter now, preempted ones first. While many run, a few enter together: prefill costs a run of
        the policy, for however many it is."""
        free = self._max_rows - len(self._stays)
        if free <= 0 or self._blocked:
            return []
        together = min(self._max_rows // _TOGETHER, len(self._resuming) + len(self._waiting))
        if free < together and self._held < _PATIENCE:
            self._held += 1
            return []
        self._held = 0
        resuming = self._resuming[:free]
        return resuming + self._waiting.first(free - len(resuming))

    def _prefix(self, progress: Progress) -> Prefix | None:
        """The prefix this request starts from: the shelf's, or a new one with its pages; None without room."""
        tokens = progress.prefix
        found = self._shelf.find(tokens)
        if found is not None:
            return found
        shared = self._shared_start(progress)
        self._book.share(shared)  # before making room, which could drop the prefix they come from
        pages = self._pages_for(len(tokens)) - len(shared)
        entry = self._pages_for(len(tokens) % self._page_size + self._nodes)
        if not self._room(pages + entry + len(self._stays)):  # for the entry itself, and one for everybody's next
            self._book.release(shared)
            return None
        prefix = Prefix(tokens, shared + self._book.take(pages), len(shared) * self._page_size, bool(progress.tokens))
        self._shelf.put(prefix)
        return prefix

    def _shared_start(self, progress: Progress) -> list[int]:
        """Full pages of the prompt, if a resumed request finds its prompt still on the shelf."""
        prompt = self._shelf.find(progress.request.prompt[:-1]) if progress.tokens else None
        if prompt is None or not prompt.complete:
            return []
        return prompt.pages[: len(prompt.tokens) // self._page_size]

    def _advance(self, prefix: Prefix, budget: int, chunks: list[Chunk]) -> int:
        """Plans the next chunk of a prefix; says how many tokens it took."""
        count = min(budget, len(prefix.tokens) - prefix.done)
        piece = prefix.tokens[prefix.done : prefix.done + count]
        chunks.append(Chunk(piece, prefix.done, tuple(prefix.pages), prefix.tokens))
        prefix.done += count
        return count

    def _enter(self, progress: Progress, prefix: Prefix, copies: list[Copy], entries: list[Entry]) -> bool:
        """Gives the request a row: shares the prefix's full pages, copies the partial one. False without room."""
        full, rest = divmod(len(prefix.tokens), self._page_size)
        shared = prefix.pages[:full]
        self._book.share(shared)
        needed = self._pages_for(len(prefix.tokens) + self._nodes) - full
        if not self._room(needed, keep=prefix):
            self._book.release(shared)
            return False
        own = self._book.take(needed)
        if rest:
            copies.append(Copy(prefix.pages[full], own[0], rest))
            self._book.share([prefix.pages[full]])  # until the plan is made: no chunk may write it before the copy
        request = progress.request
        stay = Stay(
            progress,
            row=len(self._stays),
            pages=shared + own,
            position=len(prefix.tokens),
            left=request.params.max_tokens - len(progress.tokens),
        )
        self._stays.append(stay)
        self._filtered += request.params.filtered
        pages = tuple(stay.pages)
        entries.append(Entry(stay.row, request, progress.last_token, stay.position, pages, prefix.tokens, stay.left))
        self._no_longer_waiting(progress)
        if prefix.private:
            self._shelf.drop(prefix)
        return True

    def _no_longer_waiting(self, progress: Progress) -> None:
        (self._resuming if progress.preemptions else self._waiting).remove(progress)
        self._admission.started(progress.request)
        self._waiting.rank_changed(progress.request.prompt_id)
        self._awaited[progress.prefix] -= 1
        if not self._awaited[progress.prefix]:
            del self._awaited[progress.prefix]


def lasting(moves: Iterable[tuple[int, int]], stays: int) -> tuple[tuple[int, int], ...]:
    """Of moves (from, to) one after another, always of the last row, those that bring the first rows what they end up
    with. A whole batch may end in one tick, and whoever moved to make room has left as well by then: what a drafter
    remembers of a row is large."""
    origin: dict[int, int] = {}
    for source, target in moves:
        origin[target] = origin.pop(source, source)
    return tuple((source, target) for target, source in origin.items() if target < stays)
