"""SIGTERM as an exception, so that a run that a scheduler stops ends like any other: told, reported, cleaned up.

What always holds: once the exception has left a `sigterm_raises`, another SIGTERM does not interrupt what follows from
the first. A handler that somebody else has set stays. Outside the main thread, where Python runs no handlers, nothing
changes.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

from tlt.errors import Terminated

_received = False  # since the outermost `sigterm_raises` was entered


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within, SIGTERM raises Terminated in the main thread.

    It may be nested: each makes Terminated of what a library in between has made of it (Ray: SystemExit with 1).
    """
    global _received
    outermost = current_thread() is main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if outermost:
        _received = False
        signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    except SystemExit as error:
        ended = _received or isinstance(error, Terminated)
        if ended and signal.getsignal(signal.SIGTERM) is _raise:
            signal.signal(signal.SIGTERM, _ignore)
        if ended and not isinstance(error, Terminated):
            raise Terminated from error
        raise
    finally:
        if outermost:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _received = False


def raise_if_terminated() -> None:
    """An exception from a signal may be lost, in the import of an extension for instance: this raises it once more."""
    if _received:
        raise Terminated


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Around a call that sets a handler of its own for SIGTERM, which exits with the signal's number: afterwards there
    is the handler from before."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        if error.code == signal.SIGTERM:
            raise Terminated from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    global _received
    _received = True
    raise Terminated


def _ignore(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which processes started from now on would inherit."""
