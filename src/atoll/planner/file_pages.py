"""The file of a fleet: read, checked and replaced; and the last lines of its instances."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from pydantic import Field

from atoll.control.operation.fleet_file import FileChangedError, FleetFile, name_version
from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.core.errors import InputError
from atoll.core.files import parse_yaml, read_text_limited
from atoll.core.frozen import Frozen
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.problem import Problem
from atoll.planner.fleet_edit import MAX_LETTERS, describe_difference, services_key
from atoll.planner.fleets import FleetEntry
from atoll.planner.planner_service import (
    PlannerRequest,
    PlannerRoute,
    PlanningService,
    json_response,
)
from atoll.planner.source import is_problem_text, refuse_other_files
from atoll.runtime.http.api_route import JSON
from atoll.runtime.http.handlers import Answer, Response
from atoll.runtime.local.weights import STAND_IN_MODEL
from atoll.runtime.openai import ApiError

_PATH = "fleets/{name}/file"
_YAML = "application/yaml"


class NewFile(Frozen):
    """The text that a fleet's file is to have; `version` is that of the file it was made from."""

    file: Annotated[str, Field(min_length=1, max_length=MAX_LETTERS)]
    version: Annotated[str, Field(min_length=1, max_length=64)]


class FileQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which version of a file is meant, and whether it is for download."""

    version: str | None = None
    format: Literal["json", "yaml"] = "json"


class EarlierFile(TypedDict):
    """A version that was replaced, at a Unix time."""

    version: str
    replaced_s: float | None


class ShownFile(TypedDict):
    """The file of a fleet with its services, and whether it can be changed here."""

    fleet: str
    file: str
    version: str
    services: dict[str, Any] | None
    can_change: bool
    earlier: list[EarlierFile]


class ReplacedFile(TypedDict):
    """What was changed in a file, in words, and the version that it has now."""

    fleet: str
    version: str
    changed: str


async def show_file(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with the file of a fleet, or an earlier version of it."""
    entry = await asyncio.to_thread(planner.shelf.find, request.names["name"])
    query = request.read(FileQuery)
    said = await asyncio.to_thread(_describe, entry, query.version)
    if query.format == "yaml":
        ending = ".json" if entry.source.suffix.lower() == ".json" else ".yaml"
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in entry.name)
        attached = f'attachment; filename="{name.removesuffix(ending)}{ending}"'
        headers = (("cache-control", "no-store"), ("content-disposition", attached))
        return Response(said["file"].encode(), 200, _YAML, headers)
    return json_response(said)


async def put_file(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Replace the file of a fleet that is operated; its controller follows it."""
    asked = NewFile.parse(request.object())
    entry = await asyncio.to_thread(planner.shelf.find, request.names["name"])
    return json_response(await asyncio.to_thread(_replace, entry, asked, _who(request)))


def _describe(entry: FleetEntry, version: str | None) -> ShownFile:
    kept = (
        None if entry.home is None or entry.record is None else FleetFile(entry.home, entry.record)
    )
    text = read_text_limited(entry.source)
    if version is not None and version != name_version(text):
        if kept is None:
            raise ApiError(404, "there is no such version", code="not_found")
        text = kept.read_earlier(version)
    earlier = () if kept is None else kept.list_earlier()
    data = None
    if not is_problem_text(entry.source, text):
        data = parse_yaml(text, path=entry.source).data
    services = data.get(services_key(data)) if isinstance(data, dict) else None
    return ShownFile(
        fleet=entry.name,
        file=text,
        version=name_version(text),
        services=services if isinstance(services, dict) else None,
        can_change=entry.record is not None and data is not None,
        earlier=[EarlierFile(version=v.name, replaced_s=v.replaced_s) for v in earlier],
    )


def _replace(entry: FleetEntry, asked: NewFile, who: str) -> ReplacedFile:
    home, record = _need_operated(entry)
    file = FleetFile(home, record)
    before, _ = file.read()
    if is_problem_text(file.path, before):
        raise ApiError(409, "this fleet has no file that can be edited", code="no_fleet_file")
    difference = _check(file, asked.file, before, record)
    try:
        version = file.replace(asked.file, asked.version, time.time())
    except FileChangedError as error:
        raise ApiError(409, str(error), code="changed") from error
    if asked.file != before:
        home.write_down("note", f"{who} has replaced the fleet file: {difference}")
    return ReplacedFile(fleet=entry.name, version=version, changed=difference)


def _check(file: FleetFile, text: str, before: str, record: FleetRecord) -> str:
    """Raise InputError where a text cannot be a fleet's file; return what is another in it."""
    new, old = (parse_yaml(each, path=file.path.name).data for each in (text, before))
    if not isinstance(new, dict):
        raise InputError("this is no fleet file", field="file")
    old = old if isinstance(old, dict) else {}
    refuse_other_files(new, old)
    problem = parse_fleet(text, path=file.path, environ=os.environ)
    if problem.name != record.name:
        raise InputError(
            f"the fleet would be called {problem.name!r}",
            field="file.name",
            hint=f"it is operated as {record.name!r}",
        )
    _check_weights(problem, record)
    return describe_difference(old, new)


def _check_weights(problem: Problem, record: FleetRecord) -> None:
    """Refuse a new service whose weights its controller would not find; `--stand-in` needs none."""
    if any(known.stand_in for known in record.weights.values()):
        return
    catalog = problem.catalog()
    for service in problem.plain_services:
        model = catalog.model(service.model)
        own = model.name.partition("@")[0] == STAND_IN_MODEL
        if service.name not in record.weights and model.checkpoint is None and not own:
            raise InputError(
                f"nobody knows where the weights of {service.model} are",
                field=f"file.services.{service.name}.model",
                hint="name them as `hf_id` of the model under `catalog.models`: ORG/NAME, or a folder",
            )


def _need_operated(entry: FleetEntry) -> tuple[FleetHome, FleetRecord]:
    if entry.home is None or entry.record is None:
        raise ApiError(409, "this fleet is not operated", code="not_operated")
    return entry.home, entry.record


def _who(request: PlannerRequest) -> str:
    """Return who asks, for the history: the name of who is logged in, else the role."""
    return " ".join(request.owner.split())[:120] or f"an {request.role}"


ROUTES = (
    PlannerRoute(
        *("GET", _PATH, "viewer", show_file, "The file of a fleet, and its earlier versions"),
        gives=ShownFile,
        query=FileQuery,
        makes=(JSON, _YAML),
    ),
    PlannerRoute(
        *("PUT", _PATH, "operator", put_file, "Replace the file of an operated fleet"),
        takes=NewFile,
        gives=ReplacedFile,
    ),
)
