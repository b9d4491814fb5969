"""The parts of a fleet, each alone: who gets which requests, shares of an update, sums, gradients that meet."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt.cli import main
from tlt.cluster import transfer
from tlt.cluster.all_reduce import AllReduceBroken, AllReduceGroup, RendezvousStore
from tlt.cluster.averaging import GradientAveraging, GradientReducer, LeftSession, MeanGradient
from tlt.cluster.timeline import TimelineSpan, seconds_of
from tlt.cluster.transfer import on_host
from tlt.dispatch import Dispatch, deal
from tlt.engine.request import Request
from tlt.model.fingerprint import fingerprint
from tlt.types import Completion, Experience, Key, Prompt, Rollout, SamplingParams, Timing

DEAD_S = 300.0  # after which something that is waited for will not happen any more
ROUNDED = {"rtol": 1e-6, "atol": 1e-6}  # sums of three numbers of about 1 in float32, in whatever order


# ---- who gets which requests


def request(number: int, prompt: str, most: int = 100) -> Request:
    return Request(Key(0, number), (1,), SamplingParams(max_tokens=most), prompt)


def completion(number: int, length: int = 3) -> Completion:
    tokens = (5,) * length
    floats = (0.0,) * length
    return Completion(Key(0, number), (1,), tokens, "", floats, floats, "eos", 0, Timing(0.0, 0.0))


def handed_out(dispatch: Dispatch) -> list[tuple[int, list[int]]]:
    found = []
    while (handed := dispatch.next()) is not None:
        found.append((handed[0], [one.key.request for one in handed[1]]))
    return found


def test_groups_stay_whole_and_go_to_whoever_has_least() -> None:
    dispatch = Dispatch(rows=100)
    dispatch.begin([request(n, f"p{n // 2}") for n in range(8)], workers=[0, 1])
    handed = handed_out(dispatch)
    assert [len(requests) for _, requests in handed] == [2, 2, 2, 2]
    assert sorted(worker for worker, _ in handed) == [0, 0, 1, 1]


def test_what_is_expected_to_be_long_goes_first() -> None:
    dispatch = Dispatch(rows=100)
    lengths = {0: 10, 1: 90, 2: 40}
    dispatch.begin([request(n, f"p{n}") for n in lengths], workers=[0])
    handed_out(dispatch)
    for number, length in lengths.items():
        assert dispatch.completed(0, completion(number, length))
    dispatch.begin([request(10 + n, f"p{n}") for n in lengths], workers=[0, 1])
    assert handed_out(dispatch) == [(0, [11]), (1, [12]), (1, [10])]


def test_a_batch_that_is_full_leaves_the_rest_to_the_faster() -> None:
    dispatch = Dispatch(rows=2)
    dispatch.begin([request(n, f"p{n}") for n in range(10)], workers=[0, 1])
    first = handed_out(dispatch)
    assert len(first) == 6  # two rows each, and one more
    assert dispatch.waiting == 4
    fast = [number for worker, numbers in first if worker == 1 for number in numbers]
    for number in fast:
        assert dispatch.completed(1, completion(number))
    assert [worker for worker, _ in handed_out(dispatch)] == [1, 1, 1]


def test_few_groups_are_split() -> None:
    dispatch = Dispatch(rows=8)
    dispatch.begin([request(n, "p") for n in range(4)], workers=[0, 1])
    assert sorted(worker for worker, _ in handed_out(dispatch)) == [0, 0, 1, 1]


def test_what_a_lost_worker_had_is_answered_by_others_once() -> None:
    dispatch = Dispatch(rows=8)
    dispatch.begin([request(n, f"p{n}") for n in range(4)], workers=[0, 1])
    handed_out(dispatch)
    assert dispatch.completed(0, completion(3))
    assert dispatch.lost(0) == 1
    assert [worker for worker, _ in handed_out(dispatch)] == [1]
    assert not dispatch.completed(0, completion(1))  # the dead worker's last words
    for number in (0, 1, 2):
        assert dispatch.completed(1, completion(number))
    assert dispatch.open == 0


# ---- shares of an update


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=24),
    workers=st.integers(1, 5),
    minibatches=st.integers(1, 3),
)
def test_shares_make_up_the_minibatches_of_one_worker(lengths: list[int], workers: int, minibatches: int) -> None:
    experiences = [Experience(Rollout(Prompt("p", ""), completion(n, ell), 0.0), 0.0) for n, ell in enumerate(lengths)]
    shares = deal(experiences, workers, minibatches)
    assert len(shares) == workers
    for first in range(minibatches):
        whole = sorted(e.rollout.completion.key.request for e in experiences[first::minibatches])
        assert sorted(e.rollout.completion.key.request for share in shares for e in share[first::minibatches]) == whole


def test_shares_have_about_as_many_tokens() -> None:
    lengths = [100, 10, 10, 10, 90, 10, 10, 10]
    experiences = [Experience(Rollout(Prompt("p", ""), completion(n, ell), 0.0), 0.0) for n, ell in enumerate(lengths)]
    tokens = [sum(len(e.rollout.completion.tokens) for e in share) for share in deal(experiences, 2, 1)]
    assert max(tokens) - min(tokens) <= 10


# ---- the ring


def on_threads(functions: list[Callable[[], object]]) -> list[object]:
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(timeout=DEAD_S) for future in [pool.submit(function) for function in functions]]


def joined(size: int) -> list[AllReduceGroup]:
    place = RendezvousStore("127.0.0.1")
    groups = [AllReduceGroup(DEAD_S) for _ in range(size)]
    rendezvous = place.rendezvous("a")
    on_threads([lambda r=r: groups[r].join(rendezvous, r, size, "127.0.0.1") for r in range(size)])
    return groups


def test_everyone_has_the_sum() -> None:
    groups = joined(3)
    given_ = [[torch.randn(4, 5), torch.full((2,), float(r), dtype=torch.float64)] for r in range(3)]
    sums = [sum(parts[i] for parts in given_) for i in range(2)]
    on_threads([lambda r=r: groups[r].all_reduce(given_[r]) for r in range(3)])
    for tensors in given_:
        for tensor, total in zip(tensors, sums, strict=True):
            torch.testing.assert_close(tensor, total, **ROUNDED)
        assert torch.equal(tensors[0], given_[0][0])  # bit by bit


def test_a_ring_breaks_when_a_member_goes() -> None:
    groups = joined(2)
    groups[1].leave()
    with pytest.raises(AllReduceBroken):
        groups[0].all_reduce([torch.ones(3)])
    groups[0].all_reduce([torch.ones(3)])  # alone again: a sum of one


def test_a_ring_of_one_is_no_ring() -> None:
    ring = AllReduceGroup(1.0)
    ring.join(RendezvousStore("127.0.0.1").rendezvous("x"), 0, 1, "127.0.0.1")
    tensor = torch.ones(3)
    ring.all_reduce([tensor])
    assert torch.equal(tensor, torch.ones(3))


# ---- training together


def member(reducer: GradientReducer, number: int, session: int, together: GradientAveraging) -> None:
    """Gives at the leader's reducer, as calls from another process would."""

    def exchange(own: np.ndarray) -> MeanGradient:
        mean = reducer.give(session, together.rounds + 1, number, own, DEAD_S)
        if mean is None:
            raise LeftSession
        return mean

    together.enter(exchange)


