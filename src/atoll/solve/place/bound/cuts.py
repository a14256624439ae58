"""Limits of the network that hold for every placement: limits on nodes, on sets of nodes and on all flow.

For a set R of nodes, every token that visits R comes in over a link into R (or from the source) and goes
out over one out of R (or to the sink), so visits per second are at most

    X_R = min(in_R, out_R),   in_R = sum of enter[i] and link[k, i],  out_R = sum of leave[i] and link[i, k]

over i in R, k not in R. If the nodes outside R cannot hold the model, every token visits R: F <= X_R. A
visit computes at most min(L, layers that R holds) layers, which limits the token-layers per second of R.
Links count for no more than the fastest rate of the nodes at their ends. All of it holds with and without
partial inference.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.solve.array_types import Floats
from atoll.solve.place.flow_instance import FlowInstance

Mask = NDArray[np.bool_]
# Regions up to which all unions are tried: their number doubles with every region.
_ALL_SUBSETS = 6


@dataclass(frozen=True)
class Network:
    """Links in tokens/s, none above what the nodes at its ends can carry."""

    link: Floats
    enter: Floats
    leave: Floats


@dataclass(frozen=True)
class Cut:
    """A set of nodes, in words, and how many tokens/s may visit it."""

    name: str
    inside: Mask
    tokens_per_s: float


def network(instance: FlowInstance) -> Network:
    """Return the links of an instance, each cut to what the nodes at its ends can carry."""
    top = fastest(instance)
    between = np.minimum(instance.link, np.minimum(top[:, None], top[None, :]))
    # A node does not send to itself.
    np.fill_diagonal(between, 0.0)
    return Network(between, np.minimum(instance.enter, top), np.minimum(instance.leave, top))


def fastest(instance: FlowInstance) -> Floats:
    """Return the highest rate of every node over the layers it may hold, tokens/s."""
    return np.asarray(_allowed_rates(instance).max(axis=1, initial=0.0), np.float64)


def rates(instance: FlowInstance) -> Floats:
    """Return `rate` with 0 beyond the layers a node may hold, cut to what its links bring and take away.

    Without partial inference what enters a node comes either from the source or from nodes, not both; what
    leaves it always goes either to the sink or to nodes.
    """
    net = network(instance)
    from_nodes, to_nodes = net.link.sum(axis=0), net.link.sum(axis=1)
    into = net.enter + from_nodes if instance.partial else np.maximum(net.enter, from_nodes)
    through = np.minimum(into, np.maximum(net.leave, to_nodes))
    return np.asarray(np.minimum(_allowed_rates(instance), through[:, None]), np.float64)


def crossing_rate(net: Network, inside: Mask) -> float:
    """Return X_R of a set of nodes, tokens/s."""
    into = net.enter[inside].sum() + net.link[np.ix_(~inside, inside)].sum()
    out = net.leave[inside].sum() + net.link[np.ix_(inside, ~inside)].sum()
    return float(min(into, out))


def region_cuts(instance: FlowInstance) -> list[Cut]:
    """Return one cut per region, in the order of their first nodes."""
    net = network(instance)
    regions = np.array(instance.regions)
    return [
        Cut(f"region {name}", regions == name, crossing_rate(net, regions == name))
        for name in dict.fromkeys(instance.regions)
    ]


def needed_cuts(instance: FlowInstance) -> list[Cut]:
    """Return cuts every token crosses: all nodes, and regions and nodes the model does not fit without.

    All unions of regions are tried where there are few; otherwise single regions and all but one.
    """
    net = network(instance)
    every = np.ones(instance.size, bool)
    needed = [
        Cut("the source", every, float(net.enter.sum())),
        Cut("the sink", every, float(net.leave.sum())),
    ]
    names = list(dict.fromkeys(instance.regions))
    regions = np.array(instance.regions)
    sizes = range(1, len(names)) if len(names) <= _ALL_SUBSETS else (1, len(names) - 1)
    groups = [
        (" + ".join(union), np.isin(regions, union))
        for size in sorted(set(sizes))
        for union in itertools.combinations(names, size)
    ]
    singles = [
        (f"node {name}", np.arange(instance.size) == i) for i, name in enumerate(instance.names)
    ]
    for name, inside in [(f"region {name}", inside) for name, inside in groups] + singles:
        # If the model fits without these nodes, tokens may pass them by, and the cut proves nothing.
        if int(instance.max_layers[~inside].sum()) < instance.layers:
            needed.append(Cut(name, inside, crossing_rate(net, inside)))
    return needed


def links_are_loose(instance: FlowInstance, max_flow: float) -> bool:
    """Say whether no link can bind in a flow of at most `max_flow` tokens/s.

    A link is loose if it carries `max_flow`, or all that the node at either end of it ever does.
    """
    top = np.minimum(fastest(instance), max_flow)
    needed = np.minimum(top[:, None], top[None, :])
    np.fill_diagonal(needed, 0.0)
    return bool(
        (instance.link >= needed).all()
        and (instance.enter >= top).all()
        and (instance.leave >= top).all()
    )


def _allowed_rates(instance: FlowInstance) -> Floats:
    """Return `rate`, 0 for no layers and for more than a node or the model has."""
    held = np.arange(instance.rate.shape[1])
    max_layers = np.minimum(instance.max_layers, instance.layers)[:, None]
    return np.where((held >= 1) & (held <= max_layers), instance.rate, 0.0)
