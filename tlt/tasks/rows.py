"""Reads rows of prompt files: JSON lines, JSON, CSV, parquet, Arrow, and directories saved by `datasets`.

A row's id is the file's name and the line number (JSON lines, from 1) or row number (other formats, from 0). A file,
line or row that cannot be read is an error that names it. Knows formats; does not know the meaning of columns.
"""

import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from tlt.errors import TaskError, check_reachable, shown, shown_names
from tlt.strict_json import InvalidJson, parse, read_object

_STATE = "state.json"  # in a directory of `save_to_disk`: lists the files with the rows, in order
_SPLITS = "dataset_dict.json"  # in a directory with one such directory per split: lists the splits


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    origin: str  # file and line or row, for messages
    columns: Mapping[str, Any]


def read_rows(path: Path, knob: str = "") -> Iterator[Row]:
    """The rows of a file, in the format of its suffix, or of a directory written by `save_to_disk`.

    `knob`: setting that holds the path, for messages."""
    check_reachable(path, TaskError)
    named = f"{knob} {path}".lstrip()
    if isdir(path):
        return _saved_rows(path, named)
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise TaskError(
            f"{named}: ends in {path.suffix!r}; expected a file that ends in {', '.join(_READERS)}, "
            "or a directory that save_to_disk of `datasets` wrote"
        )
    if not isfile(path):
        raise TaskError(f"{named}: no such file; expected a file of prompts, relative to {Path.cwd()}")
    return reader(path)


def _numbered(path: Path, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for number, columns in enumerate(rows):
        yield Row(f"{path.name}:{number}", f"{path}, row {number}", columns)


def _unreadable(path: Path, error: OSError) -> TaskError:
    return TaskError(f"{path}: cannot be read ({error.strerror})")


# ---- text


def _line_rows(path: Path) -> Iterator[Row]:
    """One JSON object per line. Blank lines are skipped."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield Row(f"{path.name}:{number}", f"{path}:{number}", _parse(line, f"{path}:{number}"))
    except OSError as error:
        raise _unreadable(path, error) from None


def _parse(line: bytes, origin: str) -> dict[str, Any]:
    try:
        record = parse(line.strip())
    except InvalidJson as error:
        raise TaskError(f"{origin}: {error}; expected one object per line") from None
    return _object(record, origin)


def _object(record: Any, origin: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise TaskError(f"{origin}: is {shown(record)}; expected an object, {{column: value, …}}")
    return record


def _json_rows(path: Path) -> Iterator[Row]:
    """A list of objects. A file that begins with an object is read as JSON lines: many tools name those .json too."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    if content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return _line_rows(path)
    try:
        records = parse(content)
    except InvalidJson as error:
        raise TaskError(f"{path}: {error}; expected a list of objects, or one object per line") from None
    if not isinstance(records, list):
        raise TaskError(f"{path}: is {shown(records)}; expected a list of objects, or one object per line")
    return _numbered(path, (_object(record, f"{path}, row {number}") for number, record in enumerate(records)))


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the csv module's default limit is 128 KiB
    try:
        with path.open(encoding="utf-8-sig", newline="") as text:
            yield from _numbered(path, _csv_columns(path, csv.reader(text, strict=True)))
    except UnicodeDecodeError:
        raise TaskError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
    except csv.Error as error:
        raise TaskError(f"{path}: cannot be read as CSV ({error})") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _csv_columns(path: Path, lines: Iterable[list[str]]) -> Iterator[dict[str, Any]]:
    """Each line as a mapping by the header's names. Every value is text; an empty value is None."""
    filled = (line for line in lines if line)
    names = next(filled, [])
    if len(set(names)) < len(names):
        raise TaskError(f"{path}: its first line is {shown(names)}; expected the names of its columns, each once")
    for number, line in enumerate(filled):
        if len(line) != len(names):
            raise TaskError(
                f"{path}, row {number}: has {len(line)} values; expected {len(names)}: {shown_names(names)}"
            )
        yield {name: value or None for name, value in zip(names, line, strict=True)}


# ---- Arrow


def _parquet_rows(path: Path) -> Iterator[Row]:
    return _numbered(path, _from_batches(path, "parquet", _parquet_batches))


def _arrow_rows(path: Path) -> Iterator[Row]:
    return _numbered(path, _from_batches(path, "Arrow", _arrow_batches))


def _saved_rows(path: Path, named: str) -> Iterator[Row]:
    """A directory written by `Dataset.save_to_disk`: Arrow files, listed in order by state.json."""
    if isfile(path / _SPLITS):
        splits = read_object(path / _SPLITS, TaskError, "save the dataset again").get("splits")
        raise TaskError(f"{named}: holds the splits {shown(splits)}; name one: {path}/SPLIT")
    if not isfile(path / _STATE):
        raise TaskError(
            f"{named}: is a directory without {_STATE}; expected a file, or a directory that save_to_disk of "
            "`datasets` wrote"
        )
    files = read_object(path / _STATE, TaskError, "save the dataset again").get("_data_files")
    files = files if isinstance(files, list) else [files]
    listed = [file.get("filename") if isinstance(file, dict) else None for file in files]
    names = [name for name in listed if isinstance(name, str) and name == Path(name).name and isfile(path / name)]
    if not names or len(names) < len(listed):
        raise TaskError(
            f"{path / _STATE}: its _data_files are {shown(files)}; expected names of files beside it: save it again"
        )
    rows = (columns for name in names for columns in _from_batches(path / name, "Arrow", _arrow_batches))
    return _numbered(path, rows)


def _from_batches(path: Path, kind: str, read: Callable[[Path], Iterator[Any]]) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise TaskError(f"{path}: {kind} needs pyarrow, which is not installed; pip install 'tlt-rl[data]'") from None
    try:
        for batch in read(path):
            batch.validate(full=True)  # without this a damaged file makes pyarrow read out of bounds
            coded = [field for field in batch.schema if _holds_json(field)]
            for row in batch.to_pylist():
                yield row | {field.name: _decoded(row[field.name], field) for field in coded}
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # the last two: bad text, bad dates
        raise TaskError(f"{path}: cannot be read as {kind} ({shown(str(error))})") from None


def _parquet_batches(path: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        yield from file.iter_batches()


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Batches of a file in Arrow's stream format, which `datasets` writes, or in Arrow's file format."""
    from pyarrow import OSFile, ipc

    with OSFile(str(path)) as file:
        begins_as_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if begins_as_file:
            reader = ipc.open_file(file)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            yield from ipc.open_stream(file)


def _holds_json(field: Any) -> bool:
    """Whether the field or a nested one holds JSON text (`Json` of `datasets`)."""
    return _is_json(field) or any(_holds_json(inner) for inner in _inner(field.type))


def _is_json(field: Any) -> bool:
    name = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()  # for a pyarrow without this type
    return bool(getattr(field.type, "extension_name", name) == "arrow.json")


def _inner(type_: Any) -> list[Any]:
    from pyarrow import types

    if types.is_struct(type_):
        return [type_.field(index) for index in range(type_.num_fields)]
    is_list = types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_)
    return [type_.value_field] if is_list else []


def _decoded(value: Any, field: Any) -> Any:
    if value is None:
        return None
    if _is_json(field):
        return parse(value if isinstance(value, bytes) else value.encode())
    inner = _inner(field.type)
    if isinstance(value, dict):
        return {one.name: _decoded(value[one.name], one) for one in inner}
    return [_decoded(item, inner[0]) for item in value] if inner else value


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _line_rows,
    ".ndjson": _line_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}
