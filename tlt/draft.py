"""`tlt draft`: a drafter for a policy, trained on the policy's own answers, and drafters in other engines' formats.

Owns the order of things: the policy answers prompts, the drafter learns from its states, and what it reaches before and
after is measured on answers it never learned from; the latter is kept beside it. Decides nothing about learning.
"""

import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tlt.bench.prompts import token_prompts
from tlt.config import ModelSettings, RunConfig
from tlt.engine.build import drafter_shape, open_drafter
from tlt.engine.engine import Engine
from tlt.engine.request import Request
from tlt.errors import ConfigError, TaskError
from tlt.kernels.noise import as_int64
from tlt.policy import Policy, open_policy
from tlt.spec.eagle import Eagle, draft_vocabulary
from tlt.spec.eagle_files import FORMATS, Origin, load_drafter, read_drafter_config, save_drafter
from tlt.spec.record import FILE as RECORD_FILE
from tlt.spec.record import DraftRecord, keep_better, read_record
from tlt.tasks.choose import task_of
from tlt.train.drafter import DrafterBatch, DrafterTrainer, policy_states
from tlt.train.drafter_measure import DEPTH, WIDTHS, Acceptance, Drawn, Reach, accept_length
from tlt.train.kept_states import filling_s, states_for
from tlt.train.pacing import steps_until, until
from tlt.train.packing import Example, pack
from tlt.train.supervised import batches, endless
from tlt.types import Completion, Key

_FILLING = 0.25  # of the time left for training may pass before the first step
_ASKED_AGAIN = 0.1  # of the held-out answers may be to prompts that were learned from: a task asks some of them twice

