"""Instances of the joint problem from values that an author of GH/AGH published: the benign family.

The paper's source is not public. A related project of the same author is (github.com/JJmingcc/LLM-RO,
`parameter_setup.py` and `DATA_SOURCES_AND_PARAMETERS.md`, commit b89ae76): the same six query types, ten
tiers, prices and precisions, and what the paper leaves out: lengths, errors, seconds per token, residency.
Those facts are taken as they are. What the paper itself states of money (rho, phi, a budget of 100 USD for
24 h) stays the paper's (`paper_instances.KINDS`), and so do hops between stages, which the project lacks.

Requests are few there (10 to 140 queries/h, where the paper's text has thousands) and errors allowed larger
(8 to 25 %), so that compute, storage and budget seldom bind: one or two cheap GPUs serve every type. It is
the regime of the paper's baseline, where GH and AGH cost the same; `paper_instances` is that of its tight
budgets.

- The model that is called 31B is listed with 810 GB, which the notes call a slip for about 62: 62 here. Its
  KV cache and that of 70B are as in the notes; the code has them the other way round.
- KV caches are GB per token, with a residency of 0.1: taken so, a type holds 0.5 GB with the smallest model
  and 1,700 GB with the largest, which is then of no use.
- Storage per token is listed in MB. alpha (TFLOP per 1,000 tokens) does not depend on the model.
- Seconds per token are those of a type times a factor of the model, over the tier's TFLOP/s by an A6000's.
- Other sizes: further types and tiers are the same in turn (prices drawn anew), models interpolated in log
  size.
"""

from __future__ import annotations

import numpy as np

from atoll.core.rng import stream
from atoll.solve.joint.joint_problem import Floats, JointProblem
from research.joint.paper_instances import (
    KINDS,
    TIERS,
    Range,
    check_size,
    configurations,
    spread,
)

TIER_NAMES = (
    "A6000-FP16", "A6000-INT8", "A6000-INT4", "RTX 4090-FP16", "RTX 4090-INT8", "RTX 4090-INT4",
    "A100-40-FP16", "A100-40-INT8", "H100-80-FP16", "H100-80-INT8",
)  # fmt: skip
MEMORY_GB = (48, 48, 80, 48, 24, 24, 24, 40, 80, 80)
TFLOPS = (40.7, 58.1, 67.0, 77.4, 82.6, 123.9, 165.2, 468.0, 989.0, 1483.5)
USD_H = (0.65, 0.65, 2.50, 0.65, 0.35, 0.35, 1.20, 1.20, 2.00, 2.50)
USD_SPREAD = 0.2
PRECISION_ERROR = {"FP16": 1.0, "INT8": 1.15, "INT4": 1.35}
STORAGE_GB = 1000.0
STORAGE_USD: Range = (0.001, 0.005)
RESIDENCE = 0.1

# By size: billions of parameters, weights in GB, KV in GB per token, capability, factor on seconds per token.
MODELS = np.array(
    [
        (1.0, 2.0, 0.02, 0.5, 0.3),
        (3.0, 6.0, 0.05, 1.5, 0.5),
        (8.0, 16.0, 0.15, 3.0, 1.5),
        (11.0, 22.0, 0.25, 2.5, 2.5),
        (31.0, 62.0, 1.4, 5.0, 3.5),
        (70.0, 140.0, 8.0, 8.0, 5.0),
    ]
)
# By query type, in the order of `KINDS`.
PROMPT = (512, 256, 128, 64, 32, 48)
ANSWER = (256, 512, 128, 256, 1024, 2048)
DELAY_LIMIT_S = (1.0, 1.5, 0.8, 2.0, 4.0, 5.0)
ERROR_LIMIT = (0.08, 0.10, 0.08, 0.10, 0.15, 0.25)
RATE: tuple[Range, ...] = ((80, 120), (60, 100), (100, 140), (40, 80), (20, 60), (10, 30))
ALPHA: tuple[Range, ...] = ((0.3, 0.7), (0.6, 1.0), (0.2, 0.4), (1.0, 1.5), (2.0, 3.0), (3.5, 4.5))
THETA_MB: tuple[Range, ...] = (*((0.0008, 0.0012),) * 4, (0.004, 0.006), (0.008, 0.012))
TOKEN_MS: tuple[Range, ...] = (
    (0.4, 0.6), (0.7, 0.9), (0.3, 0.4), (1.0, 1.2), (2.0, 2.5), (3.5, 4.0)
)  # fmt: skip
ERROR: tuple[Range, ...] = (
    (0.03, 0.05), (0.02, 0.03), (0.02, 0.03), (0.05, 0.07), (0.06, 0.08), (0.08, 0.10)
)  # fmt: skip


