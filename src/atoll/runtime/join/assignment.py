"""An operator asks a waiting node to serve a model.

The order (`signed_orders`) names an engine, a model and a few settings of known kinds, never a command.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from atoll.core.errors import InputError, UnknownNameError
from atoll.engines.table import find_launched
from atoll.fabric.identity import fabric_keys
from atoll.fabric.identity.identity import Identity, Person, RefusedError
from atoll.runtime.join.signed_orders import (
    OrderQuery,
    OrderReceiver,
    OrderReply,
    encode,
    sign_order,
)
from atoll.telemetry.logs import Log

if TYPE_CHECKING:
    from atoll.fabric.transport.fabric import Fabric

PURPOSE = "atoll-assign-v1"
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


_body = msgspec.msgpack.Decoder(Assignment).decode


def write_order(
    assignment: Assignment, identity: Identity, fabric: str, sid: str, now_s: float
) -> bytes:
    """Return an order to the session `sid`, signed."""
    return sign_order(PURPOSE, encode(assignment), identity, fabric, sid, now_s)


def read_assignment(body: bytes) -> Assignment:
    """Read what was ordered; RefusedError where it is no assignment."""
    try:
        return _body(body)
    except msgspec.MsgspecError as error:
        raise RefusedError("malformed", f"the order cannot be read: {error}") from error


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
    if not is_known_source(model, models):
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


def is_known_source(model: str, models: str | None) -> bool:
    """Whether weights are Hugging Face's, of a wheel, or below the folder that the node allows."""
    if model.startswith("/"):
        if models is None or ".." in PurePosixPath(model).parts:
            return False
        # Links may lead anywhere; what counts is where they end.
        return Path(model).resolve().is_relative_to(Path(models).resolve())
    pattern = _WHEEL if model.startswith("pypi://") else _HUB
    return pattern.fullmatch(model) is not None and ".." not in model


OnAssignment = Callable[[Assignment, str], None]
"""Called with an order that is to be obeyed and the operator's name; RefusedError if it cannot be now."""


def take_assignments(
    fabric: Fabric, on_order: OnAssignment, log: Log, *, models: str | None = None
) -> OrderReceiver:
    """Take assignments for as long as what is returned is open."""

    def ordered(body: bytes, person: Person, query: OrderQuery) -> None:
        assignment = read_assignment(body)
        check(assignment, models=models)
        on_order(assignment, person.name)
        log.event("assign.accepted", by=person.name, model=assignment.model)
        query.reply(encode(OrderReply(True, "accepted")))

    return OrderReceiver(fabric, PURPOSE, fabric_keys.assign, ordered, log, time.time)
