"""Signed orders of an operator to one session of a fabric, and where a node takes them.

An order is signed by the operator's certificate for one purpose and one session of one fabric, holds for a
short time, and is taken once. What is in it (`body`) is its purpose's affair: a model to serve
(`assignment`), or instances of a fleet (`atoll.deploy.joined`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec
from msgspec import Meta

from atoll.core.errors import AtollError
from atoll.fabric.identity.identity import Identity, Person, RefusedError, Verifier
from atoll.telemetry.logs import Log

if TYPE_CHECKING:
    from atoll.fabric.transport.fabric import Fabric

VALID_S = 300.0
"""How far an order's time may lie from the node's clock."""
MAX_ORDER_BYTES = 192 * 1024
"""The largest order: an instance of many nodes. Hubs pass on 256 KiB."""
_MAX_BODY_BYTES = 160 * 1024
_MAX_REMEMBERED = 4096


class Order(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A signed order."""

    sid: Annotated[str, Meta(max_length=64)]
    at_s: float
    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]
    body: Annotated[bytes, Meta(max_length=_MAX_BODY_BYTES)]
    certificate: Annotated[bytes, Meta(max_length=8192)]
    signature: Annotated[bytes, Meta(max_length=512)]


class OrderReply(msgspec.Struct, frozen=True, array_like=True):
    """Answer of a node to an order; `body` is its purpose's affair."""

    accepted: bool
    message: Annotated[str, Meta(max_length=1024)] = ""
    body: Annotated[bytes, Meta(max_length=_MAX_BODY_BYTES)] = b""


_order = msgspec.msgpack.Decoder(Order).decode
_reply = msgspec.msgpack.Decoder(OrderReply).decode
encode = msgspec.msgpack.Encoder().encode


def _sign(purpose: str, fabric: str, sid: str, at_s: float, nonce: bytes, body: bytes) -> bytes:
    return encode((purpose, fabric, sid, float(at_s), nonce, body))


def sign_order(
    purpose: str, body: bytes, identity: Identity, fabric: str, sid: str, now_s: float
) -> bytes:
    """Return an order to the session `sid`, signed."""
    nonce = secrets.token_bytes(16)
    signature = identity.sign(_sign(purpose, fabric, sid, now_s, nonce, body))
    return encode(Order(sid, now_s, nonce, body, identity.certificate, signature))


def read_reply(data: bytes) -> OrderReply:
    """Read what a node said; anything else is a refusal."""
    try:
        return _reply(data)
    except msgspec.MsgspecError:
        return OrderReply(False, "the node's answer cannot be read")


class OrderVerifier:
    """Decides which orders of a purpose are obeyed."""

    def __init__(self, verifier: Verifier, purpose: str) -> None:
        self._verifier, self._purpose = verifier, purpose
        self._taken: dict[bytes, float] = {}

    def read(self, data: bytes, sid: str, now_s: float) -> tuple[bytes, Person]:
        """Return what an operator ordered this session; RefusedError says why it is not obeyed."""
        if len(data) > MAX_ORDER_BYTES:
            raise RefusedError("oversized", "the order is too large")
        try:
            order = _order(data)
        except msgspec.MsgspecError as error:
            raise RefusedError("malformed", f"the order cannot be read: {error}") from error
        person = self._verifier.person(order.certificate)
        signed = _sign(
            self._purpose, self._verifier.fabric_id, order.sid, order.at_s, order.nonce, order.body
        )
        if not person.check(signed, order.signature):
            raise RefusedError("signature", "the order is not signed by its certificate")
        if person.role != "operator":
            raise RefusedError("role", f"{person.name} is no operator but a {person.role}")
        if order.sid != sid:
            raise RefusedError("session", "the order is for another session")
        if not abs(now_s - order.at_s) <= VALID_S:
            raise RefusedError("time", "the order is too old, or a clock is wrong")
        self._forget(now_s)
        if order.nonce in self._taken:
            raise RefusedError("replay", "the order was given before")
        if len(self._taken) >= _MAX_REMEMBERED:
            raise RefusedError("busy", "too many orders in a short time")
        self._taken[order.nonce] = now_s
        return order.body, person

    def _forget(self, now_s: float) -> None:
        # Past twice the time it holds, an order is too old whatever its clock said.
        for nonce in [n for n, at in self._taken.items() if now_s - at > 2 * VALID_S]:
            del self._taken[nonce]


class OrderQuery(Protocol):
    """A question that came in, which is answered once, now or later."""

    @property
    def payload(self) -> bytes:
        """Return what was asked."""
        ...

    def reply(self, payload: bytes) -> None:
        """Answer it."""
        ...


OnOrder = Callable[[bytes, Person, OrderQuery], None]
"""Called with an order that is to be obeyed, who gave it, and where to reply; AtollError if it cannot be."""


class OrderReceiver:
    """Takes orders of a purpose for as long as it is open, also when the session is renewed.

    `key` says for a session where its operators ask.
    """

    def __init__(
        self,
        fabric: Fabric,
        purpose: str,
        key: Callable[[str], str],
        on_order: OnOrder,
        log: Log,
        clock: Callable[[], float],
    ) -> None:
        self._fabric, self._key, self._on_order, self._log = fabric, key, on_order, log
        self._clock = clock
        self._orders = OrderVerifier(fabric.verifier, purpose)
        self._asking = fabric.queryable(key(fabric.sid), self._asked)
        fabric.on_renewed.append(self._renewed)

    def close(self) -> None:
        """Stop answering operators; orders that come later go unanswered."""
        self._fabric.on_renewed.remove(self._renewed)
        self._asking.close()

    def _renewed(self, old: str, new: str) -> None:
        del old
        self._asking.close()
        self._asking = self._fabric.queryable(self._key(new), self._asked)

    def _asked(self, query: OrderQuery) -> None:
        try:
            body, person = self._orders.read(query.payload, self._fabric.sid, self._clock())
            self._on_order(body, person, query)
        except AtollError as error:
            reason = error.reason if isinstance(error, RefusedError) else "check"
            self._log.event("order.refused", reason=reason, message=str(error))
            query.reply(encode(OrderReply(False, str(error)[:1000])))
