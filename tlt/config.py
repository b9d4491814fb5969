"""Every knob of a run, in one place: frozen sections that check themselves.

The comment beside a knob is its documentation: `tlt config` prints it. Knows nothing of what the knobs do, and nothing
of files and flags: `tlt.recipe` reads and writes them.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from tlt.errors import ConfigError
from tlt.types import SamplingParams

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]


def _require(holds: bool, key: str, value: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{key} is {value!r}; expected {expected}")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What this run is called, where it writes, and the seed of every draw."""

    name: str = "run"  # the run's directory is out/name
    out: str = "runs"  # directory that holds the runs
    seed: int = 0  # of prompts and sampling; the same seed gives the same rollouts

    def __post_init__(self) -> None:
        _require(bool(re.fullmatch(r"[\w.-]+", self.name)), "name", self.name, "letters, digits, '_', '-' or '.'")
        _require(self.out != "", "out", self.out, "a directory")
        _require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The policy."""

    path: str = "tiny"  # a Hugging Face model directory, or "tiny" for the policy shipped with tlt
    dtype: Dtype = "auto"  # of the weights; auto takes float32 on a CPU and bfloat16 on a GPU
    device: str = "auto"  # auto, cpu, cuda or cuda:N; auto takes a GPU if there is one

    def __post_init__(self) -> None:
        _require(self.path != "", "path", self.path, 'a model directory, or "tiny"')
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)
        _require(known is not None, "device", self.device, "auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, slots=True)
class ToySettings:
    """How hard the toy task is: expressions with a lognormal number of operations, answered by rewriting."""

    median_ops: float = 6.0  # median of the number of operations in an expression
    spread: float = 0.5  # standard deviation of its logarithm; 0 makes all expressions equally long
    max_ops: int = 26  # operations at most
    modulus: int = 10  # numbers are 0 … modulus - 1; 10 keeps each of them one character
    parentheses: float = 0.15  # probability that an operand is an expression in parentheses
    products: float = 0.2  # share of operations that are products

    def __post_init__(self) -> None:
        _require(self.median_ops >= 1, "median_ops", self.median_ops, "a number ≥ 1")
        _require(self.spread >= 0, "spread", self.spread, "a number ≥ 0")
        _require(self.max_ops >= 1, "max_ops", self.max_ops, "at least 1")
        _require(self.modulus >= 2, "modulus", self.modulus, "at least 2")
        _require(0 <= self.parentheses <= 1, "parentheses", self.parentheses, "a number in [0, 1]")
        _require(0 <= self.products <= 1, "products", self.products, "a number in [0, 1]")


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """What the policy is asked, and how often."""

    name: Literal["toy", "files"] = "toy"  # who asks and judges: the toy task, or a file of prompts and a reward
    prompts: int = 64  # prompts per step
    group: int = 1  # answers per prompt
    path: str = ""  # file of prompts, JSONL or parquet; needs name = "files", as all that follows
    prompt_column: str = ""  # column of the prompt; "" takes prompt or question
    reference_column: str = ""  # column of the reference; "" takes reward_model, ground_truth, answer or label
    template: str = ""  # text around a plain prompt, with {prompt} in its place; "" takes the prompt as it is
    chat: bool = False  # ask a plain prompt as a user's message, in the policy's chat template
    system: str = ""  # system message of every chat that brings none
    reward: str = "exact"  # exact, gsm8k, math, or the user's FILE.py:FUNCTION
    reward_convention: Literal["auto", "verl", "trl"] = "auto"  # how the function is called; auto asks its signature
    reward_processes: int = 1  # processes that judge at the same time
    reward_timeout_s: float = 10.0  # seconds a reward may take per answer
    reward_errors: Literal["stop", "count"] = "stop"  # a reward that raises, hangs or is no number: end, or count
    failed_reward: float = 0.0  # what an answer is given whose reward failed, where failures count
    toy: ToySettings = field(default_factory=ToySettings)

    def __post_init__(self) -> None:
        _require(self.prompts >= 1, "prompts", self.prompts, "at least 1")
        _require(self.group >= 1, "group", self.group, "at least 1")
        files = self.name == "files"
        _require(bool(self.path) or not files, "path", self.path, 'a JSONL or parquet file, as name is "files"')
        _require(files or not self.path, "path", self.path, f'nothing, as name is "{self.name}"; set name = "files"')
        _require(not self.template or "{prompt}" in self.template, "template", self.template, "a text with {prompt}")
        known = self.reward in ("exact", "gsm8k", "math") or re.fullmatch(r".+\.py:[^\W\d]\w*", self.reward)
        _require(bool(known), "reward", self.reward, "exact, gsm8k, math or FILE.py:FUNCTION")
        _require(self.reward_processes >= 1, "reward_processes", self.reward_processes, "at least 1")
        _require(self.reward_timeout_s > 0, "reward_timeout_s", self.reward_timeout_s, "a number > 0")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The rollout engine."""

    rows: int = 256  # requests that decode at the same time, at most
    page_size: int = 16  # tokens in a page of the key-value cache; a power of two
    kv_gib: float = 0.0  # key-value cache in GiB; 0 takes what is free on a GPU, less a reserve, and 1 GiB on a CPU
    prefill_tokens: int = 8192  # prompt tokens computed per tick, at most: longer prompts are computed in pieces
    admission: Literal["longest", "fifo"] = "longest"  # who enters first: the longest expected, or first come
    graphs: bool = True  # replay captured CUDA graphs (GPU only)

    def __post_init__(self) -> None:
        _require(self.rows >= 1, "rows", self.rows, "at least 1")
        power = self.page_size >= 1 and self.page_size & (self.page_size - 1) == 0
        _require(power, "page_size", self.page_size, "a power of two")
        _require(self.kv_gib >= 0, "kv_gib", self.kv_gib, "a number ≥ 0")
        _require(self.prefill_tokens >= 1, "prefill_tokens", self.prefill_tokens, "at least 1")


