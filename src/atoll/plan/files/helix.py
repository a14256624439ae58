"""Clusters, node profiles and placements in the files of the Helix repository (ASPLOS '25).

A cluster is an .ini with `[ComputeNode-i] type=...` and `[Link-a-b] bandwidth, latency`, a or b a number,
"source" or "sink". Its "mbps" are megabytes per second: 1000 mbps stand for a link of 10 Gbit/s. Node
profiles are a JSON file with, per model and node type, the most layers, the KV blocks beside j layers
and milliseconds per layer. A placement is an .ini with the layers of each `compute_node_{i + offset}`.
"""

from __future__ import annotations

import configparser
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from atoll.core.errors import InputError, UnknownNameError
from atoll.core.files import read_text_limited
from atoll.plan.cluster import ANY, Cluster, ClusterLink, ClusterNode, NodeProfile
from atoll.plan.plan import SINK, SOURCE
from atoll.plan.problem import Lengths, Problem, Service, Settings
from atoll.workload.lengths import LengthMix

MODELS = {"LLaMA-2-70B": "llama-2-70b", "LLaMA-1-30B": "llama-1-30b"}
"""Models of the profiles and what the catalog calls them."""
NODE_TYPES = {
    "A100": "A100-40:1",
    "V100": "V100-16:1",
    "L4": "L4:1",
    "L4x2": "L4:2",
    "T4": "T4:1",
    "T4x2": "T4:2",
    "T4x4": "T4:4",
}
PROFILES = "node_profiles.json"
TABLES = "throughput_tables.json"
SITE_LATENCY_S = 0.010
"""Nodes joined by links quicker than this stand in one region."""
_NO_PROMISE_S = (600.0, 60.0)
_UNITS = {"kbps": 1e3, "mbps": 1e6, "gbps": 1e9, "sec": 1.0, "second": 1.0}
_PARTS = {"millisec": 1e3, "microsec": 1e6}
"""Divisors of units: 51 / 1000 is 0.051, while 51 * 0.001 is slightly more."""

_NODE_KEY = re.compile(r"compute_node_(\d+)")

Range = tuple[int, int]
Ends = tuple[str, str]


@dataclass(frozen=True)
class HelixCluster:
    """Node types by number, and (bytes/s, seconds) per link; ends are numbers as text, source or sink."""

    name: str
    types: tuple[str, ...]
    links: Mapping[Ends, tuple[float, float]]


def read_cluster(path: Path) -> HelixCluster:
    """Read a cluster .ini."""
    file = _ini(path)
    count = _whole(path, file, "NodeNames", "total_compute_nodes")
    types = tuple(_text(path, file, f"ComputeNode-{i}", "type") for i in range(count))
    ends = {*map(str, range(count)), SOURCE, SINK}
    links: dict[Ends, tuple[float, float]] = {}
    for section in file.sections():
        if not section.startswith("Link-"):
            continue
        pair = section.split("-")[1:]
        if len(pair) != 2 or not set(pair) <= ends:
            raise InputError(f"[{section}] joins no two nodes", path=path, hint="write [Link-0-1]")
        quantities = [_quantity(path, file, section, key) for key in ("bandwidth", "latency")]
        links[pair[0], pair[1]] = (quantities[0], quantities[1])
    if not links:
        raise InputError("there are no links", path=path, hint="is it a Helix cluster file?")
    return HelixCluster(path.stem, types, links)


def read_solution(path: Path, nodes: int) -> tuple[Range, ...]:
    """Read a placement: [start, end) of every node by number, (0, 0) for one that is not used."""
    file = _ini(path)
    offset = _whole(path, file, "Settings", "offset")
    keys = file.options("Solution") if file.has_section("Solution") else []
    numbers = [int(found[1]) - offset for key in keys if (found := _NODE_KEY.fullmatch(key))]
    if not set(numbers) <= set(range(nodes)):
        hint = "is it of this cluster?"
        raise InputError(f"it has other machines than {nodes} from 0", path=path, hint=hint)
    ranges: list[Range] = []
    for i in range(nodes):
        key = f"compute_node_{i + offset}"
        text = file.get("Solution", key, fallback="[]")
        layers = [int(number) for number in re.findall(r"\d+", text)]
        if layers and layers != list(range(layers[0], layers[0] + len(layers))):
            raise InputError(f"the layers of {key} have gaps", path=path, hint="list them in order")
        ranges.append((layers[0], layers[-1] + 1) if layers else (0, 0))
    return tuple(ranges)


