"""An engine: everything that Atoll has to know of a program that serves language models.

An engine is a subclass of `Engine` with an instance called ENGINE, in a file of its own beside this one. What
it leaves out is what a plain OpenAI server behind a URL would say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Literal

from atoll.core.errors import InputError
from atoll.core.ids import Phase
from atoll.engines.limits import EngineLaunch, EngineLimits
from atoll.engines.profile import EngineDefaults, StartTime

if TYPE_CHECKING:
    from atoll.catalog.gpus import GpuType
    from atoll.catalog.transformer import TransformerSpec

Figure = Literal["running", "waiting", "kv", "tokens"]
"""Figures read from an engine's metrics: requests, share of the KV cache (0 to 1), tokens made so far."""
ResumeRule = Literal["repeat", "text", "tokens"]
"""How a broken stream goes on elsewhere: only by repeating a request that gives the same answer again, from
the text so far, or from its tokens with the exact state."""
CountRule = Literal["none", "usage", "timings", "ids"]
"""How events of a stream say how many tokens an answer has by then, where that is asked for: not at all, by
`usage` (`stream_options.continuous_usage_stats`), by `timings` (`timings_per_token`), or by naming those that
they bring (`return_token_ids`)."""
_HUB = "hf://"
WeightsForm = Literal["repository", "gguf", "folder"]
"""Source that an engine loads: a repository's name or a folder, a .gguf file here, or a folder here."""
SettingCheck = Callable[[str], bool]
Platform = Literal["cuda", "rocm", "metal", "vulkan"]
Pipelines = Literal["none", "rows", "free"]
"""Pipelines that an engine runs: none; one node a stage, with the same GPUs and tensor parallel size in all;
or any, with several nodes in a stage and unlike ones."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Where an engine computes with weights of a format: least compute capability of CUDA, and platforms.

    From `native` on the hardware computes in the format; below, weights are widened as they are read. `rocm`
    is the least generation of AMD's GPUs (gfx90a is 9.0, gfx942 9.4).
    """

    capability: float = 0.0
    native: float = 0.0
    rocm: float = 0.0
    platforms: tuple[Platform, ...] = ("cuda", "rocm")


def platform_of(gpu: GpuType) -> tuple[Platform, float]:
    """Return the platform of a kind of GPU and its compute capability; infinity where there is none.

    One that says neither is a CUDA GPU older than any.
    """
    named = gpu.compute_capability
    if named.startswith("metal"):
        return "metal", math.inf
    if named == "vulkan":
        return "vulkan", math.inf
    rocm = named.startswith("gfx")
    # gfx90a is 9.0, gfx942 is 9.4, gfx1100 is 11.0: the last digit is a stepping.
    number = f"{named[3:-2]}.{named[-2:-1]}" if rocm else named
    try:
        return "rocm" if rocm else "cuda", float(number)
    except ValueError:
        return "rocm" if rocm else "cuda", 0.0


@dataclass(frozen=True, slots=True)
class Connector:
    """How instances that run prefill alone hand KV cache to those that run decode alone.

    Both sides have the same. `pipelines` are the phases whose instances may be cut into stages; `pushes`:
    then prefill sends what decode would fetch otherwise, and both must know. `recomputes`: the decode side
    computes a prompt by itself where its KV cache does not come.
    """

    name: str
    pipelines: frozenset[Phase]
    pushes: bool = False
    recomputes: bool = True


class Standing(StrEnum):
    """What is known of an engine in a layout on a kind of GPU."""

    SERVED = "served"
    """It ran on such a GPU, and the results are kept with the benchmarks."""
    TESTED = "tested"
    """The real engine runs so in our tests, on cores."""
    WRITTEN = "written"
    """Its command is written, and checked by the engine's own parser where that is installed."""


class Irregularity(StrEnum):
    """Why a layout is no row of equal nodes with one copy of each layer range, as errors say it."""

    PARTIAL = "has nodes that run only a part of their layers"
    WIDE_STAGE = "has several nodes in a stage"
    UNLIKE_NODES = "mixes tensor parallel sizes"
    OVERLAP = "has layer ranges that overlap"
    COPIES = "has several copies of its layers on each of several nodes"
    SHARES = "is a pipeline over shares of GPUs"

    @property
    def limit(self) -> str:
        """What an engine that does not run such layouts lacks."""
        return _LIMITS[self]


