"""The fused row kernels do to the row state what their torch versions do."""

import pytest
import torch

from tlt.kernels.batch_state import reference

rows_triton = pytest.importorskip("tlt.kernels.batch_state.triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (5, 3), (70, 70), (70, 0), (130, 65)])
def test_rows_are_prepared_and_finished_alike(rows: int, count: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    ints = torch.randint(-(2**60), 2**60, (140, 5), generator=generator)
    ints[:, 0] = torch.randint(0, 1000, (140,), generator=generator)
    ints[:, 1] = torch.randint(0, 64, (140,), generator=generator)
    floats = torch.rand((140, 3), generator=generator)
    pages = torch.randint(0, 999, (140, 9), generator=generator, dtype=torch.int32)
    drawn = torch.randint(-1, 1000, (rows,), generator=generator)
    logprob, policy_logprob = torch.randn((2, rows), generator=generator)
    outcomes = []
    for module in (reference, rows_triton):
        state = [tensor.clone().to(DEVICE) for tensor in (ints, floats, pages)]
        live = torch.tensor(count, dtype=torch.int32, device=DEVICE)
        inputs = module.prepare_decode(*state, live, rows, 8)
        packed = module.finish_decode(state[0], live, *(x.to(DEVICE) for x in (drawn, logprob, policy_logprob)), rows)
        outcomes.append([*inputs, packed, state[0]])
    for expected, got in zip(*outcomes, strict=True):
        assert expected.dtype == got.dtype
        assert torch.equal(expected, got)
    assert torch.equal(outcomes[0][-1][count:].cpu(), ints[count:]), "idle rows stay as they are"
