"""Runs the command of one node of an instance over several nodes, once all of them are there.

    python -m atoll.deploy.commands.instance_member --meeting chat-0 --node n1 --nodes n0,n1 -- COMMAND ...

In COMMAND, `@host:n0`, `@port:n0` and `@port2:n0` become the address of a node and ports of its own, and
`@peers` all addresses as JSON. The first node leads: it listens for requests. When it has left, the others
end; SIGTERM reaches their commands only after that (or after `--drain`), so that whoever stops all nodes at
once cuts no stream. When one of the others is lost, the leader ends at once, and with it all: engines go on
to say that they are well when a rank of theirs has died, and answer nobody. Nodes that are started anew wait
until all of them are, and begin again together.

Nodes that only help others say so with `--pool POOL --offer JSON` (see `helpers`); before they end they take
that back. `@helpers` becomes a file that names who helps in the pool now, kept up to date. With `--streams`
others reach the first port of this node through the fabric's tunnel where there is no other way, and COMMAND
them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError, UsageError
from atoll.core.files import atomic_write
from atoll.deploy.commands.meeting import (
    FabricMeeting,
    MeetingPlace,
    MemberAddress,
    PoolWord,
    digest_members,
    find_interface,
    gather_members,
    hold_address,
    list_lasting,
    open_meeting,
)
from atoll.runtime.local.fleet_state import new_home, remove_home

if TYPE_CHECKING:
    from atoll.deploy.commands.reach import TunnelEnd

PEERS = "@peers"
"""Words that this program fills in: whoever reads a command need not."""
HELPERS = "@helpers"
_FIELD = re.compile(r"@(host|port|port2):(n[0-9]+)")
_MISSING_S = 10.0
"""How long a node may be missing before it counts as lost; records travel, and hubs start anew."""
_LOOK_S = 0.5
_STAY_S = 1.0
_END_S = 30.0
"""How long a command may take to end when it is of no use any more."""
_GLOO = "GLOO_SOCKET_IFNAME"
"""Where engines' control messages go; without it, to whatever address the host's name has, or loopback."""
_FOLLOW_S = 0.25
_WITHDRAWN_S = 1.0
"""How long others may take to see that a node helps no more."""
_WAY = "way.sock"
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl."""


