"""Instances of the joint problem, rebuilt from section 4.1 of GH/AGH's paper with stated seeds.

Its source is not public and some of its units are garbled. Taken from the text: the six query types and
their ranges of arrivals, delay and error limits, penalties and bytes per token; weights of 2 to 140 GB and
31 to 305 KB of KV cache per token; ten tiers of four GPUs (24 GB for an A6000, as it says) with bandwidths
of 768 to 3,350 GB/s, 40.7 to 1,484 TFLOP/s and 0.35 to 2.50 USD/h; tensor parallel 1, 2, 4, 8 by pipeline
depth 1, 2, 4; a budget of 100 USD for 24 h, 1,000 GB of storage, eta 0.9; quantised tiers with 1/2 and 1/4
of the bytes and 1.15 and 1.35 times the error. What the text leaves open is chosen as follows.

- rho: (5a) multiplies USD/ms by a type's mean delay and by nothing else, so a text type pays 0.1 to 0.3 USD
  for a second over the whole horizon, a media type 0.5 to 1. Multiplied by arrivals it would be thousands of
  times the rent. Code, which has no range there, lies between text and maths. phi is likewise for the whole
  of a type.
- Arrivals between the two types that are named, limits of each type within the overall range, and lengths
  (summaries read 450 to 650 tokens, videos write 500 to 700): such that the data of six types fill about
  half of the storage. `max_unmet` (zeta) is 1.
- Models: 1B, 3B, 8B, 11B, 32B, 70B at two bytes per parameter; other numbers of models are spaced evenly in
  the logarithm of size. KV per token is interpolated in log size.
- Base error: 13 % for 1B falling as size^-0.48 (1.7 % for 70B), times the type's difficulty (0.7 for
  summaries to 1.1 for maths) and a draw of +-3 %, sorted so that it falls with size for every type.
- alpha: 2 GFLOP per token and billion parameters, times the type's work (1 for text, 1.5 for maths, 4 for
  images, 6 for videos). The tiers' FLOP/s, whose range is that of INT8, hold the scaling by precision.
- tau: 0.25 to 0.55 for text, since prompt tokens are read together and not one by one; up to 1.2 for videos.
- d_comm: a hop of 0.1 ms (NVLink 900 GB/s), 0.2 ms (600 GB/s) or 0.4 ms (cards without NVLink), plus the
  activations of two all-reduces a layer.
- T_res = r beta / BW, with beta in KB and BW in GB/s. In seconds it would be 1e-4 and no cache would ever
  count; so taken, it stands for the queries held at once, and caches are 0.1 to 15 GB.
- Rent falls with precision, as the text says: an INT4 tier is about a fifth to a third cheaper than FP16.
- More than six types: further ones are drawn from the six kinds in turn. Storage then grows as I / 6, the
  budget as its root, since types share GPUs: in proportion it would not bind, and unchanged it would leave
  much unserved. More than ten tiers: further lots of the same ten, with prices, bandwidth and FLOP/s within
  12 % of them. Fewer: evenly spaced ones of the ten.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.core.errors import UsageError
from atoll.core.rng import stream
from atoll.solve.joint.joint_problem import Floats, JointProblem

SIZES = ((4, 4, 5), (6, 6, 10), (10, 10, 10), (15, 15, 10), (20, 20, 20))
"""The sizes (I, J, K) of the paper's table of run times."""
TP = (1, 2, 4, 8)
PP = (1, 2, 4)
SIZES_B = (1.0, 3.0, 8.0, 11.0, 32.0, 70.0)
"""Billions of parameters of the six models."""
_KV_KB = (31.0, 305.0)
_ERROR_1B, _ERROR_FALL = 0.13, 0.48
_MAX = 200
"""The largest number of types, models or tiers that is built."""

Range = tuple[float, float]


@dataclass(frozen=True)
class QueryKind:
    """Ranges from which a query type is drawn."""

    name: str
    rate: Range
    """Queries/h."""
    prompt: Range
    answer: Range
    """Tokens."""
    delay_limit: Range
    """Seconds."""
    error_limit: Range
    rho: Range
    """USD per millisecond of mean delay."""
    phi: Range
    """USD for all of it unserved."""
    theta_kb: Range
    """KB stored per token."""
    tau: Range
    difficulty: Range
    work: float
    media: bool = False


