"""The shape of a fleet file. One field here is one key a person may write.

services: {NAME: {model: qwen3-32b, ttft: 1600ms, tpot: 100ms, rate: 10/s, lengths: azure-conv}}
          {NAME: {models: [{model: llama-3.1-8b, error: 6%}, {model: qwen3-32b, error: 2%}], max_error: 4%}}
          {NAME: {model: qwen2.5-omni-7b, rate: 2/s, classes: {image+text: {share: 100%, images: {}}}}}
pool:     {cloud: {regions: [aws/us-east-2], gpus: [L40S, L4]}, owned: {basement: {"RTX3090:2": 4}}}
cluster:  {nodes: {zurich: {"L4:1": 4, "T4:1": [t4-a]}}, links: [{between: ["*", "*"], bandwidth: 10Gbit/s}]}
limits:   {budget: $100/h, spot_share: 50%, spread: 2}
risk:     {demand: 20%, spot_loss: 5%}
settings: {max_nodes_per_instance: 6, engine: vllm, engine_limits: {max_num_seqs: 256}}
share_instances: true
objective: {cost: 1, carbon: $100/t}
grid:     {aws/us-east-2: 400 g/kWh, default: 300 g/kWh, pue: 1.2}
catalog:  facts.yaml
running:  plan.json

The same classes build a fleet in Python (`Fleet.of`), where numbers are in base units: seconds, requests/s,
USD/h, bytes. `FleetDocument` is a file read against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StrictBool,
    StrictStr,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from atoll.catalog.catalog import MAX_SHARES
from atoll.catalog.document import SchemaDocument
from atoll.core.errors import InputError
from atoll.core.files import YamlFile
from atoll.core.frozen import Frozen
from atoll.core.quantities import Duration, Rate
from atoll.engines.limits import MAX_GUESSES, GuessMethod, Scheduling
from atoll.perf.components.measured import MAX_BATCHES, Unit
from atoll.plan.cluster import KV_FILL, NodeProfile
from atoll.plan.files.choice_schema import GridSpec, ObjectiveField, VariantSpec
from atoll.plan.files.class_schema import ClassesField
from atoll.plan.files.schema_fields import (
    Above,
    Count,
    FirstToken,
    Latency,
    Money,
    NextToken,
    Number,
    Price,
    Requests,
    Share,
    Speed,
    Tokens,
    text_or_mapping,
)
from atoll.plan.plan import Market
from atoll.plan.problem import ATTAINMENT, Phases, Router, Shortage
from atoll.plan.robustness import DEMAND_CORRELATION, DEMAND_SD, SPOT_PRICE_SD
from atoll.plan.survival import MAX_LOST
from atoll.workload.lengths import PREFIX_BLOCK


def _number_or_mapping(value: object) -> str:
    return "mapping" if isinstance(value, dict | Frozen) else "number"


def _number_names_or_mapping(value: object) -> str:
    return "names" if isinstance(value, list) else _number_or_mapping(value)


class LengthsSpec(Frozen):
    """Lengths of prompts and answers in tokens."""

    input: Tokens = Field(description="Mean prompt length, in tokens.")
    output: Tokens = Field(description="Mean answer length, in tokens.")
    input_cv: Number = Field(
        default=0.0, description="Standard deviation of the prompt length over its mean."
    )
    output_cv: Number = Field(
        default=0.0, description="Standard deviation of the answer length over its mean."
    )
    input_tail: Tokens | None = Field(
        default=None, description="Longest prompt that must keep the promise on its own, in tokens."
    )


def _lengths(value: object) -> object:
    """Refuse what is neither text nor a mapping; YAML reads 0x128 as a number."""
    if isinstance(value, str | dict | LengthsSpec):
        return value
    raise PydanticCustomError(
        "quantity",
        "{message}",
        {
            "message": f"cannot read {value!r} as lengths",
            "hint": "write it like 1024x256, azure-conv, or {input: 1024, output: 256}",
        },
    )


LengthsField = Annotated[
    Annotated[StrictStr, Tag("text")] | Annotated[LengthsSpec, Tag("mapping")],
    Discriminator(text_or_mapping),
    BeforeValidator(_lengths),
]


class HostTimeSpec(Frozen):
    """Host time of a step, as `atoll profile` measures it on the machine."""

    step: Annotated[Duration, Field(le=10)] = Field(
        default=0.0, description="For every step, such as 0.4ms."
    )
    sequence: Annotated[Duration, Field(le=10)] = Field(
        default=0.0, description="For every sequence in it, such as 2us."
    )


class SpeculativeSpec(Frozen):
    """Speculative decoding: who guesses tokens, how many, and how many of them are right."""

    method: GuessMethod = Field(
        description="Who guesses: ngram (the prompt itself), eagle or eagle3 (a head of one layer), mtp "
        "(the model's own head) or draft_model (a small model).",
    )
    num_speculative_tokens: Annotated[int, Field(strict=True, ge=1, le=MAX_GUESSES)] = Field(
        description="Tokens guessed ahead in each step."
    )
    acceptance: Annotated[
        Annotated[Share, Tag("number")] | Annotated[list[Share], Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list) else "number"),
    ] = Field(
        description="Share of steps in which the first so many guesses were right, one for each position, as "
        "vLLM logs it (Per-position acceptance rate); or one number, with which each guess is right if those "
        "before it were."
    )
    model: Annotated[StrictStr, Field(min_length=1, max_length=200)] | None = Field(
        default=None,
        description="Of eagle and eagle3 the weights of the head, as hf://ORG/NAME; of draft_model a "
        "model of the catalog.",
    )


class EngineSpec(Frozen):
    """How engines are started; what is left out is as the engine has it on the GPU in question."""

    max_num_seqs: Annotated[int, Field(strict=True, ge=1, le=65536)] | None = Field(
        default=None,
        description="Most sequences in a step. vLLM's own: 1024 on GPUs of 70 GiB and up, 256 below and "
        "on an A100.",
    )
    max_num_batched_tokens: Annotated[int, Field(strict=True, ge=16, le=1 << 20)] | None = Field(
        default=None,
        description="Most tokens in a step. Left out, 2048 where prompts and decoding share steps, which "
        "engines are then started with.",
    )
    gpu_memory_utilization: Annotated[Share, Field(ge=0.05)] | None = Field(
        default=None, description="Share of GPU memory that the engine takes; vLLM's own: 0.9."
    )
    max_model_len: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        default=None,
        description="Most tokens of a request, prompt and answer; longer ones are refused. Left out, what "
        "99.9 % of requests do not exceed.",
    )
    kv_cache_dtype: StrictStr | None = Field(
        default=None,
        description="Number format of the KV cache, such as fp8; the model's own if left out or auto.",
    )
    prefix_caching: StrictBool | None = Field(
        default=None, description="Whether prompts reuse KV cache of equal beginnings."
    )
    scheduling: Scheduling | None = Field(
        default=None,
        description="Whether the next step is prepared while the GPU works (async), or after it (sync).",
    )
    prompt_interval: Annotated[int, Field(strict=True, ge=1, le=1000)] | None = Field(
        default=None,
        description="Steps of decoding after which new prompts are looked at: SGLang only, others look in "
        "every step; 1 if left out.",
    )
    mixed_chunk: StrictBool | None = Field(
        default=None,
        description="Whether SGLang computes prompts beside answers, in chunks, and not before them; no if "
        "left out. Others do so anyway.",
    )
    mxfp8: StrictBool | None = Field(
        default=None,
        description="Whether vLLM computes experts in MXFP4 with activations in MXFP8 on GPUs that can "
        "(Blackwell): faster, a little less exact; no if left out.",
    )
    load_format: Annotated[StrictStr, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")] | None = Field(
        default=None,
        description="Loader of weights, as the engine calls it: safetensors, runai_streamer, dummy, ...; the "
        "engine's own choice if left out.",
    )
    version: Annotated[StrictStr, Field(pattern=r"^[0-9]{1,4}(\.[0-9]{1,4}){0,2}$")] | None = Field(
        default=None,
        description="Version of the engine, in quotes, which says how it schedules unless told; a recent "
        "one if left out.",
    )
    speculative: SpeculativeSpec | None = Field(
        default=None,
        description="Speculative decoding, in the words of vLLM's --speculative-config, with the share of "
        "guesses that are right; vLLM and SGLang on one node. None if left out.",
    )
    expert_parallel: StrictBool | None = Field(
        default=None,
        description="Whether the experts of a model are spread over all GPUs of a node, and copies of the "
        "other layers share them (vLLM's --enable-expert-parallel, SGLang's --ep-size and "
        "--enable-dp-attention).",
    )
    host: HostTimeSpec | None = Field(
        default=None,
        description="Host time of a step as measured; the engine's assumed if left out.",
    )


class PrefixSpec(Frozen):
    """Beginning that prompts of a service have in common, which engines compute once and keep."""

    share: Annotated[Share, Field(gt=0)] = Field(
        description="Share of the requests whose prompts begin so."
    )
    tokens: Annotated[int, Field(strict=True, ge=PREFIX_BLOCK)] = Field(
        description="Its length in tokens, of the prompt's length; whole blocks of 16 are found."
    )


class ReserveSpec(Frozen):
    """What is to spare for bursts while a fleet is operated."""

    share: Share | None = Field(
        default=None, description="At least this share more than is asked now is planned for."
    )
    quantile: Annotated[Share, Field(gt=0, lt=1)] | None = Field(
        default=None, description="The quantile of the forecast that is planned for."
    )


_ReserveField = Annotated[
    Annotated[Share, Tag("number")] | Annotated[ReserveSpec, Tag("mapping")],
    Discriminator(_number_or_mapping),
]


BatchSeconds = dict[
    Annotated[int, Field(ge=1, le=1_000_000)], Annotated[Duration, Field(gt=0, le=3600)]
]
RateField = Annotated[
    Annotated[Requests, Tag("number")]
    | Annotated[BatchSeconds, Field(min_length=1, max_length=MAX_BATCHES), Tag("mapping")],
    Discriminator(_number_or_mapping),
]


class ServiceSpec(Frozen):
    """A model to serve, what is promised and how much is asked of it."""

    model: StrictStr | None = Field(
        default=None,
        description="A model of the catalog, in another precision as MODEL@fp8; the key if left out.",
    )
    models: list[VariantSpec] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Instead of `model`: all models that may answer, each with its error; a plan says which "
        "share of the requests each of them answers.",
    )
    max_error: Share | None = Field(
        default=None,
        description="Largest share of wrong answers over all requests, such as 4%; with `models` only.",
    )
    sticky: StrictBool = Field(
        default=False,
        description="Whether all requests of a conversation are answered by one model; with `models` only.",
    )
    ttft: FirstToken | None = Field(
        default=None,
        description="Promised time to the first token, such as 1600ms. Needed without classes; with "
        "them it is the promise of those that say none and want text, and none if left out.",
    )
    tpot: NextToken | None = Field(
        default=None,
        description="Promised time per further token, such as 100ms. Needed without classes, like "
        "the first.",
    )
    rate: Requests = Field(description="Requests that arrive, such as 10/s or 600/min.")
    lengths: LengthsField | None = Field(
        default=None,
        description="How long prompts and answers are: a mix (azure-code, azure-conv, long-context, "
        "reasoning), PROMPTxANSWER such as 1024x256, or a mapping of moments. Needed without classes.",
    )
    classes: ClassesField | None = Field(
        default=None,
        description="What requests bring and want, where that is more than text: a mapping from "
        "class (text, image+text, image+audio -> audio) to its share and sizes, multimodal, or a trace file.",
    )
    paths: list[list[StrictStr]] | None = Field(
        default=None,
        min_length=1,
        description="The only ways that requests may go, each a list of executors, as in [vision, llm] and "
        "[vision+llm]; all that make sense if left out.",
    )
    rates: dict[StrictStr, dict[StrictStr, dict[Unit, RateField]]] = Field(
        default={},
        description="Parts that were measured: part -> GPU or node type -> unit (request, image, frame, "
        "audio_s, speech_s, token) -> how many, as in vocoder: {A100-80: {speech_s: 12/s}}, or the seconds "
        "of batches, as in vision: {L4: {image: {1: 80ms, 8: 350ms}}}. They go before what the performance "
        "model says. Of several parts, as in vision+llm: {L4: {request: 2/s}}, requests/s of a whole "
        "executor at the mix of classes: all parts take as much longer there as that says.",
    )
    share: StrictBool | dict[StrictStr, StrictStr] = Field(
        default=True,
        description="Whether its components share executors with those of other services of the same model. "
        "A mapping names components: those that have one name share, whatever model they are of, as in "
        "{vision: eyes}, and the others as without it.",
    )
    cores: dict[StrictStr, Annotated[Number, Field(le=10_000)]] = Field(
        default={},
        description="CPU cores that each of its components needs on its host, as in {vision: 4, llm: 2}; "
        "none if left out. A slice of a machine has its share of the machine's cores.",
    )
    phases: Phases = Field(
        default="auto",
        description="Whether prefill and decode run on different instances (apart), on the same "
        "(together), or some of each, whichever is cheapest (auto).",
    )
    prefix: PrefixSpec | None = Field(
        default=None,
        description="Beginning that prompts have in common, such as a system prompt: "
        "{share: 60%, tokens: 1000}. None if left out.",
    )
    headroom: Annotated[float, Field(strict=True, ge=1, le=100)] = Field(
        default=1.0, description="Plan for this many times the demand."
    )
    reserve: _ReserveField | None = Field(
        default=None,
        description="What `atoll operate` has to spare for bursts: a share of what is asked then, such as "
        "10%, or {quantile: 95%} of its forecast; the 80% quantile of the forecast if left out.",
    )
    attainment: Annotated[Share, Field(gt=0, lt=1)] = Field(
        default=ATTAINMENT,
        description="Share of requests that must keep both promises, such as 95%; of every class, unless it "
        "says another.",
    )
    length_deciles: StrictBool = Field(
        default=False,
        description="Whether promises hold for each tenth of the requests by length of prompt, too; where "
        "all classes are text under one promise.",
    )
    burstiness: Annotated[float, Field(strict=True, ge=0.1, le=20)] = Field(
        default=1.0,
        description="How unevenly requests arrive: the standard deviation of the gaps between them over "
        "their mean; 1 is random (Poisson).",
    )
    priority: Annotated[float, Field(strict=True, gt=0, le=1e6)] = Field(
        default=1.0, description="Weight of this service when not all demand can be met."
    )
    only: list[StrictStr] = Field(
        default=[], description="Stand on these GPU types (L40S) or node types (L40S:2) only."
    )
    avoid: list[StrictStr] = Field(
        default=[], description="Never stand on these GPU types or node types."
    )
    engine: EngineSpec = Field(
        default=EngineSpec(),
        description="How its engines are started; counts before `settings.engine_limits`.",
    )


Availability = Annotated[
    Annotated[Count, Tag("number")] | Annotated[dict[StrictStr, Count], Tag("mapping")],
    Discriminator(_number_or_mapping),
]


class CloudSpec(Frozen):
    """Nodes to rent, with prices from the catalog: the cheapest machine of each node type."""

    regions: list[StrictStr] = Field(
        min_length=1, description="Where to rent: cloud/region, such as aws/us-east-2."
    )
    gpus: list[StrictStr] | None = Field(
        default=None, description="GPU types, in every size sold; all if neither is given."
    )
    node_types: list[StrictStr] | None = Field(
        default=None, description="Node types, such as L40S:2, beside those of `gpus`."
    )
    on_demand: StrictBool = Field(default=True, description="Rent at the on-demand price.")
    spot: StrictBool = Field(default=False, description="Rent at the median spot price.")
    imputed: StrictBool = Field(
        default=False,
        description="Also sizes that nobody sells, at the pro-rata price of the nearest that is sold.",
    )
    available: Availability = Field(
        default=32,
        description="Nodes of each type in each region: a number, or a mapping from node type, GPU "
        "type or 'default' to numbers; the most specific counts.",
    )
    spot_available: Availability | None = Field(
        default=None, description="The same for spot; as `available` if left out."
    )
    whole: StrictBool = Field(
        default=False, description="Never cut a machine into slices for several instances."
    )


SharesField = Annotated[int, Field(strict=True, ge=1, le=MAX_SHARES)]


class OwnedSpec(Frozen):
    """Machines of one's own: how many, and what one costs an hour if that should count."""

    count: Count = Field(description="How many there are.")
    usd_per_hour: Price = Field(default=0.0, description="What one costs, power and all.")
    whole: StrictBool = Field(
        default=False, description="Never cut a machine into slices for several instances."
    )
    cores: Annotated[Number, Field(gt=0, le=100_000)] | None = Field(
        default=None,
        description="CPU cores of one machine, as its operating system counts them; those that the catalog "
        "knows of it if left out. Asked for where a service says what its components need.",
    )
    shares: SharesField = Field(
        default=1,
        description="In how many equal shares each of its GPUs is offered, 2 to 8: so many processes take "
        "turns on a GPU, each with its part of the memory. 1: GPUs are had whole.",
    )


