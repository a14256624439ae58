"""Start orders: what the nodes of a new instance run, for the target it stands on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from atoll.control.decision.decide import StartInstance
from atoll.control.operation.targets import TargetMap
from atoll.core.errors import AtollError
from atoll.deploy.commands.node_commands import (
    CommandSettings,
    InstanceRecipe,
    ServiceWeights,
    executor_command,
    share_of,
)
from atoll.deploy.labels import Labels
from atoll.deploy.target import DeployError, StartOrder
from atoll.deploy.target_table import TargetSettings
from atoll.plan.engine_layout import launch_of
from atoll.plan.plan import Instance, Plan
from atoll.runtime.task_fleet.parts import ServedParts

_KV_BYTES = 128 * 2**20
"""KV cache of a process on cores."""


def command_settings(
    settings: TargetSettings,
    token: str | None,
    *,
    hub_token: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    drain_s: float = 600.0,
    ready_s: float = 1800.0,
    executors: str | None = None,
) -> dict[str, CommandSettings]:
    """Return what commands depend on, by target.

    `token` is the file that instances join the fabric with, `executors` that with the token of executors.
    """
    found: dict[str, CommandSettings] = {}
    for name in settings.names:
        target = settings.section(name)
        programs = target.programs()
        if device == "cpu" or (device is None and target.pretends):
            programs |= {"device": "cpu", "dtype": "float32", "kv_bytes": _KV_BYTES}
        # Where processes of one machine pretend to be several, none of them has the machine for itself.
        programs["alone"] = not target.pretends
        found[name] = CommandSettings(
            fabric=token,
            hub_token=hub_token,
            drain_s=drain_s,
            ready_s=ready_s,
            executors=executors,
            **programs,  # type: ignore[arg-type]
        )
    return found


class OrderMaker:
    """Makes the order of an instance; every refusal is a DeployError, which the controller backs off from."""

    def __init__(
        self,
        targets: TargetMap,
        weights: Mapping[str, ServiceWeights],
        settings: Mapping[str, CommandSettings],
        parts: Mapping[str, ServedParts] = MappingProxyType({}),
    ) -> None:
        self._targets, self._weights, self._settings = targets, weights, settings
        self._parts = parts

    def __call__(self, action: StartInstance, plan: Plan) -> StartOrder:
        """Return the order of an instance that a plan asks for."""
        return self.make(action.instance, action.labels, plan)

    def make(self, instance: Instance, labels: Labels, plan: Plan) -> StartOrder:
        """Return the order of an instance under its labels."""
        settings = self._settings[self._targets.of_instance(instance)]
        try:
            if instance.is_executor:
                command = executor_command(
                    instance, self._components(instance), settings, labels=labels
                )
                return StartOrder(instance, labels, (command,), ready_s=settings.ready_s)
            recipe = self._recipe(instance, labels, plan)
            return StartOrder(
                *(instance, labels, recipe.commands(settings)),
                ready_s=settings.ready_s,
                recipe=recipe,
            )
        except DeployError:
            raise
        except AtollError as error:
            raise DeployError(error.message, kind="settings", hint=error.hint) from error

    def _components(self, instance: Instance) -> Mapping[str, ServedParts]:
        missing = [name for name in instance.services if name not in self._parts]
        if missing:
            raise DeployError(
                f"nothing is known to run the parts of {missing[0]}",
                kind="settings",
                hint="name components for them with `parts` FILE",
            )
        return self._parts

    def _recipe(self, instance: Instance, labels: Labels, plan: Plan) -> InstanceRecipe:
        weights = self._weights.get(instance.service)
        if weights is None:
            raise DeployError(
                f"no weights are known for {instance.service}",
                kind="settings",
                hint=f"name them with `models` {instance.service}=SOURCE",
            )
        return InstanceRecipe(
            instance,
            weights,
            labels,
            launch=launch_of(plan, instance),
            weight=share_of(plan, instance),
        )
