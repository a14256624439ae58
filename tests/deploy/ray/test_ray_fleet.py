"""A fleet on a real Ray under load: a machine is lost, and a controller starts anew."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from atoll.deploy.ray.ray_client import HttpRayClient
from atoll.deploy.ray.ray_deployer import RayDeployer
from atoll.deploy.ray.ray_settings import RaySettings
from atoll.deploy.target import Deployer
from tests.deploy.ray.ray_cluster import RayCluster, ray_cluster, why_not
from tests.deploy.slurm.fleet import ALONE, UNEVEN, StreamedFleet, learn_answers

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MACHINES = (("a1", "L4", 2), ("a2", "L4", 2), ("a3", "L4", 2), ("b1", "T4", 4))


@dataclass
class RayFleet(StreamedFleet):
    """A fleet in a real Ray cluster."""

    cluster: RayCluster = field(kw_only=True)

    def make_target(self) -> Deployer:
        """Return the cluster."""
        settings = RaySettings(
            address=self.cluster.url,
            python=sys.executable,
            cpus_per_gpu=0.1,
            # As the pool that these tests share has them.
            region="slurm",
            market="on-demand",
        )
        return RayDeployer(HttpRayClient(self.cluster.url), settings, drain_s=90.0)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[RayFleet]:
    for package in ("torch", "transformers", "zmq", "tokenizers", "httptools", "zenoh"):
        pytest.importorskip(package, reason="needs the extras 'engine', 'fabric' and 'serve'")
    reason = why_not()
    if reason is not None:
        pytest.skip(f"a real Ray {reason}")
    from tests.tiny_model import write_tiny_model

    model = write_tiny_model(tmp_path / "tiny")
    with ray_cluster(MACHINES) as cluster:
        made = RayFleet(
            *(tmp_path, model, [ALONE, UNEVEN]),
            atoll=(sys.executable, "-m", "atoll"),
            python=sys.executable,
            cluster=cluster,
        )
        made.open()
        yield made
        made.close()


def test_a_machine_is_lost_while_streams_go_on(fleet: RayFleet) -> None:
    fleet.turn_until(lambda: len(fleet.ready()) == 2, "both serve")
    first = fleet.ready()
    (pipeline,) = (name for name, each in first.items() if len(each.hosts) == 2)
    (alone,) = first.keys() - {pipeline}
    fleet.stream(learn_answers(fleet.model), 2)
    fleet.wait_streams(1)
    # A machine is gone with all that ran there; another takes its place.
    (host,) = first[alone].hosts
    fleet.cluster.kill(host)
    fleet.turn_until(lambda: len(fleet.ready()) == 2 and alone not in fleet.ready(), "replaced")
    lost = fleet.statuses()[alone]
    assert (lost.state, lost.reason) == ("failed", f"n0 was lost: {host} has left the cluster")
    told = fleet.control.history.read()
    assert any(e.kind == "plan" and f"{alone} was lost" in e.text for e in told)
    fleet.wait_streams(1)
    # A controller elsewhere finds what stands, and changes nothing.
    stands = set(fleet.ready())
    fleet.control = fleet.make_controller()
    time.sleep(12)  # until the lease of the one before has ended
    for _ in range(4):
        fleet.control.turn()
    assert set(fleet.ready()) == stands
    fleet.wait_streams(1)
    for client in fleet.clients:
        client.end()
    fleet.assert_streams()
