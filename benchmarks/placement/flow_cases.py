"""Made-up clusters for the flow solvers: small ones that can be tried out in full, and large ones."""

from __future__ import annotations

import numpy as np

from atoll.core.rng import stream
from atoll.solve.place.flow_instance import FlowInstance

_MAX_LAYERS = (0, 0, 12, 8, 5, 3, 2)
"""The most layers a node may hold, by number of nodes, so that all placements can be tried."""
_LAYERS = (0, 0, 12, 12, 10, 8, 7)


def small_cluster(random: np.random.Generator) -> FlowInstance:
    """Return 2 to 6 nodes of up to three types and up to 12 layers, half of them with partial inference.

    A third have wide links; elsewhere one link in ten is missing and the others are of all sizes.
    """
    n = int(random.choice([2, 3, 4, 5, 6], p=[0.2, 0.35, 0.3, 0.1, 0.05]))
    layers = min(int(random.integers(3, 13)), _LAYERS[n])
    types = np.sort(random.integers(0, int(random.integers(1, 4)), n))
    most = random.integers(1, min(layers, _MAX_LAYERS[n]) + 1, 3)
    tables = np.zeros((3, int(most.max()) + 1))
    for t in range(3):
        rates = random.uniform(1.0, 100.0, int(most[t]))
        falling = random.random() < 0.8
        tables[t, 1 : most[t] + 1] = np.sort(rates)[::-1] if falling else rates
    if random.random() < 0.3:
        link, enter, leave = np.full((n, n), 1e4), np.full(n, 1e4), np.full(n, 1e4)
        kind = types.astype(np.int64)
    else:
        link = random.uniform(5.0, 100.0, (n, n)) * (random.random((n, n)) < 0.9)
        if random.random() < 0.5:
            link[link > 40.0] = 1e3
        enter, leave = random.uniform(5.0, 150.0, n), random.uniform(5.0, 150.0, n)
        kind = np.arange(n, dtype=np.int64)
    np.fill_diagonal(link, 0.0)
    return FlowInstance(
        layers=layers,
        names=tuple(f"node-{i}" for i in range(n)),
        node_types=tuple(f"type-{t}" for t in types),
        regions=("here",) * n,
        kind=kind,
        max_layers=most[types].astype(np.int64),
        rate=tables[types],
        link=link,
        enter=enter,
        leave=leave,
        latency=np.zeros((n, n)),
        enter_s=np.zeros(n),
        leave_s=np.zeros(n),
        partial=bool(random.random() < 0.5),
    )


def large_cluster(n: int, random: np.random.Generator) -> FlowInstance:
    """Return n nodes of ten types in five regions for 80 layers; links between regions are slow.

    Inside a region 10 Gb/s, between two 100 Mb/s give or take a fifth; activations of 16 KiB.
    """
    types, regions = random.integers(0, 10, n), random.integers(0, 5, n)
    most = random.integers(3, 21, 10)
    tables = np.zeros((10, int(most.max()) + 1))
    for t in range(10):
        held = np.arange(1, most[t] + 1)
        tables[t, 1 : most[t] + 1] = random.uniform(4e3, 3e4) / held ** random.uniform(1.0, 1.3)
    between = random.uniform(610.0, 915.0, (5, 5))
    np.fill_diagonal(between, 61035.0)
    link = between[regions][:, regions].copy()
    np.fill_diagonal(link, 0.0)
    pairs = types * 5 + regions
    return FlowInstance(
        layers=80,
        names=tuple(f"node-{i:04d}" for i in range(n)),
        node_types=tuple(f"type-{t}" for t in types),
        regions=tuple(f"region-{r}" for r in regions),
        kind=np.unique(pairs, return_inverse=True)[1].astype(np.int64),
        max_layers=most[types].astype(np.int64),
        rate=tables[types],
        link=link,
        enter=np.full(n, 5e6),
        leave=np.full(n, 5e6),
        latency=np.where(regions[:, None] == regions[None, :], 0.001, 0.05),
        enter_s=np.full(n, 0.05),
        leave_s=np.full(n, 0.05),
    )


SITE_GPUS = (
    ("H100:1", 0.04),
    ("A100-80:1", 0.08),
    ("A100-40:1", 0.12),
    ("L40S:1", 0.12),
    ("V100:1", 0.14),
    ("L4:1", 0.2),
    ("T4:1", 0.3),
)
"""Node types of made-up sites and their shares: few large GPUs, many small ones."""
_NODES_PER_SITE = 50
_MAX_SITES = 8


def site_fleet(n: int, seed: int = 0, sites: int | None = None) -> str:
    """Return a fleet file: one model of 80 layers on n machines of mixed GPUs at several unlike sites.

    Without a number of them, there are two to eight sites.

    Inside a site 10 Gbit/s; between two sites 1 to 4 Gbit/s and 5 to 40 ms, as between universities. Sites
    differ in size by up to four times, and each has a mix of its own.
    """
    random = stream(seed, "sites", str(n))
    count = sites or min(_MAX_SITES, max(2, n // _NODES_PER_SITE))
    size = random.uniform(0.5, 2.0, count)
    site = np.sort(random.choice(count, n, p=size / size.sum()))
    shares = np.array([share for _, share in SITE_GPUS])
    lines = [
        "services:",
        "  chat:",
        "    model: llama-2-70b",
        "    ttft: 30s",
        "    tpot: 2s",
        "    rate: 1/s",
        "    lengths: azure-conv",
        "cluster:",
        "  nodes:",
    ]
    for s in range(count):
        mix = random.dirichlet(10.0 * shares)
        numbers = np.bincount(random.choice(len(shares), int((site == s).sum()), p=mix))
        lines.append(f"    site-{s}:")
        for (name, _), number in zip(SITE_GPUS, numbers.tolist(), strict=False):
            if number:
                lines.append(f"      {name}: {number}")
    lines.append("  links:")
    lines.append('    - {between: ["*", "*"], bandwidth: 1Gbit/s, latency: 20ms}')
    for s in range(count):
        inside = f"[site-{s}, site-{s}], bandwidth: 10Gbit/s, latency: 200us"
        lines.append(f"    - {{between: {inside}}}")
        for other in range(s):
            mbit, ms = int(random.integers(1_000, 4_001)), int(random.integers(5, 41))
            wide = f"[site-{s}, site-{other}], bandwidth: {mbit}Mbit/s, latency: {ms}ms"
            lines.append(f"    - {{between: {wide}}}")
    return "\n".join(lines) + "\n"