OwnedField = Annotated[
    Annotated[Count, Tag("number")] | Annotated[OwnedSpec, Tag("mapping")],
    Discriminator(_number_or_mapping),
]


class OfferSpec(Frozen):
    """One line of the pool, written out; it replaces what `cloud` says of the same nodes."""

    region: StrictStr = Field(description="Where they are.")
    node_type: StrictStr = Field(description="GPU:COUNT, such as L40S:2.")
    market: Market = Field(default="on-demand", description="How they are had.")
    available: Count = Field(description="How many can be had, with those in use.")
    usd_per_hour: Price = Field(description="What one costs, such as $1.86/h.")
    instance: StrictStr | None = Field(default=None, description="What the seller calls it.")
    whole: StrictBool = Field(
        default=False, description="Never cut a machine into slices for several instances."
    )
    cores: Annotated[Number, Field(gt=0, le=100_000)] | None = Field(
        default=None,
        description="CPU cores of one machine, as its operating system counts them; those that the catalog "
        "knows of it if left out. Asked for where a service says what its components need.",
    )
    shares: SharesField = Field(
        default=1,
        description="In how many equal shares each of its GPUs is offered, 2 to 8: so many processes take "
        "turns on a GPU, each with its part of the memory. 1: GPUs are had whole.",
    )


