"""Time and memory that an engine takes beside the kernels, and the size of its batches.

Servers that prepare the next step while the GPU works (asynchronous scheduling) leave next to nothing between
steps, but a prompt that comes waits for the step that is prepared already; others show about 1 ms of host
time and 0.05 ms for every running sequence. Limits that nobody sets are the engine's own, which depend on the
GPU. `atoll profile` measures the host time on the machine itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from atoll.catalog.frozenmap import FrozenMap
from atoll.engines.limits import MIXED_TOKENS, EngineLimits, HostTime, Scheduling, Speculation

if TYPE_CHECKING:
    from atoll.catalog.gpus import GpuType
    from atoll.catalog.measured_servers import MeasuredServer
    from atoll.catalog.transformer import TransformerSpec
    from atoll.engines.limits import GuessMethod, Num

NO_HOST_TIME = HostTime()
NO_LIMITS = EngineLimits()
SERVER_HOST_TIME: Mapping[Scheduling, HostTime] = {
    "async": HostTime(step_s=0.05e-3, sequence_s=1e-6),
    "sync": HostTime(step_s=1.0e-3, sequence_s=0.05e-3),
}
"""Host time of the usual servers of one process per GPU."""
SGLANG_HOST_TIME: Mapping[Scheduling, HostTime] = {
    **SERVER_HOST_TIME,
    "async": HostTime(step_s=0.05e-3, sequence_s=26e-6),
}
"""That of SGLang: what a sequence adds to a step is not hidden. Fitted on measured servers (0.5.1 to 0.5.10,
tools/fit_servers.py); with 512 sequences on eight GPUs steps took 12 ms longer than their kernels."""
SERVER_REQUEST_S = 6.5e-3
"""What a request waits for beside steps: HTTP, messages between processes. About what vLLM 0.22 took on an
H200 (`benchmarks.gpu_promise`): 10 ms, of which tokens of its prompts, 1,155 in the mean, are counted apart
(`SERVER_TOKENIZE_S`). An assumption for SGLang."""
SERVER_STREAM_S = 0.15e-3
"""What each sequence that runs adds to that. Times to the first token on that H200 grew by 0.115 ms a running
sequence outside of vLLM (gateway and client) and by 0.05 ms in its front, over fourteen runs with 5 to 125 of
them; an assumption for SGLang."""
SERVER_TOKENIZE_S = 3e-6
"""What each token of a prompt adds: turning text into tokens. Tokenisers of Hugging Face do about 1 MB/s on a
core, and a token has about 4 bytes (the comparison in the README of openai/tiktoken)."""
COMPILED_LAYER_S = 0.1e-3
"""Least time of a layer in pieces that are launched one by one; an assumption."""


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """Least seconds of a layer in steps with prompts, which are launched in pieces.

    Pieces of up to `graph_tokens` tokens are CUDA graphs, and a layer takes `layer_s`. Larger ones are
    launched kernel by kernel, which takes `large_s`, and `experts_s` in a layer with experts, whose kernels
    are called from Python. Latent attention (MLA) takes `latent_s` more. `unusual_s` is for models that are
    not `is_plain`, which it has no graphs for. With `fused_experts` those of a layer are one kernel on
    large Blackwells (`on`), with `fused_mxfp4` those in MXFP4 are anywhere.
    """

    layer_s: float = 0.0
    large_s: float = 0.0
    experts_s: float = 0.0
    graph_tokens: int = 0
    unusual_s: float = 0.0
    latent_s: float = 0.0
    fused_experts: bool = False
    fused_mxfp4: bool = False

    def of(self, spec: TransformerSpec) -> LaunchTime:
        """Return the times of a model's layers."""
        if self.unusual_s and not is_plain(spec):
            return LaunchTime(self.unusual_s)
        one_kernel = self.fused_mxfp4 and spec.expert_dtype.name == "mxfp4"
        times = replace(self, experts_s=0.0) if one_kernel else self
        if spec.mla is None or not self.latent_s:
            return times
        return replace(
            times,
            layer_s=times.layer_s + self.latent_s,
            large_s=times.large_s + self.latent_s,
            experts_s=times.experts_s + self.latent_s,
        )

    def on(self, gpu: GpuType | None) -> LaunchTime:
        """Return the times on a kind of GPU: the experts of a layer are one kernel on large Blackwells.

        A prompt of 1,024 tokens took 38 ms in the mean on servers of gpt-oss-120b (36 layers) on B200, vLLM
        0.15.1, where `experts_s` alone would be 52 (`benchmarks.servers`); tables of vLLM's kernels have one
        launch for all experts there, and several elsewhere.
        """
        large = gpu is not None and gpu.whole.compute_capability.startswith("10.")
        return replace(self, experts_s=0.0) if large and self.fused_experts else self

    def scale(self, factor: float) -> LaunchTime:
        """Return times of a host that takes so many times as long."""
        return replace(
            self,
            layer_s=self.layer_s * factor,
            large_s=self.large_s * factor,
            experts_s=self.experts_s * factor,
            latent_s=self.latent_s * factor,
            unusual_s=self.unusual_s * factor,
        )

    def beyond_graphs_s(self, *, experts: bool) -> float:
        """Return the least seconds in a step that is larger than any graph."""
        return max(self.layer_s, self.large_s, self.experts_s if experts else 0.0)