KINDS = (
    QueryKind(
        "Summarization",
        rate=(18_000, 25_000),
        prompt=(450, 650),
        answer=(50, 100),
        delay_limit=(2.5, 4.0),
        error_limit=(0.05, 0.07),
        rho=(0.0001, 0.0003),
        phi=(1000, 1500),
        theta_kb=(10, 14),
        tau=(0.25, 0.35),
        difficulty=(0.7, 0.9),
        work=1.0,
    ),
    QueryKind(
        "Code",
        rate=(8_000, 12_000),
        prompt=(300, 500),
        answer=(100, 200),
        delay_limit=(3.0, 6.0),
        error_limit=(0.03, 0.05),
        rho=(0.0003, 0.0005),
        phi=(1000, 1500),
        theta_kb=(10, 14),
        tau=(0.4, 0.5),
        difficulty=(0.9, 1.1),
        work=1.2,
    ),
    QueryKind(
        "Translation",
        rate=(12_000, 18_000),
        prompt=(100, 200),
        answer=(100, 200),
        delay_limit=(1.5, 3.0),
        error_limit=(0.04, 0.06),
        rho=(0.0001, 0.0003),
        phi=(1000, 1500),
        theta_kb=(10, 14),
        tau=(0.35, 0.55),
        difficulty=(0.75, 0.95),
        work=1.0,
    ),
    QueryKind(
        "Math",
        rate=(5_000, 8_000),
        prompt=(80, 160),
        answer=(250, 400),
        delay_limit=(5.0, 10.0),
        error_limit=(0.02, 0.035),
        rho=(0.0005, 0.0008),
        phi=(1000, 1500),
        theta_kb=(10, 14),
        tau=(0.6, 0.8),
        difficulty=(0.9, 1.1),
        work=1.5,
    ),
    QueryKind(
        "Image",
        rate=(2_000, 5_000),
        prompt=(40, 80),
        answer=(250, 400),
        delay_limit=(8.0, 16.0),
        error_limit=(0.05, 0.08),
        rho=(0.0005, 0.001),
        phi=(2000, 3000),
        theta_kb=(40, 60),
        tau=(0.8, 1.0),
        difficulty=(0.8, 1.0),
        work=4.0,
        media=True,
    ),
    QueryKind(
        "Video",
        rate=(1_000, 3_000),
        prompt=(50, 100),
        answer=(500, 700),
        delay_limit=(15.0, 25.0),
        error_limit=(0.05, 0.08),
        rho=(0.0005, 0.001),
        phi=(2000, 3000),
        theta_kb=(80, 120),
        tau=(1.0, 1.2),
        difficulty=(0.8, 1.0),
        work=6.0,
        media=True,
    ),
)


@dataclass(frozen=True)
class GpuTier:
    """One GPU at one precision."""

    name: str
    memory_gb: float
    bandwidth_gbs: float
    tflops: float
    usd_h: float
    bytes_share: float
    """sigma: bytes of a weight against FP16."""
    error_factor: float
    hop_ms: float
    link_gbs: float


def _tiers() -> tuple[GpuTier, ...]:
    precisions = {"FP16": (1.0, 1.0), "INT8": (0.5, 1.15), "INT4": (0.25, 1.35)}
    gpus = (
        ("A6000", 24.0, 768.0, 0.4, 64.0),
        ("RTX 4090", 24.0, 1008.0, 0.4, 64.0),
        ("A100-40", 40.0, 1555.0, 0.2, 600.0),
        ("H100-80", 80.0, 3350.0, 0.1, 900.0),
    )
    offers = {
        "A6000": (("FP16", 40.7, 0.50), ("INT8", 81.4, 0.42), ("INT4", 162.8, 0.35)),
        "RTX 4090": (("FP16", 82.6, 0.70), ("INT8", 165.2, 0.60)),
        "A100-40": (("FP16", 312.0, 1.50), ("INT8", 624.0, 1.30)),
        "H100-80": (("FP16", 742.0, 2.50), ("INT8", 1484.0, 2.20), ("INT4", 1484.0, 1.90)),
    }
    return tuple(
        GpuTier(
            f"{gpu}-{precision}", memory, bandwidth, tflops, usd, *precisions[precision], hop, link
        )
        for gpu, memory, bandwidth, hop, link in gpus
        for precision, tflops, usd in offers[gpu]
    )


TIERS = _tiers()


