"""`atoll tasks serve`: bring executors and services that a file names up on this machine, with a gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli.operating import TerminalListener
from atoll.cli.options import verb
from atoll.cli.progress import live_line
from atoll.cli.serving_loop import FleetSettings, check_places, make_teller, serve_until_stopped
from atoll.core.errors import InputError
from atoll.core.extras import require_extras
from atoll.core.options import option

if TYPE_CHECKING:
    from atoll.runtime.task_fleet.deployment import TaskDeployment


class TasksServeSettings(FleetSettings):
    """Options of `atoll tasks serve`."""

    file: Path = option(..., "A file that names services and executors.", argument=True)


def add_serve(app: typer.Typer) -> None:
    """Add the verb to its group."""
    verb(app, TasksServeSettings, "serve")(serve_tasks)


def _check_code(deployment: TaskDeployment) -> None:
    """Raise where a task or component of one's own cannot be loaded, before anything is started."""
    from atoll.components.component_registry import find_component
    from atoll.runtime.graph_server.graph_services import load_task

    if "" not in sys.path:
        sys.path.insert(0, "")  # processes find modules of the current folder, too
    for service in deployment.services:
        for endpoint, where in service.tasks.items():
            load_task(where, service.options, endpoint)
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
    require_extras("serve", "components")
    from atoll.runtime.http.program import run
    from atoll.runtime.local.local_endpoints import LocalOptions
    from atoll.runtime.local.serving import ServingRun, StartProgress, fetch_components, local_fleet
    from atoll.runtime.task_fleet.parts_file import read_tasks_file
    from atoll.runtime.task_fleet.task_endpoint import uses_engine

    deployment = read_tasks_file(options.file)
    if uses_engine(deployment):
        require_extras("engine")
    check_places(options)
    _check_code(deployment)
    fetch_components(deployment, TerminalListener(yes=True))
    tell = make_teller([f"{name}: {text}" for name, text in deployment.stand_ins.items()])
    with live_line("starting executors") as say:
        started = StartProgress(say, tell)
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
            gateway=options.gateway_settings,
        ) as fleet:
            run(serve_until_stopped(ServingRun(fleet, options.drain), started, options))