def is_plain(spec: TransformerSpec) -> bool:
    """Whether layers are those of the Llama family: two RMS norms, a gated MLP or experts in 16 bits."""
    odd = spec.norm_bias or spec.o_bias or spec.mlp_bias or spec.qk_norm_full or spec.sinks
    odd = odd or spec.attention_gate or not spec.gated_mlp or spec.norms_per_layer != 2
    moe = spec.moe
    if moe is not None:
        odd = (
            odd
            or moe.shared_intermediate > 0
            or moe.router_bias
            or spec.expert_dtype.bits_per_weight < 16
        )
    return not odd


NO_LAUNCH_TIME = LaunchTime()
SERVER_LAUNCH = LaunchTime(COMPILED_LAYER_S, large_s=0.4e-3, experts_s=1.45e-3, graph_tokens=512)
"""vLLM 0.22 on an H200. Llama 3.2 3B: steps of 656 to 1,552 tokens took 11.2 to 11.6 ms (28 layers) where
one of 464 took 5.2 (`benchmarks/results/gpu_steps_3b.csv`). Qwen3-30B-A3B: steps of 641 to 1,936 tokens took
57 to 94 ms (48 layers, 1.2 to 2.0 ms each, `gpu_steps_moe.csv`) where one of 464 took 22; another server
computed a prompt of 1,024 tokens in 49 ms; at 1.45 ms the simulator says what clients of a third one saw
(`benchmarks.gpu_promise`). It is time of the host, so it depends on its cores. An assumption for SGLang."""
EAGER_LATENT_S = 1.5e-3
"""What a layer of latent attention takes more where PyTorch launches kernels one by one. Fitted on public
servers of DeepSeek (`benchmarks.servers`), so that 1,024 tokens take 3.0 ms a layer on an H200 with experts
of many kernels (SGLang 0.5.9, TensorRT-LLM) and 1.9 on a B200 where they are one."""
EAGER_LAUNCH = LaunchTime(
    0.4e-3, large_s=0.4e-3, experts_s=1.45e-3, latent_s=EAGER_LATENT_S, fused_experts=True
)
"""Engines that launch every step with prompts kernel by kernel: vLLM's times of steps beyond its graphs."""


@dataclass(frozen=True, slots=True)
class StartTime:
    """Seconds from the start of a server to its first token, without those of reading weights.

    `cold_s` is where it compiles everything, `kept_s` where it finds what an earlier start compiled; None: as
    cold, nobody measured it. `source` says where they are from.
    """

    cold_s: float
    source: str
    kept_s: float | None = None


