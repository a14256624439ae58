"""What a gateway records of itself, and what it asks a Prometheus for."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.runtime.gateway.console.history_requests import ShownCurves
from atoll.runtime.gateway.console.shown_machines import ShownLoad, ShownMachine
from atoll.runtime.gateway.history_recorder import describe_change, find_path, sum_machine
from atoll.runtime.gateway.prometheus_history import PrometheusHistory, write_query
from atoll.runtime.pool.member import Backend
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.history import FIGURES


def machine(**load: object) -> ShownMachine:
    return ShownMachine(id="a", name="a", role="node", state="up", load=ShownLoad(**load))  # type: ignore[arg-type]


def test_a_machine_is_busy_by_what_is_known_of_it() -> None:
    sums = sum_machine(machine(running=3, capacity=4, gpu_share=0.5), 10.0)
    assert (sums.running, sums.load, sums.loads) == (30.0, 7.5, 10.0)
    assert (sums.gpu, sums.gpus) == (5.0, 10.0)
    assert (sums.cache, sums.caches, sums.memories) == (0.0, 0.0, 0.0)


def test_more_than_it_takes_at_once_is_full() -> None:
    assert sum_machine(machine(running=9, capacity=4), 10.0).load == 10.0


def test_changes_name_machines_as_pages_do() -> None:
    metadata = {"node": "lab/gpu1"}
    node = Backend(id="m002", url="fabric://m002", models=("m",), kind="vllm", metadata=metadata)
    plain = Backend(id="first", url="http://127.0.0.1:1", models=("m",), kind="vllm")
    members = BackendPool([node, plain]).members
    assert describe_change("added", members["m002"]) == "machine lab/gpu1 joined"
    assert describe_change("down", members["first"]) == "machine first is down"
    assert describe_change("weighed", members["first"]) is None


def test_every_curve_is_in_the_answer() -> None:
    assert {"name", *FIGURES["models"], *FIGURES["machines"]} == {*ShownCurves.__annotations__}


def test_a_gateway_on_any_port_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path))
    assert find_path(None, 0) is None
    assert find_path(None, 8080) == tmp_path / "history" / "gateway-8080.db"
    assert find_path("/x/y.db", 0) == Path("/x/y.db")


def test_a_url_is_a_prometheus() -> None:
    assert PrometheusHistory.of("http://prometheus:9090") is not None
    assert PrometheusHistory.of("/var/history.db") is None
    assert PrometheusHistory.of(None) is None


@pytest.mark.parametrize("figure", FIGURES["models"])
def test_every_curve_of_a_model_is_asked_for(figure: str) -> None:
    assert write_query("models", figure, 60).startswith("sum by (model) (rate(atoll_model_")


def test_means_are_sums_of_one_counter_over_another() -> None:
    assert write_query("models", "kept", 120) == (
        "sum by (model) (rate(atoll_model_kept_total[120s])) / "
        "(sum by (model) (rate(atoll_model_judged_total[120s])) > 0)"
    )
    assert write_query("machines", "gpu_share", 60) == (
        "avg by (machine) (avg_over_time(atoll_machine_gpu_share[60s]))"
    )
