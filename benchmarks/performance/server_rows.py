"""Measured servers of others: what clients in a closed loop saw, and what the simulator says of the same.

Rows are those of `silicon_sample.csv` in aiconfigurator-core (extra `aic`; Apache-2.0): servers of vLLM,
SGLang and TensorRT-LLM on H100, H200, B200, B300 and GB200 that public benchmarks and NVIDIA measured in 2025
and 2026. How those of the public benchmark were started is in its scripts (`limits_of`). Left out are rows
that are no one server of one tensor-parallel group (phases apart; attention in copies and experts spread over
GPUs unless `spread` rows are asked for), models that the catalog does not have, images that are known to
guess tokens ahead (`GUESSING`), and loads of one server that were measured twice and are far apart
(`_APART`): the file does not say which of them guesses, as SGLang 0.5.9 does by a second script. By what was
measured, and not by what is predicted, are left out series that did not compute all of their prompts
(`_MAX_PEAK`) and rows whose first tokens waited for something else than prompts (`_WAIT_S`, `_WAIT_TIMES`):
room, a client that fell behind, or compiling.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from atoll.catalog import Catalog
from atoll.core.errors import AtollError, MissingDependencyError
from atoll.engines.limits import EngineLimits
from atoll.engines.profile import read_version
from atoll.perf.constants import (
    ConstantTable,
    OpClass,
    OpConstants,
    default_constants,
)
from atoll.plan.plan import Flow, Instance, Node, Plan, Route
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.sim.api import simulate
from atoll.sim.sim_options import SimOptions
from atoll.workload.lengths import LengthMix
from atoll.workload.requests import Requests

if TYPE_CHECKING:
    from benchmarks.performance.server_fit import ServedConstants

GPUS = {
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
}
MODELS = {
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
}
FORMATS = {"": "bf16", "bf16": "bf16", "fp8": "fp8", "fp4": "nvfp4", "int4": "int4"}
GUESSING = ("1.2.0rc6.post3",)
"""Versions of TensorRT-LLM whose tokens come 1.7 times as fast as those of the version before it."""
_APART = 1.1
"""Times per token of one load over each other, from which on it was not one server."""
_BEHIND_ROUTER = "gtl_task_id="
"""Deployments that Dynamo's tests made: several workers behind a router, the file does not say how many."""
_MAX_PEAK = 0.6
"""Share of the peak arithmetic of their GPUs that servers sustain at most: 0.47 is the highest of all series
but one, of which 0.88 would be true if no prompts had been in the KV cache since an earlier load."""
_WAIT_S = 2.0
_WAIT_TIMES = 5.0
"""First tokens that take longer than this many seconds, and this many times what all clients' prompts take at
the peak in 16 bits, waited for something else than prompts."""
MIXED_CHUNK_SINCE = (0, 5, 6)
"""Versions of SGLang that NVIDIA's generator of commands starts with `--enable-mixed-chunk`: those it knows
since January 2026 (ai-dynamo/aiconfigurator, generator/rule_plugin/sglang.rule)."""
WAVES = 10
"""Requests per client, as the public benchmark has them: the first come all at once."""
MAX_GPUS = 8
MARLIN = {
    "H100": OpConstants(e_f=0.291, e_b=1.036, pad=1.64, pad_k=205.0, pad_n=18.1, error=0.11),
    "H200": OpConstants(e_f=0.288, e_b=0.769, pad=2.56, pad_k=187.0, pad_n=10.0, error=0.12),
}
"""Marlin's experts in MXFP4, fitted on vLLM's tables of them (aiconfigurator-core 0.12.0: 896 experts; those
of gpt-oss are in Triton's alone). The scripts of the public benchmark ask for Marlin on Hopper, where vLLM
takes Triton's kernels by itself: those reach 0.76 of the arithmetic where tokens are spread evenly and take
1.4 to 1.7 times as long where they are not, Marlin's 0.29 and 0.9 to 1.35 times. Launches are taken to be
those of Triton's, since the tables sort tokens to seven times the experts."""
_OTHER_BUDGET = 2048
"""Prompt tokens of a step where nobody says it; this value agrees with their first tokens."""
_PUBLIC_SHORTEST = 0.8
"""Shortest of the lengths, which are drawn evenly from this share of the longest to all of it."""


