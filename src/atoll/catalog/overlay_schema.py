"""The shape of an overlay file. One field here is one key a person may write.

gpus:          {NAME: {like: L40S, memory: 48GB, bandwidth: 900GB/s, fp16_tflops: 300}}
               {NAME: {operators: what `atoll perf calibrate` writes}}
interconnects: {NAME: {kind: pcie, allreduce: {2: {alpha_us: 6, bus_bandwidth: 20GB/s, p: 1}}}}
nodes:         {"L40S:2": {interconnect: NAME}}
models:        {NAME: {like: llama-3-70b, max_context: 131072, weights: fp8}}
prices:        [{cloud: mine, region: basement, node: "RTX3090:2", usd_per_hour: $0.35/h}]
links:         {in_region: {bandwidth: 25Gbit/s, latency: 100us}}
servers:       [what `atoll profile --server` and `atoll perf calibrate` write]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, JsonValue, StrictBool, StrictStr, model_validator

from atoll.core.frozen import Frozen
from atoll.core.quantities import Bandwidth, Bytes, Duration, UsdPerHour

Number = Annotated[float, Field(strict=True, gt=0, le=1e15)]
NotNegative = Annotated[float, Field(strict=True, ge=0, le=1e15)]
Whole = Annotated[int, Field(strict=True, gt=0, le=1 << 26)]
WholeOrZero = Annotated[int, Field(strict=True, ge=0, le=1 << 26)]
# A bare number is in base units, so "memory: 24" would be 24 bytes: refuse what no hardware has.
Memory = Annotated[Bytes, Field(ge=1e8, le=1e15)]
CacheBytes = Annotated[Bytes, Field(ge=1e3, le=1e12)]
GpuBandwidth = Annotated[Bandwidth, Field(ge=1e9, le=1e15)]
BusBandwidth = Annotated[Bandwidth, Field(ge=1e6, le=1e15)]
LinkBandwidth = Annotated[Bandwidth, Field(ge=1e3, le=1e15)]
Sharpness = Annotated[float, Field(strict=True, ge=0.1, le=16)]
Latency = Annotated[Duration, Field(le=60.0)]
TimeRatio = Annotated[float, Field(strict=True, ge=0.05, le=20)]
HostSeconds = Annotated[Duration, Field(ge=0, le=10.0)]
RelativeError = Annotated[float, Field(strict=True, ge=0.01, le=2)]
Cost = Annotated[UsdPerHour, Field(le=1e6)]
Trust = Literal["high", "medium", "low"]
_CAPABILITY = re.compile(r"[1-9][0-9]?\.[0-9]|gfx[0-9]{2,3}[0-9a-f]|metal[0-9]?|vulkan")


def _check_capability(text: str) -> str:
    """Return a compute capability that engines can read: of CUDA, of ROCm, of Metal, or Vulkan."""
    if _CAPABILITY.fullmatch(text) is None:
        raise ValueError("a compute capability is a number, gfx... of ROCm, metal3, or vulkan")
    return text


Capability = Annotated[StrictStr, AfterValidator(_check_capability)]
# Not strict: a count that is a key comes back from JSON as text.
CountKey = Annotated[int, Field(gt=0, le=1 << 26)]
PairOf = Annotated[list[StrictStr], Field(min_length=2, max_length=2)]


class Sourced(Frozen):
    """Where the facts of an entry come from."""

    source: StrictStr | None = None
    confidence: Trust | None = None


OperatorClass = Literal[
    "gemm",
    "gemm_fp8",
    "gemm_fp4",
    "attention_prefill",
    "attention_decode",
    "experts",
    "experts_fp8",
    "experts_fp4",
    "experts_int4",
    "elementwise",
]
_SHARE = Field(strict=True, ge=1e-3, le=2.0)
_PAD = Field(strict=True, ge=0.0, le=1e5)


class OperatorEntry(Frozen):
    """Constants of one class of operators on a GPU; `perf.constants.OpConstants` says what each one does.

    Without `tag` they are another GPU's, and as far off as those may be.
    """

    e_f: Annotated[float, _SHARE] = 1.0
    e_b: Annotated[float, _SHARE] = 1.0
    t0_us: Annotated[float, _PAD] = 0.0
    # Higher powers of microseconds leave the range of floats, and 16 is as sharp as a corner.
    p: Sharpness = 1.0
    pad: Annotated[float, _PAD] = 0.0
    pad_k: Annotated[float, _PAD] = 0.0
    pad_n: Annotated[float, _PAD] = 0.0
    serial_ns: Annotated[float, Field(strict=True, ge=0.0, le=1e6)] = 0.0
    hot_bytes: Annotated[float, Field(strict=True, ge=0.0, le=1e10)] = 0.0
    hot_gain: Annotated[float, Field(strict=True, ge=1.0, le=100.0)] = 1.0
    kv8: Annotated[float, Field(strict=True, ge=0.1, le=10.0)] = 1.0
    kv8_t0: Annotated[float, Field(strict=True, ge=0.1, le=10.0)] = 1.0
    sustained: Annotated[float, Field(strict=True, ge=0.1, le=1.0)] = 1.0
    sustained_b: Annotated[float, Field(strict=True, ge=0.1, le=1.0)] = 1.0
    error: Annotated[float, Field(strict=True, ge=0.0, le=2.0)] | None = None
    tag: Literal["measured", "layer-fitted", "proxy"] = "proxy"
    source: StrictStr = ""


class GpuEntry(Sourced):
    """A GPU type: new, like another one, or changes to a known one; examples stand in errors."""

    also_called: ClassVar[Mapping[str, str | None]] = {
        "vram": "memory",
        "ram": "memory",
        "tflops": "fp16_tflops",
        "flops": "fp16_tflops",
        "power": "tdp_w",
        "watts": "tdp_w",
        "cc": "compute_capability",
        "cores": "sms",
        "cache": "l2",
        "price": None,  # not pcie: prices are a section of their own
    }
    like: StrictStr | None = Field(None, examples=["RTX3060"])
    aliases: list[StrictStr] | None = Field(None, examples=["[my-gpu]"])
    architecture: StrictStr | None = Field(None, examples=["Ampere"])
    compute_capability: Capability | None = Field(None, examples=['"8.6"'])
    fp16_tflops: Number | None = Field(None, examples=["25.5"])
    fp8_tflops: Number | None = Field(None, examples=["60.4"])
    fp4_tflops: Number | None = Field(None, examples=["120.8"])
    bf16: StrictBool | None = Field(None, examples=["true"])
    memory: Memory | None = Field(None, examples=["12GB"])
    bandwidth: GpuBandwidth | None = Field(None, examples=["360GB/s"])
    tdp_w: Number | None = Field(None, examples=["170"])
    sms: Whole | None = Field(None, examples=["28"])
    l2: CacheBytes | None = Field(None, examples=["3MiB"])
    nvlink: GpuBandwidth | None = Field(None, examples=["56GB/s"])
    pcie: GpuBandwidth | None = Field(None, examples=["32GB/s"])
    operators: dict[OperatorClass, OperatorEntry] | None = None


class AllReduceEntry(Sourced):
    """The cost of an all-reduce among so many GPUs; `p` says how sharply its two limits meet."""

    alpha_us: NotNegative
    bus_bandwidth: BusBandwidth
    p: Sharpness | None = None


class InterconnectEntry(Sourced):
    """Interconnect between the GPUs of a node."""

    like: StrictStr | None = None
    kind: Literal["nvlink", "xgmi", "pcie", "none"] | None = None
    generation: Whole | None = None
    allreduce: dict[CountKey, AllReduceEntry] | None = None
    p2p_bandwidth: BusBandwidth | None = None
    p2p_latency: Latency | None = None


class NodeEntry(Frozen):
    """A node type and the interconnect it uses."""

    interconnect: StrictStr


class MoeEntry(Frozen):
    """Experts of a model."""

    experts: Whole | None = None
    top_k: Whole | None = None
    intermediate: Whole | None = None
    shared_intermediate: WholeOrZero | None = None
    dense_layers: list[WholeOrZero] | None = None
    router_bias: StrictBool | None = None
    shared_gate: StrictBool | None = None


class SlidingEntry(Frozen):
    """Layers `offset`, `offset + every`, ... attend to the last `size` tokens only."""

    size: Whole
    every: Whole = 1
    offset: WholeOrZero = 0


class CheckpointEntry(Frozen):
    """Weights in another precision: a repository alone, or with its revision and how it is stored."""

    repository: StrictStr
    revision: StrictStr | None = None
    method: StrictStr | None = None
    group: Whole | None = None
    kept: list[StrictStr] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, given: object) -> object:
        return {"repository": given} if isinstance(given, str) else given


class ModelEntry(Sourced):
    """A model: from a config.json, like another, changes to a known one, or all shapes.

    `hf_config` is the path of a config.json, of the folder it lies in, or its content.
    """

    like: StrictStr | None = None
    hf_config: StrictStr | dict[StrictStr, JsonValue] | None = None
    aliases: list[StrictStr] | None = None
    hf_id: StrictStr | None = None
    revision: StrictStr | None = None
    checkpoints: dict[StrictStr, CheckpointEntry] | None = None
    tool_parser: StrictStr | None = None
    reasoning_parser: StrictStr | None = None
    architecture: StrictStr | None = None
    note: StrictStr | None = None
    weights: StrictStr | None = None
    kv_dtype: StrictStr | None = None
    layers: Whole | None = None
    hidden: Whole | None = None
    heads: Whole | None = None
    kv_heads: Whole | None = None
    head_dim: Whole | None = None
    intermediate: Whole | None = None
    vocab: Whole | None = None
    max_context: Whole | None = None
    tied_embeddings: StrictBool | None = None
    windows: list[Whole | None] | None = None
    sliding: SlidingEntry | None = None
    qkv_bias: StrictBool | None = None
    o_bias: StrictBool | None = None
    mlp_bias: StrictBool | None = None
    qk_norm: StrictBool | None = None
    qk_norm_full: StrictBool | None = None
    norms_per_layer: Whole | None = None
    norm_bias: StrictBool | None = None
    gated_mlp: StrictBool | None = None
    sinks: StrictBool | None = None
    head_bias: StrictBool | None = None
    attention_gate: StrictBool | None = None
    moe: MoeEntry | None = None
    attention_dtype: StrictStr | None = None
    mlp_dtype: StrictStr | None = None
    expert_dtype: StrictStr | None = None
    embedding_dtype: StrictStr | None = None
    activation_dtype: StrictStr | None = None


class PriceEntry(Frozen):
    """A machine and what it costs; `usd_per_hour: 0` is one you own."""

    cloud: StrictStr
    region: StrictStr
    node: StrictStr
    instance: StrictStr | None = None
    usd_per_hour: Cost | None = None
    spot: Cost | None = None
    zones: Whole | None = None
    offered: StrictBool = True
    snapshot: StrictStr | None = None
    vcpus: Number | None = None
    memory_gib: Number | None = None
    note: StrictStr | None = None


class LinkEntry(Frozen):
    """Bandwidth and one-way latency of a link."""

    bandwidth: LinkBandwidth | None = None
    latency: Latency | None = None


class PairEntry(LinkEntry):
    """A link between two regions or two nodes, both ways unless `one_way`."""

    between: PairOf
    one_way: StrictBool = False


class GroupsEntry(Frozen):
    """Groups of GPUs inside a machine (NVLink islands, NUMA nodes), and the link from one to another."""

    gpus: Whole
    bandwidth: BusBandwidth = Field(examples=["25GB/s"])
    latency: Latency = Field(examples=["10us"])


class LinksEntry(Frozen):
    """Links of a fleet."""

    in_region: LinkEntry | None = None
    between_regions: LinkEntry | None = None
    regions: list[PairEntry] | None = None
    nodes: list[PairEntry] | None = None
    nics: dict[StrictStr, LinkBandwidth] | None = None
    groups: dict[StrictStr, GroupsEntry] | None = None


class ServerEntry(Frozen):
    """A server that was measured from outside: times over those predicted, and what the host takes."""

    model: StrictStr
    node: StrictStr = Field(examples=["H200:1"])
    engine: StrictStr = Field(examples=["vllm@0.22"])
    date: Annotated[StrictStr, Field(pattern=r"^\d{4}-\d{2}-\d{2}$", examples=['"2026-11-18"'])]
    compute: TimeRatio = 1.0
    memory: TimeRatio = 1.0
    launch: TimeRatio = 1.0
    step: HostSeconds
    sequence: HostSeconds
    request: HostSeconds
    tokenize: HostSeconds
    stream: HostSeconds
    error: RelativeError
    first_token_error: RelativeError


class Overlay(Frozen):
    """A whole overlay file."""

    gpus: dict[StrictStr, GpuEntry] | None = None
    interconnects: dict[StrictStr, InterconnectEntry] | None = None
    nodes: dict[StrictStr, NodeEntry] | None = None
    models: dict[StrictStr, ModelEntry] | None = None
    prices: list[PriceEntry] | None = None
    links: LinksEntry | None = None
    servers: list[ServerEntry] | None = None
