"""A judging process: `python -m tlt.tasks.judge_child SOCKET PARENT` loads the user's reward and calls it.

Every call is answered with a number or the user's traceback, unless the process ends. Every exception of the user's
code is caught here and reported. The process ends when its parent ends. Does not know policies, and does not import
torch.
"""

import ctypes
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

from tlt.errors import TltError
from tlt.tasks.judge_wire import opening_reply, receive_frame, scores_reply, send_frame
from tlt.tasks.rewards import Case, Failed, Opening, Refused, Reward, Scored, open_reward, score, users_part

_PR_SET_PDEATHSIG = 1  # option of Linux's prctl: the signal sent to this process when its parent dies
_PARENT_CHECK_S = 1.0


def main(line: int, parent: int) -> None:
    """Replies to the opening with Ready or Refused, then to cases with scores, until the run closes the socket."""
    _end_with(parent)
    os.set_inheritable(line, False)  # child processes of the user's code must not keep the socket open
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
        return open_reward(opening)
    except TltError as error:
        return Refused(str(error))
    except BaseException as error:  # noqa: BLE001 the user's module may raise anything
        return Refused(f"task.reward {opening.reward} cannot be loaded:\n{users_part(error)}")


def _scores(reward: Reward, cases: Sequence[Case]) -> tuple[Scored | Failed, ...]:
    try:
        return score(reward, cases)
    except TltError as error:
        return (Failed("raised", str(error)),) * len(cases)
    except BaseException as error:  # noqa: BLE001 the user's function may raise anything
        return (Failed("raised", users_part(error)),) * len(cases)


def _end_with(parent: int) -> None:
    """Ends this process when its parent ends, so that a hanging reward does not outlive a killed run.

    Linux kills this process. On other systems a thread polls the parent's pid; it cannot run while the user's code
    holds the interpreter lock.
    """
    by_kernel = sys.platform == "linux" and not ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)
    if not by_kernel:
        threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
