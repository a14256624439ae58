"""Source of a fleet: its file as data, which can be changed and written again, and its problem."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from atoll.core.errors import InputError
from atoll.core.files import parse_yaml, read_text_limited
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.files.fleet_schema import FleetSpec
from atoll.plan.files.read import is_problem_data, read_problem
from atoll.plan.problem import Problem

MAX_LETTERS = 1_000_000
"""Of a fleet file that somebody sends."""
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./@%-]*")
_WORDS = frozenset(("null", "true", "false", "yes", "no", "on", "off", "y", "n", "nan", "inf"))
_BUILT_IN_CLASSES = "multimodal"


@dataclass(frozen=True)
class WrittenFleet:
    """A fleet: its problem, and its file as plain data where a file that stands alone can be written of it.

    `data` is None for a problem.json, and for a fleet file that needs others beside it.
    """

    problem: Problem
    data: dict[str, Any] | None = None

    @property
    def file(self) -> FleetSpec:
        """Its file with every value read; only where there is `data`."""
        return FleetSpec.parse(self.data)

    @property
    def text(self) -> str:
        """A file that reads as this fleet."""
        return write_yaml(self.data) if self.data is not None else _write_problem(self.problem)

    @property
    def file_name(self) -> str:
        """Name of that file; its ending says how it is read."""
        return f"{self.problem.name}{'.json' if self.data is None else '.yaml'}"


def read_source(path: str | os.PathLike[str]) -> WrittenFleet:
    """Read a fleet file or a problem.json."""
    problem = read_problem(path)
    if Path(path).suffix.lower() == ".json":
        data = json.loads(read_text_limited(path))
        if isinstance(data, dict) and is_problem_data(data):
            return WrittenFleet(problem)
    data = parse_yaml(read_text_limited(path), path=path).data
    return WrittenFleet(problem, _standing_alone(data, problem))


def read_sent(text: str) -> WrittenFleet:
    """Read a fleet file that somebody sent: it must not name other files."""
    if len(text) > MAX_LETTERS:
        raise InputError(f"more than {MAX_LETTERS:,} letters", field="file", hint="send less")
    data = parse_yaml(text, path="fleet.yaml").data
    if isinstance(data, dict):
        for place in _other_files(data):
            raise InputError(
                "a file that is sent cannot name another one",
                field=f"file.{place}",
                hint="put its content there",
            )
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
    return None if list(_other_files(found)) else found


def _other_files(data: Mapping[str, Any]) -> list[str]:
    """Return the places of a fleet file that name other files."""
    places = [name for name in ("catalog", "running") if isinstance(data.get(name), str)]
    facts, cluster = data.get("catalog"), data.get("cluster")
    key = "services" if "services" in data else "models"
    services = data.get(key)
    if isinstance(cluster, dict) and isinstance(cluster.get("profiles"), str):
        places.append("cluster.profiles")
    for name, entry in services.items() if isinstance(services, dict) else ():
        named = entry.get("classes") if isinstance(entry, dict) else None
        if isinstance(named, str) and named != _BUILT_IN_CLASSES:
            places.append(f"{key}.{name}.classes")
    described = facts.get("models") if isinstance(facts, dict) else None
    for name, entry in described.items() if isinstance(described, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("hf_config"), str):
            places.append(f"catalog.models.{name}.hf_config")
    return places


def _write_problem(problem: Problem) -> str:
    return problem.to_json(indent=1) + "\n"


class _Dumper(yaml.SafeDumper):
    """Writes YAML that reads the same by the 1.1 and the 1.2 schema: text is quoted unless it is a name."""

    def ignore_aliases(self, data: object) -> bool:
        """Write equal values as often as they are there."""
        del data
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    bare = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if bare else '"')


_Dumper.add_representer(str, _represent_text)


def write_yaml(data: object) -> str:
    """Return plain data as the text of a YAML file."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
