"""Logging in by a reverse proxy's word: OpenID Connect and the like end there, and a header says who it is.

Off unless a header is named. Only what comes from the proxy's own address is believed; the proxy has to
remove these headers from what its clients send.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.core.errors import InputError
from atoll.core.roles import ROLES, Role
from atoll.runtime.http.http_server import Request

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_MAX_NAME = 120
"""Longer owners no gateway knows."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who somebody is by the proxy's word."""

    owner: str
    role: Role


@dataclass(frozen=True, slots=True)
class ProxyTrust:
    """Which proxies are believed, and which of their headers.

    `roles` are the roles of groups as `role_header` has them, with commas between; who is in several has the
    highest, who is in none has `default_role`.
    """

    proxies: tuple[_Network, ...] = ()
    header: str | None = None
    role_header: str | None = None
    roles: Mapping[str, Role] = field(default_factory=dict)
    default_role: Role = "viewer"

    @property
    def headers(self) -> frozenset[bytes]:
        """The headers that are believed: one that is there twice may not be the proxy's alone."""
        named = filter(None, (self.header, self.role_header))
        return frozenset(name.lower().encode("latin-1") for name in named)

    def is_proxy(self, request: Request) -> bool:
        """Whether a request comes from a proxy that is believed."""
        try:
            address = ipaddress.ip_address(request.peer)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self.proxies)

    def came_by_https(self, request: Request) -> bool:
        """Whether a browser spoke TLS to the proxy."""
        said = request.headers.get(b"x-forwarded-proto", b"").strip().lower()
        return said == b"https" and self.is_proxy(request)

    def client(self, request: Request) -> str:
        """Return the address of whoever asks: the last one that a proxy names, else the one connected."""
        if self.is_proxy(request):
            named = request.headers.get(b"x-forwarded-for", b"").decode("latin-1")
            if last := named.rpartition(",")[2].strip():
                return last[:64]
        return request.peer

    def identify(self, request: Request) -> Visitor | None:
        """Return who asks, or None where nobody says so who is believed."""
        if self.header is None or not self.is_proxy(request):
            return None
        raw = request.headers.get(self.header.lower().encode("latin-1"), b"")
        try:
            owner = raw.decode("utf-8").strip()
        except UnicodeDecodeError:
            return None
        if not owner or len(owner) > _MAX_NAME or not (owner.isascii() and owner.isprintable()):
            return None
        return Visitor(owner, self._role(request))

    def _role(self, request: Request) -> Role:
        if self.role_header is None:
            return self.default_role
        said = request.headers.get(self.role_header.lower().encode("latin-1"), b"").decode(
            "latin-1"
        )
        groups = {group.strip() for group in said.split(",")}
        found = [role for group, role in self.roles.items() if group in groups]
        return max(found, key=ROLES.index, default=self.default_role)


def read_network(text: str) -> _Network:
    """Read an address, or several as in 10.0.0.0/8."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise InputError(
            f"{text!r} is no address", field="--trust-proxy", hint="127.0.0.1, or 10.0.0.0/8"
        ) from None
