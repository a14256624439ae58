"""Derating of templates: the share of the performance model's throughput that they carry in truth.

Solvers choose among templates by their analytic throughput. Who has simulated some of them says here how much
of it they may be given; the others keep all of it, which is an upper bound. A plan that uses none of those is
the cheapest for the shares, and its bound holds for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from atoll.plan.plan import Instance
    from atoll.solve.templates.generate import TemplateLibrary
    from atoll.solve.templates.library import Libraries

NodeSet = tuple[tuple[str, int], ...]
"""How many nodes of each kind, sorted by kind."""


def node_set(instance: Instance) -> NodeSet:
    """Return the nodes of an instance by kind."""
    return tuple(sorted(Counter(node.kind for node in instance.nodes).items()))


@dataclass(frozen=True)
class Derating:
    """Shares of analytic throughput, by role and nodes.

    Where nothing is known of a template it is that of `priors`, by role and number of nodes, or `default`.
    `engines` run templates that another engine than the library's was found to carry more with.
    """

    shares: dict[tuple[str, NodeSet], float] = field(default_factory=dict)
    priors: dict[tuple[str, int], float] = field(default_factory=dict)
    default: float = 1.0
    engines: dict[tuple[str, NodeSet], str | None] = field(default_factory=dict)

    def share(self, instance: Instance) -> float:
        """Return the share of an instance."""
        prior = self.priors.get((instance.role, len(instance.nodes)), self.default)
        return self.shares.get((instance.role, node_set(instance)), prior)

    def apply(self, instance: Instance) -> Instance:
        """Return the instance with its share of throughput and flows."""
        share = self.share(instance)
        if share >= 1.0:
            return instance
        flows = tuple(f.model_copy(update={"per_s": f.per_s * share}) for f in instance.flows)
        carried = instance.throughput_per_s * share
        return instance.model_copy(update={"flows": flows, "throughput_per_s": carried})

    def throughput(self, role: str, library: TemplateLibrary) -> NDArray[np.float64]:
        """Return the throughput of all templates of a role."""
        rates = library.throughput * self.default
        kinds = library.tables.node_types
        sizes = library.counts.sum(axis=1)
        for (of_role, size), prior in self.priors.items():
            if of_role == role:
                rates[sizes == size] = library.throughput[sizes == size] * prior
        known = {nodes: share for (of_role, nodes), share in self.shares.items() if of_role == role}
        for nodes, at in find_templates(library.counts, kinds, known).items():
            rates[at] = library.throughput[at] * known[nodes]
        return rates

    def choose_engines(self, libraries: Libraries) -> Libraries:
        """Return libraries whose templates are run by the engines that are said."""
        roles = dict(libraries.roles)
        for role in sorted({role for role, _ in self.engines} & {*roles}):
            library = roles[role]
            known = {
                nodes: name for (of_role, nodes), name in self.engines.items() if of_role == role
            }
            rows = find_templates(library.counts, library.tables.node_types, known)
            roles[role] = library.run_by(
                {int(row): known[nodes] for nodes, some in rows.items() for row in some}
            )
        return replace(libraries, roles=roles)

    def scale(self, libraries: Libraries) -> Libraries:
        """Return libraries whose capacities are scaled by the largest prior of each role."""
        roles = {}
        for role, library in libraries.roles.items():
            known = (share for (name, _), share in self.priors.items() if name == role)
            share = max(known, default=self.default)
            roles[role] = library.scaled(share)
        return replace(libraries, roles=roles)


def find_templates(
    counts: NDArray[np.int8], kinds: tuple[str, ...], sets: Iterable[NodeSet]
) -> dict[NodeSet, NDArray[np.int64]]:
    """Return which rows of a library's counts are each of some sets of nodes."""
    # Rows are compared by one number each first: there are many of them.
    weights = np.random.default_rng(0).integers(1, 2**40, len(kinds))
    numbers = counts @ weights
    found = {}
    for nodes in sets:
        asked = np.zeros(len(kinds), counts.dtype)
        for kind, number in nodes:
            if kind in kinds:
                asked[kinds.index(kind)] = number
        rows = np.flatnonzero(numbers == asked @ weights)
        found[nodes] = rows[(counts[rows] == asked).all(axis=1)]
    return found


def apply_all(derating: Derating | None, instances: Iterable[Instance]) -> list[Instance]:
    """Return instances with their shares of throughput."""
    return [each if derating is None else derating.apply(each) for each in instances]
