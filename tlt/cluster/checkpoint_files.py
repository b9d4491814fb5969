"""Checkpoint files between workers and the driver's directory: written and read in place where workers share its disk,
sent in pieces where they do not.

Always holds: a write has no time limit while any file of it grows. A machine that has another directory of the same
name does not pass for one that shares the disk. Does not know the contents of the files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError

from tlt.cluster.transfer import append_piece, pieces_of
from tlt.errors import CheckpointError

Wait = Callable[[Any, Callable[[], list[Any]]], None]
AskAll = Callable[[Mapping[int, Any]], Mapping[int, Any]]  # calls by worker id → results by worker id


@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """Writes the last snapshots of `actors`, all at the same time, and then calls `finish`."""

    actors: Sequence[Any]
    wait: Wait
    finish: Callable[[Path], None] = lambda directory: None

    def __call__(self, directory: Path) -> None:
        try:
            self._write(directory.absolute())
        except RayTaskError as error:
            raise CheckpointError(
                f"the worker could not write the checkpoint ({error.cause}); the one before is intact"
            ) from error
        except RayError as error:
            raise CheckpointError(
                "the worker that wrote the checkpoint was lost or hung; the one before it is intact"
            ) from error
        self.finish(directory)

    def _write(self, directory: Path) -> None:
        with probe_file(directory) as file:
            seen = ray.get([actor.sees.remote(file) for actor in self.actors])
        near = [actor.write.remote(directory) for actor, sees in zip(self.actors, seen, strict=True) if sees]
        far = [actor.written.remote() for actor, sees in zip(self.actors, seen, strict=True) if not sees]
        for pieces in far:
            for piece in self._arriving(pieces):
                name, content = ray.get(piece)
                append_piece(name, content, directory)
        for call in near:
            self.wait(call, self._bytes_written)
            ray.get(call)

    def _arriving(self, pieces: Any) -> Iterator[Any]:
        while True:
            self.wait(pieces, self._bytes_written)
            try:
                piece = next(pieces)
            except StopIteration:
                return
            yield piece

    def _bytes_written(self) -> list[Any]:
        return [actor.bytes_written.remote() for actor in self.actors]


def restore_workers(actors: Mapping[int, Any], directory: Path, version: int, ask: AskAll) -> None:
    """Every worker reads what it needs of a checkpoint."""
    directory = directory.absolute()
    with probe_file(directory) as file:
        seen = ask({worker_id: actor.sees.remote(file) for worker_id, actor in actors.items()})
    far = [worker_id for worker_id, sees in seen.items() if not sees]
    for name, content in pieces_of(directory) if far else ():
        piece = ray.put(content)
        ask({worker_id: actors[worker_id].receive.remote(name, piece) for worker_id in far})
    calls = {worker_id: actors[worker_id].restore_received.remote(version) for worker_id in far}
    for worker_id in seen.keys() - far:
        calls[worker_id] = actors[worker_id].restore.remote(directory, version)
    ask(calls)


@contextmanager
def probe_file(directory: Path) -> Iterator[Path]:
    """A new file beside the directory, by which a worker knows whether it shares the disk."""
    file = directory.parent / f".probe-{uuid4().hex}"
    file.touch()
    try:
        yield file
    finally:
        file.unlink()
