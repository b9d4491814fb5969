"""A follower rank of a tensor-parallel engine: runs its slice of the policy whenever the leader runs its own.

Always holds: it decides nothing. The leader announces each run and sends all of its inputs (tokens, positions, slots,
page tables, sampling keys), so the ranks cannot diverge. A follower holds its slice of the weights and the KV cache of
its heads. Drafters, scheduler and shape policy run on the leader alone.
"""

import torch

from tlt.config import EngineSettings
from tlt.engine.memory import cache_pages
from tlt.engine.runner import COMPILE, COPY, READ, RECORD, REPLAY, REST, RUN, PrefillInputs, Runner
from tlt.model.kv import KVCache
from tlt.model.parallel import Alone
from tlt.model.slices import PACKED, follow_packed
from tlt.model.transformer import Transformer
from tlt.spec.shape import MOST_NODES


class Follower:
    def __init__(self, model: Transformer, ranks: Alone, settings: EngineSettings, nodes: int = 1) -> None:
        """`model`: this rank's slice. `nodes`: size of the largest tree. The leader builds its engine meanwhile."""
        self._ranks = ranks
        self._model, self._device = model, model.embed.device
        pages = cache_pages(model, settings, MOST_NODES if nodes > 1 else 0, nodes)
        kept_in = pages, settings.page_size, model.embed.dtype, self._device
        self._cache = KVCache.allocate(model.local, *kept_in, sleeps=settings.sleep == "always")
        self._asleep = False
        self._runner = Runner(
            *(model, self._cache), rows=settings.rows, graphs=settings.graphs, taps=(), on_features=None
        )

    def sleep(self) -> None:
        """Releases the KV cache's memory until `wake`, as the leader does."""
        if self._cache.memory:
            self._cache.give_back()
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._cache.take()
            self._asleep = False

    @torch.no_grad()
    def follow(self) -> None:
        """Runs what the leader announces, until it announces REST. Raises RankLost if the leader is lost."""
        runner = self._runner
        while True:
            match self._ranks.next_command():
                case (command, role, rows) if command == RUN:
                    runner.run(role, rows)
                case (command, role, rows) if command == RECORD:
                    runner.record(role, rows)
                case (command, role, rows) if command == REPLAY:
                    runner.replay(role, rows)
                case (command, tokens, pieces, pages, most) if command == READ:
                    runner.read(PrefillInputs.empty(tokens, pieces, pages, self._device), most)
                case (command, *shape) if command == COPY:
                    runner.copy(*torch.empty((2, *shape), dtype=torch.int32, device=self._device))
                case (command, tokens, texts) if command == PACKED:
                    follow_packed(self._model, tokens, texts)
                case (command, widest, steps, filtered) if command == COMPILE:
                    runner.compile(widest, steps, filtered=filtered)
                case (command,) if command == REST:
                    return
                case unknown:
                    raise AssertionError(f"the leader announced {unknown}")
