"""What controllers of a fleet agree on in a Kubernetes cluster: who acts.

What runs, and what it consists of, a controller that starts in another pod with an empty folder hears from
the target.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.control.operation.lease import Lease, LeaseHeldError
from atoll.control.operation.targets import PoolTarget
from atoll.deploy.kubernetes.deployer import KubernetesDeployer


def find_cluster(targets: Iterable[PoolTarget]) -> KubernetesDeployer | None:
    """Return the cluster among a fleet's targets, None if there is none."""
    found = (target.target for target in targets)
    return next((each for each in found if isinstance(each, KubernetesDeployer)), None)


class ClusterLease:
    """The Lease of a fleet in a Kubernetes cluster: controllers anywhere agree on it."""

    def __init__(self, target: KubernetesDeployer, fleet: str) -> None:
        self._target, self._fleet = target, fleet
        self._holder: str | None = None

    def take(self, holder: str, now_s: float, valid_s: float) -> Lease:
        """Take or renew the lease, or raise."""
        term = self._target.lease(self._fleet, holder, int(valid_s)).acquire(now_s)
        if term is None:
            raise LeaseHeldError(
                "another controller operates this fleet, says its Lease in the cluster",
                hint=f"stop it first, or wait {valid_s:.0f} s after it has died",
            )
        self._holder = holder
        return Lease(holder=holder, term=term, ends_s=now_s + valid_s)

    def give_back(self, now_s: float) -> None:
        """Let the next one act at once."""
        del now_s
        if self._holder is not None:
            self._target.lease(self._fleet, self._holder).release()
