"""A fleet put together for a controller: its file, its orders, its fabric, its targets."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.control.decision.control_view import ControlPolicy, ObservedInstance, View
from atoll.control.operation.control_loop import NoGateways
from atoll.control.operation.entrance import keep_entrance, use_fabric
from atoll.control.operation.fleet_home import Entrance, FleetHome, FleetRecord, WeightsRecord
from atoll.control.operation.operated import (
    FleetSource,
    list_gateways,
    look_at_targets,
    open_fleet,
    open_gateways,
    renew_gateways,
)
from atoll.control.operation.operated_plans import force_plan, foresee_dips
from atoll.control.operation.orders import OrderMaker, command_settings
from atoll.control.operation.targets import TargetMap
from atoll.core.errors import AtollError, InputError
from atoll.deploy.commands.node_commands import ServiceWeights
from atoll.deploy.labels import Labels
from atoll.deploy.target import DeployError, InstanceStatus
from atoll.deploy.target_table import TargetSettings
from atoll.plan.plan import Instance, Plan
from tests.control.operation.test_control_loop import PROBLEM, plan

FLEET = """\
name: lab
services:
  chat: {model: llama-3.1-8b, ttft: 1500ms, tpot: 80ms, rate: 1/s, lengths: 512x128}
pool:
  owned: {here: {"L4:1": 4}}
