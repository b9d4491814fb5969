"""The parts of a fleet, each alone: who gets which requests, shares of an update, sums, gradients that meet."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt.cli import main
from tlt.cluster import transfer
from tlt.cluster.all_reduce import AllReduceBroken, AllReduceGroup, Rendezvous, RendezvousStore
from tlt.cluster.averaging import LeftSession, SessionAveraging, SessionLeader, SessionOpened
from tlt.cluster.timeline import TimelineSpan, longest_spans, seconds_of
from tlt.cluster.transfer import on_host
from tlt.dispatch import Dispatch, deal
from tlt.drafting.group_size import GroupSize, SessionTimes
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


def test_a_next_turn_goes_where_its_pages_are_or_to_another_if_the_worker_is_lost() -> None:
    dispatch = Dispatch(rows=1)
    dispatch.begin([request(n, f"p{n}") for n in range(4)], workers=[0, 1])
    worker_of = {number: worker for worker, numbers in handed_out(dispatch) for number in numbers}
    number = next(number for number, worker in worker_of.items() if worker == 0)
    (other,) = [n for n, worker in worker_of.items() if worker == 1][:1]
    further = replace(request(number, f"p{number}"), prompt=(1, 5, 6))
    for n, worker in ((number, 0), (other, 1)):
        assert dispatch.completed(worker, completion(n))
    dispatch.add([further, replace(request(other, f"p{other}"), prompt=(1, 5, 6))])
    assert dispatch.open == 4
    assert dispatch.lost(1) == 1
    handed = handed_out(dispatch)
    assert handed[0] == (0, [number])
    assert dispatch.completed(0, completion(number))
    handed += handed_out(dispatch)
    assert (0, [other]) in handed


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


def groups(size: int, timeout_s: float = DEAD_S) -> list[AllReduceGroup]:
    """Process groups of members that have met."""
    store, found = RendezvousStore("127.0.0.1"), [AllReduceGroup(timeout_s) for _ in range(size)]
    meeting = store.rendezvous("session")
    on_threads([partial(group.join, meeting, rank, size, "127.0.0.1") for rank, group in enumerate(found)])
    return found


def steps_of(group: AllReduceGroup, own: torch.Tensor, must_end: Callable[[], bool]) -> list[torch.Tensor]:
    """The mean gradients of a member's micro-steps, until the session is over."""
    together, means = SessionAveraging(), list[torch.Tensor]()
    together.enter(group, 3, must_end)
    while not together.over:
        gradient = own[len(means)].clone()
        together.gradients([gradient[:3], gradient[3:]])
        means.append(gradient)
    together.leave()
    return means


@pytest.mark.parametrize("leaver", [0, 2])
def test_members_hold_the_same_mean_and_stop_at_the_same_step(leaver: int) -> None:
    """Whichever of them wants to."""
    steps, gradients = 5, torch.randn(3, 9, 7)
    asked = [0, 0, 0]

    def must_end(number: int) -> bool:
        asked[number] += 1
        return number == leaver and asked[number] == steps

    results = on_threads(
        [partial(steps_of, group, gradients[n], partial(must_end, n)) for n, group in enumerate(groups(3))]
    )
    for means in results:
        assert len(means) == steps
        for step in range(steps):
            assert torch.equal(means[step], results[0][step])
            torch.testing.assert_close(means[step], gradients[:, step].mean(0), **ROUNDED)


def test_a_member_that_is_gone_ends_the_session_of_the_others() -> None:
    members, gradients = groups(3), torch.randn(2, 9, 7)
    members[2].leave()

    def others(number: int) -> bool:
        with pytest.raises(LeftSession):
            steps_of(members[number], gradients[number], lambda: False)
        return True

    assert on_threads([lambda: others(0), lambda: others(1)]) == [True, True]


def test_a_member_that_hangs_ends_the_session_of_the_others() -> None:
    """It is there and does not answer: the others give up after the time limit of their group."""
    members, gradients = groups(3, timeout_s=5.0), torch.randn(2, 9, 7)

    def others(number: int) -> bool:
        with pytest.raises(LeftSession):
            steps_of(members[number], gradients[number], lambda: False)
        return True

    assert on_threads([lambda: others(0), lambda: others(1)]) == [True, True]
    members[2].leave()


def test_the_leader_sends_its_drafter_bit_by_bit() -> None:
    sent = [torch.randn(3, 4, dtype=torch.float64), torch.tensor(7), torch.ones(2, 2).bfloat16(), torch.tensor([True])]
    places = [[torch.zeros_like(tensor) for tensor in sent] for _ in range(3)]
    places[1] = [tensor.clone() for tensor in sent]
    on_threads([partial(group.broadcast, place, 1) for group, place in zip(groups(3), places, strict=True)])
    for place in places:
        assert all(torch.equal(tensor, other) for tensor, other in zip(place, sent, strict=True))


