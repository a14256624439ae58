"""The authority of a fabric: a folder with a CA, the list of members, and the tokens of its hubs.

    ca.pem, ca.key      the authority (the key never leaves this folder)
    fabric.json         name, hubs, members, what is revoked
    revoked.json        serials of revoked certificates; hubs watch a copy of it
    hub-h0.token, ...   what each hub starts with
    fabric.token        the first member, an operator

Hubs allow every slot its own keys from the start, so issuing a certificate touches no hub. What a hub allows
costs it memory and time at its start (some 30 KB and 0.4 ms a slot), so a fabric starts with few slots and
grows: `grow` writes the tokens of the hubs anew, which they read when they are started again.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from atoll.core.errors import InputError, UnknownNameError, UsageError
from atoll.core.files import atomic_write, read_text_limited
from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.access import TOKEN_FILE, Access, parse_address
from atoll.fabric.identity.identity import ROLES, build_certificate, fingerprint, subject_of

DEFAULT_SLOTS = 256
DEFAULT_DAYS = 365
_CA_DAYS = 3650
_DER = serialization.Encoding.DER
_MAX_NAME = 64


class IssuedMember(msgspec.Struct, frozen=True):
    """One issued certificate."""

    slot: str
    name: str
    provider: str
    role: str
    serial: str
    """Hexadecimal."""
    issued_s: float
    expires_s: float
    revoked_s: float | None = None
    earlier: tuple[str, ...] = ()
    """Serials of certificates that this one renewed; each is valid until it expires."""

    @property
    def serials(self) -> tuple[str, ...]:
        """Every certificate the member was ever given."""
        return (*self.earlier, self.serial)


class _Book(msgspec.Struct, frozen=True):
    name: str
    fabric: str
    slots: int
    hubs: tuple[str, ...]
    members: tuple[IssuedMember, ...] = ()
    version: int = 1
    by_site: bool = False


class Authority:
    """Issues and revokes certificates of one fabric."""

    def __init__(self, folder: Path) -> None:
        """Open an existing folder."""
        self.folder = folder
        self._book = self._load()

    @classmethod
    def create(
        cls,
        folder: Path,
        name: str,
        hubs: Sequence[str],
        *,
        slots: int = DEFAULT_SLOTS,
        days: int = DEFAULT_DAYS,
        by_site: bool = False,
    ) -> Authority:
        """Make a CA, tokens of the hubs and of a first operator; never touches an existing CA."""
        _check_name("name", name)
        addresses = tuple(parse_address(hub) for hub in hubs)
        if not 1 <= len(addresses) <= keys.MAX_HUBS:
            raise UsageError(f"a fabric has 1 to {keys.MAX_HUBS} hubs", field="--hub")
        if len(set(addresses)) != len(addresses):
            raise UsageError("the same hub is given twice", field="--hub")
        if not 1 <= slots <= keys.MAX_SLOTS:
            raise UsageError(f"slots must be 1 to {keys.MAX_SLOTS}", field="--slots")
        if any((folder / file).exists() for file in ("ca.key", "ca.pem", "fabric.json")):
            raise UsageError(
                f"{folder} holds a fabric already",
                hint="name another folder; 'atoll fabric issue' adds members to this one",
            )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _authority_certificate(name, key)
        der = certificate.public_bytes(_DER)
        write_secret(
            folder / "ca.key",
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        atomic_write(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))
        book = _Book(name, fingerprint(der), slots, addresses, by_site=by_site)
        atomic_write(folder / "fabric.json", _pretty(book))
        authority = cls(folder)
        authority._write_revoked()
        for number in range(len(addresses)):
            access = authority._issue(
                keys.hub_slot(number), f"hub-{number}", name, "hub", days=_CA_DAYS
            )
            write_secret(folder / f"hub-{keys.hub_slot(number)}.token", access.pack() + "\n")
        first = authority.issue("operator", name, "operator", days=days)
        write_secret(folder / TOKEN_FILE, first.pack() + "\n")
        return authority

    @property
    def name(self) -> str:
        """The fabric's name."""
        return self._book.name

    @property
    def fabric_id(self) -> str:
        """The fabric's id."""
        return self._book.fabric

    @property
    def hubs(self) -> tuple[str, ...]:
        """Addresses of the hubs."""
        return self._book.hubs

    @property
    def slots(self) -> int:
        """How many members there may be."""
        return self._book.slots

    @property
    def members(self) -> tuple[IssuedMember, ...]:
        """Everybody who was let in, in that order."""
        return self._book.members

    def issue(self, name: str, provider: str, role: str, *, days: int = DEFAULT_DAYS) -> Access:
        """Give the next free slot to a new member and return its access, key included.

        The key is kept nowhere: lose the token and issue another.
        """
        if role not in ROLES or role == "hub":
            raise UnknownNameError("role", role, [r for r in ROLES if r != "hub"], field="--role")
        with self._lock():
            # Read again under the lock: another process may have issued something meanwhile.
            self._book = self._load()
            if any(m.name == name and m.revoked_s is None for m in self.members):
                raise UsageError(
                    f"there is a member called {name!r} already",
                    hint="choose another name, or revoke that one first",
                    field="NAME",
                )
            # Slots of revoked members stay taken for ever.
            taken = {member.slot for member in self.members}
            free = (keys.member_slot(n) for n in range(self.slots))
            slot = next((slot for slot in free if slot not in taken), None)
            if slot is None:
                raise UsageError(
                    f"all {self.slots} slots are taken",
                    hint="make more with 'atoll fabric grow --slots', then restart the hubs"
                    if self.slots < keys.MAX_SLOTS
                    else "let several nodes share a token, or make a second fabric",
                )
            return self._issue(slot, name, provider, role, days=days)

    def renew(self, name: str, *, days: int = DEFAULT_DAYS) -> Access:
        """Give a member another certificate for the slot it has, and return its access.

        The one it had goes on until it expires, so that nodes can change over one after the other.
        """
        with self._lock():
            self._book = self._load()
            member = self._alive(name)
            return self._issue(
                member.slot,
                member.name,
                member.provider,
                member.role,
                days=_CA_DAYS if member.role == "hub" else days,
                earlier=member.serials,
            )

    def add_hub(self, address: str) -> Path:
        """Have one more hub and return the file with its token.

        Hubs that run let it in at once; members know of it once their token is renewed.
        """
        new = parse_address(address)
        with self._lock():
            self._book = self._load()
            if new in self.hubs:
                raise UsageError(f"{new} is a hub already", field="ADDRESS")
            if len(self.hubs) >= keys.MAX_HUBS:
                raise UsageError(f"a fabric has 1 to {keys.MAX_HUBS} hubs", field="ADDRESS")
            number = len(self.hubs)
            slot = keys.hub_slot(number)
            # Saved first: the new hub's own token lists all hubs, itself included.
            self._save(msgspec.structs.replace(self._book, hubs=(*self.hubs, new)))
            access = self._issue(slot, f"hub-{number}", self.name, "hub", days=_CA_DAYS)
            path = self.folder / f"hub-{slot}.token"
            write_secret(path, access.pack() + "\n")
            return path

    def grow(self, slots: int, *, by_site: bool = False) -> tuple[Path, ...]:
        """Have more slots and return the tokens of the hubs, which say so from now on.

        Certificates and keys stay; tokens of members too. Hubs allow the new slots once they are started
        again with these files, one after the other. A hub whose token is not in the folder must be renewed.
        With `by_site` members whose tokens are issued or renewed from now on keep to their sites.
        """
        with self._lock():
            self._book = self._load()
            by_site = by_site or self._book.by_site
            turned = by_site != self._book.by_site
            if not self.slots - turned < slots <= keys.MAX_SLOTS:
                raise UsageError(
                    f"there are {self.slots} slots, and may be {keys.MAX_SLOTS}",
                    field="--slots",
                    hint="name a number between them; slots are never taken away",
                )
            self._save(msgspec.structs.replace(self._book, slots=slots, by_site=by_site))
            paths = [self.folder / f"hub-{keys.hub_slot(n)}.token" for n in range(len(self.hubs))]
            for path in filter(Path.exists, paths):
                access = replace(Access.open(f"@{path}"), slots=slots, by_site=by_site)
                write_secret(path, access.pack() + "\n")
            return tuple(paths)

    def _alive(self, name: str) -> IssuedMember:
        alive = {m.name: m for m in self.members if m.revoked_s is None}
        if name not in alive:
            raise UnknownNameError("member", name, alive, field="NAME")
        return alive[name]

    def revoke(self, name: str) -> IssuedMember:
        """Take all of a member's certificates back; its slot is never used again."""
        with self._lock():
            self._book = self._load()
            gone = msgspec.structs.replace(self._alive(name), revoked_s=round(time.time(), 3))
            members = tuple(gone if m.slot == gone.slot else m for m in self.members)
            # The book first: the list of revoked serials is made from it.
            self._save(msgspec.structs.replace(self._book, members=members))
            self._write_revoked()
            return gone

    def _issue(
        self,
        slot: str,
        name: str,
        provider: str,
        role: str,
        *,
        days: int,
        earlier: tuple[str, ...] = (),
    ) -> Access:
        _check_name("NAME", name)
        if "/" in name:  # what is before it would be another member's name
            raise UsageError(f"{name!r} is no name", field="NAME", hint="leave out the slash")
        _check_name("--provider", provider)
        ca_key, ca = self._ca()
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = build_certificate(
            subject_of(slot, provider, role),
            ca.subject,
            key.public_key(),
            ca_key,
            name=name,
            role=role,
            days=days,
        )
        member = IssuedMember(
            slot,
            name,
            provider,
            role,
            f"{certificate.serial_number:x}",
            round(time.time(), 3),
            certificate.not_valid_after_utc.timestamp(),
            earlier=earlier,
        )
        members = tuple(member if m.slot == slot else m for m in self.members)
        if member not in members:
            members = (*members, member)
        self._save(msgspec.structs.replace(self._book, members=members))
        return Access(
            self.fabric_id,
            self.hubs,
            ca.public_bytes(_DER),
            certificate.public_bytes(_DER),
            key.private_bytes(
                _DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            self.slots,
            self._book.by_site,
        )

    def _ca(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        try:
            key = serialization.load_pem_private_key((self.folder / "ca.key").read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((self.folder / "ca.pem").read_bytes())
        except OSError as error:
            raise InputError(
                "cannot read the authority's key",
                path=error.filename,
                hint="issue where 'atoll fabric init' ran",
            ) from error
        except ValueError as error:
            raise InputError("the authority's key is damaged", path=self.folder) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InputError("the authority's key is of another kind", path=self.folder)
        return key, certificate

    def _load(self) -> _Book:
        path = self.folder / "fabric.json"
        if not path.exists():
            raise InputError(
                "no fabric is here", path=self.folder, hint="run 'atoll fabric init' first"
            )
        try:
            return msgspec.json.decode(read_text_limited(path), type=_Book)
        except msgspec.MsgspecError as error:
            raise InputError(f"not a fabric's list of members: {error}", path=path) from error

    def _save(self, book: _Book) -> None:
        atomic_write(self.folder / "fabric.json", _pretty(book))
        self._book = book

    def _write_revoked(self) -> None:
        # What has expired needs no revoking.
        now_s = time.time()
        gone = (m for m in self.members if m.revoked_s is not None and m.expires_s > now_s)
        serials = sorted(serial for m in gone for serial in m.serials)
        atomic_write(self.folder / "revoked.json", msgspec.json.encode(serials) + b"\n")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def read_revoked(path: Path) -> tuple[int, ...]:
    """Return the serials in a `revoked.json`; a file that is not there revokes nothing."""
    if not path.exists():
        return ()
    try:
        serials = msgspec.json.decode(read_text_limited(path), type=list[str])
        return tuple(int(serial, 16) for serial in serials)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InputError("not a list of revoked serials", path=path) from error


def write_secret(path: Path, data: str | bytes) -> None:
    """Write a file only its owner can read, whole or not at all."""
    # Made first, so that what replaces it keeps its permissions.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    path.chmod(0o600)
    atomic_write(path, data)


def _authority_certificate(name: str, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, "atoll authority"),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, name),
        ]
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # For clocks that are behind.
        .not_valid_before(now - dt.timedelta(minutes=5))
        .not_valid_after(now + dt.timedelta(days=_CA_DAYS))
        # It signs members, and no further authorities.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )


def _check_name(field: str, text: str) -> None:
    if not text.strip() or len(text) > _MAX_NAME or not text.isprintable():
        raise UsageError(
            f"{text!r} is no name", field=field, hint=f"1 to {_MAX_NAME} printable characters"
        )


def _pretty(book: _Book) -> bytes:
    return msgspec.json.format(msgspec.json.encode(book), indent=2) + b"\n"
