"""Links whose other side has fallen silent: cut, once that lasts longer than it ever did lately.

A process that is killed takes its connections with it. One that is frozen, or cannot be reached, keeps them,
as does one that waits for a core. The transport would give up either after a lease that is set when a link
opens; how late a process is shows only later. So its lease is long (`transport_lease_s`), and every member
looks itself: the kernel knows when data came last, however long this process waited for a core meanwhile.
A link is cut after `lease_s` without any, and by three times what its other side was late lately, or this
process was, after that (`Patience`).
"""

from __future__ import annotations

import socket
import struct
import sys

import zenoh

from atoll.core.patience import MAX_EXTRA_S, Patience
from atoll.fabric.transport.eviction import cut_link, open_connections
from atoll.fabric.transport.fabric_settings import FabricSettings
from atoll.fabric.transport.panics import CONTAINED

KEEP_ALIVES = 4
"""So many a lease."""
_IS_KNOWN = sys.platform == "linux"
"""Whether the system says when a connection has brought data last."""
_TCP_INFO_BYTES = 64
_LAST_DATA_RECEIVED = struct.Struct("@52xI")
"""In the kernel's `struct tcp_info`, in milliseconds."""
_LINKS_A_LOOK = 500
"""With more links looks are rarer, so that they stay at about a hundredth of a core."""


def transport_lease_s(settings: FabricSettings) -> float:
    """Return after how long the transport gives a silent link up by itself, in seconds."""
    return settings.lease_s + (MAX_EXTRA_S if _IS_KNOWN else 0.0)


def data_age_s(descriptor: int) -> float | None:
    """Return how long ago a TCP connection brought data, in seconds; None: it is none, or closed."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    finally:
        connection.detach()  # the descriptor stays the transport's own
    return float(_LAST_DATA_RECEIVED.unpack_from(info)[0]) / 1000


class SilentLinks:
    """Looks at the links of a session; `look` is to be called a few times a lease."""

    def __init__(self, session: zenoh.Session, settings: FabricSettings) -> None:
        self._session = session
        self._lease_s = settings.lease_s
        self._descriptors: dict[tuple[str, str], int] = {}
        self._heard_s: dict[str, float] = {}
        """When data came last, by the session at the other end."""
        self._skipped = 0
        self.cut = 0
        """Links that were cut."""

    def look(self, patience: Patience, now_s: float) -> None:
        """Cut what is silent for too long, and note how late others are."""
        if not _IS_KNOWN or self._skipped * _LINKS_A_LOOK < len(self._heard_s) - _LINKS_A_LOOK:
            self._skipped += 1
            return
        self._skipped = 0
        with CONTAINED:
            self._look(patience, now_s)

    def _look(self, patience: Patience, now_s: float) -> None:
        links = {(link.src, link.dst): str(link.zid) for link in self._session.info.links()}
        if not links.keys() <= self._descriptors.keys():
            found = open_connections(links)
            self._descriptors = {ends: found.get(ends, -1) for ends in links}
        keep_alive_s = self._lease_s / KEEP_ALIVES
        heard_s = {}
        for ends, peer in links.items():
            age_s = data_age_s(self._descriptors[ends]) if self._descriptors[ends] >= 0 else None
            if age_s is None:
                continue
            heard_s[peer] = now_s - age_s
            pause_s = heard_s[peer] - self._heard_s.get(peer, heard_s[peer])
            if pause_s > 2 * keep_alive_s:
                patience.tell(peer, pause_s - keep_alive_s, now_s)
            if age_s > self._lease_s + patience.extra_s(peer, now_s):
                self.cut += cut_link(*ends)
        # Those without a link for a moment may be back, and say by their pause how late they were.
        self._heard_s = {
            peer: at_s
            for peer, at_s in {**self._heard_s, **heard_s}.items()
            if now_s - at_s < MAX_EXTRA_S
        }
