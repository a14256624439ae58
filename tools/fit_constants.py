"""Fit the constants that ship with Atoll: `python -m tools.fit_constants --data DIR [--write]`.

DIR holds the public measurements (op_gemm.csv, op_attention.csv, op_allreduce.csv, layer_helix.csv,
op_vidur_dense.csv, op_llmservingsim_dense.csv). Expert layers, and attention of engines other than vLLM, are
read from the tables inside aiconfigurator-core (extra `aic`). Half of the single-operator points is never
fitted on (see `Points.held_out`): `benchmarks/performance/perf_accuracy.py` tests on that half. Whole layers
are fitted on Llama-2 70B alone, so that LLaMA-1 30B remains a test.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml

from atoll.catalog import Catalog
from atoll.catalog.nodes import AllReduceCost
from atoll.perf.calibration import Fit, fit, fit_narrow, op_classes, spread
from atoll.perf.constants import PROXY_ERROR, OpClass, OpConstants, Tag
from atoll.perf.measurements import BALANCED, ROUTING, SCHEMAS, Points, Schema, read_points
from research.fitting.layer_fit import (
    ELEMENTWISE,
    LayerConditions,
    fit_all_reduce,
    fit_gpu,
    predict_layers,
)

if TYPE_CHECKING:
    from pandas import DataFrame

    from research.fitting.layer_fit import LayerFit

HOPPER = ("H100", "H200")
_TILE_ROWS = 16
"""Rows that every size of tile is a multiple of."""
ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = {
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "a100_sxm": "A100-80",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTXPRO6000",
}
TABLES_ONLY = {"b300_sxm": "B300", "gb200": "GB200"}
"""GPUs of which DIR has no sample: all their points are read from the tables."""
AIC = "aiconfigurator-core 0.12.0 vLLM tables"
HELIX = "layer times published with Helix, vLLM 2024"
HELIX_MACHINES = {"a100": "A100-40:1", "v100": "V100-16:1", "l4": "L4:1", "t4": "T4:1"}
HELIX_NODES = {"l4x2": "L4:2", "t4x2": "T4:2", "t4x4": "T4:4"}
HELIX_CONDITIONS = LayerConditions(prompt_tokens=763.1, decode_context=950.0)
VERSIONS = {"a100_sxm": "0.14.0"}
"""Versions of vLLM that tables of a system were made with, where it is not `VERSION`."""
VERSION = "0.24.0"
OWN_ATTENTION = {"sglang": "SGLang", "trtllm": "TensorRT-LLM"}
"""Engines whose attention was measured beside vLLM's, and their names in sources. A cache of 8 bits is where
they differ: on Hopper TensorRT-LLM reads it in half to three quarters of vLLM's time."""
FP4_SYSTEMS = ("b200_sxm", "b300_sxm", "gb200", "rtx_pro_6000_server")
"""Systems with cores for NVFP4. DIR has no such products: they are read from the tables."""
SAMPLE = 400
"""Points of a kind that are taken from a table where DIR has no sample, as many as it has of others."""
# Per kind of weights, the kernels to take. FP8 checkpoints of mixtures hold block-scaled weights; the
# per-tensor FP8 kernel in these tables is slower than bf16 on Hopper.
EXPERT_DTYPES = {"bfloat16": "", "fp8_block": "", "nvfp4": "", "w4a16_mxfp4": "gptoss"}
# Large products for seconds on end over what the tables' bursts say: 0.80 to 0.84 for 256 to 8192 rows,
# `h200_power.csv` of the benchmarks' results. An H100 has the same chip and the same limit of 700 W; no
# other GPU was measured so.
SUSTAINED = {("H200", OpClass.GEMM): 0.83, ("H100", OpClass.GEMM): 0.83}
# Found on measured servers by tools/fit_servers.py, which says of each why it is there.
SERVED_EXPERTS = 0.5
SERVED_EXPERT_CLASSES = (OpClass.EXPERTS_FP8, OpClass.EXPERTS_FP4, OpClass.EXPERTS_INT4)
SERVED_MEMORY = {
    ("H100", OpClass.GEMM): 0.9,
    ("H100", OpClass.GEMM_FP8): 0.9,
}

