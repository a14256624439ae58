"""Machines that are to come to a fleet: what to type there, good for a while, and taken back here."""

from __future__ import annotations

import asyncio
import shlex
import time
from typing import Annotated, Literal, TypedDict

from pydantic import Field

from atoll.control.operation.fleet_home import FleetHome
from atoll.core.errors import UnknownNameError
from atoll.core.extras import require_extras
from atoll.core.frozen import Frozen
from atoll.deploy.joined.joined_settings import JoinedSettings
from atoll.deploy.target import DeployError, TargetSite
from atoll.planner.planner_service import (
    PlannerRequest,
    PlannerRoute,
    PlanningService,
    json_response,
)
from atoll.runtime.http.handlers import Answer
from atoll.runtime.openai import ApiError

_PATH = "fleets/{name}/invitations"
_OWN = frozenset({"gateway", "instances"})
"""Members of a fleet's fabric that are not machines somebody added."""


class Invitation(Frozen):
    """A machine that is to come: how it is called, and for how many days its token is good."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    days: Annotated[int, Field(strict=True, ge=1, le=3650)] = 30
    measure: bool = False


class ShownInvitation(TypedDict):
    """A machine that was asked to come, and how long its token is good (Unix time)."""

    name: str
    made_s: float
    expires_s: float
    state: Literal["good", "expired", "revoked"]


class InvitationList(TypedDict):
    """Machines that were asked to come to a fleet, and their region if instances are started on them."""

    invitations: list[ShownInvitation]
    region: str | None


class MadeInvitation(TypedDict):
    """The line to type on a machine, with its token; `only_here`: hubs listen on loopback alone."""

    name: str
    line: str
    expires_s: float
    hubs: list[str]
    only_here: bool


class RevokedInvitation(TypedDict):
    """The machine whose token was taken back."""

    revoked: str


class MeasuredMachine(TypedDict):
    """The machine that measures itself now."""

    measuring: str


async def show_invitations(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with the machines that were asked to come, without their tokens.

    `region` is theirs in the fleet file, where the fleet's controller starts instances on them.
    """
    home = await _find(planner, request)

    def look() -> InvitationList:
        record = home.read()
        targets = None if record is None else record.targets
        on_them = targets is not None and "joined" in targets.names
        region = targets.joined.region if targets is not None and on_them else None
        return InvitationList(invitations=_list(home), region=region)

    return json_response(await asyncio.to_thread(look))


async def invite(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Make a token for a machine; this answer alone has it, in the line to type there."""
    asked = Invitation.parse(request.object())
    home = await _find(planner, request)
    return json_response(await asyncio.to_thread(make_invitation, home, asked), 201)


async def take_back(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Take the token of a machine back: it leaves within seconds, and comes no more."""
    home = await _find(planner, request)
    gone = request.names["machine"]
    await asyncio.to_thread(_revoke, home, gone)
    return json_response(RevokedInvitation(revoked=gone))


async def measure(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Have a machine measure itself, a few minutes; what it finds is in the gateway's list of machines."""
    home = await _find(planner, request)
    name = request.names["machine"]

    def begin() -> None:
        from atoll.deploy.joined.joined_deployer import JoinedDeployer

        record = home.read()
        settings = JoinedSettings() if record is None else record.targets.joined
        deployer = settings.open(TargetSite(home.folder))
        assert isinstance(deployer, JoinedDeployer)
        try:
            deployer.measure(name)
        except DeployError as error:
            raise ApiError(409, str(error), code="not_measured") from error

    await asyncio.to_thread(begin)
    return json_response(MeasuredMachine(measuring=name), 202)


def _list(home: FleetHome) -> list[ShownInvitation]:
    from atoll.fabric.identity.authority import Authority

    now_s = time.time()
    return [
        ShownInvitation(
            name=member.name,
            made_s=member.issued_s,
            expires_s=member.expires_s,
            state="revoked"
            if member.revoked_s is not None
            else "expired"
            if member.expires_s < now_s
            else "good",
        )
        for member in Authority(home.folder / "fabric").members
        if member.role == "worker" and member.name not in _OWN
    ]


def make_invitation(home: FleetHome, asked: Invitation) -> MadeInvitation:
    """Return the line to type on a machine that is to come, with its token, and until when that is good."""
    from atoll.fabric.identity.access import is_loopback
    from atoll.fabric.identity.authority import Authority

    authority = Authority(home.folder / "fabric")
    access = authority.issue(asked.name, authority.name, "worker", days=asked.days)
    member = next(m for m in authority.members if m.name == asked.name and m.revoked_s is None)
    words = ["atoll", "join", "--fabric", access.pack(), "--name", asked.name]
    if asked.measure:
        words.append("--measure")
    home.write_down("note", f"{asked.name} may join as a machine, for {asked.days} days")
    return MadeInvitation(
        name=asked.name,
        line=shlex.join(words),
        expires_s=member.expires_s,
        hubs=list(access.hubs),
        only_here=all(map(is_loopback, access.hubs)),
    )


def _revoke(home: FleetHome, name: str) -> None:
    from atoll.fabric.identity.authority import Authority

    known = [each["name"] for each in _list(home) if each["state"] != "revoked"]
    if name not in known:
        raise UnknownNameError("machine", name, known)
    Authority(home.folder / "fabric").revoke(name)
    home.write_down("note", f"{name} may be a machine no more")


async def _find(planner: PlanningService, request: PlannerRequest) -> FleetHome:
    require_extras("fabric")
    entry = await asyncio.to_thread(planner.shelf.find, request.names["name"])
    if entry.home is None:
        raise ApiError(409, "this fleet is not operated", code="not_operated")
    if not (entry.home.folder / "fabric" / "ca.key").exists():
        raise ApiError(
            409,
            "machines join a fabric of others here: whoever runs that one lets them in",
            code="no_authority",
        )
    return entry.home


ROUTES = (
    PlannerRoute(
        *("GET", _PATH, "viewer", show_invitations, "Machines that were asked to come"),
        gives=InvitationList,
    ),
    PlannerRoute(
        *("POST", _PATH, "operator", invite, "Make a token for a machine, shown this once"),
        takes=Invitation,
        gives=MadeInvitation,
        status=201,
    ),
    PlannerRoute(
        *("DELETE", f"{_PATH}/{{machine}}", "operator", take_back),
        "Take the token of a machine back",
        gives=RevokedInvitation,
    ),
    PlannerRoute(
        *("POST", "fleets/{name}/machines/{machine}/measure", "operator", measure),
        "Have a machine that joined measure itself",
        gives=MeasuredMachine,
        status=202,
    ),
)