def helix_problem(
    cluster: Path, *, model: str = "LLaMA-2-70B", data: Path | None = None, tables: bool = False
) -> Problem:
    """Return the problem of placing a model of the profiles on a cluster .ini.

    `data` is the folder of the profiles, by default the cluster's own or one above it. What a node carries
    is worked out from its profile, or with `tables` read from the throughput table of a cluster with the
    same nodes. Nothing is asked of the service: how much can it be given?
    """
    helix = read_cluster(cluster)
    folder = _data_folder(cluster, data)
    profiles, constants = read_profiles(folder / PROFILES, model, helix)
    if tables:
        carried = read_tables(folder / TABLES, model, helix)
        profiles = {
            kind: profile.model_copy(update={"tokens_per_s": carried[kind]})
            for kind, profile in profiles.items()
        }
    name = MODELS[model]
    mix = LengthMix.fixed(constants["avg_input_len"], constants["avg_output_len"])
    ttft_s, tpot_s = _NO_PROMISE_S
    return Problem(
        name=helix.name,
        services=(
            Service(
                name=name,
                model=name,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                rate_per_s=0.0,
                lengths=Lengths.of(mix),
                phases="together",
            ),
        ),
        settings=Settings(engine="none"),
        cluster=Cluster(
            nodes=tuple(_nodes(helix)),
            links=tuple(_links(helix)),
            profiles={name: profiles},
            kv_fill=constants["kv_cache_hwm"],
            token_bytes=constants["token_bytes"],
        ),
    )


def read_profiles(
    path: Path, model: str, cluster: HelixCluster
) -> tuple[dict[str, NodeProfile], dict[str, float]]:
    """Read the profiles of the cluster's node types by our names, and the constants of the file."""
    data = _json(path)
    if model not in data or model not in MODELS:
        raise UnknownNameError("model of the profiles", model, MODELS)
    model_data = _table(data, model)
    constants = {k: float(cast(float, v)) for k, v in _table(data, "constants").items()}
    constants["token_bytes"] = float(cast(float, model_data["token_bytes"]))
    block = constants["vllm_block_size"]
    profiles: dict[str, NodeProfile] = {}
    for kind in sorted(set(cluster.types)):
        entry = _table(_table(model_data, "types"), kind)
        max_layers = int(cast(int, entry["max_num_layers"]))
        blocks, requests, tokens = (
            [int(cast(int, _table(entry, key)[str(j)])) for j in range(1, max_layers + 1)]
            for key in ("vllm_num_blocks", "prompt_max_requests", "decode_max_tokens")
        )
        normal, tight = (
            int(cast(int, _table(model_data, key)[kind]))
            for key in ("typical_layers_normal", "typical_layers_tight")
        )
        profiles[_node_type(kind)] = NodeProfile(
            max_layers=max_layers,
            kv_tokens=tuple(block * n for n in blocks),
            prefill_s_per_layer=_curve(entry["prompt_ms_per_layer"]),
            decode_s_per_layer=_curve(entry["decode_ms_per_layer"]),
            prefill_requests=tuple(requests),
            decode_sequences=tuple(tokens),
            typical_layers=(normal, tight),
            start_rate=float(cast(float, _table(model_data, "normalized_perf_start")[kind])),
        )
    return profiles, constants


def read_tables(path: Path, model: str, cluster: HelixCluster) -> dict[str, tuple[float, ...]]:
    """Read the tokens/s per number of layers of a cluster with these nodes, by our node types."""
    counts = Counter(cluster.types)
    for entry in _json(path).values():
        record = cast("dict[str, object]", entry)
        if "counts" in record and Counter(cast("dict[str, int]", record["counts"])) == counts:
            tables = cast("dict[str, list[float]]", _table(record, model))
            return {_node_type(kind): tuple(values) for kind, values in tables.items()}
    nodes = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    raise InputError(f"no table for {nodes}", path=path, hint="leave out --tables")


def _nodes(cluster: HelixCluster) -> Iterator[ClusterNode]:
    region = _regions(cluster)
    for i, kind in enumerate(cluster.types):
        name = _name(cluster, str(i))
        yield ClusterNode(name=name, node_type=_node_type(kind), region=region[i])


