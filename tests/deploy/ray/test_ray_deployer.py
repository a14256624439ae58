"""Instances as jobs of a Ray cluster: what is asked for, what is listed, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.deploy.ray.ray_jobs import name_job
from atoll.deploy.ray.ray_target import RayTarget
from atoll.deploy.target import DeployError, TargetSite
from tests.deploy.kubernetes.builders import build_order
from tests.deploy.ray.builders import NOW_S, FakeRay, make_deployer, make_node


def test_offers_are_the_machines_less_what_others_hold() -> None:
    ray = FakeRay(
        make_node("head", None, 0),
        make_node("a", "H100", 8),
        make_node("b", "H100", 8),
        make_node("c", "H100", 8, labels={"ray.io/market-type": "spot"}),
        make_node("dead", "H100", 8, state="DEAD"),
        make_node("odd", "TPU-V4", 4),
        make_node("untyped", None, 2),
        make_node("m", "AMD-Instinct-MI300X-OAM", 8),
    )
    # One that is both is the more exact one.
    ray.machines[1]["resources_total"]["accelerator_type:H"] = 1.0
    ray.placed = [
        {"name": "atoll:own", "state": "CREATED", "bundles": [_bundle("a", 8)]},
        {"name": "", "state": "CREATED", "bundles": [_bundle("b", 2.5), _bundle("b", 1)]},
        {"name": "", "state": "REMOVED", "bundles": [_bundle("b", 8)]},
    ]
    ray.living = [
        {"state": "ALIVE", "node_id": "id-c", "required_resources": {"GPU": 0.5}},
        {
            "state": "ALIVE",
            "node_id": "id-c",
            "required_resources": {"GPU": 4},
            "placement_group_id": "x",
        },
    ]
    deployer = make_deployer(
        ray, gpu_names={"GPU": "L4"}, usd_per_gpu_hour={"H100": 2.0}, region="lab"
    )
    found = {(o.node_type, o.market): (o.available, o.usd_per_hour) for o in deployer.offers()}
    assert found == {
        ("H100:8", "owned"): (1, 16.0),
        ("H100:4", "owned"): (1, 8.0),
        ("H100:4", "spot"): (1, 8.0),
        ("L4:2", "owned"): (1, 0.0),
        ("MI300X:8", "owned"): (1, 0.0),
    }
    assert {o.region for o in deployer.offers()} == {"lab"}


def _bundle(node: str, gpus: float) -> dict[str, object]:
    return {"node_id": f"id-{node}", "unit_resources": {"GPU": gpus, "CPU": 1.0}}


def test_a_job_has_a_bundle_for_every_node_and_shows_no_secret(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("very secret")
    ray = FakeRay()
    deployer = make_deployer(ray, env={"HF_HOME": "/models"}, cpus_per_gpu=2, python="py")
    order = build_order(
        types=("L4:2", "T4:4"), env=(("A", "1"),), secrets=(("ATOLL_FABRIC", str(token)),)
    )
    started = deployer.start(order)
    assert (started.state, started.instance) == ("starting", order.instance)
    job = ray.records[started.handle]
    assert job["entrypoint"] == "exec py -m atoll.deploy.ray.ray_job"
    assert job["runtime_env"]["env_vars"] == {
        "HF_HOME": "/models",
        "RAY_JOB_STOP_WAIT_TIME_S": "90",
    }
    written = ray.order_of(started.handle)
    assert [written.bundles(command) for command in written.commands] == [
        [{"GPU": 2.0, "CPU": 4.0, "accelerator_type:L4": 0.001}],
        [{"GPU": 4.0, "CPU": 8.0, "accelerator_type:T4": 0.001}],
    ]
    assert written.wanted == "2 L4 + 4 T4"
    assert (written.ready_s, written.drain_s) == (order.ready_s, 30.0)
    assert ray.unpack(started.handle)["secrets/ATOLL_FABRIC"] == "very secret"
    assert "very secret" not in ray.shown()
    assert "very secret" not in deployer.dry_run(order)


def test_a_node_without_gpus_takes_something_of_a_machine() -> None:
    ray = FakeRay()
    handle = make_deployer(ray, cpus_per_gpu=0).start(build_order(gpus=0)).handle
    written = ray.order_of(handle)
    assert written.bundles(written.commands[0]) == [{"CPU": 0.001}]


def test_a_planned_host_and_hosts_to_avoid_are_machines_of_ray() -> None:
    ray = FakeRay(make_node("a", "L4", 1), make_node("b", "L4", 1), make_node("c", "L4", 1))
    deployer = make_deployer(ray)
    pinned = deployer.start(build_order("one", host="b")).handle
    assert [command.only for command in ray.order_of(pinned).commands] == ["id-b"]
    aside = replace(build_order("two"), avoid_hosts=("a", "nobody"))
    assert ray.order_of(deployer.start(aside).handle).avoid == ("id-a",)


def test_an_instance_is_what_its_job_says() -> None:
    ray = FakeRay()
    deployer, order = make_deployer(ray), build_order()
    handle = deployer.start(order).handle
    assert deployer.list("lab")[0].reason == "its job begins"
    ray.say(handle, "starting", "waits for 1 L4", hosts=())
    assert deployer.list("lab")[0].reason == "waits for 1 L4"
    ray.say(handle, "ready")
    # A controller that starts elsewhere finds the same.
    (found,) = make_deployer(ray).list("lab")
    assert (found.state, found.hosts, found.labels) == ("ready", ("m1",), order.labels)
    assert found.instance == order.instance
    ray.say(handle, "draining")
    ray.logs[handle] += 'atoll-state {"state": "go'  # the rest is still being written
    assert deployer.list("lab")[0].state == "draining"


@pytest.mark.parametrize(
    ("message", "kind", "words"),
    [
        ("... (ModuleNotFoundError: No module named 'atoll')", "image", "could not begin"),
        ("failed with exit code 127, last logs:\nsh: python3: not found", "image", "not found"),
        ("runtime_env setup failed: no disk", "image", "no disk"),
        ("Job supervisor actor died: its node is gone", "ended", "its node is gone"),
        ("", "ended", "without a word"),
    ],
)
def test_what_fails_without_a_word_of_its_own_is_explained(
    message: str, kind: str, words: str
) -> None:
    ray = FakeRay()
    deployer = make_deployer(ray)
    ray.end(deployer.start(build_order()).handle, "FAILED", message)
    (found,) = deployer.list("lab")
    assert (found.state, found.kind) == ("failed", kind)
    assert words in found.reason
    assert "\n" not in found.reason


def test_what_fails_says_why_and_is_listed_for_a_while() -> None:
    ray = FakeRay()
    deployer = make_deployer(ray, keep_s=100.0)
    handle = deployer.start(build_order()).handle
    last = ray.say(handle, "failed", "n0 ended with exit 3: oh no", "settings")
    ray.end(handle, "FAILED", f"entrypoint failed, last logs:\n{last}\n", NOW_S - 99)
    (found,) = deployer.list("lab")
    assert (found.reason, found.kind) == ("n0 ended with exit 3: oh no", "settings")
    ray.end(handle, "FAILED", last, NOW_S - 101)
    assert not deployer.list("lab")
    # Its record goes when the next one starts.
    other = deployer.start(build_order("next")).handle
    assert set(ray.records) == {other}


def test_stopping_kills_nodes_that_do_not_listen() -> None:
    ray = FakeRay()
    deployer = make_deployer(ray)
    handle = deployer.start(build_order(types=("L4:1", "T4:1"))).handle
    ray.say(handle, "ready", hosts=("m1", "m2"))
    ray.heeds = False
    deployer.stop(handle, 0)
    assert ray.records[f"{handle}-stop"]["entrypoint"] == (
        f"exec python3 -m atoll.deploy.ray.ray_stop {handle} n0 n1"
    )
    (found,) = deployer.list("lab")
    assert (found.state, found.reason) == ("gone", "was stopped")


def test_an_instance_that_does_not_end_is_an_error() -> None:
    ray = FakeRay()
    deployer = make_deployer(ray)
    handle = deployer.start(build_order()).handle
    ray.heeds = False
    with pytest.raises(DeployError, match="does not end"):
        deployer.stop(handle, 0)


def test_draining_is_over_when_the_streams_are() -> None:
    ray = FakeRay()
    deployer = make_deployer(ray)
    handle = deployer.start(build_order()).handle
    ray.heeds = False
    ray.say(handle, "draining")
    deployer.drain(handle, 0)
    assert deployer.list("lab")[0].state == "draining"
    ray.end(handle, "STOPPED", "Job was intentionally stopped.")
    assert deployer.list("lab")[0].reason == "was drained"


@pytest.mark.parametrize(
    ("types", "words"),
    [
        (("H100:8",), "no room for 8 H100 of chat-0: the cluster has 0 "),
        (("L4:2", "L4:1"), "2 \\+ 1 L4 of chat-0: the cluster has 2, at most 2 in a machine"),
        (("T4:8",), "8 T4 of chat-0: the cluster has 4, at most 4"),
    ],
)
def test_more_than_there_is_of_a_kind_is_refused(types: tuple[str, ...], words: str) -> None:
    ray = FakeRay()
    with pytest.raises(DeployError, match=words) as caught:
        make_deployer(ray).start(build_order(types=types))
    assert caught.value.kind == "capacity"
    assert not ray.records
    # Where machines come when they are asked for, they are asked for.
    assert make_deployer(ray, autoscales=True).start(build_order(types=types)).state == "starting"


def test_an_answer_that_got_lost_starts_no_second_job() -> None:
    ray = FakeRay()
    deployer, order = make_deployer(ray), build_order()
    ray.refusal, ray.takes_refused = DeployError("no answer", kind="unreachable"), True
    assert deployer.start(order).handle == name_job(order.labels)
    ray.refusal, ray.takes_refused = DeployError("no answer", kind="unreachable"), False
    with pytest.raises(DeployError, match="no answer"):
        deployer.start(build_order("other"))
    assert len(ray.records) == 1


def test_a_secret_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    order = build_order(secrets=(("ATOLL_FABRIC", str(tmp_path / "nothing")),))
    with pytest.raises(DeployError, match="file of ATOLL_FABRIC cannot be read"):
        make_deployer(FakeRay()).start(order)


def test_logs_come_from_every_machine() -> None:
    ray = FakeRay()
    deployer = make_deployer(ray)
    handle = deployer.start(build_order(types=("L4:1", "T4:1"))).handle
    assert "Running entrypoint" in deployer.logs(handle)
    ray.say(handle, "ready", hosts=("m1", "m2"))
    ray.files["id-m1", f"{handle}.n0.log"] = "one\ntwo\n"
    said = deployer.logs(handle, 1)
    assert said.splitlines()[:3] == ["== n0", "two", "== n1"]
    assert "no such file" in said
    with pytest.raises(DeployError, match="no job nobody"):
        deployer.logs("nobody")


def test_jobs_of_others_are_left_alone() -> None:
    ray = FakeRay()
    ray.submit({"submission_id": "theirs", "entrypoint": "x", "metadata": {"atoll.labels": "{}"}})
    ray.submit({"submission_id": "also", "entrypoint": "x", "metadata": None})
    deployer = make_deployer(ray)
    assert not deployer.list("lab")
    deployer.stop("theirs", 0)
    deployer.drain("also", 0)
    assert {job["status"] for job in ray.records.values()} == {"RUNNING"}


def test_names_that_are_cut_stay_apart() -> None:
    long = [build_order("x" * 300 + end).labels for end in "ab"]
    names = {name_job(labels) for labels in long}
    assert len(names) == 2
    assert max(map(len, names)) <= 100


def test_the_target_renders_orders_and_refuses_an_odd_address(tmp_path: Path) -> None:
    from atoll.catalog.catalog import Catalog

    ray, target = FakeRay(), RayTarget()
    (text,) = target.render_orders([build_order()], make_deployer(ray), Catalog.default()).values()
    assert '"accelerator": "L4"' in text
    with pytest.raises(ValueError, match="http://HEAD:8265"):
        RayTarget(address="head:6379")
    closed = RayTarget(address="http://127.0.0.1:9").open(TargetSite(tmp_path))
    with pytest.raises(DeployError, match="Ray does not answer at http") as caught:
        closed.offers()
    assert caught.value.kind == "unreachable"
