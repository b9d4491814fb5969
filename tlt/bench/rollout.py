"""`tlt bench rollout`: decodes one long-tail rollout with every form of speculation, and explains the times.

The variants take turns, so that a slower machine slows all of them; plain decoding is first and last. Of several
rollouts of a variant, the one with the median makespan is described, and the fastest one is given beside it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from tlt.bench.lab import check_shape, widened
from tlt.bench.options import RolloutOptions, RolloutScale
from tlt.bench.paper import PaperComparison, beside_the_paper
from tlt.bench.report import BenchReport, Clock, Subject
from tlt.bench.variants import BANDIT, PLAIN, STAYS_OFF, TUNER, WARM, Variant, VariantRollout, VariantRunner, variants
from tlt.config import RunConfig
from tlt.event_builders import Lengths
from tlt.machine import describe
from tlt.policy import open_policy
from tlt.replay import common_start
from tlt.spec.shape import by_batch
from tlt.tasks.token_prompts import token_prompts

_TAIL_SHARE = 0.125  # of the requests: when no more are left, the tail begins
_LAST = 32  # requests below which the paper speculates


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """A measured cost with which tuners start."""

    tokens: int  # of one forward, each of another request, with an empty KV cache
    decode_ms: float


@dataclass(frozen=True, slots=True)
class RolloutRun:
    """One rollout of one variant, in the order of decoding."""

    variant: str
    makespan_s: float
    tokens_per_s: float
    tail_s: float
    cpu_s: float  # of this process
    capture_s: float  # part of the makespan


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """The completions, which are the same in every variant unless noted."""

    prompts: int
    group_size: int
    completions: int
    tokens: int
    median: int
    p90: int
    p99: int
    longest: int
    cap: int
    at_cap: int  # answers cut off
    temperature: float
    rows: int  # requests that may decode at the same time
    preemptions: int


@dataclass(frozen=True, slots=True)
class Time:
    variant: str
    makespan_s: float  # median
    fastest_s: float
    tokens_per_s: float
    speedup: float  # over plain, by medians
    fastest_speedup: float  # over plain, by the fastest rollouts
    tail_s: float  # while at most an eighth of the requests still ran
    tail_speedup: float | None  # None: the last requests ended in one tick, there was no tail
    last_32_s: float | None  # while at most 32 requests still ran; None: there are fewer
    last_32_speedup: float | None
    ticks: int


@dataclass(frozen=True, slots=True)
class Speculated:
    variant: str
    accept_length: float | None  # tokens per verify, pooled
    verifies: int
    speedup_per_accept: float | None  # speed-up over accept length
    off_share: float | None  # fraction of plain ticks
    identical: int  # completions equal to plain decoding's, token for token
    common_tokens: int  # before the first that differs, summed over completions
    of_tokens: int
    switches: int  # ticks with another shape than the tick before
    alarms: int
    drafting_s: float  # in which the host waited for drafts
    one_off_s: float  # draft-extends and graph captures
    explored_ticks: int | None  # ticks that a tuner chose in order to learn
    explored_s: float | None  # seconds lost by these ticks; below 0: gained


@dataclass(frozen=True, slots=True)
class ShapeShare:
    shape: str
    share: float

    def __str__(self) -> str:
        return f"{self.shape} {self.share:.0%}"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The shapes that a shape policy chose at one batch size."""

    variant: str
    batch: str
    ticks: int
    shapes: tuple[ShapeShare, ...]  # of these ticks, the most frequent first


@dataclass(frozen=True, slots=True)
class SpeculationVerdict:
    """Comparisons of the variants that were run, plain decoding included; None: not run."""

    best_fixed: str  # fastest fixed shape, plain decoding included
    best_fixed_s: float
    tuner_regret: float | None  # tuner's time over the best fixed shape's, minus 1; below 0: faster than any
    warm_tuner_regret: float | None
    bandit_regret: float | None
    tuner_over_plain: float | None
    off_over_plain: float | None  # time of speculation that stays off over plain decoding's, minus 1
    off_host_us: float  # host time that speculation that stays off adds to a tick
    off_host_share: float  # the same as a fraction of a plain tick
    plain_spread: float  # slowest over fastest plain rollout, minus 1: the machine's noise
    plain_drift: float  # last over first plain rollout, minus 1
    all_identical: bool


