"""Graph servers of a fleet: processes beside its gateway, before the executors of any-to-any models.

They follow a file in the fleet's home, where the controller writes the paths of the plan in force, and find
executors in the fleet's pool of the fabric. To the gateway each is a backend like others: when one dies its
requests go on at another.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.control.operation.fleet_home import FleetHome
from atoll.core.files import atomic_write, read_text_limited
from atoll.engines.graph_server import ENGINE as GRAPH_SERVER
from atoll.plan.plan import RequestPath
from atoll.runtime.graph_server.graph_config import GraphServerConfig, GraphService, modalities
from atoll.runtime.pool.backend_metadata import MODALITIES, write_modalities
from atoll.runtime.pool.member import STAND_IN
from atoll.runtime.task_fleet.deployment import services_over
from atoll.runtime.task_fleet.parts import ServedParts

NAMES = ("graph-server-0", "graph-server-1")
"""The graph servers of a fleet: none is missed while it is started anew."""
_PATIENCE_S = 50.0
"""How long an invocation waits for an executor: a gateway asks another graph server after a minute."""
_CONFIG = "graph.json"
_TOKEN = "executors.token"  # noqa: S105 - the name of a file
_MAX_CONFIG_BYTES = 16 * 2**20


def graph_config_of(home: FleetHome) -> Path:
    """Return the file that a fleet's graph server follows; it is there if the fleet needs one."""
    return home.folder / _CONFIG


def executors_token_of(home: FleetHome) -> Path:
    """Return the file with what executors and graph servers of a fleet must know."""
    return home.folder / "fabric" / _TOKEN


def write_graph_config(
    home: FleetHome,
    parts: Mapping[str, ServedParts],
    paths: Sequence[RequestPath] | None = None,
) -> None:
    """Have a fleet's graph server answer for these services, over these paths, else those it had.

    Without any-to-any services there is no file. What would be written as it was is left as it is.
    """
    path = graph_config_of(home)
    if not parts:
        path.unlink(missing_ok=True)
        return
    token = executors_token_of(home)
    if not token.exists():
        token.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    services = services_over(parts, paths or ())
    if paths is None and path.exists():
        before = {each.name: each.paths for each in read_graph_config(home).services}
        services = tuple(
            each.model_copy(update={"paths": before.get(each.name, ())}) for each in services
        )
    text = make_graph_config(services, str(token)).to_json() + "\n"
    if not path.exists() or read_text_limited(path, _MAX_CONFIG_BYTES) != text:
        atomic_write(path, text)


def make_graph_config(services: Sequence[GraphService], token_file: str) -> GraphServerConfig:
    """Return what a graph server of a fleet answers for; `token_file` has the token of its executors."""
    # Name, port and store are those of the process that reads it.
    return GraphServerConfig(
        name=NAMES[0],
        port=0,
        services=tuple(services),
        store=".",
        token_file=token_file,
        patience_s=_PATIENCE_S,
    )


def read_graph_config(home: FleetHome) -> GraphServerConfig:
    """Return what a fleet's graph server answers for."""
    path = graph_config_of(home)
    return GraphServerConfig.from_json(read_text_limited(path, _MAX_CONFIG_BYTES), path=path)


def graph_backend(config: GraphServerConfig, name: str, port: int) -> dict[str, object]:
    """Return a graph server as a backend in the settings of a gateway."""
    stand_ins = "; ".join(each.stand_in for each in config.services if each.stand_in)
    said = write_modalities({each.name: modalities(each.tasks) for each in config.services})
    return {
        "id": name,
        "url": f"http://127.0.0.1:{port}",
        "models": [service.name for service in config.services],
        "kind": GRAPH_SERVER.kind,
        "max_inflight": config.max_requests,
        "metadata": {MODALITIES: said} | ({STAND_IN: stand_ins} if stand_ins else {}),
    }
