"""Source of a fleet: its file as data, which can be changed and written again, and its problem."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.errors import InputError
from atoll.core.files import parse_yaml, read_text_limited
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.files.fleet_schema import FleetSpec
from atoll.plan.files.read import is_problem_data, read_problem
from atoll.plan.problem import Problem
from atoll.planner.fleet_edit import MAX_LETTERS, FleetEdit, edit_text
from atoll.planner.yaml_text import write_yaml

_BUILT_IN_CLASSES = "multimodal"


@dataclass(frozen=True)
class WrittenFleet:
    """A fleet: its problem, and its file as plain data where a file that stands alone can be written of it.

    `data` is None for a problem.json, and for a fleet file that needs others beside it. `written` is the file
    as it is to be written, where it is not for the data alone to say.
    """

    problem: Problem
    data: dict[str, Any] | None = None
    written: str | None = None

    @property
    def file(self) -> FleetSpec:
        """Its file with every value read; only where there is `data`."""
        return FleetSpec.parse(self.data)

    @property
    def text(self) -> str:
        """A file that reads as this fleet."""
        if self.written is not None:
            return self.written
        return write_yaml(self.data) if self.data is not None else _write_problem(self.problem)

    @property
    def file_name(self) -> str:
        """Name of that file; its ending says how it is read."""
        return f"{self.problem.name}{'.json' if self.data is None else '.yaml'}"


def read_source(path: str | os.PathLike[str]) -> WrittenFleet:
    """Read a fleet file or a problem.json."""
    problem = read_problem(path)
    text = read_text_limited(path)
    if is_problem_text(path, text):
        return WrittenFleet(problem)
    data = parse_yaml(text, path=path).data
    return WrittenFleet(problem, _standing_alone(data, problem))


def read_edited(path: str | os.PathLike[str], edit: FleetEdit) -> WrittenFleet:
    """Read a fleet file as it would be with an edit made; its text stays as near to the file as may be."""
    text = read_text_limited(path)
    if is_problem_text(path, text):
        raise InputError(
            "this fleet has no file that can be edited",
            field="edit",
            hint="it was brought up from a problem.json",
        )
    changed = edit_text(text, edit)
    data = parse_yaml(changed, path=Path(path).name).data
    if isinstance(data, dict):
        known = parse_yaml(text, path=Path(path).name).data
        refuse_other_files(data, known if isinstance(known, dict) else {})
    problem = parse_fleet(changed, path=path, environ=os.environ)
    return WrittenFleet(problem, _standing_alone(data, problem), changed)


def is_problem_text(path: str | os.PathLike[str], text: str) -> bool:
    """Whether the file of a path, with this text, is a problem.json."""
    if Path(path).suffix.lower() != ".json":
        return False
    data = json.loads(text)
    return isinstance(data, dict) and is_problem_data(data)


def read_sent(text: str) -> WrittenFleet:
    """Read a fleet file that somebody sent: it must not name other files."""
    if len(text) > MAX_LETTERS:
        raise InputError(f"more than {MAX_LETTERS:,} letters", field="file", hint="send less")
    data = parse_yaml(text, path="fleet.yaml").data
    if isinstance(data, dict):
        refuse_other_files(data, {})
    problem = parse_fleet(text)
    return WrittenFleet(problem, _standing_alone(data, problem))


def read_data(data: dict[str, Any], name: str) -> WrittenFleet:
    """Read a fleet file that was changed."""
    return WrittenFleet(parse_fleet(write_yaml(data), path=f"{name}.yaml"), data)


def _standing_alone(data: object, problem: Problem) -> dict[str, Any] | None:
    """Return the data of a fleet file that needs no other and has its name in it; None where it cannot."""
    if not isinstance(data, dict):
        return None
    found = {("services" if key == "models" else key): value for key, value in data.items()}
    found["name"] = problem.name
    facts = found.get("catalog")
    if problem.overlays and (isinstance(facts, str) or facts is None):
        if len(problem.overlays) > 1:
            return None
        found["catalog"] = problem.overlays[0]
    elif len(problem.overlays) > 1:
        return None
    if isinstance(facts, Mapping):
        found["catalog"] = problem.overlays[0]
    return None if find_other_files(found) else found


def refuse_other_files(sent: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse a fleet file that somebody sent if it names other files than the one that it replaces.

    Whoever may change a fleet may not have any file of this machine read.
    """
    named = find_other_files(known)
    for place, path in find_other_files(sent).items():
        if named.get(place) != path:
            raise InputError(
                "a file that is sent cannot name another one",
                field=f"file.{place}",
                hint="put its content there",
            )


def find_other_files(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the other files that a fleet file names, by the places where it does."""
    found = {name: data.get(name) for name in ("catalog", "running")}
    facts, cluster = data.get("catalog"), data.get("cluster")
    key = "services" if "services" in data else "models"
    services = data.get(key)
    if isinstance(cluster, dict):
        found["cluster.profiles"] = cluster.get("profiles")
    for name, entry in services.items() if isinstance(services, dict) else ():
        named = entry.get("classes") if isinstance(entry, dict) else None
        if named != _BUILT_IN_CLASSES:
            found[f"{key}.{name}.classes"] = named
    described = facts.get("models") if isinstance(facts, dict) else None
    for name, entry in described.items() if isinstance(described, dict) else ():
        if isinstance(entry, dict):
            found[f"catalog.models.{name}.hf_config"] = entry.get("hf_config")
    return {place: named for place, named in found.items() if isinstance(named, str)}


def _write_problem(problem: Problem) -> str:
    return problem.to_json(indent=1) + "\n"
