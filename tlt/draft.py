"""`tlt draft`: a drafter for a policy, trained on the policy's own answers, and drafters in other engines' formats.

Owns the order of things: the policy answers prompts, the drafter learns from its states, and what it reaches before and
after is measured on answers it never learned from; the latter is kept beside it. Divides the time where it is limited.
Decides nothing about learning.
"""

import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, islice
from math import inf
from operator import itemgetter
from os.path import isfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tlt.config import DraftSettings, ModelSettings, RunConfig
from tlt.drafting.answers import Answer, write_answers
from tlt.engine.request import Request
from tlt.errors import ConfigError, TaskError
from tlt.kernels.sampling.noise import as_int64
from tlt.outputs import check_new, write_new
from tlt.policy import Policy, open_policy
from tlt.spec.eagle import Eagle, draft_vocabulary
from tlt.spec.eagle_files import (
    FORMATS,
    Origin,
    drafter_shape,
    load_drafter,
    new_drafter,
    open_drafter,
    read_drafter_config,
    save_drafter,
)
from tlt.spec.record import FILE as RECORD_FILE
from tlt.spec.record import DraftRecord, keep_better, read_record
from tlt.tasks.choose import task_of
from tlt.tasks.token_prompts import token_prompts
from tlt.train.drafter import DrafterBatch, DrafterTrainer, policy_states
from tlt.train.drafter_measure import DEPTH, WIDTHS, DrafterAcceptance, KeyedBatch, Reach, accept_length
from tlt.train.kept_states import filling_s, states_for
from tlt.train.pacing import Clock, Spent, TimeLimit
from tlt.train.packing import pack
from tlt.train.supervised import batches, endless
from tlt.types import Key
from tlt.watch.progress import WorkProgress

