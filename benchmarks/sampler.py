"""Times the fused sampler on this GPU, after checking that it draws the CPU's tokens on fresh random logits.

    python benchmarks/sampler.py [--json PATH] [--commit HASH] [--sweep]

Each time is the median over replays of one CUDA graph that holds many calls, every call on other logits, so that small
batches too come from memory rather than from the L2 cache where enough fit. `torch` is what a plain engine would do:
softmax, exponential noise, argmax; no log-probabilities, no keys, no filters.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt.bench.record import new_record, write_record
from tlt.engine.sampler import Sampled, SamplingRows, sample
from tlt.kernels.sampling import triton as sampling_triton
from tlt.types import Key, SamplingParams

# R rows, V vocabulary

ROWS = (1, 8, 64, 256)
VOCABULARIES = (49_152, 151_936)
DTYPES = (torch.bfloat16, torch.float32)
SETTINGS = {
    "T=1": SamplingParams(),
    "T=0.6": SamplingParams(temperature=0.6),
    "T=0": SamplingParams(temperature=0.0),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.95": SamplingParams(top_p=0.95),
    "k 50, p 0.95": SamplingParams(temperature=0.6, top_k=50, top_p=0.95),
}
BYTES_TO_ROTATE = 160 << 20  # three times the L2 cache of an H200


@dataclass(frozen=True)
class SamplerTiming:
    """One line of the table."""

    setting: str
    rows: int
    vocab_size: int
    dtype: str
    median_us: float
    lowest_us: float
    torch_us: float | None
    rotated_mib: float  # logits read before the same ones come round again


def rows_for(params: SamplingParams, count: int, device: str) -> SamplingRows:
    keys = [Key(seed=1, request=k) for k in range(count)]
    return SamplingRows.of(keys, [100 + k for k in range(count)], [params] * count, device)


def logits_like_a_model(rows: int, vocab_size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A bulk of improbable tokens and a few hundred probable ones."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    logits_RV = 2.5 * torch.randn(rows, vocab_size, device="cuda", generator=generator)
    logits_RV[:, :: vocab_size // 300] += 9.0
    return logits_RV.to(dtype)


def check_against_cpu() -> None:
    seed = time.time_ns() % (1 << 31)
    for vocab_size in VOCABULARIES:
        for dtype in DTYPES:
            for name, params in SETTINGS.items():
                logits_RV = logits_like_a_model(8, vocab_size, dtype, seed)
                fused = sample(logits_RV, rows_for(params, 8, "cuda"))
                expected = sample(logits_RV.cpu(), rows_for(params, 8, "cpu"))
                if not torch.equal(fused.token_R.cpu(), expected.token_R):
                    sys.exit(
                        f"{name}, V {vocab_size}, {dtype}, logits seed {seed}: the GPU drew {fused.token_R.tolist()}, "
                        f"the CPU {expected.token_R.tolist()}; the two must be equal, so no time is reported"
                    )
                torch.testing.assert_close(fused.logprob_R.cpu(), expected.logprob_R, atol=1e-4, rtol=1e-5)
                torch.testing.assert_close(
                    fused.policy_logprob_R.cpu(), expected.policy_logprob_R, atol=1e-4, rtol=1e-5
                )
    print(f"tokens equal the CPU's (logits seed {seed})")


def time_calls(call: Callable[[Tensor], object], batches: list[Tensor], replays: int = 30) -> list[float]:
    """µs per call, for each replay of a graph that makes one call per batch."""
    for batch in batches[:3]:
        call(batch)  # compiles, warms
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch in batches:
            call(batch)
    times = []
    for replay in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 3:
            times.append(start.elapsed_time(end) * 1000 / len(batches))
    return times


def plain_torch(logits_RV: Tensor) -> Tensor:
    probs_RV = logits_RV.float().softmax(-1)
    return (probs_RV / torch.empty_like(probs_RV).exponential_()).argmax(-1)


def batches_for(rows: int, vocab_size: int, dtype: torch.dtype, most: int) -> list[Tensor]:
    bytes_each = rows * vocab_size * dtype.itemsize
    count = max(4, min(most, -(-BYTES_TO_ROTATE // bytes_each)))
    return [logits_like_a_model(rows, vocab_size, dtype, seed) for seed in range(count)]


def measure(setting: str, rows: int, vocab_size: int, dtype: torch.dtype) -> SamplerTiming:
    params = SETTINGS[setting]
    keyed_rows, out = rows_for(params, rows, "cuda"), Sampled.empty(rows, "cuda")
    batches = batches_for(rows, vocab_size, dtype, most=32 if keyed_rows.filtered else 256)
    times = time_calls(lambda logits_RV: sample(logits_RV, keyed_rows, out), batches)
    torch_us = statistics.median(time_calls(plain_torch, batches[:32], 10)) if setting == "T=1" else None
    rotated_mib = len(batches) * batches[0].nbytes / (1 << 20)
    return SamplerTiming(
        setting, rows, vocab_size, str(dtype)[6:], statistics.median(times), min(times), torch_us, round(rotated_mib, 1)
    )


def with_shape(counters: int, tiles: int, warps: int, rows: SamplingRows, out: Sampled) -> Callable[[Tensor], None]:
    def call(logits_RV: Tensor) -> None:
        sampling_triton.sample(
            logits_RV,
            rows.keys,
            rows.settings,
            out.parts,
            filtered=False,
            counters=counters,
            tiles=tiles,
            warps=warps,
        )

    return call


def sweep() -> None:
    """Which tile size, tiles per program and warps are best; for choosing the constants in sampling_triton."""
    shapes = list(itertools.product((128, 256, 512, 1024), (1, 2, 4, 8, 16), (1, 2, 4, 8)))
    for rows, vocab_size in ((1, 151_936), (64, 151_936), (256, 49_152)):
        keyed_rows, out = rows_for(SamplingParams(), rows, "cuda"), Sampled.empty(rows, "cuda")
        batches = batches_for(rows, vocab_size, torch.bfloat16, most=64)
        results = []
        for counters, tiles, warps in shapes:
            if 32 * warps <= counters <= 512 * warps:
                call = with_shape(counters, tiles, warps, keyed_rows, out)
                results.append((statistics.median(time_calls(call, batches, 10)), counters, tiles, warps))
        print(f"\nrows {rows}, V {vocab_size}, bfloat16: µs, counters, tiles per program, warps")
        for us, counters, tiles, warps in sorted(results)[:8]:
            print(f"{us:8.1f}  {counters:5d} {tiles:3d} {warps:3d}")


def line(t: SamplerTiming) -> str:
    beside = f"{t.torch_us:8.1f}" if t.torch_us is not None else ""
    times = f"{t.median_us:8.1f} {t.lowest_us:8.1f} {beside}"
    return f"{t.setting:<13} {t.rows:>4} {t.vocab_size:>7} {t.dtype:<9} {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the table here as well")
    parser.add_argument("--commit", help="what to record as the commit; otherwise git is asked")
    parser.add_argument("--sweep", action="store_true", help="time other tile sizes instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device found; this benchmark times the GPU sampler and needs one")
    check_against_cpu()
    if arguments.sweep:
        sweep()
        return
    hardware = torch.cuda.get_device_name()
    print(f"{hardware}, torch {torch.__version__}, triton {triton.__version__}; µs per call")
    print(f"{'setting':<13} {'rows':>4} {'V':>7} {'dtype':<9} {'median':>8} {'lowest':>8} {'torch':>8}")
    timings = []
    for setting, rows, vocab_size, dtype in itertools.product(SETTINGS, ROWS, VOCABULARIES, DTYPES):
        timing = measure(setting, rows, vocab_size, dtype)
        timings.append(timing)
        print(line(timing), flush=True)
    if arguments.json:
        rows = [asdict(timing) for timing in timings]
        record = new_record("cuda", arguments.commit, benchmark="sampler", tokens_equal_cpu=True, timings=rows)
        write_record(arguments.json, record)


if __name__ == "__main__":
    main()
