"""What the model-free drafter costs and what it brings, on one CPU core. Needs no GPU and no files.

Groups of answers are written side by side, a tick at a time: propose, accept what agrees with the answer that will be
written, extend by it and the one token after. Times are those of single calls, the clock's own included.

The text is made up unless `--answers FILE` brings real rollouts (JSON: a list of {"prompt": [token, …], "answers":
[[token, …], …]}). Made-up text is sentences from a random second-order Markov chain with a Zipf vocabulary, about one
bit per token, between expressions that are rewritten line by line with one term changed.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tlt.spec.shape import Draft
from tlt.spec.suffix import SuffixDrafter
from tlt.types import Key


@dataclass(frozen=True)
class Problem:
    """A prompt and the answers the policy gives."""

    prompt: list[int]
    answers: list[list[int]]


class Source:
    """Text without a language: what follows two words is one of a few words, fixed by a hash of the two."""

    def __init__(self, seed: int, vocabulary: int = 8192) -> None:
        self.random = random.Random(seed)
        self.vocabulary = vocabulary

    def problem(self, answers: int, length: int) -> Problem:
        prompt = self.sentence(self.word(0, 0), self.word(0, 1), 60)
        terms = [self.vocabulary + self.random.randrange(1000) for _ in range(6)]
        return Problem(prompt + terms, [self.answer(terms, length) for _ in range(answers)])

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
class Tally:
    """What was seen during a run."""

    propose_ns: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)  # nodes
    extend_ns: int = 0
    call_ns: list[int] = field(default_factory=list)  # of extend, per call
    tokens: int = 0
    verifies: int = 0
    accepted: int = 0
    foretold: list[tuple[float, bool]] = field(default_factory=list)  # scores of first-level nodes, and the truth


def walk(draft: Draft, answer: list[int], at: int) -> int:
    """Tokens of the draft the policy would accept; its own token comes on top."""
    node, accepted = -1, 0
    for child, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent == node and at + accepted < len(answer) - 1 and token == answer[at + accepted]:
            node, accepted = child, accepted + 1
    return accepted


def write_group(drafter: SuffixDrafter, name: str, problem: Problem, options: argparse.Namespace, tally: Tally) -> None:
    clock = time.perf_counter_ns
    running = {Key(hash(name) & 0xFFFF, number): [answer, 0] for number, answer in enumerate(problem.answers)}
    for key in running:
        drafter.begin(key, name, problem.prompt)
    while running:
        for key, state in list(running.items()):
            answer, at = state
            started = clock()
            draft = drafter.propose(key, options.depth, options.width, options.budget)
            proposed = clock()
            emitted = answer[at : at + walk(draft, answer, at) + 1]
            resumed = clock()
            drafter.extend(key, emitted)
            extended = clock() - resumed
            tally.propose_ns.append(proposed - started)
            tally.proposed.append(len(draft))
            tally.call_ns.append(extended)
            tally.extend_ns += extended
            tally.tokens += len(emitted)
            tally.verifies += 1
            tally.accepted += len(emitted) - 1
            for token, parent, score in zip(draft.tokens, draft.parents, draft.scores, strict=True):
                if parent < 0:
                    tally.foretold.append((score, token == emitted[0]))
            state[1] = at + len(emitted)
            if state[1] >= len(answer):
                drafter.end(key)
                del running[key]


def percentile(values: list[int], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] / 1000


def calibration(foretold: list[tuple[float, bool]]) -> list[dict[str, float]]:
    """Hits against scores, in tenths."""
    rows = []
    for tenth in range(10):
        inside = [(score, hit) for score, hit in foretold if int(min(score, 0.999) * 10) == tenth]
        if inside:
            scores, hits = [score for score, _ in inside], [hit for _, hit in inside]
            rows.append({"score": statistics.mean(scores), "hit_rate": statistics.mean(hits), "nodes": len(inside)})
    return rows


def measure(problems: list[Problem], options: argparse.Namespace) -> dict[str, object]:
    drafter = SuffixDrafter(options.memory, options.min_match, options.max_match)
    tally = Tally()
    gc.collect()
    for epoch in range(options.epochs):
        share = len(problems[0].answers) // options.epochs
        for number, problem in enumerate(problems):
            now = Problem(problem.prompt, problem.answers[epoch * share : (epoch + 1) * share])
            write_group(drafter, f"prompt {number}", now, options, tally)
    return {
        "proposals": len(tally.propose_ns),
        "tokens": tally.tokens,
        "propose_us_median": percentile(tally.propose_ns, 0.5),
        "propose_us_p90": percentile(tally.propose_ns, 0.9),
        "propose_us_p99": percentile(tally.propose_ns, 0.99),
        "nodes_per_proposal": statistics.mean(tally.proposed),
        "extend_us_per_token": tally.extend_ns / tally.tokens / 1000,
        "extend_call_us_median": percentile(tally.call_ns, 0.5),
        "extend_call_us_max": max(tally.call_ns) / 1000,
        "accept_length": 1 + tally.accepted / tally.verifies,
        "held_tokens": drafter.tokens,
        "entries_per_token": drafter.entries() / drafter.tokens,
        "calibration": calibration(tally.foretold),
    }


def bytes_per_token(problems: list[Problem], options: argparse.Namespace) -> float:
    """Of memory, texts and index together; measured apart, since tracing memory slows everything."""
    tracemalloc.start()
    drafter = SuffixDrafter(options.memory, options.min_match, options.max_match)
    for number, problem in enumerate(problems[:8]):
        for index, answer in enumerate(problem.answers):
            drafter.begin(Key(number, index), str(number), list(problem.prompt))
            drafter.extend(Key(number, index), list(answer))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / drafter.tokens


def show(result: dict[str, object]) -> None:
    for name, value in result.items():
        if name != "calibration":
            print(f"{name:24} {value:>12,.2f}" if isinstance(value, float) else f"{name:24} {value!s:>12}")
    print("\n   score  hit rate     nodes   (first token of each branch)")
    for row in result["calibration"]:  # type: ignore[attr-defined]
        print(f"{row['score']:8.2f}  {row['hit_rate']:8.2f}  {row['nodes']:8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, help="real rollouts instead of made-up text")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--group", type=int, default=16, help="answers per prompt, over all epochs")
    parser.add_argument("--length", type=int, default=300, help="typical length of a made-up answer")
    parser.add_argument("--epochs", type=int, default=2, help="each prompt comes back this often")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--budget", type=int, default=12)
    parser.add_argument("--memory", type=int, default=1 << 20, help="tokens the drafter may hold")
    parser.add_argument("--min-match", type=int, default=2)
    parser.add_argument("--max-match", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    if options.answers:
        problems = [Problem(**each) for each in json.loads(options.answers.read_text())]
    else:
        source = Source(options.seed)
        problems = [source.problem(options.group, options.length) for _ in range(options.prompts)]
    result = measure(problems, options) | {"bytes_per_token": bytes_per_token(problems, options)}
    if options.json:
        print(json.dumps({"python": sys.version.split()[0], "options": {k: str(v) for k, v in vars(options).items()}} | result))
    else:
        show(result)


if __name__ == "__main__":
    main()