@dataclass(frozen=True, slots=True)
class ServerRow:
    """One server under one load: so many clients that each ask again when answered; times in milliseconds."""

    model: str
    gpu: str
    engine: str
    version: str
    dtype: str
    tp: int
    input_tokens: int
    output_tokens: int
    clients: int
    public: bool
    ttft_ms: float
    tpot_ms: float
    ranks: int = 1
    spread: bool = False

    @property
    def series(self) -> tuple[str, ...]:
        """What was measured at one time: servers of one version with any number of GPUs."""
        return (self.engine, self.version, self.model, self.dtype, self.gpu)

    @property
    def dense(self) -> bool:
        """Whether the model has no experts."""
        return self.model.startswith("llama") or self.model == "qwen3-32b"

    @property
    def name(self) -> str:
        """The model in the catalog, with its number formats."""
        own = {"gpt-oss-120b": "nvfp4", "deepseek-v3": "fp8"}.get(self.model, "bf16")
        changed = [] if self.dtype == own else [self.dtype]
        if self.public and self.narrow_cache:
            changed.append("kv=fp8")
        return f"{self.model}@{','.join(changed)}" if changed else self.model

    @property
    def narrow_cache(self) -> bool:
        """Whether the public benchmark asks for a KV cache in 8 bits."""
        if self.model == "gpt-oss-120b":
            # Of vLLM since 2026.
            return self.gpu != "H200" and (self.engine == "trtllm" or self.version == "0.15.1")
        if self.model == "deepseek-v3":
            return self.engine == "trtllm" or self.gpu != "H200"
        return self.dtype != "bf16"

    @property
    def mixes_chunks(self) -> bool:
        """Whether SGLang was told to compute prompts beside answers (`MIXED_CHUNK_SINCE`)."""
        told = self.engine == "sglang" and not self.public
        return told and read_version(self.version.partition(".post")[0]) >= MIXED_CHUNK_SINCE

    @property
    def kernels(self) -> str | None:
        """The kernels of experts that an engine was told to use, None where it took its own."""
        told = self.public and self.engine == "vllm" and self.model == "gpt-oss-120b"
        return "marlin" if told and self.gpu in MARLIN else None

    @property
    def server(self) -> tuple[str, ...]:
        """What makes it one server: the rows of one differ in load alone."""
        spread = (str(self.ranks),) if self.spread else ()
        return (self.model, self.dtype, self.gpu, str(self.tp), self.engine, self.version, *spread)

    @property
    def load(self) -> tuple[object, ...]:
        """What was asked of which model and engine, on whatever GPUs."""
        return (
            *(self.model, self.engine, self.tp),
            *(self.input_tokens, self.output_tokens, self.clients),
        )


@dataclass(frozen=True, slots=True)
class Times:
    """Mean milliseconds to the first token and per further one."""

    ttft_ms: float
    tpot_ms: float


def read_rows(path: Path | None = None, *, spread: bool = False) -> list[ServerRow]:
    """Return the rows that can be simulated, in the order of the file; or those with `spread` experts.

    Of these `ranks` have the attention, and each GPU some experts whole.
    """
    if path is None:
        if find_spec("aiconfigurator_core") is None:
            raise MissingDependencyError("aiconfigurator_core", "aic")
        path = Path(str(files("aiconfigurator_core") / "systems" / "silicon_sample.csv"))
    with path.open(encoding="utf-8") as stream:
        rows = [row for entry in csv.DictReader(stream) for row in _read(entry, spread=spread)]
    rows = _leave_out(rows, Catalog.default())
    measured: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for row in rows:
        measured[row.server, row.load].append(row.tpot_ms)
    one = {key for key, times in measured.items() if max(times) < _APART * min(times)}
    return [row for row in rows if (row.server, row.load) in one]


