"""All that people watch of a gateway: what stands behind `snapshot`, `live`, `models` and `machines`."""

from __future__ import annotations

from atoll.runtime.gateway.console.live import LiveFeed
from atoll.runtime.gateway.console.snapshot import GatewaySnapshots
from atoll.runtime.gateway.console.view import GatewayView


class GatewayBoard:
    """The pages of a gateway and the feed of its snapshots."""

    def __init__(self, view: GatewayView) -> None:
        self.pages = GatewaySnapshots(view)
        self.live = LiveFeed(view, self.pages.snapshot)

    def close(self) -> None:
        """End what listens: the gateway stops."""
        self.live.close()