@dataclass(frozen=True, slots=True)
class KernelSpeeds:
    """Speeds of kernels of an engine's own, where they are not those that GPUs were measured with.

    Products reach the share `compute` of the GPU's arithmetic, at most `max_flops`, and `memory` of its
    bandwidth, at most `max_bytes_per_s`; how the two meet is `p` (`perf.operators`). `experts` is the share
    of this that products with many small matrices reach, `attention_compute` and `attention_memory` are those
    of attention, `t0_us` is what a kernel takes at least. `formats` are shares of all that by the number
    format of weights, for those that are slower than 16 bits. `source` says where the figures are from.
    """

    source: str
    compute: float
    memory: float
    p: float
    experts: float
    attention_compute: float
    attention_memory: float
    t0_us: float
    max_flops: float = math.inf
    max_bytes_per_s: float = math.inf
    formats: Mapping[str, float] = field(default_factory=FrozenMap)


@dataclass(frozen=True, slots=True)
class KernelRatios:
    """Times of an engine's kernels over those that GPUs were measured with, where these are much alike.

    `start` is that of what a kernel takes at least, which is less where one gets ready while the one before
    it ends; `decode_reads` that of reading keys and values for decodes; `kernels` that of all of them.
    `source` says where they are from.
    """

    start: float = 1.0
    decode_reads: float = 1.0
    source: str = ""
    kernels: float = 1.0


USUAL_KERNELS = KernelRatios()


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Cost of an engine beside the kernels, and its limits, on one kind of GPU.

    `memory_share` is the share of GPU memory that the engine uses at most, `reserve_bytes` what each GPU
    needs beside weights, KV cache and activations (CUDA context, graphs, collectives). `max_sequences` and
    `max_tokens` bound one step's batch, `mixed_tokens` one where prompts and decoding share it.

    Steps that only decode are replayed from CUDA graphs. Those with prompts are launched in pieces, which
    takes a layer the time of `launch` at least. An engine that `fuses_all_reduce` sums and normalises in one
    kernel where it can: on Blackwells over up to four GPUs, with `fuses_widely` on any NVLink. One that
    `keeps_busy` runs step after step, so a GPU at its power limit lowers clocks (`OpConstants.sustained`).

    With `slots` the KV cache is cut into equal parts of the longest request, and a request takes one whatever
    its length. A step goes through the kernels in parts of `part_tokens` (None: as a whole), and activations
    need memory for that. With `layer_split_s` the GPUs of a node hold layers in a row, one works at a time,
    and each hand-over takes that long; without, they split each layer. `kernels` are its own, None: those
    that GPUs were measured with, but for `ratios`.

    One that `schedules_ahead` has prepared the next step when one begins: what comes meanwhile joins the step
    after that. Pipelines do not: there the steps under way are those in the stages. `request_s` is what a
    request waits for beside steps, once on every instance that it is sent to, `tokenize_s` more for each
    token of its prompt where that is computed, and `stream_s` for each sequence that runs there: tokens of
    all pass the same processes. `stage_host` is the host time of a stage of a pipeline, where nothing is
    prepared ahead (None: as that of a whole model).

    One that `admits_by_prompts` runs a request as soon as the KV cache has room for its prompt, and computes
    the youngest again later where answers fill it; others wait for room for its answer too. One with
    `prompts_first` computes all prompts that wait before it goes on with answers; others mix them in a step.
    New prompts are looked at every `prompt_interval` steps of decoding, and at once after a step with
    prompts; one that `collects_prompts` counts from when one waits, and looks sooner if they fill a step.
    With `mxfp8` experts in MXFP4 compute in MXFP8 on GPUs that can. `version` is the engine's, None for the
    newest that is known; `measured` is the server that its times were measured on, None where assumed.

    With `speculation` steps check tokens that were guessed; `draft` is the small model that guesses them,
    where it is one by itself. With `expert_parallel` experts are spread over the GPUs of all `copies` of the
    layers on a node (None: of those that there are).
    """

    name: str
    host: HostTime = NO_HOST_TIME
    stage_host: HostTime | None = None
    memory_share: float = 0.92
    reserve_bytes: float = 1.0e9
    max_sequences: int = 512
    max_tokens: int = 8192
    mixed_tokens: int = MIXED_TOKENS
    prefix_caching: bool = False
    launch: LaunchTime = NO_LAUNCH_TIME
    fuses_all_reduce: bool = False
    fuses_widely: bool = False
    keeps_busy: bool = True
    slots: bool = False
    part_tokens: int | None = None
    layer_split_s: float | None = None
    kernels: KernelSpeeds | None = None
    ratios: KernelRatios = USUAL_KERNELS
    schedules_ahead: bool = False
    request_s: float = 0.0
    stream_s: float = 0.0
    tokenize_s: float = 0.0
    admits_by_prompts: bool = False
    prompts_first: bool = False
    prompt_interval: int = 1
    collects_prompts: bool = False
    mxfp8: bool = False
    version: str | None = None
    measured: MeasuredServer | None = None
    speculation: Speculation | None = None
    draft: TransformerSpec | None = None
    expert_parallel: bool = False
    copies: int | None = None

    def spread(self, spec: TransformerSpec, gpus: int, tp: int) -> int | None:
        """Return how many copies of a model on `gpus` GPUs share its experts; None: each has all of them."""
        if not self.expert_parallel or spec.moe is None:
            return None
        return self.copies or gpus // tp

    @property
    def rows(self) -> int:
        """Tokens that a step computes for each sequence: one, and those that were guessed."""
        return 1 + (self.speculation.num_speculative_tokens if self.speculation else 0)

    @property
    def made(self) -> float:
        """Mean tokens that a step makes for each sequence."""
        return self.speculation.tokens_per_step if self.speculation else 1.0

    def host_seconds(self, sequences: Num) -> Num:
        """Return host seconds of a step with so many sequences."""
        return self.host.seconds(sequences)

    def with_host(self, factor: float) -> EngineProfile:
        """Return the profile where all that the host does takes so many times as long."""
        if factor == 1.0:
            return self
        return replace(
            self,
            host=self.host.scale(factor),
            stage_host=None if self.stage_host is None else self.stage_host.scale(factor),
            launch=self.launch.scale(factor),
            request_s=self.request_s * factor,
            stream_s=self.stream_s * factor,
            tokenize_s=self.tokenize_s * factor,
        )

    def of_stage(self) -> EngineProfile:
        """Return the profile of a node that holds a part of the layers."""
        return self if self.stage_host is None else replace(self, host=self.stage_host)


def read_version(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, as "0.12" or "0.12.1"."""
    return tuple(int(number) for number in version.split("."))


