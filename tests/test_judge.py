"""The judge: a user's reward in its own process. What raises, hangs, dies or is no number is named, never a zero."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.config import ModelSettings, RunConfig, RunSettings, TaskSettings
from tlt.errors import TaskError
from tlt.rollout import rollout
from tlt.tasks import judge as judge_module
from tlt.tasks import judge_wire
from tlt.tasks.judge import DirectJudge, ProcessJudge, Verdict
from tlt.tasks.judge_wire import InvalidReply, opening_reply, read_opening_reply, read_scores_reply, scores_reply
from tlt.tasks.rewards import Failed, Ready, Refused, Scored
from tlt.types import Completion, Key, Message, Prompt, SamplingParams, Timing
from tlt.watch.events import RewardsFailed, read_run

# What the answer says is what happens.
OBEYS = """
import os, pickle, sys, time
LINE = int(sys.argv[1])
class Touches:
    def __reduce__(self):
        return open, (__file__ + ".touched", "w")
def reward(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str.startswith("hang"):
        open(f"{os.path.dirname(__file__)}/hangs {os.getpid()}", "w").close()
    if solution_str == "raise":
        raise KeyError("no such thing")
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "die":
        os._exit(3)
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "hang in a child":
        os.system("sleep 600")
    if solution_str == "print":
        print("on standard output")
    if solution_str == "none":
        return None
    if solution_str == "pid":
        return os.getpid()
    if solution_str == "strange signal":
        os.kill(os.getpid(), 40)
    if solution_str == "sends a pickle":
        frame = pickle.dumps(Touches())
        os.write(LINE, len(frame).to_bytes(8, "big") + frame)
    if solution_str == "announces too much":
        os.write(LINE, (2**60).to_bytes(8, "big"))
    if solution_str == "sends bytes slowly":
        for byte in (1000).to_bytes(8, "big") + bytes(1000):
            os.write(LINE, bytes([byte]))
            time.sleep(0.05)
    if solution_str == "torch":
        return "torch" in sys.modules
    return len(solution_str)
"""


def answer(text: str, number: int = 0, content: Any = "2+2?", **extra: Any) -> tuple[Prompt, Completion]:
    completion = Completion(
        key=Key(0, number),
        prompt_tokens=(),
        tokens=(1, 2),
        text=text,
        logprobs=(),
        policy_logprobs=(),
        finish_reason="eos",
        policy_version=0,
        timing=Timing(0.0, 0.0),
    )
    return Prompt(f"rows.jsonl:{number}", content, "4", extra), completion


@pytest.fixture
def reward_file(tmp_path: Path) -> Any:
    """Writes the user's file; gives FILE.py:reward."""

    def write(source: str) -> str:
        (tmp_path / "mine.py").write_text(source)
        return f"{tmp_path}/mine.py:reward"

    return write


class Patience:
    """The judge's clock. It stands still while anything is computed; once every process that is waited for has said
    that it hangs, the time limit passes. So no reward is late because the machine is busy."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self._directory, self._ended = directory, 0

    def monotonic(self) -> float:
        return self.now

    def wait(self, lines: Sequence[socket.socket], timeout: float) -> list[Any]:
        heard = wait(lines, timeout=0.02)
        hanging = len(list(self._directory.glob("hangs *"))) - self._ended
        if not heard and hanging == len(lines):
            self.now += timeout + 1.0
            self._ended += hanging
        return heard


@pytest.fixture
def obeying(reward_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskSettings:
    patience = Patience(tmp_path)
    for module in (judge_module, judge_wire):
        monkeypatch.setattr(module, "time", patience)
    monkeypatch.setattr(judge_module, "wait", patience.wait)
    return TaskSettings(reward=reward_file(OBEYS), reward_timeout_s=500.0, reward_errors="count", failed_reward=-1.0)


@pytest.fixture
def court(obeying: TaskSettings) -> Iterator[ProcessJudge]:
    with ProcessJudge(obeying) as judge:
        yield judge


def verdicts(judge: ProcessJudge, *texts: str) -> list[Verdict]:
    return judge.judge([answer(text, number) for number, text in enumerate(texts)])


def rewards(judge: ProcessJudge, *texts: str) -> list[float]:
    return [verdict.reward for verdict in verdicts(judge, *texts)]


def test_verdicts_come_in_order_and_the_process_is_kept(court: ProcessJudge) -> None:
    assert rewards(court, "a", "", "ccc", "print") == [1.0, 0.0, 3.0, 5.0]
    assert len({*rewards(court, "pid", "pid"), *rewards(court, "pid")}) == 1
    assert verdicts(court) == []


def test_a_judging_process_needs_no_torch(court: ProcessJudge) -> None:
    assert rewards(court, "torch") == [0.0]


def test_every_failure_is_counted_by_name_and_the_others_are_judged(court: ProcessJudge) -> None:
    found = verdicts(court, "a", "raise", "hang", "die", "none", "exit", "hang in a child", "bb")
    assert [verdict.reward for verdict in found] == [1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 2.0]
    failures = {v.failure.prompt: (v.failure.kind, v.failure.message) for v in found if v.failure}
    assert {prompt: kind for prompt, (kind, _) in failures.items()} == {
        "rows.jsonl:1": "raised",
        "rows.jsonl:2": "timed out",
        "rows.jsonl:3": "died",
        "rows.jsonl:4": "no number",
        "rows.jsonl:5": "raised",
        "rows.jsonl:6": "timed out",
    }
    assert failures["rows.jsonl:1"][1].startswith("Traceback")
    assert "mine.py" in failures["rows.jsonl:1"][1]
    assert "rewards.py" not in failures["rows.jsonl:1"][1]
    assert failures["rows.jsonl:1"][1].endswith("KeyError: 'no such thing'")
    assert failures["rows.jsonl:2"][1] == "no reward within 500 s"
    assert "exit code 3" in failures["rows.jsonl:3"][1]
    assert "returned None" in failures["rows.jsonl:4"][1]


def test_several_processes_judge_in_order_and_survive_failures(obeying: TaskSettings) -> None:
    texts = ["a", "hang", "bb", "die", "ccc", "raise", *("d" * n for n in range(20))]
    with ProcessJudge(replace(obeying, reward_processes=3)) as judge:
        assert rewards(judge, *texts) == [1.0, -1.0, 2.0, -1.0, 3.0, -1.0, *map(float, range(20))]
        assert len(set(rewards(judge, *["pid"] * 60))) <= 3


def test_whatever_the_process_sends_nothing_of_it_is_run(court: ProcessJudge, obeying: TaskSettings) -> None:
    texts = ("sends a pickle", "announces too much", "strange signal", "a")
    found = verdicts(court, *texts)
    assert [(v.failure.kind, v.failure.message) for v in found if v.failure] == [
        ("died", "the reward's process was ended, as it sent a message that is not UTF-8 text"),
        ("died", f"the reward's process was ended, as it sent a message of {2**60} bytes; expected at most {2**26}"),
        ("died", "the reward ended its process (signal 40)"),
    ]
    assert found[-1] == Verdict(1.0)
    assert not Path(obeying.reward.removesuffix(":reward") + ".touched").exists()


@pytest.mark.parametrize("text", ["hang", "sends bytes slowly"])
def test_the_limit_is_in_seconds_of_real_time(reward_file: Any, text: str) -> None:
    """Of rewards that come in a minute at the earliest, on a busy machine or not."""
    settings = TaskSettings(reward=reward_file(OBEYS), reward_timeout_s=0.3, reward_errors="count")
    with ProcessJudge(settings) as judge:
        (verdict,) = verdicts(judge, text)
    assert verdict.failure is not None
    assert (verdict.failure.kind, verdict.failure.message) == ("timed out", "no reward within 0.3 s")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("[1.0]", "something other than a list of 2 scores"),
        ("[1.0, 2.0, 3.0]", "something other than a list of 2 scores"),
        ('{"refused": "no"}', "something other than a list of 2 scores"),
        ("[1.0, true]", "a score that is neither a number nor a failure"),
        ("[1.0, null]", "a score that is neither a number nor a failure"),
        ('[1.0, "2.0"]', "a score that is neither a number nor a failure"),
        ('[1.0, {"died": "x"}]', "a score that is neither a number nor a failure"),
        ('[1.0, [2.0, {"acc": null}]]', "a metric that is no finite number"),
        ('[1.0, [2.0, {"acc": 1e400}]]', "a metric that is no finite number"),
        ('[1.0, [true, {"acc": 1}]]', "a score that is neither a number nor a failure"),
        ("[1.0, [2.0]]", "a score that is neither a number nor a failure"),
        ('[1.0, {"raised": 1}]', "a score that is neither a number nor a failure"),
        ("[" * 1000, "a message that is nested deeper than 64 levels"),
        ("1" * 5000, "a message that holds an integer with too many digits"),
    ],
)
def test_scores_are_checked(reply: str, expected: str) -> None:
    with pytest.raises(InvalidReply) as caught:
        read_scores_reply(reply.encode(), 2)
    assert str(caught.value) == expected


@settings(max_examples=200, deadline=None)
@given(reply=st.binary(max_size=80) | st.text('[]{}":,0123456789.eEN-raisedfu ', max_size=80).map(str.encode))
def test_no_reply_does_more_than_be_refused(reply: bytes) -> None:
    for read in (read_opening_reply, lambda payload: read_scores_reply(payload, 1)):
        with suppress(InvalidReply):
            read(reply)


def test_replies_say_what_was_said() -> None:
    scores = (
        Scored(0.1),
        Scored(-1e12, {"acc": 0.5, "köln": 1.0}),
        Failed("raised", "Traceback\n\udcff"),
        Failed("no number", "x" * 10_000),
    )
    assert read_scores_reply(scores_reply(scores), 4) == (
        *scores[:2],
        Failed("raised", "Traceback\n\\udcff"),
        Failed("no number", "x" * 8000),
    )
    assert [score.kind for score in read_scores_reply(b"[1e400, NaN]", 2) if isinstance(score, Failed)] == [
        "no number"
    ] * 2
    for said in (Ready(True, ("level", "köln")), Ready(False, ()), Refused("no such file")):
        assert read_opening_reply(opening_reply(said)) == said
    for wrong in (
        "[]",
        '{"takes_groups": 1, "needs": []}',
        '{"takes_groups": true, "needs": ["a b"]}',
        '{"refused": 1}',
    ):
        with pytest.raises(InvalidReply, match="no answer to its opening"):
            read_opening_reply(wrong.encode())


# ---- processes and their parent

HOLDS_THE_LOCK = """
import ctypes, os
def reward(solution_str, ground_truth):
    open(__file__ + ".pid", "w").write(f"{os.getpid()}\\n")
    ctypes.PyDLL(None).sleep(600)  # unlike CDLL, keeps the interpreter's lock
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread looks for the parent, which needs the lock")
def test_a_process_dies_with_a_run_that_is_killed_whatever_it_does(reward_file: Any, tmp_path: Path) -> None:
    name = reward_file(HOLDS_THE_LOCK)
    code = f"""
from tlt.config import TaskSettings
from tlt.tasks.judge import ProcessJudge
from tlt.types import Completion, Key, Prompt, Timing
answer = Completion(Key(0, 0), (), (), "x", (), (), "eos", 0, Timing(0.0, 0.0))
ProcessJudge(TaskSettings(reward={name!r}, reward_timeout_s=600.0)).judge([(Prompt("p", "2+2?"), answer)])
"""
    noted = tmp_path / "mine.py.pid"
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1]) as driver:
        while not (noted.exists() and noted.read_text().endswith("\n")):
            assert driver.poll() is None
            time.sleep(0.02)
        process = os.pidfd_open(int(noted.read_text()))  # also of one that nobody reaps
        driver.kill()
    try:
        assert select.select([process], [], [], 300.0)[0], "the judging process outlives its run"
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


