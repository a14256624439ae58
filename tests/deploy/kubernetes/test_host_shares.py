"""CPUs and memory that nodes of a plan ask for beside their GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.kubernetes.builders import build_order
from tests.deploy.kubernetes.test_kube_deployer import L4, Cluster


def ask(order: Any = None, machines: int = 1, /, **settings: Any) -> dict[str, Any]:
    """Return the resources of an engine on machines of 8 GPUs, 96 CPUs and 384 GiB, and one with half."""
    cluster = Cluster(**settings)
    for number in range(machines):
        cluster.api.add_node(f"large-{number}", {**L4, "nvidia.com/gpu.count": "8"}, 8)
        has = cluster.api.objects["nodes", "", f"large-{number}"]["status"]["allocatable"]
        has |= {"cpu": f"{96000 >> number}m", "memory": f"{(384 << 20) >> number}Ki"}
    cluster.deployer.start(order or build_order(types=("L4:4",)))
    (_, made), *_ = cluster.api.of("statefulsets")
    found: dict[str, Any] = made["spec"]["template"]["spec"]["containers"][0]["resources"]
    return found


def test_nodes_ask_for_their_part_of_a_machine() -> None:
    assert ask() == {
        "requests": {"cpu": "32000m", "memory": "92136Mi", "nvidia.com/gpu": 4},
        "limits": {"cpu": "48000m", "memory": "196608Mi", "nvidia.com/gpu": 4},
    }
    # The least of the machines that it may get: four fifths of what it has.
    assert ask(None, 2) == {
        "requests": {"cpu": "19200m", "memory": "78643Mi", "nvidia.com/gpu": 4},
        "limits": {"cpu": "24000m", "memory": "98304Mi", "nvidia.com/gpu": 4},
    }


@pytest.mark.parametrize(
    ("settings", "requests", "limits"),
    [
        ({"cpus_per_gpu": 0}, {}, {}),
        ({"requests": {"cpu": "1", "memory": "2Gi"}}, {"cpu": "1", "memory": "2Gi"}, {}),
        (
            {"limits": {"cpu": "1", "rdma/hca": "1"}},
            {"memory": "92136Mi"},
            {"cpu": "1", "rdma/hca": "1", "memory": "196608Mi"},
        ),
    ],
)
def test_settings_go_first(
    settings: dict[str, Any], requests: dict[str, str], limits: dict[str, str]
) -> None:
    gpus = {"nvidia.com/gpu": 4}
    assert ask(**settings) == {"requests": {**requests, **gpus}, "limits": {**limits, **gpus}}


def test_where_no_such_machine_stands_yet_nothing_is_asked_for() -> None:
    assert ask(build_order(types=("T4:8",))) == {
        kind: {"nvidia.com/gpu": 8} for kind in ("requests", "limits")
    }