def _leave_out(rows: list[ServerRow], catalog: Catalog) -> list[ServerRow]:
    """Leave out what cannot be steps of one server that computes its prompts, by what was measured alone."""
    cached, waited = set(), set()
    for row in rows:
        gpu, spec = catalog.gpu(row.gpu), catalog.model(row.model).llm
        gpus = row.tp * row.ranks
        # A sequence computes its output matrix for answers only.
        flops = 2.0 * (spec.active_params - spec.head_params - spec.embedding_params)
        narrow = {"fp8": gpu.fp8_flops, "nvfp4": gpu.fp4_flops}.get(row.dtype)
        request_s = 1e-3 * (row.ttft_ms + (row.output_tokens - 1) * row.tpot_ms)
        tokens = row.clients * (row.input_tokens + row.output_tokens)
        if flops * tokens / request_s > _MAX_PEAK * gpus * (narrow or gpu.fp16_flops):
            cached.add(row.series)
        prompts_s = row.clients * row.input_tokens * flops / (gpus * gpu.fp16_flops)
        if row.ttft_ms > 1e3 * max(_WAIT_S, _WAIT_TIMES * prompts_s):
            waited.add(row)
    return [row for row in rows if row.series not in cached and row not in waited]


def _read(entry: dict[str, str], *, spread: bool = False) -> Iterator[ServerRow]:
    def number(key: str) -> int:
        return int(float(entry.get(key) or 1))

    version = entry["backend_version"]
    ranks, tp = max(1, number("attention_dp_size")), number("tp_size")
    groups = (max(1, number("moe_ep_size")), max(1, number("moe_tp_size")))
    if entry["mode"] != "agg" or ranks * tp > MAX_GPUS:
        return
    # Spread: all experts whole, a share of them on each of several GPUs.
    if groups != (ranks * tp, 1) or ranks * tp == 1 if spread else (ranks, groups[0]) != (1, 1):
        return
    if entry["model_path"] not in MODELS or entry["system"] not in GPUS or version in GUESSING:
        return
    source = entry["silicon_data_source"]
    if _BEHIND_ROUTER in source:
        return
    clients = re.search(r"concurrency=(\d+)", source)
    yield ServerRow(
        model=MODELS[entry["model_path"]],
        gpu=GPUS[entry["system"]],
        engine=entry["backend"],
        version=version,
        dtype=FORMATS[entry["precision"]],
        tp=number("tp_size"),
        input_tokens=number("isl"),
        output_tokens=number("osl"),
        clients=int(clients[1]) if clients else number("batch_size"),
        public=source.startswith(("source_file=2026", "db-dump")),
        ttft_ms=float(entry["silicon_ttft_ms"]),
        tpot_ms=float(entry["silicon_tpot_ms"]),
        ranks=ranks,
        spread=spread,
    )


def limits_of(row: ServerRow) -> EngineLimits:
    """Return how a server was started: as the scripts of the public benchmark say, which are of its date.

    Of others nobody says it: steps of SGLang are its own.
    """
    known = re.match(r"\d+\.\d+(\.\d+)?", row.version)
    limits = _public_limits(row) if row.public else EngineLimits()
    budget = limits.max_num_batched_tokens
    if budget is None:
        budget = 8192 if row.public or row.engine == "sglang" else _OTHER_BUDGET
    update = {
        "max_num_batched_tokens": max(budget, row.clients),
        "max_num_seqs": limits.max_num_seqs or max(1024, row.clients),
        "version": known[0] if known else None,
        "expert_parallel": row.spread or None,
        "mixed_chunk": row.mixes_chunks or None,
    }
    return limits.model_copy(update=update)


def _public_limits(row: ServerRow) -> EngineLimits:
    """SemiAnalysisAI/InferenceX, benchmarks/*.sh of October 2025 to April 2026."""
    short = (row.input_tokens, row.output_tokens) == (1024, 1024)
    if row.engine == "sglang" and row.gpu == "H200":
        return EngineLimits(
            max_num_batched_tokens=32768,
            max_num_seqs=512 if short else 256,
            gpu_memory_utilization=0.82,
        )
    if row.engine == "sglang":
        wide = row.dtype == "fp8" and row.tp == MAX_GPUS
        return EngineLimits(
            max_num_batched_tokens=32768 if wide else 8192 if row.dtype == "fp8" else 16384,
            prompt_interval=30 if row.clients >= 16 and (wide or row.dtype != "fp8") else 10,
            gpu_memory_utilization=0.82 if wide else 0.95 if row.dtype == "fp8" else 0.85,
        )
    if row.engine == "trtllm" and row.model == "gpt-oss-120b":
        return EngineLimits(max_num_batched_tokens=20000)
    if row.engine == "trtllm" and row.model == "deepseek-v3":
        one = (row.clients + row.input_tokens + 127) // 64 * 64
        late = row.version.startswith("1.2")
        collects = late and row.dtype == "fp8" and short and row.clients >= 64
        return EngineLimits(
            max_num_batched_tokens=max(one, 8192) if late else one,
            prompt_interval=40 if collects else None,
            # It takes a share of what weights leave, not of the whole.
            gpu_memory_utilization=0.97 if row.dtype == "fp8" and row.tp < MAX_GPUS else None,
        )
    if row.engine == "trtllm":
        return EngineLimits(
            max_num_batched_tokens=16384,
            prompt_interval=20 if short and row.tp < MAX_GPUS else None,
        )
    return EngineLimits(mxfp8=True if row.model == "gpt-oss-120b" else None)


