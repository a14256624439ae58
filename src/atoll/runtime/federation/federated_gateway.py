"""A gateway process on a fabric: keys, usage and traces where they are asked for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.fabric.identity.access import Access
from atoll.fabric.registry.records import Metadata, SessionState
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.fabric_settings import FabricSettings
from atoll.runtime.federation.federation import Federation
from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import GatewayFile
from atoll.runtime.gateway.standalone import drain, follow
from atoll.runtime.http.program import StopSignals
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.logs import JsonLog, Log, SilentLog

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts
    from atoll.telemetry.spans import Spans
    from atoll.telemetry.traffic_recording import Recorder

_MODE = 0o600


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Options of a gateway process."""

    settings: GatewayFile
    access: Access | None
    """The fabric whose nodes it uses; None: its own backends only."""
    name: str = "gateway"
    region: str = ""
    database: str | None = None
    """Of keys and usage; None: neither is kept."""
    journal: Path | None = None
    keys_needed: bool = True
    config: Path | None = None
    """Followed while it changes."""
    overruled: Mapping[str, object] = field(default_factory=dict)
    """Settings that stay whatever the file says."""
    log: Path | None = None
    record: Path | None = None
    spans: str | None = None
    """Address of a collector."""
    drain_s: float = 30.0
    fabric: FabricSettings = field(default_factory=FabricSettings)


class GatewayProcess:
    """Everything in one gateway process; closed in the order that loses nothing."""

    def __init__(self, options: ServiceOptions) -> None:
        self.options = options
        self._stack = contextlib.AsyncExitStack()
        self.gateway: Gateway
        self.address: tuple[str, int]

    async def start(self) -> None:
        """Join the fabric and listen."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        options = self.options
        settings = options.settings
        log = self._log()
        pool = BackendPool(
            settings.backends,
            outliers=settings.outliers,
            policy=settings.policy,
            learn=options.access is not None,
        )
        accounts = await self._accounts(log)
        recorder, spans = self._traces()
        federation = await self._federation(pool, log)
        self.gateway = Gateway(
            pool,
            settings,
            log=log,
            accounts=accounts,
            federation=federation,
            recorder=recorder,
            spans=spans,
        )
        self.address = await self.gateway.start()

    async def stop(self, signals: StopSignals | None = None) -> None:
        """Finish what runs, then leave the fabric and write down the rest."""
        try:
            if signals is not None:
                await drain(self.gateway, self.options.drain_s, signals)
            else:
                await self.gateway.close()
        finally:
            await self._stack.aclose()

    def _log(self) -> Log:
        path = self.options.log
        if path is None:
            return SilentLog()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _MODE)
        self._stack.callback(os.close, descriptor)
        log = JsonLog(descriptor)
        self._stack.callback(log.flush)
        return log

    async def _accounts(self, log: Log) -> Accounts | None:
        options = self.options
        if options.database is None:
            return None
        from atoll.core.paths import state_dir
        from atoll.runtime.accounts.accounts import Accounts

        accounts = await Accounts.open(
            options.database,
            journal=options.journal or state_dir() / "journal",
            required=options.keys_needed,
            log=log,
        )
        self._stack.push_async_callback(accounts.close)
        return accounts

    def _traces(self) -> tuple[Recorder | None, Spans | None]:
        recorder = spans = None
        if self.options.record is not None:
            from atoll.telemetry.traffic_recording import Recorder

            recorder = Recorder(self.options.record)
            self._stack.callback(recorder.close)
        if self.options.spans is not None:
            from atoll.telemetry.spans import Spans

            spans = Spans.to(self.options.spans)
            self._stack.callback(spans.close)
        return recorder, spans

    async def _federation(self, pool: BackendPool, log: Log) -> Federation | None:
        options = self.options
        access = options.access
        if access is None:
            return None
        if access.is_open:
            access = dataclasses.replace(
                access, open_name=access.open_name or options.name, open_role="gateway"
            )
        metadata = Metadata(name=options.name, provider="", role="gateway", region=options.region)
        fabric = await Fabric.connect(
            access, metadata, state=SessionState.SERVING, settings=options.fabric, log=log
        )
        self._stack.push_async_callback(fabric.close)
        federation = Federation(fabric, pool, log=log)
        self._stack.push_async_callback(federation.close)
        return federation


async def serve(options: ServiceOptions, ready: Callable[[GatewayProcess], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once."""
    signals = StopSignals(is_interactive=True)
    service = GatewayProcess(options)
    await service.start()
    following: asyncio.Task[None] | None = None
    try:
        ready(service)
        if options.config is not None:
            following = asyncio.create_task(
                follow(options.config, options.settings, service.gateway, options.overruled)
            )
        await signals.asked.wait()
    finally:
        if following is not None:
            following.cancel()
        await service.stop(signals)