class PoolSpec(Frozen):
    """The nodes that can be had."""

    cloud: CloudSpec | None = Field(default=None, description="Nodes to rent.")
    owned: dict[StrictStr, dict[StrictStr, OwnedField]] | None = Field(
        default=None, description="Nodes of one's own: region -> node type -> how many."
    )
    offers: list[OfferSpec] | None = Field(default=None, description="Nodes one by one.")


class MachinesSpec(Frozen):
    """Machines of one type at one site: how many or which, and what one costs if that should count."""

    count: Above | None = Field(default=None, description="How many; they are named by number.")
    names: list[StrictStr] | None = Field(
        default=None, min_length=1, description="What each of them is called."
    )
    usd_per_hour: Price = Field(default=0.0, description="What one costs, power and all.")
    whole: StrictBool = Field(
        default=False, description="Never cut a machine into slices for several instances."
    )


MachinesField = Annotated[
    Annotated[Above, Tag("number")]
    | Annotated[list[StrictStr], Field(min_length=1), Tag("names")]
    | Annotated[MachinesSpec, Tag("mapping")],
    Discriminator(_number_names_or_mapping),
]


class LinkSpec(Frozen):
    """Link between two ends; of several rules for a pair the most specific counts, then the last."""

    between: Annotated[list[StrictStr], Field(min_length=2, max_length=2)] = Field(
        description="Two ends: a machine, a site, source, sink, or * for anything."
    )
    bandwidth: Speed = Field(description="What it carries, such as 10Gbit/s.")
    latency: Latency = Field(default=0.0, description="Until the first byte arrives, as 1ms.")
    one_way: StrictBool = Field(default=False, description="From the first end to the second only.")


