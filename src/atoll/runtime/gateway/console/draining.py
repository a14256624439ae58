"""Taking machines out of service and back: with their name as confirmation, the last one only by force."""

from __future__ import annotations

import msgspec

from atoll.runtime.gateway.console.shown_machines import ShownMachine, list_machines
from atoll.runtime.gateway.console.view import GatewayView
from atoll.runtime.openai import ApiError
from atoll.runtime.pool.member import Member

_MAX_BYTES = 64 * 2**10


class DrainRequest(msgspec.Struct, frozen=True):
    """Body of a drain: the machine's name, and whether it may be the last one of a model."""

    confirm: str = ""
    force: bool = False


_decode = msgspec.json.Decoder(DrainRequest).decode


def drain(view: GatewayView, machine_id: str, body: bytes, who: str) -> ShownMachine:
    """Send a machine nothing more, and return it; `who` asks is written to the log."""
    machine = _find(view, machine_id)
    asked = _read(body)
    if asked.confirm != machine.name:
        raise ApiError(
            400,
            f'say its name to confirm: {{"confirm": {msgspec.json.encode(machine.name).decode()}}}',
            param="confirm",
            code="confirmation_needed",
        )
    pool = view.pool
    member = pool.members.get(machine_id)
    if member is None:
        raise ApiError(
            409,
            f"no requests are sent to {machine.name[:200]} itself: drain what serves the whole model",
            code="cannot_drain",
        )
    last = _last_for(view, member)
    if last and not asked.force:
        raise ApiError(
            409,
            f"it is the last one that serves {', '.join(last)[:500]}; to drain it anyway, add"
            ' "force": true',
            code="last_backend",
        )
    if not member.drained:
        pool.drain(machine_id)
        view.log.event(
            "machine.drained", machine=machine_id, name=machine.name, by=who, forced=bool(last)
        )
    return _find(view, machine_id)


def take_back(view: GatewayView, machine_id: str, who: str) -> ShownMachine:
    """Send a machine requests again, and return it."""
    machine = _find(view, machine_id)
    if machine.drained and machine.can_drain:
        view.pool.take_back(machine_id)
        view.log.event("machine.returned", machine=machine_id, name=machine.name, by=who)
    return _find(view, machine_id)


def _find(view: GatewayView, machine_id: str) -> ShownMachine:
    for machine in list_machines(view):
        if machine.id == machine_id:
            return machine
    raise ApiError(404, f"there is no machine {machine_id[:200]!r}", code="not_found")


def _read(body: bytes) -> DrainRequest:
    if len(body) > _MAX_BYTES:
        raise ApiError(413, f"this takes at most {_MAX_BYTES} bytes", code="request_too_large")
    try:
        return _decode(body) if body else DrainRequest()
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ApiError(400, f"the body cannot be read: {error}") from None


def _last_for(view: GatewayView, member: Member) -> list[str]:
    """Return models and services that nobody else who is up serves; none where it serves none itself."""
    pool, backend = view.pool, member.backend
    if not member.up:
        return []
    models = [model for model in backend.models if model in pool.rings]
    rings = [pool.rings[model] for model in models]
    rings += [pool.services[service] for service in backend.services]
    return [
        name
        for name, ring in zip((*models, *backend.services), rings, strict=True)
        if not any(m.serves and m.machine != member.machine for m in ring.members)
    ]
