"""Pages of an executor: /health, /metrics, /atoll/v1/status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping

import msgspec
from prometheus_client.core import HistogramMetricFamily, Metric

from atoll.runtime.executor.executor_client import InvocationError
from atoll.runtime.executor.executor_server import ExecutorServer
from atoll.runtime.executor.figures import BATCH_BOUNDS
from atoll.runtime.executor.store import ArrayStore
from atoll.runtime.executor.workers import ComponentWorker
from atoll.runtime.http.handlers import Response
from atoll.runtime.http.http_server import Request
from atoll.runtime.openai import ApiError, error_body
from atoll.telemetry.metrics import CONTENT_TYPE, make_counter, make_gauge, render_page

DRAINING = "draining"
"""State that /health reports of an executor that is being stopped."""
_FRESH_S = 10.0
"""An answer this young proves as much as an example run to see one."""
_STUCK_S = 120.0
"""How long one piece of work may take before its component counts as stuck."""
_EXAMPLE_S = 10.0


class StatusPages:
    """Answers for an executor; `server` is None until its components are loaded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.server: ExecutorServer | None = None
        self.is_ready = False
        self._proofs: dict[str, asyncio.Task[str | None]] = {}

    async def handle(self, request: Request) -> Response:
        """Answer a request for one of the pages."""
        pages = {
            b"/health": self._health,
            b"/metrics": self._metrics,
            b"/atoll/v1/status": self._status,
        }
        page = pages.get(request.path)
        if page is None:
            path = request.path[:100].decode("latin-1")
            raise ApiError(404, f"there is no {path}", code="not_found")
        if request.method not in (b"GET", b"HEAD"):
            raise ApiError(405, "pages are only read", allow="GET, HEAD")
        return await page()

    async def _health(self) -> Response:
        if (server := self.server) is None or not self.is_ready:
            return _unwell("loading", "its components are not loaded yet")
        if server.draining:
            return _unwell(DRAINING, "it is being stopped")
        found = await asyncio.gather(*(self._check(w) for w in server.workers.values()))
        wrong = "; ".join(words for words in found if words is not None)
        return _unwell("broken", wrong) if wrong else Response(b'{"status":"ok"}')

    async def _check(self, worker: ComponentWorker) -> str | None:
        """Return what is wrong with a component, if anything: it must have answered, or answer now."""
        now_s = time.monotonic()
        if now_s - worker.answered_s < _FRESH_S:
            return None
        if worker.busy_since_s is not None:
            busy_s = now_s - worker.busy_since_s
            # It works on something long: an example would only wait behind that.
            return None if busy_s < _STUCK_S else f"{worker.name} is stuck for {busy_s:.0f} s"
        proof = self._proofs.get(worker.name)
        if proof is None:
            proof = asyncio.create_task(_prove(worker))
            self._proofs[worker.name] = proof
            proof.add_done_callback(lambda _: self._proofs.pop(worker.name, None))
        return await asyncio.shield(proof)

    async def _metrics(self) -> Response:
        server = self.server
        if server is None:
            return Response(b"", content_type=CONTENT_TYPE)
        page = render_metrics(self.name, server.workers, server.store, len(server.connections))
        return Response(page, content_type=CONTENT_TYPE)

    async def _status(self) -> Response:
        server = self.server
        status: dict[str, object] = {"name": self.name, "ready": self.is_ready}
        if server is not None:
            waiting, running = server.count_queues()
            status |= {
                "address": server.store.address,
                "components": {
                    name: {"queued": waiting[name], "running": running[name]}
                    for name in sorted(server.workers)
                },
                "handles": len(server.store),
                "bytes": server.store.used_bytes,
                "max_bytes": server.store.max_bytes,
                "connections": len(server.connections),
                "draining": server.draining,
            }
        return Response(msgspec.json.encode(status))


async def _prove(worker: ComponentWorker) -> str | None:
    try:
        async with asyncio.timeout(_EXAMPLE_S):
            await worker.prove()
    except InvocationError as error:
        return f"{worker.name} cannot run its example: {error.message}"
    except TimeoutError:
        return f"{worker.name} did not run its example in {_EXAMPLE_S:g} s"
    return None


def _unwell(code: str, message: str) -> Response:
    return Response(error_body(message, "server_error", code=code), 503)


_LABELS = ("executor", "component")


def render_metrics(
    name: str, workers: Mapping[str, ComponentWorker], store: ArrayStore, connections: int
) -> bytes:
    """Return the page that Prometheus reads."""
    return render_page(_read(name, workers, store, connections))


def _read(
    name: str, workers: Mapping[str, ComponentWorker], store: ArrayStore, connections: int
) -> Iterator[Metric]:
    known = sorted(workers.items())
    yield make_counter(
        "atoll:executor_invocations_total",
        "Invocations ended, by how.",
        (*_LABELS, "outcome"),
        [
            ((name, component, outcome), float(count))
            for component, worker in known
            for outcome, count in sorted(worker.figures.ended.items())
        ],
    )
    for metric, help_text, seconds in (
        ("waiting", "Time that invocations waited for a batch.", "waited_s"),
        ("running", "Time that batches and streams ran.", "ran_s"),
    ):
        yield make_counter(
            f"atoll:executor_{metric}_seconds_total",
            help_text,
            _LABELS,
            [((name, key), round(getattr(worker.figures, seconds), 6)) for key, worker in known],
        )
    for metric, help_text in (("waiting", "Invocations waiting."), ("running", "Running ones.")):
        yield make_gauge(
            f"atoll:executor_{metric}",
            help_text,
            _LABELS,
            [((name, key), float(getattr(worker, metric))) for key, worker in known],
        )
    for metric, help_text, of_bound in (
        ("batches", "Batches that ran, by the largest size that is counted with them.", "batches"),
        ("batch_items", "Invocations in them.", "items"),
        ("batch_seconds", "Time that they ran.", "seconds"),
    ):
        yield make_counter(
            f"atoll:executor_{metric}_total",
            help_text,
            (*_LABELS, "up_to"),
            [
                (
                    (name, key, f"{bound:g}"),
                    round(float(getattr(worker.figures, of_bound)[bound]), 6),
                )
                for key, worker in known
                for bound in sorted(worker.figures.batches)
            ],
        )
    sizes = HistogramMetricFamily(
        "atoll:executor_batch_size", "Invocations run together.", labels=_LABELS
    )
    for key, worker in known:
        below, buckets = 0, []
        for bound in (*BATCH_BOUNDS, float("inf")):
            below += worker.figures.batches[bound]
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(below)))
        sizes.add_metric((name, key), buckets, float(worker.figures.batched))
    yield sizes
    for metric, help_text, number in (
        ("store_bytes", "Bytes of arrays kept.", store.used_bytes),
        ("store_handles", "Arrays kept.", len(store)),
        ("connections", "Callers connected.", connections),
    ):
        rows = [((name,), float(number))]
        yield make_gauge(f"atoll:executor_{metric}", help_text, ("executor",), rows)
