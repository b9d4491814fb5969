"""The one model definition: policy in training, policy in rollout, and the layer a drafter is made of.

`forward(tokens, layout)` does not know which of them it is: the layout does. Projections that read the same input are
one matrix (qkv; gate and up), so that trainer and engine share the very tensors the kernels want; `weights.py` maps
them to Hugging Face's names. A new Transformer holds no values: load weights or call `init_weights` explicitly.
"""
# T tokens, D hidden, N fused width, V vocabulary

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tlt.model.attention import HeadNorms, Heads, Layout, Rotary
from tlt.model.config import ModelConfig
from tlt.model.linear import Stream, embed, linear, rms_norm, rows_of, wide_linear
from tlt.model.parallel import ALONE, Alone
from tlt.model.rope import rotary_tables


@dataclass(frozen=True, slots=True)
class Output:
    hidden_TD: Tensor  # after the final norm: what the LM head reads
    taps: tuple[Tensor, ...]  # the residual stream after each layer asked for

    def detached(self) -> "Output":
        """Without gradients."""
        return Output(self.hidden_TD.detach(), tuple(tap.detach() for tap in self.taps))


class Block(nn.Module):
    """One decoder layer: attention and MLP, each normed before and added after."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Alone = ALONE,
    ) -> None:
        """`config`: of the slice that this rank computes."""
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        def optional(present: bool, *shape: int) -> nn.Parameter | None:
            return parameter(*shape) if present else None

        D, M, attended = config.hidden, config.mlp, config.heads * config.head_dim
        self.eps = config.norm_eps
        self.parallel = parallel
        self.heads = Heads(
            layer=layer,
            query=config.heads,
            kv=config.kv_heads,
            dim=config.head_dim,
            rotary=config.rotary_layers[layer],
            window=config.windows[layer],
            norm_eps=config.norm_eps,
        )
        self.attn_norm = parameter(D)
        self.qkv = parameter(config.qkv_width, D)
        self.qkv_bias = optional(config.qkv_bias, config.qkv_width)
        self.q_norm = optional(config.qk_norm, config.head_dim)
        self.k_norm = optional(config.qk_norm, config.head_dim)
        self.o = parameter(D, attended)
        self.o_bias = optional(config.o_bias, D)
        self.mlp_norm = parameter(D)
        self.gate_up = parameter(2 * M, D)
        self.gate_up_bias = optional(config.mlp_bias, 2 * M)
        self.down = parameter(D, M)
        self.down_bias = optional(config.mlp_bias, D)

    def forward(
        self, x: Stream, layout: Layout, rotary: Rotary, next_norm: Tensor | None = None, keep_x: bool = False
    ) -> Stream:
        """`next_norm`: the weight of the norm that reads the result, if that is known. `keep_x`: x is
        used elsewhere, so the first sum is not written over it."""
        exact = layout.exact
        qkv_TN = linear(x, self.qkv, bias=self.qkv_bias, norm_weight=self.attn_norm, norm_eps=self.eps, exact=exact)
        attended = layout.attend(qkv_TN, self.heads, rotary, HeadNorms(self.q_norm, self.k_norm))
        x = self.parallel.add_linear(
            *(attended, self.o),
            bias=self.o_bias,
            residual=x,
            next_norm=self.mlp_norm,
            keep_residual=keep_x,
            exact=exact,
        )
        gated = linear(
            *(x, self.gate_up),
            bias=self.gate_up_bias,
            norm_weight=self.mlp_norm,
            norm_eps=self.eps,
            gated=True,
            exact=exact,
        )
        return self.parallel.add_linear(
            *(gated, self.down), bias=self.down_bias, residual=x, next_norm=next_norm, exact=exact
        )


class Transformer(nn.Module):
    cos_PR: Tensor
    sin_PR: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        parallel: Alone = ALONE,
    ) -> None:
        super().__init__()
        self.config = config
        self.parallel = parallel
        self.local = local = parallel.slice_of(config)  # of the layers held here
        self.checkpoint_activations = False  # recompute each block in the backward pass: less memory, a third more time
        self.embed = nn.Parameter(torch.empty(config.vocab, config.hidden, dtype=dtype, device=device))
        self.blocks = nn.ModuleList(
            Block(local, i, dtype=dtype, device=device, parallel=parallel) for i in range(config.layers)
        )
        self.norm = nn.Parameter(torch.empty(config.hidden, dtype=dtype, device=device))
        self.head = None if config.tied else nn.Parameter(torch.empty_like(self.embed))
        self._passed_over: frozenset[int] = frozenset()  # layers that `forward` leaves out
        cos_PR, sin_PR = rotary_tables(config)
        self.register_buffer("cos_PR", cos_PR.to(device), persistent=False)
        self.register_buffer("sin_PR", sin_PR.to(device), persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: the embedding itself where the two are tied."""
        return self.embed if self.head is None else self.head

    def forward(self, tokens_T: Tensor, layout: Layout, taps: Sequence[int] = ()) -> Output:
        """`taps` names layers by how many have run: tap 2 is the residual stream after two layers."""
        rotary = Rotary(self.cos_PR, self.sin_PR)
        blocks = [(i, cast(Block, block)) for i, block in enumerate(self.blocks) if i not in self._passed_over]
        norms = [block.attn_norm for _, block in blocks]
        x = embed(self.embed, tokens_T, norms[0], exact=layout.exact)
        tapped = {}
        for (index, block), next_norm in zip(blocks, [*norms[1:], None], strict=True):
            if index in taps:
                tapped[index] = rows_of(x)
            if self.checkpoint_activations and torch.is_grad_enabled():
                # nothing in a block is random
                x = checkpoint(block, x, layout, rotary, use_reentrant=False, preserve_rng_state=False)
            else:  # with gradients no block reads the next one's norm, which may be a shard elsewhere
                x = block(x, layout, rotary, None if torch.is_grad_enabled() else next_norm, index in taps)
        tapped[len(self.blocks)] = rows_of(x)
        hidden_TD = rms_norm(rows_of(x), self.norm, self.config.norm_eps)
        return Output(hidden_TD, tuple(tapped[tap] for tap in taps))

    def logits(self, hidden_TD: Tensor, *, exact: bool = False) -> Tensor:
        """In float32 at least: bfloat16 would round a logit of 20 to the next eighth, and turn tokens."""
        return wide_linear(hidden_TD, self.head_weight, exact=exact)

    def logit_slice(self, hidden_TD: Tensor, *, exact: bool = False) -> Tensor:
        """The logits of this rank's tokens, `parallel.tokens`."""
        return wide_linear(hidden_TD, self.head_weight[self.parallel.tokens(self.config.vocab)], exact=exact)

    @contextmanager
    def one_layer_of_each_kind(self, taps: Collection[int]) -> Iterator[None]:
        """Meanwhile `forward` runs the layers at `taps`, and one of the others that launch the same kernels. Its
        results mean nothing: compiling ahead asks only for the kernels."""
        kinds: dict[object, int] = {}
        for index, block in enumerate(self.blocks):
            heads, last = cast(Block, block).heads, index == len(self.blocks) - 1
            tap = index if index in taps else None
            kinds.setdefault((heads.rotary, heads.window, tap, index == 0, last), index)
        self._passed_over = frozenset(range(len(self.blocks))) - frozenset(kinds.values())
        try:
            yield
        finally:
            self._passed_over = frozenset()

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fresh values for a policy trained from nothing: small normal matrices, unit norms, zero biases."""
        generator = torch.Generator(device=self.embed.device).manual_seed(seed)
        deep = 0.02 / (2 * self.config.layers) ** 0.5  # keeps the residual stream's size whatever the depth
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif name.endswith("norm"):
                parameter.fill_(1.0)
            else:
                std = deep if name.endswith((".o", ".down")) else 0.02
                parameter.normal_(0.0, std, generator=generator)
