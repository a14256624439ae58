"""The services of a graph server: their tasks, loaded from trusted code that the configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from importlib import import_module
from typing import Any

from atoll.core.errors import InputError
from atoll.runtime.graph_server.answer_shapes import check_answer
from atoll.runtime.graph_server.graph_config import (
    ENDPOINT_PATHS,
    Endpoint,
    ExecutorAddress,
    GraphService,
    modalities,
)
from atoll.runtime.graph_server.path_router import PathRouter
from atoll.tasks.task import Task, unit_tasks


class LoadedService:
    """A service with its tasks ready to be asked."""

    def __init__(self, config: GraphService, executors: Sequence[ExecutorAddress]) -> None:
        self.config = config
        self.name = config.name
        self.tasks: dict[Endpoint, Task[Any, Any]] = {
            endpoint: load_task(where, config.options, endpoint)
            for endpoint, where in config.tasks.items()
        }
        self.components = tuple(
            sorted({name for task in self.tasks.values() for name in components_of(task)})
        )
        self.router = PathRouter(config, executors)

    def over(
        self, config: GraphService, executors: Sequence[ExecutorAddress]
    ) -> LoadedService | None:
        """Return it over other paths and executors; None where its tasks are others now."""
        if config == self.config:
            self.router.use(executors)
            return self
        if (config.tasks, config.options) != (self.config.tasks, self.config.options):
            return None
        again = copy(self)
        again.config, again.router = config, PathRouter(config, executors)
        return again

    def shown(self, created: int) -> dict[str, Any]:
        """Return it as an entry of /v1/models."""
        paths = {endpoint: path for path, endpoint in ENDPOINT_PATHS.items()}
        inputs, outputs = modalities(self.tasks)
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "atoll",
            "modalities": {"input": inputs, "output": outputs},
            "endpoints": [paths[endpoint] for endpoint in self.tasks],
        }


def load_task(where: str, options: dict[str, Any], endpoint: Endpoint) -> Task[Any, Any]:
    """Return the task that "module:Class" names, set up with these options to answer an endpoint."""
    module, sign, name = where.partition(":")
    hint = 'name it as "module:Class", a subclass of atoll.tasks.task.Task'
    if not sign:
        raise InputError(f"{where[:100]!r} names no task", field="tasks", hint=hint)
    try:
        found = getattr(import_module(module), name, None)
    except ImportError as error:
        raise InputError(f"{where[:100]}: {error}", field="tasks", hint=hint) from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise InputError(f"{where[:100]} is no task", field="tasks", hint=hint)
    check_answer(endpoint, found)
    return found(options)


def components_of(task: Task[Any, Any]) -> set[str]:
    """Return the components that a task may ask for."""
    return {unit.component for unit in unit_tasks(task).values()}
