"""Eviction of revoked members from a hub: their links are cut, and cut again when they come back.

The transport lets in whoever has a certificate of the authority, and its rules are read once, at the start.
So a hub looks at the name that TLS has verified on every link, and closes the socket of one it must not have,
until it has read its rules again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import zenoh

from atoll.fabric.identity.access import split_address
from atoll.fabric.transport.panics import CONTAINED

_DESCRIPTORS = Path("/dev/fd")


class LinkEvictor:
    """Cuts links of denied slots of a hub's session; `noticed` is told of other slots, from any thread."""

    def __init__(self, session: zenoh.Session, noticed: Callable[[str], None]) -> None:
        self._session = session
        self._noticed = noticed
        self._denied: frozenset[str] = frozenset()
        self.cut = 0
        """Links that were closed."""
        self._listener: Any = session.info.declare_link_events_listener(
            zenoh.handlers.Callback(self._changed, indirect=False), history=False
        )

    def deny(self, slots: Iterable[str]) -> None:
        """Cut the links of these slots, now and from now on."""
        self._denied = self._denied.union(slots)
        with CONTAINED:
            for link in self._session.info.links():
                self._judge(link)

    def close(self) -> None:
        """Watch no more."""
        with CONTAINED:
            self._listener.undeclare()

    def _changed(self, event: zenoh.LinkEvent) -> None:
        if event.kind == zenoh.SampleKind.PUT:
            self._judge(event.link)

    def _judge(self, link: zenoh.Link) -> None:
        slot = link.auth_identifier or ""
        if slot in self._denied:
            self.cut += cut_link(link.src, link.dst)
        elif slot:
            self._noticed(slot)


def cut_link(here: str, there: str) -> int:
    """Close the connection between two addresses, `tls/host:port`, and return how many there were."""
    found = open_connections([(here, there)])
    for descriptor in found.values():
        connection = socket.socket(fileno=descriptor)
        # It may have ended by itself.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.detach()  # the descriptor stays the transport's own
    return len(found)


def open_connections(links: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Return the descriptors of connections of this process, by the addresses of both ends."""
    wanted = {(_end(here), _end(there)): (here, there) for here, there in links}
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError, ValueError):
            ends = _ends(int(name))
            if ends in wanted:
                found[wanted[ends]] = int(name)
    return found


def _ends(descriptor: int) -> tuple[tuple[str, int], tuple[str, int]] | None:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return None
    connection = socket.socket(fileno=descriptor)
    try:
        return _end(connection.getsockname()), _end(connection.getpeername())
    finally:
        connection.detach()


def _end(address: str | tuple[Any, ...]) -> tuple[str, int]:
    """Return host and port of one end, an IPv4 host the same however it is written."""
    if isinstance(address, str):
        host, port = split_address(address.partition("/")[2] or address)
    else:
        host, port = str(address[0]), int(address[1])
    parsed = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed), port