def opened(session: int, *members: int) -> SessionOpened:
    return SessionOpened(session, 0, members, Rendezvous("127.0.0.1", 1, "x"), 1, None)


def test_a_session_begins_with_those_who_have_confirmed() -> None:
    """One that has asked to join and left meanwhile is left out, and so is one that confirms too late."""
    leader = SessionLeader()
    asked = [threading.Thread(target=leader.request_join, args=(number, DEAD_S)) for number in (1, 2)]
    for thread in asked:
        thread.start()
    while leader.requesters([1, 2]) != (1, 2):
        pass
    session = leader.invite([1, 2])
    for thread in asked:
        thread.join()
    found: list[SessionOpened | None] = []
    confirming = threading.Thread(target=lambda: found.append(leader.confirm(session, 1, "as it was", DEAD_S)))
    confirming.start()
    assert leader.wait_confirmed([1], DEAD_S) == {1: "as it was"}
    assert leader.wait_confirmed([1, 2], 0.01) == {1: "as it was"}
    leader.open(opened(session, 0, 1))
    confirming.join()
    assert found == [opened(session, 0, 1)]
    assert leader.confirm(session, 2, None, DEAD_S) is None
    leader.close()
    assert leader.confirm(session, 1, None, DEAD_S) is None


def test_nobody_is_admitted_in_vain() -> None:
    assert SessionLeader().request_join(1, 0.01) is None


def test_weights_are_averaged_every_few_micro_steps_and_at_the_end() -> None:
    taken: list[list[int]] = []

    def member(group: AllReduceGroup, number: int) -> list[torch.Tensor]:
        together, weight, averaged = SessionAveraging(), torch.zeros(3), list[int]()
        together.enter(group, 3, lambda: number == 1 and together.rounds == 7, every=3)
        while not together.over:
            gradient = torch.full((3,), float(number + 1))
            together.gradients([gradient])
            weight += gradient
            if together.weights([weight]):
                averaged.append(together.rounds)
        taken.append(averaged)
        return [weight]

    weights = on_threads([partial(member, group, number) for number, group in enumerate(groups(3))])
    assert taken == [[3, 6, 8]] * 3
    for (weight,) in weights:
        assert torch.equal(weight, torch.full((3,), 8 * 2.0))


def test_a_group_averages_as_often_and_has_as_many_members_as_pay() -> None:
    pays = GroupSize(8)
    assert (pays.most, pays.every(8)) == (8, 1)  # nothing is known
    pays.observe(1, SessionTimes(100, 1.0, 0, 0.0))
    pays.observe(4, SessionTimes(7, 1.0, 7, 1.0))
    assert (pays.most, pays.every(8)) == (8, 1)  # nor is it by these
    pays.observe(2, SessionTimes(10, 10 * 0.2 + 10 * 0.016, 10, 10 * 0.016))
    assert pays.share(2) == pytest.approx(0.016 / 0.216)
    assert pays.share(4) == pytest.approx(0.024 / 0.224)  # a ring sends nearly twice as much among many
    assert [pays.every(members) for members in (2, 3, 4, 8)] == [1, 1, 2, 2]
    assert pays.share(8, every=2) < 0.1 < pays.share(8)
    assert pays.most == 8
    slow = GroupSize(8)
    slow.observe(2, SessionTimes(10, 10 * 0.2 + 10 * 0.25, 10, 10 * 0.25))
    assert [slow.every(members) for members in (2, 3, 4)] == [12, 15, 0]
    assert slow.most == 3
    for _ in range(20):
        slow.observe(2, SessionTimes(10, 2.0 + 5.0, 10, 5.0))  # the network has become slow: a worker alone learns
    assert slow.most == 1


def test_alone_nothing_is_averaged() -> None:
    tensor = torch.ones(2)
    SessionAveraging().gradients([tensor])
    SessionAveraging().mean([tensor])
    assert not SessionAveraging().weights([tensor])
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


def test_of_many_spans_the_longest_are_told_in_the_order_of_time() -> None:
    spans = [TimelineSpan("idle" if n % 2 else "drafting", float(n), 1.0 + n % 10) for n in range(50)]
    told = longest_spans(spans, 15)
    assert [span.start for span in told] == [float(n) for n in range(50) if n % 10 > 6]
    assert longest_spans(spans[:15], 15) == spans[:15]


def test_without_ray_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray" or name.startswith("tlt.cluster")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["train", "recipes/quickstart.toml", "--cluster.workers", "2"]) == 2
    assert "pip install 'tlt-rl[ray]'" in capsys.readouterr().err
