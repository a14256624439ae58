"""Write docs/fidelity.md from data: `python -m tools.fidelity_page --write`. Without, say if it is current.

The data are what benchmarks recorded (`benchmarks/results/servers.csv`, `figures.json`) and the constants
that ship.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.catalog.gpus import default_gpus
from atoll.perf.constants import GpuConstants, OpClass, Tag, default_constants

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "fidelity.md"
RESULTS = ROOT / "benchmarks" / "results"
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
MEDIANS = {
    "dense_tpot": "time per token, dense models",
    "moe_tpot": "time per token, mixtures of experts",
    "ttft": "time to the first token",
    "gpu_ratio": "one GPU over another, same model and load",
}
TARGETS = {"dense_tpot": 6, "moe_tpot": 10, "ttft": 15, "gpu_ratio": 10}
COVERAGES = {
    "coverage_dense": "time per token, dense models",
    "coverage_moe": "time per token, mixtures of experts",
    "coverage_ttft": "time to the first token",
}

HEAD = """# How far off: measured servers

<!-- Written by tools/fidelity_page.py from benchmarks/results: change the data or the tool, not the page. -->

Errors are |predicted / measured - 1| in per cent, medians over rows; a bias above 0 means that predictions
are too slow. Every row is a server that somebody else measured under a constant number of clients, simulated
with the engine, version and limits it had. `python -m benchmarks.servers` makes the table (extra `aic`); how
constants and the simulator fare against our own runs is in [fidelity](internals/fidelity.md).

Three constants are fitted on these rows (`python -m tools.fit_servers`): what a sequence adds to a step of
SGLang, the share of the rate of memory that an H100 reaches in service, and the share of the arithmetic of
tables that quantised experts reach. *Left out* are errors of a server with the three fitted without its
series: all servers of that engine, version, model, format and GPU. A fourth, what latent attention takes to
be launched by SGLang and TensorRT-LLM (`EAGER_LATENT_S`), was fitted on servers of DeepSeek before and is not
left out. Attention of SGLang and TensorRT-LLM is fitted on tables of their own kernels, not on servers.

Servers of the public benchmark are started as its scripts say: tokens and sequences of a step, formats of
the KV cache, how often new prompts are looked at, MXFP8, kernels of experts. What else was decided after
looking at the rows: that products and experts of TensorRT-LLM take vLLM's time, that it launches steps with
prompts as vLLM does beyond its graphs and fuses sums over GPUs on any NVLink from 1.1 on, that experts are
one kernel on large Blackwells and vLLM's in MXFP4 anywhere (names of kernels say so), that SGLang computes
prompts first (its code says so), that an H100 sustains the arithmetic of an H200, which has the same chip
and limit of power, and 2,048 tokens a step where a source does not say how many. The errors of whole
servers are calibrated on them.

Three more were settled last, on every second series in order of their names; *not looked at* are errors of
the other half. SGLang of 0.5.6 in NVIDIA's own runs mixes prompts into steps with answers, as its generator
of commands asks for. gpt-oss under vLLM on Hopper runs with Marlin's kernels, as the public scripts ask
for, at the rate of tables of such kernels: vLLM takes Triton's by itself, which shipped constants are of.
And where SGLang looks at new prompts in intervals, first tokens wait for about 1.4 of them, not half of
one: measured, not explained. One that was tried and not taken: TensorRT-LLM 1.0 that runs one sequence less
than there are clients, over 20 rounds, brings first tokens of Llama-8B from 33 to 11 %, but those of
Qwen3-32B, not looked at, from 18 to 27 %.

