"""The memory plan: what a worker's GPU holds in each phase of a step, from the configuration and sizes alone.

Always holds: the plan is made before anything is loaded, and the key-value cache gets what it leaves. It decides what
`engine.sleep` and `train.checkpoint_activations` leave open: activations are kept where that takes nothing from the
cache, and the engine sleeps where the run would not fit otherwise. What is trained and what is sharded counts as such.
Numbers are bytes of one worker. Pure: reads no files, asks no device.
"""
# W weights, D hidden, M MLP, V vocabulary, T tokens of a row

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from tlt.config import RunConfig
from tlt.model.config import ModelConfig

GIB = 1024**3
RESERVE_SHARE = 0.05  # of the GPU, for graphs and the allocator
RESERVE_BYTES = GIB  # and this on top
LOGIT_BYTES = 4  # logits are float32
_MARGIN_SHARE = 0.1  # of the GPU, that keeping activations must leave free
_LOGITS_SHARE = 64  # training computes logits in chunks of this part of the GPU's memory
_GATHERED_BLOCKS = 2  # of a policy in shards: the one in use, and the next
_HALF = 2  # bytes of a weight in half precision
_UNFUSED = 1.5  # times the activations of fused layers, which only half precision has
_UPDATE = "update"  # how that phase's name begins
_PROMPT_TOKENS = 4096  # of the longest prompt, as far as room for keys and values goes
_ROWS_TRIED = (16384, 8192, 4096, 2048)


@dataclass(frozen=True, slots=True)
class DrafterSizes:
    """Of the learned drafter."""

    weights: int
    vocab: int  # tokens it can name
    layer: ModelConfig


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a plan is made from, besides the configuration."""

    policy: ModelConfig
    itemsize: int  # bytes of a weight
    device_bytes: int  # of one GPU; 0: not known
    drafter: DrafterSizes | None = None


@dataclass(frozen=True, slots=True)
class MemoryPart:
    name: str
    bytes: int
    later: bool = False  # allocated after the engine is built
    asleep: bool = False  # of a phase: the KV cache's memory is given back meanwhile


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`kept`: from the first step to the last. `phases`: beside it, in one phase of a step at most."""

    kept: tuple[MemoryPart, ...]
    phases: tuple[MemoryPart, ...]
    reserve_bytes: int
    device_bytes: int  # of this worker's part of a GPU; 0: not known
    most_kv_bytes: int  # that all rows can fill
    least_kv_bytes: int  # one request of the greatest length
    given_kv_bytes: int  # `engine.kv_gib`; 0: what is left
    recomputes: bool  # each layer in the backward pass

    @property
    def kept_bytes(self) -> int:
        return sum(part.bytes for part in self.kept)

    @property
    def peak(self) -> MemoryPart:
        """The phase that needs most, with keys and values or without."""
        return max(self.phases, key=lambda part: part.bytes + (0 if part.asleep else self.kv_bytes))

    @property
    def _beside_kv(self) -> int:
        """The most that a phase needs while there are keys and values."""
        return max(part.bytes for part in self.phases if not part.asleep)

    @property
    def sleeps(self) -> bool:
        return any(part.asleep for part in self.phases)

    @property
    def left_bytes(self) -> int:
        """For keys and values, at most."""
        return self.device_bytes - self.reserve_bytes - self.kept_bytes - self._beside_kv

    @property
    def kv_bytes(self) -> int:
        return self.given_kv_bytes or max(0, min(self.left_bytes, self.most_kv_bytes))

    @property
    def later_bytes(self) -> int:
        """What is still to be allocated when the engine is built, beside keys and values."""
        return sum(part.bytes for part in self.kept if part.later) + self._beside_kv + self.reserve_bytes

    @property
    def needed_bytes(self) -> int:
        """The smallest GPU that this fits on."""
        kv = self.given_kv_bytes or self.least_kv_bytes
        asleep = max((part.bytes for part in self.phases if part.asleep), default=0)
        return self.kept_bytes + self.reserve_bytes + max(self._beside_kv + kv, asleep)

    @property
    def fits(self) -> bool:
        return not self.device_bytes or self.needed_bytes <= self.device_bytes