def bench_rollout(config: RunConfig, options: RolloutOptions) -> None:
    check_shape(options.shape)
    clock = Clock()
    config = _speculating(config)
    policy = open_policy(config.model)
    policy = replace(policy, model=widened(policy.model, options.shape))
    scale = options.scale(policy.model.embed.is_cuda)
    prompts = token_prompts(policy.tokenizer, scale.groups, options.prompts, options.raw)
    machine = describe(policy.model.embed.device, options.commit)
    subject = Subject(
        model=config.model.path,
        shape=f"widened to {options.shape}" if options.shape else "as it is",
        prompts=options.prompts.name if options.prompts else "built in",
        prompt_tokens_mean=mean(map(len, prompts)),
        seed=config.run.seed,
        temperature=config.sampling.temperature,
    )
    report = BenchReport(machine, subject, policy.model.config, scale, options.json)
    stage = VariantRunner(policy, config, prompts, scale)
    clock.lap()
    report.section("costs", [ForwardCost(size, 1e3 * seconds) for size, seconds in stage.decode_s.items()], clock)
    written: list[VariantRollout] = []
    wanted = variants(config.spec, exact=config.engine.exact)
    if report.section("runs", runs(stage, wanted, scale.repeats, written), clock):
        report.section("answers", [completions(stage, config, scale, written)], clock)
        report.section("time", time(written), clock)
        report.section("speculation", speculated(written), clock)
        report.section("shapes", chosen(written), clock)
        report.section("verdict", [verdict(written, stage.off_seconds())], clock)
        report.section("paper", paper(written), clock)
    report.close()


def _speculating(config: RunConfig) -> RunConfig:
    """The configuration; one without a drafter gets the suffix drafter, which needs no training."""
    if config.spec.drafter != "none":
        return config
    return replace(config, spec=replace(config.spec, drafter="suffix"))


# ---- sections


def runs(
    stage: VariantRunner, wanted: Sequence[Variant], repeats: int, written: list[VariantRollout]
) -> Iterator[RolloutRun]:
    """All rollouts, kept in `written`. The first of each variant is a warm-up: graphs, kernels, caches."""
    for variant in wanted:
        stage.write(variant)
    for variant in [*list(wanted) * repeats, wanted[0]]:
        done = stage.write(variant)
        written.append(done)
        yield RolloutRun(
            variant.name, done.seconds, done.tokens / done.seconds, _tail_s(done), done.cpu_s, done.capture_s
        )


def completions(
    stage: VariantRunner, config: RunConfig, scale: RolloutScale, written: Sequence[VariantRollout]
) -> AnswerStats:
    completions = written[0].completions
    lengths = Lengths.of([len(completion.tokens) for completion in completions])
    return AnswerStats(
        prompts=scale.groups,
        group_size=scale.group_size,
        completions=len(completions),
        tokens=written[0].tokens,
        median=lengths.p50,
        p90=lengths.p90,
        p99=lengths.p99,
        longest=lengths.longest,
        cap=stage.cap,
        at_cap=sum(completion.finish_reason == "length" for completion in completions),
        temperature=config.sampling.temperature,
        rows=config.engine.rows,
        preemptions=sum(completion.timing.preemptions for completion in completions),
    )


def time(written: Sequence[VariantRollout]) -> Iterator[Time]:
    plain = _of(written, PLAIN)
    for name in _names(written):
        rollouts = _of(written, name)
        done, base = _middle(rollouts), _middle(plain)
        tail, base_tail = _tail_s(done), _tail_s(base)
        last, base_last = _last_s(done), _last_s(base)
        yield Time(
            variant=name,
            makespan_s=done.seconds,
            fastest_s=_fastest_s(rollouts),
            tokens_per_s=done.tokens / done.seconds,
            speedup=base.seconds / done.seconds,
            fastest_speedup=_fastest_s(plain) / _fastest_s(rollouts),
            tail_s=tail,
            tail_speedup=base_tail / tail if tail and base_tail else None,
            last_32_s=last,
            last_32_speedup=base_last / last if last and base_last else None,
            ticks=done.ticks,
        )