def test_members_hold_the_same_mean_and_stop_at_the_same_step() -> None:
    reducer, present = GradientReducer(0), [1, 2]
    requests = [threading.Thread(target=reducer.request_join, args=(number, DEAD_S)) for number in present]
    for request_join in requests:
        request_join.start()
    while reducer.requesters(present) != (1, 2):
        pass
    session = reducer.open(present, {"some": "state"})
    for request_join in requests:
        request_join.join()
    steps = 5
    gradients = torch.randn(3, steps, 7)
    asked = iter([False] * (steps - 1) + [True])

    def leader() -> list[torch.Tensor]:
        together = GradientAveraging()
        together.enter(lambda own: reducer.mean(own, lambda: present, lambda: next(asked)))
        return train(together, gradients[0])

    def follower(number: int) -> list[torch.Tensor]:
        together = GradientAveraging()
        member(reducer, number, session, together)
        return train(together, gradients[number])

    def train(together: GradientAveraging, own: torch.Tensor) -> list[torch.Tensor]:
        means = []
        while not together.over:
            gradient = own[len(means)].clone()
            together.average([gradient[:3], gradient[3:]])
            means.append(gradient)
        return means

    results = on_threads([leader, lambda: follower(1), lambda: follower(2)])
    for means in results:
        assert len(means) == steps
        for step in range(steps):
            assert torch.equal(means[step], results[0][step])
            torch.testing.assert_close(means[step], gradients[:, step].mean(0), **ROUNDED)


