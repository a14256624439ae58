"""Which nodes have what one asks for.

    query = Query(gpus=("A100",), min_vram_bytes=40e9, models=("llama*",))
    matching = [peer for peer in fabric.peers() if query.lacks(peer) is None]

Every field narrows; several values of one field mean any of them. What a node does not say of itself
counts against it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from atoll.core.errors import UnknownNameError
from atoll.fabric.registry.peers import Peer
from atoll.fabric.registry.records import STABILITIES, Gpu, Metadata, NodeService, SessionState


@dataclass(frozen=True, slots=True)
class Query:
    """Conditions on a node; an empty field is no condition. Case does not matter."""

    names: tuple[str, ...] = ()
    """Names ("lab/gpu1"), names of sites' certificates ("lab") or session ids."""
    gpus: tuple[str, ...] = ()
    """GPU classes: "A100" also means "A100-80G" and "NVIDIA A100-SXM4-80GB"."""
    min_vram_bytes: float = 0.0
    """Memory of one GPU (of one of the classes, if there are any)."""
    min_gpus: int = 0
    """GPUs of that kind together."""
    models: tuple[str, ...] = ()
    """Models or aliases; * and ? stand for anything."""
    precisions: tuple[str, ...] = ()
    """Of a service (of one of the models, if there are any)."""
    providers: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    """The region "eu" holds "eu-west-1" too."""
    sites: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    """join, serving, down; "silent" is any of them without a token."""
    engines: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    min_stability: str = ""
    """At least this dependable: spot < batch < standard < reserved."""

    def __post_init__(self) -> None:
        """Refuse names that no node could have."""
        if self.min_stability and self.min_stability.lower() not in STABILITIES:
            raise UnknownNameError("stability", self.min_stability, STABILITIES, field="stability")
        known = [state.name.lower() for state in SessionState if state < SessionState.LEFT] + [
            "silent"
        ]
        for state in self.states:
            if state.lower() not in known:
                raise UnknownNameError("state", state, known, field="state")
        for role in self.roles:
            if role.lower() not in _ROLES:
                raise UnknownNameError("role", role, _ROLES, field="role")

    def lacks(self, peer: Peer) -> str | None:
        """Return the first thing a node does not have of what is asked, or None: it has all."""
        metadata = peer.metadata
        checks = {
            "name": _any(self.names, (peer.name, peer.sid), lies_in),
            "state": _any(self.states, (state_of(peer),), _same),
            "role": _any(self.roles, (metadata.role,), _same),
            "provider": _any(self.providers, (peer.provider,), _same),
            "region": _any(self.regions, (metadata.region,), lies_in),
            "site": _any(self.sites, (metadata.site,), lies_in),
            "engine": _any(self.engines, (metadata.engine,), _same),
            "stability": self._steady(metadata),
            "gpu": self._has_gpus(metadata.hardware.gpus),
            "model": self._serves(metadata.services),
        }
        return next((what for what, has in checks.items() if not has), None)

    def _steady(self, metadata: Metadata) -> bool:
        ranks = {name: rank for rank, name in enumerate(map(str, STABILITIES))}
        return ranks[metadata.stability] >= ranks.get(self.min_stability.lower(), 0)

    def _has_gpus(self, gpus: tuple[Gpu, ...]) -> bool:
        if not self.gpus and not self.min_vram_bytes and not self.min_gpus:
            return True
        fitting = [
            gpu.count
            for gpu in gpus
            if _any(self.gpus, (gpu.type,), is_gpu) and gpu.memory_bytes >= self.min_vram_bytes
        ]
        return sum(fitting) >= max(1, self.min_gpus)

    def _serves(self, services: tuple[NodeService, ...]) -> bool:
        if not self.models and not self.precisions:
            return True
        return any(
            _any(self.models, (service.model, *service.aliases), _matches)
            and _any(self.precisions, (service.precision,), _same)
            for service in services
        )


_ROLES = ("hub", "worker", "gateway", "operator")


def state_of(peer: Peer) -> str:
    """Return the state to show: "silent" if the node has a state but no token here."""
    if not peer.alive and peer.state < SessionState.LEFT:
        return "silent"
    return peer.state.name.lower()


def lies_in(place: str, wanted: str) -> bool:
    """Whether a place or name is the wanted one or inside it: "eu" holds "eu-west-1"."""
    place, wanted = place.lower(), wanted.lower()
    return place == wanted or place.startswith((f"{wanted}-", f"{wanted}/"))


def is_gpu(gpu: str, wanted: str) -> bool:
    """Whether a GPU is of a class: "A100" holds "A100-80G" and "NVIDIA A100-SXM4-80GB"."""
    return f"-{_plain(wanted)}-" in f"-{_plain(gpu)}-"


def _plain(name: str) -> str:
    return re.sub(r"[\s_/]+", "-", name.strip().lower())


def _same(value: str, wanted: str) -> bool:
    return value.lower() == wanted.lower()


def _matches(value: str, wanted: str) -> bool:
    return fnmatchcase(value.lower(), wanted.lower())


def _any(wanted: tuple[str, ...], values: Iterable[str], fits: Callable[[str, str], bool]) -> bool:
    return not wanted or any(fits(value, wish) for value in values for wish in wanted)
