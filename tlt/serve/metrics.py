"""`GET /metrics`: Prometheus text, with vLLM's names where it has the metric, and `tlt:` names for the rest."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from tlt.event_builders import rollout_report
from tlt.serve.served_policy import ServedReport
from tlt.types import Completion

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> Iterator[str]:
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip((*map(str, _SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum:.6f}"
        yield f"{name}_count{{{labels}}} {total}"


class Counters:
    """Totals of all completions so far."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.reasons: Counter[str] = Counter()
        self.first_token, self.latency = Histogram(), Histogram()

    def completed(self, completion: Completion) -> None:
        self.prompt_tokens += len(completion.prompt_tokens)
        self.generation_tokens += len(completion.tokens)
        self.reasons[completion.finish_reason] += 1
        self.first_token.add(completion.timing.first_token_s)
        self.latency.add(completion.timing.finished_s)


def metrics_text(model: str, counters: Counters, report: ServedReport) -> str:
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = f'model_name="{escaped}"'
    lines = list(_gauges(report, labels)) + list(_totals(counters, labels)) + list(_of_engine(report, labels))
    lines += counters.first_token.lines("vllm:time_to_first_token_seconds", labels)
    lines += counters.latency.lines("vllm:e2e_request_latency_seconds", labels)
    return "\n".join(lines) + "\n"


def _metric(kind: str, name: str, labels: str, value: float) -> Iterator[str]:
    yield f"# TYPE {name} {kind}"
    yield f"{name}{{{labels}}} {value:.10g}"


def _gauges(report: ServedReport, labels: str) -> Iterator[str]:
    yield from _metric("gauge", "vllm:num_requests_running", labels, report.running)
    yield from _metric("gauge", "vllm:num_requests_waiting", labels, report.waiting)
    yield from _metric("gauge", "tlt:policy_version", labels, report.version)
    yield from _metric("gauge", "tlt:drafter_version", labels, report.drafter_version)


def _totals(counters: Counters, labels: str) -> Iterator[str]:
    yield from _metric("counter", "vllm:prompt_tokens_total", labels, counters.prompt_tokens)
    yield from _metric("counter", "vllm:generation_tokens_total", labels, counters.generation_tokens)
    yield "# TYPE vllm:request_success_total counter"
    for reason, count in sorted(counters.reasons.items()):
        word = "stop" if reason == "eos" else reason
        yield f'vllm:request_success_total{{{labels},finished_reason="{word}",tlt_reason="{reason}"}} {count}'


def _of_engine(report: ServedReport, labels: str) -> Iterator[str]:
    if report.engine is None:
        return
    pages = report.engine.pages
    total = pages.free + pages.used + pages.cached
    yield from _metric("gauge", "vllm:kv_cache_usage_perc", labels, pages.used / total)
    yield from _metric("counter", "vllm:num_preemptions_total", labels, report.engine.preemptions)
    yield from _metric("counter", "tlt:ticks_total", labels, report.engine.ticks)
    speculation = report.engine.speculation
    if speculation is None:
        return
    found = rollout_report(speculation)
    yield from _metric("counter", "vllm:spec_decode_num_drafts_total", labels, found.verifies)
    yield from _metric("counter", "vllm:spec_decode_num_accepted_tokens_total", labels, found.accepted)
    yield from _metric("gauge", "tlt:accept_length", labels, found.accept_length)
    yield from _metric("gauge", "tlt:saved_seconds", labels, found.saved_s)
    yield "# TYPE tlt:shape_ticks_total counter"
    ticks: Counter[str] = Counter()
    for _, shape, count in found.chosen:
        ticks[str(shape)] += count
    for shape_text, count in sorted(ticks.items()):
        yield f'tlt:shape_ticks_total{{{labels},shape="{shape_text}"}} {count}'