def memory_plan(config: RunConfig, sizes: Sizes) -> MemoryPlan:
    """With `train.checkpoint_activations` auto layers are recomputed unless there is clear room for activations."""
    if config.train.checkpoint_activations != "auto":
        return _plan_of(config, sizes)
    keeps, recomputes = (_plan_of(_checkpointed(config, it), sizes) for it in ("never", "always"))
    return keeps if not keeps.device_bytes or _has_room(keeps, recomputes) else recomputes


def _has_room(keeps: MemoryPlan, recomputes: MemoryPlan) -> bool:
    """Whether activations leave a clear margin beside the cache that there is without them, and change no sleep."""
    update = next(part for part in keeps.phases if part.name.startswith(_UPDATE))
    kv = 0 if update.asleep else recomputes.kv_bytes
    needed = keeps.kept_bytes + keeps.reserve_bytes + update.bytes + kv
    return keeps.sleeps is recomputes.sleeps and needed <= (1 - _MARGIN_SHARE) * keeps.device_bytes


def _checkpointed(config: RunConfig, chosen: Literal["always", "never"]) -> RunConfig:
    return replace(config, train=replace(config.train, checkpoint_activations=chosen))


def _plan_of(config: RunConfig, sizes: Sizes) -> MemoryPlan:
    """With `engine.sleep` auto the engine sleeps during updates if the run would not fit otherwise."""
    awake, asleep = (_plan(config, sizes, sleeps) for sleeps in (False, True))
    sleeps = asleep.fits and not awake.fits if config.engine.sleep == "auto" else config.engine.sleep == "always"
    return asleep if sleeps else awake


def _plan(config: RunConfig, sizes: Sizes, sleeps: bool) -> MemoryPlan:
    policy, size = sizes.policy, sizes.itemsize
    device = int(sizes.device_bytes * min(1.0, config.cluster.gpus_per_worker))
    kv_heads = policy.kv_heads // config.cluster.tensor_parallel
    page = 2 * policy.layers * config.engine.page_size * kv_heads * policy.head_dim * size
    tokens = config.sampling.max_tokens
    least, most = (
        ceil(min(policy.max_positions, length) / config.engine.page_size) + 1
        for length in (tokens, tokens + _PROMPT_TOKENS)
    )
    return MemoryPlan(
        kept=tuple(part for part in (*_policy_parts(config, sizes), *_drafter_parts(config, sizes)) if part.bytes),
        phases=tuple(_phases(config, sizes, device, sleeps)),
        reserve_bytes=int(RESERVE_SHARE * device) + RESERVE_BYTES,
        device_bytes=device,
        most_kv_bytes=page * config.engine.rows * most,
        least_kv_bytes=page * max(2, least),
        given_kv_bytes=int(config.engine.kv_gib * GIB),
        recomputes=config.train.checkpoint_activations == "always",
    )


def remedies(config: RunConfig, sizes: Sizes) -> Iterator[tuple[str, MemoryPlan]]:
    """Settings that take less memory, as flags, each with the plan that it gives alone."""
    for flags, changed in _changes(config):
        yield flags, memory_plan(changed, sizes)


