"""Files that are damaged in one known way: the command line says which file and what of it, in one line, and ends."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, policy

from tlt.cli import main
from tlt.config import ModelSettings
from tlt.errors import ModelError, TaskError
from tlt.model.weights import hf_tensors, save_policy, write_tensors
from tlt.policy import TINY_POLICY, open_policy
from tlt.spec.eagle import Eagle, EagleConfig
from tlt.spec.eagle_files import Origin, save_drafter
from tlt.text import Tokenizer
from tlt.types import Message

Damage = Callable[[Path], object]
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with a tokenizer, the same in shards, and a drafter for it."""
    directory = tmp_path_factory.mktemp("whole")
    small = policy(torch.float32)
    save_policy(small, directory / "model", tokenizer_from=TINY_POLICY)
    shutil.copytree(directory / "model", directory / "shards")
    write_tensors(hf_tensors(small), directory / "shards", shard_bytes=20_000)
    drafter = Eagle(EagleConfig.of_policy(small.config, window=24, draft_vocab=10))
    drafter.init_weights(3, torch.arange(10) * 4)
    save_drafter(drafter, directory / "drafter", small.head_weight, Origin("here", ("LlamaForCausalLM",)))
    return directory


def words(file: str, **changes: Any) -> Damage:
    """Other values in a JSON file; a dotted name is inside an object."""

    def damage(directory: Path) -> None:
        path = directory / file
        content = json.loads(path.read_text()) if path.exists() else {}
        for name, value in changes.items():
            *outer, last = name.split("__")
            inner = content
            for key in outer:
                inner = inner[key]
            inner[last] = value
        path.write_text(json.dumps(content))

    return damage


def bytes_of(file: str, content: bytes) -> Damage:
    return lambda directory: (directory / file).write_bytes(content)


def cut(file: str, share: float = 0.5) -> Damage:
    def damage(directory: Path) -> None:
        data = (directory / file).read_bytes()
        (directory / file).write_bytes(data[: int(len(data) * share)])

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def damage(directory: Path) -> None:
        found = load_file(directory / WEIGHTS)
        change(found)
        save_file(found, directory / WEIGHTS)

    return damage


def put(name: str, tensor: torch.Tensor) -> Damage:
    return tensors(lambda found: found.update({name: tensor}))


def outside(directory: Path) -> None:
    """The index names a file that is there, and whole, but lies elsewhere."""
    index = json.loads((directory / INDEX).read_text())
    moved = sorted(set(index["weight_map"].values()))[0]
    shutil.move(directory / moved, directory.parent / "outside.safetensors")
    renamed = {name: "../outside.safetensors" if at == moved else at for name, at in index["weight_map"].items()}
    (directory / INDEX).write_text(json.dumps({**index, "weight_map": renamed}))


