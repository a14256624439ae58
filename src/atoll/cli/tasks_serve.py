"""`atoll tasks serve`: bring executors and services that a file names up on this machine, with a gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from pydantic import Field

from atoll.cli.options import verb
from atoll.cli.progress import live_line
from atoll.cli.serving import (
    StartProgress,
    fetch_components,
    local_fleet,
    need_components,
    need_engine,
    need_serving,
)
from atoll.cli.serving_loop import FleetSettings, check_places, make_teller, serve_until_stopped
from atoll.core.errors import InputError

if TYPE_CHECKING:
    from atoll.runtime.task_fleet.deployment import TaskDeployment


class TasksServeSettings(FleetSettings):
    """What `atoll tasks serve` is told."""

    file: Path = Field(
        description="A file that names services and executors.",
        json_schema_extra={"argument": True},
    )


def add_serve(app: typer.Typer) -> None:
    """Add the verb to its group."""
    verb(app, TasksServeSettings, "serve")(serve_tasks)


def _check_code(deployment: TaskDeployment) -> None:
    """Raise where a task or component of one's own cannot be loaded, before anything is started."""
    from atoll.components.registry import find_component
    from atoll.runtime.front.services import load_task

    if "" not in sys.path:
        sys.path.insert(0, "")  # processes find modules of the current folder, too
    for service in deployment.services:
        for where in service.tasks.values():
            load_task(where, service.options)
    own = {name for one in deployment.executors for name in one.components if ":" in name}
    for name in sorted(own):
        try:
            find_component(name)
        except ImportError as error:
            raise InputError(
                f"{name}: {error}", field="components", hint="name it as MODULE:CLASS"
            ) from error


def serve_tasks(options: TasksServeSettings) -> None:
    """Start the executors that a file names as processes on this machine, and serve its tasks.

    The file says which services there are, which tasks answer for them, and which executors run which
    components; no plan is needed. Ctrl-C finishes what runs and stops everything; a second one stops at once.
    """
    need_serving()
    need_components()
    from atoll.runtime.http.loop import run
    from atoll.runtime.local.build import LocalOptions
    from atoll.runtime.task_fleet.endpoint import uses_engine
    from atoll.runtime.task_fleet.file import read_tasks_file

    deployment = read_tasks_file(options.file)
    if uses_engine(deployment):
        need_engine()
    check_places(options)
    _check_code(deployment)
    fetch_components(deployment)
    tell = make_teller({}, deployment)
    with live_line("starting executors") as say:
        started = StartProgress(say, tell=tell)
        with local_fleet(
            None,
            {},
            LocalOptions(),
            name=options.file.stem,
            host=options.host,
            port=options.port,
            log=options.log,
            on_progress=started,
            tasks=deployment,
        ) as fleet:
            run(serve_until_stopped(fleet, started, options))
