"""Page allocator and prefix cache of the KV cache. Always holds: free + used + cached == total.

A page is free, or has one reference per holder. The prefix cache holds the pages of prompts, so the requests of a group
compute their prompt once. A page that only the prefix cache holds counts as cached and may be reclaimed at any time.
Knows pages and reference counts; knows nothing of tensors or requests.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PageStats:
    free: int
    used: int  # held by at least one request
    cached: int  # held by the prefix cache alone


class PageAllocator:
    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Allocates `count` free pages, with one reference each."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} free: the scheduler must make room first")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is released more often than it is held")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def holders(self, page: int) -> int:
        return self._holders[page]


@dataclass(slots=True)
class Prefix:
    """A prompt without its last token, the pages of its KV cache, and the prefill progress."""

    tokens: tuple[int, ...]
    pages: list[int] = field(default_factory=list)
    done: int = 0  # tokens whose keys and values are in the pages, or will be in stream order
    private: bool = False  # belongs to one resumed request; useless to others
    starts: tuple[int, ...] = ()  # hash of its first 1, 2, … full pages, by which others find them

    @property
    def complete(self) -> bool:
        return self.done == len(self.tokens)


class PrefixCache:
    """Prefixes by their tokens, in LRU order."""

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._prefix_cache: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._starts: dict[int, Prefix] = {}  # hash of the first full pages → the newest prefix that starts with them

    def find(self, tokens: tuple[int, ...]) -> Prefix | None:
        prefix = self._prefix_cache.get(tokens)
        if prefix is not None:
            self._prefix_cache.move_to_end(tokens)
        return prefix

    def put(self, prefix: Prefix, *, shared: bool = False) -> None:
        """`shared`: its full pages also serve other texts that start with the same tokens."""
        self._prefix_cache[prefix.tokens] = prefix
        if shared:
            prefix.starts = tuple(self._hashes(prefix.tokens))
            self._starts.update(dict.fromkeys(prefix.starts, prefix))

    def longest_start(self, tokens: tuple[int, ...]) -> list[int]:
        """Full pages of the longest computed start that these tokens have in common with a shared prefix."""
        hashes = list(self._hashes(tokens))
        for count in range(len(hashes), 0, -1):
            prefix, length = self._starts.get(hashes[count - 1]), count * self._page_size
            if prefix and prefix.done >= length and prefix.tokens[:length] == tokens[:length]:
                self._prefix_cache.move_to_end(prefix.tokens)
                return prefix.pages[:count]
        return []

    def _hashes(self, tokens: tuple[int, ...]) -> Iterator[int]:
        found = 0
        for end in range(self._page_size, len(tokens) + 1, self._page_size):
            found = hash((found, tokens[end - self._page_size : end]))
            yield found

    def drop(self, prefix: Prefix) -> None:
        del self._prefix_cache[prefix.tokens]
        for start in prefix.starts:
            if self._starts.get(start) is prefix:
                del self._starts[start]
        self._allocator.release(prefix.pages)

    def clear(self) -> None:
        for prefix in list(self._prefix_cache.values()):
            self.drop(prefix)

    def oldest_first(self) -> list[Prefix]:
        return list(self._prefix_cache.values())

    def page_stats(self) -> PageStats:
        """Counts every page once. A page with a holder besides the prefix cache is used."""
        cached_pages: dict[int, int] = {}
        for prefix in self._prefix_cache.values():
            for page in prefix.pages:
                cached_pages[page] = cached_pages.get(page, 0) + 1
        cached = sum(self._allocator.holders(page) == count for page, count in cached_pages.items())
        return PageStats(self._allocator.free, self._allocator.total - self._allocator.free - cached, cached)
