"""The model-free drafter drafts what really followed the longest match, within its memory, with honest scores.

The reference looks through every text from end to end; whatever the drafter says must be found there.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import depths
from tlt.errors import ConfigError, RequestError
from tlt.spec.shape import Draft, merge
from tlt.spec.suffix import SuffixIndex
from tlt.types import Key

LARGE = 1 << 20


@dataclass
class Text:
    context: list[int]  # what stood before it
    tokens: list[int]


@dataclass
class Naive:
    """The same texts under the same rules of memory, and no index."""

    memory: int
    longest: int
    texts: dict[str, list[Text]] = field(default_factory=dict)
    prompts: dict[str, Text] = field(default_factory=dict)
    running: dict[Key, tuple[str, Text]] = field(default_factory=dict)
    history: list[tuple[str, Text]] = field(default_factory=list)

    def begin(self, key: Key, prompt_id: str, prompt: list[int]) -> None:
        shelf = self.texts.setdefault(prompt_id, [])
        known = self.prompts.get(prompt_id)
        if known is None or not any(text is known for text in shelf):
            self.prompts[prompt_id] = known = Text([], list(prompt))
            shelf.append(known)
        self.history = [(owner, text) for owner, text in self.history if text is not known]
        completion = Text(prompt[-self.longest :], [])
        shelf.append(completion)
        self.running[key] = prompt_id, completion
        self.evict()

    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        self.running[key][1].tokens.extend(tokens)
        self.evict()

    def end(self, key: Key) -> None:
        prompt_id, completion = self.running.pop(key)
        self.history.append((prompt_id, completion))
        if all(owner != prompt_id for owner, _ in self.running.values()):
            self.history.append((prompt_id, self.prompts[prompt_id]))
        self.evict()

    def forget(self, prompt_id: str) -> None:
        for owner, text in list(self.history):
            if owner == prompt_id:
                self.drop(owner, text)

    @property
    def held(self) -> int:
        return sum(self.longest + len(text.tokens) for shelf in self.texts.values() for text in shelf)

    def evict(self) -> None:
        while self.history and self.held > self.memory:
            self.drop(*self.history[0])

    def drop(self, prompt_id: str, text: Text) -> None:
        self.history = [(owner, other) for owner, other in self.history if other is not text]
        self.texts[prompt_id] = [other for other in self.texts[prompt_id] if other is not text]

    def continuations(self, key: Key, least: int) -> Iterator[tuple[int, list[int]]]:
        """How many tokens agree before each place, and what follows it, wherever at least `least` do."""
        prompt_id, own = self.running[key]
        now = own.context + own.tokens
        for text in self.texts[prompt_id]:
            whole = text.context + text.tokens
            for place in range(max(1, len(text.context)), len(whole)):
                agreed = 0
                while agreed < min(self.longest, place, len(now)) and whole[place - 1 - agreed] == now[-1 - agreed]:
                    agreed += 1
                if agreed >= least:
                    yield agreed, whole[place:]


def branches(draft: Draft) -> list[list[int]]:
    """From the root to each node."""
    found: list[list[int]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append([*([] if parent < 0 else found[parent]), token])
    return found


def check_tree(draft: Draft, depth: int, width: int, budget: int) -> None:
    assert len(draft.tokens) == len(draft.parents) == len(draft.scores) <= budget
    assert all(-1 <= parent < node for node, parent in enumerate(draft.parents))
    assert max(depths(draft), default=0) <= depth
    assert all(draft.parents.count(parent) <= width for parent in draft.parents)
    assert len({tuple(branch) for branch in branches(draft)}) == len(draft)  # no branch twice
    for parent, score in zip(draft.parents, draft.scores, strict=True):
        assert 0.0 <= score <= (1.0 if parent < 0 else draft.scores[parent])


def check_against(naive: Naive, drafter: SuffixIndex, key: Key, depth: int, width: int, budget: int) -> None:
    draft = drafter.propose(key, depth, width, budget)
    check_tree(draft, depth, width, budget)
    found = list(naive.continuations(key, drafter.min_match))
    assert bool(draft.tokens) == bool(found)
    longest = max((agreed for agreed, _ in found), default=0)
    if found:
        assert draft.tokens[0] in {following[0] for agreed, following in found if agreed == longest}
    for branch in branches(draft):
        assert any(following[: len(branch)] == branch for _, following in found)


PROMPTS = {"a": [0, 1, 2, 0, 1], "b": [2], "c": [], "d": [1, 1, 1, 1, 1, 1, 1]}
tokens_of_three = st.lists(st.integers(0, 2), min_size=0, max_size=6)
actions = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 5), st.sampled_from(sorted(PROMPTS))),
    st.tuples(st.just("extend"), st.integers(0, 5), tokens_of_three),
    st.tuples(st.just("extend"), st.integers(0, 5), tokens_of_three),
    st.tuples(st.just("end"), st.integers(0, 5), st.none()),
    st.tuples(st.just("forget"), st.just(0), st.sampled_from(sorted(PROMPTS))),
)


def apply(target: SuffixIndex | Naive, action: str, key: Key, argument: object) -> None:
    if action == "begin":
        target.begin(key, str(argument), PROMPTS[str(argument)])
    elif action == "extend":
        assert isinstance(argument, list)
        target.extend(key, argument)
    elif action == "end":
        target.end(key)
    else:
        target.forget(str(argument))


@settings(max_examples=300, deadline=None)
@given(
    actions=st.lists(actions, max_size=60),
    memory=st.sampled_from([1, 60, 120, LARGE]),
    matches=st.sampled_from([(1, 1), (1, 4), (2, 5), (3, 12)]),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 10)),
)
def test_says_what_the_reference_finds(
    actions: list[tuple[str, int, object]], memory: int, matches: tuple[int, int], shape: tuple[int, int, int]
) -> None:
    drafter, naive = SuffixIndex(memory, *matches), Naive(memory, matches[1])
    for action, number, argument in actions:
        key = Key(7, number)
        if action != "forget" and (key in naive.running) == (action == "begin"):
            continue  # not a legal move
        apply(drafter, action, key, argument)
        apply(naive, action, key, argument)
        assert drafter.tokens == naive.held
        for running in naive.running:
            check_against(naive, drafter, running, *shape)
    for key in list(naive.running):
        drafter.end(key)
    for prompt_id in PROMPTS:
        drafter.forget(prompt_id)
    assert drafter.tokens == drafter.entries() == 0


def test_long_texts_agree_with_the_reference() -> None:
    source = random.Random(0)
    drafter, naive = SuffixIndex(900, 1, 16), Naive(900, 16)
    phrases = [[source.randrange(30) for _ in range(source.randint(2, 20))] for _ in range(8)]
    for request in range(24):
        prompt = [1, 2, 3] * 4
        for each in (drafter, naive):
            each.begin(Key(0, request), "p", prompt)
        for _ in range(12):
            written = source.choice(phrases)[: source.randint(1, 20)]
            for each in (drafter, naive):
                each.extend(Key(0, request), written)
            check_against(naive, drafter, Key(0, request), 8, 3, 12)
        if request >= 3:
            for each in (drafter, naive):
                each.end(Key(0, request - 3))
    assert len(naive.texts["p"]) < 24  # some were evicted


# ---- where drafts come from


def test_own_text_is_copied_far() -> None:
    expression = list(range(100, 120))
    drafter = SuffixIndex(LARGE)
    drafter.begin(Key(0, 0), "p", [1, 2, 3])
    drafter.extend(Key(0, 0), [*expression, 7, *expression[:3]])
    assert drafter.propose(Key(0, 0), 12, 2, 12).tokens == tuple(expression[3:15])


def test_the_prompt_is_copied() -> None:
    drafter = SuffixIndex(LARGE)
    drafter.begin(Key(0, 0), "p", [5, 6, 7, 8, 9, 1])
    drafter.extend(Key(0, 0), [6, 7])
    assert drafter.propose(Key(0, 0), 3, 1, 3).tokens == (8, 9, 1)


@pytest.mark.parametrize("finished", [False, True])
def test_answers_of_the_group_are_shared(finished: bool) -> None:
    drafter = SuffixIndex(LARGE)
    for request, prompt_id in enumerate(("p", "p", "other")):
        drafter.begin(Key(0, request), prompt_id, [1, 2, 3])
    drafter.extend(Key(0, 0), [4, 5, 6, 7])
    if finished:
        drafter.end(Key(0, 0))
    assert drafter.propose(Key(0, 1), 4, 2, 8).tokens == (4, 5, 6, 7)  # before a first token of its own
    drafter.extend(Key(0, 1), [4, 5])
    assert drafter.propose(Key(0, 1), 4, 2, 8).tokens == (6, 7)
    assert len(drafter.propose(Key(0, 2), 4, 2, 8)) == 0


def test_earlier_answers_are_remembered_until_forgotten() -> None:
    drafter = SuffixIndex(LARGE)
    for step in range(3):
        drafter.begin(Key(step, 0), "p", [1, 2, 3])
        assert drafter.propose(Key(step, 0), 2, 1, 2).tokens == ((4, 5) if step == 1 else ())
        drafter.extend(Key(step, 0), [4, 5, 6])
        drafter.end(Key(step, 0))
        if step == 1:
            drafter.forget("p")
    drafter.forget("p")
    drafter.forget("never seen")


def test_branches_where_the_answers_disagree() -> None:
    drafter = SuffixIndex(LARGE)
    for request, completion in enumerate(([4, 5, 6], [4, 5, 7], [4, 8, 9], [4, 5, 6])):
        drafter.begin(Key(0, request), "p", [1, 2, 3])
        drafter.extend(Key(0, request), completion)
    drafter.begin(Key(0, 9), "p", [1, 2, 3])
    draft = drafter.propose(Key(0, 9), 3, 2, 8)
    assert sorted(branches(draft)) == [[4], [4, 5], [4, 5, 6], [4, 5, 7], [4, 8], [4, 8, 9]]
    score = dict(zip(map(tuple, branches(draft)), draft.scores, strict=True))
    assert score[4, 5] > score[4, 8]  # three against one
    assert score[4, 5, 6] > score[4, 5, 7]  # two against one
    assert all(len(branch) < 3 or branch[1] == 5 for branch in branches(drafter.propose(Key(0, 9), 3, 1, 8)))


def test_joins_another_drafters_tree() -> None:
    drafter = SuffixIndex(LARGE)
    drafter.begin(Key(0, 0), "p", [1, 2, 3, 1, 2])
    mine = drafter.propose(Key(0, 0), 2, 1, 2)
    assert mine.tokens == (3, 1)
    both = merge([mine, Draft((3, 9), (-1, 0), (0.9, 0.8))], budget=8)
    assert sorted(branches(both)) == [[3], [3, 1], [3, 9]]


# ---- memory


def test_the_oldest_history_goes_first_and_running_requests_never() -> None:
    drafter = SuffixIndex(memory_tokens=100, max_match=4)
    drafter.begin(Key(0, 0), "p", [1, 2])
    drafter.extend(Key(0, 0), [10, *range(100, 120)])  # runs on, the oldest of all
    for request, first in ((1, 20), (2, 30), (3, 40)):
        drafter.begin(Key(0, request), "p", [1, 2])
        drafter.extend(Key(0, request), [first, *range(first * 10, first * 10 + 20)])
        drafter.end(Key(0, request))
        assert drafter.tokens <= 100
    drafter.begin(Key(0, 9), "p", [1, 2])
    drafter.extend(Key(0, 9), [10])
    known = {}
    for first in (10, 20, 30, 40):
        drafter.extend(Key(0, 9), [first])
        known[first] = len(drafter.propose(Key(0, 9), 1, 1, 1)) == 1
    assert known == {10: True, 20: False, 30: True, 40: True}


def test_a_prompt_in_use_again_is_not_history() -> None:
    drafter = SuffixIndex(memory_tokens=60, max_match=4)
    drafter.begin(Key(0, 0), "p", [1, 2, 3])
    drafter.end(Key(0, 0))
    drafter.begin(Key(0, 1), "p", [1, 2, 3])
    drafter.extend(Key(0, 1), [*range(100, 150), 1])  # more than the memory: all history goes
    assert drafter.propose(Key(0, 1), 2, 1, 2).tokens == (2, 3)


def test_older_places_come_back_when_newer_ones_go() -> None:
    drafter = SuffixIndex(LARGE)
    for request in (0, 1):
        drafter.begin(Key(0, request), "p", [1, 2])
    drafter.extend(Key(0, 0), [3, 5, 6, 7, 4, 5, 6, 7])
    for before in range(10, 30):
        drafter.extend(Key(0, 1), [before, 5, 8])
    drafter.extend(Key(0, 0), [5])
    assert drafter.propose(Key(0, 0), 2, 1, 2).tokens[0] == 8
    drafter.end(Key(0, 1))
    drafter.forget("p")
    assert drafter.propose(Key(0, 0), 2, 1, 2).tokens == (6, 7)


def test_running_requests_may_outgrow_the_memory() -> None:
    drafter = SuffixIndex(memory_tokens=10, max_match=4)
    drafter.begin(Key(0, 0), "p", [1, 2])
    drafter.extend(Key(0, 0), [*range(100), 0, 1])
    assert drafter.propose(Key(0, 0), 4, 1, 4).tokens == (2, 3, 4, 5)
    drafter.end(Key(0, 0))
    assert drafter.tokens <= 10


def test_a_long_run_stays_bounded() -> None:
    source, memory = random.Random(1), 3000
    drafter = SuffixIndex(memory)
    for request in range(400):
        drafter.begin(Key(0, request), f"prompt {request % 37 if request < 200 else request}", [1, 2, 3])
        drafter.extend(Key(0, request), [source.choice((0, 0, 0, 1, 5, source.randrange(500))) for _ in range(50)])
        if request >= 8:
            drafter.end(Key(0, request - 8))
        assert drafter.tokens <= memory
        if request % 40 == 39:
            assert drafter.entries() <= 7 * drafter.tokens  # a leaf per token, fewer forks, at most 1 + 5 for each
    assert drafter.tokens > memory / 2


# ---- scores


def markov(source: random.Random, length: int, sharpness: float) -> list[int]:
    """Each word has a favourite successor, taken with probability `sharpness`; else any of eight."""
    tokens = [0]
    while len(tokens) < length:
        choice = 0 if source.random() < sharpness else source.randrange(8)
        tokens.append((tokens[-1] * 7 + 3 + choice * 11) % 61)
    return tokens


@pytest.mark.parametrize("sharpness", [0.2, 0.6, 0.95])
def test_scores_are_hit_rates(sharpness: float) -> None:
    source = random.Random(3)
    drafter = SuffixIndex(LARGE)
    seen: list[tuple[float, bool]] = []
    for request in range(60):
        completion = markov(source, 100, sharpness)
        drafter.begin(Key(0, request), "p", [60])
        at = 0
        while at < len(completion) - 4:
            draft = drafter.propose(Key(0, request), 3, 3, 10)
            truth = [completion[at : at + len(branch)] == branch for branch in branches(draft)]
            if request >= 20:
                seen += zip(draft.scores, truth, strict=True)
            drafter.extend(Key(0, request), completion[at : at + 1 + sum(truth)])  # what was accepted, and one more
            at += 1 + sum(truth)
        drafter.end(Key(0, request))
    spread = 0
    for tenth in range(10):
        inside = [(score, hit) for score, hit in seen if int(min(score, 0.999) * 10) == tenth]
        if len(inside) >= 400:
            spread += 1
            expected = sum(score for score, _ in inside) / len(inside)
            assert sum(hit for _, hit in inside) / len(inside) == pytest.approx(expected, abs=0.1)
    assert spread >= 2
    assert sum(hit for _, hit in seen) == pytest.approx(sum(score for score, _ in seen), rel=0.12)


def test_scores_follow_a_policy_that_changes() -> None:
    drafter, source = SuffixIndex(LARGE), random.Random(5)

    def score_after(trials: int, hit_rate: float) -> float:
        score = 0.0
        for _ in range(trials):
            drafter.begin(Key(0, 0), "p", [1, 2, 3, 1, 2])
            (score,) = drafter.propose(Key(0, 0), 1, 1, 1).scores
            drafter.extend(Key(0, 0), [3 if source.random() < hit_rate else 4])
            drafter.end(Key(0, 0))
            drafter.forget("p")
        return score

    assert score_after(300, 0.9) == pytest.approx(0.9, abs=0.06)
    assert score_after(2000, 0.5) == pytest.approx(0.5, abs=0.15)
    assert score_after(4000, 0.1) == pytest.approx(0.1, abs=0.1)


def test_the_same_calls_give_the_same_drafts() -> None:
    def run() -> list[Draft]:
        source = random.Random(2)
        drafter = SuffixIndex(1500)
        drafts = []
        for request in range(30):
            drafter.begin(Key(0, request), f"{request % 3}", [60])
            for token in markov(source, 60, 0.7):
                drafts.append(drafter.propose(Key(0, request), 4, 3, 8))
                drafter.extend(Key(0, request), [token])
            if request >= 4:
                drafter.end(Key(0, request - 4))
        return drafts

    assert run() == run()


def test_tokens_may_come_one_by_one_or_together() -> None:
    completion = markov(random.Random(4), 200, 0.8)
    drafters = SuffixIndex(LARGE), SuffixIndex(LARGE)
    for drafter in drafters:
        drafter.begin(Key(0, 0), "p", [60])
    drafters[0].extend(Key(0, 0), completion)
    for token in completion:
        drafters[1].extend(Key(0, 0), [token])
    assert drafters[0].propose(Key(0, 0), 6, 3, 12) == drafters[1].propose(Key(0, 0), 6, 3, 12)


# ---- misuse


@pytest.mark.parametrize("shape", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_no_room_no_draft(shape: tuple[int, int, int]) -> None:
    drafter = SuffixIndex(LARGE)
    drafter.begin(Key(0, 0), "p", [1, 1, 1])
    assert len(drafter.propose(Key(0, 0), 1, 1, 1)) == 1
    assert len(drafter.propose(Key(0, 0), *shape)) == 0


def test_an_unknown_request_is_named() -> None:
    drafter = SuffixIndex(LARGE)
    drafter.begin(Key(0, 0), "p", [1])
    with pytest.raises(RequestError, match="running already"):
        drafter.begin(Key(0, 0), "p", [1])
    drafter.end(Key(0, 0))
    for misuse in (
        lambda: drafter.extend(Key(0, 0), [1]),
        lambda: drafter.propose(Key(0, 0), 1, 1, 1),
        lambda: drafter.end(Key(0, 0)),
    ):
        with pytest.raises(RequestError, match=r"Key\(seed=0, request=0\) is not running"):
            misuse()


def test_impossible_settings_are_refused() -> None:
    for memory, least, most in ((0, 1, 4), (10, 0, 4), (10, 5, 4)):
        with pytest.raises(ConfigError, match="expected"):
            SuffixIndex(memory, least, most)


def test_a_prompt_may_be_rendered_anew() -> None:
    drafter = SuffixIndex(LARGE)
    drafter.begin(Key(0, 0), "p", [1, 2, 3])
    drafter.begin(Key(0, 1), "p", [7, 8, 9, 7])
    assert drafter.propose(Key(0, 1), 2, 1, 2).tokens == (8, 9)
    drafter.end(Key(0, 0))
    drafter.end(Key(0, 1))
    drafter.forget("p")
    assert drafter.tokens == drafter.entries() == 0
