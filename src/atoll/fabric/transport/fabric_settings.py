"""Times and sizes of a fabric; every field has a default that suits a federation of some hundred nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FabricSettings:
    """How patient a member is. All times are seconds."""

    lease_s: float = 2.0
    """A silent link counts as lost after this long; keep-alives go out four times as often."""
    connect_s: float = 10.0
    """How long `Fabric.connect` waits for the first hub before it gives up."""
    first_sync_s: float = 3.0
    """How long `Fabric.connect` waits for an exchange with a peer; there is none in an empty fabric."""
    retry_first_s: float = 0.1
    """Pause before a lost hub is tried again, at first, give or take half; it grows to `retry_max_s`."""
    retry_max_s: float = 0.25
    """Longest such pause, of the most eager member; that of others is up to three times as long."""
    query_s: float = 1.5
    """How long an answer of a peer to a registry question may take."""
    flap_s: float = 0.3
    """How long tokens may be gone, once a hub has, before their owners count as down."""
    obituary_s: float = 60.0
    """How long a hub waits for a token before it writes LEFT for a member."""
    pushes_per_s: float = 200.0
    """News of one slot a second; what is beyond is learned by asking, if it is true."""
    pushes_at_once: float = 4000.0
    """News of one slot at once, as when the nodes of a batch job start together."""
    asks_per_s: float = 1000.0
    """Questions about the registry a second, of whomever, and at once."""
    asks_at_once: float = 20_000.0
    proxy: str | None = None
    """HTTP proxy to reach hubs through, `http://[user:password@]host:port`; None: as the environment says."""
