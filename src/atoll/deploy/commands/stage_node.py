"""One node of an instance of Atoll's stage engine; on the leading node also the process that listens.

    python -m atoll.deploy.commands.stage_node --node n0 --order JSON --peers JSON --port 8000

Nodes talk over TCP, without encryption or passwords, as those of other engines do: run it in a network where
only your own machines are. SIGTERM finishes what runs, then ends the process that listens before its node.

An instance that decodes has a file of prefill instances that help it (`helpers`). One that prefills serves
nobody directly: its leading node answers /health at its port, and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from atoll.core.errors import AtollError, InputError
from atoll.core.frozen import Frozen
from atoll.core.ids import Phase
from atoll.deploy.commands.instance_member import read_peers
from atoll.deploy.commands.meeting import MemberAddress
from atoll.engines.engine import ServedModel
from atoll.engines.limits import EngineLaunch
from atoll.plan.plan import Instance
from atoll.runtime.endpoints.endpoint import Endpoint, MachineShare, RunDirectory
from atoll.runtime.instance.instance_config import engine_name
from atoll.runtime.local.placing import scale_layers

if TYPE_CHECKING:
    from atoll.runtime.http.handlers import HandlerServer
    from atoll.runtime.http.http_server import Request
    from atoll.runtime.supervise.agent import Agent

FORK_SERVER_VARIABLE = "ATOLL_FORK_SERVER"
"""Names the socket of a process that has loaded the engine and forks it (`runtime.supervise.fork_server`)."""
_SCHEDULER = ".scheduler"


class StageOrder(Frozen):
    """Order to all nodes of an instance: its layout, its weights, what requests call it, its limits.

    `alone` says that a node has its machine's cores for itself; else it computes with one thread.
    `stand_in`: the weights are those of another model, over whose layers the ranges are stretched. `split`:
    each node splits its layers over as many processes as it has GPUs in the plan; else it is one.
    """

    instance: Instance
    source: str
    names: tuple[str, ...]
    launch: EngineLaunch | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kv_bytes: int | None = None
    alone: bool = True
    stand_in: bool = False
    split: bool = False


@dataclass(frozen=True, slots=True)
class PeerDirectory(RunDirectory):
    """A folder whose inboxes are on the nodes of an instance instead of in it."""

    instance: str = ""
    leader: str = ""
    peers: Mapping[str, MemberAddress] = field(default_factory=dict)

    def inbox(self, name: str) -> str:
        """Return where a process is reached: each node has a port for it, the leader one more."""
        if name.endswith(_SCHEDULER):
            return self.peers[self.leader].endpoint(1)
        return self.peers[name.removeprefix(f"{self.instance}/")].endpoint()


def build_stage(
    order: StageOrder,
    node: str,
    port: int,
    peers: Mapping[str, MemberAddress],
    home: Path,
    layers: int,
    cores: tuple[int, ...],
    helpers: str | None = None,
) -> Endpoint:
    """Return the processes of a node, with their configurations written to `home`.

    `layers` are those of the weights: a plan for another model is refused unless these stand in. `helpers`
    is the file that an instance that decodes follows.
    """
    from atoll.runtime.endpoints.stage_endpoint import stage_endpoint

    instance, last = order.instance, max(each.end for each in order.instance.nodes)
    if last != layers and not order.stand_in:
        raise InputError(
            f"the weights have {layers} layers, and {instance.id} is planned for {last}",
            field="weights",
            hint="name the weights that were planned with",
        )
    instance = scale_layers(instance, layers)
    helps = instance.phase is Phase.PREFILL
    if helpers is None:
        # Whoever listens, if anybody does, has this instance alone.
        both = str(instance.role_id._replace(phase=Phase.BOTH))
        instance = instance.model_copy(update={"role": both})
    # Which GPUs it sees was said by whoever started this process.
    seen = tuple(
        each.model_copy(update={"gpu_ids": None, "node_type": each.kind}) for each in instance.nodes
    )
    instance = instance.model_copy(update={"nodes": seen})
    leader = instance.nodes[0].id
    process = engine_name(instance.id, node)
    share = MachineShare(
        {process: cores}, order.kv_bytes, order.dtype, order.device, split_on_cores=order.split
    )
    served = ServedModel(order.source, order.names, order.launch)
    directory = PeerDirectory(home, instance.id, leader, peers)
    endpoint = stage_endpoint(
        *(instance.id, [instance], served, port, directory, share, lambda _node: 0.0),
        helpers=helpers,
    )
    own = tuple(spec for spec in endpoint.nodes if spec.name == process)
    return Endpoint(
        endpoint.backend,
        endpoint.instances,
        own,
        endpoint.server if node == leader and not helps else None,
        endpoint.held,
    )


async def _serve(endpoint: Endpoint, fork_server: str | None, health: int | None) -> int:
    """Run the processes until told to stop, or one is given up; they are forked where a fork server can.

    `health` is a port to say at whether they are ready.
    """
    from atoll.runtime.endpoints.probes import read_start
    from atoll.runtime.supervise.agent import Agent, ProcessError
    from atoll.runtime.supervise.fork_client import ForkServer

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    agent = Agent()
    if fork_server is not None:
        agent.fork_server = ForkServer.connect(fork_server)
    for spec in endpoint.processes:
        agent.add(spec)
    server = None if health is None else await _answer_health(agent, health)
    told: dict[str, str] = {}
    try:
        while not stop.is_set():
            for process in agent.processes.values():
                said = read_start(process)
                # A node's own log goes with this process; whoever waits for it reads this one's.
                if said and said != told.get(process.name):
                    told[process.name] = said
                    sys.stderr.write(f"{process.name}: {said}\n")
                if process.task.done():
                    process.task.result()
                    raise process.error()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.2)
        if endpoint.server is not None:
            await agent.stop([endpoint.server.name])
    except ProcessError as error:
        for line in error.lines:
            sys.stderr.write(f"{error.name}: {line}\n")
        raise
    finally:
        if server is not None:
            await server.close(0.0)
        await agent.close()
    return 0


async def _answer_health(agent: Agent, port: int) -> HandlerServer:
    """Answer at a port of this machine whether all processes are ready."""
    from atoll.runtime.http.handlers import HandlerServer, Response
    from atoll.runtime.supervise.supervision import ProcessState

    async def answer(_request: Request) -> Response:
        ready = all(each.state is ProcessState.READY for each in agent.processes.values())
        return Response(b"{}" if ready else b'{"error":"not ready"}', status=200 if ready else 503)

    server = HandlerServer(answer)
    await server.start("127.0.0.1", port)
    return server


def main(arguments: list[str] | None = None) -> int:
    """Read the order, run the node, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m atoll.deploy.commands.stage_node")
    parser.add_argument("--node", required=True)
    parser.add_argument("--order", required=True, help="JSON")
    parser.add_argument("--peers", default=None, help="JSON; not needed where there is one node")
    parser.add_argument("--port", type=int, default=1, help="where the leading node listens")
    parser.add_argument("--helpers", default=None, help="file of prefill instances, followed")
    options = parser.parse_args(arguments)
    from atoll.engine.weights.sources import resolve
    from atoll.runtime.http.listen_address import free_ports
    from atoll.runtime.local.cores import usable_cores
    from atoll.runtime.local.fleet_state import new_home, remove_home
    from atoll.runtime.local.local_endpoints import LocalModel

    home = None
    try:
        order = StageOrder.from_json(options.order)
        if options.peers is None:
            first, second = free_ports(2)
            peers = {options.node: MemberAddress(host="127.0.0.1", ports=(first, second))}
        else:
            peers = read_peers(options.peers)
        folder = resolve(order.source)
        order = order.model_copy(update={"source": str(folder)})
        layers = LocalModel(order.source, folder).layers
        home = new_home()
        cores = usable_cores() if order.alone else ()
        endpoint = build_stage(
            order, options.node, options.port, peers, home, layers, cores, options.helpers
        )
        helps = order.instance.phase is Phase.PREFILL and options.node == order.instance.nodes[0].id
        fork_server = os.environ.get(FORK_SERVER_VARIABLE)
        return asyncio.run(_serve(endpoint, fork_server, options.port if helps else None))
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    finally:
        if home is not None:
            remove_home(home)


if __name__ == "__main__":
    sys.exit(main())
