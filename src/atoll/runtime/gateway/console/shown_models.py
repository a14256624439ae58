"""Models as people see them: what they take and make, and who serves them on what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from atoll.runtime.gateway.console.shown_machines import ShownMachine, state_of
from atoll.runtime.gateway.console.view import GatewayView
from atoll.runtime.pool.backend_metadata import MODALITIES, TEXT, read_modalities
from atoll.runtime.pool.member import STAND_IN, Member
from atoll.runtime.pool.routes import ModelPromise


class ShownOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that serves a model; times are means of late, in seconds."""

    machine: str
    name: str
    provider: str | None
    verified: bool
    region: str | None
    gpus: str | None
    precision: str | None
    context: int | None
    kind: str
    state: str
    running: int
    usd_per_mtoken_in: float | None
    usd_per_mtoken_out: float | None
    usd_per_hour: float | None
    mean_s: float | None
    first_token_s: float | None


class ShownModel(msgspec.Struct, frozen=True, kw_only=True):
    """A name to ask for, as `docs/reference/http.md` has it."""

    name: str
    aliases: tuple[str, ...] = ()
    choice: dict[str, dict[str, float]] | None = None
    takes: tuple[str, ...] = TEXT[0]
    makes: tuple[str, ...] = TEXT[1]
    promise: dict[str, float] | None = None
    context: int | None = None
    stand_in: str | None = None
    offers: tuple[ShownOffer, ...] = ()


def list_models(
    view: GatewayView, machines: Iterable[ShownMachine], now_s: float
) -> tuple[ShownModel, ...]:
    """Return choices and models, each with who serves it; `now_s` is the time of the loop."""
    pool, chooser = view.pool, view.chooser
    by_id = {machine.id: machine for machine in machines}
    other = _other_names(view)
    shown: list[ShownModel] = []
    for name, choice in chooser.choice_table.by_name.items():
        shares = dict(choice.dealer.shares)
        behind = [pool.rings[service] for service in shares if service in pool.rings]
        if behind:
            members = list(dict.fromkeys(m for ring in behind for m in ring.members))
            takes, makes = modalities_of(members, list(shares))
            shown.append(
                ShownModel(
                    name=name,
                    aliases=tuple(other.get(name, ())),
                    choice={"shares": shares},
                    takes=takes,
                    makes=makes,
                )
            )
    for name, ring in pool.rings.items():
        takes, makes = modalities_of(ring.members, [name])
        offers = tuple(_offer_of(m, name, by_id.get(m.name)) for m in ring.members)
        contexts = [offer.context for offer in offers if offer.context is not None]
        stand_ins = [m.backend.metadata[STAND_IN] for m in ring.members if _stands_in(m)]
        look = view.traffic.look(name, now_s)
        shown.append(
            ShownModel(
                name=name,
                aliases=tuple(other.get(name, ())),
                takes=takes,
                makes=makes,
                promise=show_promise(None if look is None else look.promise),
                context=max(contexts, default=None),
                stand_in=stand_ins[0] if stand_ins else None,
                offers=offers,
            )
        )
    return tuple(shown)


def show_promise(promise: ModelPromise | None) -> dict[str, float] | None:
    """Return a promise as it is shown."""
    if promise is None:
        return None
    return {"ttft_s": promise.ttft_s, "tpot_s": promise.tpot_s, "target": promise.target}


def modalities_of(
    members: Sequence[Member], models: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what models take and make together, as far as their backends say; else text."""
    takes: dict[str, None] = {}
    makes: dict[str, None] = {}
    for member in members:
        known = read_modalities(member.backend.metadata.get(MODALITIES, ""))
        for model in models:
            if model in known:
                takes |= dict.fromkeys(known[model][0])
                makes |= dict.fromkeys(known[model][1])
    return tuple(takes) or TEXT[0], tuple(makes) or TEXT[1]


def _other_names(view: GatewayView) -> dict[str, list[str]]:
    """Return the other names of each model: of the settings, and those that backends say."""
    pairs: list[tuple[str, str]] = list(view.settings.aliases.items())
    pairs += [(alias, model) for alias, models in view.pool.aliases.items() for model in models]
    names: dict[str, list[str]] = {}
    for alias, model in dict.fromkeys(pairs):
        names.setdefault(model, []).append(alias)
    return names


def _stands_in(member: Member) -> bool:
    return bool(member.backend.metadata.get(STAND_IN))


def _offer_of(member: Member, model: str, machine: ShownMachine | None) -> ShownOffer:
    offer, facts = member.offer(model), member.facts
    gpus = () if machine is None else machine.gpus
    counted = ", ".join(f"{g.count}x{g.type}" if g.count > 1 else g.type for g in gpus)
    return ShownOffer(
        machine=member.name,
        name=offer.node,
        provider=offer.provider or None,
        verified=offer.verified,
        region=offer.region or None,
        gpus=counted or ", ".join(offer.gpus) or None,
        precision=None if offer.precision == "unknown" else offer.precision,
        context=offer.context,
        kind=member.backend.kind,
        state=state_of(member),
        running=member.inflight,
        usd_per_mtoken_in=None if facts is None else facts.usd_per_mtoken_in,
        usd_per_mtoken_out=None if facts is None else facts.usd_per_mtoken_out,
        usd_per_hour=None if machine is None else machine.usd_per_hour,
        mean_s=round(member.mean_s, 4) if member.requests > member.failures else None,
        first_token_s=None if member.first_s is None else round(member.first_s, 4),
    )
