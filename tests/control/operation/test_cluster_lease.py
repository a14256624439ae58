"""Two controllers that have nothing in common but a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.control.operation.controller_lease import ClusterLease, LeaseHeldError, find_cluster
from atoll.control.operation.fleet_home import FleetHome
from atoll.control.operation.operated import HomeLease, open_lease
from atoll.control.operation.targets import PoolTarget
from atoll.deploy.kubernetes.kube_client import KubeClient
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.local.local_deployer import LocalDeployer
from tests.deploy.kubernetes.builders import build_order
from tests.deploy.kubernetes.tiny_api import TinyApi


def target(api: TinyApi) -> KubernetesDeployer:
    client = KubeClient(api, "default")
    return KubernetesDeployer(client, KubernetesSettings(), clock=lambda: api.now_s)


def test_what_one_has_started_the_other_knows() -> None:
    api = TinyApi()
    order = build_order("chat-0")
    target(api).start(order)
    (status,) = target(api).list("lab")
    assert status.instance == order.instance


def test_one_of_two_acts_until_it_gives_way() -> None:
    api = TinyApi()
    one, two = (ClusterLease(target(api), "lab") for _ in range(2))
    first = one.take("one", 100.0, 90.0)
    assert one.take("one", 150.0, 90.0).term == first.term
    with pytest.raises(LeaseHeldError, match="another controller"):
        two.take("two", 160.0, 90.0)
    one.give_back(170.0)
    assert two.take("two", 171.0, 90.0).term == first.term + 1
    two.give_back(172.0)
    # Who never held it takes nothing from anybody.
    ClusterLease(target(api), "lab").give_back(173.0)


def test_a_dead_one_is_waited_for() -> None:
    api = TinyApi()
    ClusterLease(target(api), "lab").take("one", 100.0, 90.0)
    other = ClusterLease(target(api), "lab")
    with pytest.raises(LeaseHeldError):
        other.take("two", 189.0, 90.0)
    assert other.take("two", 191.0, 90.0).term == 2


def test_the_cluster_decides_where_there_is_one(tmp_path: Path) -> None:
    home = FleetHome(tmp_path)
    local = PoolTarget(LocalDeployer((), tmp_path / "local"), ())
    cluster = PoolTarget(target(TinyApi()), ())
    assert find_cluster([local]) is None
    assert isinstance(open_lease(home, "lab", {"local": local}), HomeLease)
    both = {"local": local, "kubernetes": cluster}
    assert isinstance(open_lease(home, "lab", both), ClusterLease)