_Lessons = Callable[[int], Iterator[DrafterBatch]]  # of so many steps


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a training: steps it took, and what the drafter reaches on answers held out."""

    steps: int
    before: Acceptance
    after: Acceptance


def draft_train(config: RunConfig, prompts: str, out: str, policy: Policy | None = None) -> Trained:
    """Trains a drafter from nothing for `config.model` on its answers to `prompts` (a file or a task) and saves it.

    `policy` is `config.model`, for whoever has it open already.
    """
    console = Console(highlight=False)
    spent = _Spent()
    with _place_beside(out, "--out") as place:
        policy = policy or open_policy(config.model)
        spent.on("opening")
        answers = _answers(config, policy, prompts, config.draft.answers + config.draft.held_out, console)
        learned, held_out = (_told(some) for some in (answers[: config.draft.answers], answers[config.draft.answers :]))
        drafter = _new_drafter(config, policy, learned)
        spent.on("answers")
        held = _held(config, policy, drafter.config.taps, held_out)
        before = _measure(drafter, policy, held)
        measuring_s = spent.on("measuring")
        console.print(f"{len(learned)} answers to learn from; so far: {spent}", soft_wrap=True)
        deadline_s = spent.began_s + config.draft.seconds - measuring_s if config.draft.seconds else inf
        lessons, steps = _planned(config, policy, drafter, learned, deadline_s)
        paced = replace(config, draft=replace(config.draft, steps=steps))
        tokens = _train(paced, policy, drafter, until(deadline_s, lessons(steps)), console)
        seconds = spent.on("training")
        after = _measure(drafter, policy, held)
        spent.on("measuring")
        record = DraftRecord(after.ranks, after.tokens, config.sampling.temperature)
        save_drafter(drafter, place, policy.model.head_weight, _origin(config.model.path, policy), record=record)
        spent.on("saving")
    _tell(console, after, before)
    unrolled = max(0, len(tokens) - config.draft.single_steps) if config.draft.unroll > 1 else 0
    pace = f"{sum(tokens)} tokens, {seconds:.0f} s, {sum(tokens) / seconds:,.0f} tokens/s"
    console.print(f"{len(tokens)} steps ({unrolled} unrolled), {pace}", soft_wrap=True)
    if len(tokens) < config.draft.steps:
        fit = f"{len(tokens)} of {config.draft.steps} steps fit into {config.draft.seconds:g} s"
        console.print(f"{fit}: for more, raise draft.seconds", soft_wrap=True)
    elif not unrolled:
        hint = "raise draft.steps above draft.single_steps, and draft.unroll above 1"
        console.print(f"only the first token of a draft was trained: for more, {hint}", soft_wrap=True)
    console.print(f"time: {spent}", soft_wrap=True)
    console.print(f"saved {out}", soft_wrap=True)
    return Trained(len(tokens), before, after)


def draft_measure(config: RunConfig, source: str, prompts: str, policy_path: str | None) -> None:
    """Measures the drafter at `source` on its policy's answers to `prompts`, and keeps the record beside it unless the
    one that is there was measured on more."""
    path = _policy_of(source, read_drafter_config(Path(source)), policy_path)
    console = Console(highlight=False)
    spec = replace(config.spec, drafter="eagle", path=source)
    config = replace(config, model=replace(config.model, path=path), spec=spec)
    policy = open_policy(config.model)
    drafter = open_drafter(policy, config)
    answers = _told(_answers(config, policy, prompts, config.draft.held_out, console, skip=config.draft.answers))
    found = _measure(drafter, policy, _held(config, policy, drafter.config.taps, answers))
    _tell(console, found)
    record = DraftRecord(found.ranks, found.tokens, config.sampling.temperature)
    kept = keep_better(record, Path(source))
    if kept == record:
        console.print(f"tuners that use {source} start from this", soft_wrap=True)
        return
    console.print(
        f"{source} has a record of {kept.places} places already (temperature {kept.temperature:g}), which is kept: "
        f"this one has {record.places}. To replace it, raise draft.held_out, or remove {RECORD_FILE} and measure again",
        style="bold yellow",
        soft_wrap=True,
    )


def draft_export(source: str, target: str, form: str, policy_path: str | None) -> None:
    """Writes the drafter at `source` once more, in the format asked for, with the head of the policy it belongs to."""
    formats = [known for known in FORMATS if known == form]
    if not formats:
        raise ConfigError(f"--format is {form!r}; expected {' or '.join(FORMATS)}")
    words = read_drafter_config(Path(source))
    path = _policy_of(source, words, policy_path)
    with _place_beside(target, "TARGET") as place:
        policy = open_policy(ModelSettings(path=path, device="cpu", dtype="float32"))
        head_VD, embed_VD = policy.model.head_weight, policy.model.embed
        named = words.get("torch_dtype", "float32")
        drafter = load_drafter(
            source, policy.model.config, window=RunConfig().draft.window, head_VD=head_VD, dtype=getattr(torch, named)
        )
        embedding = embed_VD if formats[0] == "speculators" else None
        origin, record = _origin(path, policy), read_record(source)
        save_drafter(drafter, place, head_VD, origin, form=formats[0], embed_VD=embedding, record=record)
    Console(highlight=False).print(f"saved {target} in the {form} format", soft_wrap=True)


def _policy_of(source: str, words: Mapping[str, Any], named: str | None) -> str:
    path = named or (words.get("tlt") or {}).get("policy")
    if path is None:
        raise ConfigError(f"{source} does not say which policy it belongs to; name it with --policy")
    return str(path)


@contextmanager
def _place_beside(out: str, argument: str) -> Iterator[Path]:
    """An empty directory that gets the name `out` once all is in it, or is removed. What is at `out` already stays."""
    target = Path(out).resolve()
    if target.is_file():
        raise ConfigError(f"{argument} {out} is a file; expected a directory, which need not be there yet")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(
            f"{argument} {out} holds something already, and nothing is written over; "
            f"give {argument} another directory, or remove what is there"
        )
    place = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        place.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{argument} {out} cannot be made ({error.strerror}); give {argument} a directory that can"
        ) from None
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, place)
        yield place
        undo.pop_all()
    try:
        place.rename(target)
    except OSError as error:
        raise ConfigError(
            f"{argument} {out} was taken meanwhile ({error.strerror}); the drafter is at {place}, to be moved"
        ) from None


# ---- answers


@dataclass(frozen=True, slots=True)
class _Answer:
    example: Example
    key: Key


def _answers(
    config: RunConfig, policy: Policy, prompts: str, count: int, console: Console, skip: int = 0
) -> list[_Answer | None]:
    """To so many prompts behind the first ones; none where there is nothing to draft. Training learns from the first
    `draft.answers`, and measures on those behind them."""
    every = _prompts(config, policy, prompts, skip + count)
    if warning := _not_held_out(every[: config.draft.answers], every[config.draft.answers :]):
        console.print(warning, style="bold yellow", soft_wrap=True)
    requests = [
        Request(Key(config.run.seed, number), tokens, config.sampling)
        for number, tokens in enumerate(every[skip:], skip)
    ]
    done = {completion.key: completion for completion in _complete(config, policy, requests, console)}
    return [_answer(done[request.key]) for request in requests]


def _not_held_out(learned: Sequence[tuple[int, ...]], held_out: Sequence[tuple[int, ...]]) -> str:
    """In words, if many of the prompts to measure on are learned from: a short file is gone through again and again."""
    known = set(learned)
    again = sum(prompt in known for prompt in held_out)
    if again <= _ASKED_AGAIN * len(held_out):
        return ""
    different = len(known.union(held_out))
    return (
        f"{again} of the {len(held_out)} held-out answers are to prompts that are learned from, too: what is measured "
        f"on them says nothing of other prompts. Give {len(learned) + len(held_out)} different prompts (there "
        f"{'is' if different == 1 else 'are'} {different}), or lower draft.answers and draft.held_out"
    )


def _told(answers: Sequence[_Answer | None]) -> list[_Answer]:
    """Without those of one token: they hold nothing to draft."""
    found = [answer for answer in answers if answer is not None]
    if not found:
        raise TaskError("every answer ended with its first token: nothing to draft; ask other prompts")
    return found


def _answer(completion: Completion) -> _Answer | None:
    if len(completion.tokens) < 2:
        return None
    tokens = completion.prompt_tokens + completion.tokens
    return _Answer(Example(tokens, len(completion.prompt_tokens)), completion.key)


def _prompts(config: RunConfig, policy: Policy, prompts: str, count: int) -> list[tuple[int, ...]]:
    if prompts == config.task.name:
        asked = task_of(config).sample(0, count)
        return [tuple(policy.tokenizer.encode_prompt(prompt.content)) for prompt in asked]
    if not Path(prompts).is_file():
        raise TaskError(f"{prompts}: no such file; expected a JSONL file of prompts, or the task `{config.task.name}`")
    return token_prompts(policy.tokenizer, count, Path(prompts), raw=False)


def _complete(config: RunConfig, policy: Policy, requests: Sequence[Request], console: Console) -> list[Completion]:
    engine = Engine(policy.model, policy.tokenizer, config.engine)
    engine.compile(filtered=config.sampling.filtered)
    engine.submit(requests)
    done: list[Completion] = []
    with _progress("answers", console) as progress:
        bar = progress.add_task("", total=len(requests), note="")
        while not engine.idle:
            done += engine.tick()
            progress.update(bar, completed=len(done), note=f"{engine.running} running")
    graphs = engine.report().graphs
    if graphs:
        console.print(f"{graphs.graphs} graphs captured in {graphs.capture_s:.0f} s")
    return done + engine.drain()  # raises if a request failed


# ---- learning and measuring


def _new_drafter(config: RunConfig, policy: Policy, learned: Sequence[_Answer]) -> Eagle:
    model, shape = policy.model, drafter_shape(policy, config.draft)
    drafter = Eagle(shape, dtype=model.embed.dtype, device=model.embed.device)
    # by way of an array: torch reads a list of numbers several times slower
    written = array("q", chain.from_iterable(answer.example.tokens for answer in learned))
    counts_V = torch.bincount(torch.frombuffer(written, dtype=torch.int64), minlength=model.config.vocab)
    ids = draft_vocabulary(counts_V, shape.draft_vocab) if shape.reduced else None
    drafter.init_weights(config.run.seed, ids)
    return drafter


def _lessons(
    config: RunConfig, policy: Policy, drafter: Eagle, learned: Sequence[_Answer], room: int | None = None
) -> _Lessons:
    """Batches of so many steps: pass after pass over the answers, always the same. In `room` bytes states are kept."""
    examples, size = [answer.example for answer in learned], config.draft.tokens_per_batch
    longest = max(size, *(len(example.tokens) for example in examples))
    passes = config.draft.steps * size / sum(len(example.tokens) for example in examples)
    states = states_for(policy.model, examples, drafter.config.taps, passes=passes, room=room)

    def batches_of(steps: int) -> Iterator[DrafterBatch]:
        stream = islice(batches(endless(examples, config.run.seed), size), steps)
        return states(row for batch in stream for row in pack(batch, longest))  # a batch fits a row

    return batches_of


def _planned(
    config: RunConfig, policy: Policy, drafter: Eagle, learned: Sequence[_Answer], deadline_s: float
) -> tuple[_Lessons, int]:
    """What it learns from, and in how many steps: fewer where all of them would last beyond the deadline. Then the
    policy's states are kept only if computing them all takes a small part of the time."""
    if deadline_s == inf:
        return _lessons(config, policy, drafter, learned), config.draft.steps
    model, draft = policy.model, config.draft
    examples = [answer.example for answer in learned]
    filled_s = filling_s(model, examples, drafter.config.taps, draft.tokens_per_batch)
    in_time = filled_s < _FILLING * (deadline_s - time.perf_counter())
    lessons = _lessons(config, policy, drafter, learned, room=None if in_time else 0)
    every = partial(lessons, draft.steps)
    return lessons, steps_until(deadline_s, drafter, model.head_weight, model.embed, draft, every)


