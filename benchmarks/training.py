"""How fast policy and drafter learn, what packing gains over padding on answers with a long tail, and what it costs to
save the drafter while it learns.

    python benchmarks/training.py [--model DIR] [--shape 1.5B] [--quick] [--parts supervised,policy,drafter,saving]
        [--packed] [--out FILE] [--profile]
    python benchmarks/training.py --model DIR --shape 1.5B --parts policy,saving,drafter --answers 64 --steps 1

Answers of random tokens, lognormal lengths cut off at `--longest`: speed depends on lengths alone. Tokens per second
are those of prompts and answers: padding is no work done. Each part takes the same steps on the same answers packed,
padded to the longest of its pass, and padded to the longest of all (`--packed`: packed only). Where a trainer takes a
stream of batches, that is measured too, from examples to results, as real runs go. `--profile` shows where a packed
step's time goes. `saving` writes a checkpoint of the drafter in the middle of its training, forced to disk in any case:
all that training holds at once, what is the drafter's own at once, and that in the background, as `tlt train` does.
What it costs is the time by which the training around it gets longer. `--shape` widens the policy first.
Results are printed and, with --out or in the directory $OUT, written as JSON with the machine and the versions.
"""

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tlt.bench.lab import check_shape, widened
from tlt.bench.record import write_record
from tlt.config import DraftingSettings, DraftSettings, GrpoSettings, ModelSettings, TrainSettings, WarmupSettings
from tlt.drafting.saving import contents_of, write_contents
from tlt.drafting.trainer import OnlineDrafter
from tlt.machine import GIB, describe, wait_for
from tlt.model.transformer import Transformer
from tlt.policy import open_policy
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.eagle_files import Origin
from tlt.train import policy as policy_training
from tlt.train.checkpoint import Checkpoints, save_state
from tlt.train.drafter import DrafterTrainer, policy_states, stream_states
from tlt.train.host_copy import HostCopy
from tlt.train.packing import Example, PackedRow, pack
from tlt.train.policy import PolicyTrainer
from tlt.train.supervised import SupervisedTrainer
from tlt.types import Completion, Experience, Key, Prompt, Rollout, Timing

Layout = Callable[[Sequence[Example], int], list[PackedRow]]
"""Examples and a row's tokens → rows."""


@dataclass(frozen=True)
class TrainingScale:
    answers: int  # of one step
    prompt: int  # tokens
    median: int  # tokens of an answer
    spread: float  # standard deviation of the logarithm of its length
    longest: int  # tokens, cut off there
    row_tokens: int  # of one pass
    steps: int  # timed, after one that is not


QUICK = TrainingScale(answers=24, prompt=8, median=16, spread=0.9, longest=160, row_tokens=512, steps=2)
FULL = TrainingScale(answers=256, prompt=64, median=256, spread=1.0, longest=4096, row_tokens=32768, steps=3)


@dataclass(frozen=True)
class Record:
    part: str
    layout: str  # packed, padded to its pass, padded to the batch
    tokens: int  # of prompts and answers, per step
    computed: int  # tokens per step with what padding adds
    seconds: float  # per step, the median
    tokens_per_s: float
    memory_gib: float  # most the device held, a spare copy of the policy included; 0 on a CPU


@dataclass(frozen=True)
class Saved:
    part: str
    way: str
    mib: float  # written
    held_up_s: float  # until training goes on
    cost_s: float  # by which save and training took longer than training alone
    on_disk_s: float  # until the checkpoint is there; beside training, at most


# ---- layouts


