"""Serving engines: the host time they add to every step, and the limits they put on a batch and its memory.

The host schedules, launches, samples and detokenises: `step_s` for every step and `sequence_s` for every
sequence in it, however many GPUs split a layer. Servers that prepare the next step while the GPU works
(asynchronous scheduling) show 0.2 to 0.6 ms; others about 1 ms and 0.05 ms for every running sequence. Limits
that nobody sets are the engine's own, which depend on the GPU. What `atoll profile` measures on the machine
itself should replace the host time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from atoll.core.errors import UnknownNameError
from atoll.core.frozen import Frozen

if TYPE_CHECKING:
    from atoll.catalog.gpus import GpuType
    from atoll.perf.operators import Num

BOOKED_SHARE = 0.95
"""Share of its KV cache that a node books at most: planned with, simulated with and routed by."""
MIXED_TOKENS = 2048
"""Tokens of a step where prompts and decoding share it, unless a limit is set: more would hold up decoding.
Engines are started with it."""
Scheduling = Literal["sync", "async"]
_BIG_BYTES = 70 * 2**30
_HostSeconds = Annotated[float, Field(ge=0, le=10)]


class HostTime(Frozen):
    """Host seconds of a step: so many for the step, and so many for every sequence in it."""

    step_s: _HostSeconds = 0.0
    sequence_s: _HostSeconds = 0.0

    def seconds(self, sequences: Num) -> Num:
        """Return the host seconds of a step with so many sequences, prompts and answers alike."""
        return self.step_s + self.sequence_s * sequences


_NO_TIME = HostTime()


class EngineLimits(Frozen):
    """How an engine is started; None leaves a setting as the engine has it.

    `max_num_seqs` and `max_num_batched_tokens` bound a step, `gpu_memory_utilization` is the share of GPU
    memory that the engine takes. `scheduling` is "async" where the next step is prepared while the GPU works.
    `host` is the host time as measured on the machine.
    """

    max_num_seqs: int | None = Field(default=None, ge=1, le=65536)
    max_num_batched_tokens: int | None = Field(default=None, ge=16, le=1 << 20)
    gpu_memory_utilization: float | None = Field(default=None, ge=0.05, le=1)
    prefix_caching: bool | None = None
    scheduling: Scheduling | None = None
    host: HostTime | None = None

    @model_validator(mode="after")
    def _step_takes_every_sequence(self) -> Self:
        sequences, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if sequences is not None and tokens is not None and tokens < sequences:
            message = f"a step of {tokens} tokens has no room for {sequences} sequences"
            hint = "raise max_num_batched_tokens, or lower max_num_seqs"
            raise PydanticCustomError("quantity", "{message}", {"message": message, "hint": hint})
        return self

    @property
    def given(self) -> dict[str, object]:
        """What is set, by name."""
        return {k: v for k, v in self.model_dump().items() if v is not None}


_AS_IT_COMES = EngineLimits()


class EngineLaunch(EngineLimits):
    """Limits as a plan carries them to the engines it starts, with the number format of the KV cache.

    `promised_ttft_s` is the time to the first token that the service promises: prompts wait in an order that
    keeps most of such promises where an engine can do that.
    """

    kv_cache_dtype: str | None = Field(default=None, max_length=32)
    promised_ttft_s: float | None = Field(default=None, gt=0)


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What an engine costs beside the kernels, and what it allows, on one kind of GPU.

    `memory_share` is the share of GPU memory that the engine uses at most, `reserve_bytes` what each GPU
    needs beside weights, KV cache and activations (CUDA context, graphs, collectives). `max_sequences` and
    `max_tokens` bound one step's batch, `mixed_tokens` one where prompts and decoding share it.

    Steps that only decode are replayed from CUDA graphs. Those with prompts are launched kernel by kernel,
    and a layer takes `prefill_layer_s` at least. An engine that `fuses_all_reduce` sums and normalises in one
    kernel where it can. One that `keeps_busy` runs step after step, so a GPU at its power limit lowers clocks
    (`OpConstants.sustained`).
    """

    name: str
    host: HostTime = _NO_TIME
    memory_share: float = 0.92
    reserve_bytes: float = 1.0e9
    max_sequences: int = 512
    max_tokens: int = 8192
    mixed_tokens: int = MIXED_TOKENS
    prefix_caching: bool = False
    prefill_layer_s: float = 0.0
    fuses_all_reduce: bool = False
    keeps_busy: bool = True

    def host_seconds(self, sequences: Num) -> Num:
        """Return host seconds of a step with so many sequences."""
        return self.host.seconds(sequences)


