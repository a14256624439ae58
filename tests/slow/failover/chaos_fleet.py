"""Seeded kills of nodes and instances under load: no client may see any of them.

Two instances of a tiny random model, cut differently, run as processes behind a gateway. Clients stream
greedy answers all the time. Again and again something is broken: a node or an instance is killed (SIGKILL),
frozen (SIGSTOP, thawed later or never), or its port is closed and its connections reset. The next blow falls
once all is well again, so that a replica always remains.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.rng import stream
from atoll.deploy.local.daemon import process_start
from atoll.plan.plan import Flow, Instance, Node, Plan, Route
from benchmarks.report import Figure, options
from tests.slow.answers import BrokenAnswerError, complete
from tests.slow.tcp_server import Relay
from tests.slow.verdict import conclude
from tests.tiny_model import LAYERS, write_tiny_model

if TYPE_CHECKING:
    from atoll.runtime.local.local_fleet import LocalFleet
    from atoll.telemetry.usage_record import UsageRecord

SERVICE = "tiny"
CLIENTS = 6
HUNG_S = 60.0
HEAL_S = 60.0
_LAYOUTS = {
    "a": ((0, 1), (0, 1), (1, 4)),
    "b": ((0, 3), (3, 4), (3, 4)),
}
_WAYS = (
    *("kill-node", "kill-node", "kill-instance", "freeze-node", "thaw-node", "freeze-instance"),
    "close-port",
)


@dataclass
class Outcome:
    """What the clients and the ledger saw."""

    kills: int = 0
    requests: int = 0
    errors: int = 0
    truncated: int = 0
    token_mismatch: int = 0
    hung: int = 0
    orphans: int = 0
    delivered: int = 0
    ledger: int = 0
    records: int = 0
    resumed: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def ledger_diff(self) -> int:
        """Tokens, and requests, that ledger and clients count differently."""
        return abs(self.ledger - self.delivered) + abs(self.records - self.requests)


def tiny_plan() -> Plan:
    """Return a plan of two instances that cut the model differently."""
    instances = tuple(_instance(name, held) for name, held in _LAYOUTS.items())
    return Plan(
        problem_hash="chaos",
        problem_name="chaos",
        instances=instances,
        routes=tuple(Route(service=SERVICE, instances=(name,), share=0.5) for name in _LAYOUTS),
        usd_per_hour=0,
        status="feasible",
        solver="hand",
    )


@contextlib.asynccontextmanager
async def tiny_fleet(gateway: Mapping[str, object]) -> AsyncIterator[LocalFleet]:
    """Serve `tiny_plan` as `atoll serve` does, with these settings of the gateway besides."""
    from atoll.runtime.local.local_endpoints import LocalModel, LocalOptions
    from atoll.runtime.local.serving import local_fleet

    with tempfile.TemporaryDirectory(prefix="atoll-tiny-") as folder:
        model = write_tiny_model(Path(folder) / SERVICE)
        with local_fleet(
            tiny_plan(),
            {SERVICE: LocalModel(str(model), model)},
            LocalOptions(kv_bytes=8 * 2**20),
            host="127.0.0.1",
            port=0,
            log=None,
            on_progress=lambda *_: None,
            gateway=gateway,
        ) as fleet:
            try:
                await fleet.start()
                yield fleet
            finally:
                await fleet.stop(5.0)


def _instance(name: str, held: tuple[tuple[int, int], ...]) -> Instance:
    nodes = tuple(
        Node(id=f"n{i}", node_type="L4:1", market="owned", start=start, end=end, tp=1)
        for i, (start, end) in enumerate(held)
    )
    pairs = [
        *(("source", n.id) for n in nodes if n.start == 0),
        *((m.id, n.id) for m in nodes for n in nodes if m.end == n.start),
        *((n.id, "sink") for n in nodes if n.end == LAYERS),
    ]
    return Instance(
        id=name,
        service=SERVICE,
        role="smollm2-135m/llm/both",
        region="here",
        stages=2,
        nodes=nodes,
        flows=tuple(Flow(src=a, dst=b, per_s=1.0) for a, b in pairs),
        throughput_per_s=1.0,
        usd_per_hour=0.0,
    )


class Chaos:
    """A fleet, its clients and what befalls it."""

    def __init__(self, fleet: LocalFleet, relays: dict[str, Relay], seed: int, tokens: int) -> None:
        self.fleet = fleet
        self.outcome = Outcome()
        self._relays = relays
        self._random = stream(seed, "chaos")
        self._tokens = tokens
        self._expected: dict[int, str] = {}
        self._over = False
        self.started: set[tuple[int, str]] = set()

    def used(self, record: UsageRecord) -> None:
        """Keep the ledger."""
        self.outcome.records += 1
        self.outcome.ledger += record.completion_tokens
        self.outcome.resumed += len(record.backends) > 1

    async def run(self, kills: int) -> None:
        """Learn the answers, then break things under load."""
        for number in range(12):
            self._expected[number] = await self._ask(number)
        clients = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        try:
            while self.outcome.kills < kills:
                await asyncio.sleep(float(self._random.uniform(0.1, 0.5)))
                self.started |= _children()
                await self._blow()
                self.started |= _children()
                await self._healed()
        finally:
            self._over = True
            await asyncio.gather(*clients)

    async def _client(self, number: int) -> None:
        chance = stream(number, "client")
        while not self._over:
            which = int(chance.integers(len(self._expected)))
            try:
                if await self._ask(which) != self._expected[which]:
                    raise BrokenAnswerError("token_mismatch", f"prompt {which} differs")
            except BrokenAnswerError as error:
                setattr(self.outcome, error.kind, getattr(self.outcome, error.kind) + 1)
                self.outcome.notes.append(str(error))

    async def _ask(self, which: int) -> str:
        """Stream an answer and return its text."""
        self.outcome.requests += 1
        body = {
            "model": SERVICE,
            "prompt": f"Prompt number {which * 7919}: " * (1 + which % 3),
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        reader = await complete(self.fleet.url, body, HUNG_S)
        self.outcome.delivered += reader.tokens
        reader.check_end(self._tokens)
        return reader.text

    async def _blow(self) -> None:
        """Break one thing."""
        way = str(self._random.choice(_WAYS))
        instances = [e.endpoint for e in self.fleet.endpoints]
        victim = instances[int(self._random.integers(len(instances)))]
        name = victim.backend.id
        if way.endswith("node"):
            name = victim.nodes[int(self._random.integers(len(victim.nodes)))].name
        if way == "close-port":
            self._struck(way)
            self._relays[victim.backend.id].close()
            await asyncio.sleep(float(self._random.uniform(0.3, 1.2)))
            await self._relays[victim.backend.id].open()
            return
        pid = self.fleet.agent.processes[name].pid
        if pid is None:
            return
        frozen = way.startswith(("freeze", "thaw"))
        try:
            os.kill(pid, signal.SIGSTOP if frozen else signal.SIGKILL)
        except ProcessLookupError:
            return
        self._struck(way)
        if way.startswith("thaw"):
            await asyncio.sleep(float(self._random.uniform(0.2, 3.0)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        else:
            # It takes a moment until the agent knows.
            await self._noticed(name, pid)

    def _struck(self, way: str) -> None:
        self.outcome.kills += 1
        self.outcome.ways[way] += 1

    async def _noticed(self, name: str, pid: int) -> None:
        deadline_s = time.monotonic() + HEAL_S
        while self.fleet.agent.processes[name].pid == pid and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)

    async def _healed(self) -> None:
        """Wait until every process is ready and every backend is up."""
        deadline_s = time.monotonic() + HEAL_S
        while time.monotonic() < deadline_s:
            ready = all(str(k.state) == "ready" for k in self.fleet.agent.processes.values())
            up = all(m.state == "up" for m in self.fleet.pool.members.values())
            if ready and up and await self._all_heard():
                return
            await asyncio.sleep(0.05)
        self.outcome.notes.append("not healed in time")
        self.outcome.errors += 1

    async def _all_heard(self) -> bool:
        """Whether every instance hears from all its nodes."""
        from atoll.runtime.http.http_client import FetchError, fetch

        for named in self.fleet.endpoints:
            try:
                _, body = await fetch(f"{named.endpoint.backend.url}/atoll/v1/status", timeout_s=2)
                if not all(node["alive"] for node in json.loads(body)["nodes"]):
                    return False
            except (FetchError, ValueError):
                return False
        return True


async def chaos(
    kills: int, seed: int, folder: Path, tokens: int = 150, forks: str | None = None
) -> Outcome:
    """Run a fleet of the tiny model in `folder` and strike it so many times.

    Its processes are forked from a fork server of its own, or from the one at the socket `forks`.
    """
    from atoll.runtime.endpoints.endpoint import RunDirectory
    from atoll.runtime.gateway import GatewaySettings
    from atoll.runtime.gateway.settings import Deadlines, HealthSettings
    from atoll.runtime.local.fleet_state import new_home, remove_home
    from atoll.runtime.local.local_endpoints import LocalModel, LocalOptions, build
    from atoll.runtime.local.local_fleet import LivenessTracker, LocalFleet
    from atoll.runtime.pool.outliers import OutlierSettings
    from atoll.runtime.supervise.fork_client import ForkServer

    home, liveness = RunDirectory(new_home()), LivenessTracker()
    model = LocalModel(str(folder), folder)
    settings = GatewaySettings(
        port=0,
        deadlines=Deadlines(first_token_s=4.0, between_tokens_s=4.0, resume_s=40.0, retry_s=40.0),
        health=HealthSettings(interval_s=0.5, timeout_s=1.5),
        outliers=OutlierSettings(base_ejection_s=0.5, max_ejection_s=0.5),
    )
    relays: dict[str, Relay] = {}
    records: list[UsageRecord] = []
    others = _children()
    try:
        made = build(
            tiny_plan(),
            {SERVICE: model},
            home,
            liveness,
            LocalOptions(kv_bytes=8 * 2**20, dead_after_s=1.0, silent_s=2.5),
        )
        named = []
        for each in made:
            backend = each.endpoint.backend
            relay = relays[backend.id] = Relay(int(backend.url.rpartition(":")[2]))
            await relay.open()
            moved = backend.model_copy(update={"url": f"http://127.0.0.1:{relay.port}"})
            named.append(replace(each, endpoint=replace(each.endpoint, backend=moved)))
        fleet = LocalFleet(
            "chaos",
            named,
            home,
            settings,
            liveness,
            warm=(str(folder),) if forks is None else (),
            on_usage=records.append,
        )
        if forks is not None:
            fleet.agent.fork_server = ForkServer.connect(forks)
        await fleet.start()
        run = Chaos(fleet, relays, seed, tokens)
        try:
            await run.run(kills)
        finally:
            run.started |= _children()
            run.started -= others
            await fleet.stop(10.0)
        for record in records:
            run.used(record)
        await asyncio.sleep(0.2)
        run.outcome.orphans = sum(process_start(pid) == born for pid, born in run.started)
        return run.outcome
    finally:
        for relay in relays.values():
            relay.close()
        remove_home(home.folder)


def _children() -> set[tuple[int, str]]:
    """Return every process below this one, with when it began: a number may be used again."""
    from atoll.runtime.supervise.supervisor import descendants

    return {(pid, born) for pid in descendants(os.getpid()) if (born := process_start(pid))}


def main() -> None:
    chosen = options(__doc__ or "")
    kills = 20 if chosen.quick else 200
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        begun = time.monotonic()
        seen = asyncio.run(chaos(kills, 0, model))
    seconds = time.monotonic() - begun
    print(f"{seen.kills} blows in {seconds:.0f} s: {dict(seen.ways)}")
    print(f"{seen.requests} answers, {seen.delivered} tokens, {seen.resumed} moved by the gateway")
    for line in seen.notes[:20]:
        print(f"  {line}")
    names = ("errors", "truncated", "token_mismatch", "hung", "orphans", "ledger_diff")
    conclude(
        [Figure("kills", seen.kills), *(Figure(n, getattr(seen, n), 0) for n in names)],
        requests=seen.requests,
        tokens=seen.delivered,
        resumed=seen.resumed,
        seconds=round(seconds, 1),
    )


if __name__ == "__main__":
    main()
