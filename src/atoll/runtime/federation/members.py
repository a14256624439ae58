"""The nodes of a fabric as backends of a pool.

A node is in the pool while it is SERVING and has a service that is ours to use; its id there is its
session, so one that comes back is another. Once its token drops it gets nothing more, at once; what runs
there is left to the tunnel, which knows by itself whether the node is gone or has only taken a new session.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.core.errors import AtollError
from atoll.engines.table import UNKNOWN, recognise
from atoll.fabric.registry.peers import Load, Peer
from atoll.fabric.registry.records import NodeService, SessionState
from atoll.fabric.tunnel.accept import accepts
from atoll.runtime.pool.backend_metadata import MODALITIES, write_modalities
from atoll.runtime.pool.member import (
    BOOTSTRAP,
    FABRIC,
    FLEET,
    HANDOVER,
    INSTANCE,
    STAND_IN,
    Backend,
    Facts,
)
from atoll.runtime.pool.policy import ModelOffer
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.logs import Log

_INSTANCE_LABEL = "atoll.instance"
_FLEET_LABEL = "atoll.fleet"
"""Labels with which deployers have instances join."""
_HANDOVER_LABEL = "atoll.handover"
_BOOTSTRAP_LABEL = "atoll.bootstrap"
"""Labels of instances that run one phase alone."""
_EMBEDS = (("text",), ("embedding",))
_STAND_IN_LABEL = "atoll.stand-in"
"""With it a node says that other weights answer than were asked for, which anybody may say of himself."""


class Members:
    """Keeps the nodes of a fabric in a pool; `name` and `provider` are this gateway's own."""

    def __init__(self, pool: BackendPool, name: str, provider: str, log: Log) -> None:
        self._pool = pool
        self._name = name
        self._provider = provider
        self._log = log
        self.unused: dict[str, str] = {}
        """Sessions that serve something but not us, and why."""

    def take(self, peer: Peer) -> None:
        """Take in what a peer says now."""
        pool, sid = self._pool, peer.sid
        if peer.state is not SessionState.SERVING or not self._useful(peer):
            self.drop(sid)
            return
        try:
            # Only nodes of the gateway's own provider may say how much they weigh.
            backend = backend_of(peer, weighs=peer.provider == self._provider)
            facts = facts_of(peer)
        except AtollError as error:
            self.drop(sid)
            self._refuse(peer, str(error))
            return
        self.unused.pop(sid, None)
        if sid in pool.members:
            pool.update(backend, facts)
        else:
            pool.add(backend, facts)
        # A token that came back makes the node usable again, and one that is gone stops it at once.
        if peer.alive and not pool.members[sid].well:
            pool.set_health(sid, up=True)
        elif not peer.alive:
            pool.mask(sid, "its token is gone")

    def drop(self, sid: str) -> None:
        """Send a node nothing more."""
        if sid in self._pool.members:
            self._pool.remove(sid)

    def hear(self, loads: Mapping[str, Load]) -> None:
        """Take in how busy nodes are; what they run beyond our own requests is others'."""
        for sid, load in loads.items():
            member = self._pool.members.get(sid)
            if member is not None:
                # Loads come late: a node may not know of all that was sent to it yet.
                member.elsewhere = max(0, load.running + load.waiting - member.inflight)

    def _useful(self, peer: Peer) -> bool:
        metadata = peer.metadata
        if not any(whole(service) for service in metadata.services):
            return False
        if not accepts(metadata.accept, peer.provider, self._name, self._provider):
            self._refuse(peer, "it does not take requests of ours")
            return False
        return True

    def _refuse(self, peer: Peer, reason: str) -> None:
        # Told once for a reason, not with every news of the peer.
        if self.unused.get(peer.sid) != reason:
            self.unused[peer.sid] = reason
            self._log.event("fabric.unused", sid=peer.sid, name=peer.name, reason=reason)


def whole(service: NodeService) -> bool:
    """Whether a service answers requests by itself; a part of a model's layers does not."""
    return service.layers is None


def backend_of(peer: Peer, *, weighs: bool = True) -> Backend:
    """Return a node as a backend; what does not fit is an InputError.

    `weighs`: its weight counts, and so does which instance it says it is. Strangers get what they turn out
    to be worth, not what they ask for, and speak for nobody else.
    """
    metadata = peer.metadata
    labels = metadata.labels if weighs else {}
    services = [s for s in metadata.services if whole(s)]
    models = [s for s in services if s.kind != "generic"]
    known = {s.model: _EMBEDS for s in models if s.kind == "embedding"}
    fields: dict[str, object] = {
        "id": peer.sid,
        "url": f"{FABRIC}://{peer.sid}",
        "models": tuple(dict.fromkeys(s.model for s in models)),
        "services": tuple(dict.fromkeys(s.model for s in services if s.kind == "generic")),
        "aliases": {alias: s.model for s in models for alias in s.aliases},
        "kind": kind_of(metadata.engine),
        "max_inflight": metadata.max_inflight or None,
        "metadata": {
            key: value
            for key, value in (
                ("node", peer.name),
                ("provider", peer.provider),
                ("region", metadata.region),
                ("site", metadata.site),
                ("engine", metadata.engine),
                ("direct", metadata.direct or ""),
                (INSTANCE, labels.get(_INSTANCE_LABEL, "")),
                (FLEET, labels.get(_FLEET_LABEL, "")),
                (HANDOVER, labels.get(_HANDOVER_LABEL, "")),
                (BOOTSTRAP, labels.get(_BOOTSTRAP_LABEL, "")),
                (STAND_IN, metadata.labels.get(_STAND_IN_LABEL, "")),
                (MODALITIES, write_modalities(known) if known else ""),
            )
            if value
        },
    }
    if weighs and metadata.weight is not None:
        fields["weight"] = metadata.weight
    return Backend.parse(fields)


def facts_of(peer: Peer) -> Facts:
    """Return what policies, deadlines and the ledger look at."""
    metadata = peer.metadata
    gpus = tuple(gpu.type for gpu in metadata.hardware.gpus)
    engine = f"{metadata.engine}/{metadata.engine_version}".strip("/")
    return Facts(
        {
            s.model: ModelOffer(
                node=peer.name,
                sid=peer.sid,
                provider=peer.provider,
                verified=peer.verified,
                region=metadata.region,
                precision=s.precision,
                context=s.context,
                gpus=gpus,
                stability=metadata.stability,
                engine=engine,
            )
            for s in metadata.services
        },
        metadata.ends_s,
        metadata.usd_per_mtoken_in,
        metadata.usd_per_mtoken_out,
    )


def kind_of(engine: str) -> str:
    """Return the kind of backend that a node is, by the engine it names."""
    known = recognise(engine)
    return known.kind if known is not None and known.launches else UNKNOWN
