"""Text that grows token by token equals the text of all tokens, and stop strings are not shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="needs the extra 'engine'")

from atoll.core.errors import InputError
from atoll.engine.errors import EngineError
from atoll.engine.text import TextCodec
from tests.engine.tokens import SPECIAL, write_tokenizer

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("codec")
    write_tokenizer(folder)
    return TextCodec(folder)


def streamed(codec: TextCodec, text: str, *stop: str) -> tuple[str, bool]:
    stream = codec.stream(stop)
    shown = ""
    for token in codec.encode(text):
        step = stream.push(token)
        shown += step.text
        if step.stopped:
            return shown, True
    return shown + stream.finish(), False


@given(st.text(max_size=40))
def test_pieces_make_the_whole(codec: TextCodec, text: str) -> None:
    whole = codec.decode(codec.encode(text))
    assert streamed(codec, text) == (whole, False)


@given(st.text("abthe w\N{SNOWMAN}", max_size=30), st.text("abth e", min_size=1, max_size=4))
def test_a_stop_string_ends_the_text_before_it(codec: TextCodec, text: str, stop: str) -> None:
    before, found, _ = text.partition(stop)
    shown, stopped = streamed(codec, text, stop)
    assert shown == before
    assert stopped == bool(found)


def test_the_first_of_several_stops_counts(codec: TextCodec) -> None:
    assert streamed(codec, "one two three", "three", "two") == ("one ", True)


def test_half_a_character_is_held_back(codec: TextCodec) -> None:
    tokens = codec.encode("\N{SNOWMAN}")
    assert len(tokens) == 3
    stream = codec.stream()
    assert [stream.push(token).text for token in tokens] == ["", "", "\N{SNOWMAN}"]


def test_bytes_that_never_become_a_character_are_shown_in_the_end(codec: TextCodec) -> None:
    lone = codec.encode("\N{SNOWMAN}")[0]
    stream = codec.stream()
    shown = "".join(stream.push(lone).text for _ in range(20)) + stream.finish()
    assert shown == "\ufffd" * 20


def test_chat_and_end_tokens(codec: TextCodec) -> None:
    tokens = codec.chat([{"role": "user", "content": "hi"}])
    text = codec.decode(tokens, skip_special=False)
    assert text == "<|user|>hi<|end|><|assistant|>"
    assert codec.eos == (codec.encode(SPECIAL[0])[0],)
    assert codec.decode(tokens) == "hi"
    assert (codec.layers, codec.max_length, codec.vocabulary) == (4, 64, 300)


def test_messages_the_template_refuses_are_an_error_of_one_line(codec: TextCodec) -> None:
    with pytest.raises(EngineError, match="chat template"):
        codec.chat([{"content": object()}, 5])  # type: ignore[list-item]


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        TextCodec(tmp_path)
