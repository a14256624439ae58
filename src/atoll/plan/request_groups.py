"""Groups of a service's requests that must each keep their promises: its classes, and deciles of length.

`list_groups` says which groups a service has, and `group_requests` which of them the requests of a run fall
into. Models of a choice are services of their own once it is settled (`Problem.settled`), so each of them has
its own share and groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from atoll.plan.kept_groups import RequestGroup

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from atoll.plan.problem import Service

    _Bools = NDArray[np.bool_]

DECILES = 10


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
