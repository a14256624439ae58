"""Certificates: who a member is, signing as it, and checking others.

A certificate names a slot (common name), a provider (organisation), a role (organisational unit) and a
person-readable name (URI `atoll:NAME`). In a fabric with an authority it is signed by that; in an open
fabric everybody signs their own, and nothing in it is believed except that one key wrote what it signed.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import time
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.core.errors import AtollError, InputError
from atoll.fabric.identity import fabric_keys as keys

ROLES = ("hub", "worker", "gateway", "operator")
OPEN_FABRIC = "open"

_SIGNING = ec.ECDSA(hashes.SHA256())
_CACHE = 16_384  # certificates of all members, and some that were renewed
_BACKDATED = dt.timedelta(minutes=5)
_MAX_CERTIFICATE_BYTES = 4096


class RefusedError(AtollError):
    """Something another member said is not to be believed; `reason` is one word for counters."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Person:
    """Content of a verified certificate."""

    slot: str
    name: str
    provider: str
    role: str
    serial: int
    expires_s: float
    public: ec.EllipticCurvePublicKey = field(repr=False)
    verified: bool = True
    """Whether an authority vouches for it."""

    def check(self, data: bytes, signature: bytes) -> bool:
        """Whether this person signed the data."""
        try:
            self.public.verify(signature, data, _SIGNING)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Identity:
    """A member's own certificate and key."""

    slot: str
    name: str
    provider: str
    role: str
    certificate: bytes
    """DER."""
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    verified: bool = True

    @classmethod
    def of(cls, certificate: bytes, key: bytes, *, verified: bool = True) -> Identity:
        """Read a certificate and its private key (both DER, the key PKCS #8)."""
        try:
            person = _read(certificate, verified)
            private = serialization.load_der_private_key(key, None)
        except (RefusedError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InputError("the certificate or its key cannot be read") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise InputError("the key is not an elliptic-curve key")
        if private.public_key() != person.public:
            raise InputError("the key does not belong to the certificate")
        return cls(
            person.slot, person.name, person.provider, person.role, certificate, private, verified
        )

    @classmethod
    def self_made(cls, slot: str, name: str, provider: str, role: str) -> Identity:
        """Make an identity for an open fabric."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = subject_of(slot, provider, role)
        certificate = build_certificate(
            subject, subject, key.public_key(), key, name=name, role=role, days=366
        )
        der = certificate.public_bytes(serialization.Encoding.DER)
        return cls(slot, name, provider, role, der, key, verified=False)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of the data (ECDSA, P-256, SHA-256)."""
        return self.key.sign(data, _SIGNING)


class Verifier:
    """Believes certificates of one authority, remembers those it has checked, knows the revoked ones."""

    def __init__(
        self,
        fabric_id: str,
        authority: bytes | None,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Take the authority's certificate (DER), or None in an open fabric."""
        self.fabric_id = fabric_id
        self.open = authority is None
        self._ca = x509.load_der_x509_certificate(authority) if authority is not None else None
        self._now = now
        self._known: dict[bytes, Person] = {}
        self.revoked: set[int] = set()

    def revoke(self, serials: Iterable[int]) -> None:
        """Believe these certificates no more."""
        self.revoked.update(serials)

    def person(self, certificate: bytes) -> Person:
        """Return whom a certificate (DER) names, or raise RefusedError."""
        person = self._known.get(certificate)
        if person is None:
            person = self._check(certificate)
            if len(self._known) >= _CACHE:
                self._known.pop(next(iter(self._known)))
            self._known[certificate] = person
        if self._now() > person.expires_s:
            raise RefusedError("expired", f"the certificate of {person.name} has expired")
        if person.serial in self.revoked:
            raise RefusedError("revoked", f"the certificate of {person.name} is revoked")
        return person

    def shunned(self) -> frozenset[str]:
        """Return the slots all of whose certificates that were seen here are revoked."""
        people = self._known.values()
        out = {person.slot for person in people if person.serial in self.revoked}
        return frozenset(out - {person.slot for person in people if self.believes(person)})

    def believes(self, person: Person) -> bool:
        """Whether the certificate of a person, once believed, still is."""
        return self._now() <= person.expires_s and person.serial not in self.revoked

    def _check(self, certificate: bytes) -> Person:
        person = _read(certificate, verified=not self.open)
        parsed = x509.load_der_x509_certificate(certificate)
        issuer = parsed if self._ca is None else self._ca
        try:
            parsed.verify_directly_issued_by(issuer)
        except (InvalidSignature, ValueError, TypeError) as error:
            raise RefusedError("foreign", "the certificate is not of this fabric") from error
        if self._ca is not None and parsed == self._ca:
            raise RefusedError("foreign", "the certificate is the authority's own")
        return person


def _read(certificate: bytes, verified: bool) -> Person:
    if len(certificate) > _MAX_CERTIFICATE_BYTES:
        raise RefusedError("certificate", "the certificate is too large")
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        public = parsed.public_key()
        slot, provider, role = (
            _only(parsed.subject, oid)
            for oid in (
                NameOID.COMMON_NAME,
                NameOID.ORGANIZATION_NAME,
                NameOID.ORGANIZATIONAL_UNIT_NAME,
            )
        )
        name = _name(parsed)
        expires = parsed.not_valid_after_utc.timestamp()
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound) as error:
        raise RefusedError("certificate", "the certificate cannot be read") from error
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise RefusedError("certificate", "the certificate has no elliptic-curve key")
    if not keys.is_slot(slot) or role not in ROLES or keys.is_hub(slot) != (role == "hub"):
        raise RefusedError("certificate", "the certificate names no slot or role")
    return Person(slot, name, provider, role, parsed.serial_number, expires, public, verified)


def _only(subject: x509.Name, oid: x509.ObjectIdentifier) -> str:
    values = subject.get_attributes_for_oid(oid)
    if len(values) != 1 or not isinstance(values[0].value, str):
        raise ValueError("a name appears not once")
    return values[0].value


def _name(parsed: x509.Certificate) -> str:
    names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    for uri in names.get_values_for_type(x509.UniformResourceIdentifier):
        if uri.startswith("atoll:"):
            return urllib.parse.unquote(uri.removeprefix("atoll:"))
    raise ValueError("the certificate has no name")


def subject_of(slot: str, provider: str, role: str) -> x509.Name:
    """Return the subject of a member's certificate."""
    return x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, slot),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, provider),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role),
        ]
    )


def build_certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    *,
    name: str,
    role: str,
    days: int,
) -> x509.Certificate:
    """Sign a certificate; only a hub's may stand for a server, so no member can pass as a hub."""
    now = dt.datetime.now(dt.UTC)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role == "hub":
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(
            x509.SubjectAlternativeName(
                [
                    x509.UniformResourceIdentifier(
                        "atoll:" + urllib.parse.quote(name, safe=""),
                    )
                ]
            ),
            critical=False,
        )
        .sign(signer, hashes.SHA256())
    )


def fingerprint(certificate: bytes) -> str:
    """Return the id of a fabric: the start of the hash of its authority's certificate (DER)."""
    return hashlib.sha256(certificate).hexdigest()[:16]
