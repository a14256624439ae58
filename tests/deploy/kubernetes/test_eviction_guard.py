"""Evictions wait while a controller acts, and pass when none does."""

from __future__ import annotations

import pytest

from atoll.control.operation.controller_lease import ClusterLease
from atoll.deploy.kubernetes.eviction_guard import guard_name
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from tests.deploy.kubernetes.builders import build_order
from tests.deploy.kubernetes.test_kube_deployer import Cluster

HOLD_S = KubernetesSettings().hold_evictions_s


class Operated(Cluster):
    """A cluster with one instance that serves; its controller takes a turn with `act`."""

    def __init__(self) -> None:
        super().__init__()
        self.act()
        assert not list(self.api.of("jobs"))
        self.deployer.start(build_order(term=1))
        self.settle()
        self.act()

    def act(self) -> None:
        ClusterLease(self.deployer, "lab").take("one", self.api.now_s, 90.0)
        self.api.step()

    def evict(self) -> int:
        ((_, _, pod), _) = next(iter(self.api.of("pods")))
        path = f"/api/v1/namespaces/default/pods/{pod}/eviction"
        return self.api.ask("POST", path, query={}).status


def test_a_drain_waits_for_a_controller_that_acts_and_for_no_other() -> None:
    cluster = Operated()
    for _ in range(40):
        cluster.api.advance(30)
        cluster.act()
        assert cluster.evict() == 429
    # Now nobody acts; those who may take over soon are waited for.
    cluster.api.advance(HOLD_S / 2)
    assert cluster.evict() == 429
    cluster.api.advance(HOLD_S)
    assert not [*cluster.api.of("jobs"), *cluster.api.of("poddisruptionbudgets")]
    assert cluster.evict() == 200


def test_nothing_is_left_where_nothing_stands() -> None:
    cluster = Operated()
    lease = ClusterLease(cluster.deployer, "lab")
    lease.take("one", cluster.api.now_s, 90.0)
    lease.give_back(cluster.api.now_s)
    assert list(cluster.api.of("jobs"))
    cluster.deployer.stop(cluster.only().handle, 1)
    cluster.api.advance(2)
    lease.take("one", cluster.api.now_s, 90.0)
    lease.give_back(cluster.api.now_s)
    cluster.api.step()
    assert cluster.left() == []


def test_whoever_acts_next_is_waited_for_again() -> None:
    cluster = Operated()
    cluster.api.advance(2 * HOLD_S)
    assert cluster.evict() == 200
    cluster.api.end_pods()
    cluster.settle()
    other = cluster.deployer.__class__(cluster.client, cluster.settings, fleet="lab")
    ClusterLease(other, "lab").take("two", cluster.api.now_s, 90.0)
    assert cluster.evict() == 429
    # A deadline that another controller moved on is not moved back by one that knows nothing of it.
    cluster.api.advance(2.5 * HOLD_S / 5)
    cluster.act()
    third = cluster.deployer.__class__(cluster.client, cluster.settings, fleet="lab")
    ClusterLease(third, "lab").take("one", cluster.api.now_s, 90.0)
    cluster.api.advance(0.9 * HOLD_S)
    assert cluster.evict() == 429


def test_a_guard_that_has_just_ended_is_made_anew() -> None:
    cluster = Operated()
    job = cluster.api.objects["jobs", "default", guard_name("lab")]
    job["status"]["conditions"] = [{"type": "Failed", "status": "True"}]
    cluster.api.advance(60)
    cluster.act()
    cluster.act()
    assert "conditions" not in cluster.api.objects["jobs", "default", guard_name("lab")]["status"]
    assert cluster.evict() == 429


def test_budgets_of_an_earlier_version_go() -> None:
    cluster = Cluster()
    status = cluster.deployer.start(build_order())
    made = cluster.client.get("ConfigMap", status.handle)
    assert made is not None
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": status.handle,
            "namespace": "default",
            "labels": made["metadata"]["labels"],
        },
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {}}},
    }
    cluster.client.apply(budget)
    cluster.deployer.hold_evictions("lab", cluster.api.now_s)
    cluster.api.step()
    assert [key[2] for key, _ in cluster.api.of("poddisruptionbudgets")] == [guard_name("lab")]


def test_without_the_right_to_it_evictions_pass_and_that_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster()
    cluster.api.rules = [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "verbs": ["get", "create", "update"],
        }
    ]
    lease = ClusterLease(cluster.deployer, "lab")
    for _ in range(2):
        assert lease.take("one", cluster.api.now_s, 90.0).term == 1
    assert capsys.readouterr().err.count("evictions pass without asking") == 1


def test_what_may_be_evicted_has_no_budget() -> None:
    cluster = Cluster(evictable=True)
    cluster.deployer.start(build_order())
    cluster.deployer.hold_evictions("lab", cluster.api.now_s)
    assert not list(cluster.api.of("poddisruptionbudgets"))
