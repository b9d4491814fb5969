"""How many kernels an engine has, and how long they take to compile: here, for a Hopper GPU that need not be there.

    python benchmarks/compiling.py [--shape 7B --rows 256 --threads 1,2] [--json FILE]

Goes through what an engine with a learned drafter goes through when it is built, with three layers of the shape on the
CPU and a driver that knows nothing but the name of the GPU; kernels are compiled, by so many threads into an empty
cache each time, and never launched. What Triton 3.6 has a C compiler do besides is left out. Then goes through prompts
in many numbers and lengths, and every shape at every batch size: what is compiled there, a rollout would have waited
for. Prints and writes seconds, and how often each kernel was compiled.
"""

import argparse
import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tlt.bench.record import new_record, write_record
from tlt.config import NEW, RunConfig
from tlt.engine import build, runner
from tlt.engine.chunks import Chunk
from tlt.engine.graphs import buckets
from tlt.kernels.attention import triton as attention_triton
from tlt.kernels.compiling_triton import compile_ahead
from tlt.model.config import ModelConfig
from tlt.model.transformer import Transformer
from tlt.model.widen import SHAPES
from tlt.spec.backlog import MEAN_SIZES, PASS_SIZES
from tlt.spec.candidates import MOST_ROWS
from tlt.spec.drafter import build_drafters

_TARGET = GPUTarget("cuda", 90, 32)
_PROCESSORS = 132
_MOST_TOKENS = 2048  # of a pass that anybody would choose
_PROMPTS, _PROMPT_TOKENS = (1, 2, 3, 4, 6, 8, 12, 20, 32, 40, 64, 128), (20, 60, 100, 180, 300, 600, 2000)
_READ_AT_ONCE = 8192  # tokens
_POLICY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "num_hidden_layers": 3,  # a drafter reads the states of three; all layers launch the same kernels
    "head_dim": 64,
    "max_position_embeddings": 8192,
}


class NoDriver:
    """Of a GPU that is not there: what is loaded onto it is loaded at once, and cannot be launched."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda *binary: (0, 0, 0, 0, 1024),
    )

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        return None

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return _TARGET


class NoProducts(TorchFunctionMode):
    """Large products are the vendor's library's, and are not computed here."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            return args[0].new_zeros(*args[0].shape[:-1], len(args[1]))
        if function in (torch.mm, torch.addmm) and "out" in (kwargs or {}):
            return kwargs["out"]
        if function is torch.addmm:
            return args[0].new_zeros(len(args[1]), args[2].shape[1])
        return function(*args, **(kwargs or {}))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Every tensor says that it lies on one, and its kernels are Triton's."""
    properties = SimpleNamespace(multi_processor_count=_PROCESSORS)
    with ExitStack() as patches:
        for target, name, value in (
            (torch.Tensor, "is_cuda", property(lambda tensor: True)),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (attention_triton, "multiprocessors_of", lambda device: _PROCESSORS),
            (runner.Runner, "ready_to_decode", lambda one, filtered: None),  # there is nothing to capture it
        ):
            patches.enter_context(patch.object(target, name, value))
        patches.enter_context(patch.dict(runner._DEAREST, {"cpu": runner._DEAREST["cuda"]}))
        yield


def policy_of(shape: str) -> Any:
    size = SHAPES[shape]
    source = {
        **_POLICY,
        "hidden_size": size["hidden"],
        "intermediate_size": size["mlp"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
    }
    model = Transformer(ModelConfig.from_hf(source), dtype=torch.bfloat16)
    return SimpleNamespace(model=model, tokenizer=SimpleNamespace(eos_ids=frozenset([0]), eos_id=0))


@torch.no_grad()
def go_through(engine: Any, learned: Any, config: RunConfig) -> None:
    """All that rollouts may come to use: prompts in many numbers and lengths, every shape at every size, what is taken
    in before it, and a look at roots."""
    for count, tokens in product(_PROMPTS, _PROMPT_TOKENS):
        if count * tokens <= _READ_AT_ONCE:
            pages = (0,) * -(-tokens // config.engine.page_size)
            engine._runner._read([Chunk((0,) * tokens, 0, pages, ())] * count)
    shapes = [shape for shape in build.shapes_of(config.spec) if not shape.off]
    sizes = buckets(config.engine.rows)
    roles = {(shape.verify, shape.share, engine._walk(shape)): shape for shape in shapes}
    for (role, shape), rows in product(roles.items(), sizes):
        if shape.tokens(rows) <= _MOST_TOKENS:
            engine._runner._verification(shape, role[-1], False)[1](rows)
    for shape, rows in product(shapes, sizes):
        if rows * shape.width > _MOST_TOKENS:
            continue
        builder = learned._builder(shape.width)
        for part in (*learned._levels(rows, builder), learned._pruning(rows, builder, shape)):
            part.work(rows)
    for most, room, rows in product(PASS_SIZES, MEAN_SIZES, sizes):
        learned._extend_segment(rows, most, room).work(rows)
    roots_Rv, vocab = learned._builder(1).root_logits_Rv, learned.drafter.token_of_draft_v
    learned._beta_probe.run_idle(roots_Rv, learned._draws(MOST_ROWS), learned._memory.ready_R, vocab)


def measured(policy: Any, config: RunConfig, threads: int) -> dict[str, Any]:
    """With nothing compiled before, in memory or on disk; and, once more with all of it, what going through takes."""
    kernels: Counter[str] = Counter()

    def compiled(*, fn: Any, **told: Any) -> None:
        kernels[fn.name] += 1

    for kernel in {kernel for kernel in gc.get_objects() if type(kernel) is triton.JITFunction}:
        kernel.device_caches.clear()
    with (
        tempfile.TemporaryDirectory() as cache,
        patch.dict(os.environ, {"TRITON_CACHE_DIR": cache}),
        patch.object(os, "sched_getaffinity", lambda process: range(threads)),
        patch.object(triton.knobs.runtime, "jit_post_compile_hook", compiled),
        as_on_a_gpu(),
        NoProducts(),
    ):
        (learned,) = build_drafters(policy, config)
        shape_policy = build.shape_policy_of(config.spec, config.engine.rows, on_gpu=True)
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            engine: Any = build.speculating_engine(policy, config, shape_policy, [learned])
            seconds.append(time.perf_counter() - started)
        before = kernels.copy()
        compile_ahead(partial(go_through, engine, learned, config))
    return {
        "left": dict(kernels - before),
        "threads": threads,
        "seconds": seconds[0],
        "none_left_s": seconds[1],
        "kernels": before.total(),
        "by_kernel": dict(before),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7B")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    driver.set_active(NoDriver())
    config = RunConfig()
    config = replace(
        config,
        engine=replace(config.engine, kv_gib=0.5, rows=options.rows),
        spec=replace(config.spec, drafter="eagle", path=NEW),
        draft=replace(config.draft, vocab=16384, mlp=0.5),
    )
    policy, found = policy_of(options.shape), []
    for threads in map(int, options.threads.split(",")):
        found.append(measured(policy, config, threads))
        words = "{threads} threads: {kernels} kernels in {seconds:.1f} s, none left in {none_left_s:.1f} s"
        print(words.format(**found[-1]) + f"; rollouts wait for {found[-1]['left'] or 'none'}", flush=True)
    if options.json:
        about = {"target": str(_TARGET), "shape": options.shape, "rows": options.rows}
        write_record(options.json, new_record("cpu", options.commit, **about, runs=found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
