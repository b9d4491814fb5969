"""Text in and out: characters split over tokens, stop texts across token borders, chats, and what ends an answer."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from tlt.errors import ModelError, TaskError
from tlt.policy import TINY_POLICY
from tlt.text import StopWatch, TextStream, Tokenizer
from tlt.types import Message

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGED = ("ab", "cd", "end")  # tokens of several letters, so that borders fall inside words
SPECIAL = ("<end>", "<turn>")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<turn>' + m.role + ':' + m.content }}{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
)


def save(directory: Path, template: str | None = None, **config: object) -> Path:
    """A byte-level tokenizer: a character outside ASCII takes several tokens."""
    vocab = {piece: number for number, piece in enumerate([*BYTES, "en", *MERGED])}
    merges = [("a", "b"), ("c", "d"), ("e", "n"), ("en", "d")]
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    directory.mkdir(parents=True, exist_ok=True)
    raw.save(str(directory / "tokenizer.json"))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", **config}
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save(tmp_path_factory.mktemp("bytes"), TEMPLATE))


def test_a_character_is_shown_when_its_last_byte_has_come(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    tokens = tokenizer.encode_text("a€b")
    assert len(tokens) == 5
    assert [stream.feed([token]) for token in tokens] == ["a", "", "", "€", "b"]


def test_bytes_that_make_no_character_do_not_hold_the_rest_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    euro, letter = tokenizer.encode_text("€"), tokenizer.encode_text("x")
    shown = [stream.feed(part) for part in (euro[:1], letter, letter)]
    assert shown == ["", "\ufffdx", "x"]


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("abcdend €é漢🙂\n"), max_size=30), cuts=st.lists(st.integers(1, 5), max_size=60))
def test_any_split_shows_the_whole_text(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    """Several tokens may come at once, as they do when drafts are accepted."""
    tokens = [*tokenizer.encode_text(text), *tokenizer.encode_text(".")]
    stream, shown = TextStream(tokenizer), ""
    while tokens:
        count = cuts.pop() if cuts else 1
        shown += stream.feed(tokens[:count])
        del tokens[:count]
    assert shown == f"{text}."


def test_special_tokens_show_nothing(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    pieces = [*tokenizer.encode_text("ab"), tokenizer.eos_id, *tokenizer.encode_text("cd")]
    assert [stream.feed([token]) for token in pieces] == ["ab", "", "cd"]
    assert tokenizer.decode(pieces) == "abcd"


def seen_after(tokenizer: Tokenizer, text: str, *stops: str) -> str | None:
    """How much of the text has been fed when the watch says stop."""
    watch, tokens = StopWatch(tokenizer, stops), tokenizer.encode_text(text)
    for count, token in enumerate(tokens, start=1):
        if watch.feed(token):
            return tokenizer.decode(tokens[:count])
    return None


@pytest.mark.parametrize(
    ("text", "stops", "seen"),
    [
        ("xxabcdxx", ("bc",), "xxabcd"),  # begins inside one token, ends inside the next
        ("xabxcdx", ("bc",), None),
        ("xxendxx", ("xe", "never"), "xxend"),
        ("a€€b", ("€€",), "a€€"),  # six bytes, none of them a token of its own text
        ("a€b", ("\ufffd",), None),  # half a character is no text
        ("abababx", ("b",), "ab"),
        ("ab\n\nab", ("\n\nab", "zzzzzzzz"), "ab\n\nab"),
        ("ab", ("abab",), None),
    ],
)
def test_stop_texts_are_found_across_token_borders(
    tokenizer: Tokenizer, text: str, stops: tuple[str, ...], seen: str | None
) -> None:
    assert seen_after(tokenizer, text, *stops) == seen


@settings(max_examples=80, deadline=None)
@given(text=st.text(st.sampled_from("abcdend€"), max_size=25), stop=st.text("abcdend€", min_size=1, max_size=4))
def test_a_watch_stops_at_the_first_token_that_completes_a_stop(tokenizer: Tokenizer, text: str, stop: str) -> None:
    tokens = tokenizer.encode_text(text)
    texts = [tokenizer.decode(tokens[:count]) for count in range(1, len(tokens) + 1)]
    first = next((seen for seen in texts if stop in seen), None)
    assert seen_after(tokenizer, text, stop) == first


def test_a_chat_becomes_what_the_template_says(tokenizer: Tokenizer) -> None:
    turn = tokenizer._inner.convert_tokens_to_ids("<turn>")
    asked = tokenizer.encode_prompt((Message("user", "ab"),))
    assert asked == [turn, *tokenizer.encode_text("user:ab"), turn]
    assert tokenizer.has_chat_template


def test_a_chat_the_template_refuses_is_the_tasks_mistake(tokenizer: Tokenizer) -> None:
    chat = (Message("system", "be brief"), Message("user", "ab"))
    with pytest.raises(TaskError, match="refuses a chat of system, user: no system role"):
        tokenizer.encode_prompt(chat)


def test_a_chat_without_a_template_is_refused() -> None:
    tokenizer = Tokenizer.load(TINY_POLICY)
    assert not tokenizer.has_chat_template
    with pytest.raises(TaskError, match="no chat template: use a plain text prompt"):
        tokenizer.encode_prompt((Message("user", "1+1="),))


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        (None, None, {"<end>"}),
        ({"eos_token_id": [257, "turn"]}, None, {"<end>", "<turn>", 257}),
        ({"eos_token_id": "turn"}, {"eos_token_id": None}, {"<end>", "<turn>"}),
        ({}, {"eos_token_id": 258}, {"<end>", 258}),
    ],
)
def test_every_declared_end_ends_an_answer(
    generation: dict[str, object] | None, model: dict[str, object] | None, expected: set[object], tmp_path: Path
) -> None:
    """Some policies end a turn and a text with different tokens, and say so in different files."""
    save(tmp_path)
    number = {name: Tokenizer.load(tmp_path)._inner.convert_tokens_to_ids(name) for name in SPECIAL}
    for file, declared in (("generation_config.json", generation), ("config.json", model)):
        if declared is not None:
            text = json.dumps({"model_type": "llama", **declared}).replace('"turn"', str(number["<turn>"]))
            (tmp_path / file).write_text(text)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.eos_ids == {number.get(end, end) for end in expected}  # type: ignore[call-overload]
    assert loaded.eos_id == number["<end>"]


def test_what_cannot_be_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer in .*nosuch: expected tokenizer.json"):
        Tokenizer.load(tmp_path / "nosuch")
    with pytest.raises(ModelError, match="names no eos_token"):
        Tokenizer.load(save(tmp_path / "endless", eos_token=None))
    save(tmp_path / "torn")
    (tmp_path / "torn" / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json is not valid JSON"):
        Tokenizer.load(tmp_path / "torn")