"""
LABELS = Labels(
    fleet="lab", instance="chat-0", plan="p", placement="q", service="chat", role="chat/llm/both"
)


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(PROBLEM)


def touch(path: Path, text: str, at: int) -> None:
    path.write_text(text)
    os.utime(path, ns=(at, at))


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    touch(path, FLEET, 1)
    source = FleetSource(path)
    first = source.problem
    assert [service.phases for service in first.services] == ["together"]
    assert not source.read_again()
    touch(path, FLEET.replace("1/s", "2/s"), 2)
    assert source.read_again()
    assert source.problem.services[0].rate_per_s == 2.0
    # Other words, the same meaning: no reason to plan.
    touch(path, "# more\n" + FLEET.replace("1/s", "2/s"), 3)
    assert not source.read_again()


@pytest.mark.parametrize(
    "text", ["models: {", FLEET.replace("name: lab", "name: other"), FLEET.replace("L4", "L9")]
)
def test_a_file_that_cannot_be_followed_changes_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lab.yaml"
    touch(path, FLEET, 1)
    source = FleetSource(path)
    before = source.problem
    touch(path, text, 2)
    with pytest.raises(AtollError) as caught:
        source.read_again()
    assert "\n" not in str(caught.value)
    assert source.problem == before
    # Said once; put right, it is followed again.
    assert not source.read_again()
    touch(path, FLEET.replace("1/s", "3/s"), 3)
    assert source.read_again()
    path.unlink()
    with pytest.raises(InputError):
        source.read_again()


def orders(
    targets: TargetSettings, weights: dict[str, ServiceWeights], token: str = "/t"
) -> OrderMaker:
    found = TargetMap(targets, PROBLEM.offers)
    return OrderMaker(found, weights, command_settings(targets, token, hub_token="/hf"))


CHAT = {"chat": ServiceWeights("hf://org/name", ("chat",))}
SMALL = {"chat": ServiceWeights("/tiny", ("chat",), "atoll", stand_in=True)}


def test_secrets_are_named_by_their_files(made: Plan) -> None:
    one = made.instances[0]
    for names in ("local", "kubernetes", "skypilot"):
        targets = TargetSettings.parse({"names": [names]})
        order = orders(targets, CHAT, "/home/t").make(one, LABELS, made)
        for command in order.commands:
            assert dict(command.secrets) == {"ATOLL_FABRIC": "/home/t", "HF_TOKEN_PATH": "/hf"}
            assert "/home/t" not in " ".join(command.argv)
            assert "vllm" in command.argv
            assert "atoll.instance=chat-0" in command.argv


def test_who_pretends_computes_on_cores(made: Plan) -> None:
    one = made.instances[0]
    pretending = TargetSettings.parse({"names": ["local"], "local": {"pretend": True}})
    text = " ".join(orders(pretending, SMALL).make(one, LABELS, made).commands[0].argv)
    assert '"device":"cpu"' in text
    assert '"alone":false' in text
    assert '"split":false' in text
    split = {"pretend": True, "split_on_cores": True}
    splitting = TargetSettings.parse({"names": ["local"], "local": split})
    text = " ".join(orders(splitting, SMALL).make(one, LABELS, made).commands[0].argv)
    assert '"split":true' in text
    real = TargetSettings.parse({"names": ["local"]})
    text = " ".join(orders(real, SMALL).make(one, LABELS, made).commands[0].argv)
    assert '"device":"cuda"' in text
    slurm = {"work_folder": "/w", "python": "/opt/python", "atoll": ["/opt/atoll"]}
    there = TargetSettings.parse({"names": ["slurm"], "slurm": slurm})
    found = command_settings(there, "/t", device="cpu")["slurm"]
    assert (found.python, found.atoll, found.device) == ("/opt/python", ("/opt/atoll",), "cpu")


def test_what_cannot_be_started_is_a_refusal(made: Plan) -> None:
    one, targets = made.instances[0], TargetSettings()
    with pytest.raises(DeployError, match="no weights are known for chat"):
        orders(targets, {}).make(one, LABELS, made)
    alone = one.model_copy(update={"role": "chat/llm/prefill"})
    served = {"chat": replace(CHAT["chat"], engine="llamacpp")}
    with pytest.raises(DeployError, match="prefill alone"):
        orders(targets, served).make(alone, LABELS, made)


def test_a_token_given_as_text_is_kept_for_its_owner(tmp_path: Path) -> None:
    home = FleetHome(tmp_path / "home")
    home.make()
    use_fabric(home, "open://127.0.0.1:1", "http://gate")
    entrance = use_fabric(home, "open://127.0.0.1:7447", "http://gate", "/admin")
    kept = Path(entrance.token)
    assert kept.read_text() == "open://127.0.0.1:7447\n"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert (entrance.url, entrance.admin_token) == ("http://gate", "/admin")
    file = tmp_path / "mine.token"
    file.write_text("open://127.0.0.1:7447")
    assert use_fabric(home, f"@{file}", None).token == str(file)
    # Those of others are theirs to keep.
    assert keep_entrance(home, "lab", entrance) == entrance
    with pytest.raises(AtollError):
        use_fabric(home, "no token at all", None)


def record(**changes: object) -> FleetRecord:
    data = {"name": "small", "source": "/small.yaml", "targets": TargetSettings(), **changes}
    return FleetRecord.parse(data)


def test_gateways_are_asked_where_they_can_be(tmp_path: Path) -> None:
    home = FleetHome(tmp_path)
    assert isinstance(open_gateways(home, record(), PROBLEM), NoGateways)
    silent = record(entrance=Entrance(url="http://gate", token="/t", observer="/t"))
    assert list_gateways(silent) == ()
    at = Entrance(url="http://gate", admin_socket="/s", token="/t", observer="/t")
    spoken = record(entrance=at)
    first = open_gateways(home, spoken, PROBLEM, keep=False)
    assert not isinstance(first, NoGateways)
    # The same address: what it was told is not forgotten.
    assert renew_gateways(first, home, spoken, PROBLEM) is first
    several = use_fabric(home, "open://127.0.0.1:7447", "http://a, http://b", "/admin")
    assert [each.url for each in list_gateways(record(entrance=several))] == [
        "http://a",
        "http://b",
    ]
    moved = record(entrance=at.model_copy(update={"admin_socket": "/other"}))
    assert renew_gateways(first, home, moved, PROBLEM) is not first


def test_one_silent_target_hides_no_other(tmp_path: Path) -> None:
    settings = {
        "names": ["kubernetes", "local"],
        "kubernetes": {"kubeconfig": "/nowhere"},
        "local": {"pretend": True},
    }
    looks = look_at_targets(FleetHome(tmp_path), record(targets=settings))
    assert [look.target for look in looks] == ["kubernetes", "local"]
    assert looks[0].error is not None
    assert looks[1].error is None
    assert looks[1].statuses == ()


def test_targets_of_a_fleet_offer_its_pool(tmp_path: Path) -> None:
    weights = {"chat": WeightsRecord(source="hf://org/name", names=("chat",))}
    targets = TargetSettings.parse({"names": ["local"], "local": {"pretend": True}})
    fleet = open_fleet(
        FleetHome(tmp_path),
        record(targets=targets, weights=weights),
        PROBLEM,
        "/t",
        ControlPolicy(),
    )
    assert [offer.key for offer in fleet.targets["local"].offers()] == [
        offer.key for offer in PROBLEM.offers
    ]
    place = fleet.place(NoGateways())
    assert place.fleet == "small"
    assert list(place.targets) == ["local"]


def observe(one: Instance, name: str) -> ObservedInstance:
    labels = LABELS.model_copy(update={"instance": name})
    instance = one.model_copy(update={"id": name})
    return ObservedInstance(InstanceStatus(name, labels, "ready", 0.0), instance)


def test_a_plan_that_somebody_chose_keeps_what_runs(made: Plan) -> None:
    view = View(time_s=1000.0, problem=PROBLEM, offers=PROBLEM.offers)
    fresh = force_plan(made, view)
    assert len(fresh.wanted) == len(made.instances)
    assert not foresee_dips(fresh.wanted, view, ControlPolicy())
    running = observe(made.instances[0], "chat-old")
    kept = force_plan(made, replace(view, instances=(running,)))
    assert "chat-old" in {one.id for one in kept.wanted}
    assert kept.planned_s == 1000.0
    # Where there is no room beside what runs, the way there is a dip.
    held = tuple(observe(one, f"old-{at}") for at, one in enumerate(made.instances))
    few = PROBLEM.offers[0].model_copy(update={"available": len(held)})
    tight = view.problem.replace(offers=(few,))
    crowded = replace(view, problem=tight, offers=tight.offers, instances=held)
    other = tuple(
        one.model_copy(update={"id": f"new-{at}"}) for at, one in enumerate(made.instances)
    )
    assert foresee_dips(other, crowded, ControlPolicy())