def _end_with_parent() -> Callable[[], None] | None:
    """Return what has a command be told to end when this process is killed; None where that is not known.

    Not every batch system finds a process in a session of its own again.
    """
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def arrange() -> None:
        prctl(_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed in between
            os.kill(os.getpid(), signal.SIGTERM)

    return arrange


def fill_in(words: Sequence[str], members: Mapping[str, MemberAddress]) -> list[str]:
    """Return the command with the members' addresses in it."""
    everyone = json.dumps({node: each.model_dump() for node, each in members.items()})

    def place(match: re.Match[str]) -> str:
        kind, node = match.groups()
        if node not in members:
            raise UsageError(f"{match[0]} is no node of this instance", field="COMMAND")
        first, second = members[node].ports
        return {"host": members[node].host, "port": str(first), "port2": str(second)}[kind]

    return [everyone if word == PEERS else _FIELD.sub(place, word) for word in words]


def read_peers(text: str) -> dict[str, MemberAddress]:
    """Read what `@peers` became."""
    return {str(node): MemberAddress.parse(each) for node, each in json.loads(text).items()}


class InstanceMember:
    """One node's command among the others'; returns its exit code from `run`."""

    def __init__(
        self,
        place: MeetingPlace,
        node: str,
        nodes: Sequence[str],
        drain_s: float,
        *,
        pool: str | None = None,
        offer: str | None = None,
        streams: bool = False,
    ) -> None:
        self._place, self._node, self._nodes = place, node, tuple(nodes)
        self._drain_s = drain_s
        self._pool = pool
        self._streams = streams
        self._word = None if pool is None or offer is None else PoolWord(pool, offer)
        self._term = asyncio.Event()
        self._leads = node == self._nodes[0]
        self._lost: str | None = None

    def stop(self) -> None:
        """Begin to end: the leader at once, the others after it."""
        self._term.set()

    async def run(self, words: Sequence[str], address: MemberAddress, max_s: float) -> int:
        """Meet the others, run the command, and leave."""
        await self._place.enter(self._node, address, self._word)
        home, following = None, None
        end: TunnelEnd | None = None
        staying = asyncio.create_task(self._stay())
        try:
            members = await self._meet(max_s)
            if members is None:
                return 0
            if len(self._nodes) > 1:
                begun = address.model_copy(update={"begun": digest_members(members)})
                await self._place.enter(self._node, begun, self._word)
            command = fill_in(words, members)
            environment = _environment(address) if len(self._nodes) > 1 else None
            if self._streams and isinstance(self._place, FabricMeeting):
                from atoll.deploy.commands.reach import WAY_VARIABLE, TunnelEnd

                home, end = new_home(), TunnelEnd(self._place, address)
                await end.serve_beside(home / _WAY)
                environment = (environment or dict(os.environ)) | {WAY_VARIABLE: str(home / _WAY)}
            if HELPERS in command:
                home = home or new_home()
                path = home / "helpers.json"
                command = [str(path) if word == HELPERS else word for word in command]
                following = asyncio.create_task(self._follow(path))
            # Whoever signals this process and its group must not reach the command past `_watch`.
            child = await asyncio.create_subprocess_exec(
                *command,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
                env=environment,
            )
            watching = asyncio.create_task(self._watch(child, members))
            try:
                code = await child.wait()
            except asyncio.CancelledError:
                _signal(child, signal.SIGKILL)
                await child.wait()
                raise
            finally:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
            if self._lost is not None:
                raise AtollError(
                    f"{self._lost} of this instance has ended",
                    hint="look at the logs of that node",
                )
            return code if code >= 0 else 128 - code
        finally:
            staying.cancel()
            if following is not None:
                following.cancel()
            if end is not None:
                await end.close()
            if home is not None:
                remove_home(home)
            await self._place.leave()

    async def _follow(self, path: Path) -> None:
        """Write down who helps in the pool, whenever that changes."""
        from atoll.deploy.commands.prefill_helpers import PrefillOffer, assemble_helpers

        assert self._pool is not None
        service, known = self._pool.rpartition(".")[2], None
        while True:
            found = []
            for member in await self._place.helpers(self._pool):
                with contextlib.suppress(AtollError):
                    offer = PrefillOffer.from_json(member.text)
                    found.append((member.node, offer, member.address))
            helpers = assemble_helpers(service, found)
            if helpers != known:
                atomic_write(path, helpers.to_json())
                known = helpers
            await asyncio.sleep(_FOLLOW_S)

    async def _meet(self, max_s: float) -> Mapping[str, MemberAddress] | None:
        """Wait for the others, unless told to end meanwhile."""
        meeting = asyncio.create_task(gather_members(self._place, self._nodes, max_s))
        stopping = asyncio.create_task(self._term.wait())
        await asyncio.wait({meeting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not meeting.done():
            meeting.cancel()
            return None
        return meeting.result()

    async def _stay(self) -> None:
        while True:
            await asyncio.sleep(_STAY_S)
            await self._place.stay()

    async def _watch(
        self, child: asyncio.subprocess.Process, members: Mapping[str, MemberAddress]
    ) -> None:
        """Have the command end when it is told to, or when it is of no use any more."""
        if not self._leads:
            await self._wait_for_leader(members)
            _signal(child, signal.SIGTERM)
        else:
            draining = asyncio.create_task(self._drain(child))
            try:
                self._lost = await self._wait_for_loss(members)
            finally:
                draining.cancel()
            # Nothing that it has begun will be finished. `atoll join` ends at once at the second of them.
            for number in (signal.SIGTERM, signal.SIGINT):
                _signal(child, number)
        await asyncio.sleep(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    async def _drain(self, child: asyncio.subprocess.Process) -> None:
        await self._term.wait()
        if self._word is not None:
            # Nobody begins anything here from now on; what runs is finished or goes on elsewhere.
            await self._place.withdraw()
            await asyncio.sleep(_WITHDRAWN_S)
        _signal(child, signal.SIGTERM)

    async def _wait_for_loss(self, members: Mapping[str, MemberAddress]) -> str:
        """Return the first of the other nodes that is lost."""
        watched = [_Sight(self._place, node, members[node]) for node in self._nodes[1:]]
        while True:
            for sight in watched:
                if await sight.is_lost(_MISSING_S):
                    return sight.node
            await asyncio.sleep(_LOOK_S / 2)

    async def _wait_for_leader(self, members: Mapping[str, MemberAddress]) -> None:
        """Return when the leader has left, or the time to wait for that is over."""
        leader = _Sight(self._place, self._nodes[0], members[self._nodes[0]])
        term_s = None
        while True:
            now_s = asyncio.get_running_loop().time()
            if self._term.is_set() and term_s is None:
                term_s = now_s
            if await leader.is_lost(_MISSING_S if term_s is None else _LOOK_S):
                return
            if term_s is not None and now_s - term_s > self._drain_s:
                return
            await asyncio.sleep(_LOOK_S / 2)


class _Sight:
    """Another node as it is seen from here, and since when it is not."""

    def __init__(self, place: MeetingPlace, node: str, address: MemberAddress) -> None:
        self._place, self.node, self._address = place, node, address
        self._seen_s = asyncio.get_running_loop().time()

    async def is_lost(self, patience_s: float) -> bool:
        """Whether it has left, was started anew, or has been missing for longer than `patience_s`."""
        now_s = asyncio.get_running_loop().time()
        found = (await self._place.members()).get(self.node)
        if self._address.is_same(found):
            self._seen_s = now_s
            return False
        known = found is not None or self.node in await self._place.departed()
        # A moment even then: a member may change its session in the fabric.
        return now_s - self._seen_s > (_LOOK_S if known else patience_s)


def _signal(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


def _environment(address: MemberAddress) -> dict[str, str]:
    """The environment of a command that speaks to other nodes: from the address at which they reach it."""
    interface = None if _GLOO in os.environ else find_interface(address.host)
    return dict(os.environ) | ({} if interface is None else {_GLOO: interface})


async def _serve(options: argparse.Namespace, command: Sequence[str]) -> int:
    nodes = options.nodes.split(",")
    if options.node not in nodes:
        raise UsageError(f"{options.node} is none of the nodes", field="--node")
    place, toward = await open_meeting(options.meeting, options.node)
    member = InstanceMember(
        *(place, options.node, nodes, options.drain),
        pool=options.pool,
        offer=options.offer,
        streams=options.streams,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, member.stop)
    wanted = [] if options.ports_of is None else list_lasting(options.ports_of)
    # Ranks of a pipeline know by its first port which start of a node it is.
    first, second = ((), wanted) if len(nodes) > 1 else (wanted, ())
    with hold_address(toward, options.ports, first=first, second=second) as address:
        return await member.run(command, address, options.wait)


def main(arguments: list[str] | None = None) -> int:
    """Read the options, run the node, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m atoll.deploy.commands.instance_member")
    parser.add_argument("--meeting", required=True, help="the instance's name")
    parser.add_argument("--node", required=True, help="this node")
    parser.add_argument("--nodes", required=True, help="all nodes, the leading one first")
    parser.add_argument("--ports", type=int, default=1, help="ports in a row, from @port:NODE on")
    parser.add_argument(
        "--ports-of", default=None, help="launch whose KV cache is asked for at the same port again"
    )
    parser.add_argument("--drain", type=float, default=600.0, help="seconds")
    parser.add_argument("--wait", type=float, default=1800.0, help="seconds for the others to come")
    parser.add_argument("--pool", default=None, help="whom to help, or by whom to be helped")
    parser.add_argument("--offer", default=None, help="what this node helps with, JSON")
    parser.add_argument(
        "--streams",
        action="store_true",
        help="be reached, and reach others, through the tunnel too",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        if not command:
            raise UsageError("there is no command after --", field="COMMAND")
        return asyncio.run(_serve(options, command))
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except FileNotFoundError:
        sys.stderr.write(f"error: {command[0]} is not here\n")
        return 127


if __name__ == "__main__":
    sys.exit(main())
