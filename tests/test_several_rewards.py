"""Several rewards with weights, penalties by length, whole steps in one call, and reward servers."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import tlt
from tests.training import small
from tlt.config import TaskSettings
from tlt.errors import ConfigError, TaskError
from tlt.event_builders import RewardMetrics, rewards_judged
from tlt.tasks import remote
from tlt.tasks.judge import DirectJudge, ProcessJudge, Verdict
from tlt.tasks.judging import Judging
from tlt.tasks.penalties import LengthPenalty, OverlongPenalty, penalty
from tlt.tasks.remote import RemoteReward, backoffs
from tlt.tasks.several import SeveralJudge, WeightedReward, judge_with, reward_names
from tlt.tasks.toy import ToyTask
from tlt.types import Completion, Key, Prompt, Timing
from tlt.watch.events import Evaluated, RewardsJudged
from tlt.watch.figures import figures_of
from tlt.watch.history import events_of, steps_of
from tlt.watch.metrics import metrics_of


def answer(text: str, tokens: int = 2, number: int = 0, prompt: str = "p") -> tuple[Prompt, Completion]:
    key = Key(0, number)
    return Prompt(prompt, "2+2?", "4"), Completion(key, (), (1,) * tokens, text, (), (), "eos", 0, Timing(0.0, 0.0))


# ---- penalties by length


def test_overlong_answers_are_punished_as_in_dapo() -> None:
    """With a limit of 20 tokens and a buffer of 5: nothing up to 15, then a fifth for each, 1 at the limit."""
    found = [OverlongPenalty(20, 5).reward(*answer("", tokens)) for tokens in (1, 15, 16, 18, 20, 25)]
    assert found == pytest.approx([0.0, 0.0, -0.2, -0.6, -1.0, -1.0])
    assert [LengthPenalty(20).reward(*answer("", tokens)) for tokens in (5, 20)] == [-0.25, -1.0]


def test_the_buffer_is_a_fifth_of_the_limit_unless_it_is_said() -> None:
    assert penalty("overlong", TaskSettings(), 20480) == OverlongPenalty(20480, 4096)
    assert penalty("overlong", TaskSettings(overlong_tokens=7), 20) == OverlongPenalty(20, 7)
    assert penalty("exact", TaskSettings(), 20) is None
    with pytest.raises(ConfigError, match=r"overlong_tokens is 21; expected at most 20, the limit"):
        penalty("overlong", TaskSettings(overlong_tokens=21), 20)


# ---- several


def test_rewards_are_weighted_and_summed_up() -> None:
    settings = TaskSettings(rewards=("exact", "task", "overlong"), reward_weights=(1.0, 0.5, 2.0), overlong_tokens=4)

    class Own:
        def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
            return {"score": 3.0, "letters": float(len(completion.text))}

    with judge_with(settings, 10, own=DirectJudge(Own())) as judge:
        right, wrong = judge.judge([answer("so 4", 2), answer("5", 8)])
    assert right == Verdict(2.5, None, {"exact": 1.0, "task": 3.0, "overlong": 0.0}, {"task/letters": 4.0})
    assert wrong == Verdict(0.5, None, {"exact": 0.0, "task": 3.0, "overlong": -0.5}, {"task/letters": 1.0})


def test_one_that_fails_is_counted_within_the_sum() -> None:
    settings = TaskSettings(rewards=("gsm8k", "length"), reward_errors="count", failed_reward=-1.0)
    with judge_with(settings, 4) as judge:
        (verdict,) = judge.judge([(Prompt("p", "2+2?", "no number"), answer("4", 2)[1])])
    assert (verdict.reward, verdict.parts) == (-1.5, {"gsm8k": -1.0, "length": -0.5})
    assert verdict.failure is not None
    assert verdict.failure.kind == "raised"


MATHS = """
def maths(prompts, completions, kind, **columns):
    return [float("4" in text) if one == "maths" else None for text, one in zip(completions, kind)]

