"""Every setting of a run: frozen sections that check their values.

The comment beside a setting, and on the lines below it, is its documentation: `tlt config` prints it, with the allowed
range. A choice is documented as `value: its effect`. Does not know the effects of settings, files or flags:
`tlt.recipe` reads and writes them.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import PurePath
from typing import Any, Literal

from tlt.errors import ConfigError, shown
from tlt.types import SamplingParams

_NAME_BYTES = 200  # of run.name, at most: a file name may have 255, and suffixes take some of them
NEW = "new"  # spec.path of a drafter that starts from nothing

# Drafters by the name that `spec.drafter` has for them: a subclass of `tlt.Drafter`, or where to import it from.
DRAFTERS: dict[str, str | type] = {
    "suffix": "tlt.spec.suffix:SuffixDrafting",
    "eagle": "tlt.spec.learned:LearnedDrafting",
}
_READ_PATH = {"eagle"}  # drafters that read spec.path
_DRAFTER_SETS: dict[str, tuple[str, ...]] = {"none": (), "both": ("eagle", "suffix")}

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
DrafterArchitecture = Literal["eagle-3", "eagle-3.1"]


def _require(holds: bool, key: str, value: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{key} is {shown(value, 400)}; expected {expected}")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The run's name, output directory, length and seed."""

    name: str = "run"  # the run's directory is out/name; letters, digits, _, - and .
    out: str = "runs"  # directory that holds the runs
    seed: int = 0  # of prompts and sampling; the same seed gives the same rollouts
    steps: int = 100  # steps of reinforcement learning
    replay_every: int = 0  # the middle one of so many rollouts is decoded again without drafts and compared; 0: none

    def __post_init__(self) -> None:
        _require(self.steps >= 1, "steps", self.steps, "at least 1")
        _require(self.replay_every >= 0, "replay_every", self.replay_every, "0 or more")
        named = re.fullmatch(r"[\w.-]+", self.name) and self.name.strip(".") and len(self.name.encode()) <= _NAME_BYTES
        words = f"letters, digits, '_', '-' or '.', not dots alone, {_NAME_BYTES} bytes at most"
        _require(bool(named), "name", self.name, words)
        _require(self.out != "" and "\0" not in self.out, "out", self.out, "a directory")
        _require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The policy."""

    path: str = "tiny"  # a Hugging Face model directory, or a model's name in the local Hugging Face cache.
    # tiny: the policy shipped with tlt
    dtype: Dtype = "auto"  # of the weights. auto: float32 on a CPU, bfloat16 on a GPU; bfloat16, float16: 2 bytes each;
    # float32: 4 bytes; float64: 8 bytes, on a CPU only
    device: str = "auto"  # auto: a GPU if there is one, else the CPU; cpu: the CPU; cuda: torch's own choice of a GPU;
    # cuda:N: GPU number N

    def __post_init__(self) -> None:
        _require(self.path != "", "path", self.path, 'a model directory, a name in the Hugging Face cache, or "tiny"')
        known = re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", self.device)
        _require(known is not None, "device", self.device, "auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, slots=True)
class ToySettings:
    """Difficulty of the toy task: expressions with a lognormal number of operations, solved by rewriting."""

    median_ops: float = 6.0  # median of the number of operations in an expression
    spread: float = 0.5  # standard deviation of its logarithm; 0 makes all expressions equally long
    max_ops: int = 26  # operations at most
    modulus: int = 10  # numbers are 0 … modulus - 1; 10 keeps each of them one character
    parentheses: float = 0.15  # probability that an operand is an expression in parentheses
    products: float = 0.2  # fraction of operations that are products
    pool: int = 0  # number of distinct expressions, used in rotation; 0: unlimited

    def __post_init__(self) -> None:
        _require(self.pool >= 0, "pool", self.pool, "0 or more")
        _require(self.median_ops >= 1, "median_ops", self.median_ops, "a number ≥ 1")
        _require(self.spread >= 0, "spread", self.spread, "a number ≥ 0")
        _require(self.max_ops >= 1, "max_ops", self.max_ops, "at least 1")
        _require(self.modulus >= 2, "modulus", self.modulus, "at least 2")
        _require(0 <= self.parentheses <= 1, "parentheses", self.parentheses, "a number in [0, 1]")
        _require(0 <= self.products <= 1, "products", self.products, "a number in [0, 1]")


@dataclass(frozen=True, slots=True)
class StepsSettings:
    """Difficulty of the steps task: a lognormal number of steps, one line each, with random phrasing."""

    median_steps: float = 14.0  # median of the number of steps asked for
    spread: float = 1.2  # standard deviation of its logarithm; 0 makes all answers equally long
    max_steps: int = 270  # steps at most
    modulus: int = 100  # numbers are 0 … modulus - 1
    rules: int = 4  # rules of a prompt, at most; one of them always uses the number of the step
    products: float = 0.3  # fraction of rules that multiply
    largest: int = 19  # number that a rule adds or subtracts, at most
    variety: float = 1.0  # randomness of the phrasing; 0: every line has the same phrasing
    chat: bool = True  # prompts use the policy's chat template; false: plain text

    def __post_init__(self) -> None:
        _require(self.median_steps >= 1, "median_steps", self.median_steps, "a number ≥ 1")
        _require(self.spread >= 0, "spread", self.spread, "a number ≥ 0")
        for name, lowest in (("max_steps", 1), ("modulus", 2), ("rules", 2), ("largest", 2)):
            _require(getattr(self, name) >= lowest, name, getattr(self, name), f"at least {lowest}")
        _require(0 <= self.products <= 1, "products", self.products, "a number in [0, 1]")
        _require(0 <= self.variety <= 1, "variety", self.variety, "a number in [0, 1]")


BUILT_IN_REWARDS = ("exact", "gsm8k", "math", "format", "length", "overlong")
_REWARD_WORDS = f"{', '.join(BUILT_IN_REWARDS)}, FILE.py:FUNCTION or http://HOST/PATH"


def _is_reward(name: str) -> bool:
    named = re.fullmatch(r".+\.py:[^\W\d]\w*|https?://[^/\s]+(/\S*)?", name)
    return name in BUILT_IN_REWARDS or named is not None


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """The source of prompts, the number of prompts, and the reward."""

    name: Literal["toy", "steps", "files"] = "toy"  # source of prompts and reward. toy: arithmetic, [task.toy];
    # steps: rules applied line by line, [task.steps]; files: the prompts at `path`, judged by `reward`
    prompts: int = 64  # prompts per step
    group: int = 1  # answers per prompt
    path: str = ""  # .jsonl, .json, .csv, .parquet, .arrow or saved dataset; needs name = "files", as all that follows
    prompt_column: str = ""  # column of the prompt; "" takes prompt or question
    reference_column: str = ""  # column of the reference; "" takes reward_model, ground_truth, answer or label
    template: str = ""  # text around a plain prompt, with {prompt} in its place; "" takes the prompt as it is
    chat: bool = False  # a plain prompt becomes a user message in the policy's chat template
    system: str = ""  # system message of chats without one
    prompt_tokens: int = 0  # tokens of a prompt, at most. 0: as many as leave room for an answer in the context
    long_prompts: Literal["refuse", "filter", "truncate"] = "refuse"  # prompts with more tokens. refuse: end the run;
    # filter: are left out; truncate: lose their beginning
    reward: str = "exact"  # exact: the answer, or its last number, is the reference; gsm8k: the number after #### is;
    # math: the content of its last \boxed equals the reference; format: the whole answer matches reward_format;
    # length: minus the answer's share of the token limit; overlong: 0, falling to -1 over the last overlong_tokens;
    # FILE.py:FUNCTION: a user function; http://HOST/PATH: a server, also https
    rewards: tuple[str, ...] = ()  # several rewards, summed up, each as `reward`, which they replace.
    # task: the own reward of any other task than files
    reward_weights: tuple[float, ...] = ()  # weight of each of `rewards` in the sum; []: 1 each (any number)
    reward_convention: Literal["auto", "verl", "trl"] = "auto"  # how a user function is called. auto: by its signature;
    # verl: one answer per call, (data_source, solution_str, ground_truth, extra_info);
    # trl: lists of answers, (prompts, completions, **columns)
    reward_batch: Literal["group", "step"] = "group"  # answers in one call of a reward that takes several.
    # group: those to one prompt, as they come in; step: all of a step, after the last has come in
    reward_processes: int = 1  # processes that compute each reward in parallel
    reward_timeout_s: float = 10.0  # time limit of the reward of one answer, in seconds; of a server, at each attempt
    reward_retries: int = 3  # further attempts to reach a reward server that fails or is too slow
    reward_errors: Literal["stop", "count"] = "stop"  # a reward that raises, hangs or is no number. stop: ends the run;
    # count: is counted and replaced by failed_reward
    failed_reward: float = 0.0  # reward of an answer whose reward failed, if reward_errors is count (any number)
    reward_format: str = r"(?s)<think>.*?</think>.*\S.*"  # regular expression that `format` compares the answer with
    overlong_tokens: int = 0  # tokens below the limit over which `overlong` falls. 0: a fifth of the limit
    toy: ToySettings = field(default_factory=ToySettings)
    steps: StepsSettings = field(default_factory=StepsSettings)

    def __post_init__(self) -> None:
        _require(self.prompts >= 1, "prompts", self.prompts, "at least 1")
        _require(self.prompt_tokens >= 0, "prompt_tokens", self.prompt_tokens, "0 or more")
        _require(self.group >= 1, "group", self.group, "at least 1")
        files = self.name == "files"
        _require(bool(self.path) or not files, "path", self.path, 'a file of prompts, as name is "files"')
        _require(files or not self.path, "path", self.path, f'nothing, as name is "{self.name}"; set name = "files"')
        _require(not self.template or "{prompt}" in self.template, "template", self.template, "a text with {prompt}")
        _require(_is_reward(self.reward), "reward", self.reward, _REWARD_WORDS)
        self._check_rewards()
        _require(self.reward_processes >= 1, "reward_processes", self.reward_processes, "at least 1")
        _require(self.reward_timeout_s > 0, "reward_timeout_s", self.reward_timeout_s, "a number > 0")
        _require(self.reward_retries >= 0, "reward_retries", self.reward_retries, "0 or more")
        _require(self.overlong_tokens >= 0, "overlong_tokens", self.overlong_tokens, "0 or more")

    def _check_rewards(self) -> None:
        weights, count = self.reward_weights, len(self.rewards)
        for name in self.rewards:
            own = name == "task" and self.name != "files"
            _require(own or _is_reward(name), "rewards", self.rewards, f"each {_REWARD_WORDS}")
        _require(not weights or len(weights) == count, "reward_weights", weights, f"{count} numbers, one per reward")
        try:
            re.compile(self.reward_format)
        except re.error as error:
            words = f"a regular expression ({error})"
            _require(False, "reward_format", self.reward_format, words)


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """Evaluation on held-out prompts: before the first step, every so many steps, and after the last one."""

    every: int = 0  # steps between two evaluations. 0: no evaluation, not at the start and the end either
    paths: tuple[str, ...] = ()  # files of held-out prompts, each evaluated on its own, read as task.path is.
    # []: prompts of the toy or steps task that training does not ask
    prompts: int = 0  # prompts of each file, the first ones. 0: all; of the toy and steps tasks 256
    answers: int = 1  # answers to each prompt; more than 1 needs a temperature
    pass_at: tuple[int, ...] = (1,)  # k of pass@k, the probability that one of k answers is correct; at most `answers`
    correct: float = 1.0  # an answer with this reward or more is correct (any number)
    temperature: float = 0.0  # 0: greedy, the most probable token
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability
    max_tokens: int = 0  # tokens of an answer at most; 0: as sampling.max_tokens
    reward: str = ""  # judges the answers, as task.reward does; "" takes the task's
    best: str = "reward"  # metric whose best checkpoint is kept: reward, pass@K or another one that is evaluated,
    # of the first file or as FILE/METRIC, where FILE is the name without ending; the highest, but of length, truncated
    # and reward_error the lowest. "" keeps none

    def __post_init__(self) -> None:
        for name, lowest in (("every", 0), ("prompts", 0), ("answers", 1), ("max_tokens", 0)):
            expected = f"at least {lowest}" if lowest else "0 or more"
            _require(getattr(self, name) >= lowest, name, getattr(self, name), expected)
        known = all(1 <= k <= self.answers for k in self.pass_at)
        _require(known, "pass_at", self.pass_at, f"numbers from 1 to eval.answers, which is {self.answers}")
        _require(self.temperature >= 0, "temperature", self.temperature, "a number ≥ 0")
        differ = self.temperature > 0 or self.answers == 1
        _require(differ, "answers", self.answers, "1, as temperature is 0 and all answers to a prompt are the same")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        names = evaluation_names(self.paths)
        different = "files that differ in their name or directory's name, endings left out"
        _require(len({*names}) == len(names), "paths", self.paths, different)


def evaluation_names(paths: Sequence[str]) -> list[str]:
    """What the results of files of held-out prompts are called: gsm8k-test and math-test where both are `test`."""
    files = [PurePath(path) for path in paths]
    names = [file.name.partition(".")[0] for file in files]
    return [
        f"{file.parent.name}-{name}" if names.count(name) > 1 and file.parent.name else name
        for file, name in zip(files, names, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The rollout engine."""

    rows: int = 256  # requests that decode at the same time, at most
    page_size: int = 16  # tokens in a page of the key-value cache
    kv_gib: float = 0.0  # KV cache in GiB. 0: 1 GiB on a CPU; on a GPU the free memory, or what `tlt plan` leaves if
    # the run trains
    sleep: Literal["auto", "always", "never"] = "auto"  # whether the KV cache gives its memory back during updates.
    # auto: on a GPU, if the run would not fit otherwise; always: also on a CPU; never: it keeps it
    prefill_tokens: int = 8192  # prompt tokens computed per tick, at most; longer prompts are split
    admission: Literal["longest", "fifo"] = "longest"  # admitted first. longest: the longest expected; fifo: the oldest
    graphs: bool = True  # use CUDA graphs (GPU only)
    exact: bool = False  # bit-identical results for any batch and draft (chains only); slower, GPU in bfloat16 only

    def __post_init__(self) -> None:
        _require(self.rows >= 1, "rows", self.rows, "at least 1")
        power = self.page_size >= 1 and self.page_size & (self.page_size - 1) == 0
        _require(power, "page_size", self.page_size, "a power of two")
        _require(self.kv_gib >= 0, "kv_gib", self.kv_gib, "a number ≥ 0")
        _require(self.prefill_tokens >= 1, "prefill_tokens", self.prefill_tokens, "at least 1")


