"""Evaluation: the run's engine answers held-out prompts, and the judged answers are summed up; and the verb `tlt eval`.

Always holds: requests have keys of their own, the same in every evaluation. Training's tokens do not depend on
whether it is evaluated, and two policies are compared under the same noise. An evaluation is one event for each set of
prompts, and a resumed run makes it again only if that event is not there.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import comb, sqrt
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console

from tlt import __version__
from tlt.config import EvalSettings, RunConfig
from tlt.engine.build import build_engine
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.errors import ConfigError
from tlt.event_builders import RewardMetrics, rewards_failed
from tlt.loop import Emit, ProgressPace
from tlt.model.weights import read_config
from tlt.multi_turn import Replies, replies_of
from tlt.outputs import write_new
from tlt.policy import open_policy, source_of
from tlt.tasks.context import fit_prompts
from tlt.tasks.held_out import HeldOut, evaluation_seed, held_out_of
from tlt.tasks.judging import Judged, Judging
from tlt.tasks.task import MultiTurnTask
from tlt.text import Tokenizer
from tlt.types import Completion, Key, SamplingParams
from tlt.watch.directory import ROLLOUTS, held
from tlt.watch.events import (
    Evaluated,
    Event,
    PhaseStarted,
    PromptsFitted,
    RolloutProgress,
    RunFinished,
    StartupFinished,
    StartupPhase,
)
from tlt.watch.metrics import evaluation_metrics
from tlt.watch.progress import WorkProgress
from tlt.watch.session import Watched
from tlt.watch.summary import evaluation_in_words

Answer = Callable[[int, Sequence[Request], Replies | None], Iterator[Completion]]
_LOWER_IS_BETTER = ("reward_error", "length", "truncated")
VERB = "eval"


# ---- scores


def pass_at(k: int, answers: int, correct: int) -> float:
    """The unbiased estimate of pass@k from `answers` answers of which `correct` are correct."""
    return 1.0 - comb(answers - correct, k) / comb(answers, k)


def evaluated(step: int, name: str, judged: Sequence[Judged], settings: EvalSettings, seconds: float) -> Evaluated:
    """The results of one set of prompts."""
    rollouts = [rollout for one in judged for rollout in one.group.rollouts]
    means = [fmean(rollout.reward for rollout in one.group.rollouts) for one in judged]
    told = RewardMetrics.of([verdict for one in judged for verdict in one.verdicts])
    correct = [sum(rollout.reward >= settings.correct for rollout in one.group.rollouts) for one in judged]
    return Evaluated(
        step=step,
        name=name,
        prompts=len(judged),
        answers=len(rollouts),
        mean_reward=fmean(rollout.reward for rollout in rollouts),
        reward_error=stdev(means) / sqrt(len(means)) if len(means) > 1 else 0.0,
        pass_at=tuple((k, fmean(pass_at(k, settings.answers, count) for count in correct)) for k in settings.pass_at),
        length_mean=fmean(len(rollout.completion.tokens) for rollout in rollouts),
        truncated=fmean(rollout.completion.finish_reason == "length" for rollout in rollouts),
        seconds=seconds,
        metrics=told.parts | told.metrics,
    )


def score_of(told: Evaluated, wanted: str, sets: Sequence[str]) -> float | None:
    """The metric that `eval.best` names, as a number that is higher for better policies; None if another set has it.
    `sets`: names of all; a metric without a set's name is the first one's."""
    named = max((name for name in sets if wanted.startswith(f"{name}/")), key=len, default="")
    if told.name != (named or sets[0]):
        return None
    metric, found = wanted.removeprefix(f"{named}/"), evaluation_metrics(told)
    if metric not in found:
        raise ConfigError(
            f"eval.best is {wanted!r}, and {told.name} has {', '.join(found)}; name one of these, or FILE/METRIC for "
            f"another of {', '.join(sets)}"
        )
    return -found[metric] if metric in _LOWER_IS_BETTER else found[metric]


# ---- an evaluation


class Evaluation:
    """All evaluations of a run. `told`: those made before it was resumed."""

    def __init__(
        self,
        config: RunConfig,
        sets: Sequence[HeldOut],
        tokenizer: Tokenizer,
        emit: Emit,
        told: Iterable[Evaluated] = (),
        *,
        keep: bool = False,
    ) -> None:
        """`keep`: the answers of the last evaluation stay in `judged`."""
        self._config, self._emit = config, emit
        self._asked = {one.name: _requests(index, one, config, tokenizer) for index, one in enumerate(sets)}
        self._sets, self._tokenizer = sets, tokenizer
        self._told = [one for one in told if one.name in self._asked]
        self.judged: dict[str, list[Judged]] = {}
        self._keep = keep

    def due(self, step: int) -> bool:
        """Whether an evaluation is due after `step` steps and not complete yet."""
        every, last = self._config.eval.every, self._config.run.steps
        return every > 0 and (step % every == 0 or step == last) and bool(self._missing(step))

    def run(self, step: int, answer: Answer) -> None:
        """Evaluates every set that has no result at this step yet."""
        for one in self._missing(step):
            self._emit(PhaseStarted(step, "evaluation"))
            self._tell(self._evaluate(step, one, answer))

    def _missing(self, step: int) -> list[HeldOut]:
        done = {told.name for told in self._told if told.step == step}
        return [one for one in self._sets if one.name not in done]

    @property
    def best(self) -> int | None:
        """The step of the best policy so far, by `eval.best`; the first of equal ones."""
        found = [(told, value) for told in self._told if (value := self._score(told)) is not None]
        return max(found, key=lambda pair: (pair[1], -pair[0].step))[0].step if found else None

    def _score(self, told: Evaluated) -> float | None:
        wanted = self._config.eval.best
        return score_of(told, wanted, [one.name for one in self._sets]) if wanted else None

    def _tell(self, told: Evaluated) -> None:
        self._told.append(told)
        best = self._score(told) is not None and self.best == told.step
        self._emit(replace(told, best=best))

    def _evaluate(self, step: int, one: HeldOut, answer: Answer) -> Evaluated:
        started = time.perf_counter()
        asked = self._asked[one.name]
        keys = [[request.key for request in requests] for requests in asked]
        by_step = self._config.task.reward_batch == "step"
        with Judging(one.judge, list(zip(one.prompts, keys, strict=True)), by_step=by_step) as judging:
            requests = [request for group in asked for request in group]
            prompts = {key: prompt for prompt, of_one in zip(one.prompts, keys, strict=True) for key in of_one}
            replies = replies_of(one.task, self._tokenizer, prompts)
            for completion in self._shown(step, requests, partial(answer, step, requests, replies)):
                judging.hand_in(completion)
            judged = judging.judged()
        for failure in rewards_failed(step, (verdict for group in judged for verdict in group.verdicts)):
            self._emit(failure)
        if self._keep:
            self.judged[one.name] = judged
        return evaluated(step, one.name, judged, self._config.eval, time.perf_counter() - started)

    def _shown(
        self, step: int, requests: Sequence[Request], answer: Callable[[], Iterator[Completion]]
    ) -> Iterator[Completion]:
        tokens, progress = 0, ProgressPace()
        for finished, completion in enumerate(answer(), start=1):
            yield completion
            tokens += len(completion.tokens)
            if progress.due():
                left = len(requests) - finished
                running = min(left, self._config.engine.rows)
                self._emit(RolloutProgress(step, finished, len(requests), running, tokens))


def sampling_of(config: RunConfig) -> SamplingParams:
    """How answers of an evaluation are drawn: they end where training's do, and all else is a setting of its own."""
    own = config.eval
    return SamplingParams(
        temperature=own.temperature,
        top_p=own.top_p,
        max_tokens=own.max_tokens or config.sampling.max_tokens,
        stop=config.sampling.stop,
        stop_token_ids=config.sampling.stop_token_ids,
    )


