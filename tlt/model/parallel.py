"""Tensor parallelism: the ranks of one engine compute every forward together, each with a slice of every layer.

Attention heads and MLP columns are divided among the ranks: qkv, gate and up by rows, o and down by columns, whose
partial products are summed by an all-reduce. So the residual stream is equal on all ranks, bit by bit. Embedding, LM
head and norms are whole on every rank, because a drafter reads them; of the logits each rank computes those of its own
tokens. The first rank leads: it announces what runs next and shares its inputs; the others follow.
`Alone` is the engine of one rank: nothing is divided, and nothing is said.
On a GPU the collectives are launched on fixed buffers and wait for nothing on the host, so CUDA graphs record them.
Knows no requests, weights files or processes: the process groups are handed in.
"""
# T tokens, R rows, v logits of one rank

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from tlt.errors import ModelError, RankLost
from tlt.kernels.linear.reference import Matrix
from tlt.model.config import ModelConfig
from tlt.model.linear import Stream, add_linear, linear, rows_of

_COMMAND_BYTES = 512  # of an announcement, all of which have this size: a single broadcast


class Alone:
    """The only rank of an engine."""

    rank, size = 0, 1

    def slice_of(self, config: ModelConfig) -> ModelConfig:
        """The configuration of the layers that this rank computes."""
        return config

    def tokens(self, vocab: int) -> slice:
        """Those whose logits this rank computes."""
        return self.tokens_of(self.rank, vocab)

    def tokens_of(self, rank: int, vocab: int) -> slice:
        return slice(rank * vocab // self.size, (rank + 1) * vocab // self.size)

    def add_linear(
        self,
        x_TK: Tensor,
        weight: Matrix,
        *,
        bias: Tensor | None,
        residual: Stream,
        next_norm: Tensor | None = None,
        keep_residual: bool = False,
        exact: bool = False,
    ) -> Stream:
        """`tlt.model.linear.add_linear` of a weight that is divided by columns."""
        return add_linear(
            *(x_TK, weight),
            bias=bias,
            residual=residual,
            next_norm=next_norm,
            keep_residual=keep_residual,
            exact=exact,
        )

    def share(self, *tensors: Tensor) -> None:
        """Every tensor becomes, in place, that of the leader."""

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, [ranks, …]."""
        return x[None]

    def announce(self, command: tuple[Any, ...]) -> None:
        """Tells the other ranks what runs next. Those that follow have nobody to tell."""

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Nothing is exchanged within, for work whose numbers nobody reads: ranks may do different amounts of it."""
        yield

    def next_command(self) -> tuple[Any, ...]:
        """Follower: waits for the leader's next announcement."""
        raise AssertionError("the only rank of an engine follows nobody")

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        return number


ALONE = Alone()


class Ranks(Alone):
    """A rank among several. `tensors` and `commands`: process groups of the ranks, the second for hosts."""

    def __init__(self, rank: int, size: int, tensors: Any, commands: Any) -> None:
        self.rank, self.size = rank, size
        self._tensors, self._commands = tensors, commands
        self._from_leader = torch.distributed.BroadcastOptions()
        self._from_leader.rootRank = 0
        self._apart = False

    def slice_of(self, config: ModelConfig) -> ModelConfig:
        check_divisible(config, self.size)
        n = self.size
        return replace(config, heads=config.heads // n, kv_heads=config.kv_heads // n, mlp=config.mlp // n)

    def add_linear(
        self,
        x_TK: Tensor,
        weight: Matrix,
        *,
        bias: Tensor | None,
        residual: Stream,
        next_norm: Tensor | None = None,
        keep_residual: bool = False,
        exact: bool = False,
    ) -> Stream:
        sum_TD = linear(x_TK, weight)
        if not self._apart:
            with _rank_errors():
                self._tensors.allreduce([sum_TD]).wait()
        if bias is not None:
            sum_TD += bias
        return sum_TD.add_(rows_of(residual))

    def share(self, *tensors: Tensor) -> None:
        with _rank_errors():
            for tensor in () if self._apart else tensors:
                whole = tensor.contiguous()  # a view of some columns
                if tensor.numel():
                    self._tensors.broadcast([whole], self._from_leader).wait()
                if whole is not tensor:
                    tensor.copy_(whole)

    def gather(self, x: Tensor) -> Tensor:
        found = x.new_zeros(self.size * x.numel())  # gloo wants both flat
        if not self._apart:
            with _rank_errors():
                self._tensors._allgather_base(found, x.reshape(-1)).wait()
        return found.view(self.size, *x.shape)

    def announce(self, command: tuple[Any, ...]) -> None:
        if self.rank:
            return
        packed = pickle.dumps(command)
        if len(packed) > _COMMAND_BYTES:
            raise AssertionError(f"the command {command} takes {len(packed)} bytes, expected {_COMMAND_BYTES} at most")
        sent = torch.zeros(_COMMAND_BYTES, dtype=torch.uint8)
        sent[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        with _rank_errors():
            self._commands.broadcast([sent], self._from_leader).wait()

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def next_command(self) -> tuple[Any, ...]:
        heard = torch.empty(_COMMAND_BYTES, dtype=torch.uint8)
        with _rank_errors():
            self._commands.broadcast([heard], self._from_leader).wait()
        command: tuple[Any, ...] = pickle.loads(heard.numpy().tobytes())
        return command

    def least(self, number: int) -> int:
        mine = torch.tensor([number])
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with _rank_errors():
            self._commands.allgather([found], [mine]).wait()
        return int(torch.cat(found).min())


def check_divisible(config: ModelConfig, ranks: int) -> None:
    """Raises ModelError unless the policy can be divided among so many ranks."""
    for name, number in (
        ("num_key_value_heads", config.kv_heads),
        ("num_attention_heads", config.heads),
        ("intermediate_size", config.mlp),
    ):
        if number % ranks:
            raise ModelError(
                f"cluster.tensor_parallel is {ranks}, and the policy's {name} is {number}; expected a divisor of it"
            )
    if config.vocab < ranks:
        raise ModelError(f"cluster.tensor_parallel is {ranks}, and the policy has {config.vocab} tokens; lower it")


@contextmanager
def _rank_errors() -> Iterator[None]:
    """Turns torch's errors about lost peers into RankLost."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"another rank of this engine was lost: {error}") from error