_LIMITS = {
    Irregularity.PARTIAL: "nodes that run only a part of their layers",
    Irregularity.WIDE_STAGE: "several nodes in a stage",
    Irregularity.UNLIKE_NODES: "unlike tensor parallel sizes in one pipeline",
    Irregularity.OVERLAP: "layer ranges that overlap",
    Irregularity.COPIES: "copies of layers on several nodes",
    Irregularity.SHARES: "pipelines over shares of GPUs",
}


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Nodes and layers of an instance, as far as an engine has to know them.

    `tp` GPUs split a layer and `copies` of it stand side by side, both as on the first node. `layers` are
    the numbers of layers of the stages, in order. `on_share`: it has shares of GPUs, beside others.
    """

    instance: str
    nodes: int
    tp: int
    copies: int
    layers: tuple[int, ...]
    irregularities: tuple[Irregularity, ...] = ()
    phase: Phase = Phase.BOTH
    on_share: bool = False

    @property
    def alone(self) -> bool:
        """Whether it runs prefill or decode only."""
        return self.phase in (Phase.PREFILL, Phase.DECODE)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to serve: the source of the weights and the names requests ask for.

    `launch` are the limits that a plan reckons with; None leaves the engine as it comes.
    """

    source: str
    names: tuple[str, ...]
    launch: EngineLaunch | None = None

    @property
    def repository(self) -> tuple[str, str | None]:
        """The name that servers load weights by, and the revision of a repository if one is named.

        hf://ORG/NAME@REVISION is ORG/NAME at that revision; a path is itself.
        """
        if not self.source.startswith(_HUB):
            return self.source, None
        name, _, revision = self.source.removeprefix(_HUB).partition("@")
        return name, revision or None

    def revision_words(self) -> tuple[str, ...]:
        """Return the option that names the revision, as vLLM and SGLang have it; none: the latest."""
        revision = self.repository[1]
        return ("--revision", revision) if revision else ()

    @staticmethod
    def source_of(name: str, revision: Sequence[str] | None) -> str:
        """Return the source of a name and the words behind `--revision` in a command, if it has one."""
        return f"{_HUB}{name}@{revision[0]}" if revision else name


@dataclass(frozen=True, slots=True)
class ServerHost:
    """Where a server starts: its port (a number or a placeholder), the Python there, and its threads.

    At `address` and `handover_port` (and the ports after it, one for each copy) others find what they need to
    take KV cache over, where it runs one phase.
    """

    port: str
    python: str
    threads: int | None = None
    address: str = "127.0.0.1"
    handover_port: str = "5600"


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A command with the environment it needs beside the choice of GPUs."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ParsedCommand:
    """A server's command, read: GPUs that split a layer, copies, layers by stage (empty: one), its model."""

    tp: int
    copies: int
    layers: tuple[int, ...]
    served: ServedModel
    port: str | None


