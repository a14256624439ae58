"""Configuration of an instance process: its nodes, the flows between them, and where to listen."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen
from atoll.core.ids import Phase
from atoll.plan.name_types import refuse
from atoll.plan.plan import Instance, Route

NODES_MISSING = "nodes_missing"
"""Code of the error with which /health says that nodes are silent."""


class InstancePart(Frozen):
    """An instance of the plan and the inboxes of its nodes, by node id.

    Where prompts and answers have instances of their own, an endpoint has several parts.
    """

    instance: Instance
    inboxes: dict[str, str]

    @model_validator(mode="after")
    def _every_node_has_one(self) -> Self:
        for node in self.instance.nodes:
            if node.id not in self.inboxes:
                message = f"no inbox for node {node.id} of {self.instance.id}"
                raise refuse(InputError(message, hint="give one for every node"))
        return self

    def node_name(self, node: str) -> str:
        """Return what the engine calls a node of this part."""
        return engine_name(self.instance.id, node)


class InstanceHelpers(Frozen):
    """Prefill instances that compute prompts for a decode instance just now; they come and go."""

    parts: tuple[InstancePart, ...] = ()


class InstanceConfig(Frozen):
    """One endpoint of the stage engine.

    model: the source of the weights, for tokenizer and chat template (see `atoll.engine.weights`).
    models: the names requests may ask for. routes: the ways over the parts, with their shares; where there
    is one part, it is the way. scheduler: the inbox nodes answer to. policy: see
    `atoll.routing.policies`. max_waiting: requests that may wait before more are answered with 503.
    request_s: the longest a request may take. dead_after_s: silence after which a node is given up.
    helpers: a file with `InstanceHelpers` that is followed; the part runs both phases where there are none.
    """

    name: str = Field(min_length=1)
    model: str
    models: tuple[str, ...] = Field(min_length=1)
    parts: tuple[InstancePart, ...] = Field(min_length=1)
    routes: tuple[Route, ...] = ()
    host: str = "127.0.0.1"
    port: int = Field(ge=0, le=65535)
    scheduler: str = "tcp://127.0.0.1:*"
    policy: str = "iwrr"
    max_waiting: int = Field(1024, ge=1)
    request_s: float = Field(600.0, gt=0)
    dead_after_s: float = Field(2.0, gt=0)
    no_route_s: float = Field(60.0, gt=0)
    seed: int = 0
    helpers: str | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @model_validator(mode="after")
    def _phases_fit(self) -> Self:
        phases = {part.instance.phase for part in self.parts}
        helped = self.helpers is not None and phases == {Phase.DECODE}
        if not helped and phases not in ({Phase.BOTH}, {Phase.PREFILL, Phase.DECODE}):
            listed = ", ".join(sorted(phases))
            raise refuse(
                InputError(
                    f"parts for {listed}",
                    hint="give parts for both phases together, or for prefill and for decode",
                )
            )
        return self

    @model_validator(mode="after")
    def _routes_lead_over_parts(self) -> Self:
        if not self.routes and len(self.parts) > 1:
            message = f"{len(self.parts)} parts and no routes"
            raise refuse(InputError(message, hint="give a route for each way over the parts"))
        phases = {part.instance.id: part.instance.phase for part in self.parts}
        for route in self.routes:
            whole = len(route.instances) == 1
            wanted = (Phase.BOTH,) if whole else (Phase.PREFILL, Phase.DECODE)
            if tuple(phases.get(name) for name in route.instances) != wanted:
                message = f"a route over {', '.join(route.instances)}"
                hint = (
                    "a route is one part for both phases, or one for prefill, then one for decode"
                )
                raise refuse(InputError(message, hint=hint))
        return self

    @property
    def ways(self) -> tuple[Route, ...]:
        """The routes; over the only part where none are given."""
        if self.routes:
            return self.routes
        only = self.parts[0].instance
        return (Route(service=only.service, instances=(only.id,), share=1.0),)


def engine_name(instance: str, node: str) -> str:
    """Return what the engine calls a node of an instance."""
    return f"{instance}/{node}"
