"""What the model-free drafter costs and what it brings, on one CPU core. Needs no GPU and no files.

Groups of answers are written side by side, a tick at a time: propose, accept what agrees with the answer that will be
written, extend by that and the one token after. Every call is timed; as the calls are the same each time, the run is
repeated and the quickest of each call counts, so that other work on the machine hardly does. Proposals that find
nothing are counted apart. The clock's own time (some 0.05 µs) is included.

The text is made up unless `--answers FILE` brings real rollouts (JSON: a list of {"prompt": [token, …], "answers":
[[token, …], …]}). Made-up text is sentences from a random second-order Markov chain with a Zipf vocabulary, about one
bit per token, between expressions that are rewritten line by line with one term changed.
"""

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import time
import timeit
import tracemalloc
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from tlt.machine import describe
from tlt.spec.shape import Draft
from tlt.spec.suffix import SuffixIndex
from tlt.types import Key


@dataclass(frozen=True)
class SuffixProblem:
    """A prompt and the answers the policy gives."""

    prompt: list[int]
    answers: list[list[int]]


class Source:
    """Text without a language: what follows two words is one of a few words, fixed by a hash of the two."""

    def __init__(self, seed: int, vocabulary: int = 8192) -> None:
        self.random = random.Random(seed)
        self.vocabulary = vocabulary

    def problem(self, answers: int, length: int) -> SuffixProblem:
        prompt = self.sentence(self.word(0, 0), self.word(0, 1), 60)
        terms = [self.vocabulary + self.random.randrange(1000) for _ in range(6)]
        return SuffixProblem(prompt + terms, [self.answer(terms, length) for _ in range(answers)])

    def answer(self, terms: list[int], length: int) -> list[int]:
        length = max(16, int(length * self.random.lognormvariate(-0.3, 0.8)))  # a long tail
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += self.sentence(self.word(0, 0), self.word(0, 1), self.random.randint(10, 30))
            tokens += self.expression(list(terms), lines=self.random.randint(1, 4))
        return tokens[:length]

    def sentence(self, before: int, last: int, length: int) -> list[int]:
        tokens = [before, last]
        while len(tokens) < length:
            choice = min(int(self.random.expovariate(1.4)), 7)  # mostly the first: about one bit
            tokens.append(self.word(hash((tokens[-2], tokens[-1])), choice))
        return tokens

    def word(self, context: int, choice: int) -> int:
        share = random.Random(context * 8 + choice).random()
        return int(self.vocabulary**share) - 1  # Zipf: as likely per octave of rank

    def expression(self, terms: list[int], lines: int) -> list[int]:
        """`a + b + c = … = …`, one term changed at each step."""
        plus, equals, line = (self.vocabulary + 1000 + symbol for symbol in range(3))
        tokens: list[int] = []
        for _ in range(lines):
            for term in terms:
                tokens += [term, plus]
            tokens[-1] = equals
            terms[self.random.randrange(len(terms))] = self.vocabulary + self.random.randrange(1000)
        return [*tokens, line]


@dataclass
class SuffixTally:
    """What was seen during a run, in the order of the calls."""

    propose_ns: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)  # per proposal
    extend_ns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # per call of extend
    foretold: list[tuple[float, bool]] = field(default_factory=list)  # scores of first tokens, and the truth


@dataclass
class Writing:
    """An answer on its way."""

    answer: list[int]
    at: int = 0

    def accepted(self, draft: Draft) -> int:
        """Tokens of the draft the policy would accept; its own token comes on top."""
        node, accepted = -1, 0
        for child, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            at = self.at + accepted
            if parent == node and at < len(self.answer) - 1 and token == self.answer[at]:
                node, accepted = child, accepted + 1
        return accepted


def write_group(
    drafter: SuffixIndex,
    name: str,
    problem: SuffixProblem,
    options: argparse.Namespace,
    budget: int,
    tally: SuffixTally,
) -> None:
    clock = time.perf_counter_ns
    running = {Key(0, number): Writing(answer) for number, answer in enumerate(problem.answers)}
    for key in running:
        drafter.begin(key, name, problem.prompt)
    while running:
        for key, writing in list(running.items()):
            started = clock()
            draft = drafter.propose(key, options.depth, options.width, budget)
            tally.propose_ns.append(clock() - started)
            emitted = writing.answer[writing.at : writing.at + writing.accepted(draft) + 1]
            started = clock()
            drafter.extend(key, emitted)
            tally.extend_ns.append(clock() - started)
            tally.nodes.append(len(draft))
            tally.tokens.append(len(emitted))
            for token, parent, score in zip(draft.tokens, draft.parents, draft.scores, strict=True):
                if parent < 0:
                    tally.foretold.append((score, token == emitted[0]))
            writing.at += len(emitted)
            if writing.at >= len(writing.answer):
                drafter.end(key)
                del running[key]


def write_all(
    drafter: SuffixIndex, problems: list[SuffixProblem], options: argparse.Namespace, budget: int
) -> SuffixTally:
    """Each prompt once per epoch, with the next of its answers."""
    tally = SuffixTally()
    for epoch in range(options.epochs):
        for number, problem in enumerate(problems):
            share = len(problem.answers) // options.epochs
            now = SuffixProblem(problem.prompt, problem.answers[epoch * share : (epoch + 1) * share])
            write_group(drafter, f"prompt {number}", now, options, budget, tally)
    return tally


