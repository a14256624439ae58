"""From the fleet file a person writes to the problem a planner solves; see `fleet_schema`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import JsonValue

from atoll.catalog.catalog import Catalog
from atoll.catalog.hf_config import model_from_config
from atoll.catalog.load import OVERLAY_VARIABLE
from atoll.catalog.models import ModelSpec
from atoll.catalog.overlay import apply_overlay
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.files import load_yaml_file, parse_yaml, read_text_limited
from atoll.core.ids import parse_node_type, slug
from atoll.engines.limits import EngineLimits
from atoll.engines.table import (
    find_engine,
    list_planned,
    profile_engine,
    read_engines,
    settle_placed,
)
from atoll.plan.choice import Choice
from atoll.plan.context_length import check_max_model_len
from atoll.plan.files.classes_file import (
    check_sharing,
    classes_of,
    cores_of,
    is_plain,
    lengths_of,
    paths_of,
    promises_of,
    rates_of,
    sharing_of,
    text_lengths,
)
from atoll.plan.files.cluster_file import cluster_of_file
from atoll.plan.files.fleet_choices import (
    check_names,
    choice_of,
    grid_of,
    refuse_choice_fields,
    shared_services,
    weights_of,
)
from atoll.plan.files.fleet_schema import (
    EngineSpec,
    FleetDocument,
    FleetSpec,
    LengthsSpec,
    ReserveSpec,
    ServiceSpec,
)
from atoll.plan.files.offers_file import offers_of, with_cores
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import (
    Lengths,
    Limits,
    Offer,
    Phases,
    Prefix,
    Problem,
    Reserve,
    Service,
    Settings,
    with_kv_dtype,
)
from atoll.plan.robustness import DEMAND_SD, RiskModel
from atoll.plan.survival import Survival
from atoll.workload.lengths import LengthMix, length_mix

Overlay = dict[str, JsonValue]


def load_fleet(
    path: str | os.PathLike[str],
    *,
    overlays: Iterable[str | os.PathLike[str]] = (),
    environ: Mapping[str, str] | None = None,
) -> Problem:
    """Read a fleet file into a problem; whatever is wrong is an AtollError with file, line and fix.

    Facts come from the shipped catalog, the overlay named by ATOLL_CATALOG, `overlays` in order, and
    the file's own `catalog`; all of them go into the problem, which is complete without the files.
    """
    document = FleetDocument(load_yaml_file(path))
    return _problem(document, overlays, os.environ if environ is None else environ)


def parse_fleet(
    text: str,
    *,
    path: str | os.PathLike[str] = "fleet.yaml",
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Problem:
    """Read the text of a fleet file as `load_fleet` does; `path` is what errors call it.

    Other files that it names are looked for beside that path.
    """
    return _problem(FleetDocument(parse_yaml(text, path=path)), (), environ)


def build_problem(fleet: Mapping[str, object]) -> Problem:
    """Return the problem of a fleet's fields: plain data, or the typed objects of `fleet_schema`."""
    return _problem(FleetDocument(fleet), (), {})


def fleet_schema() -> dict[str, object]:
    """Return the JSON schema of fleet files, for editors."""
    schema = FleetSpec.model_json_schema()
    nodes = [{"required": ["pool"]}, {"required": ["cluster"]}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "oneOf": nodes,
        "title": "Fleet",
    }


