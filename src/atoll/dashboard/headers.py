"""Headers: what every answer tells browsers, which hosts we are, cookies, and what is passed on."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from atoll.runtime.openai import ApiError

COOKIE = "atoll_session"
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; connect-src 'self'; font-src 'self'; frame-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
DATA_POLICY = "default-src 'none'; sandbox; frame-ancestors 'none'; base-uri 'none'"
"""Of what a service answered: never a page of ours."""
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'"
)
"""Of a report, which has scripts of its own: it runs in a frame without an origin."""
_COMMON = (
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    (
        "permissions-policy",
        "microphone=(self), camera=(), geolocation=(), payment=(), usb=(), display-capture=()",
    ),
)
_SENT_ON = frozenset(
    {
        "content-type",
        "accept",
        "x-atoll-events",
        "x-atoll-filename",
        "x-atoll-node",
        "x-atoll-providers",
        "x-atoll-regions",
        "x-atoll-min-precision",
        "x-atoll-min-context",
        "x-atoll-gpus",
        "x-atoll-stability",
        "x-atoll-fallback",
        "x-atoll-session",
    }
)
_SENT_BACK = frozenset({"content-disposition", "retry-after", "allow"})
_SAME_SITE = frozenset({b"same-origin", b"none"})


def safety_lines(policy: str) -> bytes:
    """Return the headers of an answer that tell a browser to be careful, with their line ends."""
    headers = (("content-security-policy", policy), *_COMMON)
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode()


def select_sent(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return what of a browser's headers goes to a service: a fixed list, never who it says it is."""
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers.items()
        if name.decode("latin-1") in _SENT_ON
    }


def select_answered(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return what of a service's headers goes to a browser, which keeps none of it."""
    passed = [
        (name, value)
        for name, value in headers.items()
        if name in _SENT_BACK or name.startswith("x-atoll-")
    ]
    return (*passed, ("cache-control", "no-store"))


def name_cookie(port: int, *, secure: bool) -> str:
    """Return what the cookie of a dashboard is called: browsers give cookies to all ports of a host.

    Where browsers come by https only, no other host of the domain can set it (`__Host-`).
    """
    return f"{'__Host-' if secure else ''}{COOKIE}_{port}"


def read_cookie(headers: Mapping[bytes, bytes], called: str) -> str | None:
    """Return the session's id as the browser has it, or None."""
    # By hand: others on this machine may have set cookies that a strict reader stops at.
    for part in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        name, _, value = part.strip().partition("=")
        if name == called and value:
            return value
    return None


def read_bearer(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the key that a program shows with a request, or None: browsers add none by themselves."""
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip().decode("latin-1") if kind.lower() == b"bearer" else None


def write_cookie(called: str, value: str, *, max_age_s: int, secure: bool) -> tuple[str, str]:
    """Return the header that has a browser keep the session's id; with an age of 0 it forgets it."""
    text = f"{called}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={max_age_s}"
    return "set-cookie", text + ("; Secure" if secure else "")


class KnownHosts:
    """The hosts that we are called by, with their ports: a page of any other name is not ours.

    A name that somebody else has made to point here (DNS rebinding) is none of them. Where all addresses of
    the machine are listened on, each of them is one.
    """

    def __init__(self, host: str, port: int, public_urls: Iterable[str] = ()) -> None:
        self._port = port
        shown = f"[{host}]" if ":" in host else host
        self._names = {f"{shown}:{port}"}
        self._any_address = host in ("", "0.0.0.0", "::")
        if self._any_address or is_loopback(host):
            self._names |= {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        for url in public_urls:
            parts = urlsplit(url)
            usual = 443 if parts.scheme == "https" else 80
            name = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else str(parts.hostname)
            self._names.add(f"{name}:{parts.port or usual}")
            if (parts.port or usual) == usual:
                self._names.add(name)
        if port == 80:
            self._names |= {name.removesuffix(":80") for name in tuple(self._names)}

    def includes(self, authority: str) -> bool:
        """Whether this is one of our hosts: a name or an address, with the port where it is not 80 or 443."""
        authority = authority.lower()
        if authority in self._names:
            return True
        name, _, port = authority.rpartition(":")
        return self._any_address and port == str(self._port) and _is_address(name.strip("[]"))

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise ApiError for a request to another host."""
        host = headers.get(b"host", b"").decode("latin-1")
        if not self.includes(host):
            raise ApiError(
                421,
                "the dashboard does not answer under this name; --public-url tells it one",
                code="unknown_host",
            )

    def check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise ApiError for a request that a page of another origin made, or that does not say."""
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        foreign = site is not None and site not in _SAME_SITE
        if origin is not None:
            netloc = urlsplit(origin.decode("latin-1")).netloc.lower()
            # Any address may be ours where all are listened on, but a page is at the one that it asks.
            asked = headers.get(b"host", b"").decode("latin-1").lower()
            foreign = foreign or not (netloc in self._names or (netloc and netloc == asked))
        if foreign or (origin is None and site is None):
            raise ApiError(
                403,
                "only pages of this dashboard may ask that",
                kind="permission_error",
                code="foreign_origin",
            )


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
