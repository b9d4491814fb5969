"""The three workloads on which speculation is measured: who answers what, with fixed seeds.

(a) the policy as it is on GSM8K's questions: high entropy, the hard case; (b) the same after one to two minutes of
supervised tuning on two thirds of GSM8K's answers; (c) tuned on the steps task, arithmetic line by line in varied
words: peaked and long-tailed. What always holds: tuning, drafter training and measuring use different prompts (a
drafter that saw what its policy learned by heart would not know how it writes otherwise), and everything drawn is drawn
from the seeds below. Files are GSM8K's own JSONL, with `question` and `answer`.
"""

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from zlib import crc32

from tlt.config import DraftSettings, RunConfig, StepsSettings, WarmupSettings
from tlt.errors import TaskError
from tlt.tasks.math import gsm8k, gsm8k_reference
from tlt.tasks.steps import StepsTask
from tlt.text import Tokenizer
from tlt.train.packing import Example
from tlt.train.supervised import Pair, encode_pair, endless, read_pairs
from tlt.types import Completion, Message, Prompt

TUNE_SEED, DRAFT_SEED, MEASURE_SEED = 101, 202, 303
_PER_QUANTILE = 64  # prompts drawn for each that is measured
_PAGE = 64  # prompts that one process encodes at a time
_PAGES_AHEAD = 4  # per process
_DRAFTED_FROM = 3  # where a file serves both, one question in so many is the drafter's, and the others tune


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    cap: int  # tokens of an answer, at most
    draft: DraftSettings
    tune: WarmupSettings | None = None  # supervised tuning before anything else
    steps: StepsSettings | None = None  # of the steps task; without it, GSM8K

    @property
    def needs_files(self) -> bool:
        return self.steps is None


# 16k tokens a batch: a GPU's throughput is acceptance, but on a tiny policy (one run each) twice the batch in half the
# steps reached less, at 1, √2 and 2 times the learning rate. The steps are an upper limit, the time budget another. An
# MLP half as wide as a policy's layer has: it guesses hardly worse, and at 7B a level reads 143 MB, not 232.
_DRAFT = DraftSettings(mlp=0.5, tokens_per_batch=16384, steps=4000, single_steps=200, warmup_steps=50, held_out=128)

WORKLOADS = {
    workload.name: workload
    for workload in (
        # far ahead nobody can guess what comes: rather more steps of training than more tokens in a row
        Workload("a", cap=1024, draft=replace(_DRAFT, answers=8192, steps=12000, vocab=16384, unroll=3)),
        Workload(
            "b",
            cap=1024,
            draft=replace(_DRAFT, answers=20480, steps=6000, vocab=8192),
            # nearly two minutes at 340,000 tokens/s, and some thirty times over its questions: hence slowly
            tune=WarmupSettings(steps=1150, tokens_per_batch=32768, learning_rate=1e-4, warmup_steps=30),
        ),
        Workload(
            "c",
            cap=4096,
            draft=replace(_DRAFT, answers=6144, vocab=1024),
            tune=WarmupSettings(steps=800, tokens_per_batch=32768, learning_rate=5e-4, warmup_steps=40),
            steps=StepsSettings(),
        ),
    )
}


def quick(workload: Workload) -> Workload:
    """The same in a size for tests on a CPU."""
    return replace(
        workload,
        cap=48,
        draft=replace(workload.draft, answers=6, held_out=2, steps=3, single_steps=1, tokens_per_batch=512),
        tune=replace(workload.tune, steps=2, tokens_per_batch=2048, warmup_steps=1) if workload.tune else None,
        steps=replace(workload.steps, median_steps=2.0, max_steps=4) if workload.steps else None,
    )


# ---- what is measured


def measured_prompts(workload: Workload, file: Path | None, count: int) -> list[Prompt]:
    """The prompts of the measured rollouts, the same at every call."""
    if workload.steps:
        return _representative(StepsTask(workload.steps, seed=MEASURE_SEED), count)
    return _questions(_needed(file, "--prompts"), MEASURE_SEED)[:count]


