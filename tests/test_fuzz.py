"""Files that are damaged at random: read all the same, or refused in one line, never with another exception.

Every mutation follows from its number alone, so a failure names what to run again. Reading happens with little memory
to spare: a file that promises sizes it does not hold must not make anybody ask for them.
"""

import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import policy
from watching import whole_run

from tlt.config import TaskSettings
from tlt.errors import TltError
from tlt.model.attention import PackedLayout
from tlt.model.config import ModelConfig
from tlt.model.transformer import Transformer
from tlt.model.weights import hf_tensors, load_policy, save_policy, write_tensors
from tlt.policy import TINY_POLICY
from tlt.recipe import load_config, to_toml
from tlt.sim.trace import trace_of
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.eagle_files import FORMATS, Origin, load_drafter, save_drafter
from tlt.spec.record import DraftRecord, read_record
from tlt.tasks.files import FileTask
from tlt.text import Tokenizer
from tlt.train.supervised import read_pairs
from tlt.types import Message
from tlt.watch.events import EVENTS_FILE, read_run
from tlt.watch.log import EventLog
from tlt.watch.report import page
from tlt.watch.summary import last_lines, summarise
from tlt.watch.workers import FleetRolledOut, FleetWaits, WorkerLost, WorkerSpans

SPARE_BYTES = 2**30  # that reading may take beyond what the process has
NESTED: Any = []
for _ in range(100):
    NESTED = [NESTED]
NUMBERS = (0, 1, -1, 3, 7, 2**31, 2**63, 10**12, int("9" * 400), 1.5, 1e-320, -0.0, 1e30, float("inf"), float("nan"))
TEXTS = ("", "text", "../outside.safetensors", "/etc/passwd", "a\nb", "a\0b", "\ud800", "x" * 100_000, "full_attention")
ODD: tuple[Any, ...] = (None, True, False, *NUMBERS, *TEXTS, [], {}, [[]], {"a": 1}, [1, "a"], ["text"] * 3, NESTED)
KEYS = (
    "head_dim",
    "rope_scaling",
    "sliding_window",
    "layer_types",
    "no_rope_layers",
    "partial_rotary_factor",
    "eos_token_id",
)
KEYS += (
    "auto_map",
    "tokenizer_class",
    "added_tokens_decoder",
    "chat_template",
    "model_max_length",
    "extra_special_tokens",
)
KEYS += (
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
    "draft_vocab_size",
    "window",
    "torch_dtype",
    "ground_truth",
)
RAW = (b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b"\xff\xfe", b"\0", b'"', b"\\ud800", b"-", b"1e999")


