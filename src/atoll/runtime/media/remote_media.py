"""Fetching what a stranger names, without reaching what only this machine can reach.

The host is resolved once; every address it has must be public; the connection goes to the very address that
was looked at, so that a name cannot change its meaning in between. There are no redirects, two ports, and
limits on size and time.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

from atoll.runtime.http.http_client import ResponseReader, tls_context
from atoll.runtime.media.media_errors import MediaError, too_large, unsupported

_TIMEOUT_S = 10.0
_READ_BYTES = 2**16
_HEADER_BYTES = 2**16
_PORTS = {"http": 80, "https": 443}
# Prefixes under which version 6 carries addresses of version 4.
_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))


class RemoteSocket(Protocol):
    """Part of a socket that is needed."""

    def settimeout(self, value: float | None, /) -> None:
        """Let the next calls take so many seconds."""

    def sendall(self, data: bytes, /) -> None:
        """Send all of it."""

    def recv(self, bufsize: int, /) -> bytes:
        """Return what came, or nothing at the end."""

    def close(self) -> None:
        """End the connection."""


Resolver = Callable[[str, int], Iterable[str]]
"""The addresses of a host, for a port."""
Connector = Callable[[str, int, str | None, float], RemoteSocket]
"""A connection to an address and port, in TLS with the named host if there is one, within seconds."""


def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def connect(address: str, port: int, tls_host: str | None, timeout_s: float) -> RemoteSocket:
    """Connect to an address, in TLS with a host that has to prove its name if one is given."""
    opened = socket.create_connection((address, port), timeout_s)
    if tls_host is None:
        return opened
    try:
        return tls_context().wrap_socket(opened, server_hostname=tls_host)
    except BaseException:
        opened.close()
        raise


def is_public(address: str) -> bool:
    """Tell whether an address is one that anybody on the internet could reach, in all its disguises."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # with a zone ("fe80::1%eth0") it is local anyway
        return False
    return all(_is_plain_public(plain) for plain in _undisguised(parsed))


def read_remote(
    url: str,
    max_bytes: int,
    *,
    timeout_s: float = _TIMEOUT_S,
    resolver: Resolver = resolve_host,
    connector: Connector = connect,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """Return the body of a public http or https URL, at most `max_bytes`; MediaError for all else.

    Blocks for up to `timeout_s` seconds, and while names are resolved.
    """
    parts, host, port = _checked(url)
    deadline_s = clock() + timeout_s
    try:
        addresses = list(resolver(host, port))
        if not addresses:
            raise MediaError("the URL's host has no address")
        # All of them: a host with one inner address among public ones is not to be trusted.
        if not all(is_public(address) for address in addresses):
            raise unsupported("the URL's host is not on the public internet")
        tls_host = host if parts.scheme == "https" else None
        # To the address that was looked at: a second lookup of the name could give another.
        channel = connector(addresses[0], port, tls_host, deadline_s - clock())
        try:
            return _exchange(channel, parts, host, max_bytes, lambda: deadline_s - clock())
        finally:
            channel.close()
    except TimeoutError:
        raise MediaError(f"the URL was not answered within {timeout_s:g} s") from None
    except (OSError, UnicodeError):
        # What went wrong would tell a stranger about the network around this machine.
        raise MediaError("the URL was not answered") from None


def _checked(url: str) -> tuple[SplitResult, str, int]:
    try:
        parts = urlsplit(url)
        named = parts.port
    except ValueError:
        raise MediaError("this is no URL") from None
    if parts.scheme not in _PORTS:
        raise unsupported("only http and https URLs are fetched")
    if not parts.hostname or parts.username is not None or parts.password is not None:
        raise MediaError("the URL has to name a host, and no user")
    # No line break may get into the request that is sent.
    if not url.isascii() or any(character <= " " for character in url):
        raise MediaError("the URL has characters that have to be written with %")
    port = _PORTS[parts.scheme] if named is None else named
    if port not in _PORTS.values():
        raise unsupported("only the ports 80 and 443 are asked")
    return parts, parts.hostname, port


def _exchange(
    channel: RemoteSocket,
    parts: SplitResult,
    host: str,
    max_bytes: int,
    left_s: Callable[[], float],
) -> bytes:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    shown = f"[{host}]" if ":" in host else host
    port = "" if parts.port is None else f":{parts.port}"
    channel.settimeout(_positive(left_s()))
    channel.sendall(
        f"GET {target} HTTP/1.1\r\nhost: {shown}{port}\r\nconnection: close\r\n"
        "accept: image/*, audio/*, video/*\r\naccept-encoding: identity\r\n\r\n".encode("ascii")
    )
    # The reader counts headers, too.
    reader = ResponseReader(max_bytes + _HEADER_BYTES)
    try:
        while not reader.complete:
            # Anew before each read: who sends a byte at a time gets no more time for it.
            channel.settimeout(_positive(left_s()))
            if data := channel.recv(_READ_BYTES):
                reader.feed(data)
            else:
                reader.end()
    except ValueError as error:
        if "more than" in str(error):
            raise too_large(f"the URL holds more than {max_bytes} bytes") from None
        raise MediaError("the URL was not answered in HTTP") from None
    answer = reader.response()
    if answer.status != 200:
        raise MediaError(f"the URL was answered with status {answer.status}, not 200")
    if len(answer.body) > max_bytes:
        raise too_large(f"the URL holds more than {max_bytes} bytes")
    return answer.body


def _positive(left_s: float) -> float:
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _undisguised(address: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    """Return an address and those of version 4 that stand in it."""
    found: list[IPv4Address | IPv6Address] = [address]
    if isinstance(address, IPv6Address):
        inside = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        # The old form, where the upper 96 bits are zero, carries an address of version 4 as well.
        if any(address in network for network in _NAT64) or int(address) >> 32 == 0:
            inside.append(IPv4Address(int(address) & 0xFFFFFFFF))
        found += [plain for plain in inside if plain is not None]
    if len(found) > 1 and isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        found = found[1:]  # whether the wrapping counts as public differs between Pythons
    return found


def _is_plain_public(address: IPv4Address | IPv6Address) -> bool:
    return address.is_global and not (
        address.is_multicast
        or address.is_reserved
        or address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_unspecified
    )