Constants = dict[str, dict[OpClass, OpConstants]]
OwnConstants = dict[tuple[str, str], dict[OpClass, OpConstants]]
"""Constants of kernels of an engine's own, by GPU and engine."""


def schema(kind: str) -> Schema:
    """Return the schema of a kind of measurement."""
    return next(s for s in SCHEMAS if s.kind == kind)


def read_table(system: str, kind: str, name: str, engine: str = "vllm") -> DataFrame:
    """Return one of aiconfigurator-core's tables of an engine on a system, the newest of those not vLLM's."""
    import pandas as pd

    root = files("aiconfigurator_core") / "systems" / "data" / system / kind / engine
    if engine == "vllm":
        version = VERSIONS.get(system, VERSION)
    else:
        version = max(entry.name for entry in root.iterdir())
    return pd.read_parquet(str(root / version / f"{name}_perf.parquet"))


def table_points(kind: str, frame: DataFrame, labels: dict[str, str]) -> Points:
    """Return rows of a table as points, of each shape the fastest; labels are equal for all of them."""
    own = schema(kind)
    frame = frame.sort_values("latency").drop_duplicates([*own.sizes]).sort_values([*own.sizes])
    return Points(
        own,
        np.array([""] * len(frame)),
        {name: frame[name].to_numpy(dtype=np.float64) for name in own.sizes},
        {name: np.array([value] * len(frame)) for name, value in labels.items()},
        frame.latency.to_numpy(dtype=np.float64) * 1e-3,
    )


def sample(points: Points) -> Points:
    """Return `SAMPLE` of the points, spread over all of them by chance."""
    order = np.random.default_rng(0).permutation(len(points))
    return points.where(np.isin(np.arange(len(points)), order[:SAMPLE]))


def product_points(system: str, dtype: str) -> Points:
    """Return a sample of a system's matrix products, of the sizes that DIR has of others."""
    frame = read_table(system, "gemm", "gemm")
    frame = frame[(frame.gemm_dtype == dtype) & (frame.m <= 16384)]
    frame = frame[(frame.n >= 1024) & (frame.k >= 1024)]
    return sample(table_points("gemm", frame, {"gemm_dtype": dtype}))


def attention_points(
    system: str, op: OpClass, kv_dtype: str = "fp8", engine: str = "vllm"
) -> Points:
    """Return a system's attention in heads of 128 and without windows."""
    prefill = op is OpClass.ATTENTION_PREFILL
    name = f"{'context' if prefill else 'generation'}_attention"
    frame = read_table(system, "attention", name, engine)
    frame = frame[(frame.kv_cache_dtype == kv_dtype) & (frame.head_dim == 128)]
    frame = frame[frame.window_size == 0]
    frame = frame.assign(seq_len=frame.isl if prefill else frame.isl + frame.step)
    return table_points("attention", frame, {"kind": "prefill" if prefill else "decode"})


def gemm_points(rows: Sequence[tuple[float, float, float, float]]) -> Points:
    """Return matrix products given as (m, n, k, seconds)."""
    table = np.array(rows)
    none = np.array([""] * len(rows))
    return Points(
        schema("gemm"),
        none,
        {name: table[:, i] for i, name in enumerate(("m", "n", "k"))},
        {"gemm_dtype": np.array(["bfloat16"] * len(rows))},
        table[:, 3],
    )


def _without_edges(points: Points) -> Points:
    """Leave out products of one row more than tiles hold.

    Hopper's FP8 kernels take up to half as long again for them, and a third of the table's points are such;
    engines decode in batches that CUDA graphs were captured for, which fill tiles. With them, decoding 10 to
    30 sequences in FP8 came out 8 to 20 % slower than a server on an H200 was (`benchmarks.gpu_promise`).
    """
    rows = points.sizes["m"]
    return points.where((rows <= _TILE_ROWS) | (rows % _TILE_ROWS != 1))


