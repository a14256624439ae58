"""Who acts: a Lease in the cluster, whose count of transitions is the term that deployers heed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from atoll.deploy.kubernetes.kube_client import KubeClient
from atoll.deploy.kubernetes.labels import MANAGER, label_value, lease_name

Json = dict[str, Any]


class LeaseHolder:
    """One who would act for a fleet. Time is given, in seconds of Unix time.

    A lease that was not renewed for its duration may be taken by anybody; whoever takes it gets a term
    higher than all before. Two who try at once are told apart by the version they read.
    """

    def __init__(self, client: KubeClient, fleet: str, holder: str, duration_s: int = 30) -> None:
        self._client = client
        self._fleet = fleet
        self._name = lease_name(fleet)
        self._holder = holder
        self._duration_s = duration_s

    def acquire(self, now_s: float) -> int | None:
        """Take or renew the lease; returns the term, None while somebody else holds it."""
        found = self._client.get("Lease", self._name)
        if found is None:
            made = self._client.create(self._write(now_s, 1, now_s))
            return 1 if made is not None else None
        spec = found.get("spec") or {}
        term = int(spec.get("leaseTransitions") or 0)
        mine = spec.get("holderIdentity") == self._holder
        if not mine and spec.get("holderIdentity") and now_s < _ends_s(spec):
            return None
        since_s = read_time_s(spec.get("acquireTime")) if mine else now_s
        wanted = term if mine else term + 1
        body = self._write(since_s, wanted, now_s)
        body["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
        return wanted if self._client.replace(body) is not None else None

    def find_holder(self, now_s: float) -> str | None:
        """Return who holds the lease, None if nobody does."""
        spec = (self._client.get("Lease", self._name) or {}).get("spec") or {}
        return spec.get("holderIdentity") or None if now_s < _ends_s(spec) else None

    def release(self) -> None:
        """Give the lease up, so that the next one need not wait; the term stays."""
        found = self._client.get("Lease", self._name)
        if found is not None and (found.get("spec") or {}).get("holderIdentity") == self._holder:
            found["spec"]["holderIdentity"] = ""
            self._client.replace(found)

    def _write(self, since_s: float, term: int, now_s: float) -> Json:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self._name,
                "namespace": self._client.namespace,
                "labels": {
                    "app.kubernetes.io/name": "atoll",
                    "app.kubernetes.io/component": "controller",
                    "app.kubernetes.io/part-of": label_value(self._fleet),
                    "app.kubernetes.io/managed-by": MANAGER,
                },
            },
            "spec": {
                "holderIdentity": self._holder,
                "leaseDurationSeconds": self._duration_s,
                "leaseTransitions": term,
                "acquireTime": write_time(since_s),
                "renewTime": write_time(now_s),
            },
        }


def find_newest_term(client: KubeClient, fleet: str) -> int:
    """Return the term of a fleet's lease, also of one that was given up; 0 where there never was one."""
    found = client.get("Lease", lease_name(fleet))
    spec = (found or {}).get("spec") or {}
    return int(spec.get("leaseTransitions") or 0)


def write_time(at_s: float) -> str:
    """Write seconds of Unix time as Kubernetes' MicroTime."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read_time_s(text: str | None) -> float:
    """Read a time of Kubernetes as seconds of Unix time; 0 where there is none."""
    if not text:
        return 0.0
    return datetime.fromisoformat(text).timestamp()


def _ends_s(spec: Json) -> float:
    return read_time_s(spec.get("renewTime")) + float(spec.get("leaseDurationSeconds") or 0)
