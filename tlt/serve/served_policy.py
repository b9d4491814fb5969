"""The policy of a server, its engine, and the trainer of its drafter. Used by one thread.

What always holds: the policy's tensors stay at their addresses while the server is awake, and new weights are copied
into them; the version changes with the weights; while the server sleeps there is no engine, and the weights are in
host memory.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tlt.config import RunConfig
from tlt.drafting.trainer import OnlineDrafter
from tlt.engine.build import build_engine
from tlt.engine.engine import EngineCore, EngineReport
from tlt.engine.request import PartialOutput, Request
from tlt.engine.scoring import Scores
from tlt.model.transformer import Transformer
from tlt.policy import Policy, open_policy
from tlt.serve.protocol import ApiError
from tlt.spec.drafter import Drafter, build_drafters
from tlt.text import Tokenizer
from tlt.types import Completion, Key

_ASLEEP = "the server sleeps; POST /wake_up first"
_SORT_EVERY = 64  # completions after which the drafter's buffer sorts those that arrived


@dataclass(frozen=True, slots=True)
class ServedReport:
    """The engine's report, with queue lengths and versions."""

    engine: EngineReport | None  # None: asleep
    running: int
    waiting: int
    version: int
    drafter_version: int


class ServedPolicy:
    def __init__(self, config: RunConfig, policy: Policy | None = None) -> None:
        """`policy`: opened already; None: the configuration's."""
        self.config = config
        self._policy = policy or open_policy(config.model)
        self._device = self._policy.model.embed.device
        self._trainer: OnlineDrafter | None = None
        self._engine: EngineCore | None = None
        self._version = 0
        self._in_flight = 0
        self._unsorted = 0  # completions that the drafter's buffer has not sorted
        self._build()

    def _build(self) -> None:
        drafters = build_drafters(self._policy, self.config) if self.config.spec.drafters else []
        self._learned = next((drafter for drafter in drafters if drafter.learned), Drafter())
        self._engine = build_engine(self._policy, self.config, drafters=drafters)
        if self._version:
            self._engine.load_policy(self._version)
        eagle = self._learned.model
        if self._trainer is not None:
            self._engine.load_drafter(self._trainer.weights(), self._trainer.version)
        elif eagle is not None and not self.config.drafting.frozen:
            self._trainer = OnlineDrafter.of(self._policy, eagle, self.config)

    # ---- properties

    @property
    def tokenizer(self) -> Tokenizer:
        return self._policy.tokenizer

    @property
    def model(self) -> Transformer:
        """The policy. Change its weights with `update_weights` only."""
        return self._policy.model

    @property
    def context(self) -> int:
        """Positions of prompt and completion together, at most."""
        return self._policy.model.config.max_positions

    @property
    def version(self) -> int:
        return self._version

    @property
    def asleep(self) -> bool:
        return self._engine is None

    @property
    def busy(self) -> bool:
        return self._engine is not None and not self._engine.idle

    @property
    def score_tokens(self) -> int:
        """Tokens to score at once."""
        return self.config.engine.prefill_tokens

    def report(self) -> ServedReport:
        running = self._engine.running if self._engine else 0
        waiting = self._in_flight - running
        report = self._engine.report() if self._engine else None
        return ServedReport(report, running, waiting, self._version, self._learned.version)

    # ---- completions

    @property
    def _awake(self) -> EngineCore:
        if self._engine is None:
            raise ApiError(503, _ASLEEP, code="asleep")
        return self._engine

    def submit(self, requests: Sequence[Request]) -> None:
        self._awake.submit(requests)
        self._in_flight += len(requests)

    def check(self, prompt: Sequence[int]) -> None:
        self._awake.check(prompt)

    def tick(self) -> list[Completion]:
        completions = self._awake.tick()
        self._in_flight -= len(completions)
        if self._trainer and completions:
            self._trainer.learn_from(completions, self._version)
            self._unsorted += len(completions)
            if self._unsorted >= _SORT_EVERY:
                self._trainer.sort_arrived()
                self._unsorted = 0
        return completions

    def take_failures(self) -> Mapping[Key, str]:
        failures = self._awake.take_failures()
        self._in_flight -= len(failures)
        return failures

    def abort(self, key: Key) -> Completion:
        self._in_flight -= 1
        return self._awake.abort(key)

    def count(self, key: Key) -> int:
        """Tokens of a running request so far."""
        return len(self._awake.written(key))

    def written_since(self, key: Key, start: int) -> PartialOutput:
        return self._awake.written_since(key, start)

    def score(self, texts: Sequence[Sequence[int]], top: int) -> list[Scores]:
        return self._awake.score(texts, top)

    def drop_prefixes(self) -> None:
        if self._engine:
            self._engine.drop_prefixes()

    # ---- weights

    def update_weights(self, load: Callable[[Transformer], None], version: int | None = None) -> int:
        """Loads new weights into the policy's tensors with `load`. Returns their version: the last one plus one, unless
        given."""
        load(self._policy.model)
        self._version = self._version + 1 if version is None else version
        if self._engine:
            self._engine.load_policy(self._version)
        return self._version

    def sleep(self) -> None:
        """Frees the KV cache and the CUDA graphs, and moves the weights to host memory."""
        if self.busy:
            raise ApiError(409, "requests are running; first POST /pause, with mode=abort or mode=wait", code="busy")
        self._engine, self._learned = None, Drafter()
        gc.collect()  # engine and drafters refer to each other
        self._move("cpu")

    def wake(self) -> None:
        if self._engine is None:
            self._move(self._device)
            self._build()

    def _move(self, device: torch.device | str) -> None:
        if self._device.type == "cuda":
            self._policy.model.to(device)
            torch.cuda.empty_cache()

    # ---- the drafter

    @property
    def learns(self) -> bool:
        return self._trainer is not None and self._engine is not None

    def learn(self, until: Callable[[], bool], seconds: float = 0.0) -> bool:
        """Trains the drafter until `until` is true, and after that up to `seconds` in all; loads a better one into the
        engine. False: training no longer helps."""
        if self._trainer is None or self._engine is None:
            return False
        result = self._trainer.train(until, extra_s=seconds)
        self._unsorted = 0
        if self._trainer.version != self._learned.version:
            self._engine.load_drafter(self._trainer.weights(), self._trainer.version)
        return result.ended == "stopped"

    def close(self) -> None:
        self._engine = None
        self._learned = Drafter()