@dataclass(frozen=True, slots=True)
class SpecSettings:
    """Speculative decoding: changes the time a rollout takes, never its tokens."""

    drafter: Literal["none", "suffix", "eagle", "both"] = "none"  # who guesses: nobody, earlier text, a learned drafter
    path: str = ""  # directory of the learned drafter, as `tlt draft train` saves it
    chooser: Literal["tuner", "beg-mab"] = "tuner"  # who picks the shape: measured costs, or the bandit of the paper
    depths: tuple[int, ...] = (2, 4, 8)  # tokens a branch may run ahead
    widths: tuple[int, ...] = (1, 2, 4)  # candidates considered after each node
    verifies: tuple[int, ...] = (3, 5, 9, 16)  # nodes checked per request, the newest token included
    memory_tokens: int = 2_000_000  # answers remembered to draft from, in tokens

    def __post_init__(self) -> None:
        for name, lowest in (("depths", 1), ("widths", 1), ("verifies", 2)):
            values = getattr(self, name)
            _require(bool(values) and min(values) >= lowest, name, values, f"at least one number, each ≥ {lowest}")
        _require(max(self.verifies) <= 128, "verifies", self.verifies, "numbers up to 128")
        learned = self.drafter in ("eagle", "both")
        _require(bool(self.path) or not learned, "path", self.path, "the directory of a learned drafter")
        _require(self.memory_tokens >= 1, "memory_tokens", self.memory_tokens, "at least 1")


@dataclass(frozen=True, slots=True)
class WarmupSettings:
    """Supervised training on prompts and answers: how a raw policy learns the form of an answer."""

    steps: int = 100  # optimizer steps
    tokens_per_batch: int = 4096  # tokens packed into one step, at most
    learning_rate: float = 1e-3  # peak of the schedule
    warmup_steps: int = 10  # steps over which the learning rate rises from 0
    weight_decay: float = 0.0  # of matrices; vectors are never decayed
    clip: float = 1.0  # largest norm of the gradient
    save: str = ""  # directory to save the trained policy in; "" takes policy/ in the run's directory

    def __post_init__(self) -> None:
        _require(self.steps >= 1, "steps", self.steps, "at least 1")
        _require(self.tokens_per_batch >= 1, "tokens_per_batch", self.tokens_per_batch, "at least 1")
        _require(self.learning_rate > 0, "learning_rate", self.learning_rate, "a number > 0")
        _require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "0 or more")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "a number ≥ 0")
        _require(self.clip > 0, "clip", self.clip, "a number > 0")


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """The learned drafter: what it can see and name, and how it learns."""

    window: int = 512  # positions it looks back on: bounds its memory, and long contexts do not confuse it
    vocab: int = 0  # tokens it can name, the most frequent of the rollouts; 0 names all of the policy's
    answers: int = 512  # answers written to learn from
    held_out: int = 64  # further answers, never learned from, to measure on
    steps: int = 200  # optimizer steps
    tokens_per_batch: int = 2048  # tokens packed into one step, at most
    learning_rate: float = 6e-4  # peak of the schedule at a hidden size of 1024; in inverse proportion to it elsewhere
    warmup_steps: int = 10  # steps over which the learning rate rises from 0
    unroll: int = 5  # draft steps unrolled in training, so that it learns to go on from its own states
    single_steps: int = 130  # optimizer steps at the start that unroll nothing: cheap, and the first token comes first
    decay: float = 0.8  # weight of each unrolled step in the loss, relative to the one before
    total_variation: float = 0.8  # share of the total variation in the loss; the rest is soft cross-entropy

    def __post_init__(self) -> None:
        least = {"window": 16, "answers": 1, "held_out": 1, "steps": 1, "tokens_per_batch": 1, "unroll": 1}
        for name, lowest in {**least, "vocab": 0, "warmup_steps": 0, "single_steps": 0}.items():
            _require(getattr(self, name) >= lowest, name, getattr(self, name), f"at least {lowest}")
        _require(self.learning_rate > 0, "learning_rate", self.learning_rate, "a number > 0")
        _require(0 < self.decay <= 1, "decay", self.decay, "a number in (0, 1]")
        _require(0 <= self.total_variation <= 1, "total_variation", self.total_variation, "a number in [0, 1]")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The root: one field per section."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    engine: EngineSettings = field(default_factory=EngineSettings)
    spec: SpecSettings = field(default_factory=SpecSettings)
    warmup: WarmupSettings = field(default_factory=WarmupSettings)
    draft: DraftSettings = field(default_factory=DraftSettings)