def _changes(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    train, cluster = config.train, config.cluster
    for tokens in _ROWS_TRIED:
        if tokens < train.row_tokens:
            yield f"--train.row_tokens {tokens}", replace(config, train=replace(train, row_tokens=tokens))
    if train.checkpoint_activations != "always":
        yield "--train.checkpoint_activations always", _checkpointed(config, "always")
    if config.engine.kv_gib:
        yield "--engine.kv_gib 0", replace(config, engine=replace(config.engine, kv_gib=0.0))
    if config.grpo.kl and not config.train.lora_rank:
        yield "--grpo.kl 0", replace(config, grpo=replace(config.grpo, kl=0.0))
    if train.lora_rank:
        return
    if cluster.workers > 1 and not cluster.shard:
        changed = replace(config, cluster=replace(cluster, shard=True), train=replace(train, offload=False))
        yield "--cluster.shard true", changed
    if not train.offload and not cluster.shard:
        yield "--train.offload true", replace(config, train=replace(train, offload=True))
    lora = replace(train, lora_rank=16, offload=False)
    yield "--train.lora_rank 16", replace(config, train=lora, cluster=replace(cluster, shard=False))
    if train.checkpoint_activations == "never":
        both = replace(lora, checkpoint_activations="always")
        flags = "--train.lora_rank 16 --train.checkpoint_activations always"
        yield flags, replace(config, train=both, cluster=replace(cluster, shard=False))


# ---- sizes of models


def block_weights(policy: ModelConfig) -> int:
    """Of one layer."""
    D, M, attended = policy.hidden, policy.mlp, policy.heads * policy.head_dim
    matrices = policy.qkv_width * D + D * attended + 3 * M * D
    biases = policy.qkv_bias * policy.qkv_width + policy.o_bias * D + policy.mlp_bias * (2 * M + D)
    return matrices + biases + 2 * D + policy.qk_norm * 2 * policy.head_dim


def divided_weights(policy: ModelConfig) -> int:
    """Of one layer, those of which each rank of an engine has a part."""
    D, M, attended = policy.hidden, policy.mlp, policy.heads * policy.head_dim
    biases = policy.qkv_bias * policy.qkv_width + policy.mlp_bias * 2 * M
    return policy.qkv_width * D + D * attended + 3 * M * D + biases


def outer_weights(policy: ModelConfig) -> int:
    """Embedding, head and final norm."""
    return policy.vocab * policy.hidden * (1 if policy.tied else 2) + policy.hidden


def adapter_weights(policy: ModelConfig, rank: int) -> int:
    D, M, attended = policy.hidden, policy.mlp, policy.heads * policy.head_dim
    sides = (policy.qkv_width + D) + (D + attended) + (2 * M + D) + (D + M)
    return policy.layers * rank * sides


def _adapted_weights(policy: ModelConfig) -> int:
    D, attended = policy.hidden, policy.heads * policy.head_dim
    return policy.layers * (policy.qkv_width * D + D * attended + 3 * policy.mlp * D)


def _weights(policy: ModelConfig) -> int:
    return policy.layers * block_weights(policy) + outer_weights(policy)


# ---- what is kept


def _wide(size: int) -> int:
    return max(4, size)


def _shards(config: RunConfig) -> int:
    return config.cluster.workers if config.cluster.shard else 1


def _policy_parts(config: RunConfig, sizes: Sizes) -> Iterator[MemoryPart]:
    weights, size, wide, shards = _weights(sizes.policy), sizes.itemsize, _wide(sizes.itemsize), _shards(config)
    ranks = config.cluster.tensor_parallel
    layers = sizes.policy.layers * divided_weights(sizes.policy)
    if ranks > 1 and shards > 1:
        yield MemoryPart(f"embedding, head and 1/{ranks} of the layers", (weights - layers + layers // ranks) * size)
    else:
        yield MemoryPart("policy", weights * size)
    if ranks > 1 and shards == 1:
        yield MemoryPart(f"1/{ranks} of the policy's layers, for the engine", layers // ranks * size)
    if config.grpo.kl and not config.train.lora_rank:  # with adapters it is the policy without them
        yield MemoryPart("reference policy (grpo.kl)", weights * size)
    if config.train.lora_rank:
        adapters = adapter_weights(sizes.policy, config.train.lora_rank)
        yield MemoryPart("copy of the adapted matrices", _adapted_weights(sizes.policy) * size)
        yield MemoryPart("adapters", adapters * wide)
        yield MemoryPart("Adam's moments", adapters * 2 * wide, later=True)
        return
    if config.train.offload:
        return
    own = ceil(weights / shards)
    if shards > 1:
        yield MemoryPart(f"1/{shards} of the policy that is trained", own * size)
    if wide != size:
        yield MemoryPart("float32 masters", own * wide)
    yield MemoryPart("Adam's moments", own * 2 * wide, later=True)


def _drafter_parts(config: RunConfig, sizes: Sizes) -> Iterator[MemoryPart]:
    if sizes.drafter is None:
        return
    weights, size, wide = sizes.drafter.weights, sizes.itemsize, _wide(sizes.itemsize)
    yield MemoryPart("drafter", weights * (size + (1 if config.spec.quantized else 0)))
    if not config.drafting.frozen:
        masters = wide if wide != size else 0
        yield MemoryPart(
            "drafter in training, its best copy and moments", weights * (2 * size + masters + 2 * wide), later=True
        )


# ---- phases


def _phases(config: RunConfig, sizes: Sizes, device: int, sleeps: bool) -> Iterator[MemoryPart]:
    row = max(config.train.row_tokens, min(sizes.policy.max_positions, config.sampling.max_tokens))
    how = "layers recomputed" if config.train.checkpoint_activations == "always" else "activations kept"
    name = f"{_UPDATE}, rows of {row:,} tokens, {how}"
    yield MemoryPart(name, _update_bytes(config, sizes, row, device), asleep=sleeps)
    yield MemoryPart("rollout: prefill and logits", forward_bytes(config, sizes))
    if sizes.drafter and not config.drafting.frozen:
        yield MemoryPart("drafter training", _drafting_bytes(config, sizes, sizes.drafter, device))


def forward_bytes(config: RunConfig, sizes: Sizes) -> int:
    """The largest prefill piece, or the logits of all nodes of all rows."""
    policy, rows, ranks = sizes.policy, config.engine.rows, config.cluster.tensor_parallel
    nodes = rows * (max(config.spec.verifies) if config.spec.drafters else 1)
    widest = (3 * policy.mlp + policy.qkv_width) // ranks + 4 * policy.hidden
    logits = nodes * ceil(policy.vocab / ranks) * LOGIT_BYTES
    return max(config.engine.prefill_tokens, nodes) * widest * sizes.itemsize + logits


def activation_bytes(policy: ModelConfig, size: int) -> int:
    """What one layer keeps of a token for its backward pass, in training on a GPU in bfloat16.

    Inputs of both norms and both normed rows; queries, keys and values; what attention gives; gate, up and their
    product; and float32 sums of norms and softmax.
    """
    attended = policy.heads * policy.head_dim
    normed = (policy.heads + policy.kv_heads) * policy.head_dim if policy.qk_norm else 0
    numbers = 4 * policy.hidden + policy.qkv_width + attended + normed + 3 * policy.mlp
    fused = 1.0 if size == _HALF else _UNFUSED
    return int(fused * numbers * size) + 4 * (policy.heads + 2)


def _update_bytes(config: RunConfig, sizes: Sizes, row: int, device: int) -> int:
    """The larger of the beginning of a backward pass, with all activations, and its end, with all gradients."""
    policy, size, wide, shards = sizes.policy, sizes.itemsize, _wide(sizes.itemsize), _shards(config)
    layer, D = activation_bytes(policy, size), policy.hidden
    if config.train.checkpoint_activations == "always":
        activations = row * (policy.layers * D * size + layer)
    else:
        activations = row * policy.layers * layer
    activations += row * 4 * D * size  # input and output of the final norm, rows of answers and their gradient
    logits = min(device // _LOGITS_SHARE, row * policy.vocab * LOGIT_BYTES)
    chunk = logits + logits * size // LOGIT_BYTES
    backward = row * (3 * policy.mlp + 2 * D) * size  # gradients inside a layer
    if config.train.lora_rank:
        largest = 2 * policy.mlp * D  # whose gradient is projected on the adapters' in float32
        sums = adapter_weights(policy, config.train.lora_rank) * wide
        return sums + activations + max(chunk, backward + largest * (size + wide))
    head = policy.vocab * D
    sums = ceil(_weights(policy) / shards) * wide
    begins = activations + max(chunk + head * wide, head * (2 * wide + size), backward + head * size)
    ends = ceil(_weights(policy) / shards) * (size if wide != size else 0)
    return sums + max(begins, ends) + (_gathered_bytes(policy, size) if shards > 1 else 0)


def _gathered_bytes(policy: ModelConfig, size: int) -> int:
    """Of a policy in shards: whole embedding and head, blocks in use, and a block's gradient while it is summed."""
    blocks = block_weights(policy) * (_GATHERED_BLOCKS * size + size + _wide(size))
    return outer_weights(policy) * (size + _wide(size)) + blocks


def _drafting_bytes(config: RunConfig, sizes: Sizes, drafter: DrafterSizes, device: int) -> int:
    """A micro-step: the policy's states, the drafter's activations at every unrolled step, logits, and gradients."""
    tokens, size, wide = config.drafting.tokens, sizes.itemsize, _wide(sizes.itemsize)
    unrolled = activation_bytes(drafter.layer, size) * config.draft.unroll
    states = 4 * sizes.policy.hidden * size  # three tapped layers, and the last
    logits = min(device // _LOGITS_SHARE, tokens * (config.draft.unroll + 1) * drafter.vocab * LOGIT_BYTES)
    gradients = drafter.weights * (wide + (size if wide != size else 0))
    return tokens * (unrolled + states) + 2 * logits + gradients


# ---- in words


def table(plan: MemoryPlan) -> list[tuple[str, int]]:
    """What the largest phase needs: what is kept, the largest first; the phase; the reserve; keys and values, unless
    their memory is given back."""
    rows = [(part.name, part.bytes) for part in sorted(plan.kept, key=lambda part: -part.bytes)]
    rows.append((plan.peak.name, plan.peak.bytes))
    rows.append(("reserve for graphs and the allocator", plan.reserve_bytes))
    return rows if plan.peak.asleep else [*rows, _keys_and_values(plan)]


def _keys_and_values(plan: MemoryPlan) -> tuple[str, int]:
    given = " (engine.kv_gib)" if plan.given_kv_bytes else ""
    kv = plan.kv_bytes if plan.device_bytes and plan.fits else plan.given_kv_bytes or plan.least_kv_bytes
    return f"keys and values{given}" if kv != plan.least_kv_bytes else "keys and values, at least", kv


def table_lines(plan: MemoryPlan) -> list[str]:
    rows = [*table(plan)]
    rows.append(("together", sum(size for _, size in rows)))
    if plan.device_bytes:
        rows.append(("the GPU" if plan.fits else "the GPU, which is too small", plan.device_bytes))
    width = max(len(name) for name, _ in rows)
    others = [(part.name, part.bytes) for part in plan.phases if part != plan.peak]
    others += [_keys_and_values(plan)] if plan.peak.asleep else []
    apart = ", ".join(f"{name} {gib(size)}" for name, size in others)
    lines = [f"{name:<{width}}  {gib(size):>10}" for name, size in rows]
    lines += [f"Not at the same time as the largest phase: {apart}"] if apart else []
    return (
        [*lines, "The engine sleeps during updates: its keys and values give their memory back"]
        if plan.sleeps
        else lines
    )


def remedy_lines(config: RunConfig, sizes: Sizes) -> list[str]:
    """What takes less, by how much it needs then."""
    plan = memory_plan(config, sizes)
    found = [(flags, other) for flags, other in remedies(config, sizes) if other.needed_bytes < plan.needed_bytes]
    found.sort(key=lambda each: each[1].needed_bytes)
    fitting = {True: "fits", False: "does not fit"}
    return [
        f"{flags}: needs {gib(other.needed_bytes)}" + (f", {fitting[other.fits]}" if plan.device_bytes else "")
        for flags, other in found
    ]


def refusal(config: RunConfig, sizes: Sizes) -> str:
    """Why a run cannot fit, in one line."""
    plan = memory_plan(config, sizes)
    parts = ", ".join(f"{name} {gib(size)}" for name, size in table(plan))
    remedies = [line for line in remedy_lines(config, sizes) if line.endswith(", fits")]
    cure = "; or ".join(remedies[::-1][:3]) if remedies else "take a smaller policy, a larger GPU or more workers"
    return (
        f"the run needs {gib(plan.needed_bytes)} of GPU memory and has {gib(plan.device_bytes)}: {parts}. "
        f"What to change: {cure} (`tlt plan` has the table)"
    )


def gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"
