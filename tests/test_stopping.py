"""Who stops a run: a scheduler with SIGTERM, its user with Ctrl-C, a machine that kills what the run cannot do without.
Its end is told, reported and cleaned up all the same."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tlt.cluster.liveness import RayLiveness

import tlt
from tests.processes import Child, descendants, wait_until_gone
from tests.training import small
from tlt.errors import ClusterError, Terminated
from tlt.signals import keeping_sigterm, raise_if_terminated, sigterm_raises
from tlt.types import Completion, Prompt
from tlt.watch.events import RunFailed, read_run
from tlt.watch.history import events_of

pytestmark = pytest.mark.skipif(current_thread() is not main_thread(), reason="signals come to the main thread")


@pytest.fixture(autouse=True)
def _no_handler() -> Iterator[None]:
    """Ray, in tests before these, leaves one in the process."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def ourselves() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# ---- the exception


def terminated(work: Callable[[], object]) -> Terminated:
    """What comes of the work where SIGTERM raises."""
    with pytest.raises(Terminated) as raised, sigterm_raises():
        work()
    return raised.value


def test_sigterm_is_raised_and_the_handler_goes() -> None:
    assert terminated(ourselves).code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    raise_if_terminated()  # it is over


def test_what_a_library_makes_of_it_becomes_it_again_and_another_one_is_too_late() -> None:
    reached = []

    def work() -> None:
        try:
            with sigterm_raises():
                try:
                    ourselves()
                except Terminated:
                    sys.exit(1)  # as Ray does
        finally:
            ourselves()
            reached.append("the end")

    terminated(work)
    assert reached == ["the end"]


def test_what_was_lost_is_raised_once_more() -> None:
    def work() -> None:
        with suppress(Terminated):
            ourselves()
        raise_if_terminated()

    terminated(work)


def test_an_exit_for_another_reason_stays_as_it_is() -> None:
    with pytest.raises(SystemExit) as raised, sigterm_raises():
        sys.exit(5)
    assert raised.value.code == 5


def test_the_handler_of_somebody_else_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with sigterm_raises():
            ourselves()
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_call_that_sets_its_own_handler_leaves_ours() -> None:
    def library() -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))

    def during() -> None:
        with keeping_sigterm():
            library()
            ourselves()

    def afterwards() -> None:
        with keeping_sigterm():
            library()
        ourselves()

    terminated(during)
    terminated(afterwards)


def test_other_threads_change_nothing() -> None:
    handlers = []

    def work() -> None:
        with sigterm_raises(), keeping_sigterm():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]


# ---- a run of one worker


class Scheduler:
    """A task during whose first reward the process is told to end."""

    def sample(self, step: int, count: int) -> list[Prompt]:
        return [Prompt(f"{step}:{number}", f"{number}+1=") for number in range(count)]

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        ourselves()
        return 0.0


def test_a_library_user_gets_the_exception_and_a_report(tmp_path: Path) -> None:
    with pytest.raises(Terminated):
        tlt.train(small(tmp_path, "--watch.report=true"), Scheduler())
    assert events_of(read_run(tmp_path / "run"), RunFailed)[-1].kind == "termination"
    assert (tmp_path / "run" / "report.html").is_file()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("number", "code", "line", "kind"),
    [
        (signal.SIGTERM, 143, "tlt: terminated: the process received SIGTERM", "termination"),
        pytest.param(signal.SIGINT, 130, "tlt: interrupted", "interruption", marks=pytest.mark.slow),
    ],
    ids=["SIGTERM", "SIGINT"],
)
def test_one_worker_that_is_stopped(tmp_path: Path, number: int, code: int, line: str, kind: str) -> None:
    child = Child.start(tmp_path)
    child.reached("rollout")
    child.process.send_signal(number)
    assert child.ended() == (code, [line])
    assert child.failure().kind == kind


# ---- a fleet

FLEET = ("--cluster.workers=2", "--cluster.cpus_per_worker=0.5")


