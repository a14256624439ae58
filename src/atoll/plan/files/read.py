"""Files as people name them: a fleet file, a problem.json or a plan.json, told apart by what is in them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from atoll.core.errors import AtollError, InputError, UsageError
from atoll.core.files import read_text_limited
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem

_PROBLEM_HASH = "problem_hash"
"""The key that tells a plan.json from both."""


def read_problem(
    path: str | os.PathLike[str],
    *,
    overlays: Iterable[str | os.PathLike[str]] = (),
    running: str | os.PathLike[str] | None = None,
) -> Problem:
    """Read a fleet file or a problem.json; `running` is a plan.json whose instances run now."""
    data = _json_object(path)
    overlay_paths = tuple(overlays)
    if data is not None and is_plan_data(data):
        raise UsageError(
            f"{path} is a plan, not a fleet file", hint="name the fleet file that it was made for"
        )
    if data is not None and is_problem_data(data):
        if overlay_paths:
            raise UsageError(f"{path} carries its own facts", hint="leave out --overlay")
        problem = Problem.from_json(read_text_limited(path), path=path)
    else:
        from atoll.plan.files.fleet_file import load_fleet

        problem = load_fleet(path, overlays=overlay_paths)
    if running is None:
        return problem
    return problem.replace(running=read_plan(running).instances)


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan.json."""
    if Path(path).suffix.lower() in (".yaml", ".yml"):
        hint = f"make one with `atoll plan {path} -o plan.json`"
        raise InputError("this is no plan", path=path, hint=hint)
    return Plan.from_json(read_text_limited(path), path=path)


def read_placement(path: str | os.PathLike[str], problem: Problem) -> dict[str, tuple[int, int]]:
    """Read layers [start, end) by machine of a cluster from a plan.json or a placement of Helix's (.ini)."""
    if problem.cluster is None:
        raise UsageError("--known is for fixed clusters", hint="leave it out", field="known")
    machines = [node.name for node in problem.cluster.nodes]
    if Path(path).suffix.lower() == ".ini":
        from atoll.plan.files.helix import read_solution

        # Helix numbers machines; names of an imported cluster sort as their numbers do.
        ranges = read_solution(Path(path), len(machines))
        return {name: held for name, held in zip(sorted(machines), ranges, strict=True) if held[1]}
    known: dict[str, tuple[int, int]] = {}
    for node in (node for instance in read_plan(path).instances for node in instance.nodes):
        if node.host not in machines:
            hint = "name a plan for the same cluster"
            raise InputError(
                f"{node.host or node.node_type} is no machine here", path=path, hint=hint
            )
        if node.gpu_ids is not None:
            hint = "name a plan of whole machines"
            raise InputError(f"it cuts machine {node.host}", path=path, hint=hint)
        known[str(node.host)] = (node.start, node.end)
    return known


def find_fleet_file(plan: Plan, path: str | os.PathLike[str]) -> Path | None:
    """Return the fleet file that a plan (read from `path`) was made for, if it is beside it.

    It has the fleet's name, and the plan is of its problem, or at least of all its services and their models.
    """
    for ending in (".yaml", ".yml"):
        beside = Path(path).parent / f"{Path(plan.problem_name).name}{ending}"
        try:
            problem = read_problem(beside)
        except (AtollError, OSError):
            continue
        own = {service.name: service.model for service in problem.services}
        if problem.content_hash() == plan.problem_hash or own == plan.models:
            return beside
    return None


def is_plan(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a plan.json rather than a fleet file or a problem.json."""
    data = _json_object(path)
    return data is not None and is_plan_data(data)


def is_plan_data(data: Mapping[str, object]) -> bool:
    """Return whether the content of a JSON file is that of a plan.json."""
    return _PROBLEM_HASH in data and "services" not in data


def is_problem_data(data: Mapping[str, object]) -> bool:
    """Return whether the content of a JSON file is that of a problem.json: a list of services.

    A fleet file maps names to services.
    """
    return "services" in data and not isinstance(data["services"], Mapping)


def _json_object(path: str | os.PathLike[str]) -> dict[str, object] | None:
    """Return the content of a .json file if it is an object; its reader reports what is wrong with it."""
    if Path(path).suffix.lower() != ".json":
        return None
    try:
        data = json.loads(read_text_limited(path))
    except ValueError:
        return None
    return data if isinstance(data, dict) else None
