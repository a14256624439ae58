"""Text that grows token by token equals the text of all tokens, and stop strings are not shown."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="needs the extra 'engine'")

from atoll.core.errors import InputError
from atoll.engine.engine_errors import EngineError, TextTooLongError
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


class Spy:
    """A tokenizer that notes the lengths of what it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.seen: list[int] = []

    def encode(self, text: str, **more: Any) -> Any:
        self.seen.append(len(text))
        return self._tokenizer.encode(text, **more)

    def encode_batch_fast(self, texts: list[str], **more: Any) -> Any:
        self.seen += map(len, texts)
        return self._tokenizer.encode_batch_fast(texts, **more)


@pytest.fixture
def spy(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> Spy:
    found = Spy(codec._tokenizer)
    monkeypatch.setattr(codec, "_tokenizer", found)
    return found


@given(st.text(max_size=200) | st.sampled_from([text * 20 for text in (*SPECIAL, "the", " w")]))
def test_no_text_is_longer_than_its_tokens_allow(codec: TextCodec, text: str) -> None:
    tokens = len(codec.encode(text))
    assert len(text) <= codec.max_chars(tokens)
    # So that what fits is never refused.
    assert len(codec.encode(text, max_tokens=tokens)) == tokens


def test_what_cannot_fit_never_reaches_the_tokenizer(codec: TextCodec, spy: Spy) -> None:
    text = "x" * (codec.max_chars(64) + 1)
    with pytest.raises(TextTooLongError, match="characters"):
        codec.encode(text, max_tokens=64)
    with pytest.raises(TextTooLongError, match="characters"):
        codec.chat([{"role": "user", "content": text}], max_tokens=64)
    with pytest.raises(TextTooLongError, match="65 messages"):
        codec.chat([{"role": "user", "content": ""}] * 65, max_tokens=64)
    assert spy.seen == []
    assert len(codec.encode(text)) == len(text)


def test_what_does_not_fit_is_given_up_soon(codec: TextCodec, spy: Spy) -> None:
    # Short enough to fit if all of it were the longest token, which it is not.
    most = 100_000
    text = "".join(f"{number} " for number in range(200_000))
    assert 8 * most < len(text) < codec.max_chars(most)
    with pytest.raises(TextTooLongError, match=f"more than {most} tokens"):
        codec.encode(text, max_tokens=most)
    assert sum(spy.seen) < 2 * most + 2 * max(spy.seen)
    assert max(spy.seen) <= 2**16


def test_a_long_text_has_the_tokens_of_its_parts(codec: TextCodec) -> None:
    part = "the words or the worst of them\n"
    assert codec.encode(part * 1000) == codec.encode(part) * 1000
    text = SPECIAL[1] * 200_000
    assert codec.encode(text, max_tokens=200_000) == codec.encode(SPECIAL[1]) * 200_000


def test_other_threads_go_on_while_a_long_text_is_tokenised(codec: TextCodec) -> None:
    text = "".join(f"{number} words or " for number in range(100_000))
    running = threading.Event()
    turns = 0

    def encode() -> None:
        running.set()
        codec.encode(text)
        running.clear()

    thread = threading.Thread(target=encode)
    thread.start()
    running.wait()
    while running.is_set():
        turns += 1
        time.sleep(0)
    thread.join()
    # A tokenizer that keeps the lock gives this thread a turn or two before and after.
    assert turns > 50