def _representative(task: StepsTask, count: int) -> list[Prompt]:
    """So few prompts of so wide a distribution would be a matter of luck: these stand at its quantiles."""
    drawn = sorted(task.sample(0, count * _PER_QUANTILE), key=lambda prompt: prompt.extra["problem"].steps)
    prompts = drawn[_PER_QUANTILE // 2 :: _PER_QUANTILE]
    random.Random(f"workload/{task.seed}").shuffle(prompts)
    return prompts


def right(workload: Workload, prompt: Prompt, completion: Completion) -> float:
    """What the answer earns: 1 for the right result."""
    if workload.steps:
        return StepsTask(workload.steps, seed=MEASURE_SEED).reward(prompt, completion)
    return gsm8k(completion.text, prompt.reference) if completion.finish_reason == "eos" else 0.0


def _questions(file: Path, seed: int) -> list[Prompt]:
    """GSM8K's questions as chats, in an order of the seed's own."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [
        Prompt(f"{file.name}:{number}", (Message("user", line["question"]),), gsm8k_reference(line["answer"]))
        for number, line in enumerate(lines, start=1)
    ]
    random.Random(f"workload/{seed}").shuffle(prompts)
    return prompts


def _needed(file: Path | None, option: str) -> Path:
    if file is None or not file.is_file():
        raise TaskError(f"{option} is {file}; expected a JSONL file of questions and answers in GSM8K's form")
    return file


# ---- what the drafter learns from


def drafting(workload: Workload, config: RunConfig, data: Path | None, measured: Sequence[Prompt], work: Path) -> str:
    """What `tlt draft train` is given as --prompts. Nothing of what is measured, or of what the policy was tuned on."""
    if workload.steps:
        return config.task.name
    asked = {_question(prompt) for prompt in measured}
    others = [_question(prompt) for prompt in _questions(_needed(data, "--data"), DRAFT_SEED)]
    file = work / "drafter_prompts.jsonl"
    if workload.tune:
        others = [text for text in others if _is_the_drafters(text)]
    lines = [json.dumps({"question": text}) for text in others if text not in asked]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def _is_the_drafters(question: str) -> bool:
    return crc32(question.encode()) % _DRAFTED_FROM == 0


def _question(chat: Prompt | Pair) -> str:
    assert not isinstance(chat.content, str)
    return chat.content[-1].content


def drafting_config(workload: Workload, config: RunConfig, vocab: int) -> RunConfig:
    """`vocab` is the policy's; a draft vocabulary that would not be smaller is no reduction."""
    draft = workload.draft if workload.draft.vocab < vocab else replace(workload.draft, vocab=0)
    task = replace(config.task, name="steps", steps=workload.steps) if workload.steps else config.task
    return replace(config, task=task, draft=draft, run=replace(config.run, seed=DRAFT_SEED))


# ---- what the policy is tuned on


def tuning_examples(
    workload: Workload, source: Path, data: Path | None, longest: int, processes: int
) -> Iterator[Example]:
    """Endless. The steps task is never asked twice the same; `processes` write and encode ahead, 0 does it here."""
    if workload.steps is None:
        tokenizer = Tokenizer.load(source)
        pairs = [_as_chat(pair) for pair in read_pairs(_needed(data, "--data"))]
        pairs = [pair for pair in pairs if not _is_the_drafters(_question(pair))]
        yield from endless([encode_pair(pair, tokenizer, longest) for pair in pairs], TUNE_SEED)
    elif processes:
        yield from _encoded_elsewhere(workload.steps, source, longest, processes)
    else:
        page = 0
        while True:
            yield from _encoded_page(workload.steps, source, longest, page)
            page += 1


def _as_chat(pair: Pair) -> Pair:
    return replace(pair, content=(Message("user", pair.content),)) if isinstance(pair.content, str) else pair


def _encoded_elsewhere(steps: StepsSettings, source: Path, longest: int, processes: int) -> Iterator[Example]:
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting: list[Future[list[Example]]] = []
        page = 0
        try:
            while True:
                while len(waiting) < processes * _PAGES_AHEAD:
                    waiting.append(pool.submit(_encoded_page, steps, source, longest, page))
                    page += 1
                yield from waiting.pop(0).result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _encoded_page(steps: StepsSettings, source: Path, longest: int, page: int) -> list[Example]:
    task, tokenizer = StepsTask(steps, seed=TUNE_SEED), _tokenizer(source)
    pairs = [Pair(prompt.content, task.solution(prompt), prompt.id) for prompt in task.sample(page, _PAGE)]
    return [encode_pair(pair, tokenizer, longest) for pair in pairs]


@lru_cache(maxsize=1)  # one per process
def _tokenizer(source: Path) -> Tokenizer:
    return Tokenizer.load(source)
