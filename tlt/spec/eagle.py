"""The learned drafter: one decoder layer that reads the policy's hidden states (EAGLE-3) and predicts its next tokens.

Entry t: the policy's residual stream at three layers, fused, beside the embedding of the next token. The output is g_t,
from which the policy's own LM head predicts x_{t+2}. The next draft step reads g_t in place of the fused states.
EAGLE-3.1 adds two norms: of every tapped state before they are fused, and of g_t before anything reads it.
`align.py` defines the alignment. What always holds: the embedding and the LM head are the policy's tensors, passed with
each call, never owned and never written; a new Eagle has no values until `init_weights` or a file sets them; `unroll`
(training), `extend` and `step` (rollout) compute the same function. Does not know requests, seeds or files.
"""
# T packed positions, R rows, S new positions of a row or draft steps, Q nodes of a row, N slots for them, D hidden,
# F = 3·D states, V policy's vocabulary, v draft vocabulary, H query heads, K key heads, d head width

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tlt.config import DrafterArchitecture
from tlt.errors import ModelError
from tlt.kernels.dispatch import dispatch
from tlt.kernels.draft_tree import layer as layer_kernels
from tlt.kernels.draft_tree.layer import NewPositions
from tlt.kernels.linear.plan import ever_quantized
from tlt.kernels.linear.reference import Matrix, QuantizedMatrix
from tlt.kernels.training import reference as training_kernels
from tlt.model.attention import Heads
from tlt.model.config import ModelConfig
from tlt.model.device import upload
from tlt.model.linear import Stream, add_linear, in_gpu_rollout, in_gpu_training, linear, rms_norm, rows_of
from tlt.model.rope import rotary_tables
from tlt.spec.align import Aligned
from tlt.spec.window import Band, FlashBand, Nodes, Ring, attend_ring

TAPS = 3
_MLP_STEP = 16  # the MLP's width is a multiple of this, as kernels read 16 numbers at once
_MATRICES = {"fc": False, "qkv": False, "o": False, "gate_up": True, "down": False}  # name → whether it is gated


def taps(policy: ModelConfig) -> tuple[int, int, int]:
    """The numbers of layers after which the drafter reads the residual stream: low, middle, high."""
    layers = policy.layers
    if layers < TAPS - 1:
        raise ModelError(
            f"the policy has {layers} layer; a drafter needs {TAPS} different depths to read, so at least 2"
        )
    if layers >= 7:
        return 2, layers // 2, layers - 3
    high = max(layers - 2, min(layers, TAPS))
    return high - 2, high - 1, high


