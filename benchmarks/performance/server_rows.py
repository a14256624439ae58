"""Measured servers of others: what clients in a closed loop saw, and what the simulator says of the same.

Rows are those of `silicon_sample.csv` in aiconfigurator-core (extra `aic`; Apache-2.0): servers of vLLM,
SGLang and TensorRT-LLM on H100, H200, B200, B300 and GB200 that public benchmarks and NVIDIA measured in 2025
and 2026. No constant is fitted on them. Left out are rows that are no one server of one tensor-parallel group
(phases apart, attention in copies, experts spread over GPUs), models that the catalog does not have, and
images that are known to guess tokens ahead (`GUESSING`).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from atoll.catalog import Catalog
from atoll.core.errors import AtollError, MissingDependencyError
from atoll.engines.limits import EngineLimits
from atoll.plan.plan import Flow, Instance, Node, Plan, Route
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.sim.api import simulate
from atoll.sim.sim_options import SimOptions
from atoll.workload.lengths import LengthMix
from atoll.workload.requests import Requests

if TYPE_CHECKING:
    from atoll.perf.constants import ConstantTable

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
WAVES = 10
"""Requests per client, as the public benchmark has them: the first come all at once."""
MAX_GPUS = 8
_PUBLIC_BUDGET, _OTHER_BUDGET = 8192, 2048
"""Prompt tokens of a step. The public benchmark states it, and it is SGLang's own on these GPUs; of others
nobody says it, and this value agrees with their first tokens."""
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

    @property
    def dense(self) -> bool:
        """Whether the model has no experts."""
        return self.model.startswith("llama") or self.model == "qwen3-32b"

    @property
    def name(self) -> str:
        """The model in the catalog, with its number formats."""
        own = {"gpt-oss-120b": "nvfp4", "deepseek-v3": "fp8"}.get(self.model, "bf16")
        changed = [] if self.dtype == own else [self.dtype]
        if self.public and self.model.startswith("llama") and self.dtype != "bf16":
            changed.append("kv=fp8")
        return f"{self.model}@{','.join(changed)}" if changed else self.model

    @property
    def server(self) -> tuple[str, ...]:
        """What makes it one server: the rows of one differ in load alone."""
        return (self.model, self.dtype, self.gpu, str(self.tp), self.engine, self.version)

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


def read_rows(path: Path | None = None) -> list[ServerRow]:
    """Return the rows that can be simulated, in the order of the file."""
    if path is None:
        if find_spec("aiconfigurator_core") is None:
            raise MissingDependencyError("aiconfigurator_core", "aic")
        path = Path(str(files("aiconfigurator_core") / "systems" / "silicon_sample.csv"))
    with path.open(encoding="utf-8") as stream:
        return [row for entry in csv.DictReader(stream) for row in _read(entry)]


def _read(entry: dict[str, str]) -> Iterator[ServerRow]:
    def number(key: str) -> int:
        return int(float(entry[key] or 1))

    version = entry["backend_version"]
    groups = (max(1, number("attention_dp_size")), max(1, number("moe_ep_size")))
    if entry["mode"] != "agg" or groups != (1, 1) or number("tp_size") > MAX_GPUS:
        return
    if entry["model_path"] not in MODELS or entry["system"] not in GPUS or version in GUESSING:
        return
    source = entry["silicon_data_source"]
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
    )


def simulate_row(
    row: ServerRow, catalog: Catalog, constants: ConstantTable | None = None
) -> Times | None:
    """Return what the simulator says that the clients of a server see; None: it does not fit there."""
    known = re.match(r"\d+\.\d+(\.\d+)?", row.version)
    whole = row.public or row.engine == "sglang"
    budget = _PUBLIC_BUDGET if whole else _OTHER_BUDGET
    limits = EngineLimits(
        max_num_batched_tokens=max(budget, row.clients),
        max_num_seqs=max(1024, row.clients),
        version=known[0] if known else None,
    )
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
    kind = f"{row.gpu}:{row.tp}"
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