def test_the_leader_waits_for_nobody_who_is_gone() -> None:
    reducer = GradientReducer(0)
    reducer.open([1], None)
    mean = reducer.mean(np.ones(2), list, lambda: True)
    assert mean.vector.tolist() == [1.0, 1.0]
    assert reducer.give(1, 1, 1, np.ones(2), 0.1) is None  # too late


def test_who_asks_again_has_left_the_session() -> None:
    reducer = GradientReducer(0)
    reducer.open([1], None)
    again = threading.Thread(target=reducer.request_join, args=(1, DEAD_S))
    again.start()
    mean = reducer.mean(np.full(1, 3.0), lambda: [1], lambda: True)
    assert mean.vector.tolist() == [3.0]
    reducer.open([1], None)
    again.join()


def test_nobody_is_admitted_in_vain() -> None:
    assert GradientReducer(0).request_join(1, 0.01) is None


def test_alone_nothing_is_averaged() -> None:
    tensor = torch.ones(2)
    GradientAveraging().average([tensor])
    assert torch.equal(tensor, torch.ones(2))


# ---- what travels


def test_a_fingerprint_sees_every_bit() -> None:
    tensors = [torch.randn(5, 3), torch.randn(7).to(torch.bfloat16), torch.randn(2, dtype=torch.float64)]
    before = fingerprint(tensors)
    assert before == fingerprint(on_host(tensors))
    for tensor in tensors:
        for index in range(tensor.numel()):
            flat = tensor.view(-1)
            kept = flat[index].clone()
            flat[index] = torch.nextafter(flat[index], flat[index] + 1) if flat.dtype != torch.bfloat16 else kept * 1.01
            assert fingerprint(tensors) != before
            flat[index] = kept
    swapped = [tensors[0].flip(0).contiguous(), *tensors[1:]]
    assert fingerprint(swapped) != before
    assert fingerprint(tensors) == before


def test_a_copy_on_the_host_is_a_copy() -> None:
    tensor = torch.ones(2)
    state = on_host({"a": [tensor, (tensor, 1)], "b": None})
    tensor.zero_()
    assert state["a"][0].tolist() == [1.0, 1.0]
    assert isinstance(state["a"][1], tuple)


def test_a_directory_arrives_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_PIECE", 100)
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "deep").mkdir(parents=True)
    contents = {"deep/x.bin": bytes(range(256)), "even": bytes(200), "empty": b""}
    for name, content in contents.items():
        (source / name).write_bytes(content)
    pieces = list(transfer.pieces_of(source))
    assert [len(content) for _, content in pieces] == [100, 100, 56, 0, 100, 100]
    for name, content in pieces:
        transfer.append_piece(name, content, target)
    assert {name: (target / name).read_bytes() for name in contents} == contents


def test_what_is_written_shows_even_where_the_size_is_known_beforehand(tmp_path: Path) -> None:
    seen = [transfer.bytes_written(tmp_path)]
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(2**20)
        seen.append(transfer.bytes_written(tmp_path))
        for _ in range(2):
            file.write(bytes(2**19))
            os.fsync(file.fileno())
            seen.append(transfer.bytes_written(tmp_path))
    assert seen == sorted(set(seen))


def test_seconds_by_name() -> None:
    assert (
        seconds_of(
            [TimelineSpan("idle", 0.0, 1.0), TimelineSpan("drafting", 1.0, 2.0), TimelineSpan("idle", 3.0, 0.5)], "idle"
        )
        == 1.5
    )


def test_without_ray_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray" or name.startswith("tlt.cluster")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["train", "recipes/quickstart.toml", "--cluster.workers", "2"]) == 2
    assert "pip install 'tlt-rl[ray]'" in capsys.readouterr().err