def paper_instance(
    types: int = 6,
    models: int = 6,
    tiers: int = 10,
    seed: int = 0,
    *,
    budget: float = 100.0,
    storage_gb: float = 1000.0,
    media_unmet: float = 1.0,
) -> JointProblem:
    """Return the instance of that size and seed; equal arguments give equal bits.

    `budget` (USD for 24 h) and `storage_gb` are those of up to six types and grow beyond, as said above.
    `media_unmet` multiplies phi of images and videos (5 in the paper's scenarios S4 and S5).
    """
    check_size(types, models, tiers)
    kinds = [KINDS[i % len(KINDS)] for i in range(types)]
    draws = [stream(seed, "choice", "type", str(i)) for i in range(types)]

    def drawn(field: str) -> Floats:
        return np.array(
            [draw.uniform(*getattr(kind, field)) for kind, draw in zip(kinds, draws, strict=True)]
        )

    rate, prompt, answer = (
        np.rint(drawn("rate")),
        np.rint(drawn("prompt")),
        np.rint(drawn("answer")),
    )
    delay_limit, error_limit = drawn("delay_limit"), drawn("error_limit")
    rho, phi, theta_kb = drawn("rho"), drawn("phi"), drawn("theta_kb")
    tau, difficulty = drawn("tau"), drawn("difficulty")
    tokens = prompt + answer
    scale = max(1.0, types / len(KINDS))

    size = _model_sizes(models)
    kv_kb = _KV_KB[0] * (_KV_KB[1] / _KV_KB[0]) ** (np.log(size) / np.log(SIZES_B[-1]))
    draw = stream(seed, "choice", "error")
    base = _ERROR_1B * size**-_ERROR_FALL * (1.0 + draw.uniform(-0.03, 0.03, (types, models)))
    base = -np.sort(-base, axis=1) * difficulty[:, None]

    lots = _lots(tiers, seed)
    memory, bandwidth, tflops, usd, share, inflation, hop_ms, link = (
        np.array([getattr(lot, field) for lot in lots])
        for field in (
            "memory_gb",
            "bandwidth_gbs",
            "tflops",
            "usd_h",
            "bytes_share",
            "error_factor",
            "hop_ms",
            "link_gbs",
        )
    )
    tp, pp = (np.array([c[axis] for c in configurations()], np.int64) for axis in (0, 1))
    weights = 2.0 * size
    comp = tau[:, None, None] * (weights[:, None] * (share / bandwidth)[None, :])[None]
    # Two all-reduces of one token's activations a layer; layers and width grow with size.
    activations_gb = 2.0 * (16.0 * size**0.38) * (2048.0 * size**0.33) * 2.0 / 1e9
    comm = hop_ms[None, :] / 1e3 + activations_gb[:, None] / link[None, :]
    delay = (comp * tokens[:, None, None])[..., None] / tp + (comm[None] * answer[:, None, None])[
        ..., None
    ] * pp
    work = np.array([kind.work for kind in kinds])
    media = np.array([media_unmet if kind.media else 1.0 for kind in kinds])
    return JointProblem(
        horizon_h=24.0,
        budget=budget * float(np.sqrt(scale)),
        storage_gb=storage_gb * scale,
        storage_usd=float(stream(seed, "choice", "storage").uniform(0.0005, 0.001)),
        efficiency=0.9,
        rate=rate,
        tokens=tokens,
        data_gb=theta_kb / 1e6,
        delay_usd=rho * 1e3,
        unmet_usd=phi * media,
        max_unmet=np.ones(types),
        delay_limit=delay_limit,
        error_limit=error_limit,
        weights_gb=weights,
        kv_gb=kv_kb / 1e6,
        memory_gb=memory,
        tflops=tflops,
        gpu_usd=usd,
        tp=tp,
        pp=pp,
        allowed=np.ones((tiers, len(tp)), np.bool_),
        delay=delay,
        error=base[:, :, None] * inflation,
        compute=2.0 * work[:, None, None] * np.outer(size, np.ones(tiers))[None],
        residence_s=tokens[:, None, None] * (kv_kb[:, None] / bandwidth[None, :])[None],
    )


def check_size(types: int, models: int, tiers: int) -> None:
    """Raise UsageError for a size that is not built."""
    for name, value in (("types", types), ("models", models), ("tiers", tiers)):
        if not 1 <= value <= _MAX:
            raise UsageError(f"{name}: must be from 1 to {_MAX}, got {value}")


def configurations() -> list[tuple[int, int]]:
    """Return tensor parallel by pipeline depth of each configuration."""
    return [(n, m) for n in TP for m in PP]


def _model_sizes(models: int) -> Floats:
    """Billions of parameters: of the six where they suffice, else evenly spaced in the logarithm."""
    if models <= len(SIZES_B):
        return np.array(SIZES_B)[spread(models, len(SIZES_B))]
    return np.geomspace(SIZES_B[0], SIZES_B[-1], models)


def _lots(tiers: int, seed: int) -> list[GpuTier]:
    if tiers <= len(TIERS):
        return [TIERS[k] for k in spread(tiers, len(TIERS))]
    lots = list(TIERS)
    for k in range(len(TIERS), tiers):
        base, draw = TIERS[k % len(TIERS)], stream(seed, "choice", "tier", str(k))
        bandwidth, tflops, usd = draw.uniform(0.88, 1.12, 3)
        lots.append(
            GpuTier(
                f"{base.name} lot {k // len(TIERS) + 1}",
                base.memory_gb,
                base.bandwidth_gbs * float(bandwidth),
                base.tflops * float(tflops),
                base.usd_h * float(usd),
                base.bytes_share,
                base.error_factor,
                base.hop_ms,
                base.link_gbs,
            )
        )
    return lots


def spread(count: int, among: int) -> list[int]:
    """Return indices of `count` of `among` things, evenly spaced, the last one always with them."""
    return [((c + 1) * among - 1) // count for c in range(count)]
