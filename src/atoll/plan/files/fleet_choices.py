"""From what a fleet file says of choices between models, sharing and the objective to what is planned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from atoll.catalog.catalog import Catalog
from atoll.catalog.models import ModelSpec
from atoll.core.errors import UnknownNameError
from atoll.core.ids import MAX_LETTERS
from atoll.plan.choice import Choice, Variant
from atoll.plan.files.choice_schema import ObjectiveSpec
from atoll.plan.files.fleet_schema import FleetDocument, ServiceSpec
from atoll.plan.footprint import DRAWN, RENT_OBJECTIVES, ObjectiveWeights, PowerGrid
from atoll.plan.problem import Service
from atoll.plan.service_sharing import name_part, own_name, share_services

_ROUNDING = 1e-9
"""Tolerance on sums of shares."""


class MakeService(Protocol):
    """Makes the service of a choice that a model answers."""

    def __call__(self, name: str, *, variant: tuple[str, ModelSpec]) -> Service:
        """Return it: `name` is the choice's, `variant` the name and the model of this way."""
        ...


def variant_name(choice: str, model: str) -> str:
    """Return the name of the service that a model of a choice is: "chat.llama-3.1-70b-fp8"."""
    return f"{choice}.{name_part(model)}"


def refuse_choice_fields(
    document: FleetDocument, here: tuple[str, ...], entry: ServiceSpec
) -> None:
    """Refuse what only services with several models have."""
    for field in ("max_error", "sticky"):
        if field in entry.model_fields_set:
            raise document.error(
                "only services with a choice of models have it",
                *here,
                field,
                hint="give 'models', each with its 'error', or leave it out",
            )


def choice_of(
    document: FleetDocument,
    catalog: Catalog,
    name: str,
    entry: ServiceSpec,
    make: MakeService,
) -> tuple[list[Service], Choice]:
    """Return the ways to answer a service that several models may answer, and the choice between them."""
    here = ("services", name)
    _refuse_beside_models(document, here, entry)
    services: list[Service] = []
    variants: list[Variant] = []
    floors: dict[str, float] = {}
    first: dict[str, int] = {}
    for number, each in enumerate(entry.models or ()):
        with document.at(*here, "models", number, "model"):
            model = catalog.model(each.model)
        if model.name in first:
            raise document.error(
                f"{model.name} is named twice",
                *here,
                "models",
                number,
                "model",
                hint="name each model once; another precision is written MODEL@fp8",
            )
        first[model.name] = number
        way = variant_name(name, model.name)
        _check_length(document, here, way)
        service = make(name, variant=(way, model))
        services.append(service)
        variants.append(Variant(service=service.name, model=service.model, error=each.error))
        if each.min_share > 0.0:
            floors[service.model] = each.min_share
    _check_shares(document, here, entry)
    choice = Choice(
        name=name,
        variants=tuple(variants),
        max_error=entry.max_error,
        min_share=floors,
        sticky=entry.sticky,
    )
    return services, choice


def _check_length(document: FleetDocument, here: tuple[str, ...], way: str) -> None:
    """Refuse a service whose name leaves no room for that of a way to answer it."""
    if len(way) > MAX_LETTERS:
        raise document.error(
            f"one of its ways would have a name of {len(way)} characters, {MAX_LETTERS} at most",
            *here,
            hint="give the service a shorter name",
        )


def _refuse_beside_models(
    document: FleetDocument, here: tuple[str, ...], entry: ServiceSpec
) -> None:
    if entry.model is not None:
        raise document.error(
            "models are said twice, here and by 'models'",
            *here,
            "model",
            hint="leave it out, or leave out 'models'",
        )
    if entry.classes is not None:
        raise document.error(
            "requests with classes have one model",
            *here,
            "classes",
            hint="give 'model' instead of 'models', or 'lengths' instead of 'classes'",
        )
    if document.content.cluster is not None:
        raise document.error(
            "choices between models are planned on pools, not on fixed clusters",
            *here,
            "models",
            hint="list the machines under pool.owned, or give one 'model'",
        )


