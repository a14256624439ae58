"""Executors of any-to-any models: one process each, for the parts of a model that a plan puts together."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.runtime.adapters.base import RunDirectory
from atoll.runtime.adapters.probes import InstanceProbe
from atoll.runtime.executor.config import ExecutorConfig
from atoll.runtime.supervise.agent import ProcessSpec
from atoll.runtime.supervise.process import Command
from atoll.runtime.supervise.supervision import RestartLimits

_DRAINING = "draining"
"""The code with which an executor that is being stopped answers /health: not its fault."""
_SPARE_S = 5.0
_CALM_S = 10.0
"""One that served so long is started again at once when it ends."""
_LONGEST_PAUSE_S = 5.0
"""Answers that have begun wait for an executor; a front's patience is longer than this and a start."""


def executor_process(
    config: ExecutorConfig,
    home: RunDirectory,
    environment: Mapping[str, str] | None = None,
    *,
    silent_s: float = 8.0,
) -> ProcessSpec:
    """Return the process of an executor, its configuration written to `home`.

    A process silent for `silent_s`, or whose components cannot run their examples, is started anew.
    `environment` says which GPUs it sees.
    """
    command = Command.of_module(
        "atoll.runtime.executor.process",
        ("--config", str(home.write(config.name, config))),
        home.log(config.name),
        environment,
        cpus=config.cpus,
        threads=config.threads,
    )
    host = config.address.rpartition(":")[0]
    probe = InstanceProbe(f"http://{host}:{config.health_port}", _DRAINING, silent_s)
    limits = RestartLimits(
        ready_s=600.0,
        backoff_most_s=_LONGEST_PAUSE_S,
        calm_s=_CALM_S,
        unwell=1,
        term_s=config.drain_s + _SPARE_S,
    )
    return ProcessSpec(config.name, command, probe, limits)
