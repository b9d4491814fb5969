"""`tlt` and `python -m tlt`: the command, and the exit code of an interrupt."""

import atexit
import os
import sys

_INTERRUPTED = 130


def command() -> int:
    try:
        from tlt.cli import main

        code = main()
    except KeyboardInterrupt:  # in an import of the line above
        sys.stderr.write("tlt: interrupted\n")
        code = _INTERRUPTED
    if code == _INTERRUPTED:  # Python would end with SIGINT if what was interrupted ran by `exec`, as in many imports
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(command())