@dataclass(frozen=True, slots=True)
class _Defaults:
    """An engine as it comes: host time by scheduling, and (sequences, tokens) of a step by GPU."""

    hosts: Mapping[Scheduling, HostTime]
    scheduling: Scheduling
    batch: Callable[[GpuType | None], tuple[int, int]]
    memory_share: float
    prefix_caching: bool
    prefill_layer_s: float = 0.0
    fuses_all_reduce: bool = False
    keeps_busy: bool = True


def _vllm_batch(gpu: GpuType | None) -> tuple[int, int]:
    """The server of vLLM takes more on GPUs of 70 GiB and up, but not on an A100."""
    big = gpu is None or (gpu.memory_bytes >= _BIG_BYTES and not gpu.name.startswith("A100"))
    return (1024, 8192) if big else (256, 2048)


def _sglang_batch(gpu: GpuType | None) -> tuple[int, int]:
    """SGLang cuts prompts by memory, and runs 2,048 requests or more."""
    size = _BIG_BYTES if gpu is None else gpu.memory_bytes
    return 2048, 8192 if size >= 60 * 2**30 else 4096 if size >= 35 * 2**30 else 2048


def _atoll_batch(gpu: GpuType | None) -> tuple[int, int]:
    """The stage engine takes 512 rows, of prompts and sequences together, on any GPU."""
    del gpu
    return 512, 512


def _plain_batch(gpu: GpuType | None) -> tuple[int, int]:
    """No engine in particular."""
    del gpu
    return 512, 8192


_ASYNC = HostTime(step_s=0.3e-3, sequence_s=1e-6)
_SYNC = HostTime(step_s=1.0e-3, sequence_s=0.05e-3)
_STAGE = HostTime(step_s=0.32e-3, sequence_s=0.01e-3)
"""The stage engine's beside an H200, with a model of two small layers; another such host took 0.024 ms for
every sequence."""
_COMPILED_S = 0.1e-3
"""Least time of a layer in pieces that are launched one by one; an assumption."""
_EAGER_S = 0.4e-3
"""Least time of a layer launched from PyTorch: 0.32 to 0.53 ms on the host of an H200."""
_SERVERS: Mapping[Scheduling, HostTime] = {"async": _ASYNC, "sync": _SYNC}
_NONE: Mapping[Scheduling, HostTime] = {"async": _NO_TIME, "sync": _NO_TIME}
ENGINES: Mapping[str, _Defaults] = {
    "none": _Defaults(_NONE, "sync", _plain_batch, 0.92, False, keeps_busy=False),
    "vllm": _Defaults(_SERVERS, "async", _vllm_batch, 0.9, True, _COMPILED_S, True),
    "sglang": _Defaults(_SERVERS, "async", _sglang_batch, 0.88, True, _COMPILED_S, True),
    "atoll": _Defaults(
        {"async": _STAGE, "sync": _STAGE}, "sync", _atoll_batch, 0.92, True, _EAGER_S
    ),
}


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine by name, with the limits it is started with."""

    name: str
    limits: EngineLimits = _AS_IT_COMES

    def on(self, gpu: GpuType | None) -> EngineProfile:
        """Return what the engine does on a kind of GPU; None: on a large one."""
        return engine(self.name, gpu, self.limits)


def engine(
    name: str, gpu: GpuType | None = None, limits: EngineLimits | None = None
) -> EngineProfile:
    """Return an engine's profile by name; "none" has no host time and gives the time of kernels run alone.

    What `limits` leave open is what the engine takes on this kind of GPU.
    """
    known = ENGINES.get(name)
    if known is None:
        raise UnknownNameError("engine", name, ENGINES)
    chosen = limits or _AS_IT_COMES
    sequences, tokens = known.batch(gpu)
    most = chosen.max_num_seqs or sequences
    # A step has room for a token of every sequence.
    budget = chosen.max_num_batched_tokens or max(tokens, most)
    share, caching = chosen.gpu_memory_utilization, chosen.prefix_caching
    return EngineProfile(
        name,
        host=chosen.host or known.hosts[chosen.scheduling or known.scheduling],
        memory_share=known.memory_share if share is None else share,
        max_sequences=min(most, budget),
        max_tokens=budget,
        mixed_tokens=chosen.max_num_batched_tokens or min(budget, max(MIXED_TOKENS, most)),
        prefix_caching=known.prefix_caching if caching is None else caching,
        prefill_layer_s=known.prefill_layer_s,
        fuses_all_reduce=known.fuses_all_reduce,
        keeps_busy=known.keeps_busy,
    )