def fitting(
    config: RunConfig, sets: Sequence[HeldOut], tokenizer: Tokenizer, context: int, emit: Emit
) -> tuple[list[HeldOut], Tokenizer]:
    """Applies `task.long_prompts`: the sets without filtered prompts, and a tokenizer that truncates."""
    found = []
    for one in sets:
        fitted = fit_prompts(one.prompts, tokenizer, config.task, context, sampling_of(config).max_tokens)
        if fitted.long:
            choice = config.task.long_prompts
            emit(PromptsFitted(one.name, fitted.long, len(one.prompts), fitted.limit, choice))
        found.append(replace(one, prompts=fitted.prompts))
    return found, fitted.tokenizer if sets else tokenizer


def _requests(index: int, one: HeldOut, config: RunConfig, tokenizer: Tokenizer) -> list[tuple[Request, ...]]:
    """The requests of each prompt."""
    seed, params, answers = evaluation_seed(config), sampling_of(config), config.eval.answers
    found = []
    for place, prompt in enumerate(one.prompts):
        tokens = tuple(tokenizer.encode_prompt(prompt.content))
        first = (index << 32) + place * answers
        keys = [Key(seed, first + answer) for answer in range(answers)]
        # training may ask a prompt of the same id, whose lengths and texts are remembered under it
        named, keep = f"eval/{one.name}/{prompt.id}", isinstance(one.task, MultiTurnTask)
        found.append(tuple(Request(key, tokens, params, named, keep=keep) for key in keys))
    return found