# ---- mutations


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A file with one or a few things wrong, as JSON where it is some."""
    how = draw.choice(("value", "value", "value", "key", "cut", "bytes", "raw"))
    if how in ("value", "key"):
        try:
            lines = [json.loads(line) for line in data.splitlines()] if b"}\n{" in data else [json.loads(data)]
        except ValueError:
            how = "bytes"
        else:
            at = draw.randrange(len(lines))
            lines[at] = changed(lines[at], draw, how)
            return b"\n".join(json.dumps(line).encode() for line in lines)
    return {"cut": cut, "bytes": flipped, "raw": stuffed}[how](data, draw)


def changed(value: Any, draw: random.Random, how: str) -> Any:
    """`value`: something in it is replaced or left out; `key`: an object in it has another entry."""
    spots = [*places(value)]
    holder, key = draw.choice(spots)
    if holder is None:
        return draw.choice(ODD)
    if how == "key" and isinstance(holder[key], dict):
        holder[key][draw.choice(KEYS)] = draw.choice(ODD)
    elif draw.random() < 0.15:
        del holder[key]
    else:
        holder[key] = draw.choice(ODD)
    return value


def places(value: Any, holder: Any = None, key: Any = None, most: int = 40) -> Iterator[tuple[Any, Any]]:
    """Where a value can be replaced: (what holds it, under which key); of long lists only the beginning."""
    yield holder, key
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in [*inner][:most]:
        yield from places(item, value, name)


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def flipped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        near = draw.choice((200, len(data)))  # where a header is, or anywhere
        changed[draw.randrange(min(near, len(data)))] = draw.randrange(256)
    return bytes(changed)


def stuffed(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + draw.choice(RAW) + data[at + draw.choice((0, 1, 5)) :]


# ---- what is read


def read_policy(directory: Path) -> None:
    model = load_policy(directory)
    tokens = torch.arange(min(3, model.config.vocab, model.config.max_positions))
    with torch.no_grad():
        hidden = model(tokens, PackedLayout.from_lengths([len(tokens)])).hidden_TD
    assert hidden.isfinite().all() or not all(weight.isfinite().all() for weight in model.parameters())


def read_text(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    tokens = tokenizer.encode_prompt("1+2=")
    tokenizer.decode(tokens)
    if tokenizer.has_chat_template:
        tokenizer.encode_prompt((Message("user", "1+2="),))


def read_drafter(directory: Path) -> None:
    load_drafter(directory, policy().config, window=16)
    read_record(directory)


def read_recipe(directory: Path) -> None:
    config = load_config(directory / "recipe.toml")
    (directory / "again.toml").write_text(to_toml(config), encoding="utf-8")
    assert load_config(directory / "again.toml") == config


def read_flags(directory: Path) -> None:
    flags = (directory / "flags").read_bytes().decode("utf-8", "surrogateescape").split("\n")
    config = load_config(None, [flag for flag in flags if flag.startswith("--")])
    to_toml(config).encode()


def read_prompts(directory: Path) -> None:
    for file in directory.glob("rows.*") if directory.name != "saved" else [directory]:
        for prompt in FileTask(replace(PROMPTS, path=str(file))).sample(0, 2):
            json.dumps([str(prompt.content), repr(prompt.reference), repr(prompt.extra)], ensure_ascii=False).encode()


def read_answers(directory: Path) -> None:
    for pair in read_pairs(directory / "pairs.jsonl"):
        f"{pair.content}{pair.answer}".encode()


def read_told(directory: Path) -> None:
    """What is made of events: the report, the last lines on a terminal, a trace for the simulator."""
    run = read_run(directory)
    page(run).encode()
    "".join(last_lines(summarise(run), "here")).encode()
    trace_of(str(directory), run.config)


PROMPTS = TaskSettings(name="files", path="rows.jsonl")
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "mscale": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
)


# ---- whole directories to damage


def write_policies(directory: Path) -> None:
    for family, rope in (("llama", ROPES[0]), ("qwen2", ROPES[1]), ("smollm3", {}), ("mistral", {})):
        small = policy(torch.float32, family=family)
        source = {**small.config.source, "rope_scaling": rope, "eos_token_id": [1, 2]}
        save_policy(Transformer(ModelConfig.from_hf(source)), directory / family)
        write_tensors(hf_tensors(small), directory / family)
    write_tensors(hf_tensors(policy(torch.float32)), directory / "llama", shard_bytes=10_000)


def write_tokenizers(directory: Path) -> None:
    for name, words in (
        ("tiny", {}),
        ("chat", {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}),
    ):
        (directory / name).mkdir(parents=True)
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(TINY_POLICY / file, directory / name)
        settings = json.loads((TINY_POLICY / "tokenizer_config.json").read_text())
        (directory / name / "tokenizer_config.json").write_text(json.dumps({**settings, **words}))
        (directory / name / "generation_config.json").write_text('{"eos_token_id": [2]}')


def write_drafters(directory: Path) -> None:
    small = policy(torch.float32)
    drafter = Eagle(EagleConfig.of_policy(small.config, window=24, draft_vocab=10))
    drafter.init_weights(3, torch.arange(10) * 4)
    for form in FORMATS:
        save_drafter(
            *(drafter, directory / form, small.head_weight, Origin("some/policy", ("LlamaForCausalLM",))),
            form=form,
            embed_VD=small.embed if form == "speculators" else None,
            record=DraftRecord(((0.5, 0.25), (0.3, 0.1)), places=100, temperature=1.0),
        )


def write_recipes(directory: Path) -> None:
    for name in ("quickstart", "gsm8k_rollout"):
        (directory / name).mkdir(parents=True)
        shutil.copy(Path(__file__).parents[1] / "recipes" / f"{name}.toml", directory / name / "recipe.toml")
    (directory / "all").mkdir()
    (directory / "all" / "recipe.toml").write_text(to_toml(load_config()), encoding="utf-8")


def write_flags(directory: Path) -> None:
    directory.mkdir()
    flags = ("--run.seed=3", '--sampling.stop=["a,b", "c"]', "--spec.depths=1,2", "--train.clip=0.5", "--task.name=toy")
    (directory / "flags").write_text("\n".join((*flags, "--model.path=tiny", "--sampling.ignore_eos=true")))


def write_rows(directory: Path) -> None:
    chat = [{"role": "user", "content": "2+2?"}]
    rows: dict[str, list[dict[str, Any]]] = {
        "plain": [{"prompt": "2+2?", "answer": "4", "level": 1}, {"prompt": "1+1?", "answer": "2", "level": 2}],
        "verl": [{"prompt": chat, "reward_model": {"ground_truth": "4"}, "extra_info": {"index": n}} for n in range(2)],
        "gsm8k": [{"question": "2+2?", "answer": "2 and 2\n#### 4"}],
    }
    for name, records in rows.items():
        (directory / name).mkdir(parents=True)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (directory / name / "rows.jsonl").write_text(lines)
        (directory / name / "pairs.jsonl").write_text('{"prompt": "2+2?", "answer": "4"}\n' * 2)
    write_tables(directory, rows["plain"])


def write_tables(directory: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ipc = pyarrow.ipc
    for name in ("json", "csv", "parquet", "stream", "file", "saved"):
        (directory / name).mkdir()
    (directory / "json" / "rows.json").write_text(json.dumps(rows))
    (directory / "csv" / "rows.csv").write_text('prompt,answer\n2+2?,4\n"1 ""and"" 1?",2\n')
    table = pyarrow.Table.from_pylist([{**row, "day": date(2020, 1, 1), "chat": [{"role": "user"}]} for row in rows])
    parquet.write_table(table, directory / "parquet" / "rows.parquet")
    for name, open_file in (
        ("stream/rows", ipc.new_stream),
        ("saved/data", ipc.new_stream),
        ("file/rows", ipc.new_file),
    ):
        with pyarrow.OSFile(str(directory / f"{name}.arrow"), "wb") as file, open_file(file, table.schema) as writer:
            writer.write_table(table)
    (directory / "saved" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')


def write_told(directory: Path) -> None:
    whole_run(directory / "plain", 3)
    fleet = whole_run(directory / "fleet", 3)
    with EventLog(fleet / EVENTS_FILE) as log:
        log.emit(WorkerSpans(3, 0, "host", (("rolling", 0.0, 1.0), ("idle", 1.0, 0.5))))
        log.emit(FleetRolledOut(3, 2, 1.0, 1.5, 0.5, 0.0, 0.1, 0, 0.0, 0.0, 0, 0.0))
        log.emit(WorkerLost(3, 1, "rollout", "died", 4, 1.0))
        log.emit(FleetWaits(3, "rollout", (0, 1), 40.0))


@dataclass(frozen=True)
class Target:
    """What is damaged, how often, and who reads it."""

    write: Callable[[Path], None]
    read: Callable[[Path], None]
    files: tuple[str, ...]  # whose names end like this
    count: int


WEIGHTS = (".safetensors", "index.json")
TARGETS = {
    "config.json": Target(write_policies, read_policy, ("config.json",), 150),
    "weights": Target(write_policies, read_policy, WEIGHTS, 80),
    "tokenizer": Target(write_tokenizers, read_text, (".json",), 60),
    "drafter": Target(write_drafters, read_drafter, (".json", ".safetensors"), 120),
    "recipe": Target(write_recipes, read_recipe, (".toml",), 80),
    "flags": Target(write_flags, read_flags, ("flags",), 80),
    "prompts": Target(write_rows, read_prompts, ("rows.jsonl", ".json", ".csv", ".parquet", ".arrow"), 150),
    "events": Target(write_told, read_told, ("events.jsonl",), 150),
    "answers": Target(write_rows, read_answers, ("pairs.jsonl",), 50),
}


@contextmanager
def little_memory() -> Iterator[None]:
    """A request for more address space than is spared fails, instead of taking the machine's memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to know how much memory it has")
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_are_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    target.write(tmp_path / name)
    whole = {file: file.read_bytes() for file in sorted((tmp_path / name).rglob("*")) if file.is_file()}
    chosen = [file for file in whole if file.name.endswith(target.files)]
    for file in chosen:
        target.read(file.parent)  # as long as nothing is damaged
    refused, wrong = 0, []
    with little_memory():
        for number in range(target.count):
            draw = random.Random(f"{name}/{number}")
            file = draw.choice(chosen)
            file.write_bytes(mutated(whole[file], draw))
            try:
                target.read(file.parent)
            except TltError as error:
                refused += 1
                if "\n" in str(error) or len(str(error)) > 2000:
                    wrong.append(f"{number}: {error}")
            except BaseException as error:  # noqa: BLE001 a panic in Rust is no Exception
                wrong.append(f"{number} in {file.name}: {error!r}"[:500])
            file.write_bytes(whole[file])
    assert wrong == []
    assert refused > target.count / 4  # or it was hardly damaged at all
