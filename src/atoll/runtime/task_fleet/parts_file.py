"""A file that names executors and services by hand, for those who have no plan.

services:
  assistant: {}                                   # the tasks that its components can do
executors:
  ears: {components: [moonshine-encoder, moonshine-decoder]}
  mind: {components: [smollm2-vision, smollm2], threads: 2}
  mouth: {components: [hibari], copies: 2}
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from atoll.catalog.document import SchemaDocument
from atoll.components.component_registry import COMPONENTS
from atoll.core.errors import UnknownNameError
from atoll.core.frozen import Frozen
from atoll.runtime.graph_server.graph_config import Endpoint, GraphService
from atoll.runtime.task_fleet.deployment import PlacedExecutor, TaskDeployment
from atoll.runtime.task_fleet.parts import ServedParts, options_over, tasks_over

_MAX_COPIES = 64
Word = Annotated[str, Field(min_length=1, max_length=100, pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*")]


Components = list[str] | dict[str, dict[str, Any]]
"""Components, each with options or just by name."""


def with_options(components: Components) -> dict[str, dict[str, Any]]:
    """Return components with their options, none where they are just named."""
    if isinstance(components, dict):
        return components
    return {name: {} for name in components}


class ExecutorEntry(Frozen):
    """An executor, or several equal ones, and its components."""

    components: Components = Field(min_length=1)
    copies: int = Field(1, ge=1, le=_MAX_COPIES)
    threads: int | None = Field(None, ge=1, le=1024)
    device: str = Field("cpu", pattern=r"cpu|cuda:\d+")

    @property
    def with_options(self) -> dict[str, dict[str, Any]]:
        """The components with their options."""
        return with_options(self.components)


class ServiceTasks(Frozen):
    """A service: the task of each endpoint, as "module:Class".

    Where none is named, the library's for all that the components can do.
    """

    tasks: dict[Endpoint, str] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)


class TasksFile(Frozen):
    """A whole file."""

    services: dict[Word, ServiceTasks] = Field(min_length=1)
    executors: dict[Word, ExecutorEntry] = Field(min_length=1)


class PartsEntry(ServiceTasks):
    """Components for the parts of one service's model."""

    parts: dict[str, Components] = Field(min_length=1)


class PartsFile(Frozen):
    """A file for `--parts`: by service, components of every part, and tasks."""

    services: dict[Word, PartsEntry] = Field(min_length=1)


def read_tasks_file(path: str | os.PathLike[str]) -> TaskDeployment:
    """Read a file; a mistake is an InputError that names its line and what to write instead."""
    document = SchemaDocument(path, TasksFile, "a tasks file")
    content = document.content
    for name, entry in content.executors.items():
        _check_components(document, entry.with_options, "executors", name, "components")
    known = [name for entry in content.executors.values() for name in entry.with_options]
    services = []
    for name, service in content.services.items():
        tasks = _choose_tasks(document, name, service.tasks, known)
        options = options_over(known) | service.options
        services.append(GraphService(name=name, tasks=tasks, options=options))
    executors = [
        PlacedExecutor(
            id=f"{name}-{copy}",
            components=entry.with_options,
            device=entry.device,
            threads=entry.threads,
        )
        for name, entry in content.executors.items()
        for copy in range(entry.copies)
    ]
    return TaskDeployment(tuple(services), tuple(executors))


def _check_components(document: SchemaDocument[Any], names: Iterable[str], *location: str) -> None:
    for name in names:
        if name not in COMPONENTS and ":" not in name:
            raise document.error(
                str(UnknownNameError("component", name, COMPONENTS)),
                *location,
                hint="`atoll tasks list` shows those of the library; your own are MODULE:CLASS",
            )


def _choose_tasks(
    document: SchemaDocument[Any], service: str, named: dict[Endpoint, str], known: list[str]
) -> dict[Endpoint, str]:
    """Return the tasks of a service: those it names, else all that its components can do."""
    tasks = named or tasks_over(known)
    if not tasks:
        raise document.error(
            "none of the library's tasks can be done with these components",
            *("services", service),
            hint="name tasks of your own: tasks: {chat: my.module:MyTask}",
        )
    return tasks


def read_parts_file(path: str | os.PathLike[str]) -> dict[str, ServedParts]:
    """Read what stands for the parts of models, by service."""
    document = SchemaDocument(path, PartsFile, "a parts file")
    found = {}
    for name, entry in document.content.services.items():
        parts = {part: tuple(components) for part, components in entry.parts.items()}
        settings = {
            component: options
            for components in entry.parts.values()
            for component, options in with_options(components).items()
            if options
        }
        for part, components in parts.items():
            _check_components(document, components, "services", name, "parts", part)
        known = [component for names in parts.values() for component in names]
        tasks = _choose_tasks(document, name, entry.tasks, known)
        options = options_over(known) | entry.options
        found[name] = ServedParts(parts=parts, settings=settings, tasks=tasks, options=options)
    return found
