"""The learned drafter at work: keeps each request's newest policy states, and grows draft trees from them.

What always holds: states are kept whether or not anybody speculates, so that drafting can start in the middle of an
answer without touching the policy's cache; nothing here is read by the policy. A request owns one place from its first
state to its end, whatever row of the batch it sits in.
"""
# P places, W window, R batch rows, S positions, F = 3·D states, w width of the tree, N nodes

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.kernels.noise import as_int64
from tlt.model.transformer import Transformer
from tlt.spec.candidates import DrawKeys, Sharpness, beta_hits
from tlt.spec.eagle import Eagle, gather_taps
from tlt.spec.growth import Soil, grow, paths_of
from tlt.spec.shape import EMPTY, Draft, Shape
from tlt.spec.window import Nodes
from tlt.types import Key, SamplingParams

_AT_ONCE = 64  # positions taken in by one pass of the drafter
_SHARPEN_EVERY = 8  # drafts between two looks at which β would have hit


@dataclass(slots=True)
class _Request:
    key: Key
    prompt_tokens: int
    temperature: float
    place: int = -1  # none before the first state
    held_from: int = 0  # first position whose state was kept
    taken: int = 0  # positions before this are in the drafter's own keys and values


@dataclass(frozen=True, slots=True)
class _Rooted:
    """What the roots of the last draft were named from: tells later which β would have hit."""

    logits_Pv: Tensor
    keys: DrawKeys
    answered: dict[Key, int]  # tokens each request had written


