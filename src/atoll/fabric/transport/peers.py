"""Another member as seen from here."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.fabric.registry.records import Metadata, SessionState


@dataclass(frozen=True, slots=True)
class Peer:
    """One member as seen from here, this moment."""

    sid: str
    slot: str
    name: str
    provider: str
    verified: bool
    """Whether name and provider are those of a certificate."""
    state: SessionState
    metadata: Metadata
    alive: bool
    """Whether its token is up here."""
    since_s: float
    """Unix time it came into this state as far as this member knows."""

    @property
    def routable(self) -> bool:
        """Whether requests may be sent to it."""
        return self.alive and self.state is SessionState.SERVING
