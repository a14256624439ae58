"""State of a backend, as people and programs are shown it."""

from __future__ import annotations

from typing import TypedDict


class BackendState(TypedDict):
    """A backend of a gateway: what it was announced as, how it stands and what it has done.

    `routed` are the weights that a controller told, by model; `mean_s` is what its requests took.
    """

    id: str
    url: str
    models: list[str]
    kind: str
    weight: float
    routed: dict[str, float]
    max_inflight: int | None
    metadata: dict[str, str]
    state: str
    reason: str
    inflight: int
    requests: int
    failures: int
    mean_s: float