ProfilesByModel = dict[StrictStr, dict[StrictStr, NodeProfile]]


class ProfilesFile(Frozen):
    """Measured profiles: service or model -> node type -> profile."""

    profiles: ProfilesByModel


class ClusterSpec(Frozen):
    """The machines that are there, and no others, with the network between them."""

    nodes: dict[StrictStr, dict[StrictStr, MachinesField]] = Field(
        min_length=1,
        description="Site -> node type -> how many machines, or a list of their names.",
    )
    links: list[LinkSpec] = Field(
        min_length=1, description="The network; where no rule speaks of a pair there is no link."
    )
    profiles: (
        Annotated[
            Annotated[StrictStr, Tag("text")] | Annotated[ProfilesByModel, Tag("mapping")],
            Discriminator(text_or_mapping),
        ]
        | None
    ) = Field(
        default=None,
        description="How fast the machines were measured to be: a file, or its content. Otherwise the "
        "performance model says.",
    )
    kv_fill: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        default=KV_FILL, description="Share of the KV cache to fill before requests wait."
    )


_Lost = Annotated[int, Field(strict=True, ge=0, le=MAX_LOST)]


class SurviveSpec(Frozen):
    """What may be lost at once with promises kept."""

    machines: _Lost = Field(
        default=0, description="Machines, any of them, each with all that stands on it."
    )
    zones: _Lost = Field(
        default=0, description="Places on offer (`region` of an offer), any of them."
    )
    regions: _Lost = Field(
        default=0, description='Regions, any of them: what comes before the last "/" of a place.'
    )
    keep: Annotated[Share, Field(gt=0)] = Field(
        default=1.0, description="Share of the demand that is still served then, such as 80%."
    )
    services: list[StrictStr] = Field(
        default_factory=list, description="Services that must be kept; all if left out."
    )

    @model_validator(mode="after")
    def _names_a_loss(self) -> Self:
        if not self.machines + self.zones + self.regions:
            message = {
                "message": "no loss is named",
                "hint": "write machines: 1, zones: 1 or regions: 1",
            }
            raise PydanticCustomError("quantity", "{message}", message)
        return self