def _problem(
    document: FleetDocument,
    overlays: Iterable[str | os.PathLike[str]],
    environ: Mapping[str, str],
) -> Problem:
    fleet = document.content
    catalog, facts = _facts(document, overlays, environ)
    cluster, priced = cluster_of_file(document, catalog)
    offers = priced if cluster is not None else offers_of(document, catalog)
    node_types = {kind for offer in offers for kind in offer.kinds} | set(
        cluster.counts() if cluster else ()
    )
    services: list[Service] = []
    choices: list[Choice] = []
    for name, entry in fleet.services.items():
        if entry.models is None:
            refuse_choice_fields(document, ("services", name), entry)
            services.append(_service(document, catalog, name, entry, node_types))
        else:
            make = partial(_service, document, catalog, entry=entry, node_types=node_types)
            variants, choice = choice_of(document, catalog, name, entry, make)
            services += variants
            choices.append(choice)
    check_names(document, services)
    check_sharing(document, catalog, services)
    if any(service.cores for service in services):
        offers = with_cores(document, catalog, offers)
    if fleet.share_instances:
        services, choices = shared_services(document, services, choices)
    settings = fleet.settings.model_dump(exclude={"engine_limits"})
    settings["startup_s"] = settings.pop("startup")
    settings["engines"] = _engines(document, placed=cluster is not None)
    if cluster is not None:
        with document.at("settings", "engines"):
            named = settle_placed(settings["engines"], settings["engine"], field="settings.engines")
        settings |= {"engine": named, "engines": ()}
    _check_shares(document, offers, settings["engines"])
    _check_forms(document, catalog, services, settings["engines"] or (settings["engine"],))
    limits = fleet.limits
    return Problem.parse(
        {
            "name": _name(document),
            "services": services,
            "offers": offers,
            "limits": Limits(
                budget_usd_per_hour=limits.budget,
                spot_share=limits.spot_share,
                max_nodes=limits.max_nodes,
                spread=limits.spread,
                survive=_survival(document, services, choices),
                spot_loss_per_h=limits.spot_loss * 3600.0,
                spot_notice_s=limits.spot_notice,
            ),
            "settings": Settings.parse(settings),
            "running": _read_running(document),
            "overlays": facts,
            "cluster": cluster,
            "choices": choices,
            "weights": weights_of(document),
            "grid": grid_of(document, {offer.region for offer in offers}),
            "risk": _risk(document),
        },
        path=document.path,
    )


def _survival(
    document: FleetDocument, services: Iterable[Service], choices: Iterable[Choice]
) -> int | Survival:
    """Return what a plan must survive, with services by the names that the problem has for them."""
    asked = document.content.limits.survive
    if isinstance(asked, int):
        return asked
    known = {choice.name: tuple(v.service for v in choice.variants) for choice in choices}
    optional = {name for variants in known.values() for name in variants}
    known |= {one.name: (one.name,) for one in services if one.name not in optional}
    for name in asked.services:
        if name not in known:
            with document.at("limits", "survive", "services"):
                raise UnknownNameError("service", name, known, field="limits.survive.services")
    named = tuple(own for name in asked.services for own in known[name])
    return Survival.parse({**asked.model_dump(), "services": named})


def _check_shares(document: FleetDocument, offers: Iterable[Offer], engines: Iterable[str]) -> None:
    """Refuse a pool of nothing but shares of GPUs where no engine runs on such."""
    named = [find_engine(name) for name in engines]
    shares = [parse_node_type(offer.node_type).shares > 1 for offer in offers]
    if shares and all(shares) and named and not any(engine.on_shares for engine in named):
        able = " or ".join(engine.name for engine in list_planned() if engine.on_shares)
        titles = " and ".join(engine.title for engine in named)
        raise document.error(
            f"the pool offers shares of GPUs, and {titles} takes what is free on a GPU",
            "settings",
            "engines",
            hint=f"add {able}, or leave 'shares' out",
        )


def _name(document: FleetDocument) -> str:
    if document.content.name is not None:
        with document.at("name"):
            return slug(document.content.name)
    stem = Path(document.path or "fleet").stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "fleet"


# Services


def _service(
    document: FleetDocument,
    catalog: Catalog,
    name: str,
    entry: ServiceSpec,
    node_types: set[str],
    variant: tuple[str, ModelSpec] | None = None,
) -> Service:
    """Return a service; `variant` is the name and model that it has as one of the ways to answer a choice."""
    here = ("services", name)
    with document.at(*here):
        slug(name)
    if variant is None:
        with document.at(*here, *(["model"] if entry.model is not None else [])):
            model = catalog.model(entry.model or name)
    else:
        model = variant[1]
    model = _cache_in(document, catalog, here, model, entry.engine)
    asked = _asked(document, catalog, here, entry, model)
    only = tuple(_nodes(document, catalog, (*here, "only"), entry.only))
    avoid = tuple(_nodes(document, catalog, (*here, "avoid"), entry.avoid))
    service = Service(
        **asked,
        name=name if variant is None else variant[0],
        model=model.name,
        rate_per_s=entry.rate,
        phases=_phases(document, here, entry),
        headroom=entry.headroom,
        reserve=_reserve(entry),
        attainment=entry.attainment,
        length_deciles=entry.length_deciles,
        burstiness=entry.burstiness,
        priority=entry.priority,
        only=only,
        avoid=avoid,
        engine_limits=_engine_limits(document, here, entry.engine, model),
        prefix=_prefix(document, here, entry, asked),
    )
    _check_context(document, here, entry.engine, service, model)
    if not any(service.allows(kind) for kind in node_types):
        if service.is_graph and not (only or avoid):
            raise document.error(
                "an any-to-any model runs on whole GPUs, and the pool offers shares of them only",
                *here,
                "classes",
                hint="leave 'shares' out of an entry of the pool",
            )
        field = "only" if only else "avoid"
        raise document.error(
            "no node type of the pool is left for this model",
            *here,
            field,
            hint=f"the pool has {', '.join(sorted(node_types)[:8])}",
        )
    return service