def is_since(version: str | None, since: tuple[int, ...] | None) -> bool:
    """Whether a version is at least another; None is the newest of versions, and older than none."""
    return since is not None and (version is None or read_version(version) >= since)


def _usual_kernels(gpu: GpuType | None, version: str | None) -> KernelRatios:
    del gpu, version
    return USUAL_KERNELS


def _stretch(times: int, interval: int | None) -> int:
    """Return after how many steps prompts are looked at: so many times the interval, or after each."""
    return times * interval if times and interval and interval > 1 else 1


@dataclass(frozen=True, slots=True)
class EngineDefaults:
    """Limits and times of an engine that nobody configured.

    `batch` returns the limits of sequences and tokens of a step on a GPU (None: a large one), `kernels` its
    own kernels there, `ratios` how those of a version compare with usual ones. `hosts` are host times by
    scheduling; one that `schedules_ahead` does so if that is "async". Stages of one whose `stages_wait` are
    "sync" always. Versions before `async_since` schedule "sync" unless told, and those from
    `fuses_widely_since` on fuse sums on any NVLink. `prompt_interval` is how many times the interval of
    limits prompts are looked at; with 0 in every step, whatever limits say. `mxfp8` is whether experts in
    MXFP4 compute in MXFP8: always, if told (False), or never (None). With `guesses` it decodes speculatively
    by these methods, of which those of `guesses_sync` keep the next step from being prepared ahead,
    `guessing_sequences` at a time unless told. With `expert_parallel` it spreads experts over GPUs where it
    is told to.
    """

    hosts: Mapping[Scheduling, HostTime]
    scheduling: Scheduling
    batch: Callable[[GpuType | None], tuple[int, int]]
    memory_share: float
    prefix_caching: bool
    launch: LaunchTime = NO_LAUNCH_TIME
    fuses_all_reduce: bool = False
    fuses_widely_since: tuple[int, ...] | None = None
    keeps_busy: bool = True
    slots: bool = False
    part_tokens: int | None = None
    layer_split_s: float | None = None
    kernels: Callable[[GpuType | None], KernelSpeeds] | None = None
    ratios: Callable[[GpuType | None, str | None], KernelRatios] = _usual_kernels
    schedules_ahead: bool = False
    stages_wait: bool = False
    async_since: tuple[int, ...] = ()
    request_s: float = 0.0
    stream_s: float = 0.0
    tokenize_s: float = 0.0
    admits_by_prompts: bool = False
    prompts_first: bool = False
    prompt_interval: int = 0
    collects_prompts: bool = False
    mxfp8: bool | None = None
    guesses: frozenset[GuessMethod] = frozenset()
    guesses_sync: frozenset[GuessMethod] = frozenset()
    guessing_sequences: int | None = None
    expert_parallel: bool = False

    def scheduling_of(self, limits: EngineLimits) -> Scheduling:
        """Return how an engine with such limits schedules; of no version: as the newest that is known."""
        version, guess = limits.version, limits.speculative
        if guess is not None and guess.method in self.guesses_sync:
            return "sync"
        if limits.scheduling is not None:
            return limits.scheduling
        return self.scheduling if is_since(version, self.async_since) else "sync"

    def profile(
        self,
        name: str,
        gpu: GpuType | None,
        limits: EngineLimits | None = None,
        draft: TransformerSpec | None = None,
        copies: int | None = None,
    ) -> EngineProfile:
        """Return the profile on a kind of GPU; what `limits` leave open is the engine's own.

        `draft` is the small model that guesses, where it is one of the catalog, `copies` as in the profile.
        """
        chosen = limits or NO_LIMITS
        own_sequences, own_tokens = self.batch(gpu)
        guess = chosen.speculative
        if guess is not None and guess.method not in self.guesses:
            guess = None  # refused where instances are checked (`Engine.check_layout`)
        if guess is not None:
            own_sequences = self.guessing_sequences or own_sequences
        sequences = chosen.max_num_seqs or own_sequences
        # A step has room for a token of every sequence.
        budget = chosen.max_num_batched_tokens or max(own_tokens, sequences)
        mixed = chosen.max_num_batched_tokens or min(budget, max(MIXED_TOKENS, sequences))
        if guess is not None:
            # Those that were guessed count as well.
            sequences = max(1, min(sequences, mixed // (1 + guess.num_speculative_tokens)))
        share, caching = chosen.gpu_memory_utilization, chosen.prefix_caching
        scheduling = self.scheduling_of(chosen)
        return EngineProfile(
            name,
            host=chosen.host or self.hosts[scheduling],
            stage_host=None if chosen.host or not self.stages_wait else self.hosts["sync"],
            memory_share=self.memory_share if share is None else share,
            max_sequences=min(sequences, budget),
            max_tokens=budget,
            mixed_tokens=mixed,
            prefix_caching=self.prefix_caching if caching is None else caching,
            launch=self.launch.on(gpu),
            fuses_all_reduce=self.fuses_all_reduce,
            fuses_widely=is_since(chosen.version, self.fuses_widely_since),
            keeps_busy=self.keeps_busy,
            slots=self.slots,
            part_tokens=self.part_tokens,
            layer_split_s=self.layer_split_s,
            kernels=None if self.kernels is None else self.kernels(gpu),
            ratios=self.ratios(gpu, chosen.version),
            schedules_ahead=self.schedules_ahead and scheduling == "async",
            request_s=self.request_s,
            stream_s=self.stream_s,
            tokenize_s=self.tokenize_s,
            admits_by_prompts=self.admits_by_prompts,
            prompts_first=self.prompts_first and not chosen.mixed_chunk,
            prompt_interval=_stretch(self.prompt_interval, chosen.prompt_interval),
            collects_prompts=self.collects_prompts,
            mxfp8=bool(chosen.mxfp8 if self.mxfp8 is False else self.mxfp8),
            version=chosen.version,
            speculation=guess,
            draft=draft,
            expert_parallel=self.expert_parallel and bool(chosen.expert_parallel),
            copies=copies,
        )