# Of a time limit:
_WRITING = 0.5  # of what is left after opening: then answers end as they are
_MEASURING = 0.1  # of what is left after writing, for the first measurement; the last one takes no longer
_SAVING = 0.03  # of all of it
_FILLING = 0.25  # of the time left for training may pass before the first step
_ASKED_AGAIN = 0.1  # of the held-out answers may be to prompts that were learned from: a task asks some of them twice
# Where the settings leave sizes to the device:
_ON_GPU = {"answers": 512, "held_out": 64, "tokens_per_batch": 2048}
_ON_CPU = {"answers": 128, "held_out": 32, "tokens_per_batch": 1024}
_UNKNOWN = (
    "the drafter does not say how many of these prompts it learned from; if it was the first N, measure with "
    "--draft.answers N"
)
_LEARNED = 0.1  # first hits that a drafter must gain, or it has learned nothing to speak of


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a training: steps it took, and what the drafter reaches on answers held out."""

    steps: int
    before: DrafterAcceptance
    after: DrafterAcceptance


def draft_train(
    config: RunConfig,
    prompts: str,
    out: str,
    policy: Policy | None = None,
    *,
    clock: Clock = time.perf_counter,
    began_s: float | None = None,
) -> Trained:
    """Trains a drafter from nothing for `config.model` on its answers to `prompts` (a file or a task) and saves it.

    `policy` is `config.model`, where it is open already. `began_s`: when the command began, by the clock; now if None.
    """
    console = Console(highlight=False)
    spent = Spent(clock, config.draft.seconds, began_s)
    check_new(Path(out), "--out", directory=True)
    policy = policy or open_policy(config.model)
    config = replace(config, draft=_sized(config.draft, on_gpu=policy.model.embed.is_cuda))
    spent.on("opening")
    learned, held_out = _both_answers(config, policy, prompts, spent, console)
    drafter = _new_drafter(config, policy, learned)
    check_new(Path(out), "--out", sum(weight.nbytes for weight in drafter.parameters()), directory=True)
    spent.on("answers")
    held: list[KeyedBatch] = []
    every = _held(config, policy, drafter.config.taps, held_out, held)
    before = _measure(drafter, policy, spent.within(_MEASURING).fitting(every))
    measuring_s = spent.on("measuring")
    what = f"{len(learned)} answers to learn from; first hits of a drafter that has learned nothing"
    console.print(f"{what}: {before.fitted.first_hit:.3f}; so far: {spent}", soft_wrap=True)
    tokens, unrolled = _train(config, policy, drafter, learned, spent, measuring_s, console)
    seconds = spent.on("training")
    after = _measure(drafter, policy, held)
    spent.on("measuring")
    record = DraftRecord(after.ranks, after.tokens, config.sampling.temperature)
    origin = _origin(config.model.path, policy, prompts=config.draft.answers)
    write_new(Path(out), lambda place: save_drafter(drafter, place, policy.model.head_weight, origin, record=record))
    spent.on("saving")
    _tell(console, after, before)
    _tell_steps(console, config.draft, tokens, unrolled, seconds)
    if after.fitted.first_hit < before.fitted.first_hit + _LEARNED:
        _tell_unlearned(console, before, after)
    console.print(f"time: {spent}", soft_wrap=True)
    console.print(f"saved {out}", soft_wrap=True)
    return Trained(len(tokens), before, after)


def draft_measure(config: RunConfig, source: str, prompts: str, policy_path: str | None) -> None:
    """Measures the drafter at `source` on its policy's answers to `prompts`, and keeps the record beside it if they are
    held out. A record that was measured on more stays, as any does if the drafter does not say what it learned from."""
    words = read_drafter_config(Path(source))
    path = _policy_of(source, words, policy_path)
    console = Console(highlight=False)
    spec = replace(config.spec, drafter="eagle", path=source)
    config = replace(config, model=replace(config.model, path=path), spec=spec)
    policy = open_policy(config.model)
    drafter = open_drafter(policy, config)
    skipped = config.draft.answers or _learned_prompts(words)
    config = replace(config, draft=replace(_sized(config.draft, on_gpu=policy.model.embed.is_cuda), answers=skipped))
    every = _prompts(config, policy, prompts, skipped + config.draft.held_out)
    leak = _not_held_out(every[:skipped], every[skipped:])
    requests = _requests(config, every, skip=skipped)
    answers, _ = _written(config, policy, requests, TimeLimit(), console, time.perf_counter)
    held = _held(config, policy, drafter.config.taps, _told(list(answers.values())), [])
    found = _measure(drafter, policy, held)
    _tell(console, found)
    record = DraftRecord(found.ranks, found.tokens, config.sampling.temperature)
    if leak:
        console.print(f"no record of this is kept: {leak}", style="bold yellow", soft_wrap=True)
        return
    if not skipped:
        console.print(_UNKNOWN, style="bold yellow", soft_wrap=True)
    kept = (None if skipped else read_record(source)) or keep_better(record, Path(source))
    if kept == record:
        console.print(f"tuners that use {source} start from this", soft_wrap=True)
        return
    cure = "raise draft.held_out" if skipped else "give draft.answers"
    console.print(
        f"{source} has a record of {kept.places} places already (temperature {kept.temperature:g}), which is kept: "
        f"this one has {record.places}. To replace it, {cure}, or remove {RECORD_FILE} and measure again",
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
    check_new(Path(target), "TARGET", directory=True)
    policy = open_policy(ModelSettings(path=path, device="cpu", dtype="float32"))
    head_VD, embed_VD = policy.model.head_weight, policy.model.embed
    named = words.get("torch_dtype", "float32")
    drafter = load_drafter(
        source, policy.model.config, window=RunConfig().draft.window, head_VD=head_VD, dtype=getattr(torch, named)
    )
    embedding = embed_VD if formats[0] == "speculators" else None
    origin, record = _origin(path, policy, prompts=_learned_prompts(words)), read_record(source)
    save = partial(save_drafter, form=formats[0], embed_VD=embedding, record=record)
    write_new(Path(target), lambda place: save(drafter, place, head_VD, origin))
    Console(highlight=False).print(f"saved {target} in the {form} format", soft_wrap=True)


def _policy_of(source: str, words: Mapping[str, Any], named: str | None) -> str:
    path = named or (words.get("tlt") or {}).get("policy")
    if path is None:
        raise ConfigError(f"{source} does not say which policy it belongs to; name it with --policy")
    return str(path)


def _learned_prompts(words: Mapping[str, Any]) -> int:
    """How many of the prompts the drafter was trained with, from the first on, it learned from; 0: not known."""
    return int((words.get("tlt") or {}).get("learned_prompts", 0))


# ---- answers


def _sized(draft: DraftSettings, *, on_gpu: bool) -> DraftSettings:
    """With sizes where the settings leave them to the device."""
    defaults = _ON_GPU if on_gpu else _ON_CPU
    sizes: dict[str, Any] = {name: getattr(draft, name) or size for name, size in defaults.items()}
    return replace(draft, **sizes)


def _both_answers(
    config: RunConfig, policy: Policy, prompts: str, spent: Spent, console: Console
) -> tuple[list[Answer], list[Answer]]:
    """To learn from and to measure on; both are cut short alike where time is."""
    learned = config.draft.answers
    asked = _prompts(config, policy, prompts, learned + config.draft.held_out)
    if leak := _not_held_out(asked[:learned], asked[learned:]):
        console.print(leak, style="bold yellow", soft_wrap=True)
    every = _requests(config, asked)
    parts = every[:learned], every[learned:]
    order = [(place / len(part), request) for part in parts for place, request in enumerate(part)]
    in_turn = [request for _, request in sorted(order, key=itemgetter(0))]
    limit = spent.within(_WRITING)
    found, whole = _written(config, policy, in_turn, limit, console, spent.clock)
    both = tuple([found[request.key] for request in part if request.key in found] for part in parts)
    if whole < len(every):
        if not all(both):
            raise _out_of_time(config, spent, "writing answers")
        cut = f"{whole} of {len(every)} answers are whole, others were cut short or not begun, for lack of time"
        hint = "for more, raise draft.seconds, or lower draft.answers or sampling.max_tokens"
        console.print(f"{cut}; {hint}", style="bold yellow", soft_wrap=True)
    return _told(both[0]), _told(both[1])


def _out_of_time(config: RunConfig, spent: Spent, what: str) -> ConfigError:
    return ConfigError(
        f"draft.seconds is {config.draft.seconds:g}, which left no time for {what} (so far: {spent}); "
        "raise it, or lower draft.answers, draft.held_out or sampling.max_tokens"
    )


def _requests(config: RunConfig, every: Sequence[tuple[int, ...]], skip: int = 0) -> list[Request]:
    """To the prompts behind the first `skip`. Training learns from the first `draft.answers` of them."""
    return [
        Request(Key(config.run.seed, number), tokens, config.sampling)
        for number, tokens in enumerate(every[skip:], skip)
    ]


def _written(
    config: RunConfig, policy: Policy, requests: Sequence[Request], limit: TimeLimit, console: Console, clock: Clock
) -> tuple[dict[Key, Answer], int]:
    """Answers, and how many of them are whole."""
    written = write_answers(policy, config, requests, limit, console, clock)
    if written.graphs:
        console.print(f"{written.graphs} graphs captured in {written.capture_s:.0f} s")
    return written.answers, written.whole


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


def _told(answers: Sequence[Answer]) -> list[Answer]:
    if not answers:
        raise TaskError("every answer ended with its first token: nothing to draft; ask other prompts")
    return list(answers)


def _prompts(config: RunConfig, policy: Policy, prompts: str, count: int) -> list[tuple[int, ...]]:
    if prompts == config.task.name:
        asked = task_of(config).sample(0, count)
        return [tuple(policy.tokenizer.encode_prompt(prompt.content)) for prompt in asked]
    if not isfile(prompts):
        raise TaskError(f"{prompts}: no such file; expected a file of prompts, or the task `{config.task.name}`")
    return token_prompts(policy.tokenizer, count, Path(prompts), raw=False)


# ---- learning and measuring


def _new_drafter(config: RunConfig, policy: Policy, learned: Sequence[Answer]) -> Eagle:
    shape = drafter_shape(policy.model.config, config.draft)
    # by way of an array: torch reads a list of numbers several times slower
    written = array("q", chain.from_iterable(answer.example.tokens for answer in learned))
    counts_V = torch.bincount(torch.frombuffer(written, dtype=torch.int64), minlength=policy.model.config.vocab)
    return new_drafter(policy, config, draft_vocabulary(counts_V, shape.draft_vocab) if shape.reduced else None)


def _lessons(
    config: RunConfig, policy: Policy, drafter: Eagle, learned: Sequence[Answer], limit: TimeLimit, clock: Clock
) -> Iterator[DrafterBatch]:
    """A batch a step: pass after pass over the answers. The policy's states are kept where they fit, unless computing
    them all first takes more than a small part of the time."""
    model, taps = policy.model, drafter.config.taps
    examples, size = [answer.example for answer in learned], config.draft.tokens_per_batch
    longest = max(size, *(len(example.tokens) for example in examples))
    passes = config.draft.steps * size / sum(len(example.tokens) for example in examples)
    limited = limit.left_s < inf
    in_time = not limited or filling_s(model, examples, taps, size, clock) < _FILLING * limit.left_s
    states = states_for(model, examples, taps, passes=passes, room=None if in_time else 0)
    stream = islice(batches(endless(examples, config.run.seed), size), config.draft.steps)
    return states(row for batch in stream for row in pack(batch, longest))  # a batch fits a row


def _train(
    config: RunConfig,
    policy: Policy,
    drafter: Eagle,
    learned: Sequence[Answer],
    spent: Spent,
    measuring_s: float,
    console: Console,
) -> tuple[list[int], int]:
    """Tokens of every step it took, until the last one or as many as time allows; and how many unrolled."""
    draft, model = config.draft, policy.model
    lessons = _lessons(config, policy, drafter, learned, spent.until(1.0 - _SAVING, less_s=measuring_s), spent.clock)
    limit = spent.until(1.0 - _SAVING, less_s=measuring_s)  # from here on: the schedule begins with the first step
    trainer = DrafterTrainer(drafter, model.head_weight, model.embed, draft, progress=lambda: limit.progress)
    work = list(accumulate(1 if step < draft.single_steps else draft.unroll for step in range(draft.steps)))
    tokens: list[int] = []
    with WorkProgress("drafter steps", draft.steps, console, spent.clock) as shown:
        for result in trainer.micro_steps(limit.fitting(lessons, lambda: trainer.unrolled)):
            tokens.append(result.tokens)
            steps, over = len(tokens), f" over {draft.unroll} draft steps" if trainer.unrolled_steps else ""
            shown.at(steps, f"loss {result.loss:.4f}{over}", work=work[steps - 1] / work[-1], most_s=limit.left_s)
    if not tokens:
        raise _out_of_time(config, spent, "a step")
    return tokens, trainer.unrolled_steps


def _held(
    config: RunConfig, policy: Policy, taps: Sequence[int], answers: Sequence[Answer], held: list[KeyedBatch]
) -> Iterator[KeyedBatch]:
    """Batches of answers to measure on, computed one by one and put into `held`, to measure on them again."""
    examples = [answer.example for answer in answers]
    room = max(config.draft.tokens_per_batch, *(len(example.tokens) for example in examples))
    for row in pack(examples, room):
        keys = [answers[member].key for member in row.members]
        drawn = KeyedBatch(
            policy_states(policy.model, row, taps),
            torch.tensor([as_int64(key.seed) for key in keys]),
            torch.tensor([as_int64(key.request) for key in keys]),
            torch.full((len(keys),), config.sampling.temperature),
        )
        held.append(drawn)
        yield drawn


def _measure(drafter: Eagle, policy: Policy, held: Iterable[KeyedBatch]) -> DrafterAcceptance:
    return accept_length(drafter, held, policy.model.head_weight, policy.model.embed)


def _origin(path: str, policy: Policy, *, prompts: int) -> Origin:
    return Origin(path, tuple(policy.model.config.source.get("architectures") or ()), prompts)


# ---- telling


def _tell(console: Console, found: DrafterAcceptance, before: DrafterAcceptance | None = None) -> None:
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


def _tell_steps(console: Console, draft: DraftSettings, tokens: Sequence[int], unrolled: int, seconds: float) -> None:
    pace = f"{sum(tokens)} tokens, {seconds:.0f} s, {sum(tokens) / seconds:,.0f} tokens/s"
    console.print(f"{len(tokens)} steps ({unrolled} unrolled), {pace}", soft_wrap=True)
    if len(tokens) < draft.steps:
        fit = f"{len(tokens)} of {draft.steps} steps fit into {draft.seconds:g} s"
        console.print(f"{fit}: for more, raise draft.seconds", soft_wrap=True)
    elif not unrolled:
        hint = "raise draft.steps above draft.single_steps, and draft.unroll above 1"
        console.print(f"only the first token of a draft was trained: for more, {hint}", soft_wrap=True)


def _tell_unlearned(console: Console, before: DrafterAcceptance, after: DrafterAcceptance) -> None:
    hits = f"{after.fitted.first_hit:.3f} of its first tokens are the policy's, {before.fitted.first_hit:.3f} untrained"
    cure = "raise draft.steps or draft.seconds, or lower draft.learning_rate if the loss grew"
    console.print(f"this drafter has learned next to nothing: {hits}; {cure}", style="bold red", soft_wrap=True)


def _figures(reach: Reach) -> list[str]:
    return [f"{reach.first_hit:.3f}", *(f"{length:.2f}" for length in reach.lengths)]
