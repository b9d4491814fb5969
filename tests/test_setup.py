"""The set-up of the tests: what a test draws follows from its name, and `tl.dot` adds up in one order on every CPU."""

import random

import numpy as np
import pytest
import torch

from tests.conftest import seed_from

GPU = torch.cuda.is_available()


def drawn() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64))]


@pytest.fixture(scope="module")
def shared() -> list[float]:
    return drawn()


def test_a_test_starts_from_the_seed_of_its_name(request: pytest.FixtureRequest) -> None:
    found = drawn()
    assert drawn() != found
    seed_from(request.node.nodeid)
    assert drawn() == found


def test_a_shared_fixture_starts_from_a_seed_of_its_own(shared: list[float], request: pytest.FixtureRequest) -> None:
    seed_from("tests/test_setup.py::shared")
    assert drawn() == shared
    seed_from(request.node.nodeid)
    assert drawn() != shared


def test_a_name_gives_the_same_seed_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TLT_TEST_SEED", raising=False)
    seed_from("a name")
    assert drawn() == DRAWN
    monkeypatch.setenv("TLT_TEST_SEED", "1")
    seed_from("a name")
    assert drawn() != DRAWN


DRAWN = [0.12043065615997262, 0.03975730894961926, 0.42297252588842627]


@pytest.mark.skipif(GPU, reason="there the matrix units add up")
def test_the_interpreters_dot_adds_up_in_ascending_order() -> None:
    """So that the bits of an element do not depend on the rows beside it. BLAS would fail this on any CPU: it fuses
    products and sums, or keeps several partial sums."""
    triton = pytest.importorskip("triton")
    tl = pytest.importorskip("triton.language")

    @triton.jit
    def product(a_ptr, b_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
        m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :])
        b = tl.load(b_ptr + k[:, None] * N + n[None, :])
        tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, input_precision="ieee"))

    def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(a), b.shape[1])
        product[(1,)](a, b, out, len(a), *b.shape)
        return out

    a, b = torch.randn(64, 32), torch.randn(32, 16)
    expected = torch.zeros(64, 16)
    for k in range(32):
        expected = expected + a[:, k, None] * b[k]
    assert torch.equal(dot(a, b), expected)
    assert torch.equal(dot(a[16:32].contiguous(), b), expected[16:32])
