"""All that people watch of a gateway: what stands behind `snapshot`, `live`, `models` and `machines`."""

from __future__ import annotations

from atoll.runtime.gateway.console import draining
from atoll.runtime.gateway.console.live import LiveFeed
from atoll.runtime.gateway.console.machines import ShownMachine
from atoll.runtime.gateway.console.snapshot import GatewaySnapshots
from atoll.runtime.gateway.console.view import GatewayView


class GatewayBoard:
    """The pages of a gateway and the feed of its snapshots."""

    def __init__(self, view: GatewayView) -> None:
        self._view = view
        self.pages = GatewaySnapshots(view)
        self.live = LiveFeed(view, self.pages.snapshot)

    def drain(self, machine_id: str, body: bytes, who: str) -> ShownMachine:
        """Take a machine out of service, and return it."""
        return draining.drain(self._view, machine_id, body, who)

    def take_back(self, machine_id: str, who: str) -> ShownMachine:
        """Take a machine back into service, and return it."""
        return draining.take_back(self._view, machine_id, who)

    def close(self) -> None:
        """End what listens: the gateway stops."""
        self.live.close()