def twice(directory: Path) -> None:
    index = json.loads((directory / INDEX).read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    shutil.copy(directory / first, directory / "model-again.safetensors")
    index["weight_map"]["again"] = "model-again.safetensors"
    (directory / INDEX).write_text(json.dumps(index))


MODELS: dict[str, tuple[Damage, str]] = {
    "torn": (cut(CONFIG), "config.json is not valid JSON"),
    "latin": (bytes_of(CONFIG, b'{"model_type": "caf\xe9"}'), "config.json is not UTF-8 text; copy the model again"),
    "list": (bytes_of(CONFIG, b"[1]"), "config.json holds [1]; expected an object"),
    "deep": (bytes_of(CONFIG, b'{"a":' * 10**5), "config.json is nested deeper than 64 levels"),
    "digits": (bytes_of(CONFIG, b'{"vocab_size": ' + b"9" * 5000 + b"}"), "an integer with too many digits"),
    "text": (words(CONFIG, hidden_size="32"), "config.json: hidden_size is '32'; expected an integer from 1 to"),
    "family": (words(CONFIG, model_type=["llama"]), "config.json: model_type is ['llama']; supported: llama"),
    "no heads": (words(CONFIG, num_attention_heads=0), "num_attention_heads is 0; expected an integer from 1"),
    "no key heads": (words(CONFIG, num_key_value_heads=0), "num_key_value_heads is 0; expected an integer from 1"),
    "negative": (words(CONFIG, intermediate_size=-48), "intermediate_size is -48; expected an integer from 1"),
    "uneven": (words(CONFIG, num_key_value_heads=3), "4 query heads cannot share 3 key-value heads"),
    "no divisor": (words(CONFIG, num_attention_heads=3, head_dim=None), "num_attention_heads is 3; expected a divisor"),
    "vocabulary": (words(CONFIG, vocab_size=10**12), "vocab_size is 1000000000000; expected an integer from 1 to 2147"),
    "promises": (
        words(CONFIG, vocab_size=2 * 10**9),
        "weight has shape [40, 32], expected [2000000000, 32]",
    ),
    "layers": (words(CONFIG, num_hidden_layers=10**12), "num_hidden_layers is 1000000000000; expected"),
    "positions": (words(CONFIG, max_position_embeddings=2**31 - 1), "expected at most 134217728 with a head_dim of 8"),
    "400 digits": (words(CONFIG, rope_theta=int("9" * 400)), "rope_theta is 9999"),
    "eps": (words(CONFIG, rms_norm_eps=float("nan")), "rms_norm_eps is nan; expected a number above 0 and below 1"),
    "theta": (words(CONFIG, rope_theta=float("inf")), "rope_theta is inf; expected a number above 1"),
    "rope": (words(CONFIG, rope_scaling=[1]), "the rope parameters are [1]; expected an object of numbers"),
    "two ropes": (words(CONFIG, rope_parameters={"full_attention": {}}), "expected an object of numbers, the same for"),
    "rope type": (words(CONFIG, rope_scaling={"rope_type": "yarn", "factor": "4"}), "factor is '4'; expected a number"),
    "rope factor": (words(CONFIG, rope_scaling={"type": "linear", "factor": 0}), "factor is 0; expected a number"),
    "llama3": (
        words(CONFIG, rope_scaling={"type": "llama3", "factor": 2}),
        "'llama3' needs low_freq_factor, high_",
    ),
    "tied": (words(CONFIG, tie_word_embeddings="no"), "tie_word_embeddings is 'no'; expected true or false"),
    "kinds": (words(CONFIG, layer_types=["chunked_attention"] * 2), "expected a list of full_attention and sliding"),
    "end": (words(CONFIG, eos_token_id="two"), "config.json: eos_token_id is 'two'; expected a token's number"),
    "no end": (words("tokenizer_config.json", eos_token=None), "names no eos_token"),
    "cut weights": (cut(WEIGHTS), "model.safetensors cannot be read as safetensors"),
    "cut header": (cut(WEIGHTS, 0.001), "model.safetensors cannot be read as safetensors"),
    "integers": (
        put("model.norm.weight", torch.ones(32, dtype=torch.int64)),
        "model.norm.weight has dtype I64, expected",
    ),
    "shape": (put("model.norm.weight", torch.ones(31)), "model.norm.weight has shape [31], expected [32]"),
    "not a number": (
        tensors(lambda found: found["model.layers.1.mlp.up_proj.weight"][3].fill_(float("nan"))),
        "model.layers.1.mlp.up_proj.weight holds NaN or infinite values; expected numbers",
    ),
    "infinite": (
        tensors(lambda found: [tensor.view(-1)[-1:].fill_(float("inf")) for tensor in found.values()]),
        "more holds NaN or infinite values",
    ),
    "missing": (tensors(lambda found: found.pop("model.norm.weight")), "missing model.norm.weight"),
    "tokenizer": (cut("tokenizer.json"), "tokenizer.json is not valid JSON"),
    "no tokenizer": (bytes_of("tokenizer.json", b"{}"), "cannot be loaded"),
    "tokenizer list": (bytes_of("tokenizer_config.json", b"[]"), "tokenizer_config.json holds []; expected an object"),
    "panic": (words("tokenizer.json", post_processor=None, model__vocab={}), "cannot be loaded"),
    "own code": (
        words("tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", None]}),
        "asks for code of its own (auto_map), which tlt never runs",
    ),
    "template": (words("tokenizer_config.json", chat_template="{% for"), "chat template refuses a chat of user"),
    "sums": (words("tokenizer_config.json", chat_template="{{ 1 / 0 }}"), "refuses a chat of user: ZeroDivisionError"),
}
SHARDS: dict[str, tuple[Damage, str]] = {
    "list": (bytes_of(INDEX, b"[]"), "index.json holds []; expected an object; copy it again"),
    "no map": (bytes_of(INDEX, b'{"weight_map": [1]}'), "is no index of weight files: weight_map is [1]"),
    "numbers": (words(INDEX, weight_map={"a": 1}), "names the file 1; expected the name of a .safetensors file"),
    "outside": (outside, "names the file '../outside.safetensors'; expected the name of a .safetensors file beside"),
    "absolute": (words(INDEX, weight_map={"a": "/etc/passwd"}), "names the file '/etc/passwd'; expected the name"),
    "long": (words(INDEX, weight_map={"a": "x" * 1000 + ".safetensors"}), "expected the name of a .safetensors file"),
    "gone": (words(INDEX, weight_map={"a": "gone.safetensors"}), "names files that are not there: gone.safetensors"),
    "twice": (twice, "holds lm_head.weight, as another file of"),
}
DRAFTERS: dict[str, tuple[Damage, str]] = {
    "torn": (cut(CONFIG), "config.json is not valid JSON"),
    "latin": (bytes_of(CONFIG, b"\xe9"), "config.json is not UTF-8 text; copy the drafter again"),
    "list": (bytes_of(CONFIG, b"[]"), "config.json holds []; expected an object; copy the drafter again"),
    "own words": (words(CONFIG, tlt=[1]), "config.json: tlt is [1]; expected an object"),
    "window": (words(CONFIG, tlt__window="24"), "config.json: tlt.window is '24'; expected an integer"),
    "no window": (words(CONFIG, tlt__window=-1), "tlt.window is -1; expected at least 1"),
    "architecture": (words(CONFIG, architectures=3), "config.json: architectures is 3; expected a list"),
    "vocabulary": (words(CONFIG, vocab_size=10**12), "config.json: vocab_size is 1000000000000; expected an integer"),
    "draft vocabulary": (words(CONFIG, draft_vocab_size="10"), "draft_vocab_size is '10'; expected an integer"),
    "heads": (words(CONFIG, num_attention_heads=0), "config.json: num_attention_heads is 0; expected an integer"),
    "taps": (
        words(CONFIG, eagle_aux_hidden_state_layer_ids="012"),
        "reads layers '012'; expected a list of 3",
    ),
    "shifted taps": (
        words(CONFIG, eagle_aux_hidden_state_layer_ids=None, eagle_config={"eagle_aux_hidden_state_layer_ids": [None]}),
        "reads layers [None]; expected a list of 3 integers",
    ),
    "layer": (words(CONFIG, transformer_layer_config=[1]), "transformer_layer_config is [1]; expected an object"),
    "precision": (words(CONFIG, torch_dtype="nn"), "torch_dtype is 'nn'; expected one of bfloat16, float16"),
    "cut weights": (cut(WEIGHTS), "model.safetensors cannot be read as safetensors"),
    "integers": (
        put("fc.weight", torch.ones(32, 96, dtype=torch.int32)),
        "fc.weight holds torch.int32; expected one of",
    ),
    "map": (put("d2t", torch.ones(10)), "d2t holds torch.float32; expected one of int32, int64"),
    "shape": (put("fc.weight", torch.ones(3, 96)), "fc.weight has shape [3, 96], expected [32, 96]"),
    "record": (bytes_of("acceptance.json", b"[" * 10**5), "acceptance.json is no record of a drafter: it is nested"),
}