class LimitsSpec(Frozen):
    """Limits of a plan."""

    budget: Money | None = Field(default=None, description="Most to pay for nodes, as $100/h.")
    spot_share: Share | None = Field(
        default=None,
        description="Largest share of a service's requests that may be served on spot, as 50%.",
    )
    max_nodes: Count | None = Field(default=None, description="Most nodes to use.")
    spread: Above = Field(default=1, description="Regions every role must stand in, at least.")
    survive: Annotated[
        Annotated[_Lost, Tag("number")] | Annotated[SurviveSpec, Tag("mapping")],
        Discriminator(_number_or_mapping),
    ] = Field(
        default=0,
        description="What may be lost with promises kept: so many machines, any of them, or a mapping.",
    )
    spot_loss: Rate = Field(
        default=0.0,
        description="How often a spot node is lost, such as 0.05/h; it comes back minutes later.",
    )
    spot_notice: Duration = Field(
        default=0.0,
        description="How long before it is lost that is announced, such as 30s; not at all if left out.",
    )


_DemandField = Annotated[
    Annotated[Share, Tag("number")] | Annotated[dict[StrictStr, Share], Tag("mapping")],
    Discriminator(_number_or_mapping),
]


class RiskSpec(Frozen):
    """How far things may turn out otherwise, for `atoll plan --robust`."""

    demand: _DemandField = Field(
        default=DEMAND_SD,
        description="Standard deviation of demand, relative, such as 20%: one for all services, or a mapping "
        "from service or 'default'.",
    )
    demand_correlation: Share = Field(
        default=DEMAND_CORRELATION,
        description="How much demands of services rise and fall together: 0 to 1.",
    )
    spot_price: Share = Field(
        default=SPOT_PRICE_SD, description="Standard deviation of spot prices, relative."
    )
    spot_loss: Share | None = Field(
        default=None,
        description="Chance that all spot machines of a type in a region are lost in an hour; as "
        "`limits.spot_loss` has it, else 5%, if left out.",
    )
    performance: StrictBool = Field(
        default=True,
        description="Whether times are off as far as the performance model's constants may be.",
    )