class Engine:
    """Name, layouts, launch, health, metrics, resumption, settings and defaults of an engine."""

    name: ClassVar[str]
    title: ClassVar[str]
    """As its makers write it."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names under which nodes announce it."""
    preference: ClassVar[int] = 100
    """Place in the order in which engines are tried for an instance; the smallest comes first."""
    plan_preference: ClassVar[int | None] = None
    """Its place where plans choose engines; None: the same."""

    # Starting it
    launches: ClassVar[bool] = False
    """Whether Atoll can start it: `atoll serve`, `up`, `assign`."""
    staged: ClassVar[bool] = False
    """Whether an instance is a process a node with one in front of them, which only Atoll's own engine is."""
    runs_executors: ClassVar[bool] = False
    """Whether one server of it can be all executors of an any-to-any service."""
    weights: ClassVar[WeightsForm] = "repository"
    on_cores: ClassVar[bool] = False
    """Whether it computes on CPU cores, and is given some."""
    max_nodes: ClassVar[int | None] = None
    max_node_copies: ClassVar[int | None] = None
    """Copies of its layers that a node has, where it computes on GPUs."""
    max_copies: ClassVar[int | None] = None
    """Copies of the layers that a server of it runs side by side on the GPUs of a node."""
    on_shares: ClassVar[bool] = False
    """Whether it runs beside others on a GPU with a share of its memory, whoever starts first."""
    splits_by: ClassVar[Literal["tensor", "layers"]] = "tensor"
    """What GPUs that hold a copy together have of it: parts of each layer, or layers in a row."""
    allows: ClassVar[frozenset[Irregularity]] = frozenset()
    """Irregular layouts that it runs."""
    connector: ClassVar[Connector | None] = None
    """How KV cache is handed over where phases run apart. None: it runs both phases together."""
    platforms: ClassVar[Mapping[Platform, float]] = {}
    """Hardware it runs on, with the least compute capability (of CUDA; 0 for others)."""
    formats: ClassVar[Mapping[str, WeightFormat]] = {}
    """Number formats of weights that it computes with, by the catalog's names."""
    served_on: ClassVar[frozenset[str]] = frozenset()
    """Architectures of GPUs on which it served in our results, whole models on one GPU."""
    served_shares_on: ClassVar[frozenset[str]] = frozenset()
    """The same, on a share of a GPU."""
    tested: ClassVar[frozenset[str]] = frozenset()
    """Layouts in which our tests run it: "one node", "several nodes"; beside these "tensor parallel",
    "copies" (of the layers in a node), "shares" (of a GPU), "phases apart", "phases apart over nodes".

    docs/engines.md names the tests."""
    ready_s: ClassVar[float] = 1800.0
    """How long it may take from start to a first token."""
    failed_probes: ClassVar[int] = 3
    """Failed probes in a row after which it is started anew."""
    stop_s: ClassVar[float] = 30.0
    """How long it may take to end what runs when it is told to stop."""
    max_inflight: ClassVar[int | None] = None
    max_names: ClassVar[int | None] = None
    """How many names it serves a model under."""
    fatal_codes: ClassVar[tuple[int, ...] | None] = (126, 127)
    """Exit codes after which starting again is no use. What others mean is the engine's own affair, except
    that there is no such program. None: those of Atoll's own programs."""
    settings: ClassVar[Mapping[str, SettingCheck]] = {}
    """Settings that an order to a node may carry; each is checked before it becomes an argument."""
    settings_are_flags: ClassVar[bool] = False
    """Whether settings become options of the command as they are."""
    compile_caches: ClassVar[Mapping[str, str]] = {}
    """Variables that name folders for what it compiles, each with the name of one."""
    ray_options: ClassVar[tuple[str, ...]] = ()
    """Options with which its server has Ray start the workers of all machines; none: it cannot."""
    default_dtype: ClassVar[str] = ""
    """Number format it computes in unless told; "": that of the weights."""

    # Recognising one that somebody else started
    backend_kind: ClassVar[str | None] = None
    """Kind of backend it is to a gateway; None: its name."""
    program: ClassVar[re.Pattern[str] | None] = None
    """Words that name it in a command, as a program or as a module behind `-m`."""
    default_port: ClassVar[int | None] = None
    server_header: ClassVar[str] = ""
    """Part of the header `server` of its answers."""
    router: ClassVar[str] = ""
    """Part of the `router` that its /info names."""
    detail_paths: ClassVar[tuple[str, ...]] = ()
    """Paths that say more of its model and version than /v1/models."""

    # Asking it
    health_path: ClassVar[str | None] = None
    """Path that says cheaply whether it is well; None: as the gateway is configured."""
    has_status: ClassVar[bool] = False
    """Whether /atoll/v1/status says how its nodes are."""
    metrics: ClassVar[Mapping[Figure, tuple[str, ...]]] = {}
    """Names of figures at /metrics."""
    resume: ClassVar[ResumeRule] = "text"
    repeats_speech: ClassVar[bool] = False
    """Whether the same request is spoken in the same samples again."""
    continues_messages: ClassVar[bool] = False
    """Whether it goes on from a last message of the assistant without being told to."""
    counts: ClassVar[CountRule] = "none"
    recounts: ClassVar[CountRule | None] = None
    """How instead, where it reads all of an answer again for each event to tell reasoning from the rest."""
    completion_tokens: ClassVar[int | None] = 16
    """Tokens it makes for /v1/completions without `max_tokens`, as OpenAI does; None: as many as it likes."""
    apart_proof: ClassVar[Mapping[str, object]] = {}
    """Fields of a request that has an instance of one phase give a token without the other side."""
    tokenizes_messages: ClassVar[bool] = True
    """Whether /tokenize takes vLLM's requests; else llama.cpp's, with a text alone."""
    vllm_tokens: ClassVar[bool] = False
    """Whether /tokenize and /detokenize answer in vLLM's form."""

    # Planning with it
    defaults: ClassVar[EngineDefaults | None] = None
    """Times and limits that plans reckon with; None: nobody plans with it."""
    start: ClassVar[StartTime] = StartTime(123.0, "not measured: as vLLM")
    """How long it takes to start."""
    orders_by_promise: ClassVar[bool] = False
    """Whether waiting prompts are taken by their promised time to the first token; else as they came."""

    @property
    def kind(self) -> str:
        """Kind of backend that it is to a gateway."""
        return self.backend_kind or self.name

    def takes(self, source: str, *, stand_in: bool) -> bool:
        """Return whether it is of use for these weights where nobody asked for an engine."""
        del source, stand_in
        return False

    def check_source(self, source: str) -> None:
        """Raise InputError if it cannot load weights from a source at all."""

    def check_layout(self, layout: EngineLayout, launch: EngineLimits | None = None) -> None:
        """Raise InputError unless it runs the layout, started so."""
        hint = "use the engine 'atoll'"
        guessing = None if launch is None else self.refuses_launch(launch)
        if guessing is None and launch is not None and launch.speculative and layout.nodes > 1:
            here = f"{layout.instance} has {layout.nodes}"
            guessing = f"{self.title} decodes speculatively on one node, and {here}"
        if guessing is not None:
            field = "speculative" if launch and launch.speculative else "expert_parallel"
            raise InputError(guessing, field=field, hint="leave it out, or use another engine")
        if layout.alone and self.connector is None:
            raise InputError(
                f"{layout.instance} runs one phase, and {self.title} runs prefill and decode together",
                field="engine",
                hint=hint,
            )
        if self._cuts_alone(layout):
            raise InputError(
                f"{layout.instance} runs {layout.phase} alone in {len(layout.layers)} stages, and"
                f" {self.title} hands KV cache over in one",
                field="engine",
                hint=hint,
            )
        if self.max_nodes is not None and layout.nodes > self.max_nodes:
            raise InputError(
                f"{layout.instance} has {layout.nodes} nodes, and {self.title} runs on one",
                field="engine",
                hint=hint,
            )
        if self.max_copies is not None and layout.copies > self.max_copies:
            raise InputError(
                f"{layout.instance} has {layout.copies} copies of its layers, and a server of {self.title}"
                f" runs {self.max_copies}",
                field="engine",
                hint=hint,
            )
        for why in layout.irregularities:
            if why not in self.allows:
                message = f"{layout.instance} {why}, which {self.title} cannot run"
                raise InputError(message, field="engine", hint=hint)

    def runs(self, layout: EngineLayout) -> bool:
        """Return whether it runs the layout."""
        return not self.list_limits(layout)

    def list_limits(self, layout: EngineLayout) -> tuple[str, ...]:
        """Return what of a layout it does not run: "unlike tensor parallel sizes in one pipeline"."""
        found = []
        if layout.alone and self.connector is None:
            found.append("prefill and decode apart")
        elif self._cuts_alone(layout):
            found.append(f"{layout.phase} alone in several stages")
        if self.max_nodes is not None and layout.nodes > self.max_nodes:
            found.append("an instance over several nodes")
        if self.max_copies is not None and layout.copies > self.max_copies:
            found.append("several copies of the layers on the GPUs of a node")
        found += [why.limit for why in layout.irregularities if why not in self.allows]
        return tuple(found)

    def _cuts_alone(self, layout: EngineLayout) -> bool:
        """Whether a phase that runs alone is cut as its connector does not take it."""
        cut = layout.alone and len(layout.layers) > 1
        return cut and self.pipelines_in(layout.phase) == "none"

    @property
    def pipelines(self) -> Pipelines:
        """Pipelines over nodes that it runs, as `check_layout` would find by trying."""
        if self.max_nodes == 1:
            return "none"
        free = {Irregularity.WIDE_STAGE, Irregularity.UNLIKE_NODES}
        return "free" if free <= self.allows else "rows"

    def pipelines_in(self, phase: Phase) -> Pipelines:
        """Return the pipelines that it runs in a phase: where phases run apart, its connector limits them."""
        if phase not in (Phase.PREFILL, Phase.DECODE):
            return self.pipelines
        if self.connector is None or phase not in self.connector.pipelines:
            return "none"
        return self.pipelines

    def refuses(self, spec: TransformerSpec, gpu: GpuType) -> str | None:
        """Return why it cannot compute a model on a kind of GPU; None: it can."""
        without = self.refuses_hardware(gpu)
        if without is not None:
            return without
        platform, capability = platform_of(gpu)
        for dtype in {spec.attention_dtype.name, spec.mlp_dtype.name, spec.expert_dtype.name}:
            known = self.formats.get(dtype)
            if known is None or platform not in known.platforms:
                return f"{self.title} has no {dtype} on {gpu.name}"
            if capability < (known.rocm if platform == "rocm" else known.capability):
                return f"{self.title} has no {dtype} on {gpu.name}"
        return None

    def refuses_launch(self, launch: EngineLimits) -> str | None:
        """Return why it does not guess tokens or spread experts as it is told; None: it does."""
        guess = launch.speculative
        if launch.expert_parallel and not (self.defaults and self.defaults.expert_parallel):
            return f"{self.title} does not spread experts over GPUs"
        if guess is None:
            return None
        if self.defaults is None or guess.method not in self.defaults.guesses:
            return f"{self.title} does not decode speculatively with {guess.method}"
        if guess.method in self.defaults.guesses_sync and launch.scheduling == "async":
            return f"{self.title} guesses with {guess.method} after a step, and scheduling async is asked for"
        return None

    def refuses_hardware(self, gpu: GpuType) -> str | None:
        """Return why it runs on no GPU of a kind, whatever the model; None: it does."""
        platform, capability = platform_of(gpu)
        least = self.platforms.get(platform)
        if least is None:
            return f"{self.title} does not run on {gpu.name}"
        if capability < least:
            return f"{self.title} needs compute capability {least:g}, and {gpu.name} has {capability:g}"
        if gpu.shares > 1 and not self.on_shares:
            return f"{self.title} takes what is free on a GPU when it starts, so it runs on no {gpu.name}"
        return None

    def standing(self, layout: EngineLayout, architectures: Collection[str]) -> Standing:
        """Return what is known of it in a layout on GPUs of these architectures."""
        single = layout.nodes == layout.tp == layout.copies == 1
        served_on = self.served_shares_on if layout.on_share else self.served_on
        whole = layout.on_share or not layout.alone
        if single and whole and served_on.issuperset(architectures):
            return Standing.SERVED
        tried = {"one node" if layout.nodes == 1 else "several nodes"}
        tried |= {"shares"} if layout.on_share else set()
        tried |= {"tensor parallel"} if layout.tp > 1 else set()
        tried |= {"copies"} if layout.copies > 1 else set()
        if layout.alone:
            tried.add("phases apart" if layout.nodes == 1 else "phases apart over nodes")
        return Standing.TESTED if tried <= self.tested else Standing.WRITTEN

    def command(self, layout: EngineLayout, served: ServedModel, host: ServerHost) -> ServerCommand:
        """Return the command that serves an instance on one machine, its layout checked."""
        raise NotImplementedError(f"{self.name} is not started as one server")

    def parse(self, command: ServerCommand) -> ParsedCommand:
        """Return what a command of `command` or `rank_command` serves; its launch is as `settle` says.

        InputError: it has options that plans do not set.
        """
        raise NotImplementedError(f"{self.name} is not started as one server")

    def settle(self, launch: EngineLaunch) -> EngineLaunch:
        """Return a launch as a server runs it: with what Atoll sets by itself, less what it is not told."""
        raise NotImplementedError(f"{self.name} is not started as one server")

    def rank_command(
        self, command: ServerCommand, rank: int, nodes: Sequence[str]
    ) -> ServerCommand:
        """Return the command of one of `nodes` where an instance spans machines; the first one leads.

        Addresses and ports of nodes are filled in where it starts: @host:n0, @port:n0.
        """
        raise NotImplementedError(f"{self.name} runs on one machine")

    def list_unkept(self, launch: EngineLaunch, dtype: str) -> tuple[str, ...]:
        """Return the limits of a plan that it does not keep; `dtype` is what it computes in here."""
        del launch, dtype
        return ()

    def kv_flag(self, dtype: str, known: Mapping[str, str]) -> str:
        """Return its name for a number format of the KV cache; one it does not have is refused."""
        if dtype not in known:
            raise InputError(
                f"{self.title} has no KV cache in {dtype}",
                field="kv_cache_dtype",
                hint=f"use {' or '.join(known)}",
            )
        return known[dtype]


# Checks of settings


def is_whole(text: str) -> bool:
    """Return whether a setting is a whole number from 1."""
    return re.fullmatch(r"[1-9][0-9]{0,8}", text) is not None


def is_share(text: str) -> bool:
    """Return whether a setting is a share, above 0 and up to 1."""
    return re.fullmatch(r"0\.[0-9]{1,4}|1\.0", text) is not None


def is_revision(text: str) -> bool:
    """Return whether a setting may be a revision of a repository."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text) is not None


def one_of(*words: str) -> SettingCheck:
    """Return a check that a setting is one of these words."""
    return lambda text: text in words