def _train(
    config: RunConfig, policy: Policy, drafter: Eagle, lessons: Iterable[DrafterBatch], console: Console
) -> list[int]:
    """Tokens of every step it took."""
    trainer = DrafterTrainer(drafter, policy.model.head_weight, policy.model.embed, config.draft)
    tokens: list[int] = []
    with _progress("drafter", console) as progress:
        bar = progress.add_task("", total=config.draft.steps, note="")
        for result in trainer.micro_steps(lessons):
            tokens.append(result.tokens)
            progress.update(bar, advance=1, note=f"loss {result.loss:.4f}")
    return tokens


def _held(config: RunConfig, policy: Policy, taps: Sequence[int], answers: Sequence[_Answer]) -> list[Drawn]:
    examples = [answer.example for answer in answers]
    room = max(config.draft.tokens_per_batch, *(len(example.tokens) for example in examples))
    held = []
    for row in pack(examples, room):
        keys = [answers[member].key for member in row.members]
        held.append(
            Drawn(
                policy_states(policy.model, row, taps),
                torch.tensor([as_int64(key.seed) for key in keys]),
                torch.tensor([as_int64(key.request) for key in keys]),
                torch.full((len(keys),), config.sampling.temperature),
            )
        )
    return held


def _measure(drafter: Eagle, policy: Policy, held: Sequence[Drawn]) -> Acceptance:
    return accept_length(drafter, held, policy.model.head_weight, policy.model.embed)


