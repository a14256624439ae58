"""An answer is complete when it says so, whether or not the server closes the connection."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.http.probes import _complete

BODY = json.dumps({"object": "list", "data": [{"id": "m"}]}).encode()
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n"
    + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (BODY[:5], BODY[5:]))
    + b"0\r\n\r\n"
)
EMPTY = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"


@pytest.mark.parametrize("answer", [SIZED, CHUNKED, EMPTY])
def test_the_whole_is_complete_and_no_beginning_of_it_is(answer: bytes) -> None:
    assert _complete(bytearray(answer))
    assert not any(_complete(bytearray(answer[:n])) for n in range(len(answer)))


@given(st.binary(max_size=200))
def test_without_a_length_only_the_end_of_the_connection_ends_it(body: bytes) -> None:
    assert not _complete(bytearray(b"HTTP/1.0 200 OK\r\nserver: x\r\n\r\n" + body))