def quickest(runs: list[list[int]]) -> list[float]:
    """Microseconds of each call."""
    return [min(times) / 1000 for times in zip(*runs, strict=True)]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def calibration(foretold: list[tuple[float, bool]]) -> list[dict[str, float]]:
    """Hits against scores, in tenths."""
    rows = []
    for tenth in range(10):
        inside = [(score, hit) for score, hit in foretold if int(min(score, 0.999) * 10) == tenth]
        if inside:
            scores, hits = zip(*inside, strict=True)
            rows.append({"score": statistics.mean(scores), "hit_rate": statistics.mean(hits), "nodes": len(inside)})
    return rows


def measure(problems: list[SuffixProblem], options: argparse.Namespace, budget: int) -> dict[str, Any]:
    tallies = []
    for _ in range(options.repeats):
        drafter = SuffixIndex(options.memory, options.min_match, options.max_match)
        gc.collect()
        gc.freeze()  # the other runs' lists are not this one's to collect
        tallies.append(write_all(drafter, problems, options, budget))
        gc.unfreeze()
    tally = tallies[0]
    proposing, extending = quickest([t.propose_ns for t in tallies]), quickest([t.extend_ns for t in tallies])
    served = [time for time, nodes in zip(proposing, tally.nodes, strict=True) if nodes]
    verifies, tokens = len(tally.tokens), sum(tally.tokens)
    return {
        "budget": budget,
        "tokens written": tokens,
        "proposals": verifies,
        "proposals with a draft": len(served),
        "nodes per draft": sum(tally.nodes) / len(served),
        "propose µs, median": percentile(served, 0.5),
        "propose µs, 90 %": percentile(served, 0.9),
        "propose µs, 99 %": percentile(served, 0.99),
        "propose µs, nothing found": percentile([t for t, n in zip(proposing, tally.nodes, strict=True) if not n], 0.5),
        "extend µs per token": sum(extending) / tokens,
        "extend µs per call, median": percentile(extending, 0.5),
        "extend µs per call, longest": max(extending),
        "accept length": tokens / verifies,
        "tokens held": drafter.tokens,
        "index entries per token": drafter.entries() / drafter.tokens,
        "bytes per token": bytes_per_token(problems, options),
        "calibration": calibration(tally.foretold),
    }


def yardstick_ns() -> float:
    """Of a bare Python function call: how fast this interpreter is on this machine now."""
    return min(timeit.repeat("call()", "def call(): pass", number=10_000, repeat=50)) * 1e5


def bytes_per_token(problems: list[SuffixProblem], options: argparse.Namespace) -> float:
    """Of memory, texts and index together; measured apart, since tracing memory slows everything."""
    tracemalloc.start()
    drafter = SuffixIndex(options.memory, options.min_match, options.max_match)
    for number, problem in enumerate(problems[:8]):
        for index, answer in enumerate(problem.answers):
            drafter.begin(Key(number, index), str(number), problem.prompt)
            drafter.extend(Key(number, index), answer)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / drafter.tokens


def show(results: list[dict[str, Any]]) -> None:
    """A column per budget."""
    for name in results[0]:
        if name != "calibration":
            cells = [f"{r[name]:>12,.2f}" if isinstance(r[name], float) else f"{r[name]:>12,}" for r in results]
            print(f"{name:28}", *cells)
    print("\n   score  hit rate     nodes   (first token of each branch, largest budget)")
    for row in results[-1]["calibration"]:
        print(f"{row['score']:8.2f}  {row['hit_rate']:8.2f}  {row['nodes']:8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, help="real rollouts instead of made-up text")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=16, help="answers per prompt, over all epochs")
    parser.add_argument("--length", type=int, default=300, help="typical length of a made-up answer")
    parser.add_argument("--epochs", type=int, default=2, help="each prompt comes back this often")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 8, 16], help="nodes of a draft; a column each")
    parser.add_argument("--memory", type=int, default=1 << 20, help="tokens the drafter may hold")
    parser.add_argument("--min-match", type=int, default=1)
    parser.add_argument("--max-match", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3, help="runs, of which the quickest of each call counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="the commit that is measured, where git cannot tell")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    if options.answers:
        problems = [SuffixProblem(**each) for each in json.loads(options.answers.read_text())]
    else:
        source = Source(options.seed)
        problems = [source.problem(options.group, options.length) for _ in range(options.prompts)]
    results = [measure(problems, options, budget) for budget in options.budgets]
    if options.json:
        asked = {name: str(value) for name, value in vars(options).items()}
        machine = asdict(describe(torch.device("cpu"), options.commit))
        about = {"machine": machine, "call_ns": yardstick_ns(), "options": asked}
        print(json.dumps(about | {"results": results}, ensure_ascii=False, indent=1))
    else:
        print(f"Python {platform.python_version()}; a function call takes {yardstick_ns():.0f} ns here")
        show(results)


if __name__ == "__main__":
    main()
