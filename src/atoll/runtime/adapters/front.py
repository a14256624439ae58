"""A front of tasks over executors: one process that answers all endpoints of its services."""

from __future__ import annotations

from atoll.core.errors import InputError
from atoll.runtime.adapters.base import Endpoint, MachineShare, RunDirectory
from atoll.runtime.adapters.probes import InstanceProbe
from atoll.runtime.front.config import EXECUTORS_MISSING, FrontConfig, modalities
from atoll.runtime.pool.member import Backend
from atoll.runtime.pool.modalities import MODALITIES, write_modalities
from atoll.runtime.supervise.agent import ProcessSpec
from atoll.runtime.supervise.process import Command
from atoll.runtime.supervise.supervision import RestartLimits

_LIMITS = RestartLimits(ready_s=660.0, unwell=3, term_s=30.0)
_SILENT_S = 10.0
"""How long a front may take to say how it is before it is started anew. It is ready after its executors."""


def front_endpoint(
    config: FrontConfig,
    home: RunDirectory,
    share: MachineShare | None = None,
    *,
    weight: float = 1.0,
) -> Endpoint:
    """Return the process of a front, and the backend that it is to a gateway.

    It is ready when every component that its tasks need has an executor, and is not blamed for one that is
    missing later. Its port must be known before it starts.
    """
    if config.port == 0:
        raise InputError(
            f"{config.name} has no port", field="port", hint="give it one that gateways can know"
        )
    part = share or MachineShare()
    url = f"http://{config.host}:{config.port}"
    server = ProcessSpec(
        config.name,
        Command.of_module(
            "atoll.runtime.front.process",
            ("--config", str(home.write(config.name, config))),
            home.log(config.name),
            cpus=part.cpus.get(config.name, ()),
            threads=part.threads(config.name),
        ),
        InstanceProbe(url, EXECUTORS_MISSING, _SILENT_S),
        _LIMITS,
    )
    backend = Backend(
        id=config.name,
        url=url,
        models=tuple(service.name for service in config.services),
        weight=weight,
        kind="tasks",
        max_inflight=config.most_requests,
        metadata={
            MODALITIES: write_modalities({s.name: modalities(s.tasks) for s in config.services})
        },
    )
    return Endpoint(backend, (config.name,), server=server)