def padded_to_pass(examples: Sequence[Example], budget: int) -> list[PackedRow]:
    """As many examples in a pass as fit when all are as long as its longest; longest first, so that equals meet."""
    order = sorted(range(len(examples)), key=lambda i: -len(examples[i].tokens))
    rows = []
    while order:
        longest = len(examples[order[0]].tokens)
        count = max(1, budget // longest)
        rows.append(_rectangle(examples, order[:count], longest))
        order = order[count:]
    return rows


def padded_to_batch(examples: Sequence[Example], budget: int) -> list[PackedRow]:
    """Every example as long as the longest of all."""
    longest = max(len(example.tokens) for example in examples)
    count = max(1, budget // longest)
    indices = range(len(examples))
    return [_rectangle(examples, indices[start : start + count], longest) for start in range(0, len(examples), count)]


LAYOUTS: dict[str, Layout] = {
    "packed": pack,
    "padded to its pass, sorted": padded_to_pass,
    "padded to the batch": padded_to_batch,
}


def _rectangle(examples: Sequence[Example], members: Sequence[int], length: int) -> PackedRow:
    chosen = [examples[index] for index in members]
    tokens = [token for e in chosen for token in (*e.tokens, *[0] * (length - len(e.tokens)))]
    mask = [e.answer_start <= place < len(e.tokens) for e in chosen for place in range(length)]
    return PackedRow(
        tokens_T=torch.tensor(tokens),
        positions_T=torch.arange(length).repeat(len(chosen)),
        mask_T=torch.tensor(mask),
        starts=tuple(range(0, len(tokens) + 1, length)),
        members=tuple(members),
    )


def draw_examples(scale: TrainingScale, vocab: int, seed: int = 0) -> list[Example]:
    source = random.Random(seed)
    examples = []
    for _ in range(scale.answers):
        answer = min(scale.longest, max(2, round(scale.median * source.lognormvariate(0.0, scale.spread))))
        tokens = tuple(source.randrange(vocab) for _ in range(scale.prompt + answer))
        examples.append(Example(tokens, answer_start=scale.prompt))
    return examples


# ---- parts


@dataclass(frozen=True)
class TrainingBench:
    model: Transformer
    scale: TrainingScale
    profile: bool
    layouts: dict[str, Layout]
    vocab: int  # of the drafter

    @property
    def device(self) -> torch.device:
        return self.model.embed.device

    def measure(self, part: str, layout: str, rows: Sequence[PackedRow], step: Callable[[], object]) -> Record:
        tokens = sum(len(row.tokens_T) for row in rows)
        useful = sum(int(row.mask_T.sum()) + len(row.members) * self.scale.prompt for row in rows)
        step()  # compiles, allocates
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = []
        for _ in range(self.scale.steps):
            wait_for(self.device)
            started = time.perf_counter()
            step()
            wait_for(self.device)
            seconds.append(time.perf_counter() - started)
        if self.profile and layout == "packed":
            show_profile(part, step, self.device)
        memory = torch.cuda.max_memory_allocated(self.device) / GIB if self.device.type == "cuda" else 0.0
        middle = median(seconds)
        return Record(part, layout, useful, tokens, round(middle, 5), round(useful / middle), round(memory, 2))


def supervised(stage: TrainingBench) -> Iterator[Record]:
    examples = draw_examples(stage.scale, stage.model.config.vocab)
    settings = WarmupSettings(steps=1000, learning_rate=1e-6, warmup_steps=0)
    with kept_weights(stage.model):
        for name, layout in stage.layouts.items():
            trainer = SupervisedTrainer(stage.model, settings)
            rows = layout(examples, stage.scale.row_tokens)
            yield stage.measure("supervised", name, rows, lambda trainer=trainer, rows=rows: trainer.step(rows))
            clear(stage.device)
        trainer = SupervisedTrainer(stage.model, settings)
        rows = pack(examples, stage.scale.row_tokens)

        def stream() -> None:
            """One row a step, each packed from its examples when its turn has come."""
            batches = ([examples[index] for index in row.members] for row in rows)
            list(trainer.steps(pack(batch, stage.scale.row_tokens) for batch in batches))

        yield stage.measure("supervised, a row a step", "packed", rows, stream)


POLICY_VARIANTS: dict[str, dict[str, Any]] = {
    "policy": {},
    "policy, checkpointed activations": {"checkpoint_activations": "always"},
    "policy, LoRA of rank 16": {"lora_rank": 16},
}


def policy(stage: TrainingBench) -> Iterator[Record]:
    examples = draw_examples(stage.scale, stage.model.config.vocab)
    experiences = [as_experience(index, example) for index, example in enumerate(examples)]
    for part, knobs in POLICY_VARIANTS.items():
        train = TrainSettings(learning_rate=1e-6, row_tokens=stage.scale.row_tokens, **knobs)
        for name, layout in stage.layouts.items():
            if knobs and name != "packed":
                continue
            with kept_weights(stage.model), patch.object(policy_training, "pack", layout):
                trainer = PolicyTrainer(stage.model, train, GrpoSettings(mismatch_limit=0))
                rows = layout(examples, stage.scale.row_tokens)
                yield stage.measure(part, name, rows, lambda trainer=trainer: trainer.update(experiences))
                del trainer
            clear(stage.device)
    stage.model.checkpoint_activations = False


def drafter(stage: TrainingBench) -> Iterator[Record]:
    """Micro-steps on states that are there already, the policy's own pass, and both in a stream."""
    examples = draw_examples(stage.scale, stage.model.config.vocab)
    settings = DraftSettings(single_steps=0)
    shape = EagleConfig.of_policy(stage.model.config, window=settings.window, draft_vocab=stage.vocab)
    for name, layout in stage.layouts.items():
        eagle = Eagle(shape, dtype=stage.model.embed.dtype, device=stage.device)
        eagle.init_weights(0, torch.arange(shape.draft_vocab) if shape.reduced else None)
        trainer = DrafterTrainer(eagle, stage.model.head_weight, stage.model.embed, settings, endless=True)
        rows = layout(examples, stage.scale.row_tokens)
        if name == "packed":
            yield stage.measure("states", name, rows, lambda rows=rows: [states(stage, shape, row) for row in rows])
        batches = [states(stage, shape, row) for row in rows]

        def step(trainer: DrafterTrainer = trainer, batches: Sequence[Any] = batches) -> None:
            for batch in batches:
                trainer.micro_step(batch)

        yield stage.measure(f"drafter, {settings.unroll} steps unrolled", name, rows, step)
        if name == "packed":

            def stream(trainer: DrafterTrainer = trainer, rows: Sequence[PackedRow] = rows) -> None:
                list(trainer.micro_steps(stream_states(stage.model, rows, shape.taps)))

            yield stage.measure("states and drafter", name, rows, stream)
        del trainer, eagle, batches, step
        clear(stage.device)


def states(stage: TrainingBench, shape: EagleConfig, row: PackedRow) -> Any:
    return policy_states(stage.model, row, shape.taps)


# ---- saving

FULL_SYNC, OWN_SYNC, OWN_ASYNC = "everything, at once", "the drafter's own, at once", "the drafter's own, beside"
_SAVES = 3  # of each way; the first finds no memory to copy to, and is not counted
_BESIDE_S = {"cuda": 2.0, "cpu": 0.2}  # seconds of training around a save, about


def saving(stage: TrainingBench) -> Iterator[Saved]:
    """Three ways to save the same drafter and trainer between two micro-steps."""
    settings = DraftSettings(single_steps=0, vocab=stage.vocab)
    shape = EagleConfig.of_policy(stage.model.config, window=settings.window, draft_vocab=stage.vocab)
    eagle = Eagle(shape, dtype=stage.model.embed.dtype, device=stage.device)
    eagle.init_weights(0, torch.arange(shape.draft_vocab) if shape.reduced else None)
    drafter = OnlineDrafter(stage.model, eagle, settings, DraftingSettings())
    examples = draw_examples(stage.scale, stage.model.config.vocab)
    row = max(pack(examples, max(4096, stage.scale.longest + stage.scale.prompt)), key=lambda row: len(row.tokens_T))
    batch = states(stage, shape, row)

    def train(micro_steps: int) -> float:
        wait_for(stage.device)
        started = time.perf_counter()
        for _ in range(micro_steps):
            drafter._trainer.micro_step(batch)
        wait_for(stage.device)
        return time.perf_counter() - started

    train(2)
    beside = partial(train, max(2, round(_BESIDE_S[stage.device.type] / (train(2) / 2))))
    alone_s = median(beside() for _ in range(3))
    with TemporaryDirectory() as scratch:
        for way, save in ways_to_save(stage, drafter, Path(scratch)).items():
            spans = [_saved(save, beside) for _ in range(_SAVES)][1:]
            held_up_s, cost_s, on_disk_s = (median(times) for times in zip(*spans, strict=True))
            newest = max(Path(scratch).glob("*/step_*"), key=lambda path: path.stat().st_mtime_ns)
            mib = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()) / 2**20
            yield Saved("saving", way, *(round(n, 4) for n in (mib, held_up_s, cost_s - alone_s, on_disk_s)))


Save = Callable[[], Callable[[], object] | None]
"""Saves; gives back a call that waits until it is on disk, if it is not."""


def ways_to_save(stage: TrainingBench, drafter: OnlineDrafter, scratch: Path) -> dict[str, Save]:
    origin = Origin("benchmark", ())
    steps = count(1)
    host, thread = HostCopy(), ThreadPoolExecutor(1)
    frozen = {"embed": stage.model.embed.detach(), "head": stage.model.head_weight.detach().clone()}

    def at_once(directory: str, more: dict[str, Any]) -> None:
        def fill(path: Path) -> None:
            write_contents(contents_of(drafter, origin, False), path)
            if more:
                save_state(more, path, "frozen")

        Checkpoints(scratch / directory, keep=1).write(next(steps), fill)

    def beside() -> Callable[[], object]:
        copied = host.take(contents_of(drafter, origin, False))
        checkpoints = Checkpoints(scratch / "beside", keep=1)
        return thread.submit(checkpoints.write, next(steps), partial(write_contents, copied)).result

    return {FULL_SYNC: partial(at_once, "full", frozen), OWN_SYNC: partial(at_once, "own", {}), OWN_ASYNC: beside}


def _saved(save: Save, train: Callable[[], float]) -> tuple[float, float, float]:
    """Seconds until training goes on, of save and training together, and until the checkpoint is there."""
    started = time.perf_counter()
    wait = save()
    held_up_s = time.perf_counter() - started
    train()
    together_s = time.perf_counter() - started
    if wait is None:
        return held_up_s, together_s, held_up_s
    wait()
    return held_up_s, together_s, time.perf_counter() - started


PARTS: dict[str, Callable[[TrainingBench], Iterator[Record | Saved]]] = {
    "supervised": supervised,
    "policy": policy,
    "drafter": drafter,
    "saving": saving,
}


def as_experience(index: int, example: Example) -> Experience:
    answer = example.tokens[example.answer_start :]
    logprobs = (-1.0,) * len(answer)
    completion = Completion(
        key=Key(0, index),
        prompt_tokens=example.tokens[: example.answer_start],
        tokens=answer,
        text="",
        logprobs=logprobs,
        policy_logprobs=logprobs,
        finish_reason="eos",
        policy_version=0,
        timing=Timing(0.0, 0.0),
    )
    advantage = 1.0 if index % 2 else -1.0
    return Experience(Rollout(Prompt(str(index), ""), completion, advantage), advantage)


@contextmanager
def kept_weights(model: Transformer) -> Iterator[None]:
    """Every layout starts from the same policy."""
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    hooks = {id(p): p._post_accumulate_grad_hooks for p in model.parameters()}
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = None
            parameter.data.copy_(before[name])
            parameter.requires_grad_(True)
            parameter._post_accumulate_grad_hooks = hooks[id(parameter)]


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def show_profile(part: str, step: Callable[[], object], device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        wait_for(device)
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    print(f"\n{part}\n" + profiler.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=80))


# ---- the whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="Hugging Face directory of the policy, or tiny")
    parser.add_argument("--shape", help="widen the policy to this shape first: 1.5B or 7B")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="few and short answers, for a CPU")
    parser.add_argument("--packed", action="store_true", help="leave out what is padded")
    parser.add_argument("--vocab", type=int, default=0, help="tokens the drafter can name; 0: all")
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    parser.add_argument("--out", type=Path, help="JSON file; default: training.json in $OUT, where that is set")
    parser.add_argument("--commit", help="what to record as the commit")
    for name, kind in TrainingScale.__annotations__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    options = parser.parse_args()
    base = QUICK if options.quick else FULL
    chosen = {name: getattr(options, name) for name in TrainingScale.__annotations__}
    scale = TrainingScale(**{**asdict(base), **{name: value for name, value in chosen.items() if value is not None}})

    check_shape(options.shape)
    model = widened(open_policy(ModelSettings(path=options.model)).model, options.shape)
    layouts = {"packed": pack} if options.packed else LAYOUTS
    stage = TrainingBench(model, scale, options.profile, layouts, options.vocab)
    machine = describe(stage.device, options.commit)
    named = f"{options.model}, {options.shape or 'as it is'}"
    print(f"{machine.device}, torch {machine.torch}, {named}, {stage.model.embed.dtype}, {scale}", flush=True)
    out = options.out or (Path(os.environ["OUT"]) / "training.json" if os.environ.get("OUT") else None)
    records: list[Record | Saved] = []
    for part in options.parts.split(","):
        for record in PARTS[part](stage):
            records.append(record)
            tell(record, records)
            if out is not None:
                content = {"machine": asdict(machine), "model": named, "scale": asdict(scale)}
                write_record(out, {**content, "records": [asdict(r) for r in records]})


def tell(record: Record | Saved, records: Sequence[Record | Saved]) -> None:
    if isinstance(record, Saved):
        first = next(r for r in records if isinstance(r, Saved))
        print(
            f"{record.part:34} {record.way:28} {record.mib:8.1f} MiB  held up {record.held_up_s:.4f} s "
            f"({first.held_up_s / record.held_up_s:.1f}× less), cost {record.cost_s:.4f} s, "
            f"on disk {record.on_disk_s:.3f} s",
            flush=True,
        )
        return
    alike = [r for r in records if isinstance(r, Record) and r.part == record.part]
    packed = next((r for r in alike if r.layout == "packed"), record)
    gain = "" if record is packed else f", packing is {packed.tokens_per_s / record.tokens_per_s:.2f}× as fast"
    padding = 1 - record.tokens / record.computed
    print(
        f"{record.part:34} {record.layout:28} {record.tokens_per_s:>10,} tokens/s  {record.seconds:8.3f} s  "
        f"{padding:4.0%} padding  {record.memory_gib:6.1f} GiB{gain}",
        flush=True,
    )


if __name__ == "__main__":
    main()
