"""How far the performance model is off: operators, whole steps, published layers, mixtures of experts.

Single operators are compared on the points that no fit has seen (`Points.held_out`), under the rig's own
conditions (some rigs kept small operands in the L2 cache; see `OpConstants.hot_bytes`). Whole steps are
compared with aiconfigurator-core, which adds up its own tables of measured operators. Layers published
with Helix are fitted here on Llama-2 70B and tested on LLaMA-1 30B. Errors are |predicted/measured - 1|
in per cent. Missing data or packages give null and say why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from atoll.catalog import Catalog
from atoll.catalog.dtypes import DTYPES
from atoll.catalog.nodes import AllReduceCost
from atoll.core.errors import AtollError, MissingDependencyError
from atoll.perf.aic import SYSTEMS, aic
from atoll.perf.batch import Batch
from atoll.perf.calibration import Accuracy, accuracy, op_classes, predict
from atoll.perf.constants import OpClass, default_constants
from atoll.perf.measurements import Points, read_points
from atoll.perf.step import analytic, step_seconds
from benchmarks.report import Figure, finish, leave_out, options
from research.fitting.layer_fit import LayerConditions, fit_all_reduce, fit_gpu, predict_layers

DENSE = ("llama-3.1-8b", "qwen3-32b", "llama-3-70b")
MOE = {"gpt-oss-20b": (1, 2, 4, 8), "gpt-oss-120b": (1, 2, 4, 8), "qwen3-235b-a22b": (4, 8)}
STEP_GPUS = ("H100", "H200", "A100-80", "B200")
PREFILLS: tuple[tuple[int, int], ...] = (
    (1, 128),
    (1, 512),
    (1, 1024),
    (1, 2048),
    (1, 4096),
    (1, 8192),
)
PREFILLS += ((4, 1024), (8, 512), (4, 2048), (16, 1024))
DECODES = tuple(
    (b, c) for b in (1, 4, 8, 16, 32, 64, 128, 256) for c in (256, 1024, 2048, 4096, 8192)
)
MLPERF_RATIO = 2.9
"""Llama-2 70B offline per GPU in MLPerf Inference 5.1: eight B200 over eight H200 of the same submitter."""
MLPERF_TOKENS = 294
MLPERF_SEQUENCES = 1024
HELIX = LayerConditions(prompt_tokens=763.1, decode_context=950.0)
HELIX_MACHINES = {
    "A100-40": {"a100": 1},
    "V100-16": {"v100": 1},
    "L4": {"l4": 1, "l4x2": 2},
    "T4": {"t4": 1, "t4x2": 2, "t4x4": 4},
}
INTERCONNECT_OF = {
    "H100": "nvlink4",
    "H200": "nvlink4-h200",
    "B200": "nvlink5",
    "A100-80": "nvlink3",
}


def line(*cells: object) -> None:
    print(
        "  "
        + "".join(f"{cell!s:<20}" if i < 2 else f"{cell!s:>14}" for i, cell in enumerate(cells))
    )


def show(name: str, group: str, result: Accuracy) -> Accuracy:
    line(name, group, result.points, f"{result.median:.1f}", f"{result.p95:.1f}")
    return result


def operators(data: Path, catalog: Catalog) -> list[Figure]:
    """Matrix products and attention per GPU, on held-out points."""
    print("Operators, held-out points (per cent)")
    line("operator", "GPU", "points", "median", "p95")
    found: dict[OpClass, list[Accuracy]] = defaultdict(list)
    for name in ("op_gemm.csv", "op_attention.csv"):
        points = read_points(data / name)
        for gpu, system in SYSTEMS.items():
            for op, part in op_classes(points.of(system)):
                _, test = part.split()
                constants = default_constants().gpu(gpu).op(op)
                predicted = predict(op, constants, test, catalog.gpu(gpu))
                found[op].append(show(op.value, gpu, accuracy(predicted, test.seconds)))
                large = _moved(op, test) > 1.5 * constants.hot_bytes
                if op is OpClass.ATTENTION_DECODE and large.any():
                    rest = test.where(large)
                    cold = predict(op, replace(constants, hot_bytes=0.0), rest, catalog.gpu(gpu))
                    show("  beyond the cache", gpu, accuracy(cold, rest.seconds))
        unknown = sorted(set(points.groups()) - set(SYSTEMS.values()))
        if unknown:
            print(f"  {name}: not in the catalog, left out: {', '.join(unknown)}")
    worst = {op: max(a.median for a in every) for op, every in found.items()}
    fp8 = max(a.median for a in found[OpClass.GEMM_FP8])
    return [
        Figure("gemm_median_max", worst[OpClass.GEMM], 7),
        Figure("gemm_p95_max", max(a.p95 for a in found[OpClass.GEMM]), 30),
        Figure("decode_attn_median_max", worst[OpClass.ATTENTION_DECODE], 8),
        Figure("prefill_attn_median_max", worst[OpClass.ATTENTION_PREFILL], 12),
        Figure("gemm_fp8_median_max", fp8, note="no bar: FP8 kernels are too uneven for one curve"),
    ]


def _moved(op: OpClass, points: Points) -> np.ndarray:
    """Bytes of KV cache that each point of decode attention reads."""
    if op is not OpClass.ATTENTION_DECODE:
        return np.zeros(len(points))
    names = ("batch_size", "seq_len", "num_key_value_heads", "head_dim")
    return np.asarray(4.0 * np.prod([points.sizes[name] for name in names], axis=0))


def all_reduces(data: Path, catalog: Catalog) -> list[Figure]:
    """All-reduce per GPU and group size, on held-out sizes; the L40S host is a case of its own."""
    print("\nAll-reduce in a CUDA graph, held-out sizes (per cent)")
    line("interconnect", "GPUs", "points", "median", "p95")
    points = read_points(data / "op_allreduce.csv").of(kernel_source="vLLM_custom_graph")
    medians = []
    for gpu, name in (*INTERCONNECT_OF.items(), ("L40S", "pcie4")):
        for count in (2, 4, 8):
            part = points.of(SYSTEMS[gpu])
            _, test = part.where(part.sizes["num_gpus"] == count).split()
            cost = catalog.interconnect(name).allreduce_for(count)
            result = show(
                name, f"{gpu} x{count}", accuracy(_reduced(cost, count, test), test.seconds)
            )
            if gpu != "L40S":
                medians.append(result.median)
    print(
        "  L40S is excepted from the figure: this host's bus at 4 and 8 GPUs is 3.7 and 2.0 GB/s, while"
    )
    print("  the catalog's pcie4 is the 20 GB/s of a host with a better topology.")
    return [Figure("allreduce_median_max", max(medians), 15)]


def _reduced(cost: AllReduceCost, gpus: int, test: Points) -> np.ndarray:
    sizes = test.sizes["bytes"]
    return np.array([cost.time_s(float(size), gpus) for size in sizes])


def dense_cases(quick: bool) -> Iterator[tuple[str, str, int]]:
    for gpu in STEP_GPUS:
        for model in DENSE:
            for tp in (1, 8) if quick else (1, 2, 4, 8):
                yield gpu, model, tp


def moe_cases(quick: bool) -> Iterator[tuple[str, str, int]]:
    for gpu in STEP_GPUS:
        for model, sizes in MOE.items():
            for tp in sizes[-1:] if quick else sizes:
                yield gpu, model, tp


def steps(
    catalog: Catalog, cases: Iterable[tuple[str, str, int]], quick: bool
) -> dict[str, Accuracy]:
    """Whole steps against aiconfigurator-core: {"prefill": ..., "decode": ..., "all": ...}."""
    line("model", "GPU", "prefill med", "p95", "decode med", "p95")
    ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    for gpu, name, tp in cases:
        model, node = catalog.model(name), catalog.node(f"{gpu}:{tp}")
        own = analytic(model.llm, node, engine="none")
        peer = aic(model, node)
        layers = model.llm.layers
        batches = [("prefill", Batch.prefill(b * s, b)) for b, s in PREFILLS[:: 3 if quick else 1]]
        batches += [("decode", Batch.decode(b, c)) for b, c in DECODES[:: 4 if quick else 1]]
        row = rows.setdefault((name, gpu), {"prefill": [], "decode": []})
        for phase, batch in batches:
            try:
                truth = step_seconds(peer, batch, 0, layers)
            except Exception as error:  # noqa: BLE001 - the package's own error types are private
                print(f"  {name} on {node.id}: {phase} left out: {_short(error)}")
                break
            ratio = step_seconds(own, batch, 0, layers) / truth
            ratios[phase].append(ratio)
            row[phase].append(ratio)
    for (name, gpu), row in rows.items():
        if row["decode"]:
            p, d = _of(row["prefill"]), _of(row["decode"])
            line(name, gpu, f"{p.median:.1f}", f"{p.p95:.1f}", f"{d.median:.1f}", f"{d.p95:.1f}")
    both = _of(ratios["prefill"] + ratios["decode"])
    return {phase: _of(values) for phase, values in ratios.items()} | {"all": both}


def fp4_ratio(catalog: Catalog) -> Figure:
    """Tokens per second of a B200 in NVFP4 over those of an H200 in FP8, as MLPerf has them.

    Llama-2 70B, whose questions and answers have 294 tokens each on average, offline: a full batch in steady
    state, so as many prompt tokens in a step as answers. Nothing here is fitted on MLPerf's figures.
    """
    rates = {}
    for gpu, dtype in (("B200", "nvfp4"), ("H200", "fp8")):
        spec = replace(catalog.model(f"llama-2-70b@{dtype}").llm, kv_dtype=DTYPES["fp8"])
        step = analytic(spec, catalog.node(f"{gpu}:1"), engine="vllm", tp=1)
        size, length = float(MLPERF_SEQUENCES), float(MLPERF_TOKENS)
        batch = Batch(size, size / length, 0.0, size, 1.5 * length)
        rates[gpu] = size / step_seconds(step, batch, 0, spec.layers)
    ratio = rates["B200"] / rates["H200"]
    print(
        f"\nB200 (NVFP4) over H200 (FP8), Llama-2 70B offline: {ratio:.2f}, MLPerf {MLPERF_RATIO}"
    )
    print("  " + ", ".join(f"{gpu} {rate:,.0f} tokens/s" for gpu, rate in rates.items()))
    return Figure("fp4_ratio_error", abs(ratio / MLPERF_RATIO - 1.0) * 100.0, 15)


def _short(error: Exception) -> str:
    return str(error).split(":")[0][:60] or type(error).__name__


def _of(ratios: list[float]) -> Accuracy:
    return accuracy(np.array(ratios), np.ones(len(ratios)))


def helix(data: Path, catalog: Catalog) -> list[Figure]:
    """Layers published with Helix: fitted on 70B, tested on 30B, per GPU over all its machines."""
    print("\nPublished layers: fitted on Llama-2 70B, tested on LLaMA-1 30B (per cent)")
    line("machine", "phase", "points", "median", "p95")
    points = read_points(data / "layer_helix.csv")
    big, small = catalog.model("llama-2-70b").llm, catalog.model("llama-1-30b").llm
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for gpu, machines in HELIX_MACHINES.items():
        fitted = None
        for machine, count in machines.items():
            train = points.of(machine, model="llama2_70b")
            node = catalog.node(f"{gpu}:{count}")
            if fitted is None:
                fitted = fit_gpu(big, node, train, HELIX, source="benchmark")
            if count > 1:
                grouped = fitted.constants(gpu, grouped=True)
                node = node.with_all_reduce(count, fit_all_reduce(big, node, grouped, train, HELIX))
            for phase in ("prefill", "decode"):
                test = points.of(machine, model="llama1_30b", kind=phase)
                constants = fitted.constants(gpu, grouped=False)
                predicted = predict_layers(small, node, constants, test, HELIX)
                show(machine, phase, accuracy(predicted, test.seconds))
                errors[gpu, phase] += list(predicted / test.seconds)
    for gpu in HELIX_MACHINES:
        for phase in ("prefill", "decode"):
            show(f"all {gpu}", phase, _of(errors[gpu, phase]))
    print(
        "  The same layers with the constants that ship (attention of today's kernels where they differ)"
    )
    shipped = default_constants()
    for gpu, machines in HELIX_MACHINES.items():
        for phase in ("prefill", "decode"):
            ratios: list[float] = []
            for machine, count in machines.items():
                node, test = (
                    catalog.node(f"{gpu}:{count}"),
                    points.of(machine, model="llama1_30b", kind=phase),
                )
                predicted = predict_layers(small, node, shipped.gpu(gpu), test, HELIX)
                ratios += list(predicted / test.seconds)
            show(f"shipped {gpu}", phase, _of(ratios))
    worst = {
        phase: max(_of(errors[gpu, phase]).median for gpu in HELIX_MACHINES)
        for phase in ("prefill", "decode")
    }
    return [
        Figure("helix_prefill_median_max", worst["prefill"], 6),
        Figure("helix_decode_median_max", worst["decode"], 15),
    ]


def main() -> None:
    """Run all comparisons."""
    arguments = options(__doc__ or "")
    catalog, data = Catalog.default(), arguments.data / "perf"
    figures: list[Figure] = [fp4_ratio(catalog)]
    if data.is_dir():
        figures += operators(data, catalog)
        figures += all_reduces(data, catalog)
        try:
            figures += helix(data, catalog)
        except MissingDependencyError as error:
            leave_out(f"published layers: {error}")
    else:
        leave_out(f"operators, all-reduce and layers: no folder {data}")
    try:
        print("\nWhole dense steps against aiconfigurator-core (per cent)")
        dense = steps(catalog, dense_cases(arguments.quick), arguments.quick)
        print("\nMixtures of experts against aiconfigurator-core (per cent)")
        moe = steps(catalog, moe_cases(arguments.quick), arguments.quick)
        figures += [
            Figure("step_decode_median", dense["decode"].median, 5),
            Figure("step_decode_p95", dense["decode"].p95, 15),
            Figure("step_prefill_median", dense["prefill"].median, 5),
            Figure("step_prefill_p95", dense["prefill"].p95, 15),
            Figure("moe_step_median", moe["all"].median, 12),
            Figure("moe_step_p95", moe["all"].p95),
        ]
    except AtollError as error:
        leave_out(f"whole steps: {error}")
    names = {figure.name for figure in figures}
    keys = "gemm_median_max gemm_p95_max decode_attn_median_max prefill_attn_median_max "
    keys += "allreduce_median_max step_decode_median step_decode_p95 step_prefill_median "
    keys += "step_prefill_p95 helix_prefill_median_max helix_decode_median_max moe_step_median"
    figures += [Figure(key, None) for key in keys.split() if key not in names]
    finish(figures)


if __name__ == "__main__":
    main()
