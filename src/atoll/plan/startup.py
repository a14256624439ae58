"""Time from ordering an instance to its first request: machine, engine, weights.

The engine's own part was measured (`StartTime`); machines that are owned find what an earlier start compiled
(`atoll.runtime.endpoints.compile_cache`), rented ones come without. Beside it, a rented machine has to come
up, and weights are read from its disk. `settings.startup` of a fleet file counts instead of all that.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from atoll.engines.table import find_engine
from atoll.plan.problem import Problem

if TYPE_CHECKING:
    from atoll.catalog.transformer import TransformerSpec
    from atoll.plan.plan import Instance

RENTED_S = 100.0
"""Seconds until a rented machine runs a command: an assumption, with which an 8B model in 16 bits on vLLM is
ready after the four minutes that virtual time took for every model before."""
READ_BYTES_PER_S = 1e9
"""Rate at which weights are read: an assumption, about that of a network volume; local NVMe is faster."""


class StartupTimes:
    """Start-up times of the instances that a problem's plans may have."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def of(self, instance: Instance) -> float:
        """Return the seconds that an instance takes."""
        settings = self._problem.settings
        if settings.startup_s is not None:
            return settings.startup_s
        rented = any(node.market != "owned" for node in instance.nodes)
        spec = self._specs.get(instance.service)
        layers = max(node.end - node.start for node in instance.nodes)
        share = 1.0 if spec is None else layers / spec.layers
        return self._seconds(instance.engine or settings.engine, spec, share, rented=rented)

    @cached_property
    def longest_s(self) -> float:
        """The longest that an instance takes: on one node, by the slowest engine, rented if any may be."""
        settings = self._problem.settings
        if settings.startup_s is not None:
            return settings.startup_s
        rented = any(offer.market != "owned" for offer in self._problem.offers)
        engines = settings.engines or (settings.engine,)
        return max(
            self._seconds(engine, self._specs.get(service.name), 1.0, rented=rented)
            for engine in engines
            for service in self._problem.services
        )

    @cached_property
    def _specs(self) -> dict[str, TransformerSpec]:
        catalog = self._problem.catalog()
        return {
            service.name: catalog.model(service.model).llm
            for service in self._problem.services
            if not service.is_graph
        }

    def _seconds(
        self, engine: str, spec: TransformerSpec | None, share: float, *, rented: bool
    ) -> float:
        start = find_engine(engine).start
        own_s = start.cold_s if rented or start.kept_s is None else start.kept_s
        read_s = 0.0 if spec is None else share * spec.weight_bytes / READ_BYTES_PER_S
        return own_s + read_s + (RENTED_S if rented else 0.0)
