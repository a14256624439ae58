"""How two members agree on the keys of a channel: one question, one answer.

    caller   HELLO    who I am, whom I want, a fresh X25519 key; signed by my certificate
    worker   WELCOME  who I am, a fresh X25519 key, the channel's number; signed over both messages

Keys are drawn from the shared secret and the hash of both messages, so both sides have seen the same
ones. A HELLO that somebody repeats opens a channel that nobody has the keys of, and is forgotten soon.
In an open fabric certificates are self-made: traffic is sealed all the same, but names are only claims.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.identity import Identity, Person, RefusedError, Verifier
from atoll.fabric.tunnel.channel import PacketCipher
from atoll.fabric.tunnel.tunnel_frames import TunnelError

HANDSHAKE_BYTES = 16 * 2**10
_VERSION = 1
_HELLO = b"atoll tunnel 1 hello "
_WELCOME = b"atoll tunnel 1 welcome "
"""Signed before what each side says, so that a signature holds for nothing else."""
_SERVING = ("worker", "gateway")
CALLING = ("gateway", "operator")
"""Roles that may serve at the end of a tunnel, and those that may call unless it says otherwise."""

T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First message of a caller."""

    version: int
    fabric: str
    caller: str
    """Its session."""
    worker: str
    """The session it wants."""
    endpoint: str
    """Where it listens: looks like a session id of its slot, and stays when the session is renewed."""
    ephemeral: bytes
    certificate: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """Answer of a worker to it; `refusal` if it will not."""

    refusal: str
    endpoint: str = ""
    channel: int = 0
    ephemeral: bytes = b""
    certificate: bytes = b""


class _Signed(msgspec.Struct, frozen=True, array_like=True):
    body: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """Shared state of both sides after the handshake."""

    person: Person
    """The other side, as its certificate has it."""
    session: str
    """The other side's session at the time."""
    endpoint: str
    """Where the other side listens."""
    channel: int
    box: PacketCipher


class ClientHandshake:
    """The caller's half: `hello` goes out, `finish` takes the answer."""

    def __init__(
        self, identity: Identity, fabric: str, caller: str, worker: str, endpoint: str
    ) -> None:
        self._secret = X25519PrivateKey.generate()
        self._worker = worker
        public = self._secret.public_key().public_bytes_raw()
        self._body = msgspec.msgpack.encode(
            Hello(_VERSION, fabric, caller, worker, endpoint, public, identity.certificate)
        )
        self.hello = msgspec.msgpack.encode(_Signed(self._body, identity.sign(_HELLO + self._body)))

    def finish(self, answer: bytes, verifier: Verifier) -> HandshakeResult:
        """Return what was agreed on; raises TunnelError if refused or not the worker that was asked."""
        signed = _decode(answer, _Signed)
        welcome = _decode(signed.body, Welcome)
        # Refusals are not signed: a false one costs the caller a try, no more.
        if welcome.refusal:
            raise TunnelError(f"refused: {welcome.refusal[:200]}")
        person = _person(welcome.certificate, verifier)
        if not person.check(_WELCOME + _frame(self._body, signed.body), signed.signature):
            raise TunnelError("the worker's signature is wrong")
        if person.slot != keys.slot_of(self._worker):
            raise TunnelError("the answer is not of the worker that was asked")
        _check_role(person, _SERVING, "serve")
        _check_endpoint(welcome.endpoint, person)
        if not 0 <= welcome.channel < 2**64:
            raise TunnelError("not a channel")
        out_key, in_key = _keys(self._secret, welcome.ephemeral, self._body, signed.body)
        box = PacketCipher(out_key, in_key)
        return HandshakeResult(person, self._worker, welcome.endpoint, welcome.channel, box)


def read_hello(
    question: bytes, verifier: Verifier, worker: str, callers: tuple[str, ...] = CALLING
) -> tuple[Hello, Person, bytes]:
    """Return a HELLO, who says it and its bytes; raises TunnelError unless all is as it should be."""
    signed = _decode(question, _Signed)
    hello = _decode(signed.body, Hello)
    # What needs no signature is checked first.
    if hello.version != _VERSION:
        raise TunnelError(f"tunnel version {hello.version}, not {_VERSION}")
    if hello.fabric != verifier.fabric_id or hello.worker != worker:
        raise TunnelError("meant for somebody else")
    person = _person(hello.certificate, verifier)
    if not person.check(_HELLO + signed.body, signed.signature):
        raise TunnelError("the caller's signature is wrong")
    if not keys.is_sid(hello.caller) or keys.slot_of(hello.caller) != person.slot:
        raise TunnelError("the caller's session is not its own")
    _check_role(person, callers, "call")
    _check_endpoint(hello.endpoint, person)
    return hello, person, signed.body


def welcome(
    identity: Identity, hello: Hello, person: Person, hello_body: bytes, endpoint: str, channel: int
) -> tuple[bytes, HandshakeResult]:
    """Return the answer to a HELLO that was read, and what is agreed on by it."""
    secret = X25519PrivateKey.generate()
    public = secret.public_key().public_bytes_raw()
    body = msgspec.msgpack.encode(Welcome("", endpoint, channel, public, identity.certificate))
    # The other way round than at the caller: what it sends comes in here.
    in_key, out_key = _keys(secret, hello.ephemeral, hello_body, body)
    signature = identity.sign(_WELCOME + _frame(hello_body, body))
    answer = msgspec.msgpack.encode(_Signed(body, signature))
    return answer, HandshakeResult(
        person, hello.caller, hello.endpoint, channel, PacketCipher(out_key, in_key)
    )


def refusal(reason: str) -> bytes:
    """Return the answer to a HELLO that leads nowhere."""
    return msgspec.msgpack.encode(_Signed(msgspec.msgpack.encode(Welcome(reason)), b""))


def _decode(data: bytes, kind: type[T]) -> T:
    if len(data) > HANDSHAKE_BYTES:
        raise TunnelError("the handshake is too large")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise TunnelError(f"not a handshake: {error}") from None


def _person(certificate: bytes, verifier: Verifier) -> Person:
    try:
        return verifier.person(certificate)
    except RefusedError as error:
        raise TunnelError(error.message) from None


def _check_role(person: Person, roles: tuple[str, ...], what: str) -> None:
    # A role that nobody vouches for says nothing.
    if person.verified and person.role not in roles:
        raise TunnelError(f"a certificate for a {person.role} may not {what}")


def _check_endpoint(endpoint: str, person: Person) -> None:
    if not keys.is_sid(endpoint) or keys.slot_of(endpoint) != person.slot:
        raise TunnelError("the address is not the sender's own")


def _frame(first: bytes, second: bytes) -> bytes:
    # With the length first, so that no other two messages make the same bytes.
    return len(first).to_bytes(8, "little") + first + second


def _keys(
    secret: X25519PrivateKey, public: bytes, hello: bytes, answer: bytes
) -> tuple[bytes, bytes]:
    """Return the keys from caller to worker and back."""
    try:
        shared = secret.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise TunnelError("not a key") from None
    salt = hashlib.sha256(_frame(hello, answer)).digest()
    drawn = HKDF(hashes.SHA256(), 64, salt, b"atoll tunnel 1 keys").derive(shared)
    return drawn[:32], drawn[32:]