def _reserve(entry: ServiceSpec) -> Reserve | None:
    stated = entry.reserve
    if stated is None:
        return None
    if isinstance(stated, ReserveSpec):
        return Reserve(share=stated.share, quantile=stated.quantile)
    return Reserve(share=stated)


def _asked(
    document: FleetDocument,
    catalog: Catalog,
    here: tuple[str, ...],
    entry: ServiceSpec,
    model: ModelSpec,
) -> dict[str, Any]:
    """Return lengths or classes of a service's requests, with their promises.

    Classes of text alone under one promise need no executors: the service is a plain one, and tells them
    apart where promises are judged.
    """
    classes = classes_of(document, here, entry, model)
    if not classes:
        parts = ", ".join(component.name for component in model.graph.components)
        if not model.has_llm:
            raise document.error(
                f"{model.name} is made of {parts}, and no class says what requests bring and want",
                *here,
                hint="add 'classes', as in classes: {text -> image: {share: 100%}}",
            )
        for field in ("ttft", "tpot", "lengths"):
            if getattr(entry, field) is None:
                raise document.error(
                    "this field is required", *here, field, hint=f"add {field!r}, or 'classes'"
                )
        for field in ("paths", "rates", "share", "cores"):
            if field in entry.model_fields_set:
                raise document.error(
                    "only services with classes have it", *here, field, hint="add 'classes'"
                )
        assert entry.lengths is not None
        max_context = model.llm.max_context
        lengths = _lengths(document, (*here, "lengths"), entry.lengths, max_context, model.name)
        return {"ttft_s": entry.ttft, "tpot_s": entry.tpot, "lengths": lengths}
    if entry.lengths is not None:
        raise document.error(
            "lengths are said twice, here and by the classes",
            *here,
            "lengths",
            hint="leave it out; classes have 'input' and 'output'",
        )
    ttft_s, tpot_s = promises_of(classes)
    # Who says that it shares means executors, though its requests be text alone.
    shares = "share" in entry.model_fields_set and entry.share is not False
    if not (entry.paths or entry.rates or entry.cores or shares) and is_plain(model, classes):
        told_apart = len(classes) > 1 or classes[0].attainment is not None
        return {
            "ttft_s": ttft_s,
            "tpot_s": tpot_s,
            "lengths": text_lengths(model, classes, entry.attainment),
            "text_classes": classes if told_apart else (),
        }
    if entry.length_deciles:
        raise document.error(
            "deciles of length are for services of text alone under one promise",
            *here,
            "length_deciles",
            hint="leave it out; promises hold for every class",
        )
    if document.content.cluster is not None:
        raise document.error(
            "classes are planned on pools, not on fixed clusters: machines of those are filled with layers "
            "of one model after the other, executors with parts",
            *here,
            "classes",
            hint="list the machines under pool.owned",
        )
    return {
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
        "lengths": lengths_of(model, classes),
        "classes": classes,
        "paths": paths_of(document, here, entry, model, classes),
        "rates": rates_of(document, catalog, here, entry, model),
        "cores": cores_of(document, here, entry, model),
        **sharing_of(document, here, entry, model),
    }


def _engines(document: FleetDocument, *, placed: bool) -> tuple[str, ...]:
    """Return the engines that may run instances, the preferred first; none where layouts are free."""
    settings = document.content.settings
    with document.at("settings", "engine"):
        profile_engine(settings.engine)
    if settings.engines is None:
        # Who names one engine means it; kernels alone are no engine. Placements are for one engine.
        if placed or "engine" in settings.model_fields_set:
            named = find_engine(settings.engine)
            return () if placed or not named.launches else (named.name,)
        return tuple(engine.name for engine in list_planned())
    with document.at("settings", "engines"):
        return read_engines(settings.engines, field="settings.engines")


def _merge_engine(document: FleetDocument, entry: EngineSpec) -> dict[str, object]:
    """Return the engine settings of a service by name: its own, else those for all."""
    for_all = document.content.settings.engine_limits.model_dump(exclude_none=True)
    return {**for_all, **entry.model_dump(exclude_none=True)}