def vidur_a40(path: Path) -> Points:
    """Return the matrix products of an A40 as Vidur measured them (ms per projection)."""
    rows = []
    for row in csv.DictReader(path.open()):
        if row["gpu"] != "a40":
            continue
        tp = int(row["num_tensor_parallel_workers"])
        hidden, inner = int(row["n_embd"]), int(row["n_expanded_embd"]) // tp
        dim = hidden // int(row["n_head"])
        q, kv = int(row["n_head"]) * dim // tp, max(1, int(row["n_kv_head"]) // tp) * dim
        ups = 2 if row["use_gated_mlp"] == "True" else 1
        m = float(row["num_tokens"])
        for n, k, column in (
            (q + 2 * kv, hidden, "attn_pre_proj_ms"),
            (hidden, q, "attn_post_proj_ms"),
            (ups * inner, hidden, "mlp_up_proj_ms"),
            (hidden, inner, "mlp_down_proj_ms"),
        ):
            rows.append((m, n, k, float(row[column]) * 1e-3))
    return gemm_points(rows)


def rtx4090(path: Path) -> Points:
    """Return the matrix products of Llama-3.1-8B on an RTX 4090 (LLMServingSim, us)."""
    shapes = {
        "qkv_proj": (6144, 4096),
        "o_proj": (4096, 4096),
        "gate_up_proj": (28672, 4096),
        "down_proj": (4096, 14336),
        "lm_head": (128256, 4096),
    }
    rows = []
    for row in csv.DictReader(path.open()):
        if row["gpu"] == "RTX4090" and row["layer"] in shapes:
            n, k = shapes[row["layer"]]
            rows.append((float(row["tokens"]), n, k, float(row["time_us"]) * 1e-6))
    return gemm_points(rows)


def expert_points(system: str) -> Points:
    """Return the expert layers of one system from aiconfigurator-core's tables (one expert group).

    Where tokens choose experts in turn it is known how many they touch, so these are taken where a table has
    them. Where they crowd on some by a power law, nobody says how many are read: a fit on those decoded 3 to
    9 % faster than a server on an H200 (`benchmarks/results/gpu_steps_moe.csv`).
    """
    frame = read_table(system, "moe", "moe")
    known = BALANCED in set(frame.distribution)
    routing = BALANCED if known else "power_law_1.2"
    frame = frame[(frame.moe_ep_size == 1) & (frame.distribution == routing)]
    wanted = [
        (frame.moe_dtype == dtype) & frame.kernel_source.str.contains(kernel)
        for dtype, kernel in EXPERT_DTYPES.items()
    ]
    frame = frame[np.logical_or.reduce(wanted)]
    own = schema("experts")
    frame = frame.assign(moe_dtype=frame.moe_dtype.replace("fp8_block", "fp8"))
    frame = frame.sort_values("latency").drop_duplicates([*own.sizes, "moe_dtype"])
    frame = frame.sort_values([*own.sizes, "moe_dtype"])
    return Points(
        own,
        np.array([""] * len(frame)),
        {name: frame[name].to_numpy(dtype=np.float64) for name in own.sizes},
        {
            "moe_dtype": frame.moe_dtype.to_numpy(dtype=np.str_),
            ROUTING: np.full(len(frame), routing),
        },
        frame.latency.to_numpy(dtype=np.float64) * 1e-3,
    )


def proxy(constants: OpConstants, of: str, *, slower: float = 1.0) -> OpConstants:
    """Return constants taken over from another GPU, with `slower` times its compute share."""
    return replace(
        constants,
        e_f=float(f"{constants.e_f * slower:.5g}"),
        hot_bytes=0.0,
        hot_gain=1.0,
        error=max(constants.error, PROXY_ERROR),
        tag=Tag.PROXY,
        source=of if slower == 1.0 else f"{of}, compute share x {slower:.2f}",
    )