def damaged(whole: Path, tmp_path: Path, name: str, damage: Damage) -> str:
    shutil.copytree(whole / name, tmp_path / name)
    damage(tmp_path / name)
    return str(tmp_path / name)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("tlt: error: ")
    assert [line for line in lines if line.startswith(("tlt:", "Traceback"))] == lines[-1:]
    return lines[-1]


GENERATE = ("--sampling.max_tokens=1", "--model.device=cpu", "--engine.rows=1")


@pytest.mark.parametrize("case", MODELS)
def test_a_damaged_model_is_named(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    damage, expected = MODELS[case]
    assert expected in refusal(capsys, "generate", damaged(whole, tmp_path, "model", damage), "1+2=", *GENERATE)


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "{}", "1+2="),
        ("train", "{recipe}", "--model.path={}"),
        ("train", "{recipe}", "--task.name=files", "--task.path={}/rows.jsonl"),
        ("draft", "export", "{}", "exported", "--policy=tiny"),
    ],
)
def test_what_the_system_hides_is_not_called_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    hidden = tmp_path / "hidden"
    hidden.symlink_to(hidden)  # what is behind it cannot be told, by root neither
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"run.out = '{tmp_path}'\ntask.group = 2")
    told = refusal(capsys, *(argument.format(hidden, recipe=recipe) for argument in arguments))
    assert "hidden" in told
    assert "cannot be reached (Too many levels of symbolic links)" in told


