"""A fabric with certificates on loopback: a hub, workers in front of scripted engines, and a gateway."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.fabric.identity.access import Access
from atoll.fabric.identity.authority import Authority
from atoll.fabric.registry.records import Metadata, NodeService, SessionState
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.hub import Hub, hub_options
from atoll.fabric.tunnel.tunnel_server import TunnelServer
from atoll.runtime.federation import Federation
from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import Deadlines, GatewaySettings, HealthSettings
from atoll.runtime.http.listen_address import free_ports
from atoll.runtime.join.bridge import Bridge
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.usage_record import UsageRecord
from tests.runtime.gateway.engine import ScriptedEngine
from tests.runtime.gateway.harness import CHAT, Bench, Reply, chat
from tests.runtime.waiting import until

DEADLINES = Deadlines(first_token_s=5.0, between_tokens_s=5.0, retry_s=3.0, resume_s=5.0)


@dataclass
class Worker:
    """A node: an engine, and its membership."""

    engine: ScriptedEngine
    fabric: Fabric
    answerer: TunnelServer
    bridge: Bridge
    metadata: Metadata

    async def announce(self, state: SessionState = SessionState.SERVING, **changed: Any) -> None:
        fields = {name: getattr(self.metadata, name) for name in self.metadata.__struct_fields__}
        self.metadata = Metadata(**(fields | changed))
        await self.fabric.announce(state, self.metadata)

    async def die(self) -> None:
        """End as with kill -9: nothing is said."""
        await self.fabric._link.close()
        await self.engine.stop()

    async def close(self) -> None:
        await self.bridge.close()
        await self.answerer.close()
        await self.fabric.close()
        await self.engine.stop()


@dataclass
class Site:
    """All of it."""

    authority: Authority
    gateway: Gateway
    federation: Federation
    bench: Bench
    stack: AsyncExitStack
    records: list[UsageRecord] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)

    async def worker(
        self,
        name: str,
        provider: str = "uni",
        *,
        engine: ScriptedEngine | None = None,
        services: Sequence[NodeService] = (NodeService("m"),),
        wait: bool = True,
        **said: Any,
    ) -> Worker:
        """Have a node join."""
        engine = engine or ScriptedEngine()
        url = engine.url or await engine.start()
        access: Access = self.authority.issue(name, provider, "worker")
        metadata = Metadata(
            name="n1",
            provider=provider,
            role="worker",
            engine=said.pop("engine_name", engine.kind),
            services=tuple(services),
            **said,
        )
        fabric = await Fabric.connect(access, metadata)
        generic = any(s.kind == "generic" for s in services)
        bridge = Bridge(url, generic=generic)
        bridge.open = True
        answerer = TunnelServer(fabric, bridge.handle, accept=metadata.accept)
        made = Worker(engine, fabric, answerer, bridge, metadata)
        self.workers.append(made)
        self.bench.engines.append(engine)
        await fabric.announce(SessionState.SERVING)
        if wait:
            await until(lambda: fabric.sid in self.gateway.pool.members)
        return made

    async def chat(self, headers: str = "", **more: Any) -> Reply:
        return await self.bench.post(CHAT, chat(**more), headers)


@asynccontextmanager
async def site(
    tmp_path: Path,
    *,
    accounts: Any = None,
    recorder: Any = None,
    spans: Any = None,
    **settings: Any,
) -> AsyncIterator[Site]:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    authority = Authority.create(tmp_path / "ca", "test", [address])
    token = (tmp_path / "ca" / "hub-h0.token").read_text()
    async with AsyncExitStack() as stack:
        hub = await Hub.start(hub_options(token.strip(), listen=[address]))
        stack.push_async_callback(hub.close)
        access = authority.issue("front", "uni", "gateway")
        fabric = await Fabric.connect(
            access, Metadata(name="g", provider="uni", role="gateway"), state=SessionState.SERVING
        )
        stack.push_async_callback(fabric.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-"))
        chosen: dict[str, Any] = {
            "policy": "learned",
            "affinity": True,
            "admin_socket": f"{folder}/admin.sock",
        } | settings
        pool = BackendPool(policy=chosen["policy"], learn=True)
        federation = Federation(fabric, pool)
        stack.push_async_callback(federation.close)
        records: list[UsageRecord] = []
        gateway = Gateway(
            pool,
            GatewaySettings(
                port=0,
                deadlines=DEADLINES,
                health=HealthSettings(enabled=False),
                **chosen,
            ),
            on_usage=records.append,
            accounts=accounts,
            federation=federation,
            recorder=recorder,
            spans=spans,
        )
        _, at = await gateway.start()
        stack.push_async_callback(gateway.close)
        bench = Bench(gateway, [], at, records)
        made = Site(authority, gateway, federation, bench, stack, records)
        try:
            yield made
        finally:
            for worker in made.workers:
                await worker.close()


def shown(reply: Reply) -> Any:
    return json.loads(reply.body)
