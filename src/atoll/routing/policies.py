"""The policies by name."""

from __future__ import annotations

from atoll.core.errors import UnknownNameError
from atoll.routing import decisions

POLICIES = {
    "iwrr": decisions.ROUND_ROBIN,
    "swarm": decisions.THROUGHPUT,
    "random": decisions.RANDOM,
    "shortest-queue": decisions.SHORTEST_QUEUE,
    "least-load": decisions.LEAST_LOAD,
    "two-choices": decisions.TWO_CHOICES,
}
"""Interleaved weighted round robin over the plan's flows; by speed lately seen; at random by flow;
fewest requests waiting; least work over speed; the less loaded of two drawn at random by flow."""


def policy_code(name: str) -> int:
    """Return the number by which `decisions` knows a policy."""
    if name not in POLICIES:
        raise UnknownNameError("policy", name, POLICIES)
    return POLICIES[name]