class SettingsSpec(Frozen):
    """How to search for a plan."""

    max_nodes_per_instance: Annotated[int, Field(strict=True, ge=1, le=8)] = Field(
        default=6, description="Most nodes that carry one copy of a model."
    )
    memory_ratio: Annotated[float, Field(strict=True, gt=0, le=1e6)] = Field(
        default=12.0,
        description="Most GPU memory of one copy, in multiples of the model's weights.",
    )
    max_stages: Above | None = Field(
        default=None, description="Most pipeline stages of one copy; as many as nodes if left out."
    )
    init_penalty: Number = Field(
        default=0.0,
        description="Time to start an instance over the time between two plans; makes plans keep "
        "what runs.",
    )
    engine: StrictStr = Field(
        default="vllm",
        description="The one engine that runs all instances: vllm, sglang, atoll, ...; none: kernels "
        "alone, in any layout.",
    )
    engines: tuple[StrictStr, ...] | None = Field(
        default=None,
        description="Engines that may run instances, the preferred first; all that can be started if "
        "left out. [free]: any layout, also one that no engine runs.",
    )
    engine_limits: EngineSpec = Field(
        default=EngineSpec(), description="How the engines of all services are started."
    )
    seed: Count = Field(default=0, description="Seed of whatever is random in a solver.")
    on_shortage: Shortage = Field(
        default="fraction",
        description="When demand cannot be met: fail, serve the same fraction of every service, or "
        "weigh services by priority.",
    )
    simplicity: Annotated[float, Field(strict=True, ge=0, le=1)] = Field(
        default=0.02,
        description="The share by which a plan may cost more than the cheapest to have fewer machines, hops, "
        "slices, shapes and phases apart; and the share of their time by which a machine more that costs "
        "nothing, or on a fixed cluster a machine, hop or slice more, must shorten requests to be used. "
        "0: the cheapest plan, all machines of a cluster.",
    )
    router: Router | None = Field(
        default=None,
        description="On a fixed cluster, what chooses pipelines in the runtime: atoll (looks ahead) or plain "
        "(round robin over the plan's flows). Left out, placements are ranked by the worse of the two, or by "
        "Atoll's with engine: atoll.",
    )
    startup: Duration | None = Field(
        default=None,
        description="Time from ordering an instance to its first request; what its engine was measured to "
        "take, and reading weights, if left out.",
    )