# ---- the verb


def evaluate(config: RunConfig) -> None:
    """Evaluates `model.path` on the recipe's held-out prompts. Prints and writes the results."""
    console = Console(highlight=False)
    config = replace(config, run=replace(config.run, name=f"{config.run.name}-{_model_name(config.model.path)}"))
    with held(config, VERB) as directory, ExitStack() as stack:
        log = stack.enter_context(Watched(config, VERB, __version__, console=console))
        started = time.perf_counter()
        found: list[Evaluated] = []

        def emit(event: Event) -> None:
            log.emit(event)
            if isinstance(event, Evaluated):
                found.append(event)

        log.emit(StartupPhase("reading the prompts"))
        sets = held_out_of(config)
        for one in sets:
            stack.enter_context(one.judge)
        source = source_of(config.model)
        tokenizer = Tokenizer.load(source)
        sets, tokenizer = fitting(config, sets, tokenizer, read_config(source).max_positions, emit)
        log.emit(StartupPhase(f"opening the policy {config.model.path}"))
        policy = open_policy(config.model)
        engine = build_engine(policy, config, on_phase=lambda phase: log.emit(StartupPhase(phase)))
        log.emit(StartupFinished(seconds=time.perf_counter() - started))
        config = replace(config, eval=replace(config.eval, best=""))
        evaluation = Evaluation(config, sets, tokenizer, emit, keep=True)
        evaluation.run(0, lambda _, requests, __: answered(engine, requests, console))  # recipes' tasks have no replies
        write_new(directory / ROLLOUTS, partial(_write, evaluation.judged))
        log.emit(RunFinished(seconds=time.perf_counter() - started))
    for told in found:
        console.print(evaluation_in_words(told), markup=False, soft_wrap=True)
    console.print(f"Every answer is in {directory / ROLLOUTS}.", soft_wrap=True)


def _model_name(path: str) -> str:
    """A name for the policy in this directory: `run-step_20` for runs/run/checkpoints/step_20/policy."""
    parts = [part for part in Path(path).parts if part not in ("policy", "adapter", "checkpoints", "/", ".", "..")]
    named = "-".join(parts[-2:] if parts[-1:] and parts[-1].startswith("step_") else parts[-1:])
    return re.sub(r"[^\w.-]", "-", named) or "policy"


def answered(engine: EngineCore, requests: Sequence[Request], console: Console) -> Iterator[Completion]:
    """Every request's answer, once, as it ends. The console shows how many there are."""
    engine.submit(requests)
    finished = 0
    with WorkProgress("answers", len(requests), console, time.perf_counter) as shown:
        while not engine.idle:
            completions = engine.tick()
            finished += len(completions)
            shown.at(finished, f"{engine.running} running")
            yield from completions
    yield from engine.drain()  # raises if a request failed


def _write(judged: Mapping[str, Sequence[Judged]], file: Path) -> None:
    with file.open("w", encoding="utf-8") as lines:
        for name, groups in judged.items():
            for rollout in (rollout for one in groups for rollout in one.group.rollouts):
                completion = rollout.completion
                record = {
                    "set": name,
                    "prompt": rollout.prompt.id,
                    "answer": completion.text,
                    "reward": rollout.reward,
                    "tokens": len(completion.tokens),
                    "finish_reason": completion.finish_reason,
                }
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")