@dataclass(frozen=True, slots=True)
class SpecSettings:
    """Speculative decoding: changes the time a rollout takes, never its tokens."""

    drafter: str = "none"  # source of drafts. none: decoding without drafts; suffix: earlier text;
    # eagle: the learned drafter at `path`; both: eagle+suffix, either of the two or both in one tree. Names of
    # `tlt.config.DRAFTERS`, joined by "+"
    path: str = ""  # directory of the learned drafter, as saved by `tlt draft train`. new: an untrained drafter
    shape_policy: Literal["tuner", "beg-mab", "fixed"] = "tuner"  # chooses the draft shape of each tick.
    # tuner: most tokens per second by the cost model and measured acceptance, or no drafts if that is faster;
    # beg-mab: the paper's bandit, by measured rewards, with random shapes in a tenth of the ticks; fixed: the deepest
    depths: tuple[int, ...] = (1, 2, 3, 7, 15)  # draft tokens per branch
    widths: tuple[int, ...] = (1, 2, 4)  # candidates considered after each node
    verifies: tuple[int, ...] = (2, 4, 8, 16, 32)  # nodes verified per request, the newest token included
    shares: tuple[float, ...] = (2.0, 4.0)  # tuner on a GPU: shapes with a common verify budget.
    # nodes per request on average, spent on the likeliest nodes of all trees; []: no such shapes
    quantized: bool = True  # draft with large matrices in 8 bits, half the memory traffic, on Hopper GPUs and newer
    memory_tokens: int = 2_000_000  # text kept for the suffix drafter, in tokens
    ahead: Literal["off", "auto"] = "off"  # completions of the next step are written before it begins, as its drafts.
    # off: they are not; auto: by workers without requests, and beside the last requests of a step where that pays

    def __post_init__(self) -> None:
        self._check_drafters()
        for name, lowest in (("depths", 1), ("widths", 1), ("verifies", 2)):
            values = getattr(self, name)
            _require(bool(values) and min(values) >= lowest, name, values, f"at least one number, each ≥ {lowest}")
        _require(max(self.verifies) <= 128, "verifies", self.verifies, "numbers up to 128")
        _require(max(self.widths) <= 16, "widths", self.widths, "numbers up to 16")
        _require(all(1.0 < share <= 128.0 for share in self.shares), "shares", self.shares, "numbers in (1, 128]")
        _require(bool(self.path) or not self.learned, "path", self.path, 'the directory of a learned drafter, or "new"')
        _require(self.memory_tokens >= 1, "memory_tokens", self.memory_tokens, "at least 1")

    def _check_drafters(self) -> None:
        accepted = [*_DRAFTER_SETS, *DRAFTERS]
        for name in self.drafters:
            near = difflib.get_close_matches(name, accepted, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            words = f"one of {', '.join(accepted)}, or drafters joined by '+'{hint}"
            _require(name in DRAFTERS, "drafter", self.drafter, words)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names in `DRAFTERS`, sorted."""
        found = _DRAFTER_SETS.get(self.drafter)
        return tuple(sorted({*self.drafter.split("+")})) if found is None else found

    @property
    def learned(self) -> bool:
        """Whether a drafter reads `path`."""
        return not _READ_PATH.isdisjoint(self.drafters)


@dataclass(frozen=True, slots=True)
class WarmupSettings:
    """Supervised training on prompts and answers, which teaches an untrained policy the answer format."""

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
    """The learned drafter: its attention window, vocabulary, size and training."""

    window: int = 512  # size of its sliding attention window, in positions; bounds its KV cache
    vocab: int = 0  # size of the draft vocabulary, the most frequent tokens of the rollouts; 0: the policy's vocabulary
    mlp: float = 1.0  # width of its MLP relative to the policy's; a smaller one is faster
    architecture: DrafterArchitecture = "eagle-3"  # of a new drafter. eagle-3: the paper's;
    # eagle-3.1: the policy's states and the drafter's own are normed before the drafter reads them
    answers: int = 0  # completions sampled for training; 0: 512 on a GPU, 128 on a CPU
    held_out: int = 0  # further completions for measurement, not trained on; 0: 64 on a GPU, 32 on a CPU
    steps: int = 200  # optimizer steps, at most
    seconds: float = 0.0  # time limit of `tlt draft train`, from its start to the saved drafter; 0: none
    tokens_per_batch: int = 0  # tokens packed into one step, at most; 0: 2048 on a GPU, 1024 on a CPU
    learning_rate: float = 6e-4  # peak of the schedule at a hidden size of 1024; in inverse proportion to it elsewhere
    warmup_steps: int = 10  # steps over which the learning rate rises from 0
    unroll: int = 5  # draft steps unrolled in training, on the drafter's own states
    single_steps: int = 130  # optimizer steps at the start that train the first draft token only, which is cheaper
    decay: float = 0.8  # weight of each unrolled step in the loss, relative to the previous step
    total_variation: float = 0.8  # weight of total variation in the loss; the rest is soft cross-entropy

    def __post_init__(self) -> None:
        least = {"window": 16, "answers": 0, "held_out": 0, "steps": 1, "tokens_per_batch": 0, "unroll": 1}
        for name, lowest in {**least, "vocab": 0, "warmup_steps": 0, "single_steps": 0}.items():
            expected = f"at least {lowest}" if lowest else "0 or more"
            _require(getattr(self, name) >= lowest, name, getattr(self, name), expected)
        _require(0 < self.mlp <= 1, "mlp", self.mlp, "a number in (0, 1]")
        _require(self.seconds >= 0, "seconds", self.seconds, "a number ≥ 0")
        _require(self.learning_rate > 0, "learning_rate", self.learning_rate, "a number > 0")
        _require(0 < self.decay <= 1, "decay", self.decay, "a number in (0, 1]")
        _require(0 <= self.total_variation <= 1, "total_variation", self.total_variation, "a number in [0, 1]")


@dataclass(frozen=True, slots=True)
class DraftingSettings:
    """Online training of the learned drafter while the policy changes: data, duration and triggers."""

    frozen: bool = False  # do not train the drafter: no cost, but its accept length falls as the policy changes
    buffer_mib: int = 1024  # host memory for completions to train on, in MiB
    fresh: float = 0.75  # fraction of a batch from the newest policy version; the rest are earlier, mostly long ones
    tokens: int = 8192  # tokens of a micro-step, at most; longer completions are split
    micro_s: float = 0.2  # target duration of a micro-step in seconds; its tokens adapt. 0: no adaptation
    states: Literal["auto", "recompute", "keep", "update"] = "update"  # source of the policy's hidden states.
    # update: training that other work waits for runs inside the policy's update, which computes them anyway;
    # recompute: computed in training; keep: kept from the rollout; auto: the cheaper of the two, on a GPU recompute
    held_out: int = 4096  # tokens of the newest completions for measurement; trained on later
    check: int = 16  # micro-steps between two measurements
    behind: float = 0.03  # fraction of accepted draft tokens that may be lost before training starts again.
    # 0: training starts after any loss; 1: a loss never starts training
    gain: float = 0.01  # fraction of accepted draft tokens to gain between two measurements, or training stops
    probe: int = 16  # steps without training after which training is tried anyway
    forced_share: float = 0.0  # fraction of all time that training may take while other work waits, even without gain.
    # 0: only training that is expected to save more time than it costs before the run ends

    def __post_init__(self) -> None:
        for name in ("buffer_mib", "tokens", "held_out", "check", "probe"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("fresh", "behind", "forced_share"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a number in [0, 1]")
        for name in ("micro_s", "gain"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "a number ≥ 0")


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Checkpoints, from which a stopped run resumes: `tlt train RECIPE --resume`."""

    every: int = 10  # steps between two checkpoints; the end of the run always writes one. 0: only that one
    keep: int = 2  # number of newest checkpoints whose weights are kept
    keep_optimizer: int = 0  # number of newest checkpoints that keep optimizer state, needed to resume; 0: all
    merge: bool = False  # of a run with train.lora_rank: write policy/ too, with the adapter merged, beside adapter/
    buffer: bool = False  # save the drafter's training buffer too, so that its training resumes at once

    def __post_init__(self) -> None:
        _require(self.every >= 0, "every", self.every, "0 or more")
        _require(self.keep >= 1, "keep", self.keep, "at least 1")
        fits = 0 <= self.keep_optimizer <= self.keep
        _require(fits, "keep_optimizer", self.keep_optimizer, f"0 to {self.keep}, which is checkpoint.keep")


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Displays of the run. They read its events, and cannot change or end it."""

    console: Literal["auto", "live", "lines", "off"] = "auto"  # auto: live in a terminal, lines elsewhere;
    # live: lines, and below them the current activity; lines: one for each step; off: nothing
    tensorboard: bool = False  # write TensorBoard files into tensorboard/ in the run's directory
    wandb: str = ""  # Weights & Biases project to write to; "" writes to none
    trackio: str = ""  # trackio project to write to; "" writes to none
    report: bool = True  # write report.html into the run's directory when the run ends
    groups: int = 2  # groups of each step whose completions are kept token by token in steps/; 0 writes no step files
    step_kib: int = 512  # KiB of a step's file at most
    disk_mib: int = 512  # MiB of all step files at most; older steps are then kept more and more sparsely

    def __post_init__(self) -> None:
        _require(self.groups >= 0, "groups", self.groups, "0 or more")
        _require(self.step_kib >= 16, "step_kib", self.step_kib, "at least 16")
        _require(self.disk_mib >= 1, "disk_mib", self.disk_mib, "at least 1")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The policy's optimizer steps in reinforcement learning."""

    learning_rate: float = 0.0  # peak of the schedule. 0: by what is trained, 1e-6 for all weights, 3e-5 for adapters,
    # 5e-4 for policies of less than 20 million weights
    warmup_steps: int = 0  # steps over which the learning rate rises from 0
    decay_steps: int = 0  # step at which a cosine reaches a tenth of the peak; 0: constant
    weight_decay: float = 0.0  # of matrices; vectors are never decayed
    clip: float = 1.0  # largest norm of the gradient
    row_tokens: int = 16384  # tokens packed into one forward and backward pass: bounds memory, changes no number
    minibatches: int = 1  # minibatches per step, each with its own update of the weights
    epochs: int = 1  # passes over a step's rollouts
    checkpoint_activations: Literal["auto", "always", "never"] = "auto"  # whether the backward pass recomputes each
    # layer. auto: on a GPU, unless `tlt plan` has clear room for activations; always: less memory, a third more time;
    # never: activations are kept
    offload: bool = False  # keep the optimizer's masters and moments in host memory: less GPU memory, longer updates
    lora_rank: int = 0  # train LoRA adapters of this rank, at most the smaller side of a matrix; 0: all weights
    lora_alpha: float = 0.0  # scale of that change is lora_alpha / lora_rank; 0 takes a scale of 1

    def __post_init__(self) -> None:
        for name in ("row_tokens", "minibatches", "epochs"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("learning_rate", "warmup_steps", "decay_steps", "weight_decay", "lora_rank", "lora_alpha"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(self.clip > 0, "clip", self.clip, "a number > 0")
        chosen = self.checkpoint_activations
        _require(chosen in ("auto", "always", "never"), "checkpoint_activations", chosen, "auto, always or never")
        alone = not (self.offload and self.lora_rank)
        why = f"false, as lora_rank is {self.lora_rank}: adapters take little memory"
        _require(alone, "offload", self.offload, why)
        reached = not self.decay_steps or self.decay_steps > self.warmup_steps
        _require(reached, "decay_steps", self.decay_steps, f"0 or more than warmup_steps, which is {self.warmup_steps}")


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """Group relative policy optimization (GRPO) and its usual variants."""

    divide_by_std: bool = True  # divide advantages by the standard deviation of the group's rewards
    leave_one_out: bool = False  # compare a rollout with the mean of the other rollouts of its group
    clip_low: float = 0.2  # lower clip of the probability ratio is 1 - clip_low
    clip_high: float = 0.2  # upper clip is 1 + clip_high; above clip_low it lets rare tokens grow faster
    objective: Literal["ppo", "gspo", "cispo"] = "ppo"  # what the probability ratio does. ppo: the surrogate of each
    # token is clipped; gspo: likewise with the ratio of the whole completion, its geometric mean per token;
    # cispo: the ratio is clipped and weights the log-probability, so that every token keeps its gradient
    loss: Literal["token", "sequence", "constant", "sum"] = "token"  # weight of a token. token: equal for all tokens;
    # sequence: equal for all completions; constant: equal, 1 over completions × sampling.max_tokens;
    # sum: equal, 1 over completions
    kl: float = 0.0  # weight of the KL divergence from the initial policy. 0: no term, and no copy of that policy;
    # adapters need no copy either
    dynamic_sampling: int = 0  # prompts asked, at most, one after the other, in place of one whose answers all earned
    # the same, which teaches nothing. 0: none
    mask_overlong: bool = False  # exclude completions cut off at the length limit from the loss
    importance_cap: float = 0.0  # weight tokens by trainer's over engine's probability, at most this; 0: no weights
    mismatch_limit: float = 0.5  # stop if trainer and engine differ by more nats per token on average; 0: no limit

    def __post_init__(self) -> None:
        _require(0 < self.clip_low <= 1, "clip_low", self.clip_low, "a number in (0, 1]")
        for name in ("dynamic_sampling", "kl", "importance_cap", "mismatch_limit"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(self.clip_high > 0, "clip_high", self.clip_high, "a number > 0")


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The workers. Their number changes the duration of a run, and its numbers by the rounding of sums alone."""

    workers: int = 1  # processes, each with an engine or a slice of one, and a part of the training; above 1 needs Ray
    tensor_parallel: int = 1  # workers that form one engine, each with a slice of every layer. A divisor of workers,
    # and of the policy's key-value heads
    address: str = ""  # HOST:PORT of a Ray cluster. auto: this machine's; "": a private Ray, if workers is above 1
    cpus_per_worker: float = 1.0  # cores per worker
    gpus_per_worker: float = 1.0  # GPUs per worker, if the policy runs on GPUs; at 0.5 two workers share one
    pin: bool = True  # pin workers on a CPU to separate cores
    drafting: bool = True  # workers without requests train the drafter until the rollout is over
    shard: bool = False  # shard the trained policy (FSDP2): less memory, but a loss takes all back to a checkpoint
    restarts: int = 8  # number of lost workers that a run tolerates
    hang_s: float = 600.0  # seconds without progress after which a worker counts as lost

    def __post_init__(self) -> None:
        _require(self.workers >= 1, "workers", self.workers, "at least 1")
        divides = self.tensor_parallel >= 1 and self.workers % self.tensor_parallel == 0
        words = f"a divisor of workers, which is {self.workers}"
        _require(divides, "tensor_parallel", self.tensor_parallel, words)
        _require(self.cpus_per_worker > 0, "cpus_per_worker", self.cpus_per_worker, "a number > 0")
        _require(self.gpus_per_worker > 0, "gpus_per_worker", self.gpus_per_worker, "a number > 0")
        _require(self.restarts >= 0, "restarts", self.restarts, "0 or more")
        _require(self.hang_s > 0, "hang_s", self.hang_s, "a number > 0")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The root: one field per section."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eval: EvalSettings = field(default_factory=EvalSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    spec: SpecSettings = field(default_factory=SpecSettings)
    warmup: WarmupSettings = field(default_factory=WarmupSettings)
    draft: DraftSettings = field(default_factory=DraftSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    grpo: GrpoSettings = field(default_factory=GrpoSettings)
    drafting: DraftingSettings = field(default_factory=DraftingSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)

    def __repr__(self) -> str:
        """The settings that differ from the defaults, on one line. `tlt.recipe.to_toml` writes all settings."""
        changed = list(_changed(self, RunConfig(), ""))
        more = f", and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        return f"RunConfig({', '.join(changed[:_SHOWN])}{more})"


_SHOWN = 6  # knobs in a configuration's repr


def _changed(section: Any, default: Any, prefix: str) -> Iterator[str]:
    for name in (each.name for each in fields(section)):
        value, usual = getattr(section, name), getattr(default, name)
        if is_dataclass(value):
            yield from _changed(value, usual, f"{prefix}{name}.")
        elif value != usual:
            yield f"{prefix}{name}={shown(value, 40)}"