def _cache_in(
    document: FleetDocument,
    catalog: Catalog,
    here: tuple[str, ...],
    model: ModelSpec,
    entry: EngineSpec,
) -> ModelSpec:
    """Return a model with its KV cache in the format that is asked for; the format is part of its name."""
    own = entry.kv_cache_dtype is not None
    where = (*here, "engine") if own else ("settings", "engine_limits")
    dtype = _merge_engine(document, entry).get("kv_cache_dtype")
    with document.at(*where, "kv_cache_dtype"):
        return catalog.model(with_kv_dtype(model.name, None if dtype is None else str(dtype)))


def _prefix(
    document: FleetDocument, here: tuple[str, ...], entry: ServiceSpec, asked: Mapping[str, Any]
) -> Prefix | None:
    """Return what prompts of a service have in common."""
    given = entry.prefix
    if given is None:
        return None
    why = None
    if "classes" in asked:
        why = "executors of any-to-any models keep no beginnings of prompts"
    elif document.content.cluster is not None:
        why = "machines of a fixed cluster are planned without common beginnings of prompts"
    elif given.tokens >= asked["lengths"].input_mean:
        mean = f"{asked['lengths'].input_mean:,.0f}"
        why = f"a beginning of {given.tokens:,} tokens is as long as the mean prompt of {mean}"
    if why is not None:
        raise document.error(why, *here, "prefix", hint="leave it out, or shorten it")
    return Prefix(share=given.share, tokens=given.tokens)


def _engine_limits(
    document: FleetDocument, here: tuple[str, ...], entry: EngineSpec, model: ModelSpec
) -> EngineLimits:
    merged = _merge_engine(document, entry)
    if entry.expert_parallel is None and not (model.has_llm and model.llm.moe):
        # What is asked for all services holds for those that have experts.
        merged.pop("expert_parallel", None)
    merged.pop("kv_cache_dtype", None)
    host = merged.pop("host", None)
    if isinstance(host, dict):
        merged["host"] = {f"{name}_s": seconds for name, seconds in host.items()}
    guess = merged.get("speculative")
    if isinstance(guess, dict) and isinstance(guess["acceptance"], float):
        # Each guess is right with this chance, if those before it were.
        count, chance = guess["num_speculative_tokens"], guess["acceptance"]
        merged["speculative"] = {**guess, "acceptance": [chance**k for k in range(1, count + 1)]}
    own = entry.speculative is not None or "speculative" not in merged
    with document.at(*((*here, "engine") if own else ("settings", "engine_limits"))):
        return EngineLimits.parse(merged)


_FORMS = {
    "speculative": "speculative decoding",
    "expert_parallel": "spreading experts over GPUs",
}
"""Settings of engines that some do not have, by what they are."""


def _check_forms(
    document: FleetDocument, catalog: Catalog, services: Iterable[Service], engines: Iterable[str]
) -> None:
    """Refuse what no engine, no executor or no model does, and unknown small models."""
    for service, field in product(services, _FORMS):
        limits = service.engine_limits
        if not getattr(limits, field):
            continue
        where = next(
            (
                ("services", name, "engine", field)
                for name, entry in document.content.services.items()
                if getattr(entry.engine, field) is not None and service.name.startswith(name)
            ),
            ("settings", "engine_limits", field),
        )
        alone = EngineLimits.parse({field: getattr(limits, field), "scheduling": limits.scheduling})
        reasons = [find_engine(name).refuses_launch(alone) for name in engines]
        if service.is_graph:
            reasons = [f"executors of any-to-any models run without {_FORMS[field]}"]
        elif document.content.cluster is not None:
            reasons = [f"machines of a fixed cluster are planned without {_FORMS[field]}"]
        elif field == "expert_parallel" and catalog.model(service.model).llm.moe is None:
            reasons = [f"{service.model} has no experts"]
        if reasons and all(reasons):
            text = "; ".join(dict.fromkeys(map(str, reasons)))
            raise document.error(text, *where, hint="leave it out, or plan with vllm or sglang")
        guess = limits.speculative
        if field == "speculative" and guess is not None and guess.method == "draft_model":
            with document.at(*where, "model"):
                catalog.model(str(guess.model)).llm  # noqa: B018 - an unknown name is named here


def _check_context(
    document: FleetDocument,
    here: tuple[str, ...],
    entry: EngineSpec,
    service: Service,
    model: ModelSpec,
) -> None:
    """Raise where the longest request that a fleet allows does not go with its lengths or its model."""
    given = service.engine_limits.max_model_len
    if given is None or service.is_graph:
        return
    own = entry.max_model_len is not None
    with document.at(
        *((*here, "engine") if own else ("settings", "engine_limits")), "max_model_len"
    ):
        check_max_model_len(given, service.lengths.mix(), service.attainment, model.llm.max_context)


