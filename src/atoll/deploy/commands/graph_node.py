"""A graph server of a fleet: it follows which executors there are, and what its services and paths are.

    python -m atoll.deploy.commands.graph_node --fleet lab --name graph-server-0 --config FILE --port 8000

Executors are those that say in the fleet's pool that they are there (`executor_node`). The file is a
`GraphServerConfig` without executors, read again whenever it has changed: who operates the fleet writes the
plan's paths there. Any number of graph servers may follow one file, each under its own name: executors keep
arrays for each of them. SIGTERM finishes what runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from atoll.core.errors import AtollError, InputError
from atoll.core.files import read_text_limited
from atoll.deploy.commands.executor_node import ExecutorOffer, pool_of
from atoll.deploy.commands.meeting import (
    FabricMeeting,
    MeetingPlace,
    MemberAddress,
    PoolMember,
    open_meeting,
    own_address,
)
from atoll.runtime.graph_server.graph_config import (
    ExecutorAddress,
    GraphServerConfig,
    GraphService,
)

_LOG = logging.getLogger("atoll.graph_server")
_FOLLOW_S = 0.25
_DRAIN_S = 20.0
_MAX_CONFIG_BYTES = 16 * 2**20


class ChangingServer(Protocol):
    """Whoever answers with services over executors, both of which may change."""

    def change(
        self, services: Sequence[GraphService], executors: Sequence[ExecutorAddress]
    ) -> None:
        """Have requests from now on answered by these services over these executors."""
        ...


def list_executors(found: Iterable[PoolMember]) -> tuple[ExecutorAddress, ...]:
    """Return the executors of a pool, by name; what does not read as one is left out.

    Of two that say the same name the last one counts: it was started anew, and the other is about to be gone.
    """
    known: dict[str, ExecutorAddress] = {}
    for member in found:
        try:
            offer = ExecutorOffer.from_json(member.text)
        except InputError:
            continue
        host, port = member.address.host, member.address.ports[0]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        known[offer.id] = ExecutorAddress(id=offer.id, address=address, components=offer.runs)
    return tuple(known[name] for name in sorted(known))


class FleetFollower:
    """Keeps a graph server at what its file and its pool say."""

    def __init__(self, server: ChangingServer, place: MeetingPlace, pool: str, path: Path) -> None:
        self._server, self._place, self._pool, self._path = server, place, pool, path
        self._seen: tuple[int, int] | None = None
        self._services: tuple[GraphService, ...] = ()
        self._told: tuple[tuple[GraphService, ...], tuple[ExecutorAddress, ...]] | None = None

    async def look(self) -> None:
        """Take in what has changed; a file that cannot be read changes nothing, which is said once."""
        try:
            status = self._path.stat()
            seen = status.st_mtime_ns, status.st_ino
            if seen != self._seen:
                self._seen = seen
                self._services = read_graph_config(self._path).services
        except (AtollError, OSError) as error:
            _LOG.warning("%s is not read again: %s", self._path, error)
        now = self._services, list_executors(await self._place.helpers(self._pool))
        if now == self._told or not self._services:
            return
        try:
            self._server.change(*now)
        except AtollError as error:
            _LOG.warning("the services of %s cannot stand: %s", self._path, error)
        self._told = now

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_FOLLOW_S)


def read_graph_config(path: Path) -> GraphServerConfig:
    """Return the settings of a graph server from its file."""
    return GraphServerConfig.from_json(read_text_limited(path, _MAX_CONFIG_BYTES), path=path)


async def _serve(config: GraphServerConfig, fleet: str, path: Path) -> None:
    from atoll.deploy.commands.reach import TunnelEnd, reach
    from atoll.runtime.executor.executor_process import read_token, split_address
    from atoll.runtime.graph_server.graph_server import TaskGraphServer
    from atoll.runtime.http.program import close_when_told

    place, toward = await open_meeting(config.name, "n0")
    # Executors on other machines fetch from here what clients sent.
    config = config.model_copy(update={"address": f"{own_address(toward).host}:0"})
    end: TunnelEnd | None = None

    async def way(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if end is None:
            raise ConnectionError("the tunnel is not open")
        return await end.dial(host, port)

    server = TaskGraphServer(config, read_token(config.token_file), dial=reach(way))
    host, port = await server.start()
    door_host, door_port = split_address(server.store.address)
    own = MemberAddress(host=door_host, ports=(door_port, port))
    # Executors that only the tunnel leads to fetch what clients sent from here.
    await place.enter("n0", own)
    if isinstance(place, FabricMeeting):
        end = TunnelEnd(place, own)
    _LOG.info("listening on http://%s:%d", host, port)
    following = asyncio.create_task(FleetFollower(server, place, pool_of(fleet), path).run())
    try:
        await close_when_told(lambda: server.close(_DRAIN_S))
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        if end is not None:
            await end.close()
        await place.leave()


def main(arguments: list[str] | None = None) -> int:
    """Read the options, serve, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m atoll.deploy.commands.graph_node")
    parser.add_argument("--fleet", required=True)
    parser.add_argument("--name", required=True, help="this one's, among those of the fleet")
    parser.add_argument("--config", type=Path, required=True, help="JSON file")
    parser.add_argument("--port", type=int, required=True, help="where requests come in")
    options = parser.parse_args(arguments)
    from atoll.runtime.executor.store import choose_store_folder, remove_stale_stores
    from atoll.runtime.http.program import run

    store = None
    try:
        config = read_graph_config(options.config)
        store = choose_store_folder(config.store_bytes)
        own = {"name": options.name, "port": options.port, "store": str(store)}
        config = config.model_copy(update=own)
        logging.basicConfig(
            level=config.log_level, format=f"%(asctime)s %(levelname)s {config.name}: %(message)s"
        )
        run(_serve(config, options.fleet, options.config))
        return 0
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    finally:
        if store is not None:
            remove_stale_stores(store.parent)


if __name__ == "__main__":
    sys.exit(main())
