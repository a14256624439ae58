"""Models to deploy: those of the catalog, and others by a name of the Hugging Face hub or a folder."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

from pydantic import Field

from atoll.catalog.catalog import Catalog
from atoll.catalog.hf_config import model_from_config
from atoll.catalog.load import load_catalog
from atoll.catalog.models import ModelSpec
from atoll.core.errors import InputError, MissingDependencyError, UnknownNameError, shorten
from atoll.core.files import read_text_limited
from atoll.core.frozen import Frozen
from atoll.planner.planner_service import (
    PlannerRequest,
    PlannerRoute,
    PlanningService,
    json_response,
)
from atoll.runtime.http.handlers import Answer

_MAX_CONFIG_BYTES = 2**20
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_NOT_IN_NAMES = re.compile(r"[^a-z0-9._-]+")


class ModelAsk(Frozen):
    """A model that is looked for: a name of the catalog, `ORG/NAME` of the hub, or a folder here."""

    source: Annotated[str, Field(min_length=1, max_length=1024)]


class DescribedModel(TypedDict):
    """A model; sizes in parameters, bytes and tokens."""

    name: str
    hf_id: str | None
    params: int | None
    active_params: int | None
    weight_bytes: float | None
    context: int | None
    kinds: list[str]
    is_text: bool
    precisions: list[str]
    has_weights: bool


class CatalogModels(TypedDict):
    """The models of the catalog."""

    models: list[DescribedModel]


class FoundModel(DescribedModel):
    """A model, and what a fleet file must say of it under `catalog.models`; null where nothing."""

    entry: dict[str, Any] | None


async def show_models(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with the models of the catalog."""
    del planner, request
    return json_response(CatalogModels(models=await asyncio.to_thread(_list_models)))


async def find_model(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with a model, and with what a fleet file must say of one that the catalog does not know."""
    del planner
    ask = ModelAsk.parse(request.object())
    return json_response(await asyncio.to_thread(_find_model, ask.source.strip()))


def _list_models() -> list[DescribedModel]:
    return [_describe(model) for model in load_catalog(()).models.values()]


def _find_model(source: str) -> FoundModel:
    catalog = load_catalog(())
    name = source.removeprefix("hf://")
    try:
        return FoundModel(**_describe(catalog.model(name)), entry=None)
    except UnknownNameError:
        if not source.startswith("/") and not _HUB_NAME.fullmatch(name):
            raise
    config = _read_folder(source) if source.startswith("/") else _read_hub(name)
    called = _name(name, catalog)
    model = model_from_config(config, called)
    hf_id = name.rstrip("/")
    found = FoundModel(**_describe(model), entry={"hf_config": dict(config), "hf_id": hf_id})
    found["hf_id"], found["has_weights"] = hf_id, True
    return found


def _name(source: str, catalog: Catalog) -> str:
    """Return a name that the catalog does not have."""
    last = source.rstrip("/").rpartition("/")[2].lower()
    name = _NOT_IN_NAMES.sub("-", last).strip("-.")[:80] or "model"
    return f"{name}-own" if name in catalog.models else name


def _read_folder(source: str) -> Mapping[str, Any]:
    path = Path(source) / "config.json"
    try:
        found = json.loads(read_text_limited(path, _MAX_CONFIG_BYTES))
    except ValueError as error:
        raise InputError("this is no JSON", path=path, field="source") from error
    except InputError as error:
        raise InputError(
            f"{source} has no config.json that can be read",
            field="source",
            hint="name a folder of weights as Hugging Face writes them",
        ) from error
    return _check(found)


def _read_hub(name: str) -> Mapping[str, Any]:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise MissingDependencyError("huggingface_hub", "engine", needed_for=name) from error
    try:
        path = hf_hub_download(name, "config.json")
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot ask the hub of {name}: {shorten(' '.join(str(error).split()), 160)}",
            field="source",
            hint="check the name and the network, or name a folder",
        ) from error
    return _check(json.loads(read_text_limited(path, _MAX_CONFIG_BYTES)))


def _check(found: object) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise InputError("its config.json is no object", field="source")
    return found


def _describe(model: ModelSpec) -> DescribedModel:
    kinds = sorted({str(component.kind) for component in model.graph.components})
    return DescribedModel(
        name=model.name,
        hf_id=model.hf_id,
        params=model.total_params,
        active_params=model.active_params,
        weight_bytes=model.weight_bytes,
        context=model.llm.max_context if model.has_llm else None,
        kinds=kinds,
        is_text=kinds == ["llm"],
        precisions=sorted(model.checkpoints),
        has_weights=model.checkpoint is not None,
    )


ROUTES = (
    PlannerRoute(
        *("GET", "catalog/models", "viewer", show_models, "Models of the catalog"),
        gives=CatalogModels,
    ),
    PlannerRoute(
        *("POST", "catalog/models", "operator", find_model),
        "A model of the catalog, of the Hugging Face hub or in a folder",
        takes=ModelAsk,
        gives=FoundModel,
    ),
)
