"""`tlt plan`: the memory that a recipe's run needs on each GPU, and the refusal of a run that cannot fit.

Always holds: configs are read, weights never. A run on a CPU is planned like one on a GPU of unknown size, and is not
refused.
"""

from dataclasses import replace

import torch

from tlt.checkpoint_size import drafter_config
from tlt.config import RunConfig
from tlt.errors import ConfigError
from tlt.memory_plan import GIB, DrafterSizes, MemoryPlan, Sizes, gib, memory_plan, refusal, remedy_lines, table_lines
from tlt.model.parallel import check_divisible
from tlt.model.weights import weights_count
from tlt.policy import config_of, device_of, dtype_of
from tlt.spec import eagle_files


def plan(config: RunConfig, gpu_gib: float = 0.0) -> tuple[list[str], str]:
    """The plan as lines, and the refusal of a run that cannot fit, or "". `gpu_gib`: of a GPU that need not be here."""
    if gpu_gib and config.model.dtype == "auto":  # it would be that of this machine
        config = replace(config, model=replace(config.model, dtype="bfloat16"))
    sizes = sizes_of(config, int(gpu_gib * GIB))
    found = memory_plan(config, sizes)
    workers = config.cluster.workers
    each = f"each of {workers} workers" if workers > 1 else "one worker"
    lines = [f"{config.model.path}, {weights_count(sizes.policy):,} weights; {each}:", *table_lines(found)]
    remedies = remedy_lines(config, sizes)
    lines += ["What takes less:", *(f"  {line}" for line in remedies)] if remedies else []
    return lines, "" if found.fits else refusal(config, sizes)


def sizes_of(config: RunConfig, device_bytes: int = 0) -> Sizes:
    """`device_bytes`: of a GPU; 0: of the configured one, if there is one here."""
    policy = config_of(config.model)
    check_divisible(policy, config.cluster.tensor_parallel)
    device = device_of(config.model.device)
    if not device_bytes and device.type == "cuda":
        device_bytes = torch.cuda.get_device_properties(device).total_memory
    drafter = None
    if config.spec.learned:
        eagle = drafter_config(config, policy)
        places = eagle_files.places(eagle, "flat").values()
        count = sum(torch.Size(place.shape).numel() for place in places)
        drafter = DrafterSizes(count, eagle.draft_vocab, eagle.layer)
    return Sizes(policy, dtype_of(config.model).itemsize, device_bytes, drafter)


def plan_or_refuse(config: RunConfig) -> MemoryPlan:
    """The plan of a run on this machine. Raises ConfigError if it cannot fit."""
    sizes = sizes_of(config)
    found = memory_plan(config, sizes)
    if not found.fits:
        raise ConfigError(refusal(config, sizes))
    return found


def settled(config: RunConfig) -> RunConfig:
    """The configuration with `engine.sleep` and `train.checkpoint_activations` decided: by the plan on a GPU, and
    "never" on a CPU. Raises ConfigError if the run cannot fit."""
    sleep, checkpointed = config.engine.sleep, config.train.checkpoint_activations
    if device_of(config.model.device).type == "cuda":
        found = plan_or_refuse(config)
        sleep = "always" if found.sleeps else "never"
        checkpointed = "always" if found.recomputes else "never"
    engine = replace(config.engine, sleep="never" if sleep == "auto" else sleep)
    train = replace(config.train, checkpoint_activations="never" if checkpointed == "auto" else checkpointed)
    return replace(config, engine=engine, train=train)


def kv_bytes_beside_training(plan: MemoryPlan, free: int) -> int:
    """For the cache of an engine that is built now, with so many bytes free. Raises ConfigError if a request of the
    greatest length does not fit into it: others use the GPU, or more is allocated than planned."""
    left = min(free - plan.later_bytes, plan.kv_bytes)
    if left < plan.least_kv_bytes:
        raise ConfigError(
            f"{gib(free)} are free on the GPU, and the run needs {gib(plan.later_bytes)} more and "
            f"{gib(plan.least_kv_bytes)} for the keys and values of one request; see what else uses the GPU, or set "
            "engine.kv_gib"
        )
    return left
