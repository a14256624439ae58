"""What holds up evictions while somebody operates a fleet, and lets them pass when nobody does.

A PodDisruptionBudget that no pod may leave would block `kubectl drain` for ever once its controller is away,
and Kubernetes has no budget that ends by itself. It has Jobs that do: this one runs no pods, has a deadline
that is moved on while a controller acts, is taken away when it has passed, and owns the budget.
"""

from __future__ import annotations

from typing import Any

from atoll.deploy.kubernetes.kube_client import KubeClient
from atoll.deploy.kubernetes.kube_lease import read_time_s
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.kubernetes.labels import DOMAIN, MANAGER, label_value, select_fleet, workload_name

Json = dict[str, Any]

_RENEWALS = 5
"""How often the deadline is moved on within the time that it leaves."""


def guard_name(fleet: str) -> str:
    """Return what the Job and the budget of a fleet are called."""
    return workload_name(fleet, "evictions")


class EvictionGuard:
    """The Job and the budget of one fleet."""

    def __init__(self, client: KubeClient, settings: KubernetesSettings, fleet: str) -> None:
        self._client, self._settings, self._fleet = client, settings, fleet
        self._name = guard_name(fleet)
        self._renewed_s: float | None = None
        self._cleared = False

    def renew(self, now_s: float) -> None:
        """Hold up evictions from now on for `hold_evictions_s`; nothing where that was done just now.

        Where no instance stands there is none to hold up.
        """
        hold_s = self._settings.hold_evictions_s
        due_s = 0.0 if self._renewed_s is None else self._renewed_s + hold_s / _RENEWALS
        if self._settings.evictable or now_s < due_s:
            return
        if self._is_idle():
            self.end()
            return
        found = self._client.get("Job", self._name)
        if found is not None and _has_ended(found):
            # It goes by itself; until then another of its name cannot be made.
            self._client.delete("Job", self._name, uid=found["metadata"]["uid"])
            return
        # The deadline counts from when the cluster took note of the Job.
        start_s = read_time_s((found or {}).get("status", {}).get("startTime")) or now_s
        made = self._client.apply(self._job(max(0, round(now_s - start_s)) + hold_s))
        self._client.apply(self._budget(made["metadata"]["uid"]))
        if not self._cleared:
            self._clear()
        self._renewed_s = now_s

    def end(self) -> None:
        """Let all evictions pass, where no instance stands any more."""
        if self._renewed_s is not None and self._is_idle():
            self._client.delete("Job", self._name)
            self._renewed_s = None

    def _is_idle(self) -> bool:
        return not self._client.select("ConfigMap", labels=select_fleet(self._fleet))

    def _clear(self) -> None:
        """Delete the budgets that instances had of their own: no pod may have two."""
        for each in self._client.select("PodDisruptionBudget", labels=select_fleet(self._fleet)):
            self._client.delete("PodDisruptionBudget", each["metadata"]["name"])
        self._cleared = True

    def _head(self, version: str, kind: str) -> Json:
        labels = {
            "app.kubernetes.io/name": "atoll",
            "app.kubernetes.io/component": "evictions",
            "app.kubernetes.io/part-of": label_value(self._fleet),
            "app.kubernetes.io/managed-by": MANAGER,
        }
        meta = {"name": self._name, "namespace": self._settings.namespace, "labels": labels}
        return {"apiVersion": version, "kind": kind, "metadata": meta}

    def _job(self, deadline_s: int) -> Json:
        container = {
            "name": "none",
            "image": self._settings.image,
            "command": ["true"],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
        }
        pod = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
        }
        return {
            **self._head("batch/v1", "Job"),
            "spec": {
                "parallelism": 0,
                "activeDeadlineSeconds": deadline_s,
                "ttlSecondsAfterFinished": 0,
                "template": {"spec": pod},
            },
        }

    def _budget(self, uid: str) -> Json:
        head = self._head("policy/v1", "PodDisruptionBudget")
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self._name, "uid": uid}
        return {
            **head,
            "metadata": {**head["metadata"], "ownerReferences": [owner]},
            "spec": {
                "maxUnavailable": 0,
                # What does not serve holds up nobody who drains a machine.
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {
                    "matchLabels": {
                        "app.kubernetes.io/managed-by": MANAGER,
                        "app.kubernetes.io/component": "engine",
                        f"{DOMAIN}/fleet": label_value(self._fleet),
                    }
                },
            },
        }


def _has_ended(job: Json) -> bool:
    conditions = job.get("status", {}).get("conditions") or ()
    ended = any(each["type"] == "Failed" and each["status"] == "True" for each in conditions)
    return ended or job["metadata"].get("deletionTimestamp") is not None
