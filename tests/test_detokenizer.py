"""Streamed text: whatever the pieces, it adds up to the whole text up to the first stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_text import save
from tlt.serve.detokenizer import Detokenizer
from tlt.text import StopWatch, Tokenizer
from tlt.types import SamplingParams


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of bytes, so that a character may take four tokens, and of some tokens with several letters."""
    return Tokenizer.load(save(tmp_path_factory.mktemp("bytes")))


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abcden €😀é", max_size=24),
    broken=st.lists(st.integers(0, 255), max_size=3),
    stops=st.lists(st.text(alphabet="abcd€😀", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    with_stop=st.booleans(),
)
def test_pieces_add_up_to_the_text_before_the_stop_string(
    tokenizer: Tokenizer, text: str, broken: list[int], stops: list[str], cuts: list[int], with_stop: bool
) -> None:
    params = SamplingParams(stop=tuple(stops))
    tokens, reason = tokenizer.encode_text(text) + broken, "length"
    if stops:  # the engine stops at the token that completes a stop string
        watch = StopWatch(tokenizer, params.stop)
        ends = next((index for index, token in enumerate(tokens, start=1) if watch.feed(token)), None)
        tokens, reason = (tokens, "length") if ends is None else (tokens[:ends], "stop")
    whole = tokenizer.decode(tokens)
    found = [(whole.find(stop), stop) for stop in stops if stop in whole] if reason == "stop" else []
    expected = whole[: min(found)[0]] if found and not with_stop else whole

    streamed, pieces, start = Detokenizer(tokenizer, params, with_stop=with_stop), list[str](), 0
    for cut in [*cuts, len(tokens)]:
        end = min(len(tokens), start + cut)
        pieces.append(streamed.feed(tokens[start:end], reason if end == len(tokens) else None))  # type: ignore[arg-type]
        start = end
        if end == len(tokens):
            break
    assert "".join(pieces) == expected
    assert streamed.stop == (min(found)[1] if found else None)


def test_a_stop_token_is_left_out_unless_it_is_wanted(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode_text("a€b")
    params = SamplingParams(stop_token_ids=(tokens[-1],))
    for with_stop, expected in ((False, "a€"), (True, "a€b")):
        text = Detokenizer(tokenizer, params, with_stop=with_stop)
        assert text.feed(tokens[:2], None) + text.feed(tokens[2:], "stop") == expected
        assert text.stop == tokens[-1]
