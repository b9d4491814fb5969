"""Exact mode: a row's bits are the same alone and in company; a chain's are those of plain decoding.

Without a GPU the Triton kernels run in the interpreter in float32: orders of summation are then the kernels' own, the
matrix units' are not. `test_exact_gpu.py` has the rest.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.test_attention_kernels import GPU, Batch, loops_with_bounds_from_memory, make_batch, naive  # noqa: F401
from tests.test_engine import EXPECTED, MODEL, requests
from tests.test_sampler_triton import FILTERED, PLAIN, rows_for
from tests.test_speculation import GUESSERS, Scripted, chain, changing, fixed, oracle, tokens_of
from tests.tiny import VOCAB, letters, policy
from tlt.config import EngineSettings, SpecSettings
from tlt.engine import engine as engine_module
from tlt.engine.build import shapes_of
from tlt.engine.engine import EngineCore
from tlt.engine.exact import head_chain
from tlt.engine.sampler import Sampled
from tlt.errors import ConfigError
from tlt.kernels.attention import exact_triton as exact_attention_triton
from tlt.kernels.attention import triton as attention_triton
from tlt.kernels.linear import elementwise_triton
from tlt.kernels.linear import triton as linear_triton
from tlt.kernels.linear.plan import TILES, Config, choose_exact
from tlt.kernels.linear.reference import PreNormedRows
from tlt.kernels.linear.workspace import Workspace
from tlt.kernels.sampling import triton as sampling_triton
from tlt.model import attention as model_attention
from tlt.model import linear as model_linear
from tlt.model.attention import PagedLayout
from tlt.model.kv import KVCache
from tlt.spec.shape import OFF, Draft, Shape
from tlt.spec.tree import Trees

DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
PAGE = 16


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of a few hundred keys then have several parts, and parts several tiles."""
    monkeypatch.setattr(exact_attention_triton, "BLOCK_N", 32)
    monkeypatch.setattr(exact_attention_triton, "PART", 64)


# ---- attention


def attend(batch: Batch, window: int = 0, programs: int | None = None) -> Tensor:
    return exact_attention_triton.paged_attention(
        *(tensor.to(DEVICE, DTYPE) for tensor in (batch.q, batch.k_cache, batch.v_cache)),
        *(tensor.to(DEVICE) for tensor in (batch.query_start, batch.context_len, batch.page_table)),
        max_query=batch.max_query,
        scale=0.125,
        sliding_window=window,
        programs=programs,
    )


def newest(batch: Batch, spans: list[tuple[int, int]]) -> Batch:
    """Queries first … last − 1 of the batch's one request, for each span, each as a request over what lies before."""
    positions = [position for first, last in spans for position in range(first, last)]
    lengths = torch.tensor([0] + [last - first for first, last in spans])
    return replace(
        batch,
        q=batch.q[positions],
        query_start=lengths.cumsum(0).int(),
        context_len=torch.tensor([last for _, last in spans], dtype=torch.int32),
        page_table=batch.page_table.expand(len(spans), -1).contiguous(),
        max_query=int(lengths.max()),
    )


CASES = {
    "decode": [(1, 1), (1, 40), (1, 64), (1, 197)],
    "chunks": [(20, 20), (9, 170), (33, 40)],
    "mixed": [(1, 30), (12, 130), (0, 17), (4, 4)],
    "padded": [(1, 20), (1, 0), (0, 0), (2, 0)],
}


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("case", CASES)
def test_exact_attention_equals_the_naive_loop(case: str, window: int, small_parts: None) -> None:
    batch = make_batch(CASES[case], n_kv=2, group=3, d_head=64, dtype=DTYPE)
    found = attend(batch, window)[: int(batch.query_start[-1])]
    owned = batch.context_len.repeat_interleave(batch.query_start.diff()) > 0
    expected = naive(batch, 0.125, window)
    error = (found.cpu().double() - expected)[owned].norm() / expected.norm()
    assert error < (1e-2 if GPU else 2e-5)
    assert not found[~owned.to(found.device)].any()


@pytest.mark.parametrize("window", [0, 50])
def test_a_query_is_the_same_alone_in_chains_in_pieces_and_in_company(window: int, small_parts: None) -> None:
    length, places = 135, [0, 1, 63, 64, 130]
    batch = make_batch([(length, length)], n_kv=1, group=3, d_head=64, dtype=DTYPE)
    whole = attend(batch, window)
    one_by_one = [(place, place + 1) for place in places]
    for programs in (1, 2, 3) if GPU else (3,) if window else (1, 2):
        alone = torch.cat([attend(newest(batch, [span]), window, programs) for span in one_by_one[1::3]])
        assert torch.equal(alone, whole[places[1::3]])
        together = attend(newest(batch, one_by_one), window, programs)
        assert torch.equal(together, whole[places])
        chains = attend(newest(batch, [(place, place + 5) for place in places]), window, programs)
        assert torch.equal(chains.view(-1, 5, *whole.shape[1:])[:, 0], whole[places])
        assert torch.equal(chains[-5:], whole[130:135])
    pieces = [(0, 7), (7, 70), (70, 71), (71, 135)]
    assert torch.equal(attend(newest(batch, pieces), window), whole)


