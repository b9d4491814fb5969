"""The `tlt watch` command: checks its arguments, then serves or exports."""

from collections.abc import Callable
from pathlib import Path

from tlt.config import RunConfig
from tlt.errors import ConfigError, shown

_PORT = "8080"


def watch_command(
    runs: str | None, host: str | None, port: str | None, target: str | None, say: Callable[[str], None]
) -> None:
    """Serves or exports. None: the argument was not given. `say` gets the line to print."""
    directory = Path(runs or RunConfig().run.out)
    if target is not None:
        from tlt.watch.site import export

        count = export(directory, Path(target))
        return say(f"{target}: {count} {'run' if count == 1 else 'runs'}; serve it with any static server")
    number = port or _PORT
    if not number.isdecimal() or len(number) > 5 or int(number) > 65535:
        raise ConfigError(f"--port is {shown(number)}; expected a number up to 65535, 0 for any that is free")
    try:
        from tlt.watch.server import watch
    except ModuleNotFoundError as error:
        raise ConfigError(f"tlt watch needs {error.name}: pip install 'tlt-rl[serve]'") from None
    return watch(directory, host or "127.0.0.1", int(number), lambda address: say(f"tlt watch: {address}"))