async def brief(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "words": 1} if extra_info["kind"] == "text" else None
"""


def of_kind(kind: str, number: int) -> tuple[Prompt, Completion]:
    prompt, completion = answer("so 4", number=number)
    return replace(prompt, id=kind, extra={"kind": kind}), completion


def test_a_reward_may_leave_answers_to_others(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MATHS)
    rewards = (f"{tmp_path}/mine.py:maths", f"{tmp_path}/mine.py:brief")
    settings = TaskSettings(rewards=rewards, reward_weights=(0.5, 2.0), reward_timeout_s=600.0)
    with judge_with(settings, 20, frozenset({"kind"})) as judge:
        first, second = judge.judge([of_kind("maths", 0), of_kind("text", 1)])
        with pytest.raises(TaskError, match="none of the rewards maths, brief applies to prompt other; let one return"):
            judge.judge([of_kind("other", 2)])
    assert (first.reward, first.parts, first.metrics) == (0.5, {"maths": 1.0}, {})
    assert (second.reward, second.parts, second.metrics) == (2.0, {"brief": 1.0}, {"brief/words": 1.0})


def test_none_is_no_reward_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MATHS)
    settings = TaskSettings(reward=f"{tmp_path}/mine.py:maths", reward_timeout_s=600.0, reward_errors="count")
    with judge_with(settings, 20, frozenset({"kind"})) as judge:
        (verdict,) = judge.judge([of_kind("text", 0)])
    assert verdict.failure
    assert verdict.failure.kind == "no number"


def test_names_are_short_and_differ() -> None:
    rewards = ("exact", "a/one.py:score", "b/two.py:score", "http://host:80/judge", "https://host")
    assert reward_names(rewards) == ["exact", "score", "score-2", "judge", "host"]


def test_each_waits_for_none_of_the_others() -> None:
    met = threading.Barrier(2, timeout=300)

    class Meets:
        def reward(self, prompt: Prompt, completion: Completion) -> float:
            met.wait()
            return 1.0

    judge = SeveralJudge([WeightedReward(name, 1.0, DirectJudge(Meets())) for name in "ab"])
    assert judge.judge([answer("")])[0].reward == 2.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rewards": ("exact", "nonsense")}, "rewards is .*; expected each exact, gsm8k"),
        ({"rewards": ("task",), "name": "files", "path": "x"}, "rewards is .*; expected each exact, gsm8k"),
        ({"rewards": ("exact",), "reward_weights": (1.0, 2.0)}, "reward_weights is .*; expected 1 numbers, one per"),
        ({"reward_format": "("}, r"reward_format is .*; expected a regular expression \(missing \)"),
        ({"reward": "ftp://host/x"}, "reward is 'ftp://host/x'; expected exact"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        TaskSettings(**settings)


def test_means_are_over_the_answers_that_have_them() -> None:
    verdicts = [Verdict(1.0, metrics={"acc": 1.0}), Verdict(1.0, metrics={"acc": 0.0, "deep": 3.0})]
    assert RewardMetrics.of(verdicts) == RewardMetrics({}, {"acc": 0.5, "deep": 3.0})
    assert rewards_judged(1, [Verdict(1.0)]) is None


def test_a_run_tells_of_each_reward(tmp_path: Path) -> None:
    flags = ["--task.rewards=task,overlong", "--task.reward_weights=1,0.5", "--run.steps=2", "--sampling.max_tokens=10"]
    run = tlt.train(small(tmp_path, *flags, "--eval.every=2", "--eval.prompts=4"))
    told = events_of(run, RewardsJudged)
    assert [one.step for one in told] == [1, 2]
    for one, step in zip(told, steps_of(run), strict=True):
        assert one.parts["task"] + 0.5 * one.parts["overlong"] == pytest.approx(step.mean_reward)
        assert -1 <= one.parts["overlong"] < 0
    metrics = metrics_of(told[0])
    assert metrics is not None
    assert metrics.values == {f"rewards/{name}": value for name, value in told[0].parts.items()}
    evaluated = events_of(run, Evaluated)[-1]
    assert set(evaluated.metrics) == {"task", "overlong"}
    assert evaluated.metrics["task"] + 0.5 * evaluated.metrics["overlong"] == pytest.approx(evaluated.mean_reward)
    assert "Rewards, each" in [figure.title for figure in figures_of(run)]


class Telling(ToyTask):
    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:  # type: ignore[override]
        return {"score": super().reward(prompt, completion), "letters": float(len(completion.text))}


def test_what_a_task_tells_beside_its_reward_is_a_metric(tmp_path: Path) -> None:
    run = tlt.train(small(tmp_path, "--run.steps=1", "--sampling.max_tokens=6"), Telling())
    (told,) = events_of(run, RewardsJudged)
    assert told.parts == {}
    assert 0 < told.metrics["letters"] <= 6
    assert "Told by rewards: letters" in [figure.title for figure in figures_of(run)]


# ---- a whole step in one call


def test_all_answers_of_a_step_are_judged_in_one_call(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(prompts, completions): return [len(completions) + len(text) for text in completions]\n"
    )
    settings = TaskSettings(reward=f"{tmp_path}/mine.py:reward", reward_batch="step", reward_timeout_s=600.0)
    asked = [(Prompt(str(group), "?"), [Key(0, 2 * group + place) for place in range(2)]) for group in range(2)]
    with ProcessJudge(settings) as judge, Judging(judge, asked, by_step=True) as judging:
        for number, text in ((3, "abc"), (0, ""), (2, "ab"), (1, "a")):
            judging.hand_in(answer(text, number=number)[1])
        judged = judging.judged()
    assert [[rollout.reward for rollout in one.group.rollouts] for one in judged] == [[4.0, 5.0], [6.0, 7.0]]


# ---- servers

Reply = tuple[int, dict[str, str], bytes]


class RewardServer:
    """A real HTTP server on this machine that replies as it is told, one reply after the other."""

    def __init__(self, replies: Sequence[Callable[[dict[str, Any]], Reply | None]]) -> None:
        self.asked: list[dict[str, Any]] = []
        outer, waiting, self.let_go = self, list(replies), threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                reply = (waiting.pop(0) if len(waiting) > 1 else waiting[0])(outer.asked[-1])
                if reply is None:  # never, as far as a client can tell
                    outer.let_go.wait(300)
                    return
                self.send_response(reply[0])
                for name, value in reply[1].items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply[2])

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/judge"

    @contextmanager
    def running(self) -> Iterator["RewardServer"]:
        self._thread.start()
        try:
            yield self
        finally:
            self.let_go.set()
            self._server.shutdown()
            self._server.server_close()


def lengths(asked: dict[str, Any]) -> Reply:
    rewards = [
        {"score": len(one["completion"]), "right": one["reference"] in one["completion"]} for one in asked["answers"]
    ]
    return 200, {}, json.dumps({"rewards": rewards}).encode()


def says(status: int, text: str = "", **headers: str) -> Callable[[dict[str, Any]], Reply]:
    return lambda asked: (status, {name.replace("_", "-"): value for name, value in headers.items()}, text.encode())


def never(asked: dict[str, Any]) -> None:
    return None


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Between attempts nobody waits in this process, but notes for how long. No proxy stands between."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    noted: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", noted.append)
    return noted


ASKED = [{"prompt": "2+2?", "completion": text, "reference": "4"} for text in ("so 4", "5")]


def test_a_server_judges_in_a_run(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}' for n in range(4)))
    with RewardServer([lengths]).running() as server:
        files = ["--task.name=files", f"--task.path={tmp_path}/rows.jsonl", f"--task.reward={server.url}"]
        flags = [*files, "--run.steps=1", "--sampling.max_tokens=6", "--task.group=2", "--task.reward_timeout_s=600"]
        run = tlt.train(small(tmp_path, *flags))
    assert [len(asked["answers"]) for asked in server.asked] == [2] * 4, "the answers to a prompt, together"
    sent = [one for asked in server.asked for one in asked["answers"]]
    assert {"prompt", "completion", "tokens", "reference", "data_source", "columns"} == set(sent[0])
    (step,), (told,) = steps_of(run), events_of(run, RewardsJudged)
    assert step.mean_reward == pytest.approx(sum(len(one["completion"]) for one in sent) / 8)
    assert told.metrics["right"] == sum(one["reference"] in one["completion"] for one in sent) / 8


def test_what_may_pass_is_tried_again(waits: list[float]) -> None:
    replies = [says(503), says(429, Retry_After="7"), says(500), lengths]
    with RewardServer(replies).running() as server:
        found = RemoteReward(server.url, 60.0, retries=3).values(ASKED)
    assert found == [{"score": 4, "right": True}, {"score": 1, "right": False}]
    assert [asked["answers"] for asked in server.asked] == [ASKED] * 4
    assert waits == [0.5, 7.0, 2.0]


@pytest.mark.parametrize(
    ("reply", "asked", "expected"),
    [
        (says(503, "busy"), 2, "answered with status 503: 'busy'; it was asked 2 times"),
        (says(404, "where?"), 1, r"answered with status 404: 'where\?'; it was asked once"),
        (says(200, "no"), 1, r"sent 'no'; expected \{\"rewards\": \[2 of them\]\}"),
        (says(200, '{"rewards": [1]}'), 1, r"expected \{\"rewards\": \[2 of them\]\}"),
    ],
)
def test_what_a_server_does_wrong_is_said(reply: Callable[[dict[str, Any]], Reply], asked: int, expected: str) -> None:
    with RewardServer([reply]).running() as server:
        with pytest.raises(TaskError, match=expected):
            RemoteReward(server.url, 60.0, retries=1).values(ASKED)
        assert len(server.asked) == asked


def test_a_server_that_is_silent_has_its_time_at_every_attempt() -> None:
    with RewardServer([never]).running() as server:
        with pytest.raises(TaskError, match=r"(gave no answer within 0.1 s|could not be reached in time); .* 2 times"):
            RemoteReward(server.url, 0.05, retries=1).values(ASKED)
        assert len(server.asked) == 2


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/judge"
        with pytest.raises(TaskError, match=rf"the reward server {url} could not be reached \(.*refused.* 3 times"):
            RemoteReward(url, 60.0, retries=2).values(ASKED)


def test_a_status_without_the_text_it_announced_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            line, _ = listening.accept()
            with line:
                line.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\n")
                while line.recv(2**16):  # until the other side has had enough
                    pass

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/judge"
        with pytest.raises(TaskError, match="answered with status 404: nothing; it was asked once"):
            RemoteReward(url, 0.1, retries=3).values(ASKED[:1])


def test_a_judge_waits_for_as_long_as_a_server_may_ask_to() -> None:
    settings = TaskSettings(reward="http://host/judge", reward_timeout_s=0.1, reward_retries=3)
    assert ProcessJudge(settings)._limit_s(completions=2) >= 4 * 0.2 + 3 * 30.0


def test_waits_double_up_to_half_a_minute() -> None:
    assert list(backoffs(8)) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_server_that_fails_fails_the_reward_of_these_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with RewardServer([says(400, "bad")]).running() as server:
        settings = TaskSettings(reward=server.url, reward_timeout_s=600.0, reward_errors="count", failed_reward=-1.0)
        with ProcessJudge(settings) as judge:
            verdicts = judge.judge([answer("a", prompt="x"), answer("b", prompt="y")])
    assert [verdict.reward for verdict in verdicts] == [-1.0, -1.0]
    assert all(verdict.failure and "status 400" in verdict.failure.message for verdict in verdicts)