def layer_source(policy: ModelConfig, mlp: float = 1.0) -> dict[str, Any]:
    """The config.json (of a Llama) of a drafter's layer for this policy: the policy's width, heads and positions, and
    an MLP of the fraction `mlp` of the policy's."""
    scaling = {"rope_type": policy.rope.type, **policy.rope.parameters} if policy.rope.type != "default" else None
    return {
        "model_type": "llama",
        "vocab_size": policy.vocab,
        "hidden_size": policy.hidden,
        "intermediate_size": _mlp_width(policy, mlp),
        "num_hidden_layers": 1,
        "num_attention_heads": policy.heads,
        "num_key_value_heads": policy.kv_heads,
        "head_dim": policy.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": policy.max_positions,
        "rms_norm_eps": policy.norm_eps,
        "rope_theta": policy.rope.theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _mlp_width(policy: ModelConfig, share: float) -> int:
    if share == 1.0:
        return policy.mlp
    return max(1, round(share * policy.mlp / _MLP_STEP)) * _MLP_STEP


@dataclass(frozen=True, slots=True)
class EagleConfig:
    layer: ModelConfig  # of the one layer; its vocabulary is the policy's
    taps: tuple[int, int, int]
    window: int  # positions of the drafter's attention, its own included
    draft_vocab: int  # tokens it can draft
    policy_layers: int  # of the policy it reads
    fc_norm: bool = False  # each tapped state is normed before `fc`
    norm_output: bool = False  # g is normed once, for the LM head and the next draft step alike

    @classmethod
    def of_policy(
        cls,
        policy: ModelConfig,
        *,
        window: int,
        draft_vocab: int = 0,
        mlp: float = 1.0,
        architecture: DrafterArchitecture = "eagle-3",
    ) -> "EagleConfig":
        """A drafter for this policy. `draft_vocab` 0: every token; `mlp`: MLP width as a fraction of the policy's."""
        if not 0 <= draft_vocab <= policy.vocab:
            raise ModelError(f"a draft vocabulary of {draft_vocab}; expected at most the policy's {policy.vocab}")
        layer = ModelConfig.from_hf(layer_source(policy, mlp))
        norms = architecture == "eagle-3.1"
        return cls(layer, taps(policy), window, draft_vocab or policy.vocab, policy.layers, norms, norms)

    @property
    def architecture(self) -> DrafterArchitecture:
        return "eagle-3.1" if self.norm_output else "eagle-3"

    @property
    def reduced(self) -> bool:
        return self.draft_vocab < self.layer.vocab


def draft_vocabulary(counts_V: Tensor, size: int) -> Tensor:
    """The `size` most frequent tokens in ascending order: draft id → policy id. Of equal counts, lower ids first."""
    return counts_V.sort(descending=True, stable=True).indices[:size].sort().values


class Eagle(nn.Module):
    cos_PR: Tensor
    sin_PR: Tensor
    token_of_draft_v: Tensor | None
    own_head_vD: Tensor | None
    fc_norm: nn.Parameter | None

    def __init__(
        self, config: EagleConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        layer = config.layer
        D, M = layer.hidden, layer.mlp
        self.config = config
        self.heads = Heads(0, layer.heads, layer.kv_heads, layer.head_dim, True, config.window, layer.norm_eps)
        self.fc = parameter(D, TAPS * D)
        self.register_parameter("fc_norm", parameter(TAPS * D) if config.fc_norm else None)
        self.embed_norm = parameter(D)
        self.feature_norm = parameter(D)
        self.qkv = parameter(layer.qkv_width, 2 * D)
        self.o = parameter(D, layer.heads * layer.head_dim)
        self.mlp_norm = parameter(D)
        self.gate_up = parameter(2 * M, D)
        self.down = parameter(D, M)
        self.norm = parameter(D)
        ids = torch.zeros(config.draft_vocab, dtype=torch.int64, device=device) if config.reduced else None
        self.register_buffer("token_of_draft_v", ids)
        self.register_buffer("own_head_vD", None)  # of imported drafters that trained an LM head; frozen
        cos_PR, sin_PR = rotary_tables(layer)
        self.register_buffer("cos_PR", cos_PR.to(device), persistent=False)
        self.register_buffer("sin_PR", sin_PR.to(device), persistent=False)
        self._quantized: dict[str, QuantizedMatrix] = {}  # matrices that rollout reads in 8 bits on a GPU

    # ---- values

    @torch.no_grad()
    def init_weights(
        self, seed: int, token_of_draft_v: Tensor | None = None, policy_norm_D: Tensor | None = None
    ) -> None:
        """Random values. A reduced draft vocabulary must be given: draft id → policy id (see `draft_vocabulary`).

        `policy_norm_D`: weight of the policy's final norm, from which the drafter's starts. The policy's head expects
        states of that scale (4.6 on average for Qwen2.5-1.5B); from ones, logits stay flat for thousands of steps.
        """
        self.set_vocabulary(token_of_draft_v)
        generator = torch.Generator(device=self.fc.device).manual_seed(seed)
        for name, weight in self.named_parameters():
            if name.endswith("norm"):
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.02, generator=generator)
        if policy_norm_D is not None:
            self.norm.copy_(policy_norm_D)

    def quantize(self, quantized: bool = True) -> None:
        """Makes 8-bit copies of the large matrices, which a GPU's rollout reads for few rows. Call it again after the
        matrices have changed."""
        if not quantized:
            self._quantized = {}
            return
        for name, gated in _MATRICES.items():
            matrix: Tensor = getattr(self, name).detach()
            if not ever_quantized(len(matrix) // (2 if gated else 1), matrix.shape[1], gated):
                continue
            known = self._quantized.get(name)
            if known is not None and known.bf16_NK.data_ptr() == matrix.data_ptr():
                known.requantize()
            else:
                self._quantized[name] = QuantizedMatrix.of(matrix)

    def __getstate__(self) -> dict[str, Any]:
        """Copies are not quantized: most are made for training."""
        return self.__dict__ | {"_quantized": {}}

    def _matrix(self, name: str) -> Matrix:
        matrix: Tensor = getattr(self, name)
        return self._quantized.get(name, matrix)

    @torch.no_grad()
    def set_vocabulary(self, token_of_draft_v: Tensor | None) -> None:
        """Sets the policy id of each draft token. Checked: ascending, inside the vocabulary, as many as configured."""
        if (token_of_draft_v is not None) != self.config.reduced:
            raise ModelError(
                f"the drafter names {self.config.draft_vocab} of {self.config.layer.vocab} tokens; expected "
                + ("a list of them" if self.config.reduced else "no list, for these are all")
            )
        if token_of_draft_v is None or self.token_of_draft_v is None:
            return
        ids = token_of_draft_v.tolist()
        if (
            len(ids) != self.config.draft_vocab
            or sorted(set(ids)) != ids
            or not 0 <= ids[0] <= ids[-1] < self.config.layer.vocab
        ):
            raise ModelError(
                f"a draft vocabulary of {len(ids)} ids; expected {self.config.draft_vocab} different ones in ascending "
                f"order, from 0 to {self.config.layer.vocab - 1}"
            )
        self.token_of_draft_v.copy_(token_of_draft_v)

    def head_rows(self, head_VD: Tensor, out: Tensor | None = None) -> Tensor:
        """The head rows of the draft tokens, [v, D]. For a full vocabulary, the policy's tensor itself.

        For a reduced vocabulary, a copy: call it again when the policy has changed; `out` keeps a graph's pointer.
        """
        return self.policy_rows(head_VD, out) if self.own_head_vD is None else self.own_head_vD

    def policy_rows(self, head_VD: Tensor, out: Tensor | None = None) -> Tensor:
        """The policy's own head rows of the draft tokens, also for a drafter with a head of its own."""
        if self.token_of_draft_v is None:
            return head_VD
        return torch.index_select(head_VD.detach(), 0, self.token_of_draft_v, out=out)

    # ---- the layer

    def fuse(self, features_TF: Tensor) -> Tensor:
        """Projects the concatenated residual streams of the tapped layers to one state."""
        if self.fc_norm is not None:
            hidden = self.config.layer.hidden
            tapped_T3D = features_TF.view(-1, TAPS, hidden)
            normed_T3D = nn.functional.rms_norm(tapped_T3D, (hidden,), None, self.config.layer.norm_eps)
            features_TF = (normed_T3D * self.fc_norm.view(TAPS, hidden)).view_as(features_TF)
        return linear(features_TF, self._matrix("fc"))

    def logits(self, g: Stream, head: Matrix) -> Tensor:
        g_TD = rows_of(g)
        if in_gpu_rollout(g_TD) and not self.config.norm_output:
            return linear(g, head, norm_weight=self.norm, norm_eps=self.config.layer.norm_eps)
        return linear(self.for_head(g_TD), head)

    def for_head(self, g_TD: Tensor) -> Tensor:
        """g as the LM head reads it."""
        return g_TD if self.config.norm_output else self._final_norm(g_TD)

    def _final_norm(self, g_TD: Tensor) -> Tensor:
        return rms_norm(g_TD, self.norm, self.config.layer.norm_eps)

    def _normed_tokens(self, token_ST: Tensor, embed_VD: Tensor) -> Tensor:
        return rms_norm(embed_VD.detach()[token_ST], self.embed_norm, self.config.layer.norm_eps)

    def _project(self, token_TD: Tensor, state_TD: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: [T, heads, d] each. `token` is normed already, `state` is not."""
        heads = self.heads
        both = torch.cat((token_TD, rms_norm(state_TD, self.feature_norm, self.config.layer.norm_eps)), -1)
        qkv_TN = linear(both, self.qkv)
        in_triton = in_gpu_training(qkv_TN) or in_gpu_rollout(qkv_TN)
        return dispatch(training_kernels.split_and_rotate, in_triton)(
            qkv_TN, self.cos_PR, self.sin_PR, position_T, heads.query, heads.kv, heads.dim
        )

    def _finish(self, attended_TN: Tensor, state_TD: Tensor) -> Tensor:
        """g: the rest of the layer after attention. The residual is the input state, before its norm."""
        x_TD = torch.addmm(state_TD, attended_TN, self.o.t())  # not in place: the caller may keep the state
        normed_TD = rms_norm(x_TD, self.mlp_norm, self.config.layer.norm_eps)
        g_TD = linear(linear(normed_TD, self.gate_up, gated=True), self.down, residual=x_TD)
        return self._final_norm(g_TD) if self.config.norm_output else g_TD

    # ---- training: packed sequences

    def unroll(self, aligned: Aligned, features_TF: Tensor, embed_VD: Tensor, steps: int) -> list[Tensor]:
        """g of every entry in draft steps 0 … steps − 1, [T, D] each. Each step reads the g of the step before, as in
        rollout.

        Step s of entry t reads the true token x_{t+1+s}. Near a sequence's end there is none, and the result is
        undefined; `Aligned.targets` never uses it.
        """
        if steps > self.config.window:
            raise ModelError(f"{steps} draft steps in a window of {self.config.window}; expected a wider window")
        device = features_TF.device
        index_T, next_T = upload(aligned.index_T, device), upload(aligned.next_T, device)
        half = features_TF.is_cuda and features_TF.dtype in (torch.bfloat16, torch.float16)
        band: Any = (
            FlashBand.of(aligned.lengths, self.config.window, device)
            if half
            else Band.of(aligned.index_T, self.config.window, device)
        )
        # for all steps at once, which saves launches: step s reads the entry s places further, cyclically
        rounds = 1 + -(-(steps - 1) // len(next_T))
        token_ST = torch.cat([next_T] * rounds).unfold(0, len(next_T), 1)[:steps]
        tokens = self._normed_tokens(token_ST, embed_VD).unbind(0)
        position_ST = index_T + torch.arange(steps, device=device)[:, None]
        state_TD, out = self.fuse(features_TF), []
        keys = values = None
        chain: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            q, k, v = self._project(tokens[step], state_TD, position_ST[step])
            if step == 0:
                keys, values = band.windows(k), band.windows(v)
            else:
                chain.append((k, v))
            state_TD = self._finish(band.attend(q, keys, values, step, chain).flatten(1), state_TD)
            out.append(state_TD)
        return out

    # ---- rollout: rows with a ring of keys and values

    def new_ring(self, rows: int) -> Ring:
        return Ring.empty(rows, self.config.window, self.heads.kv, self.heads.dim, self.fc.dtype, self.fc.device)

    def new_nodes(self, rows: int, nodes: int) -> Nodes:
        return Nodes.empty(rows, nodes, self.heads.kv, self.heads.dim, self.fc.dtype, self.fc.device)

    @torch.no_grad()
    def extend(
        self,
        ring: Ring,
        next_T: Tensor,
        features_TF: Tensor,
        new: NewPositions,
        embed_VD: Tensor,
    ) -> Tensor:
        """Draft-extend: processes new positions of rows and writes their keys and values. g of each row's last, [R, D].

        `features` are the policy's states there, `next` the tokens drawn from them. A row without new positions is not
        changed, and its g is undefined.
        """
        state_TD = self.fuse(features_TF)
        in_triton, entry = in_gpu_rollout(state_TD), (embed_VD, self.embed_norm, self.feature_norm)
        both, residual_RD = dispatch(layer_kernels.embed_and_norm, in_triton)(
            next_T[:, None], state_TD[:, None], *entry, self.config.layer.norm_eps, new, pdl=True
        )
        # keys and values do not depend on attention, so only the last query of each row attends, to all of them
        q_R1Hd, last_R1 = dispatch(layer_kernels.rope_into_ring, in_triton)(
            *(linear(both, self._matrix("qkv")), new, self.cos_PR, self.sin_PR),
            *(ring.k_RKWd, ring.v_RKWd, ring.position_RW),
            pdl=True,
        )
        return rows_of(self._finish_over(attend_ring(q_R1Hd, ring, last_R1).flatten(1), residual_RD, next_norm=None))

    @torch.no_grad()
    def step(
        self,
        ring: Ring,
        nodes: Nodes,
        token_RQ: Tensor,
        parent_RQD: Tensor,
        position_RQ: Tensor,
        slot_RQ: Tensor,
        seen_RQN: Tensor,
        embed_VD: Tensor,
    ) -> Stream:
        """One draft step for a level of tree nodes: g of each, [R · Q, D], from which its children are drafted.

        `parent`: the g from which the node was drafted (for the first level the row's g from `extend`); `position`: one
        more than its parent's entry; `slot`: the slot of its keys among N; `seen`: the slots it attends to, its
        ancestors and itself. All are tensors, so one graph serves every depth of a tree.
        """
        in_triton, entry = in_gpu_rollout(parent_RQD), (embed_VD, self.embed_norm, self.feature_norm)
        both, residual_TD = dispatch(layer_kernels.embed_and_norm, in_triton)(
            token_RQ, parent_RQD, *entry, self.config.layer.norm_eps, pdl=True
        )
        q_RQHd = dispatch(layer_kernels.rope_into_nodes, in_triton)(
            *(linear(both, self._matrix("qkv")), position_RQ, slot_RQ, self.cos_PR, self.sin_PR),
            *(nodes.k_RKNd, nodes.v_RKNd),
            pdl=True,
        )
        attended = attend_ring(q_RQHd, ring, position_RQ, nodes, seen_RQN)
        return self._finish_over(attended.reshape(len(residual_TD), -1), residual_TD, next_norm=self.norm)

    def _finish_over(self, attended_TN: Tensor, residual_TD: Tensor, next_norm: Tensor | None) -> Stream:
        """`_finish` with fewer launches: a GPU writes g over the residual, prepared for the next norm. The norm before
        the gate is computed by the gate's kernel: preparing it in the kernel before was slower, as fewer programs fit
        on a multiprocessor then."""
        x_TD = linear(attended_TN, self._matrix("o"), residual=residual_TD)
        norm: dict[str, Any] = {"norm_weight": self.mlp_norm, "norm_eps": self.config.layer.norm_eps}
        gated_TM = linear(x_TD, self._matrix("gate_up"), **norm, gated=True)
        if self.config.norm_output:
            return self._final_norm(linear(gated_TM, self._matrix("down"), residual=x_TD))
        return add_linear(gated_TM, self._matrix("down"), residual=x_TD, next_norm=next_norm)


def gather_taps(tapped: Sequence[Tensor]) -> Tensor:
    """Concatenates the states of the tapped layers, low to high: [..., D] each → [..., F]."""
    return torch.cat(tuple(tapped), dim=-1)