def speculated(written: Sequence[VariantRollout]) -> Iterator[Speculated]:
    plain = _middle(_of(written, PLAIN))
    for name in _names(written):
        done = _middle(_of(written, name))
        found = done.speculation
        tuner = found.tuner if found else None
        length = found.accept_length if found and found.verifies else None
        pairs = list(zip(done.completions, written[0].completions, strict=True))
        yield Speculated(
            variant=name,
            accept_length=length,
            verifies=found.verifies if found else 0,
            speedup_per_accept=plain.seconds / done.seconds / length if length else None,
            off_share=found.off_share if found else None,
            identical=sum(mine.tokens == plain.tokens for mine, plain in pairs),
            common_tokens=sum(common_start(mine.tokens, plain.tokens) for mine, plain in pairs),
            of_tokens=written[0].tokens,
            switches=found.switches if found else 0,
            alarms=len(found.alarms) if found else 0,
            drafting_s=found.drafting_s if found else 0.0,
            one_off_s=found.one_off_s if found else 0.0,
            explored_ticks=tuner.explored_ticks if tuner else None,
            explored_s=tuner.explored_s if tuner else None,
        )


def paper(written: Sequence[VariantRollout]) -> Iterator[PaperComparison]:
    """Compares the warm tuner's figures with the paper's."""
    timed = next(one for one in time(written) if one.variant == WARM)
    drafted = next(one for one in speculated(written) if one.variant == WARM)
    return beside_the_paper(
        speedup=timed.speedup,
        last_32=timed.last_32_speedup,
        accept_length=drafted.accept_length,
        realised=drafted.speedup_per_accept,
    )


def chosen(written: Sequence[VariantRollout]) -> Iterator[Chosen]:
    """The choices of the variants with a shape policy."""
    for name in (BANDIT, TUNER, WARM):
        found = _middle(_of(written, name)).speculation
        by_bucket: dict[int, Counter[str]] = {}
        for largest, shape, ticks in by_batch(found.ticks.items()) if found else ():
            by_bucket.setdefault(largest, Counter())[shape] += ticks
        for largest, counts in sorted(by_bucket.items(), reverse=True):
            total = counts.total()
            shares = tuple(ShapeShare(shape, ticks / total) for shape, ticks in counts.most_common())
            yield Chosen(name, f"{largest // 2 + 1}–{largest}" if largest > 2 else str(largest), total, shares)


def verdict(written: Sequence[VariantRollout], off_s: float) -> SpeculationVerdict:
    plain = _middle(_of(written, PLAIN))
    fixed = [_middle(_of(written, done.variant.name)) for done in written if done.variant.fixed]
    best = min([plain, *fixed], key=lambda done: done.seconds)
    spans = [done.seconds for done in _of(written, PLAIN)]
    expected = [completion.tokens for completion in written[0].completions]
    return SpeculationVerdict(
        best_fixed=best.variant.name,
        best_fixed_s=best.seconds,
        tuner_regret=_above(best, _of(written, TUNER)),
        warm_tuner_regret=_above(best, _of(written, WARM)),
        bandit_regret=_above(best, _of(written, BANDIT)),
        tuner_over_plain=_above(plain, _of(written, TUNER)),
        off_over_plain=_above(plain, _of(written, STAYS_OFF)),
        off_host_us=1e6 * off_s,
        off_host_share=off_s * plain.ticks / plain.seconds,
        plain_spread=max(spans) / min(spans) - 1.0,
        plain_drift=spans[-1] / spans[0] - 1.0,
        all_identical=all([completion.tokens for completion in done.completions] == expected for done in written),
    )


# ---- arithmetic


def _names(written: Sequence[VariantRollout]) -> list[str]:
    return list(dict.fromkeys(done.variant.name for done in written))


def _of(written: Sequence[VariantRollout], name: str) -> list[VariantRollout]:
    return [done for done in written if done.variant.name == name]


def _middle(rollouts: Sequence[VariantRollout]) -> VariantRollout:
    """The rollout with the median makespan; for an even number, the faster of the two."""
    return sorted(rollouts, key=lambda done: done.seconds)[(len(rollouts) - 1) // 2]


def _above(base: VariantRollout, rollouts: Sequence[VariantRollout]) -> float | None:
    """Relative difference of the median makespans; None if one is missing."""
    return _middle(rollouts).seconds / base.seconds - 1.0 if rollouts else None


def _fastest_s(rollouts: Sequence[VariantRollout]) -> float:
    return min(done.seconds for done in rollouts)


def _tail_s(done: VariantRollout) -> float:
    return done.tail_s(max(1, int(_TAIL_SHARE * len(done.completions))))


def _last_s(done: VariantRollout) -> float | None:
    return done.tail_s(_LAST) if len(done.completions) >= _LAST else None