def fit_operators(data: Path, catalog: Catalog) -> tuple[Constants, list[Fit]]:
    """Fit every GPU that has single-operator measurements."""
    out: Constants = {}
    report: list[Fit] = []
    for name in ("op_gemm.csv", "op_attention.csv"):
        points = read_points(data / name)
        for system, gpu in SYSTEMS.items():
            for op, part in op_classes(points.of(system)):
                used = _without_edges(part) if op is OpClass.GEMM_FP8 and gpu in HOPPER else part
                found = fit(op, used, catalog.gpu(gpu), source=AIC)
                report.append(found)
                if name == "op_attention.csv" and system not in VERSIONS:
                    points_8 = attention_points(system, op)
                    report.append(fit_narrow(found, points_8, catalog.gpu(gpu)))
    for system, gpu in TABLES_ONLY.items():
        for op, dtype in ((OpClass.GEMM, "bfloat16"), (OpClass.GEMM_FP8, "fp8")):
            report.append(fit(op, product_points(system, dtype), catalog.gpu(gpu), source=AIC))
        for op in (OpClass.ATTENTION_PREFILL, OpClass.ATTENTION_DECODE):
            points_16 = sample(attention_points(system, op, "bfloat16"))
            found = fit(op, points_16, catalog.gpu(gpu), source=AIC)
            points_8 = attention_points(system, op)
            report += [found, fit_narrow(found, points_8, catalog.gpu(gpu))]
    known = SYSTEMS | TABLES_ONLY
    for system in FP4_SYSTEMS:
        points_4 = product_points(system, "nvfp4")
        report.append(fit(OpClass.GEMM_FP4, points_4, catalog.gpu(known[system]), source=AIC))
    for system, gpu in known.items():
        for op, part in op_classes(expert_points(system)):
            report.append(fit(op, part, catalog.gpu(gpu), source=AIC))
    a40 = replace(catalog.gpu("A6000"), name="A40", fp16_tflops=149.7, bandwidth_bytes_per_s=696e9)
    report.append(
        fit(OpClass.GEMM, vidur_a40(data / "op_vidur_dense.csv"), a40, source="Vidur 2024, A40")
    )
    report.append(
        fit(
            OpClass.GEMM,
            rtx4090(data / "op_llmservingsim_dense.csv"),
            catalog.gpu("RTX4090"),
            source="LLMServingSim, vLLM 0.19",
        )
    )
    for entry in report:
        out.setdefault(entry.gpu, {})[entry.op] = entry.constants
    return out, report


def fit_own_attention(catalog: Catalog) -> tuple[OwnConstants, list[Fit]]:
    """Fit attention of engines with kernels of their own, where both sizes of cache were measured."""
    out: OwnConstants = {}
    report: list[Fit] = []
    for engine, title in OWN_ATTENTION.items():
        source = AIC.replace("vLLM", title)
        for system, name in (SYSTEMS | TABLES_ONLY).items():
            if system in VERSIONS:
                continue
            gpu = catalog.gpu(name)
            for op in (OpClass.ATTENTION_PREFILL, OpClass.ATTENTION_DECODE):
                points_16 = sample(attention_points(system, op, "bfloat16", engine))
                found = fit(op, points_16, gpu, source=source)
                both = fit_narrow(found, attention_points(system, op, engine=engine), gpu)
                report += [found, both]
                out.setdefault((name, engine), {})[op] = both.constants
    return out, report


def fit_layers(
    data: Path, catalog: Catalog
) -> tuple[dict[str, LayerFit], dict[str, AllReduceCost]]:
    """Fit the GPUs and PCIe nodes that have whole-layer measurements, on Llama-2 70B."""
    points = read_points(data / "layer_helix.csv")
    spec = catalog.model("llama-2-70b").llm
    gpus: dict[str, LayerFit] = {}
    for machine, node_id in HELIX_MACHINES.items():
        node = catalog.node(node_id)
        train = points.of(machine, model="llama2_70b")
        found = fit_gpu(spec, node, train, HELIX_CONDITIONS, source=HELIX)
        # The error on the model that was not fitted on.
        small, test = catalog.model("llama-1-30b").llm, points.of(machine, model="llama1_30b")
        own = found.constants(node.gpu.name, grouped=False)
        error = spread(predict_layers(small, node, own, test, HELIX_CONDITIONS), test.seconds)
        gpus[node.gpu.name] = found.with_error(error)
    sums: dict[str, AllReduceCost] = {}
    for machine, node_id in HELIX_NODES.items():
        node = catalog.node(node_id)
        constants = gpus[node.gpu.name].constants(node.gpu.name, grouped=True)
        train = points.of(machine, model="llama2_70b")
        sums[node_id] = fit_all_reduce(spec, node, constants, train, HELIX_CONDITIONS)
    return gpus, sums


