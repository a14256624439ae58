"""What `plan`, `explain` and `templates` share: reading the problem, templates and progress on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import InputError, MissingDependencyError, UsageError
from atoll.report.terminal import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.templates.library import Libraries

SERVICES = "services"
"""The key that tells a problem.json from a fleet file written as JSON."""


def need_solvers() -> None:
    """Say which extra to install where the packages that plan are missing."""
    for package in ("numba", "highspy"):
        if find_spec(package) is None:
            raise MissingDependencyError(package, "plan", needed_for="planning")


def read_problem(
    path: Path, *, overlays: Sequence[Path] | None = None, running: Path | None = None
) -> Problem:
    """Read a fleet file or a problem.json; `running` is a plan whose instances run now."""
    from atoll.core.files import read_text_limited
    from atoll.plan.problem import Problem

    data = json_object(path)
    if data is not None and SERVICES in data:
        if overlays:
            raise UsageError(f"{path} carries its own facts", hint="leave --overlay away")
        problem = Problem.from_json(read_text_limited(path), path=path)
    else:
        from atoll.plan.files.fleet import load_fleet

        problem = load_fleet(path, overlays=overlays or ())
    if running is None:
        return problem
    return problem.changed(running=read_plan(running).instances)


def read_plan(path: Path) -> Plan:
    """Read a plan.json."""
    from atoll.core.files import read_text_limited
    from atoll.plan.plan import Plan

    return Plan.from_json(read_text_limited(path), path=path)


def json_object(path: Path) -> dict[str, object] | None:
    """Return the content of a .json file if it is an object; whatever is wrong with it is said elsewhere."""
    if path.suffix.lower() != ".json":
        return None
    from atoll.core.files import read_text_limited

    try:
        data = json.loads(read_text_limited(path))
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def parse_share(text: str, *, field: str) -> float:
    """Read "0.1%" or 0.001 as a share of 0 to 1."""
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if rest or not 0 <= value <= 1:
        raise InputError(
            f"cannot read {text!r} as a share", field=field, hint="write it like 0.1% or 0.001"
        )
    return value


def template_libraries(problem: Problem, catalog: Catalog, *, cached: bool = True) -> Libraries:
    """Return the templates of every role, with a bar on stderr while they are computed."""
    from atoll.solve.templates.cache import TemplateCache
    from atoll.solve.templates.library import libraries

    roles = [str(role) for role in problem.roles]
    with bar("templates", len(roles)) as step:

        def progress(role: str, done: int, total: int) -> None:
            at = roles.index(role)
            name = role if done < total or at + 1 == len(roles) else roles[at + 1]
            step(at + done / max(1, total), name)

        step(0, roles[0])
        return libraries(
            problem, catalog, cache=TemplateCache() if cached else None, progress=progress
        )


Step = Callable[[float, str], None]


@contextmanager
def bar(title: str, total: float) -> Iterator[Step]:
    """Draw a bar on stderr while something long runs; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _what: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}", markup=False),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(title, total=total, what="")
        yield lambda done, what: drawn.update(
            task, completed=done, what=what, total=max(total, done)
        )


@contextmanager
def live_line(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line on stderr that changes while something runs; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.text import Text

    out = console(stderr=True)
    with out.status(Text(text), spinner="dots") as status:
        yield lambda changed: status.update(Text(changed))
