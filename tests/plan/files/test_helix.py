"""Reading the files of the Helix repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import InputError, UnknownNameError
from atoll.plan.files.fleet_file import load_fleet
from atoll.plan.files.fleet_text import fleet_text, profiles_text
from atoll.plan.files.helix import helix_problem, read_cluster, read_solution
from tests.plan.clusters import HELIX

needs_data = pytest.mark.skipif(
    not HELIX.is_dir(), reason="needs ../shared/data/helix beside the repository"
)

INI = """
[NodeNames]
total_compute_nodes=3
[ComputeNode-0]
type=L4
[ComputeNode-1]
type=T4
[ComputeNode-2]
type=T4x2
[Link-source-0]
bandwidth=1000 * mbps
latency=1 * MilliSec
[Link-0-1]
bandwidth=12.5 * mbps
latency=51 * MilliSec
[Link-1-2]
bandwidth=2 * gbps
latency=1 * MilliSec
[Link-2-sink]
bandwidth=500 * kbps
latency=1 * MilliSec
"""


def written(folder: Path, text: str, name: str = "three.ini") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_units(tmp_path: Path) -> None:
    own = read_cluster(written(tmp_path, INI))
    assert own.name == "three"
    assert own.types == ("L4", "T4", "T4x2")
    assert own.links["0", "1"] == (12.5e6, 0.051)
    assert own.links["1", "2"] == (2e9, 0.001)
    assert own.links["2", "sink"] == (5e5, 0.001)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("total_compute_nodes=3", "total_compute_nodes=4", r"\[ComputeNode-3\] has no type"),
        ("total_compute_nodes=3", "total_compute_nodes=x", "no whole number"),
        ("[Link-0-1]", "[Link-0-7]", "joins no two nodes"),
        ("2 * gbps", "2 * furlongs", "cannot read '2 \\* furlongs'"),
        ("[NodeNames]", "NodeNames", "is it a Helix .ini file"),
    ],
)
def test_bad_files(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_cluster(written(tmp_path, INI.replace(old, new)))


def test_placements(tmp_path: Path) -> None:
    text = "[Settings]\noffset=2\n[Solution]\ncompute_node_2=[3, 4, 5]\ncompute_node_4=[0]\n"
    assert read_solution(written(tmp_path, text), 3) == ((3, 6), (0, 0), (0, 1))
    with pytest.raises(InputError, match="other machines than 2 from"):
        read_solution(written(tmp_path, text), 2)
    with pytest.raises(InputError, match="compute_node_2 have gaps"):
        read_solution(written(tmp_path, text.replace("4, 5", "5")), 3)


def test_profiles_are_needed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no node_profiles\.json"):
        helix_problem(written(tmp_path, INI))


@needs_data
def test_sites_are_found_by_latency(tmp_path: Path) -> None:
    geo = helix_problem(HELIX / "clusters/3cluster24.ini").cluster
    assert geo is not None
    by_site = {site: [n for n in geo.nodes if n.region == site] for site in geo.regions}
    assert [len(nodes) for nodes in by_site.values()] == [4, 10, 10]
    three = helix_problem(written(tmp_path, INI), data=HELIX).cluster
    assert three is not None
    assert [node.region for node in three.nodes] == ["site-0", "site-1", "site-1"]
    link = three.link("node-1", "node-0")
    assert link is not None
    assert link.bytes_per_s == 12.5e6
    assert three.link("source", "node-1") is None


@needs_data
def test_equal_links_are_one_rule() -> None:
    own = helix_problem(HELIX / "clusters/single24.ini").cluster
    assert own is not None
    assert len(own.links) == 1
    assert own.counts() == {"A100-40:1": 4, "L4:1": 8, "T4:1": 12}


@needs_data
def test_unknown_models_are_named() -> None:
    with pytest.raises(UnknownNameError, match="LLaMA-2-70B"):
        helix_problem(HELIX / "clusters/single24.ini", model="LLaMA-2-7B")


@needs_data
def test_tables_are_those_of_the_same_cluster(tmp_path: Path) -> None:
    own = helix_problem(HELIX / "clusters/cluster10.ini", model="LLaMA-1-30B", tables=True)
    assert own.cluster is not None
    profiles = own.cluster.profiles["llama-1-30b"]
    assert profiles["L4:1"].tokens_per_s is not None
    assert profiles["L4:1"].tokens_per_s[5] == pytest.approx(286.58741)
    with pytest.raises(InputError, match="no table for 1 L4, 1 T4, 1 T4x2"):
        helix_problem(written(tmp_path, INI), data=HELIX, tables=True)


@needs_data
@pytest.mark.parametrize("name", ["single24", "3cluster24"])
def test_as_a_fleet_file_it_is_the_same_problem(tmp_path: Path, name: str) -> None:
    own = helix_problem(HELIX / f"clusters/{name}.ini")
    written(tmp_path, profiles_text(own), "p.json")
    path = written(tmp_path, fleet_text(own, "p.json"), "fleet.yaml")
    assert load_fleet(path, environ={}) == own