Rows are left out by what was measured, not by what is predicted: deployments of several workers behind a
router, of which the source does not say how many; a series that would have reached 88 % of the peak
arithmetic of its GPUs, where no other reaches half (its prompts were in the KV cache from an earlier load);
and first tokens after more than 2 s and five times what all clients' prompts take at the peak in 16 bits,
which waited for room, for a client that fell behind, or for compiling.
"""


def recorded(name: str) -> dict[str, float | None]:
    """Return the figures that a benchmark recorded last."""
    kept = json.loads((RESULTS / "figures.json").read_text("utf-8"))
    found: dict[str, float | None] = kept[name]["figures"]
    return found


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a table of Markdown."""
    lines = [header, tuple("---" for _ in header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def number(value: float | None, digits: int = 1) -> str:
    """Return a figure, - where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def medians() -> list[str]:
    """Return the medians of all engines and of each."""
    figures = recorded("servers")
    rows = [
        (
            what,
            *(number(figures.get(f"{engine}_{name}_left_out")) for engine in TITLES),
            number(figures[f"{name}_left_out"]),
            str(TARGETS[name]),
            number(figures[f"{name}_median"]),
            number(figures.get(f"{name}_unseen")),
        )
        for name, what in MEDIANS.items()
    ]
    header = ("Left out", *TITLES.values(), "all", "target", "all, as shipped", "not looked at")
    return ["## By engine", "", *table(header, rows), ""]


def servers() -> list[str]:
    """Return every kind of server."""
    with (RESULTS / "servers.csv").open(encoding="utf-8") as stream:
        entries = list(csv.DictReader(stream))
    rows = [
        (
            f"{TITLES[entry['engine']]} {entry['version']}",
            *(entry[name] for name in ("model", "format", "gpu", "rows")),
            *(entry[name] for name in ("tpot", "tpot_bias", "tpot_p95", "tpot_left_out")),
            *(entry[name] for name in ("ttft", "ttft_bias", "ttft_left_out")),
        )
        for entry in entries
    ]
    header = (
        *("Engine", "Model", "Format", "GPU", "Rows"),
        *("TPOT", "bias", "p95", "left out", "TTFT", "bias", "left out"),
    )
    what = ["As shipped, and left out. A version of `-` is one that the source does not name."]
    return ["## Every kind of server", "", *what, "", *table(header, rows), ""]


def error_bars() -> list[str]:
    """Return how often stated intervals hold what was measured."""
    figures = recorded("error_bars")
    rows = [
        (what, number(figures[name], 2), number(figures[name.replace("coverage", "shipped")], 2))
        for name, what in COVERAGES.items()
    ]
    header = ("Share of servers inside the stated 90 %", "left out", "with what ships")
    width = number(figures["width_median"], 2)
    return [
        "## Error bars",
        "",
        "Whole GPUs, families of models and engines are left out in turn, what a server shares is calibrated",
        "on the rest, and those left out are counted (`python -m benchmarks.error_bars`). The upper end of a",
        f"stated 90 % of the time per token is {width} times the lower one in the median.",
        "",
        *table(header, rows),
        "",
    ]


def mi300x() -> list[str]:
    """Return how far off steps on MI300X are, by software stack."""
    figures = recorded("gpu_accuracy")
    new, old = (number(figures[f"mi300x_{name}_median"], 0) for name in ("new", "old"))
    apart = number(figures["mi300x_stacks_apart"], 2)
    newer, older = (f"{figures[f'mi300x_{name}_bias']:+.0f}" for name in ("new", "old"))
    rows = [("vLLM 0.10.0 on ROCm 6.4.1", new, newer), ("vLLM of 2024", old, older)]
    return [
        "## MI300X, by software stack",
        "",
        "No server above has an AMD GPU. Batches of Llama 3.1 70B and 405B in FP8 on eight MI300X were",
        "published for two stacks. Constants are the H100's; nothing was fitted on the newer stack. A",
        f"token of the 405B takes the older one {apart} times as long (1.16 to 1.41 by batch), which is",
        "what a version below 0.7 stands for on AMD's GPUs: `vllm@0.6`, or `engine.version` in a fleet",
        "file. Its row is not held out. Without a version the newer stack is meant, and stated errors",
        "are those of proxies (25 % for each class of operators, 20 % for a whole server), which hold",
        "both stacks; a version makes them no narrower. No first tokens were published (`python -m",
        "benchmarks.gpu_accuracy`).",
        "",
        *table(("Stack", "TPOT", "bias"), rows),
        "",
    ]


def grounds() -> list[str]:
    """Return what constants of every GPU rest on, and which were never measured."""
    constants, rows = default_constants(), []
    with (RESULTS / "servers.csv").open(encoding="utf-8") as stream:
        served = {entry["gpu"] for entry in csv.DictReader(stream)}
    for name, gpu in default_gpus().items():
        own = constants.for_gpu(gpu)
        engines = ", ".join(TITLES[engine] for engine in own.engines) or "-"
        rows.append((name, _classes(own, proxies=False), _classes(own, proxies=True), engines))
    never = [name for name in default_gpus() if name not in served]
    header = ("GPU", "fitted on it", "taken over from another GPU", "own attention of")
    return [
        "## What constants rest on",
        "",
        *table(header, rows),
        "",
        "## Never compared with a server",
        "",
        f"No server above has one of {', '.join(never)}.",
        "",
        "llama.cpp and the stage engine are in none of these rows ([our own](internals/fidelity.md) are on",
        "an H200), nor are phases apart, experts spread over GPUs, attention in copies, guessed tokens, and",
        "prompts that begin alike.",
        "",
    ]


def _classes(own: GpuConstants, *, proxies: bool) -> str:
    found = [
        f"`{op.value}`"
        for op, c in own.ops.items()
        if op is not OpClass.ELEMENTWISE and (c.tag is Tag.PROXY) == proxies
    ]
    return ", ".join(found) or "-"


def page() -> str:
    """Return the page."""
    parts = (
        *(HEAD.splitlines(), [""], medians(), servers(), error_bars()),
        *(mi300x(), grounds()),
    )
    return "\n".join(line for part in parts for line in part).rstrip() + "\n"


def main() -> int:
    """Write the page, or say whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/fidelity.md")
    if parser.parse_args().write:
        PAGE.write_text(page(), "utf-8")
        return 0
    current = PAGE.read_text("utf-8") == page()
    print("current" if current else "not current: python -m tools.fidelity_page --write")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