FactsField = Annotated[
    Annotated[StrictStr, Tag("text")] | Annotated[dict[StrictStr, object], Tag("mapping")],
    Discriminator(text_or_mapping),
]


class FleetSpec(Frozen):
    """Which models to serve, what is promised, and which nodes can be had."""

    name: StrictStr | None = Field(
        default=None, description="What to call the plan; the file's name if left out."
    )
    services: dict[StrictStr, ServiceSpec] = Field(
        min_length=1,
        description="The models to serve, each under a name of its own. `models` is the older name of this "
        "key.",
    )
    pool: PoolSpec | None = Field(default=None, description="The nodes that can be had.")
    cluster: ClusterSpec | None = Field(
        default=None, description="Instead of a pool: a fixed cluster and its network."
    )
    share_instances: StrictBool = Field(
        default=False,
        description="Whether services of one model with like settings may stand on the same instances.",
    )
    objective: ObjectiveField = Field(
        default="cost",
        description="What a plan makes small: cost, energy, carbon, or prices of each.",
    )
    grid: GridSpec = Field(
        default=GridSpec(),
        description="What electricity costs the climate: region -> g CO2 per kWh, `default` for the others, "
        "and `pue`.",
    )
    limits: LimitsSpec = Field(default=LimitsSpec(), description="What a plan may not exceed.")
    settings: SettingsSpec = Field(default=SettingsSpec(), description="How to search for a plan.")
    risk: RiskSpec | None = Field(
        default=None,
        description="How far things may turn out otherwise, for plans that ask (--robust).",
    )
    catalog: FactsField | None = Field(
        default=None, description="Facts to add or change: an overlay file, or its content."
    )
    running: StrictStr | None = Field(
        default=None, description="The plan that runs now, a plan.json; what can stay is kept."
    )


_OLDER_SERVICES = "models"
"""Name of `services` in fleet files before version 0.2."""


class FleetDocument(SchemaDocument[FleetSpec]):
    """A fleet file as read and checked, or the same fields given in Python."""

    def __init__(self, source: YamlFile | Mapping[str, object]) -> None:
        data = source.data if isinstance(source, YamlFile) else source
        self._is_older = False
        if isinstance(data, Mapping) and _OLDER_SERVICES in data and "services" not in data:
            self._is_older = True
            # The order of keys stays, and with it which mistake is named first.
            data = {("services" if k == _OLDER_SERVICES else k): v for k, v in data.items()}
            source = replace(source, data=data) if isinstance(source, YamlFile) else data
        super().__init__(source, FleetSpec, "a fleet file")

    def error(self, message: str, *location: str | int, hint: str | None = None) -> InputError:
        """Return an error about the value at `location`, called as the file calls it."""
        if self._is_older and location[:1] == ("services",):
            location = (_OLDER_SERVICES, *location[1:])
        elif location == (_OLDER_SERVICES,):
            message, hint = "this is the older name of 'services', which is given too", "keep one"
        return super().error(message, *location, hint=hint)