def test_a_process_whose_parent_is_gone_leaves_at_once() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tlt.tasks.judge_child", str(theirs.fileno()), str(os.getppid())]
    with ours, theirs:
        left = subprocess.run(command, pass_fds=[theirs.fileno()], timeout=300, capture_output=True)
    assert (left.returncode, left.stderr) == (1, b"")


def test_a_process_that_a_thread_started_outlives_the_thread(court: ProcessJudge) -> None:
    with ThreadPoolExecutor(1) as thread:  # as the judging beside a rollout: one per step
        first = thread.submit(rewards, court, "die", "pid").result()
    assert rewards(court, "pid") == first[1:]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise", ["has raised", "KeyError: 'no such thing'", "mine.py"]),
        ("hang", ["has timed out", "no reward within 500 s", "task.reward_timeout_s"]),
        ("die", ["has died", "exit code 3"]),
        ("none", ["is no number", "returned None; expected a finite number"]),
    ],
)
def test_by_default_a_failure_ends_the_run_and_says_where(
    obeying: TaskSettings, text: str, expected: Sequence[str]
) -> None:
    with ProcessJudge(replace(obeying, reward_errors="stop")) as judge:
        with pytest.raises(TaskError) as caught:
            judge.judge([answer("a", 1), answer(text, 17)])
        for part in ["the reward of prompt rows.jsonl:17", f"the completion begins '{text}'", *expected]:
            assert part in str(caught.value)
        assert rewards(judge, "a") == [1.0]


