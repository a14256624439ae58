"""Changes of a fleet: the same in its file as in its problem, and what cannot be asked is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import AtollError, InputError, UnknownNameError
from atoll.plan.files.examples import find_example
from atoll.plan.files.read import read_problem
from atoll.planner.change import (
    DialChange,
    PromiseChange,
    apply_change,
    change_problem,
    scale_count,
)
from atoll.planner.source import WrittenFleet, read_sent, read_source
from atoll.planner.yaml_text import write_yaml
from tests.seeds import examples

EXAMPLES = (
    "quickstart",
    "choice",
    "cluster-mixed",
    "cluster-shared",
    "owned-cluster",
    "any-to-any",
)
factors = st.floats(0.0, 100.0, allow_nan=False)
shares = st.floats(0.3, 1.0, allow_nan=False)


def _round_trip(tmp: Path, source: WrittenFleet) -> None:
    path = tmp / source.file_name
    path.write_text(source.text, encoding="utf-8")
    assert read_problem(path).content_hash() == source.problem.content_hash()


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_writes_itself(name: str, tmp_path: Path) -> None:
    source = read_source(find_example(name))
    assert source.data is not None
    _round_trip(tmp_path, source)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changed")


@pytest.fixture(scope="module")
def pools() -> dict[str, WrittenFleet]:
    names = ("quickstart", "owned-cluster", "cluster-mixed", "any-to-any")
    return {name: read_source(find_example(name)) for name in names}


@examples(20)
@given(data=st.data())
def test_a_change_of_the_file_is_that_of_the_problem(
    data: st.DataObject, pools: dict[str, WrittenFleet], folder: Path
) -> None:
    source = pools[data.draw(st.sampled_from(sorted(pools)))]
    services = sorted(service.name for service in source.problem.services)
    gpus = sorted({kind.partition(":")[0] for kind in source.problem.node_types})
    promises = st.builds(
        PromiseChange,
        ttft_s=st.none() | st.floats(0.1, 60.0),
        tpot_s=st.none() | st.floats(0.01, 5.0),
        target=st.none() | st.floats(0.1, 0.99),
    )
    there = shares if source.problem.cluster is not None else factors
    change = DialChange(
        demand=data.draw(st.dictionaries(st.sampled_from(services), factors)),
        promises=data.draw(st.dictionaries(st.sampled_from(services), promises)),
        prices=data.draw(st.dictionaries(st.sampled_from(gpus), factors)),
        available=data.draw(st.dictionaries(st.sampled_from(gpus), there)),
        budget_usd_per_hour=data.draw(
            st.none() if source.problem.cluster is not None else st.none() | st.floats(0.0, 1e6)
        ),
    )
    changed = apply_change(source, change)
    assert changed.problem.content_hash() == change_problem(source.problem, change).content_hash()
    _round_trip(folder, changed)


def test_a_choice_is_turned_by_its_name(folder: Path) -> None:
    source = read_source(find_example("choice"))
    changed = apply_change(source, DialChange(demand={"chat": 2.0}, prices={"L4": 0.5}))
    _round_trip(folder, changed)
    before = {s.name: s.rate_per_s for s in source.problem.services}
    after = {s.name: s.rate_per_s for s in changed.problem.services}
    assert after["chat.llama-3.1-70b"] == 2.0 * before["chat.llama-3.1-70b"]
    halved = {o.key: o.usd_per_hour for o in changed.problem.offers if o.node_type == "L4:1"}
    for offer in source.problem.offers:
        if offer.key in halved:
            assert halved[offer.key] == 0.5 * offer.usd_per_hour


def test_a_problem_is_changed_where_there_is_no_file(tmp_path: Path) -> None:
    problem = read_source(find_example("quickstart")).problem
    path = tmp_path / "problem.json"
    path.write_text(problem.to_json(), encoding="utf-8")
    source = read_source(path)
    assert source.data is None
    changed = apply_change(source, DialChange(demand={"chat": 3.0}))
    assert changed.problem.service("chat").rate_per_s == 12.0
    assert changed.file_name == "quickstart.json"
    _round_trip(tmp_path, changed)


def test_gpus_in_shares_are_written_as_they_are_offered(tmp_path: Path) -> None:
    path = tmp_path / "shares.yaml"
    path.write_text(
        "services: {chat: {model: llama-3.2-3b, ttft: 1s, tpot: 50ms, rate: 1/s, lengths: 512x64}}\n"
        "pool:\n"
        "  owned: {here: {'H200:1': {count: 2, shares: 2}, 'L4:1': 1}}\n"
        "  offers: [{region: there, node_type: 'H200:2', available: 4, usd_per_hour: 6, shares: 4}]\n"
    )
    source = read_source(path)
    change = DialChange(prices={"H200/4": 2.0}, available={"H200/2": 0.5, "L4": 2.0})
    changed = apply_change(source, change)
    assert [(o.node_type, o.available, o.usd_per_hour) for o in changed.problem.offers] == [
        ("H200/2:2", 1, 0.0),
        ("L4:1", 2, 0.0),
        ("H200/4:8", 4, 12.0),
    ]
    _round_trip(tmp_path, changed)


def test_the_first_machines_of_a_cluster_stay() -> None:
    source = read_source(find_example("cluster-mixed"))
    assert source.problem.cluster is not None
    gpu = source.problem.node_types[0].partition(":")[0]
    fewer = apply_change(source, DialChange(available={gpu: 0.5})).problem.cluster
    assert fewer is not None
    kept = {node.name for node in fewer.nodes}
    assert kept < {node.name for node in source.problem.cluster.nodes}
    with pytest.raises(InputError, match="has the machines that it has"):
        apply_change(source, DialChange(available={gpu: 2.0}))


def test_nothing_left_is_said() -> None:
    source = read_source(find_example("cluster-mixed"))
    gpus = {kind.partition(":")[0] for kind in source.problem.node_types}
    with pytest.raises(InputError, match="no machine is left"):
        apply_change(source, DialChange(available=dict.fromkeys(gpus, 0.0)))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (DialChange(demand={"nobody": 2.0}), "demand.nobody"),
        (DialChange(promises={"nobody": PromiseChange()}), "promises.nobody"),
        (DialChange(prices={"H999": 2.0}), "prices.H999"),
        (DialChange(available={"H999": 2.0}), "available.H999"),
    ],
)
def test_names_that_are_not_there(change: DialChange, field: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        apply_change(read_source(find_example("quickstart")), change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"demand": {"chat": -1}}, "demand.chat"),
        ({"demand": {"chat": float("nan")}}, "demand.chat"),
        ({"demand": {"chat": float("inf")}}, "demand.chat"),
        ({"demand": {"chat": 1e9}}, "demand.chat"),
        ({"demand": {"chat": "2"}}, "demand.chat"),
        ({"demand": [2]}, "demand"),
        ({"promises": {"chat": {"ttft_s": 0}}}, "promises.chat.ttft_s"),
        ({"promises": {"chat": {"target": 1}}}, "promises.chat.target"),
        ({"budget_usd_per_hour": -1}, "budget_usd_per_hour"),
        ({"other": 1}, "other"),
    ],
)
def test_what_cannot_be_asked_is_named(data: object, field: str) -> None:
    with pytest.raises(InputError) as caught:
        DialChange.parse(data)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "text",
    [
        "catalog: /etc/passwd\n",
        "running: ../plan.json\n",
        "cluster: {profiles: /etc/passwd}\n",
        "models: {a: {classes: /etc/passwd}}\n",
        "catalog: {models: {a: {hf_config: /etc}}}\n",
    ],
)
def test_a_file_that_is_sent_names_no_other(text: str) -> None:
    with pytest.raises(InputError, match="cannot name another"):
        read_sent(text)


@pytest.mark.parametrize("text", ["", "[]", "a: [", "models: 3", "x" * 2_000_000, "\x00"])
def test_what_is_no_fleet_is_refused(text: str) -> None:
    with pytest.raises(AtollError):
        read_sent(text)


def test_text_is_read_as_it_was_written(tmp_path: Path) -> None:
    data = {
        "a": [
            "no",
            "1e9",
            "12:30",
            "0x10",
            "~",
            "null",
            "",
            " x",
            "L4:1",
            "é",
            "a\nb",
            "# c",
            "1_0",
        ]
    }
    from atoll.core.files import load_yaml

    path = tmp_path / "a.yaml"
    path.write_text(write_yaml(data), encoding="utf-8")
    assert load_yaml(path) == data


def test_counts_are_rounded() -> None:
    assert [scale_count(5, f) for f in (0.0, 0.1, 0.5, 1.0, 1.5)] == [0, 1, 3, 5, 8]