def public_instance(
    types: int = 6,
    models: int = 6,
    tiers: int = 10,
    seed: int = 0,
    *,
    budget: float = 100.0,
    storage_gb: float = STORAGE_GB,
    media_unmet: float = 1.0,
) -> JointProblem:
    """Return the instance of that size and seed; the arguments are those of `paper_instance`."""
    check_size(types, models, tiers)
    kind = [i % len(KINDS) for i in range(types)]
    draws = [stream(seed, "choice", "public", str(i)) for i in range(types)]

    def drawn(ranges: tuple[Range, ...]) -> Floats:
        return np.array([d.uniform(*ranges[k]) for d, k in zip(draws, kind, strict=True)])

    def each(values: tuple[float, ...]) -> Floats:
        return np.array([values[k] for k in kind], np.float64)

    rate, alpha, theta = np.rint(drawn(RATE)), drawn(ALPHA), drawn(THETA_MB)
    token_ms, error = drawn(TOKEN_MS), drawn(ERROR)
    rho, phi = drawn(tuple(k.rho for k in KINDS)), drawn(tuple(k.phi for k in KINDS))
    media = np.array([media_unmet if KINDS[k].media else 1.0 for k in kind])
    tokens, answer = each(PROMPT) + each(ANSWER), each(ANSWER)
    _, weights, kv, capability, slowness = _models(models).T
    at = [k % len(TIER_NAMES) for k in range(tiers)]
    if tiers <= len(TIER_NAMES):
        at = spread(tiers, len(TIER_NAMES))
    draw = stream(seed, "choice", "public", "tiers")
    usd = np.array(USD_H)[at] * draw.uniform(1.0 - USD_SPREAD, 1.0 + USD_SPREAD, tiers)
    tflops = np.array(TFLOPS)[at]
    names = [TIER_NAMES[k].rsplit("-", 1) for k in at]
    hops = {tier.name.rsplit("-", 1)[0]: tier.hop_ms for tier in TIERS}
    inflation = np.array([PRECISION_ERROR[precision] for _, precision in names])
    hop_s = np.array([hops[gpu] for gpu, _ in names]) / 1e3
    comp_s = token_ms[:, None, None] / 1e3 * (slowness[:, None] * (TFLOPS[0] / tflops))[None]
    tp, pp = (np.array([c[axis] for c in configurations()], np.int64) for axis in (0, 1))
    delay = (comp_s * tokens[:, None, None])[..., None] / tp + (
        hop_s[None, None, :] * answer[:, None, None]
    )[..., None] * pp
    shape = (types, models, tiers)
    scale = max(1.0, types / len(KINDS))
    return JointProblem(
        horizon_h=24.0,
        budget=budget * float(np.sqrt(scale)),
        storage_gb=storage_gb * scale,
        storage_usd=float(draw.uniform(*STORAGE_USD)),
        efficiency=0.9,
        rate=rate,
        tokens=tokens,
        data_gb=theta / 1e3,
        delay_usd=rho * 1e3,
        unmet_usd=phi * media,
        max_unmet=np.ones(types),
        delay_limit=each(DELAY_LIMIT_S),
        error_limit=each(ERROR_LIMIT),
        weights_gb=weights,
        kv_gb=kv,
        memory_gb=np.array(MEMORY_GB, np.float64)[at],
        tflops=tflops,
        gpu_usd=usd,
        tp=tp,
        pp=pp,
        allowed=np.ones((tiers, len(tp)), np.bool_),
        delay=delay,
        error=error[:, None, None] / capability[:, None] * inflation,
        compute=np.broadcast_to(alpha[:, None, None], shape).copy(),
        residence_s=np.full(shape, RESIDENCE),
    )


def _models(count: int) -> Floats:
    """Rows of `MODELS`: some of the six, or as many sizes evenly spaced in the logarithm."""
    if count <= len(MODELS):
        return MODELS[spread(count, len(MODELS))]
    size = np.geomspace(MODELS[0, 0], MODELS[-1, 0], count)
    known = np.log(MODELS)
    rows = [np.interp(np.log(size), known[:, 0], row) for row in known.T]
    return np.asarray(np.exp(np.array(rows).T))
