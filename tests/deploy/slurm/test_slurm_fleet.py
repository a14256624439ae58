"""A fleet on a real Slurm under load: a lost job is replaced, a wall time ends, and no stream is cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deploy.slurm.fleet import ALONE, UNEVEN, Shape, SlurmFleet, learn_answers
from tests.deploy.slurm_cluster import SlurmCluster, slurm_cluster, why_not

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    for package in ("torch", "transformers", "zmq", "tokenizers", "httptools", "zenoh"):
        pytest.importorskip(package, reason="needs the extras 'engine', 'fabric' and 'serve'")
    reason = why_not()
    if reason is not None:
        pytest.skip(f"a real Slurm {reason}" if reason.startswith("needs") else reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=5) as running:
        yield running


@pytest.fixture(scope="module")
def model(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def answers(model: Path) -> list[tuple[str, str]]:
    return learn_answers(model)


@pytest.fixture
def make(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> Iterator[Callable[[str, list[Shape]], SlurmFleet]]:
    made: list[SlurmFleet] = []

    def build(partition: str, shapes: list[Shape]) -> SlurmFleet:
        fleet = SlurmFleet(tmp_path, model, shapes, cluster=cluster, partition=partition)
        made.append(fleet)
        fleet.open()
        return fleet

    yield build
    for fleet in made:
        fleet.close()


def test_cancelled_jobs_are_replaced_while_streams_go_on(
    make: Callable[[str, list[Shape]], SlurmFleet],
    cluster: SlurmCluster,
    answers: list[tuple[str, str]],
) -> None:
    fleet = make("long", [ALONE, UNEVEN])
    fleet.turn_until(lambda: len(fleet.ready()) == 2, "both serve")
    first = fleet.ready()
    pipeline = next(name for name, each in first.items() if len(each.hosts) == 2)
    # Two kinds of machines in one heterogeneous job.
    offsets = cluster.run("squeue", "--noheader", "--format=%i %j").splitlines()
    assert {line.split()[0] for line in offsets if pipeline in line} == {
        f"{first[pipeline].handle}+0",
        f"{first[pipeline].handle}+1",
    }
    fleet.stream(answers, 2)
    fleet.wait_streams(1)
    (alone,) = first.keys() - {pipeline}
    for lost in (alone, pipeline):
        before = set(fleet.statuses())
        fleet.wait_streams(1)
        cluster.run("scancel", fleet.ready()[lost].handle)
        fleet.turn_until(lambda: len(fleet.ready()) == 2 and lost not in fleet.ready(), "replaced")  # noqa: B023
        (new,) = set(fleet.statuses()) - before
        assert (fleet.statuses()[lost].state, fleet.statuses()[lost].reason) == (
            "gone",
            "was cancelled",
        )
        told = fleet.control.history.read()
        assert any(e.kind == "plan" and f"{lost} was lost: was cancelled" in e.text for e in told)
        assert [e.instance for e in told if e.kind == "start"][-1] == new
        fleet.wait_streams(2)
    # A controller elsewhere finds what stands, and changes nothing.
    status = set(fleet.ready())
    fleet.control = fleet.make_controller()
    time.sleep(12)  # until the lease of the one before has ended
    for _ in range(4):
        fleet.control.turn()
    assert set(fleet.ready()) == status
    fleet.wait_streams(1)
    for client in fleet.clients:
        client.end()
    fleet.assert_streams()


def test_the_end_of_a_wall_time_cuts_no_stream(
    make: Callable[[str, list[Shape]], SlurmFleet], answers: list[tuple[str, str]]
) -> None:
    fleet = make("short", [ALONE])
    fleet.turn_until(fleet.ready, "it serves")
    ((name, first),) = fleet.ready().items()
    assert first.ends_s is not None
    fleet.stream(answers, 2)
    fleet.turn_until(lambda: fleet.ready().keys() - {name}, "the next one serves")
    assert time.time() < first.ends_s
    fleet.turn_until(lambda: fleet.statuses()[name].state == "gone", "the first has ended")
    # It was drained, not ended by Slurm.
    assert fleet.statuses()[name].reason == "was drained"
    while time.time() < first.ends_s + 1:
        fleet.wait_streams(1)
    told = fleet.control.history.read()
    assert any(e.kind == "plan" and f"{name} ends soon" in e.text for e in told)
    assert next(e.instance for e in told if e.kind == "drain") == name
    for client in fleet.clients:
        client.end()
    fleet.assert_streams()