def _name(cluster: HelixCluster, end: str) -> str:
    """Return the name of an end; names of nodes sort as their numbers do."""
    width = len(str(len(cluster.types) - 1))
    return end if end in (SOURCE, SINK) else f"node-{int(end):0{width}d}"


def _node_type(kind: str) -> str:
    if kind not in NODE_TYPES:
        raise UnknownNameError("Helix node type", kind, NODE_TYPES)
    return NODE_TYPES[kind]


def _regions(cluster: HelixCluster) -> list[str]:
    """Nodes that quick links join, directly or over others, are one region; numbered by first node."""
    site = list(range(len(cluster.types)))

    def root(i: int) -> int:
        while site[i] != i:
            i = site[i]
        return i

    for (a, b), (_, latency_s) in cluster.links.items():
        if a.isdigit() and b.isdigit() and latency_s < SITE_LATENCY_S:
            low, high = sorted((root(int(a)), root(int(b))))
            site[high] = low
    order = sorted({root(i) for i in site})
    return [f"site-{order.index(root(i))}" for i in range(len(site))]


def _links(cluster: HelixCluster) -> Iterator[ClusterLink]:
    """One rule where all links are equal and none is missing, else a rule for each."""
    count = len(cluster.types)
    complete = len(cluster.links) == count * (count - 1) // 2 + 2 * count
    kinds = set(cluster.links.values())
    if complete and len(kinds) == 1:
        speed, latency_s = kinds.pop()
        yield ClusterLink(src=ANY, dst=ANY, bytes_per_s=speed, latency_s=latency_s)
        return
    for (a, b), (speed, latency_s) in cluster.links.items():
        yield ClusterLink(
            src=_name(cluster, a),
            dst=_name(cluster, b),
            bytes_per_s=speed,
            latency_s=latency_s,
            one_way=a == SOURCE or b == SINK,
        )


# Reading


def _data_folder(cluster: Path, data: Path | None) -> Path:
    folders = [data] if data is not None else [cluster.parent, cluster.parent.parent]
    for folder in folders:
        if (folder / PROFILES).is_file():
            return folder
    raise InputError(
        f"no {PROFILES} in {' or '.join(map(str, folders))}", hint="say where with --data FOLDER"
    )


def _ini(path: Path) -> configparser.ConfigParser:
    file = configparser.ConfigParser(interpolation=None)
    try:
        file.read_string(read_text_limited(path))
    except configparser.Error as error:
        message = " ".join(str(error).split())
        raise InputError(message, path=path, hint="is it a Helix .ini file?") from error
    return file


def _text(path: Path, file: configparser.ConfigParser, section: str, key: str) -> str:
    try:
        return file.get(section, key)
    except configparser.Error as error:
        raise InputError(
            f"[{section}] has no {key}", path=path, hint="is it a Helix .ini file?"
        ) from error


def _whole(path: Path, file: configparser.ConfigParser, section: str, key: str) -> int:
    text = _text(path, file, section, key)
    if not text.strip().isdigit():
        raise InputError(f"[{section}] {key}: {text!r} is no whole number", path=path)
    return int(text)


def _quantity(path: Path, file: configparser.ConfigParser, section: str, key: str) -> float:
    """Read "1000 * mbps" in bytes/s, "1 * MilliSec" in seconds."""
    text = _text(path, file, section, key)
    number, _, unit = (part.strip() for part in text.partition("*"))
    try:
        size = float(number)
        name = unit.lower()
        return size / _PARTS[name] if name in _PARTS else size * _UNITS[name]
    except (KeyError, ValueError):
        raise InputError(
            f"[{section}] {key}: cannot read {text!r}",
            path=path,
            hint="write 1000 * mbps, 1 * MilliSec",
        ) from None


def _json(path: Path) -> dict[str, object]:
    try:
        data = json.loads(read_text_limited(path))
    except ValueError as error:
        raise InputError(f"not JSON: {error}", path=path) from error
    if not isinstance(data, dict):
        raise InputError("not a JSON object", path=path)
    return data


def _table(data: Mapping[str, object], key: str) -> dict[str, object]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise InputError(f"there is no {key!r} in the profiles", field=key)
    return value


def _curve(points: object) -> tuple[tuple[float, float], ...]:
    """(x, milliseconds) pairs as (x, seconds)."""
    pairs = cast("list[tuple[float, float]]", points)
    return tuple((float(x), y * 1e-3) for x, y in pairs)
