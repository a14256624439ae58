"""URLs in requests: data as it stands in them, and strangers who try to reach what is inside."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.media import data_urls
from atoll.runtime.media import remote_media as remote
from atoll.runtime.media.data_urls import read_base64, read_data_url
from atoll.runtime.media.media_errors import MediaError
from atoll.runtime.media.remote_media import is_public, read_remote


def refused(url: str, max_bytes: int = 1000, *, remote_urls: bool = False) -> MediaError:
    with pytest.raises(MediaError) as caught:
        read_data_url(url, max_bytes, remote_urls=remote_urls)
    assert "\n" not in caught.value.message
    return caught.value


@given(st.binary(max_size=100))
def test_data_urls(data: bytes) -> None:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert read_data_url(url, len(data)) == data
    assert read_data_url("DATA:;x=y;BASE64," + base64.b64encode(data).decode(), 100) == data
    if data:
        assert refused(url, len(data) - 1).code == "media_too_large"


def test_data_urls_in_percent_signs() -> None:
    assert read_data_url("data:text/plain,a%20b", 3) == b"a b"
    assert refused("data:text/plain,a%20bc", 3).code == "media_too_large"
    assert refused("data:text/plain," + "%20" * 4, 3).code == "media_too_large"


def test_large_base64_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **options: object) -> bytes:
        raise AssertionError("decoded")

    monkeypatch.setattr(base64, "b64decode", never)
    with pytest.raises(MediaError) as caught:
        read_base64("A" * 4004, 3000)
    assert caught.value.code == "media_too_large"


@pytest.mark.parametrize(
    "text", ["AAA", "AA==AA==", "AA AA", "AAA\n", "-_-_", "AAA\u00e9", "=AAA", "A===", "AA=A"]
)
def test_base64_is_strict(text: str) -> None:
    assert refused(f"data:;base64,{text}").code == "invalid_media"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "data",
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "ftp://example.com/a.png",
        "gopher://example.com",
        "/etc/passwd",
        "javascript:1",
        "datax:,a",
        "httpx://example.com",
    ],
)
@pytest.mark.parametrize("remote_urls", [False, True])
def test_other_schemes_are_never_read(url: str, remote_urls: bool) -> None:
    assert refused(url, remote_urls=remote_urls).code == "unsupported_media"


def test_a_data_url_without_a_comma() -> None:
    assert refused("data:image/png;base64").code == "invalid_media"
    assert refused("data:" + "x" * 1000 + ",").code == "invalid_media"


def test_remote_urls_are_off_unless_turned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetched(url: str, max_bytes: int) -> bytes:
        asked.append(url)
        return b"x" * max_bytes

    monkeypatch.setattr(data_urls, "read_remote", fetched)
    assert refused("https://example.com/a.png").code == "unsupported_media"
    assert not asked
    assert read_data_url("https://example.com/a.png", 2, remote_urls=True) == b"xx"
    assert asked == ["https://example.com/a.png"]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.255.0.1",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "64:ff9b::a00:1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "2001:0:7f00:1::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd12::1",
        "ff02::1",
        "2001:db8::1",
        "localhost",
        "",
    ],
)
def test_addresses_inside_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:4700::1", "::ffff:93.184.216.34"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


class Server:
    """A server that says what it was told to, piece by piece, to whoever connects to it."""

    def __init__(self, *pieces: bytes, each_s: float = 0.0) -> None:
        self.pieces = list(pieces)
        self.each_s = each_s
        self.now_s = 0.0
        self.connected: list[tuple[str, int, str | None]] = []
        self.asked = b""
        self.closed = 0

    def connect(self, address: str, port: int, tls_host: str | None, timeout_s: float) -> Server:
        self.connected.append((address, port, tls_host))
        return self

    def settimeout(self, value: float | None, /) -> None:
        self.left_s = value

    def sendall(self, data: bytes, /) -> None:
        self.asked += data

    def recv(self, bufsize: int, /) -> bytes:
        assert self.left_s is not None
        assert self.left_s > 0
        self.now_s += min(self.each_s, self.left_s)
        if self.each_s > self.left_s:
            raise TimeoutError
        return self.pieces.pop(0)[:bufsize] if self.pieces else b""

    def close(self) -> None:
        self.closed += 1

    def read(self, url: str, max_bytes: int = 100, *addresses: str) -> bytes:
        return read_remote(
            url,
            max_bytes,
            resolver=lambda host, port: addresses or ["93.184.216.34"],
            connector=self.connect,
            clock=lambda: self.now_s,
        )


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"


def test_a_public_url_is_fetched_from_the_address_that_was_checked() -> None:
    server = Server(OK, b"hello")
    assert server.read("https://example.com/a/b.png?c=d#e") == b"hello"
    assert server.connected == [("93.184.216.34", 443, "example.com")]
    assert server.asked.startswith(b"GET /a/b.png?c=d HTTP/1.1\r\nhost: example.com\r\n")
    assert server.closed == 1
    plain = Server(OK, b"hello")
    assert plain.read("http://example.com:80") == b"hello"
    assert plain.connected == [("93.184.216.34", 80, None)]


@pytest.mark.parametrize(
    "addresses",
    [
        ("127.0.0.1",),
        ("93.184.216.34", "10.0.0.1"),
        ("169.254.169.254", "93.184.216.34"),
        ("::ffff:10.0.0.1",),
    ],
)
def test_a_name_with_any_address_inside_is_not_connected_to(addresses: tuple[str, ...]) -> None:
    server = Server(OK, b"hello")
    with pytest.raises(MediaError, match="not on the public internet"):
        server.read("http://example.com/", 100, *addresses)
    assert not server.connected


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com:22/",
        "http://example.com:8080/",
        "http://example.com:0/",
        "http://example.com:99999/",
        "http://user:password@example.com/",
        "http://user@example.com/",
        "http:///a.png",
        "http://",
        "http://[::1",
        "http://example.com/a b",
        "http://example.com/\u00e9",
        "http://example.com/\r\nx: y",
        "ftp://example.com/",
    ],
)
def test_urls_that_are_not_asked(url: str) -> None:
    server = Server(OK, b"hello")
    with pytest.raises(MediaError):
        server.read(url)
    assert not server.connected


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (
            (b"HTTP/1.1 302 Found\r\nlocation: http://10.0.0.1/\r\ncontent-length: 0\r\n\r\n",),
            "302",
        ),
        ((b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",), "404"),
        ((b"SSH-2.0-OpenSSH_9.6\r\n",), "not answered in HTTP"),
        ((OK, b"hel"), "not answered in HTTP"),
        ((), "not answered in HTTP"),
        ((b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 101), "more than 100 bytes"),
        ((b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 60_000] * 3), "more than 100 bytes"),
    ],
)
def test_answers_that_are_not_taken(pieces: tuple[bytes, ...], said: str) -> None:
    server = Server(*pieces)
    with pytest.raises(MediaError, match=said):
        server.read("http://example.com/")
    assert len(server.connected) == 1
    assert server.closed == 1


def test_a_server_that_drips_is_left() -> None:
    server = Server(OK, *[b"x"] * 4, each_s=3.0)
    with pytest.raises(MediaError, match="within 10 s"):
        server.read("http://example.com/")
    assert server.now_s == pytest.approx(10.0)


def test_what_went_wrong_inside_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(host: str, port: int) -> list[str]:
        raise OSError("no route to 10.0.0.7")

    with pytest.raises(MediaError) as caught:
        read_remote("http://example.com/", 10, resolver=unreachable)
    assert caught.value.message == "the URL was not answered"
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda *a, **k: [(0, 0, 0, "", ("::1", 80, 0, 0))] * 2
    )
    assert remote.resolve_host("example.com", 80) == ["::1"]
