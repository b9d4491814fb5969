"""What runs in a judging process: `python -m tlt.tasks.judge_child SOCKET PARENT` loads the user's reward and calls it.

Whatever the user's code does, the run gets an answer: a number or the user's own traceback, or else the process's end.
This is the border to code that is not ours, so here, and only here, everything is caught: to be reported, never to be
passed over. Ends with its parent. Knows nothing of policies, and imports no torch.
"""

import ctypes
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence

from tlt.errors import TltError
from tlt.tasks.judge_wire import opening_reply, receive_frame, scores_reply, send_frame
from tlt.tasks.rewards import Case, Failed, Opening, Refused, Reward, open_reward, score

_LONGEST = 4000  # characters of a traceback that are kept, the last ones
_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that this process gets when its parent dies
_PARENT_CHECK_S = 1.0


def main(line: int, parent: int) -> None:
    """Answers the opening with Ready or Refused, then cases with their scores, until the run hangs up."""
    _end_with(parent)
    os.set_inheritable(line, False)  # what the user's code starts must not keep the line open
    run = socket.socket(fileno=line)
    try:
        _serve(run)
    except (EOFError, ConnectionError):
        return


def _serve(run: socket.socket) -> None:
    reward = _open(pickle.loads(receive_frame(run)))
    send_frame(run, opening_reply(reward if isinstance(reward, Refused) else reward.ready))
    while not isinstance(reward, Refused):
        cases = pickle.loads(receive_frame(run))
        send_frame(run, scores_reply(_scores(reward, cases)))


def _open(opening: Opening) -> Reward | Refused:
    try:
        return open_reward(opening.reward, opening.convention)
    except TltError as error:
        return Refused(str(error))
    except BaseException as error:  # noqa: BLE001 the user's module may raise anything
        return Refused(f"task.reward {opening.reward} cannot be loaded:\n{_users_part(error)}")


def _scores(reward: Reward, cases: Sequence[Case]) -> tuple[float | Failed, ...]:
    try:
        return score(reward, cases)
    except TltError as error:
        return (Failed("raised", str(error)),) * len(cases)
    except BaseException as error:  # noqa: BLE001 the user's function may raise anything
        return (Failed("raised", _users_part(error)),) * len(cases)


def _users_part(error: BaseException) -> str:
    """The traceback from the user's first frame on."""
    frame = error.__traceback__
    while frame is not None and _is_ours(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).strip()[-_LONGEST:]


def _is_ours(file: str) -> bool:
    return file.startswith("<frozen importlib") or os.path.dirname(file) == os.path.dirname(__file__)


def _end_with(parent: int) -> None:
    """A reward that hangs must not outlive a run that was killed. Linux ends this process, whatever runs in it; other
    systems do not, and there a thread looks, which a reward that holds the interpreter's lock keeps from looking."""
    asked = sys.platform == "linux" and not ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before the kernel was asked
        os._exit(1)
    if not asked:
        threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