def fit_interconnects(data: Path) -> dict[tuple[str, int], AllReduceCost]:
    """Fit the all-reduce of nodes measured directly: (system, GPUs) -> cost."""
    from scipy.optimize import least_squares

    points = read_points(data / "op_allreduce.csv").of(kernel_source="vLLM_custom_graph")
    out: dict[tuple[str, int], AllReduceCost] = {}
    for system in SYSTEMS:
        for gpus in (2, 4, 8):
            part = points.of(system)
            train, _ = part.where(part.sizes["num_gpus"] == gpus).split()
            wire = 2.0 * (gpus - 1) / gpus * train.sizes["bytes"]

            def residual(
                x: np.ndarray, wire: np.ndarray = wire, train: Points = train
            ) -> np.ndarray:
                alpha, bus, p = np.exp(x)
                predicted = ((alpha * 1e-6) ** p + (wire / bus) ** p) ** (1 / p)
                return np.asarray(np.log(predicted / train.seconds))

            low, high = np.log([1, 1e9, 0.4]), np.log([100, 2e12, 2.0])
            best = least_squares(
                residual, np.log([5, 1e11, 0.8]), bounds=(low, high), loss="soft_l1", f_scale=0.1
            )
            alpha, bus, p = (float(f"{v:.4g}") for v in np.exp(best.x))
            out[system, gpus] = AllReduceCost(alpha, bus, p)
    return out


def complete(fitted: Constants, layers: dict[str, LayerFit]) -> Constants:
    """Return constants for every GPU of the catalog, the gaps filled by named proxies."""
    known = SYSTEMS | TABLES_ONLY
    out: Constants = {gpu: dict(fitted[gpu]) for gpu in (*known.values(), "RTX4090")}
    a40 = fitted["A40"][OpClass.GEMM]
    attention = (OpClass.ATTENTION_PREFILL, OpClass.ATTENTION_DECODE)
    for gpu in ("A10G", "A6000", "RTX3090"):
        out[gpu] = {OpClass.GEMM: proxy(a40, "A40 (Vidur 2024)")}
        out[gpu] |= {op: proxy(fitted["A100-80"][op], "A100-80") for op in attention}
    out["GH200"] = {op: proxy(c, "H100") for op, c in fitted["H100"].items()}
    out["RTX4090"] |= {op: proxy(fitted["L40S"][op], "L40S") for op in attention}
    for gpu, entry in layers.items():
        own = entry.constants(gpu, grouped=False)
        out[gpu] = {op: own.ops[op] for op in (OpClass.GEMM, *attention)}
    out["A100-40"] |= {op: proxy(fitted["A100-80"][op], "A100-80") for op in attention}
    # Layers alone do not tell attention from products during prefill; cards with today's kernels
    # take the shape of attention from their relatives, slowed as much as their products are.
    slower = out["L4"][OpClass.GEMM].e_f / out["L40S"][OpClass.GEMM].e_f
    prefill = OpClass.ATTENTION_PREFILL
    out["L4"][prefill] = proxy(fitted["L40S"][prefill], "L40S", slower=slower)
    relatives = {"A100-40": "A100-80", "GH200": "H100"}
    relatives |= dict.fromkeys(("L4", "RTX4090", "RTXPRO6000"), "L40S")
    for gpu, ops in out.items():
        relative = relatives.get(gpu, "A100-80")
        weaker = min(1.0, ops[OpClass.GEMM].e_f / out[relative][OpClass.GEMM].e_f)
        ops.setdefault(OpClass.ELEMENTWISE, ELEMENTWISE)
        for op in (OpClass.EXPERTS, OpClass.EXPERTS_INT4, OpClass.EXPERTS_FP8, OpClass.GEMM_FP8):
            if op in ops:
                continue
            donor = relative if op in out[relative] else "L40S"
            if donor == gpu:
                raise SystemExit(f"{gpu} has no {op.value} and no relative that has")
            ops[op] = proxy(out[donor][op], donor, slower=round(weaker, 2))
    for (gpu, op), share in SUSTAINED.items():
        out[gpu][op] = replace(out[gpu][op], sustained=share)
    for (gpu, op), share in SERVED_MEMORY.items():
        out[gpu][op] = replace(out[gpu][op], sustained_b=share)
    for ops in out.values():
        for op in SERVED_EXPERT_CLASSES:
            if op in ops:
                ops[op] = replace(ops[op], sustained=SERVED_EXPERTS)
    return out


