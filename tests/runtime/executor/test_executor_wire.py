from __future__ import annotations

import resource
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.executor.executor_messages import (
    CHUNK_BYTES,
    MAX_FRAME_BYTES,
    VERSION,
    ArrayChunk,
    CallerHello,
    Cancel,
    Fetch,
    Finished,
    InvocationFailed,
    Invoke,
    ReleaseArrays,
    Renew,
    StreamPiece,
)
from atoll.runtime.executor.executor_wire import (
    HEADER_BYTES,
    MAX_DEPTH,
    MAX_ITEMS,
    FrameDecoder,
    WireError,
    decode_answer,
    decode_call,
    decode_hello,
    encode_frame,
    look_through,
    pack_value,
)
from atoll.tasks.values import ITEM_BYTES, Handle

_TEXT = st.text(max_size=20)
_HANDLES = st.builds(
    Handle,
    id=st.text("0123456789abcdef", min_size=32, max_size=32),
    owner=_TEXT,
    address=_TEXT,
    host=_TEXT,
    path=_TEXT,
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    shape=st.lists(st.integers(0, 2**31), max_size=8).map(tuple),
    crc32=st.integers(0, 2**32 - 1),
)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | _TEXT
    | st.binary(max_size=40)
    | _HANDLES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=12,
)
_INPUTS = st.dictionaries(_TEXT, _VALUES, max_size=4)
_NUMBERS = st.integers(0, 2**63 - 1)


def _calls() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(Invoke, id=_NUMBERS, component=_TEXT, inputs=_INPUTS, request=_TEXT),
        st.builds(Cancel, id=_NUMBERS),
        st.builds(Fetch, id=_NUMBERS, handle=_TEXT),
        st.builds(Renew, handles=st.lists(_TEXT, max_size=3), lease_s=st.floats(0, 1e6)),
        st.builds(ReleaseArrays, handles=st.lists(_TEXT, max_size=3)),
    )


def _frame(message: Any) -> bytes:
    if isinstance(message, Invoke):
        packed = {name: pack_value(value) for name, value in message.inputs.items()}
        message = msgspec.structs.replace(message, inputs=packed)
    return encode_frame(message)


@given(st.lists(_calls(), min_size=1, max_size=4), st.lists(st.integers(1, 60), max_size=30))
def test_what_is_written_is_read_however_it_is_split(messages: list[Any], cuts: list[int]) -> None:
    stream = b"".join(map(_frame, messages))
    decoder = FrameDecoder()
    bodies: list[bytes] = []
    at = 0
    for size in [*cuts, len(stream)]:
        bodies += decoder.feed(stream[at : at + size])
        at += size
    assert [decode_call(body)[0] for body in bodies] == messages
    assert decoder.is_between


@given(_VALUES)
def test_results_come_back_as_they_were(value: Any) -> None:
    for message in (
        StreamPiece(1, pack_value(value)),
        Finished(1, pack_value(value), 0.5, 0.25, 3),
    ):
        (body,) = FrameDecoder().feed(encode_frame(message))
        assert decode_answer(body).value == value  # type: ignore[union-attr]


@given(_calls(), st.data())
def test_every_changed_byte_is_found(message: Any, data: st.DataObject) -> None:
    frame = bytearray(_frame(message))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    # Without what follows: a changed length must be found before anybody waits for more.
    with pytest.raises(WireError):
        list(FrameDecoder().feed(bytes(frame)))


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_or_wait_for_more(data: bytes) -> None:
    decoder = FrameDecoder()
    try:
        assert list(decoder.feed(data)) == []
    except WireError:
        return
    assert len(data) < HEADER_BYTES


@given(st.binary(max_size=300))
def test_random_bodies_are_messages_or_refused(body: bytes) -> None:
    for decode in (decode_call, decode_answer, decode_hello):
        try:
            decode(body)
        except WireError:
            continue