def _origin(path: str, policy: Policy) -> Origin:
    return Origin(path, tuple(policy.model.config.source.get("architectures") or ()))


# ---- telling


class _Spent:
    """Seconds, by what they were spent on."""

    def __init__(self) -> None:
        self.began_s = self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def on(self, what: str) -> float:
        """Since the last call; counted together with what was spent on it before."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds
        return seconds

    def __str__(self) -> str:
        return ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self._seconds.items())


def _progress(what: str, console: Console) -> Progress:
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console, transient=True)


def _tell(console: Console, found: Acceptance, before: Acceptance | None = None) -> None:
    table = Table()
    for name in ("drafts", "first hit", *(f"width {width}" for width in WIDTHS)):
        table.add_column(name, justify="left" if name == "drafts" else "right", no_wrap=True)
    was = [before.greedy, before.shared, before.fitted] if before else [None] * 3
    names = ("greedy", "β = 1", f"β = {found.beta:g} (fitted)")
    for name, old, new in zip(names, was, (found.greedy, found.shared, found.fitted), strict=True):
        told = [_figures(reach) for reach in (old, new) if reach is not None]
        table.add_row(name, *map(" → ".join, zip(*told, strict=True)))
    title = f"Accept length over {DEPTH} draft tokens, {found.tokens} places of held-out answers"
    console.print(title, style="italic", soft_wrap=True)
    console.print(table)


def _figures(reach: Reach) -> list[str]:
    return [f"{reach.first_hit:.3f}", *(f"{length:.2f}" for length in reach.lengths)]