@pytest.fixture
def _ray() -> None:
    pytest.importorskip("ray", reason="several workers need Ray: install tlt-rl[ray]")


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
@pytest.mark.parametrize("everybody", [False, True], ids=["driver", "everybody"])
def test_a_fleet_that_is_stopped(tmp_path: Path, everybody: bool) -> None:
    """Kubernetes tells the driver, Slurm tells every process of the job."""
    child = Child.start(tmp_path, *FLEET)
    child.reached("update")
    family = descendants(child.process.pid)
    for pid in [*(family if everybody else ()), child.process.pid]:
        os.kill(pid, signal.SIGTERM)
    assert child.ended() == (143, ["tlt: terminated: the process received SIGTERM"])
    assert child.failure().kind == "termination"
    wait_until_gone(family)  # Ray's agents notice the end of a raylet within some seconds


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
@pytest.mark.parametrize(("program", "named"), [("raylet", "raylet of this machine"), ("gcs_server", "gcs_server")])
def test_a_fleet_whose_cluster_dies(tmp_path: Path, program: str, named: str) -> None:
    child = Child.start(tmp_path, *FLEET)
    child.reached("update")
    family = descendants(child.process.pid)
    (victim,) = [pid for pid, command in family.items() if command.split(" ")[0].endswith(f"/{program}")]
    os.kill(victim, signal.SIGKILL)
    code, (line,) = child.ended()
    assert code == 1
    assert line.startswith("tlt: error: the ")
    assert named in line
    assert "does not run any more" in line
    assert child.failure().kind == "ClusterError"
    wait_until_gone(family)


# ---- the liveness


class Server:
    """Listens, and greets whoever connects, as Ray's processes do."""

    def __init__(self, port: int = 0) -> None:
        self._listening = socket.create_server(("127.0.0.1", port))
        self._taken: list[socket.socket] = []
        self.address = self._listening.getsockname()

    def greet(self) -> None:
        self._taken.append(self._listening.accept()[0])
        self._taken[-1].sendall(b"hello")

    def hang_up(self) -> None:
        """As with whoever is silent for long."""
        self._taken.pop().close()

    def die(self) -> None:
        for one in (self._listening, *self._taken):
            one.close()


@pytest.fixture
def lifeline_of(monkeypatch: pytest.MonkeyPatch) -> "Callable[..., RayLiveness]":
    pytest.importorskip("ray", reason="several workers need Ray: install tlt-rl[ray]")
    from tlt.cluster import liveness

    monkeypatch.setattr(liveness, "_RETRY_S", 0.0)
    return liveness.RayLiveness


def test_a_process_that_is_gone_is_named(lifeline_of: "Callable[..., RayLiveness]") -> None:
    head, raylet = Server(), Server()
    liveness = lifeline_of({"the head": head.address, "the raylet": raylet.address}, {"the head": 60, "the raylet": 0})
    liveness.check()
    for server in (head, raylet):
        server.greet()
    liveness.check()
    raylet.hang_up()
    liveness.check()  # it is still there: somebody accepts
    head.die()
    liveness.check()  # it may come back
    head = Server(head.address[1])
    liveness.check()
    assert not liveness.dead
    raylet.die()
    with pytest.raises(ClusterError, match=r"the raylet at 127\.0\.0\.1:\d+ does not run any more.*--resume"):
        liveness.check()
    assert liveness.dead
    head.die()


def test_somebody_who_does_not_answer_is_not_dead(
    lifeline_of: "Callable[..., RayLiveness]", monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(address: object, timeout: float) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    lifeline_of({"the head": ("10.0.0.1", 1)}, {"the head": 0.0}).check()


def test_a_broken_pipe_is_the_end_of_the_raylet_if_that_is_gone(
    lifeline_of: "Callable[..., RayLiveness]", monkeypatch: pytest.MonkeyPatch
) -> None:
    raylet = Server()
    liveness = lifeline_of({"the raylet": raylet.address}, {"the raylet": 0.0})

    def broken(call: Callable[[], None]) -> None:
        call()
        raise BrokenPipeError("Broken pipe")  # as Ray 2.40 does

    monkeypatch.setattr("ray.get", broken)
    with pytest.raises(BrokenPipeError):
        liveness.get(lambda: None)
    with pytest.raises(ClusterError, match=r"the raylet at .* does not run any more"):
        liveness.get(raylet.die)