class LearnedDrafting:
    """An Eagle behind the drafters' protocol. `absorb` is fed by the engine's features."""

    name = "eagle"

    def __init__(self, drafter: Eagle, policy: Transformer, places: int) -> None:
        self.drafter = drafter
        self._policy = policy
        self._head_vD = drafter.head_rows(policy.head_weight)
        window, states = drafter.config.window, 3 * drafter.config.layer.hidden
        self._states_PWF = torch.zeros((places, window, states), dtype=drafter.fc.dtype, device=drafter.fc.device)
        self._ring = drafter.new_ring(places)
        self._g_PD = torch.zeros(
            (places, drafter.config.layer.hidden), dtype=drafter.fc.dtype, device=drafter.fc.device
        )
        self._nodes: dict[int, Nodes] = {}  # by number of slots
        self._requests: dict[Key, _Request] = {}
        self._free = list(range(places - 1, -1, -1))
        self._sharpness = Sharpness()
        self._rooted: _Rooted | None = None
        self._drafts = 0

    @property
    def beta(self) -> float:
        """The weight of its own opinion against the shared noise, fitted to what was verified."""
        return self._sharpness.beta

    @torch.no_grad()
    def policy_changed(self) -> None:
        """The policy's head moved: what names a reduced vocabulary is copied afresh."""
        self._head_vD = self.drafter.head_rows(self._policy.head_weight)

    def begin(self, key: Key, prompt_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._requests[key] = _Request(key, len(prompt), params.temperature)

    def end(self, key: Key, answer: Sequence[int]) -> None:
        request = self._requests.pop(key)
        if request.place >= 0:
            self._free.append(request.place)

    @torch.no_grad()
    def absorb(self, keys: Sequence[Key], first: Sequence[int], taps: Sequence[Tensor]) -> None:
        """Keeps the policy's states of positions first[r] … first[r] + S − 1, [R, S, D] per tapped layer.

        Positions beyond what a request really walked hold nonsense; the next call writes over them.
        """
        kept = [row for row, key in enumerate(keys) if self._placed(key, first[row])]
        if not kept:
            return
        device, window = self._states_PWF.device, self._states_PWF.shape[1]
        place = torch.tensor([self._requests[keys[row]].place for row in kept], device=device)
        start = torch.tensor([first[row] for row in kept], device=device)
        states_RSF = gather_taps(taps)[torch.tensor(kept, device=device)].to(self._states_PWF.dtype)
        slot_RS = (start[:, None] + torch.arange(states_RSF.shape[1], device=device)) % window
        self._states_PWF[place[:, None], slot_RS] = states_RSF

    @torch.no_grad()
    def catch_up(self, keys: Sequence[Key], answers: Sequence[Sequence[int]], shape: Shape) -> None:
        if any(self._behind(key, answer) > shape.depth + 1 for key, answer in zip(keys, answers, strict=True)):
            self._take_in(keys, answers)

    @torch.no_grad()
    def propose(self, keys: Sequence[Key], answers: Sequence[Sequence[int]], shape: Shape) -> list[Draft]:
        places = {
            self._requests[key].place: row for row, key in enumerate(keys) if self._take_in_wanted(key, answers[row])
        }
        if not places:
            return [EMPTY] * len(keys)
        self._learn_sharpness(keys, answers)
        self._take_in(keys, answers)
        height = max(places) + 1
        draws = self._draw_keys(keys, answers, height)
        trees = self._grow(draws, shape, height, keys, answers)
        drafts = [EMPTY] * len(keys)
        for place, row in places.items():
            drafts[row] = trees[place]
        return drafts

    # ---- places

    def _placed(self, key: Key, position: int) -> bool:
        """Whether the request has a place for its states; it gets one if it can."""
        request = self._requests.get(key)
        if request is None:
            return False  # over: its tokens are dropped too
        if request.place < 0:
            if not self._free:
                return False
            request.place = self._free.pop()
            request.held_from = request.taken = position
            self._ring.forget(torch.tensor([request.place], device=self._ring.position_RW.device))
        return True

    def _take_in_wanted(self, key: Key, answer: Sequence[int]) -> bool:
        return self._requests[key].place >= 0 and len(answer) > 0

    # ---- taking in what was written

    def _behind(self, key: Key, answer: Sequence[int]) -> int:
        """Positions it has not taken in yet."""
        request = self._requests[key]
        taken = max(request.taken, request.held_from)
        return request.prompt_tokens - 1 + len(answer) - taken if self._take_in_wanted(key, answer) else 0

    def _take_in(self, keys: Sequence[Key], answers: Sequence[Sequence[int]]) -> None:
        """Runs the drafter over all positions that have become certain since, a few at a time."""
        while True:
            news = {}
            for key, answer in zip(keys, answers, strict=True):
                request = self._requests[key]
                if self._take_in_wanted(key, answer):
                    end = request.prompt_tokens - 1 + len(answer)
                    start = max(request.taken, request.held_from, end - self.drafter.config.window)
                    if start < end:
                        news[request.place] = (request, answer, start, min(end, start + _AT_ONCE))
            if not news:
                return
            self._extend(news)

    def _extend(self, news: dict[int, tuple[_Request, Sequence[int], int, int]]) -> None:
        height, most = max(news) + 1, max(end - start for _, _, start, end in news.values())
        tokens = [[0] * most for _ in range(height)]
        first, count = [0] * height, [0] * height
        for place, (request, answer, start, end) in news.items():
            offset = start - (request.prompt_tokens - 1)
            tokens[place][: end - start] = answer[offset : offset + end - start]
            first[place], count[place] = start, end - start
            request.taken = end
        device, window = self._states_PWF.device, self._states_PWF.shape[1]
        first_R, count_R = torch.tensor(first, device=device), torch.tensor(count, device=device)
        slot_RS = (first_R[:, None] + torch.arange(most, device=device)) % window
        states_RSF = self._states_PWF[torch.arange(height, device=device)[:, None], slot_RS]
        next_RS = torch.tensor(tokens, device=device)
        g_RD = self.drafter.extend(self._ring.first(height), next_RS, states_RSF, first_R, count_R, self._policy.embed)
        self._g_PD[:height] = torch.where((count_R > 0)[:, None], g_RD, self._g_PD[:height])

    # ---- growing trees

    def _draw_keys(self, keys: Sequence[Key], answers: Sequence[Sequence[int]], height: int) -> DrawKeys:
        """Keys of the roots' successors, place by place."""
        seed, request_id, position, temperature = [0] * height, [0] * height, [0] * height, [1.0] * height
        for key, answer in zip(keys, answers, strict=True):
            request = self._requests[key]
            if self._take_in_wanted(key, answer):
                seed[request.place], request_id[request.place] = as_int64(key.seed), as_int64(key.request)
                position[request.place] = request.prompt_tokens + len(answer)
                temperature[request.place] = request.temperature
        device = self._states_PWF.device
        return DrawKeys(
            torch.tensor(seed, device=device),
            torch.tensor(request_id, device=device),
            torch.tensor(position, device=device),
            torch.tensor(temperature, device=device),
        )

    def _grow(
        self, draws: DrawKeys, shape: Shape, height: int, keys: Sequence[Key], answers: Sequence[Sequence[int]]
    ) -> list[Draft]:
        """`depth` levels of `width` nodes each, for every place."""
        width = min(shape.width, self.drafter.config.draft_vocab)
        nodes = self._nodes_for(width * shape.depth).first(height)
        soil = Soil(
            self.drafter, self._ring.first(height), nodes, self._g_PD[:height], self._policy.embed, self._head_vD
        )
        growth = grow(soil, draws, self.beta, shape.depth, width)
        written = {key: len(answer) for key, answer in zip(keys, answers, strict=True)}
        self._rooted = _Rooted(growth.root_logits_Rv, draws, written)
        return [Draft(tuple(tokens), tuple(parents), tuple(scores)) for tokens, parents, scores in paths_of(growth)]

    def _nodes_for(self, slots: int) -> Nodes:
        if slots not in self._nodes:
            self._nodes[slots] = self.drafter.new_nodes(len(self._g_PD), slots)
        return self._nodes[slots]

    # ---- sharpness

    def _learn_sharpness(self, keys: Sequence[Key], answers: Sequence[Sequence[int]]) -> None:
        """Which β would have named the tokens that came after the last roots."""
        self._drafts += 1
        last, self._rooted = self._rooted, None
        if last is None or self._drafts % _SHARPEN_EVERY:
            return
        drawn = {}
        for key, answer in zip(keys, answers, strict=True):
            had = last.answered.get(key)
            place = self._requests[key].place
            if had and had < len(answer) and 0 <= place < len(last.logits_Pv):
                drawn[place] = answer[had]
        if drawn:
            device = last.logits_Pv.device
            at = torch.tensor(list(drawn), device=device)
            tokens = torch.tensor(list(drawn.values()), device=device)
            parts = (last.keys.seed_N, last.keys.request_N, last.keys.position_N, last.keys.temperature_N)
            hits = beta_hits(
                last.logits_Pv[at],
                DrawKeys(*(part[at] for part in parts)),
                tokens,
                token_of_draft_v=self.drafter.token_of_draft_v,
            )
            self._sharpness.observe(hits.sum(0).tolist(), len(drawn))