@given(_VALUES)
def test_items_are_counted_without_making_them(value: Any) -> None:
    def count(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(1 + count(item) for item in value.values())
        return 1 + sum(map(count, value)) if isinstance(value, list) else 1

    body = msgspec.msgpack.encode(pack_value(value))
    assert look_through(body) == count(value)
    for cut in range(len(body)):
        with pytest.raises(WireError):
            look_through(body[:cut])
    with pytest.raises(WireError):
        look_through(body + b"\xc0")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\x91" * (MAX_DEPTH + 8) + b"\xc0", "deep"),
        (b"\x91" * 200_000 + b"\xc0", "deep"),
        (b"\xdd\xff\xff\xff\xff" * 3, "more items"),
        (b"\xdf\xff\xff\xff\xff" * 3, "more items"),
        (b"\xdd" + (MAX_ITEMS + 9).to_bytes(4, "big") + b"\x90" * (MAX_ITEMS + 9), "more items"),
        (b"\x81\x01\x02", "keys"),
        (b"\x81\xc4\x01a\x02", "keys"),
        (b"\xd6\xff\x00\x00\x00\x00", "extension"),
        (b"\xc7\x04\x07abcd", "extension"),
        (b"\xc1", "not MessagePack"),
        (b"", "early"),
    ],
)
def test_what_would_take_memory_or_is_no_value_is_refused(body: bytes, words: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WireError, match=words):
        look_through(body)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_unknown_messages_and_fields_of_the_wrong_kind_are_refused() -> None:
    for message in ({"type": "shutdown"}, {"type": "invoke", "id": "1"}, {"id": 1}, [1, 2], None):
        with pytest.raises(WireError, match="cannot be read"):
            decode_call(msgspec.msgpack.encode(message))
    with pytest.raises(WireError, match="cannot be read"):
        # Nobody may say hello twice, and an executor is told nothing that it says itself.
        decode_call(msgspec.msgpack.encode(CallerHello(1, "token", "holder")))
    with pytest.raises(WireError, match="cannot be read"):
        decode_call(msgspec.msgpack.encode(InvocationFailed(1, "failed", "no")))


def test_frames_have_a_longest_length() -> None:
    chunk = encode_frame(ArrayChunk(1, 0, bytes(CHUNK_BYTES), last=True))
    (body,) = FrameDecoder().feed(chunk)
    assert decode_answer(body) == ArrayChunk(1, 0, bytes(CHUNK_BYTES), last=True)
    with pytest.raises(WireError, match="longer"):
        list(FrameDecoder(max_bytes=1000).feed(chunk[:HEADER_BYTES]))
    with pytest.raises(WireError, match="longer"):
        encode_frame(ArrayChunk(1, 0, bytes(MAX_FRAME_BYTES), last=True))


def test_other_versions_are_refused() -> None:
    frame = bytearray(encode_frame(Cancel(1)))
    frame[2] += 1
    frame[12:16] = zlib.crc32(frame[:12]).to_bytes(4, "little")
    with pytest.raises(WireError, match=f"version {VERSION + 1}"):
        list(FrameDecoder().feed(bytes(frame)))


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {3}}, [b"a", bytearray(b"b")]])
def test_what_is_no_value_is_not_sent(value: Any) -> None:
    with pytest.raises(WireError):
        pack_value(value)


def test_deep_values_and_large_numbers_are_not_sent() -> None:
    deep: Any = None
    for _ in range(MAX_DEPTH):
        deep = [deep]
    look_through(msgspec.msgpack.encode(Finished(1, pack_value(deep))))
    with pytest.raises(WireError, match="deep"):
        pack_value([deep])
    with pytest.raises(WireError, match="written"):
        encode_frame(Finished(1, 2**64))


def test_a_handle_that_is_no_array_is_refused() -> None:
    good = Handle("0" * 32, "a", "b", "c", "d", "uint8", (3,), 0)
    body = msgspec.msgpack.encode(Finished(1, pack_value(good)))
    for old, new in ((b"uint8", b"uintX"), (b"\x91\x03", b"\x91\xff"), (b"\x91\x03", b"\x03\xc0")):
        assert old in body
        with pytest.raises(WireError):
            decode_answer(body.replace(old, new))
