"""What every deployer must do, whatever stands behind it: start, list, drain, stop, all of them idempotent.

A new deployer gets a row in `STAGES`: how to make one on a stand-in for its target, and an order that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.control.operation.targets import TargetMap, open_targets, own_regions
from atoll.core.errors import UnknownNameError
from atoll.deploy.joined.joined_deployer import JoinedDeployer
from atoll.deploy.local.local_deployer import LocalDeployer
from atoll.deploy.skypilot import SkyDeployer
from atoll.deploy.target import Deployer, DeployError, InstanceStatus, StartOrder
from atoll.deploy.target_table import TARGETS, read_names, read_settings
from tests.control.operation.test_targets import offer, pool
from tests.deploy import test_skypilot
from tests.deploy.joined.builders import FakeMachines, joined_order
from tests.deploy.kubernetes.builders import build_order
from tests.deploy.kubernetes.test_kube_deployer import Cluster
from tests.deploy.local import test_local_deployer
from tests.deploy.ray.builders import FakeRay, make_deployer
from tests.deploy.slurm.builders import make_order
from tests.deploy.slurm.test_slurm_deployer import Stage
from tests.deploy.toy_target import ToyDeployer, ToyTargets

Staged = tuple[Deployer, StartOrder]


def stage_local(folder: Path) -> Staged:
    machines = test_local_deployer.MACHINES
    return LocalDeployer(machines, folder / "local", settle_s=0.1), test_local_deployer.order()


def stage_slurm(folder: Path) -> Staged:
    return Stage(folder / "work").deployer, make_order()


def stage_kubernetes(folder: Path) -> Staged:
    del folder
    return Cluster().deployer, build_order()


def stage_ray(folder: Path) -> Staged:
    del folder
    return make_deployer(FakeRay()), build_order()


def stage_joined(folder: Path) -> Staged:
    machines = FakeMachines(folder)
    machines.add("gpu1", ("L4", 1))
    return JoinedDeployer(machines), joined_order()


def stage_skypilot(folder: Path) -> Staged:
    del folder
    sky = test_skypilot.SmallSky()
    return SkyDeployer((), test_skypilot.SETTINGS, sky=lambda: sky), test_skypilot.order()


def stage_toy(folder: Path) -> Staged:
    del folder
    return ToyDeployer([offer("toy")]), build_order()


STAGES: dict[str, Callable[[Path], Staged]] = {
    "local": stage_local,
    "slurm": stage_slurm,
    "kubernetes": stage_kubernetes,
    "ray": stage_ray,
    "skypilot": stage_skypilot,
    "joined": stage_joined,
    "toy": stage_toy,
}


@contextmanager
def on_stage(name: str, folder: Path) -> Iterator[Staged]:
    deployer, order = STAGES[name](folder)
    yield deployer, order
    for each in deployer.list(order.labels.fleet):
        deployer.stop(each.handle, 2**31)


@pytest.fixture(params=STAGES)
def staged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Staged]:
    with on_stage(request.param, tmp_path) as made:
        yield made


# What starts daemons has tests of its own of how instances drain and stop.
QUICK_FIRST = [
    pytest.param(name, marks=[pytest.mark.slow] if name in ("local", "joined") else [])
    for name in STAGES
]


@pytest.fixture(params=QUICK_FIRST)
def quick(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Staged]:
    with on_stage(request.param, tmp_path) as made:
        yield made


def of_term(order: StartOrder, term: int) -> StartOrder:
    return replace(order, labels=order.labels.model_copy(update={"term": term}))


def living(deployer: Deployer, order: StartOrder) -> list[InstanceStatus]:
    found = deployer.list(order.labels.fleet)
    return [each for each in found if each.state in ("starting", "ready")]


def test_every_target_has_a_row() -> None:
    assert set(STAGES) == {*TARGETS, "toy"}


def test_starting_twice_starts_one_that_carries_its_labels(staged: Staged) -> None:
    deployer, order = staged
    order = of_term(order, 3)
    started = deployer.start(order)
    assert started.labels == order.labels
    assert started.state in ("starting", "ready")
    again = deployer.start(order)
    assert (again.handle, again.labels) == (started.handle, order.labels)
    (listed,) = living(deployer, order)
    assert (listed.handle, listed.labels) == (started.handle, order.labels)
    assert not deployer.list("another fleet")
    assert isinstance(deployer.logs(started.handle, 5), str)


def test_stopping_twice_leaves_nothing_and_raises_nothing(quick: Staged) -> None:
    deployer, order = quick
    started = deployer.start(order)
    deployer.stop(started.handle, order.labels.term)
    deployer.stop(started.handle, order.labels.term)
    assert not living(deployer, order)
    deployer.drain(started.handle, order.labels.term)
    assert not living(deployer, order)


def test_draining_twice_is_draining_once(quick: Staged) -> None:
    deployer, order = quick
    started = deployer.start(order)
    deployer.drain(started.handle, order.labels.term)
    deployer.drain(started.handle, order.labels.term)
    assert len(deployer.list(order.labels.fleet)) <= 1


def test_an_older_controller_is_refused(staged: Staged) -> None:
    deployer, order = staged
    started = deployer.start(of_term(order, 5))
    for act in (
        lambda: deployer.start(of_term(order, 4)),
        lambda: deployer.drain(started.handle, 4),
        lambda: deployer.stop(started.handle, 4),
    ):
        with pytest.raises(DeployError) as caught:
            act()
        assert caught.value.kind == "superseded"
    assert [each.handle for each in living(deployer, order)] == [started.handle]


def test_a_new_target_is_settings_a_deployer_and_a_field(tmp_path: Path) -> None:
    assert read_names("toy,local", ToyTargets) == ("toy", "local")
    with pytest.raises(UnknownNameError):
        read_names("toy")
    path = tmp_path / "targets.yaml"
    path.write_text("toy: {region: attic}\n")
    settings = read_settings(["toy", "local"], pool("attic", "local"), path=path, table=ToyTargets)
    offers = (offer("attic"), offer("local"))
    assert own_regions("toy", settings, offers) == {"attic"}
    assert TargetMap(settings, offers).of_region("attic") == "toy"
    alone = settings.model_copy(update={"names": ("toy",)})
    target = open_targets(alone, offers[:1], tmp_path)["toy"]
    assert target.offers() == offers[:1]
    started = target.start(build_order())
    assert [each.handle for each in target.list("lab")] == [started.handle]
    # What is written down is read back by the same table.
    assert ToyTargets.from_json(settings.to_json()) == settings
