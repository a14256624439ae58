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
    "p2c": decisions.TWO_CHOICES,
}
"""Interleaved weighted round robin over the plan's flows; by speed lately seen; at random by flow;
fewest requests waiting; least work over speed; the less loaded of two drawn at random by flow (twice)."""

LEARNED = 100
"""The code of `learned` (atoll.routing.learned), which gateways know besides: by speed learned from traffic
where no plan gives weights."""
GATEWAY_POLICIES = ("learned", *POLICIES)


def policy_code(name: str) -> int:
    """Return the number by which `decisions` knows a policy."""
    if name not in POLICIES:
        raise UnknownNameError("policy", name, POLICIES)
    return POLICIES[name]


def gateway_policy_code(name: str) -> int:
    """Return the number of a policy that a gateway can use."""
    if name not in GATEWAY_POLICIES:
        raise UnknownNameError("policy", name, GATEWAY_POLICIES)
    return LEARNED if name == "learned" else POLICIES[name]