@pytest.mark.parametrize("programs", [1, 2])
def test_a_draft_that_is_no_number_harms_those_behind_it_alone(programs: int, small_parts: None) -> None:
    batch = make_batch([(5, 135)], n_kv=2, group=3, d_head=64, dtype=DTYPE)
    before = attend(batch, programs=programs)
    page = int(batch.page_table[0, 132 // PAGE])
    batch.k_cache[page, 132 % PAGE] = float("nan")
    batch.v_cache[page, 132 % PAGE] = float("nan")
    after = attend(batch, programs=programs)
    assert torch.equal(after[:2], before[:2])
    assert after[2:].isnan().all()


def test_the_usual_attention_would_not_pass() -> None:
    """Cut by what else there is to do, a context is summed in another order."""
    batch = make_batch([(1, 300)], n_kv=1, group=2, d_head=64, dtype=DTYPE)
    tensors = [tensor.to(DEVICE, DTYPE) for tensor in (batch.q, batch.k_cache, batch.v_cache)]
    tensors += [tensor.to(DEVICE) for tensor in (batch.query_start, batch.context_len, batch.page_table)]
    outs = []
    for extra in (0, 3):
        launch = attention_triton.AttentionLaunch(16, 64, extra, 64, 4, 3)
        found = attention_triton.paged_attention(
            *tensors, max_query=1, scale=0.125, launch=launch, out=torch.empty_like(tensors[0])
        )
        outs.append(found)
    assert GPU or not torch.equal(*outs)  # bfloat16 outputs may round to the same all the same


def test_programs_fill_the_chip_and_no_more() -> None:
    share = exact_attention_triton.programs_per_context
    assert share(8, 64, 8192, 132) == 33
    assert share(8, 2, 8192, 132) == 2
    assert share(4096, 64, 8192, 132) == 1
    assert share(200, 10**6, 8192, 132) == 1  # parts would take too much memory
    assert exact_attention_triton.PART % exact_attention_triton.BLOCK_N == 0


# ---- products


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def test_one_configuration_serves_any_number_of_rows() -> None:
    shapes = {(n, k, gated) for n, k, gated, _ in TILES} | {(100, 72, True), (151936, 4096, False), (4096, 4096, False)}
    for n, k, gated in shapes:
        configs = [choose_exact(m, n, k, gated) for m in (1, 16, 17, 64, 65, 300, 8192)]
        assert len({replace(config, block_m=1) for config in configs}) == 1
        if not configs[0].swap:
            assert len(set(configs)) == 1
        if configs[0].split_k > 1:
            assert Workspace.on(torch.device("meta")).rows(configs[0], -(-n // configs[0].block_n), gated) >= 64


CONFIGS = {
    "plain": Config(16, 32, 64, split_k=1),
    "split": Config(16, 32, 64, split_k=3),
    "swapped": Config(16, 64, 64, split_k=2, swap=True),
    "wide": Config(16, 32, 64, wide=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_a_product_do_not_depend_on_their_number(name: str) -> None:
    config, (n, k) = CONFIGS[name], (72, 200)
    x, weight, up = random(36, k), random(2 * n, k, seed=1), random(36, n, seed=2)
    norm = random(n, seed=3)
    small = Workspace.on(torch.device(DEVICE), floats=config.split_k * 2 * 3 * (2 * 16 * 64 + 16) + 64, tiles=64)

    def compute(rows: slice, workspace: Workspace | None = None) -> tuple[Tensor, PreNormedRows]:
        gated = linear_triton.exact_linear(x[rows], weight, config, gated=True, workspace=workspace)
        summed = up[rows].clone()
        left = linear_triton.room_for(summed, norm, config.block_n)
        linear_triton.exact_linear(
            x[rows], weight[:n], config, residual=summed, out=summed, leave=left, workspace=workspace
        )
        return gated, left

    gated, left = compute(slice(None))
    expected = torch.nn.functional.linear(x.double(), weight.double())
    expected = torch.nn.functional.silu(expected[:, :n]) * expected[:, n:]
    assert (gated.double() - expected).norm() / expected.norm() < (1e-2 if GPU else 1e-5)
    for rows in (slice(0, 1), slice(17, 18), slice(28, 35)):
        alone, alone_left = compute(rows)
        assert torch.equal(alone, gated[rows])
        assert torch.equal(alone_left.x_MD, left.x_MD[rows])
        assert torch.equal(alone_left.pre_normed_MD, left.pre_normed_MD[rows])
        assert torch.equal(alone_left.squares_MP, left.squares_MP[rows])
    in_pieces, pieces_left = compute(slice(None), small)
    assert torch.equal(in_pieces, gated)
    assert torch.equal(pieces_left.squares_MP, left.squares_MP)


def test_a_workspace_too_small_for_one_tile_of_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="tiles of workspace"):
        Workspace.on(torch.device("cpu"), 10, 1).rows(CONFIGS["split"], 3, False)


# ---- the whole policy


@pytest.mark.skipif(GPU, reason="test_exact_gpu.py runs the engine itself")
@torch.no_grad()
def test_prompts_chains_and_single_tokens_leave_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The forward that GPU rollout runs, in the interpreter: keys, values, states and logits of every token."""
    monkeypatch.setattr(exact_attention_triton, "BLOCK_N", 16)
    monkeypatch.setattr(exact_attention_triton, "PART", 16)
    model = policy(torch.float32)
    text = torch.randint(2, VOCAB, (24,), generator=torch.Generator().manual_seed(1))

    class Kernels:
        @staticmethod
        def paged_attention(
            *args: Tensor, tree_mask_TW: Tensor | None, kv_splits_S: Tensor | None, pdl: bool, **how: object
        ) -> Tensor:
            assert tree_mask_TW is kv_splits_S is None
            return exact_attention_triton.paged_attention(*args, **how)  # type: ignore[arg-type]

        @staticmethod
        def rope_and_write(*args: object, pdl: bool, **how: object) -> Tensor:
            return attention_triton.rope_and_write(*args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(model_attention, "dispatch", lambda reference, in_triton: getattr(Kernels, reference.__name__))
    monkeypatch.setattr(model_linear, "in_gpu_rollout", lambda x: True)
    norm = elementwise_triton.rms_norm
    monkeypatch.setattr(elementwise_triton, "rms_norm", lambda x, weight, eps, pdl: norm(x, weight, eps))

    def compute(pieces: list[tuple[int, int]], beside: int = 0) -> tuple[Tensor, KVCache]:
        """The text in these pieces, one forward each; `beside`: so many other requests' tokens in every forward."""
        pages = -(-len(text) // PAGE)
        cache = KVCache.allocate(model.config, pages + beside, PAGE, torch.float32, torch.device("cpu"))
        logits = []
        for first, last in pieces:
            own = torch.arange(first, last)
            positions = torch.cat((own, torch.zeros(beside, dtype=torch.int64)))
            tables = torch.arange(pages, dtype=torch.int32).repeat(1 + beside, 1)
            tables[1:, 0] = pages + torch.arange(beside)
            starts = [0, last - first, *range(last - first + 1, last - first + beside + 1)]
            layout = PagedLayout(
                cache=cache,
                positions_T=positions,
                slots_T=torch.cat((own, (pages + torch.arange(beside)) * PAGE)).int(),
                query_start_R1=torch.tensor(starts, dtype=torch.int32),
                context_R=torch.tensor([last] + [1] * beside, dtype=torch.int32),
                pages_RP=tables,
                max_query=last - first,
                exact=True,
            )
            tokens = torch.cat((text[first:last], text[:beside]))
            logits.append(model.logits(model(tokens, layout).hidden_TD, exact=True)[: last - first])
        return torch.cat(logits), cache

    whole, cache = compute([(0, 24)])
    for pieces, beside in (
        ([(0, 7), (7, 15), (15, 16), (16, 17), (17, 24)], 1),  # pages and parts end at 16
        ([(0, 20), (20, 24)], 5),
    ):
        found, own = compute(pieces, beside)
        assert torch.equal(found, whole)
        assert torch.equal(own.k[:, : cache.k.shape[1]], cache.k)
        assert torch.equal(own.v[:, : cache.v.shape[1]], cache.v)


# ---- sampling


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_log_probabilities_do_not_depend_on_the_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on whether somebody there asks for filters."""
    monkeypatch.setattr(sampling_triton, "PROGRAMS", 2)  # so that a few rows are already many
    vocab = 4500
    params = [PLAIN[0], PLAIN[2], *(FILTERED if GPU else FILTERED[:1])]
    generator = torch.Generator().manual_seed(9)
    logits = (3 * torch.randn(len(params), vocab, generator=generator)).to(DEVICE)
    rows = rows_for(params, len(params), DEVICE)

    def draw(first: int, last: int, exact: bool) -> Sampled:
        out = Sampled.empty(last - first, DEVICE)
        sampling_triton.sample(
            logits[first:last].contiguous(),
            tuple(part[first:last] for part in rows.keys),
            tuple(part[first:last] for part in rows.settings),
            out.parts,
            filtered=any(p.top_k > 0 or p.top_p < 1.0 for p in params[first:last]),
            exact=exact,
        )
        return out

    together = draw(0, len(params), True)
    for row in range(len(params) if GPU else 2):
        alone = draw(row, row + 1, True)
        for name in ("token_R", "logprob_R", "policy_logprob_R"):
            assert torch.equal(getattr(alone, name), getattr(together, name)[row : row + 1])
    baseline = draw(0, 2, False)
    assert torch.equal(together.token_R[:2], baseline.token_R)
    # log-probabilities of about -10, from sums of 4500 terms of float32 in another order
    torch.testing.assert_close(together.policy_logprob_R[:2], baseline.policy_logprob_R, rtol=1e-6, atol=5e-5)
    assert sampling_triton._tiles(3) != sampling_triton._tiles(6), "here the usual sampler cuts by the company"


# ---- the engine


def test_a_walk_leaves_no_chain() -> None:
    trees = Trees.empty(2, 6, "cpu")
    trees.parent_RQ[:] = torch.tensor([[-1, 0, 1, 1, 3, -1], [-1, 0, 0, 2, 3, 4]])
    assert head_chain(trees).parent_RQ.tolist() == [[-1, 0, 1, -1, 3, -1], [-1, 0, -1, 2, 3, 4]]
    assert trees.parent_RQ[0, 3] == 1


@pytest.mark.parametrize(
    ("guesser", "shapes"),
    [("oracle", "chain"), ("oracle", "changing"), ("good", "tree"), ("random", "changing"), ("stale", "tree")],
)
def test_speculation_changes_no_token(guesser: str, shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact engine's ways in float64 on a CPU: trees of any form are walked along their first chain only."""
    monkeypatch.setattr(engine_module, "check_policy", lambda model: None)
    choose = {"chain": fixed(Shape(("x",), 4, 1, 5)), "tree": fixed(Shape(("x",), 5, 3, 16)), "changing": changing(3)}
    speculation = Scripted(GUESSERS[guesser], choose[shapes])
    engine = EngineCore(MODEL, letters(), EngineSettings(exact=True), speculation=speculation)
    engine.submit(requests(12, group=3))
    assert tokens_of({completion.key: completion for completion in engine.drain()}) == EXPECTED
    if (guesser, shapes) == ("oracle", "chain"):
        assert speculation.accept_length > 3


def test_a_branch_beside_the_chain_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong first child keeps the right second one from being accepted, where the usual engine accepts it."""
    monkeypatch.setattr(engine_module, "check_policy", lambda model: None)
    right = oracle(EXPECTED)

    def beside(key, written, shape):  # type: ignore[no-untyped-def]
        future = right(key, written, replace(shape, width=1)).tokens[:1]
        wrong = chain([(future[0] + 1) % VOCAB if future else 2])
        nodes = 1 + len(future)
        return Draft((*wrong.tokens, *future), (-1,) * nodes, (0.5,) * nodes)

    accepted = {}
    for exact in (False, True):
        speculation = Scripted(beside, fixed(Shape(("x",), 1, 2, 3)))
        engine = EngineCore(MODEL, letters(), EngineSettings(exact=exact), speculation=speculation)
        engine.submit(requests(6, group=3))
        for completion in engine.drain():
            assert list(completion.tokens) == EXPECTED[completion.key]
        accepted[exact] = speculation.accept_length
    assert accepted[False] > 1.5
    assert accepted[True] == 1.0


def test_a_policy_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="the policy is float64 on cpu; expected bfloat16 on a GPU"):
        EngineCore(MODEL, letters(), EngineSettings(exact=True))


def test_only_chains_are_chosen_from() -> None:
    spec = SpecSettings(drafter="both", path="x", depths=(2, 4, 8), verifies=(3, 5, 9, 16))
    shapes = shapes_of(spec, exact=True)
    assert set(shapes) == {OFF} | {
        Shape((who,), depth, 1, depth + 1) for who, depth in itertools.product(("suffix", "eagle"), (2, 4, 8))
    }
    assert shapes_of(SpecSettings(), exact=True) == (OFF,)
    for wrong in ({"widths": (2, 4)}, {"depths": (3,), "verifies": (9,)}):
        with pytest.raises(ConfigError, match="expected a chain among them"):
            shapes_of(replace(spec, **wrong), exact=True)
