"""The `cluster` section of a fleet file."""

from __future__ import annotations

from pathlib import Path

import pytest

import atoll.plan
from atoll.core.errors import AtollError
from atoll.plan.files.fleet_file import load_fleet, parse_fleet
from tests.plan.clusters import profile

FLEET = """\
services:
  chat: {model: llama-3.1-8b, ttft: 5s, tpot: 200ms, rate: 1/s, lengths: 512x128}
cluster:
  nodes:
    zurich: {"A100-40:1": [big], "L4:1": 2}
    lugano: {"T4:2": {count: 11, usd_per_hour: $0.10/h}}
  links:
    - {between: ["*", "*"], bandwidth: 1Gbit/s, latency: 1ms}
    - {between: [big, lugano], bandwidth: 100Mbit/s, latency: 20ms, one_way: true}
"""


def test_a_cluster_is_read() -> None:
    asked = parse_fleet(FLEET)
    own = asked.cluster
    assert own is not None
    names = [node.name for node in own.nodes]
    assert names[:2] == ["big", "lugano-t4x2-00"]
    assert names[-2:] == ["zurich-l4-0", "zurich-l4-1"]
    assert len(names) == 14
    assert asked.services[0].phases == "together"
    offers = {offer.key[:2]: (offer.available, offer.usd_per_hour) for offer in asked.offers}
    assert offers[("lugano", "T4:2")] == (11, 0.1)
    assert offers[("zurich", "L4:1")] == (2, 0.0)
    link = own.link("big", "lugano-t4x2-00")
    assert link is not None
    assert (link.bytes_per_s, link.latency_s) == (12.5e6, 0.02)
    back = own.link("lugano-t4x2-00", "big")
    assert back is not None
    assert back.latency_s == 0.001


def test_machines_are_cut_unless_they_are_whole() -> None:
    cut = parse_fleet(FLEET)
    whole = parse_fleet(FLEET.replace("$0.10/h}", "$0.10/h, whole: true}"))
    free = parse_fleet(FLEET.replace(", usd_per_hour: $0.10/h}", ", whole: true}"))
    for asked, sizes in ((cut, (1, 2)), (whole, (2,)), (free, (2,))):
        offer = asked.offer("lugano", "T4:2", "owned")
        assert offer is not None
        assert (offer.available, offer.sizes) == (11, sizes)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"L4:1": 2', '"L5:1": 2', "fleet.yaml:5: cluster.nodes.zurich.L5:1: unknown gpu"),
        ('"L4:1": 2', '"L4:1": 0', "cluster.nodes.zurich.L4:1"),
        ('"L4:1": 2', '"L4:1": [big]', "'big' names two things"),
        ('"L4:1": 2', '"L4:1": {usd_per_hour: 1}', "either 'count' or 'names'"),
        (
            "[big, lugano]",
            "[big, luganno]",
            "fleet.yaml:9: cluster.links.1.between.1: unknown node",
        ),
        ("bandwidth: 1Gbit/s, ", "", "fleet.yaml:8: cluster.links.0.bandwidth"),
        ("latency: 20ms", "latency: 20", "cluster.links.1.latency"),
        ("lengths: 512x128", "lengths: 512x128, phases: apart", "both phases run together"),
        ("lugano: {", "source: {", "'source' is no name for a site"),
        ("cluster:\n", "pool: {owned: {x: {L4: 1}}}\ncluster:\n", "a fixed cluster beside a pool"),
        ("  links:", "  kv_fill: 0.0\n  links:", "cluster.kv_fill"),
    ],
)
def test_errors_name_the_place(old: str, new: str, said: str) -> None:
    assert old in FLEET
    with pytest.raises(AtollError) as caught:
        parse_fleet(FLEET.replace(old, new))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_profiles_from_a_file(tmp_path: Path) -> None:
    own = profile(5, 100.0).to_json()
    (tmp_path / "p.json").write_text(f'{{"llama-3.1-8b": {{"L4": {own}, "H100": {own}}}}}')
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET + "  profiles: p.json\n")
    cluster = load_fleet(path, environ={}).cluster
    assert cluster is not None
    assert cluster.profiles == {"llama-3.1-8b": {"L4:1": profile(5, 100.0)}}
    (tmp_path / "p.json").write_text(
        f'{{"llama-3.1-8b": {{"L4:1": {own.replace("[", "[9.0,", 1)}}}}}'
    )
    with pytest.raises(AtollError, match=r"p\.json.*kv_tokens has 6 values"):
        load_fleet(path, environ={})
    path.write_text(FLEET + "  profiles: q.json\n")
    with pytest.raises(AtollError, match=r"q\.json"):
        load_fleet(path, environ={})


def test_the_cluster_of_the_file_that_init_writes() -> None:
    start = Path(atoll.plan.__file__).parent / "files/data/fleet.yaml"
    lines = start.read_text("utf-8").splitlines()
    first, past = (lines.index(f"# {key}:") for key in ("cluster", "limits"))
    block = [line.removeprefix("# ") for line in lines[first:past] if "profiles:" not in line]
    cluster = parse_fleet(FLEET[: FLEET.index("cluster:")] + "\n".join(block)).cluster
    assert cluster is not None
    assert len(cluster.nodes) == 12
