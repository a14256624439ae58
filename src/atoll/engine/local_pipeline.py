"""A whole model in a thread of this process, for whoever wants answers without other processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator

from atoll.core.errors import UsageError
from atoll.engine.engine_errors import EngineError
from atoll.engine.engine_messages import NodeStats
from atoll.engine.mailbox import import_zmq
from atoll.engine.node import NodeConfig, NodeProcess
from atoll.engine.pipeline_routes import LayerRouter, NodeSpec
from atoll.engine.scheduler import GenerateRequest, Scheduler, SchedulerSettings, TokenEvent
from atoll.engine.text import TextCodec
from atoll.engine.weights.sources import resolve

_LOG = logging.getLogger(__name__)
_NODE = "inproc://node"
_SCHEDULER = "inproc://scheduler"
_MIN_LENGTH = 2
_READY_S = 60.0
_STOP_S = 60.0
# Whether the thread lives is known at once, so silence only means that it is busy.
_PATIENT = SchedulerSettings(dead_after_s=300.0, stall_s=3600.0, no_route_s=3600.0)


class LocalEngine:
    """One node with all layers in a thread, and its scheduler in the loop that starts it.

    They speak over sockets inside the process; there are no ports. `max_length`: positions of prompt and
    answer together; the model's own limit and the room for KV bound it anyway.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        threads: int = 1,
        dtype: str = "float32",
        kv_bytes: int | None = None,
        max_length: int | None = None,
    ) -> None:
        """Load the model; takes seconds."""
        if max_length is not None and max_length < _MIN_LENGTH:
            raise UsageError(
                f"no answer fits {max_length} positions",
                field="max_length",
                hint=f"use {_MIN_LENGTH} or more",
            )
        folder = resolve(model)
        self.codec = TextCodec(folder)
        config = NodeConfig.parse(
            {
                "name": "local",
                "model": str(folder),
                "start": 0,
                "end": self.codec.layers,
                "bind": _NODE,
                "device": device,
                "threads": threads,
                "dtype": dtype,
                "kv_bytes": kv_bytes,
            }
        )
        if "torch" not in sys.modules:
            # Some of its kernels ask only this, and only once, how many threads they may use.
            os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
        self._context = import_zmq().Context()
        self._node = NodeProcess(config, self._context)
        ready = self._node.ready
        self.max_length = min(self.codec.max_length, ready.blocks * ready.block_size)
        if max_length is not None:
            self.max_length = min(self.max_length, max_length)
        self._scheduler: Scheduler | None = None
        self._thread: threading.Thread | None = None
        self._why: str | None = None

    async def start(self) -> None:
        """Begin to serve, in the running loop."""
        scheduler = Scheduler(
            [NodeSpec(name="local", endpoint=_NODE, start=0, end=self.codec.layers)],
            LayerRouter(self.codec.layers),
            eos=self.codec.eos,
            max_length=self.max_length,
            settings=_PATIENT,
            bind=_SCHEDULER,
            context=self._context,
        )
        self._scheduler = scheduler
        self._thread = threading.Thread(
            target=self._serve, args=(asyncio.get_running_loop(),), name="engine", daemon=True
        )
        self._thread.start()
        await scheduler.start()
        await scheduler.ready(_READY_S)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Stream the answer; left early, it is cancelled. EngineError if it cannot be given."""
        if self._scheduler is None or self._why is not None:
            raise self._stopped()
        events = self._scheduler.generate(request)
        async with contextlib.aclosing(events):  # type: ignore[type-var]
            async for event in events:
                if event.finish_reason in ("error", "cancelled"):
                    raise EngineError(event.error) if event.error else self._stopped()
                yield event

    def _stopped(self) -> EngineError:
        return EngineError(self._why or "the engine does not run")

    def stats(self) -> NodeStats | None:
        """Last statistics that the node reported."""
        return None if self._scheduler is None else self._scheduler.stats().get("local")

    async def close(self) -> None:
        """End what runs and give back the thread and the sockets."""
        self._why = self._why or "the engine is closed"
        if self._scheduler is not None:
            await self._scheduler.close()
        self._node.stop(at_once=True)
        if self._thread is None:
            self._node.mailbox.close()
        else:
            await asyncio.to_thread(self._thread.join, _STOP_S)
            if self._thread.is_alive():
                raise UsageError(f"the engine did not stop within {_STOP_S:g} s")
        self._context.destroy(0)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        import torch

        # OpenMP counts threads for each thread that calls it.
        torch.set_num_threads(self._node.config.threads)
        why = "the engine has stopped"
        try:
            self._node.run()
        except Exception as error:  # noqa: BLE001 - those who wait must hear of it
            _LOG.exception("the engine broke")
            why = f"the engine broke: {type(error).__name__}: {error}"
        # A loop that has ended has nobody who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._ended, why)

    def _ended(self, why: str) -> None:
        if self._why is None and self._scheduler is not None:
            self._why = why
            self._scheduler.cancel_all()
