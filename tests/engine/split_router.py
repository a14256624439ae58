"""A router with the phases apart, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.engine.engine_messages import PipelineRoute
from atoll.engine.pipeline_routes import LayerRouter, RouteQuery


class SplitRouter:
    """Prompts through some nodes, answers through others (prefill/decode disaggregation)."""

    def __init__(self, layers: int, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._prefill = LayerRouter(layers, prefill)
        self._decode = LayerRouter(layers, decode)

    def __call__(self, query: RouteQuery) -> PipelineRoute | None:
        """Return both routes, or None if one of them is broken."""
        prefill, decode = self._prefill.hops(query), self._decode.hops(query)
        if prefill is None or decode is None:
            return None
        return PipelineRoute(prefill=prefill, decode=decode)
