"""Groups of a service's requests that must each keep their promises: its classes, and deciles of length.

`list_groups` says which groups a service has, and `group_requests` which of them the requests of a run fall
into. Who sees nothing of a request but how long its prompt is asks `length_ranges`. Models of a choice are
services of their own once it is settled (`Problem.settled`), so each of them has its own share and groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING

from atoll.plan.kept_groups import RequestGroup

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from atoll.plan.problem import Service

    _Bools = NDArray[np.bool_]

DECILES = 10
_APART = NormalDist().inv_cdf(0.99)
"""Standard deviations within which the prompts of a class lie, but for one in a hundred on either side."""


def list_groups(service: Service, classes: Iterable[str] = ()) -> tuple[RequestGroup, ...]:
    """Return the groups of a service whose requests are of these classes, of its own where none are named.

    None where there is one class only: then the service says it all. Classes to which nothing is promised
    have nothing to keep.
    """
    own = {klass.name: klass for klass in (*service.classes, *service.text_classes)}
    names = list(classes) or list(own)
    groups = [
        RequestGroup(name, service.class_target(name))
        for name in names
        if name not in own or own[name].is_promised
    ]
    if len(names) < 2:
        groups = []
    if service.length_deciles:
        groups += [
            RequestGroup(f"length decile {number}", service.target, "length")
            for number in range(1, DECILES + 1)
        ]
    return tuple(groups)


def group_requests(
    service: Service,
    classes: Sequence[str],
    klass: NDArray[np.integer],
    prompts: NDArray[np.integer] | None = None,
) -> list[tuple[RequestGroup, _Bools]]:
    """Return the groups that requests of a service fall into, and which of them are in each.

    `klass` says by number which of `classes` a request is of; `prompts` are tokens, deciles are theirs.
    """
    import numpy as np

    came = sorted({classes[at] for at in np.unique(klass).tolist()})
    known = {each.name for each in (*service.classes, *service.text_classes)}
    # A workload may have classes that the fleet file knows nothing of: those count as the service.
    names = sorted(known) if known.issuperset(came) else came
    number = {name: at for at, name in enumerate(classes)}
    tenth = np.zeros(len(klass), np.int64)
    if service.length_deciles and prompts is not None and len(prompts):
        edges = np.quantile(prompts, np.arange(1, DECILES) / DECILES)
        tenth = np.searchsorted(edges, prompts, side="left") + 1
    found: list[tuple[RequestGroup, _Bools]] = []
    for group in list_groups(service, names):
        if group.kind == "class":
            found.append((group, np.asarray(klass == number.get(group.name, -1))))
        else:
            found.append((group, np.asarray(tenth == int(group.name.rsplit(" ", 1)[1]))))
    # Prompts of one length are of one decile.
    return [one for one in found if one[0].kind == "class" or one[1].any()]


def length_ranges(service: Service) -> tuple[tuple[RequestGroup, float], ...]:
    """Return groups that the length of a prompt decides: each with the most tokens that a prompt of it has.

    Classes of text whose prompts are hardly ever as long as those of another; where there are none, deciles
    of the lengths that the fleet file states, if those must keep promises. None where lengths decide nothing.
    """
    groups = {group.name: group for group in list_groups(service)}
    classes = [klass for klass in service.text_classes if klass.name in groups]
    if classes:
        spans = sorted((*_span(k.input_tokens, k.input_cv), k.name) for k in classes)
        pairs = list(pairwise(spans))
        if len(classes) < len(service.text_classes) or any(a[1] >= b[0] for a, b in pairs):
            return ()
        edges = [math.sqrt(a[1] * b[0]) for a, b in pairs]
        return tuple(
            (groups[name], edge)
            for (_, _, name), edge in zip(spans, [*edges, math.inf], strict=True)
        )
    lengths = service.lengths
    cv = math.sqrt(max(0.0, lengths.input_mean_square / lengths.input_mean**2 - 1.0))
    if not service.length_deciles or cv <= 0.0:
        return ()
    centre, spread = _log_normal(lengths.input_mean, cv)
    marks = [NormalDist().inv_cdf(number / DECILES) for number in range(1, DECILES)]
    edges = [math.exp(centre + spread * mark) for mark in marks]
    own = [group for group in groups.values() if group.kind == "length"]
    return tuple(zip(own, [*edges, math.inf], strict=True))


def _log_normal(mean: float, cv: float) -> tuple[float, float]:
    """Return mean and standard deviation of the logarithm of a log-normal length."""
    square = math.log1p(cv * cv)
    return math.log(mean) - 0.5 * square, math.sqrt(square)


def _span(mean: float, cv: float) -> tuple[float, float]:
    """Return the tokens between which almost all prompts lie."""
    centre, spread = _log_normal(mean, cv)
    return math.exp(centre - _APART * spread), math.exp(centre + _APART * spread)