def _check_shares(document: FleetDocument, here: tuple[str, ...], entry: ServiceSpec) -> None:
    """Refuse least shares over 100 %, and an error that no mix of the models keeps."""
    models = entry.models or []
    floor = sum(each.min_share for each in models)
    if floor > 1.0 + _ROUNDING:
        raise document.error(
            f"the least shares add up to {100 * floor:.9g}%",
            *here,
            "models",
            hint="lower min_share of some: 100% at most",
        )
    if entry.max_error is None:
        return
    best = min(each.error for each in models)
    if best > entry.max_error + _ROUNDING:
        raise document.error(
            f"every model errs more than {100 * entry.max_error:.9g}%, the best {100 * best:.9g}%",
            *here,
            "max_error",
            hint=f"allow {100 * best:.9g}% at least, or name a better model",
        )
    min_error = sum(each.min_share * each.error for each in models) + max(0.0, 1.0 - floor) * best
    if min_error > entry.max_error + _ROUNDING:
        raise document.error(
            f"with their least shares the models err {100 * min_error:.9g}% at best",
            *here,
            "max_error",
            hint=f"allow {100 * min_error:.9g}%, or lower min_share of models that err more",
        )


def check_names(document: FleetDocument, services: Iterable[Service]) -> None:
    """Refuse a service that has the name of a way to answer a choice."""
    known = document.content.services
    seen: set[str] = set()
    for service in services:
        if service.name in seen:
            twice = service.name
            at = [twice] if twice in known else []
            raise document.error(
                f"{twice} is also a model of a choice", "services", *at, hint="give it another name"
            )
        seen.add(service.name)


def shared_services(
    document: FleetDocument, services: Sequence[Service], choices: Sequence[Choice]
) -> tuple[list[Service], list[Choice]]:
    """Return services and choices with ways that services of one model share; see `plan.service_sharing`."""
    if document.content.cluster is not None:
        raise document.error(
            "instances are shared on pools, not on fixed clusters",
            "share_instances",
            hint="list the machines under pool.owned, or leave it out",
        )
    for name in document.content.services:
        _check_length(document, ("services", name), own_name(name))
    with document.at("share_instances"):
        shared, sharing, _ = share_services(services, choices)
    return list(shared), list(sharing)


# What counts


def weights_of(document: FleetDocument) -> ObjectiveWeights:
    """Return what a plan shall make small."""
    entry = document.content.objective
    if not isinstance(entry, ObjectiveSpec):
        return RENT_OBJECTIVES[entry]
    prices = {drawn.weight: getattr(entry, name) for name, drawn in DRAWN.items()}
    if entry.cost == 0.0 and not any(prices.values()):
        names = " or ".join(RENT_OBJECTIVES)
        raise document.error("nothing counts", "objective", hint=f"give {names} more than 0")
    return ObjectiveWeights(usd=entry.cost, **prices)


def grid_of(document: FleetDocument, regions: set[str]) -> PowerGrid:
    """Return what electricity costs the climate; where carbon counts it is known of every region."""
    entry = document.content.grid
    for region in entry.by_region:
        if region not in regions:
            with document.at("grid", region):
                raise UnknownNameError("region of the pool", region, sorted(regions))
    grid = PowerGrid(g_per_kwh=entry.by_region, default_g_per_kwh=entry.default, pue=entry.pue)
    if weights_of(document).usd_per_tonne > 0.0:
        unknown = sorted(region for region in regions if grid.intensity(region) is None)
        if unknown:
            raise document.error(
                f"carbon counts, and nobody says what electricity emits in {unknown[0]}",
                "objective",
                hint="add it to 'grid', or a default, as in grid: {default: 300 g/kWh}",
            )
    return grid