@pytest.mark.parametrize("case", SHARDS)
def test_a_damaged_index_is_named(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    damage, expected = SHARDS[case]
    assert expected in refusal(capsys, "generate", damaged(whole, tmp_path, "shards", damage), "1+2=", *GENERATE)


@pytest.mark.parametrize("case", DRAFTERS)
def test_a_damaged_drafter_is_named(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    damage, expected = DRAFTERS[case]
    drafter = damaged(whole, tmp_path, "drafter", damage)
    target = str(tmp_path / "exported")
    assert expected in refusal(capsys, "draft", "export", drafter, target, "--policy", str(whole / "model"))
    assert not Path(target).exists()


def test_a_drafter_looks_back_no_further_than_its_policy_goes(whole: Path, tmp_path: Path) -> None:
    """Each row of a batch keeps as many keys and values: a window of a million million would ask for all memory."""
    from tlt.model.weights import read_config
    from tlt.spec.eagle_files import load_drafter

    drafter = damaged(whole, tmp_path, "drafter", words(CONFIG, tlt__window=10**12))
    assert load_drafter(drafter, read_config(whole / "model"), window=1).config.window == 512


def test_a_tokenizer_of_another_policy_is_named(whole: Path, tmp_path: Path) -> None:
    added = {"id": VOCAB, "content": "<stop>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}

    def damage(directory: Path) -> None:
        file = directory / "tokenizer.json"
        content = json.loads(file.read_text())
        content["model"]["vocab"] |= {f"x{number}": number for number in range(len(content["model"]["vocab"]), VOCAB)}
        content["added_tokens"].append({**added, "normalized": False})
        file.write_text(json.dumps(content))
        words("tokenizer_config.json", eos_token="<stop>")(directory)

    path = damaged(whole, tmp_path, "model", damage)
    with pytest.raises(ModelError, match="ends an answer with token 40, but the policy's vocabulary has 40"):
        open_policy(ModelSettings(path=path, device="cpu"))
    words("tokenizer_config.json", eos_token="<eos>")(Path(path))
    tokenizer = open_policy(ModelSettings(path=path, device="cpu")).tokenizer
    assert tokenizer.encode_text("1+2=")
    with pytest.raises(TaskError, match=r"'1\+2=<stop>' has the token 40, but the policy's vocabulary has 40"):
        tokenizer.encode_text("1+2=<stop>")


def test_half_a_character_is_no_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    """What a shell hands over where its argument is not UTF-8."""
    assert "cannot encode '\\udcff'" in refusal(capsys, "generate", "tiny", "\udcff", *GENERATE)


def test_a_template_that_works_is_used(whole: Path, tmp_path: Path) -> None:
    path = damaged(whole, tmp_path, "model", words("tokenizer_config.json", chat_template="{{ messages[0].content }}"))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode_prompt((Message("user", "1+2="),)) == tokenizer.encode_text("1+2=")


RECIPES: dict[str, tuple[bytes, str]] = {
    "latin": (b"[run]\nname = 'caf\xe9'\n", "is not UTF-8 text; expected a TOML file"),
    "nested": (b"run = " + b"[" * 10**5, "is not valid TOML: it is nested too deep"),
    "digits": (b"[run]\nseed = " + b"9" * 5000, "is not valid TOML: an integer has too many digits"),
    "400 digits": (b"[train]\nclip = " + b"9" * 400, "train.clip is 9999"),
    "hexadecimal": (
        b"[run]\nseed = 0x" + b"f" * 5000,
        "run.seed is a value of type int, too large to show; expected an",
    ),
    "list": (b"run = [1]", "run is [1]; expected a section, [run]"),
    "line break": (b'"a\\nb" = 1', r"unknown key 'a\nb'"),
    "nul": (b'[warmup]\nsave = "a\\u0000b"', r"warmup.save is 'a\x00b'; expected UTF-8 text without NUL"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_damaged_recipe_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    content, expected = RECIPES[case]
    (tmp_path / "recipe.toml").write_bytes(content)
    assert main(["rollout", str(tmp_path / "recipe.toml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tlt: error: {tmp_path}/recipe.toml: ")
    assert expected in line
    assert len(line) < 600


FLAGS: dict[str, tuple[str, str]] = {
    "400 digits": ("--run.seed=" + "9" * 400, "--run.seed: run.seed is 9999"),
    "5000 digits": ("--run.seed=" + "9" * 5000, "--run.seed: run.seed is '9999"),
    "nested": ("--sampling.stop=" + "[" * 10**5, "--sampling.stop: sampling.stop is '[[[["),
    "half": ("--run.out=\udcff", r"--run.out: run.out is '\udcff'; expected UTF-8 text without NUL"),
    "digits of a GPU": ("--model.device=cuda:" + "9" * 400, "model.device is 'cuda:9999"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_a_damaged_flag_is_named(capsys: pytest.CaptureFixture[str], case: str) -> None:
    flag, expected = FLAGS[case]
    assert main(["generate", "tiny", "hi", flag]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tlt: error: {expected}") or expected in line
    assert len(line) < 600


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["rollout", "recipe.toml"], 2, "recipe.toml: is not valid TOML: it is nested too deep"),
        (["config", "--run.seed", "9" * 5000], 2, "--run.seed: run.seed is '9999"),
        (["generate", "model", "hi"], 1, "model.safetensors cannot be read as safetensors"),
    ],
)
def test_a_process_ends_with_one_line(
    whole: Path, tmp_path: Path, arguments: list[str], code: int, expected: str
) -> None:
    (tmp_path / "recipe.toml").write_bytes(b"run = " + b"[" * 10**5)
    damaged(whole, tmp_path, "model", cut(WEIGHTS))
    done = subprocess.run([sys.executable, "-m", "tlt", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("tlt: error: ")
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr
