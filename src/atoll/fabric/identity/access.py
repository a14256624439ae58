"""The way into a fabric: one text that holds hubs, authority, certificate and key.

atoll-join-v1.<base64url>     the text itself, as `atoll fabric issue` prints it
@path                         a file with the text
a folder                      its file fabric.token
open://host:port[,host:port]  an open fabric, without certificates
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import os
import secrets
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from atoll.core.errors import InputError, UsageError
from atoll.core.files import read_text_limited
from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.identity import OPEN_FABRIC, Identity, Verifier, fingerprint

PREFIX = "atoll-join-v1."
ENVIRONMENT = "ATOLL_FABRIC"
TOKEN_FILE = "fabric.token"  # noqa: S105  a file's name
DEFAULT_PORT = 7447

_OPEN_SCHEME = "open://"
_MAX_TOKEN_BYTES = 64 * 1024
_MAX_FILE_NAME = 255
_HINT = "paste it whole, as 'atoll fabric issue' printed it"


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    fabric: str
    hubs: tuple[str, ...]
    authority: bytes
    certificate: bytes
    key: bytes
    slots: int
    by_site: bool = False
    """Written where it is true only: versions before it read all other tokens as they did."""


@dataclass(frozen=True)
class Access:
    """Everything a member needs to join one fabric."""

    fabric_id: str
    hubs: tuple[str, ...]
    """Addresses host:port."""
    authority: bytes | None = field(default=None, repr=False)
    """Certificate of the authority, DER; None: an open fabric."""
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    """Private key, PKCS #8 DER."""
    slots: int = 256
    by_site: bool = False
    """Whether workers keep the records of their own site, and of others what speakers say."""
    open_name: str = ""
    open_provider: str = ""
    open_role: str = "worker"

    @classmethod
    def open(cls, text: str | None = None) -> Access:
        """Read a token, `@file`, a folder or an `open://` address; None: what $ATOLL_FABRIC says."""
        source = text if text is not None else os.environ.get(ENVIRONMENT, "")
        source = source.strip()
        if not source:
            raise UsageError("no fabric is named", hint=f"give a token, or set {ENVIRONMENT}")
        if source.startswith(_OPEN_SCHEME):
            return cls.open_at(source.removeprefix(_OPEN_SCHEME).split(","))
        if source.startswith(PREFIX):
            return cls.unpack(source)
        path = Path(source.removeprefix("@"))
        if any(
            len(part) > _MAX_FILE_NAME for part in path.parts
        ):  # a damaged token, not to be shown
            raise InputError("this is no fabric token, file or folder", field="fabric", hint=_HINT)
        if path.is_dir():
            path = path / TOKEN_FILE
        if not source.startswith("@") and not path.exists():
            raise InputError("this is no fabric token, file or folder", field="fabric", hint=_HINT)
        try:
            return cls.open_text(read_text_limited(path, _MAX_TOKEN_BYTES))
        except InputError as error:
            raise error.locate(path=path) from error

    @classmethod
    def open_text(cls, text: str) -> Access:
        """Read the content of a token file; lines that start with # are ignored."""
        lines = [line.strip() for line in text.splitlines()]
        joined = "".join(line for line in lines if line and not line.startswith("#"))
        if joined.startswith(_OPEN_SCHEME):
            return cls.open(joined)
        return cls.unpack(joined)

    @classmethod
    def unpack(cls, token: str) -> Access:
        """Read a token as `pack` made it; InputError if it is none or damaged."""
        if not token.startswith(PREFIX):
            raise InputError("this is no fabric token", field="fabric", hint=_HINT)
        text = token.removeprefix(PREFIX)
        try:
            data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            body, check = data[:-4], int.from_bytes(data[-4:], "big")
            # The decoder also takes "+" and "/", and ignores the last bits: only one spelling is a token.
            if zlib.crc32(body) != check or _encode_base64(data) != text:
                raise InputError("the fabric token is damaged", field="fabric", hint=_HINT)
            packed = msgspec.msgpack.decode(body, type=_Packed)
        except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
            raise InputError("the fabric token is damaged", field="fabric", hint=_HINT) from error
        if packed.fabric != fingerprint(packed.authority):
            raise InputError("the fabric token contradicts itself", field="fabric", hint=_HINT)
        access = cls(
            packed.fabric,
            tuple(parse_address(hub) for hub in packed.hubs),
            packed.authority,
            packed.certificate,
            packed.key,
            packed.slots,
            packed.by_site,
        )
        _ = access.identity
        return access

    @classmethod
    def open_at(
        cls,
        hubs: list[str],
        *,
        name: str = "",
        provider: str = "",
        role: str = "worker",
        insecure: bool = False,
    ) -> Access:
        """Return the way into an open fabric; beyond loopback only if `insecure`."""
        addresses = tuple(parse_address(hub) for hub in hubs if hub.strip())
        if not addresses:
            raise InputError("no hub is named", field="fabric", hint="open://127.0.0.1:7447")
        far = [hub for hub in addresses if not is_loopback(hub)]
        if far and not (insecure or os.environ.get("ATOLL_INSECURE") == "1"):
            raise UsageError(
                f"an open fabric at {far[0]} would be readable and writable by anybody",
                hint="make certificates with 'atoll fabric init', or insist: ATOLL_INSECURE=1",
            )
        return cls(OPEN_FABRIC, addresses, open_name=name, open_provider=provider, open_role=role)

    @property
    def is_open(self) -> bool:
        """Whether there are no certificates."""
        return self.authority is None

    @cached_property
    def identity(self) -> Identity:
        """Who this is; made up once in an open fabric."""
        if self.certificate is not None and self.key is not None:
            return Identity.of(self.certificate, self.key)
        slot = keys.member_slot(secrets.randbelow(self.slots))
        if self.open_role == "hub":
            slot = keys.hub_slot(secrets.randbelow(keys.MAX_HUBS))
        return Identity.self_made(
            slot, self.open_name or slot, self.open_provider or "nobody", self.open_role
        )

    def verifier(self) -> Verifier:
        """Return what checks the certificates of others."""
        return Verifier(self.fabric_id, self.authority)

    def pack(self) -> str:
        """Return the token: hubs, authority, certificate and key in one text, to be kept secret."""
        if self.authority is None or self.certificate is None or self.key is None:
            return _OPEN_SCHEME + ",".join(self.hubs)
        fields: tuple[object, ...] = (
            *(self.fabric_id, self.hubs, self.authority, self.certificate, self.key, self.slots),
            *((True,) if self.by_site else ()),
        )
        body = msgspec.msgpack.encode(fields)
        data = body + zlib.crc32(body).to_bytes(4, "big")
        return PREFIX + _encode_base64(data)


def _encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def parse_address(text: str) -> str:
    """Return `host:port` with the port filled in; anything else is an InputError."""
    text = text.strip()
    if text.startswith("["):
        host, _, port = text.partition("]")
        host, port = host + "]", port.removeprefix(":")
    elif text.count(":") > 1:
        host, port = f"[{text}]", ""
    else:
        host, _, port = text.partition(":")
    port = port or str(DEFAULT_PORT)
    bad = not host.strip("[]") or any(c.isspace() or c in "/,#?@" for c in host)
    if bad or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(
            f"{text!r} is no address", field="hub", hint="write host:port, such as hub.example:7447"
        )
    return f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host (without brackets) and port of an address from `parse_address`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether an address (host, or host:port) is reached from this machine only."""
    host = address
    if address.startswith("["):
        host = address[1:].partition("]")[0]
    elif address.count(":") < 2:
        host = address.partition(":")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may mean anything
        return False