def with_marlin(table: ConstantTable, gpu: str) -> ConstantTable:
    """Return constants with Marlin's experts; they sustain what products in 16 bits do."""
    experts = OpClass.EXPERTS_INT4
    known = table.gpu(gpu)
    sustained = default_constants().gpu(gpu).op(OpClass.GEMM).sustained
    own = replace(MARLIN[gpu], t0_us=known.ops[experts].t0_us, sustained=sustained)
    changed = known.with_measured({experts: own})
    return table.with_gpus([replace(changed, ops={**changed.ops, experts: own})])


def simulate_row(
    row: ServerRow,
    catalog: Catalog,
    constants: ConstantTable | None = None,
    *,
    served: ServedConstants | None = None,
) -> Times | None:
    """Return what the simulator says that the clients of a server see; None: it does not fit there.

    `served` are constants fitted on servers, in place of those that ship.
    """
    limits = limits_of(row)
    if served is not None:
        constants = served.table()
        limits = limits.model_copy(update={"host": served.host(row)})
    if row.kernels is not None:
        constants = with_marlin(constants or default_constants(), row.gpu)
    mean = LengthMix.fixed(float(row.input_tokens), float(row.output_tokens))
    service = Service(
        name="m",
        model=row.name,
        ttft_s=1e3,
        tpot_s=10.0,
        rate_per_s=1.0,
        lengths=Lengths.of(mean),
        engine_limits=limits,
    )
    kind = f"{row.gpu}:{row.tp * row.ranks}"
    problem = Problem(
        name="server",
        services=(service,),
        offers=(Offer(region="here", node_type=kind, available=1, usd_per_hour=1.0),),
        settings=Settings(engine=row.engine),
    )
    layers = catalog.model(row.name).llm.layers
    node = Node(id="n0", node_type=kind, market="on-demand", start=0, end=layers, tp=row.tp)
    instance = Instance(
        id="i",
        service="m",
        role="m/llm/both",
        region="here",
        stages=1,
        nodes=(node,),
        flows=(Flow(src="source", dst="n0", per_s=1.0), Flow(src="n0", dst="sink", per_s=1.0)),
        throughput_per_s=1.0,
        usd_per_hour=1.0,
    )
    plan = Plan(
        problem_hash=problem.content_hash(),
        problem_name="server",
        instances=(instance,),
        routes=(Route(service="m", instances=("i",), share=1.0),),
        usd_per_hour=1.0,
        status="feasible",
        solver="none",
        objective=1.0,
    )
    count = WAVES * row.clients
    luck = np.random.default_rng(1)

    def lengths(longest: int) -> np.ndarray:
        shortest = _PUBLIC_SHORTEST if row.public else 1.0
        return np.maximum(2, np.ceil(longest * luck.uniform(shortest, 1.0, count))).astype(np.int32)

    zeros = np.zeros(count, dtype=np.int16)
    requests = Requests(
        arrival_s=np.zeros(count),
        model=zeros,
        klass=zeros,
        input=lengths(row.input_tokens),
        output=lengths(row.output_tokens),
        models=("m",),
    )
    options = SimOptions(
        feed="closed", concurrency=row.clients, feed_delay_s=0.0, constants=constants
    )
    try:
        seen = simulate(plan, problem, catalog, requests, options).requests
    except AtollError:
        return None
    return Times(1e3 * float(np.nanmean(seen.ttft_s)), 1e3 * float(np.nanmean(seen.tpot_s)))
