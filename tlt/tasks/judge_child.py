"""What runs in a judging process: `python -m tlt.tasks.judge_child SOCKET` loads the user's reward and calls it.

Whatever the user's code does, the run gets an answer: a number or the user's own traceback, or else the process's end.
This is the border to code that is not ours, so here, and only here, everything is caught: to be reported, never to be
passed over. Leaves when its parent is gone. Knows nothing of policies, and imports no torch.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from tlt.errors import TltError
from tlt.tasks.rewards import Case, Failed, Opening, Refused, Reward, open_reward, score

_LONGEST = 4000  # characters of a traceback that are kept, the last ones
_PARENT_CHECK_S = 1.0


def main(socket: int) -> None:
    """Answers the opening with Ready or Refused, then cases with their scores, until the run hangs up."""
    os.set_inheritable(socket, False)  # what the user's code starts must not keep the line open
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    run: Connection[Any, Any] = Connection(socket)
    reward = _open(run.recv())
    if isinstance(reward, Refused):
        run.send(reward)
        return
    run.send(reward.ready)
    while True:
        try:
            cases = run.recv()
        except (EOFError, ConnectionResetError):
            return
        run.send(_scores(reward, cases))


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


def _leave_with(parent: int) -> None:
    """A reward that hangs must not outlive a run that was killed."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
