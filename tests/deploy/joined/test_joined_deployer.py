"""Machines that joined as a target: instances over several of them, machines that go, lost answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.core.errors import InputError
from atoll.deploy.joined.joined_deployer import JoinedDeployer
from atoll.deploy.joined.joined_settings import JoinedSettings
from atoll.deploy.joined.machine_fabric import MachineFabric
from atoll.deploy.joined.machine_host import InstanceHost, list_machines
from atoll.deploy.joined.machine_request import MachineRequest, PartOrder, check_part
from atoll.deploy.local.daemon import ProcessId, process_start
from atoll.deploy.target import Claim, DeployError, InstanceStatus, TargetSite
from atoll.fabric.registry.records import Gpu
from tests.deploy.joined.builders import FakeMachines, joined_order
from tests.deploy.local.test_local_deployer import wait


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[FakeMachines]:
    made = FakeMachines(tmp_path)
    yield made
    made.close()


def state_of(deployer: JoinedDeployer, fleet: str = "lab") -> InstanceStatus:
    (found,) = deployer.list(fleet)
    return found


def test_what_joins_is_on_offer_in_one_region(machines: FakeMachines) -> None:
    deployer = JoinedDeployer(machines)
    assert deployer.offers() == ()
    assert deployer.list("lab") == ()
    with pytest.raises(DeployError, match="machines that joined"):
        deployer.start(joined_order())
    machines.add("gpu1", ("L4", 2), ("no kind;", 1))
    machines.add("gpu2", ("L4", 2), ("T4", 1))
    found = {(each.node_type, each.available, each.region) for each in deployer.offers()}
    assert found == {("L4:2", 2, "joined"), ("T4:1", 1, "joined")}
    machines.away.add("gpu1")
    assert {each.available for each in deployer.offers()} == {1}


def test_an_instance_stands_where_there_is_room_and_says_what_it_is(machines: FakeMachines) -> None:
    machines.add("gpu1", ("L4", 1))
    machines.add("gpu2", ("L4", 1))
    deployer = JoinedDeployer(machines, drain_s=5.0)
    first, second = joined_order("chat-0"), joined_order("chat-1")
    assert deployer.start(first).hosts == ("gpu1",)
    assert deployer.start(second).hosts == ("gpu2",)
    with pytest.raises(DeployError, match="no room for 1 of L4:1 of chat-2") as refused:
        deployer.start(joined_order("chat-2"))
    assert refused.value.kind == "capacity"
    # Another process, elsewhere, that has nothing but the machines.
    found = JoinedDeployer(machines).list("lab")
    assert [each.labels for each in found] == [first.labels, second.labels]
    assert [each.instance for each in found] == [first.instance, second.instance]
    wait(lambda: "at work" in deployer.logs(found[0].handle))
    started = [each for _, each in machines.asked if each.verb == "start"]
    assert [each.part.drain_s for each in started if each.part is not None] == [5.0, 5.0]
    # No command travels, and no secret.
    assert all("argv" not in each.to_json() for _, each in machines.asked)


def test_a_machine_that_was_set_aside_gets_nothing(machines: FakeMachines) -> None:
    machines.add("gpu1", ("L4", 1))
    deployer = JoinedDeployer(machines)
    with pytest.raises(DeployError, match="no room"):
        deployer.start(replace(joined_order(), avoid_hosts=("gpu1",)))


def test_an_instance_over_two_machines_is_one(machines: FakeMachines) -> None:
    machines.add("gpu1", ("L4", 1))
    machines.add("gpu2", ("T4", 1))
    deployer = JoinedDeployer(machines)
    started = deployer.start(joined_order(types=("L4:1", "T4:1")))
    assert started.hosts == ("gpu1", "gpu2")
    nodes = {name: each.part.nodes for name, each in machines.asked if each.part is not None}
    assert nodes == {"gpu1": ("n0",), "gpu2": ("n1",)}
    wait(lambda: state_of(deployer).state == "ready")
    assert "== gpu1\n" in deployer.logs(started.handle)
    # While one of its machines is away, it is not listed.
    machines.away.add("gpu2")
    assert deployer.list("lab") == ()
    machines.away.clear()
    assert state_of(deployer).state == "ready"
    # One part that ends has all of it failed.
    machines.hosts["gpu2"].answer(MachineRequest(verb="stop", handle=started.handle))
    assert state_of(deployer).state == "draining"
    deployer.stop(started.handle, 0)
    assert state_of(deployer).state == "gone"


def test_of_two_parts_none_stays_where_the_other_is_refused(machines: FakeMachines) -> None:
    machines.add("gpu1", ("L4", 1))
    machines.add("gpu2", ("T4", 1))
    deployer = JoinedDeployer(machines)
    machines.hosts["gpu2"] = InstanceHost(
        machines.pools["gpu2"].pool,
        machines.folder / "gpu2",
        machines._build,
        is_free=lambda: False,
    )
    with pytest.raises(DeployError, match="gpu2: this machine is measured or serves") as refused:
        deployer.start(joined_order(types=("L4:1", "T4:1")))
    assert refused.value.kind == "capacity"
    assert not [each for each in deployer.list("lab") if each.state in ("starting", "ready")]


def test_a_machine_that_is_there_and_says_nothing_is_an_error(machines: FakeMachines) -> None:
    machines.add("gpu1", ("L4", 1))
    machines.add("gpu2", ("L4", 1))
    deployer = JoinedDeployer(machines)
    started = deployer.start(joined_order())
    machines.silent.add("gpu2")
    for act in (
        lambda: deployer.list("lab"),
        lambda: deployer.stop(started.handle, 0),
        lambda: deployer.start(joined_order("chat-1")),
    ):
        with pytest.raises(DeployError, match="gpu2 does not answer") as caught:
            act()
        assert caught.value.kind == "unreachable"


def test_a_start_whose_answer_was_lost_is_not_made_twice(machines: FakeMachines) -> None:
    machines.add("gpu1", ("L4", 1))
    machines.add("gpu2", ("L4", 1))
    deployer = JoinedDeployer(machines)
    machines.losing.add("gpu1")
    with pytest.raises(DeployError, match="does not answer"):
        deployer.start(joined_order())
    machines.losing.clear()
    assert deployer.start(joined_order()).hosts == ("gpu1",)
    assert len(deployer.list("lab")) == 1


@pytest.mark.slow
def test_a_part_without_the_other_is_a_start_that_ended_halfway(machines: FakeMachines) -> None:
    machines.add("gpu1", ("L4", 1))
    machines.add("gpu2", ("T4", 1))
    deployer = JoinedDeployer(machines)
    order = joined_order(types=("L4:1", "T4:1"))
    deployer.start(order)
    (part,) = [e.part for name, e in machines.asked if name == "gpu1" and e.part is not None]
    deployer.stop(state_of(deployer).handle, 0)
    again = part.model_copy(
        update={"labels": order.labels.model_copy(update={"instance": "chat-9"})}
    )
    machines.hosts["gpu1"].answer(MachineRequest(verb="start", part=again))
    found = next(each for each in deployer.list("lab") if each.labels.instance == "chat-9")
    assert (found.state, found.kind, found.reason) == ("failed", "ended", "gpu2 has no part of it")


def test_components_and_strange_weights_are_refused(machines: FakeMachines) -> None:
    machines.add("gpu1", ("L4", 1))
    deployer = JoinedDeployer(machines)
    with pytest.raises(DeployError, match="runs components"):
        deployer.start(replace(joined_order(), recipe=None))
    with pytest.raises(DeployError, match="weights cannot be called") as caught:
        deployer.start(joined_order(source="/etc"))
    assert caught.value.kind == "settings"
    assert deployer.list("lab") == ()


@pytest.mark.parametrize(
    ("source", "good"),
    [
        ("hf://org/model", True),
        ("org/model", True),
        ("org/model-GGUF:Q4_K_M", True),
        ("hf://org/model-GGUF:Q4_K_M", True),
        ("s3://bucket/folder", True),
        ("s3://bucket/../x", False),
        ("org/model:--help", False),
        ("-m", False),
        ("https://evil.example/m", False),
        ("../m", False),
    ],
)
def test_weights_are_of_a_known_kind(source: str, good: bool) -> None:
    order = joined_order(source=source)
    assert order.recipe is not None
    part = PartOrder(
        instance=order.instance,
        labels=order.labels,
        weights=order.recipe.weights,
        nodes=("n0",),
        machines=(),
    )
    if good:
        check_part(part, None)
        return
    with pytest.raises(InputError):
        check_part(part, None)


@pytest.mark.slow
def test_weights_below_the_machines_own_folder_are_taken(tmp_path: Path) -> None:
    made = FakeMachines(tmp_path, models=str(tmp_path / "models"))
    (tmp_path / "models" / "m").mkdir(parents=True)
    made.add("gpu1", ("L4", 1))
    try:
        deployer = JoinedDeployer(made)
        started = deployer.start(joined_order(source=str(tmp_path / "models" / "m")))
        assert started.state in ("starting", "ready")
    finally:
        made.close()


def test_a_dry_run_shows_the_recipe_and_starts_nothing(machines: FakeMachines) -> None:
    deployer = JoinedDeployer(machines)
    texts = JoinedSettings().render_orders([joined_order()], deployer, None)  # type: ignore[arg-type]
    said = json.loads(texts["chat-0.json"])
    assert said["weights"]["source"] == "hf://org/model"
    assert said["nodes"] == ["n0"]
    assert machines.asked == []


def test_a_fleet_without_a_fabric_has_no_machines(tmp_path: Path) -> None:
    settings = JoinedSettings()
    assert settings.claim("joined") is Claim.NAMED
    assert settings.claim("elsewhere") is Claim.NONE
    assert settings.is_untouched(tmp_path)
    opened = settings.open(TargetSite(tmp_path))
    assert opened.offers() == ()
    assert opened.list("lab") == ()
    token = tmp_path / "fabric" / "fabric.token"
    assert MachineFabric.of(token, "joined") is MachineFabric.of(token, "joined")


def test_gpus_that_the_driver_has_not_are_counted_only() -> None:
    machines, on_gpus = list_machines("gpu7", [Gpu(type="X9000", count=2, memory_bytes=1)])
    assert not on_gpus
    assert [(each.name, each.node_type, each.gpu_ids) for each in machines] == [
        ("gpu7", "X9000:2", None)
    ]


def test_instances_end_with_whoever_lent_the_machine(tmp_path: Path) -> None:
    lender = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    made = FakeMachines(tmp_path)
    made.add("gpu1", ("L4", 1))
    made.hosts["gpu1"] = InstanceHost(
        made.pools["gpu1"].pool,
        tmp_path / "lent",
        made._build,
        owner=ProcessId(pid=lender.pid, start=process_start(lender.pid) or ""),
        settle_s=0.1,
    )
    try:
        deployer = JoinedDeployer(made)
        deployer.start(joined_order())
        wait(lambda: state_of(deployer).state == "ready")
        os.kill(lender.pid, signal.SIGKILL)
        lender.wait()
        wait(lambda: state_of(deployer).state == "gone")
        wait(lambda: not made.hosts["gpu1"].busy)
    finally:
        lender.kill()
        made.close()