def dump(constants: Constants, own: OwnConstants) -> str:
    """Return the constants file as YAML text."""
    lines = [
        "# Written by tools/fit_constants.py; do not edit. For their meaning see perf/constants.py.",
        f"fitted: {datetime.now(tz=UTC).date().isoformat()}",
        "gpus:",
    ]
    for gpu in sorted(constants):
        lines.append(f"  {gpu}:")
        lines += _op_lines(constants[gpu], 4)
        engines = {engine: ops for (name, engine), ops in own.items() if name == gpu}
        lines += ["    engines:"] if engines else []
        for engine, ops in engines.items():
            lines += [f"      {engine}:", *_op_lines(ops, 8)]
    return "\n".join(lines) + "\n"


def _op_lines(ops: Mapping[OpClass, OpConstants], indent: int) -> list[str]:
    names = (
        *("e_f", "e_b", "t0_us", "p", "pad", "pad_k", "pad_n", "serial_ns", "hot_bytes"),
        *("hot_gain", "kv8", "kv8_t0", "sustained", "sustained_b", "error"),
    )
    defaults = OpConstants()
    lines = []
    for op in (op for op in OpClass if op in ops):
        c = ops[op]
        fields = [
            f"{name}: {getattr(c, name):.5g}"
            for name in names
            if name == "error" or getattr(c, name) != getattr(defaults, name)
        ]
        fields += [f"tag: {c.tag.value}", f'source: "{c.source}"']
        lines.append(f"{' ' * indent}{op.value}: {{{', '.join(fields)}}}")
    return lines


def main() -> None:
    """Fit, print the errors on fitted and held-out points, and write the files with --write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "perf")
    parser.add_argument("--write", action="store_true", help="write the data files of the package")
    arguments = parser.parse_args()
    catalog = Catalog.default()
    fitted, report = fit_operators(arguments.data, catalog)
    own, own_report = fit_own_attention(catalog)
    report += own_report
    print("gpu       operator            points   fitted med/p95   held out med/p95   (per cent)")
    for entry in report:
        out = entry.held_out
        held = f"{out.median:6.1f} {out.p95:6.1f}" if out else ""
        print(
            f"{entry.gpu:9s} {entry.op.value:19s} {entry.fitted.points:6d}"
            f"   {entry.fitted.median:6.1f} {entry.fitted.p95:6.1f}   {held}"
            + (f"   at its bound: {', '.join(entry.at_bound)}" if entry.at_bound else "")
        )
    layers, sums = fit_layers(arguments.data, catalog)
    for (system, gpus), cost in fit_interconnects(arguments.data).items():
        print(f"all-reduce {system} x{gpus}: {cost}")
    for node, cost in sums.items():
        print(f"all-reduce {node}: {cost}")
    text = dump(complete(fitted, layers), own)
    yaml.safe_load(text)
    if arguments.write:
        target = ROOT / "src" / "atoll" / "perf" / "data" / "constants.yaml"
        target.write_text(text, encoding="utf-8")
        print(f"wrote {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
