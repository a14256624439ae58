"""What a cluster offers, from the outputs of a real one."""

from __future__ import annotations

import pytest

from atoll.deploy.slurm.slurm_jobs import read_jobs
from atoll.deploy.slurm.slurm_pool import (
    SlurmNode,
    SlurmPartition,
    SlurmPool,
    has_nodes,
    read_gres,
    read_minutes,
    read_nodes,
    read_partitions,
)
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from atoll.deploy.target import DeployError
from tests.deploy.slurm.builders import read_data


def settings(**fields: object) -> SlurmSettings:
    return SlurmSettings.parse({"work_folder": "/work", **fields})


def real_pool(**fields: object) -> SlurmPool:
    nodes = read_nodes(read_data("sinfo-22.05.json"))
    return SlurmPool(settings(**fields), nodes, read_partitions(read_data("partitions.txt")))


def node(name: str, gpus: str, used: str = "", *, up: bool = True, part: str = "long") -> SlurmNode:
    return SlurmNode(
        name, (part,), tuple(read_gres(gpus).items()), tuple(read_gres(used).items()), up
    )


def offered(pool: SlurmPool) -> dict[str, int]:
    return {f"{o.node_type} {o.market}": o.available for o in pool.list_offers()}


def test_what_others_hold_is_not_offered_and_what_we_hold_is() -> None:
    pool = real_pool(usd_per_gpu_hour={"L4": 0.5})
    # n1 has both of its L4 taken, n2 three of its four T4, n3 is idle.
    assert offered(pool) == {"L4:2 on-demand": 1, "T4:1 on-demand": 1}
    held = [job for job in read_jobs(read_data("squeue-22.05.json")) if "RUNNING" in job.states]
    ours = {o.node_type: (o.available, o.usd_per_hour) for o in pool.list_offers(held)}
    assert ours == {"L4:2": (2, 1.0), "T4:4": (1, 0.0)}


def test_nodes_that_are_down_are_not_offered_and_spot_is_named() -> None:
    partitions = [SlurmPartition("long", True, None), SlurmPartition("scavenge", True, None)]
    nodes = [
        node("a", "gpu:l4:8"),
        node("b", "gpu:l4:8", up=False),
        node("c", "gpu:l4:8", "gpu:l4:3(IDX:0-2)", part="scavenge"),
    ]
    pool = SlurmPool(settings(spot_partitions=["scavenge"]), nodes, partitions)
    assert offered(pool) == {"L4:8 on-demand": 1, "L4:4 spot": 1}


def test_gpus_that_the_catalog_does_not_know_are_named_in_a_line() -> None:
    partitions = [SlurmPartition("long", True, None)]
    nodes = [node("a", "gpu:4"), node("b", "gpu:weird:2,gpu:l4:1"), node("c", "gpu:a100:4")]
    pool = SlurmPool(settings(gpu_names={"a100": "A100-40"}), nodes, partitions)
    assert offered(pool) == {"A100-40:4 on-demand": 1, "L4:1 on-demand": 1}
    (line,) = pool.notes
    assert "gpu:weird" in line
    assert "gpu without a type" in line
    named = SlurmPool(
        settings(gpu_names={"gpu": "H100", "weird": "T4", "a100": "A100-40"}), nodes, partitions
    )
    assert named.notes == ()
    assert offered(named)["H100:4 on-demand"] == 1
    assert named.choose("H100", 4, "on-demand", 1).gres == "gpu"


def test_a_family_of_gpus_is_not_taken_for_one_of_them() -> None:
    partitions = [SlurmPartition("long", True, None)]
    nodes = [node("a", "gpu:a100:4,gpu:h100:1"), node("b", "gpu:v100:2,gpu:h200:1")]
    pool = SlurmPool(settings(), nodes, partitions)
    assert offered(pool) == {"H100:1 on-demand": 1, "H200:1 on-demand": 1}
    (line,) = pool.notes
    assert "several are called so: gpu:a100 (A100-40 or " in line
    assert "gpu:v100 (V100-16 or V100-32); set gpu_names" in line


def test_partitions_are_chosen_by_what_they_allow() -> None:
    assert real_pool().choose("T4", 2, "on-demand", 1).partitions == ("long", "members", "short")
    choice = real_pool(time_limit_minutes=30, account="other").choose("L4", 2, "on-demand", 2)
    assert (choice.gres, choice.partitions) == ("gpu:l4", ("long",))


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"partitions": ["nope"]}, "settings", "unknown partition 'nope'"),
        ({"partitions": ["members"], "account": "x"}, "settings", "does not allow the account x"),
        ({"partitions": ["short"], "time_limit_minutes": 3}, "settings", "allows 2 minutes"),
        ({"partitions": ["long"]}, "capacity", "2 nodes with 2 L4 are up"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, object], kind: str, words: str) -> None:
    with pytest.raises(DeployError, match=words) as caught:
        real_pool(**fields).choose("L4", 2, "on-demand", 3 if kind == "capacity" else 1)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("", {}),
        ("(null)", {}),
        ("gpu:4", {"": 4}),
        ("gpu", {"": 1}),
        ("gpu:l4:2(S:0-1),craynetwork:3", {"l4": 2}),
        ("gpu:a100:3(IDX:0,2-3),gpu:t4:0(IDX:N/A)", {"a100": 3}),
        ("gpu:nvidia_a100-sxm4-80gb:8", {"nvidia_a100-sxm4-80gb": 8}),
    ],
)
def test_gres(text: str, gpus: dict[str, int]) -> None:
    assert dict(read_gres(text)) == gpus


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("UNLIMITED", None), ("00:02:00", 2), ("1-00:00:00", 1440), ("7-01:30:00", 10170)],
)
def test_wall_times(text: str, minutes: int | None) -> None:
    assert read_minutes(text) == minutes


def test_later_versions_of_sinfo_do_not_name_nodes() -> None:
    assert has_nodes(read_data("sinfo-22.05.json"))
    assert not has_nodes('{"sinfo": [{"nodes": {"allocated": 0}}], "meta": {}}')


@pytest.mark.parametrize(
    "wrong",
    [
        {"account": "a b"},
        {"partitions": ["x;y"]},
        {"constraint": "a'b"},
        {"options": ["--wrap=id"]},
        {"options": ["--mem=4G\n#SBATCH --uid=0"]},
        {"work_folder": "relative"},
        {"work_folder": "/with'quote"},
        {"work_folder": "/with%j"},
        {"modules": ["a; id"]},
        {"partitions": ["a"], "spot_partitions": ["b"]},
    ],
)
def test_settings_that_do_not_fit_a_script_are_refused(wrong: dict[str, object]) -> None:
    from atoll.core.errors import InputError

    with pytest.raises(InputError):
        settings(**wrong)
    assert settings(options=["--mem=4G", "--exclusive"]).options == ("--mem=4G", "--exclusive")
