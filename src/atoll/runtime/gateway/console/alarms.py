"""Alarms with what to do about each; an id stays the same as long as its alarm lasts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal
from urllib.parse import quote

import msgspec

from atoll.runtime.gateway.budgets import BudgetStanding
from atoll.runtime.gateway.console.view import GatewayView
from atoll.runtime.gateway.traffic_tally import ModelLook
from atoll.runtime.pool.member import STAND_IN, Member

Level = Literal["error", "warning", "info"]

_ENDS_SOON_S = 600.0
_MIN_JUDGED = 20
"""With fewer requests that a promise is missed is chance."""
_LEVELS = {"error": 0, "warning": 1, "info": 2}
_SHOWN = 200
"""Alarms that are shown; of more, the worst."""


class Alarm(msgspec.Struct, frozen=True):
    """Something that is wrong since a Unix time, and what to do."""

    id: str
    level: Level
    what: str
    fix: str
    since_s: float


class AlarmBoard:
    """Finds what is wrong with a gateway; remembers since when."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def look(self, view: GatewayView, looks: Mapping[str, ModelLook | None]) -> list[Alarm]:
        """Return all alarms, the worst first; `looks` has what is known of each model."""
        now_s = time.time()
        found: dict[str, Alarm] = {}
        for alarm in _find(view, looks, now_s):
            since_s = min(alarm.since_s, self._since_s.get(alarm.id, alarm.since_s))
            found[alarm.id] = msgspec.structs.replace(alarm, since_s=since_s)
        self._since_s = {name: alarm.since_s for name, alarm in found.items()}
        return sorted(found.values(), key=lambda alarm: _LEVELS[alarm.level])[:_SHOWN]


def _find(
    view: GatewayView, looks: Mapping[str, ModelLook | None], now_s: float
) -> Iterator[Alarm]:
    yield from _of_models(view, looks, now_s)
    yield from _of_accounts(view, now_s)
    yield from _of_budgets(view.budgets.standings, now_s)
    members = view.pool.members.values()
    for member in members:
        yield from _of_member(member, now_s)
    yield from _of_stand_ins(members, now_s)


def _of_member(member: Member, now_s: float) -> Iterator[Alarm]:
    """Yield what is wrong with one backend."""
    shown = _name_of(member)
    since_s = member.since_s or now_s
    state = member.state
    why = f": {member.reason}" if member.reason else ""
    if state == "down" and member.node:
        yield Alarm(
            f"backend-down:{member.name}",
            "error",
            f"node {shown} is away{why}",
            "look whether its process and its network are well; it is used again once it is back",
            since_s,
        )
    elif state == "down":
        yield Alarm(
            f"backend-down:{member.name}",
            "error",
            f"backend {shown} does not answer{why}",
            f"look at its log, or remove it with DELETE /atoll/v1/backends/{quote(member.name, '')}",
            since_s,
        )
    elif state == "slow":
        yield Alarm(
            f"backend-slow:{member.name}",
            "warning",
            f"{shown} is too busy to say how it is{why}",
            "others are asked first, and what runs there goes on; give it less, or more cores",
            since_s,
        )
    elif state == "ejected":
        yield Alarm(
            f"backend-ejected:{member.name}",
            "warning",
            f"{shown} fails requests and is left alone for a while{why}",
            "look at its log; it is tried again by itself, or drain it until it is well",
            since_s,
        )
    elif state == "drained":
        yield Alarm(
            f"machine-drained:{member.name}",
            "info",
            f"{shown} is drained and gets no requests",
            f"take it back with DELETE /atoll/v1/machines/{quote(member.name, '')}/drain",
            since_s,
        )
    if member.ends_s is not None and state != "down" and member.ends_s - now_s < _ENDS_SOON_S:
        left_s = member.ends_s - now_s
        when = f"in {max(1, round(left_s / 60))} min" if left_s > 0 else "now"
        yield Alarm(
            f"node-ends:{member.name}",
            "warning",
            f"{shown} ends {when}",
            "what runs there is moved before; start another one if the rest is too little",
            now_s,
        )


def _of_models(
    view: GatewayView, looks: Mapping[str, ModelLook | None], now_s: float
) -> Iterator[Alarm]:
    """Yield which models nobody serves, and which do not keep what is promised."""
    rings = view.pool.rings
    for model in view.pool.unserved():
        members = [] if model not in rings else rings[model].members
        drained = any(member.drained for member in members)
        yield Alarm(
            f"model-unserved:{model}",
            "error",
            f"no machine serves {model}",
            "take back the one that is drained"
            if drained
            else "start a machine that serves it, or look at why the others are down",
            max((member.since_s for member in members), default=0.0) or now_s,
        )
    for model, look in looks.items():
        if look is None or look.promise is None:
            continue
        window, promise = look.traffic.five_minutes, look.promise
        if window.judged >= _MIN_JUDGED and window.kept < promise.target * window.judged:
            yield Alarm(
                f"promise:{model}",
                "error" if window.kept < promise.target / 2 * window.judged else "warning",
                f"{model} keeps its promise for {window.kept / window.judged:.1%} of the requests of five"
                f" minutes, and {promise.target:.1%} are promised",
                "look for slow or missing machines, or have it planned anew for this demand",
                now_s,
            )


def _of_accounts(view: GatewayView, now_s: float) -> Iterator[Alarm]:
    """Yield what is wrong with keys and the ledger."""
    stats = {} if view.accounts is None else view.accounts.stats()
    if stats.get("journal_full"):
        refuses = view.settings.on_full_disk == "refuse"
        yield Alarm(
            "ledger-full",
            "error",
            "the journal of what requests use is full"
            + (
                ": new requests are refused"
                if refuses
                else ": requests run and are not written down"
            ),
            "make room on the disk, and see that the database answers",
            now_s,
        )
    if stats.get("database_up") is False:
        away_s = stats.get("synced_s")
        yield Alarm(
            "database-away",
            "warning",
            "the database of keys and usage does not answer: keys stay as they were, usage is kept here",
            "look at the database, and at the network to it",
            now_s - (away_s if isinstance(away_s, float) else 0.0),
        )


def _of_budgets(standings: Iterable[BudgetStanding], now_s: float) -> Iterator[Alarm]:
    """Yield which budgets are spent, or soon will be."""
    for one in standings:
        if one.level == "info":
            continue
        whose = "all requests" if one.budget.id == "all" else one.budget.id
        yield Alarm(
            f"budget:{one.budget.id}",
            one.level,
            f"{whose}: ${one.spent_usd:,.2f} of ${one.budget.usd_per_month:,.2f} for this month are spent",
            "look at Keys and usage who spends it; limits of keys refuse requests, budgets do not",
            now_s,
        )


def _of_stand_ins(members: Iterable[Member], now_s: float) -> Iterator[Alarm]:
    """Yield for which models other weights answer than those asked for."""
    for member in members:
        text = member.backend.metadata.get(STAND_IN)
        if not text:
            continue
        for model in member.backend.models:
            yield Alarm(
                f"stand-in:{model}",
                "info",
                f"{model}: other weights stand in ({text[:_SHOWN]})",
                "serve the weights that the plan has for it before anybody relies on the answers",
                member.since_s or now_s,
            )


def _name_of(member: Member) -> str:
    """Return what people call a backend."""
    return member.backend.metadata.get("node") or member.name