def test_trl_judges_the_answers_to_a_prompt_in_one_call(reward_file: Any) -> None:
    name = reward_file(
        "def reward(prompts, completions, level):\n"
        "    assert len(set(level)) == 1\n"
        "    return [len(completions) + l for l in level]\n"
    )
    settings = TaskSettings(reward=name, reward_errors="count", path="")
    answers = [answer("x", number, level=number) for number in (0, 0, 0, 1, 1, 2)]
    with ProcessJudge(settings, frozenset({"level"})) as judge:
        assert [v.reward for v in judge.judge(answers)] == [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    with (
        pytest.raises(TaskError, match=r"asks for level; the columns of every prompt in .* are answer"),
        ProcessJudge(settings, frozenset({"answer"})),
    ):
        pass


def test_chats_reach_the_reward_as_messages(reward_file: Any) -> None:
    name = reward_file(
        "def reward(prompts, completions, **_): return [len(prompts[0]) + (completions[0][0]['content'] == 'x')]"
    )
    chat = (Message("system", "s"), Message("user", "u"))
    with ProcessJudge(TaskSettings(reward=name)) as judge:
        assert judge.judge([answer("x", content=chat)]) == [Verdict(3.0)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import not_a_module\n", "(?s)cannot be loaded:.*mine.py.*No module named 'not_a_module'"),
        ("def reward(:\n", "(?s)cannot be loaded:.*SyntaxError"),
        ("def reward(text): ...\n", r"has the signature \(text\); expected compute_score"),
        ("import os\nos._exit(5)\n", r"did not start; it died: .*exit code 5"),
        ("raise SystemExit(1)\n", "(?s)cannot be loaded:.*SystemExit: 1"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_told_at_once(reward_file: Any, source: str, expected: str) -> None:
    with pytest.raises(TaskError, match=expected), ProcessJudge(TaskSettings(reward=reward_file(source))):
        pass


def test_a_task_that_judges_for_itself_must_give_a_number() -> None:
    class Absent:
        def sample(self, step: int, count: int) -> Sequence[Prompt]:
            return []

        def reward(self, prompt: Prompt, completion: Completion) -> float:
            return float(completion.text)

    with DirectJudge(Absent()) as judge:
        assert judge.judge([answer("3")]) == [Verdict(3.0)]
        with pytest.raises(TaskError, match=r"the reward of prompt rows\.jsonl:0 is no number: .*returned nan"):
            judge.judge([answer("nan")])
        with pytest.raises(ValueError, match="could not convert") as caught:
            judge.judge([answer("3"), answer("three", 7)])
        assert caught.value.__notes__ == ["in the reward of prompt rows.jsonl:7; the completion begins 'three'"]


# ---- a whole rollout


def file_run(tmp_path: Path, reward: str, **task: Any) -> RunConfig:
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = TaskSettings(
        name="files",
        path=str(tmp_path / "rows.jsonl"),
        prompts=4,
        group=2,
        reward=reward,
        reward_timeout_s=600.0,
        **task,
    )
    return RunConfig(
        run=RunSettings(out=str(tmp_path)), task=settings, sampling=SamplingParams(temperature=0, max_tokens=8)
    )


def test_a_rollout_records_what_failed(reward_file: Any, tmp_path: Path) -> None:
    name = reward_file(
        "def reward(solution_str, ground_truth):\n"
        "    if ground_truth == '3': raise ValueError('not three')\n"
        "    return float(ground_truth)\n"
    )
    rollout(file_run(tmp_path, name, reward_errors="count", failed_reward=-5.0))
    lines = [json.loads(line) for line in (tmp_path / "run-rollout" / "rollouts.jsonl").read_text().splitlines()]
    by_prompt = {line["prompt"]: (line["reward"], line["failure"] and line["failure"]["kind"]) for line in lines}
    assert len(lines) == 8
    assert by_prompt == {f"rows.jsonl:{n}": (-5.0, "raised") if n == 3 else (float(n), None) for n in range(1, 5)}
    (event,) = [r.event for r in read_run(tmp_path / "run-rollout").events if isinstance(r.event, RewardsFailed)]
    assert (event.kind, event.count, event.prompt) == ("raised", 2, "rows.jsonl:3")
    assert event.message.endswith("ValueError: not three")


def test_a_reward_that_cannot_be_loaded_is_told_before_the_policy_is(reward_file: Any, tmp_path: Path) -> None:
    config = file_run(tmp_path, reward_file("import not_a_module"))
    with pytest.raises(TaskError, match="not_a_module"):
        rollout(replace(config, model=ModelSettings(path=str(tmp_path / "no-such-policy"))))