def _phases(document: FleetDocument, here: tuple[str, ...], entry: ServiceSpec) -> Phases:
    """Return how phases run; on a fixed cluster they run together."""
    if document.content.cluster is None:
        return entry.phases
    if entry.phases == "apart" and "phases" in entry.model_fields_set:
        raise document.error(
            "on a fixed cluster both phases run together", *here, "phases", hint="leave it out"
        )
    return "together"


def _nodes(
    document: FleetDocument, catalog: Catalog, here: tuple[str, ...], names: list[str]
) -> Iterator[str]:
    """Yield canonical names: a GPU type stands for all its sizes, a node type for itself."""
    for index, name in enumerate(names):
        with document.at(*here, index):
            yield catalog.node(name).id if ":" in name else catalog.gpu(name).name


def _lengths(
    document: FleetDocument,
    here: tuple[str, ...],
    entry: str | LengthsSpec,
    max_context: int,
    model: str,
) -> Lengths:
    with document.at(*here):
        if isinstance(entry, str):
            mix = length_mix(entry)
        else:
            mix = LengthMix(
                entry.input,
                entry.output,
                entry.input**2 * (1 + entry.input_cv**2),
                entry.output**2 * (1 + entry.output_cv**2),
                entry.input_tail or 0.0,
            )
        longest = max(mix.input_mean + mix.output_mean, mix.input_tail)
        if longest > max_context:
            raise InputError(
                f"requests of {longest:,.0f} tokens exceed the model's {max_context:,} ({model})",
                hint="use shorter lengths, or a model with a longer context",
            )
        return Lengths.of(mix)


# What may turn out otherwise


def _risk(document: FleetDocument) -> RiskModel | None:
    entry = document.content.risk
    if entry is None:
        return None
    spreads = entry.demand if isinstance(entry.demand, dict) else {"default": entry.demand}
    for name in spreads:
        with document.at("risk", "demand", name):
            if name != "default" and name not in document.content.services:
                raise UnknownNameError("service", name, (*document.content.services, "default"))
    return RiskModel(
        demand_sd=spreads.get("default", DEMAND_SD),
        demand_sd_of={name: spread for name, spread in spreads.items() if name != "default"},
        demand_correlation=entry.demand_correlation,
        spot_price_sd=entry.spot_price,
        spot_loss=entry.spot_loss,
        performance=entry.performance,
    )


# What runs


def _read_running(document: FleetDocument) -> tuple[Instance, ...]:
    file_name = document.content.running
    if file_name is None:
        return ()
    path = document.folder / file_name
    with document.at("running"):
        text = read_text_limited(path)
    return Plan.from_json(text, path=path).instances


# Facts


def _facts(
    document: FleetDocument, overlays: Iterable[str | os.PathLike[str]], environ: Mapping[str, str]
) -> tuple[Catalog, tuple[Overlay, ...]]:
    """Return the catalog and the overlays that make it, as data that needs no other file."""
    from_environment = environ.get(OVERLAY_VARIABLE, "").strip()
    entry = document.content.catalog
    paths: list[str | os.PathLike[str]] = [from_environment] if from_environment else []
    paths += overlays
    if isinstance(entry, str):
        paths.append(document.folder / entry)
    catalog = Catalog.default()
    plain: list[Overlay] = []
    for path in paths:
        catalog = apply_overlay(catalog, path)
        plain.append(_complete(load_yaml_file(path).data, Path(path).parent))
    if isinstance(entry, dict):
        with document.at("catalog"):
            plain.append(_complete(entry, document.folder))
            catalog = apply_overlay(catalog, plain[-1])
    return catalog, tuple(plain)


def _complete(data: object, folder: Path) -> Overlay:
    """Return an overlay that needs no other file: the config.json of a model is put in its place."""
    plain = _plain(data)
    overlay: Overlay = plain if isinstance(plain, dict) else {}
    models = overlay.get("models")
    for name, entry in models.items() if isinstance(models, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("hf_config"), str):
            path = folder / str(entry["hf_config"])
            model_from_config(path, name)  # says what is wrong with it, if anything
            file = path / "config.json" if path.is_dir() else path
            entry["hf_config"] = json.loads(read_text_limited(file))
    return overlay


def _plain(value: object) -> JsonValue:
    """Return YAML data as JSON holds it: keys are text, whatever they were."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise InputError(f"{value!r} is neither text nor a number", hint="put it in quotes")
