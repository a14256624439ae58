"""An engine: everything that Atoll has to know of a program that serves language models.

An engine is a subclass of `Engine` with an instance called ENGINE, in a file of its own beside this one. What
it leaves out is what a plain OpenAI server behind a URL would say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

from atoll.core.errors import InputError
from atoll.engines.limits import EngineLaunch
from atoll.engines.profile import EngineDefaults

Figure = Literal["running", "waiting", "kv", "tokens"]
"""Figures read from an engine's metrics: requests, share of the KV cache (0 to 1), tokens made so far."""
ResumeRule = Literal["repeat", "text", "tokens"]
"""How a broken stream goes on elsewhere: only by repeating a request that gives the same answer again, from
the text so far, or from its tokens with the exact state."""
WeightsForm = Literal["repository", "gguf", "folder"]
"""Source that an engine loads: a repository's name or a folder, a .gguf file here, or a folder here."""
SettingCheck = Callable[[str], bool]


class Irregularity(StrEnum):
    """Why a layout is no row of equal nodes with one copy of each layer range, as errors say it."""

    PARTIAL = "has nodes that run only a part of their layers"
    WIDE_STAGE = "has several nodes in a stage"
    UNLIKE_NODES = "mixes node types"
    OVERLAP = "has layer ranges that overlap"


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Nodes and layers of an instance, as far as an engine has to know them.

    `tp` GPUs split a layer and `copies` of it stand side by side, both as on the first node. `layers` are
    the numbers of layers of the stages, in order.
    """

    instance: str
    nodes: int
    tp: int
    copies: int
    layers: tuple[int, ...]
    irregularities: tuple[Irregularity, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to serve: the source of the weights and the names requests ask for.

    `launch` are the limits that a plan reckons with; None leaves the engine as it comes.
    """

    source: str
    names: tuple[str, ...]
    launch: EngineLaunch | None = None


@dataclass(frozen=True, slots=True)
class ServerHost:
    """Where a server starts: its port (a number or a placeholder), the Python there, and its threads."""

    port: str
    python: str
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A command with the environment it needs beside the choice of GPUs."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


class Engine:
    """Name, layouts, launch, health, metrics, resumption, settings and defaults of an engine."""

    name: ClassVar[str]
    title: ClassVar[str]
    """As its makers write it."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names under which nodes announce it."""
    preference: ClassVar[int] = 100
    """Place in the order in which engines are tried for an instance; the smallest comes first."""

    # Starting it
    launches: ClassVar[bool] = False
    """Whether Atoll can start it: `atoll serve`, `up`, `assign`."""
    staged: ClassVar[bool] = False
    """Whether an instance is a process a node with one in front of them, which only Atoll's own engine is."""
    weights: ClassVar[WeightsForm] = "repository"
    on_cores: ClassVar[bool] = False
    """Whether it computes on CPU cores, and is given some."""
    max_nodes: ClassVar[int | None] = None
    allows: ClassVar[frozenset[Irregularity]] = frozenset()
    """Irregular layouts that it runs."""
    phases_apart: ClassVar[bool] = False
    """Whether instances of it run prefill or decode alone."""
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
    continues_messages: ClassVar[bool] = False
    """Whether it goes on from a last message of the assistant without being told to."""
    completion_tokens: ClassVar[int | None] = 16
    """Tokens it makes for /v1/completions without `max_tokens`, as OpenAI does; None: as many as it likes."""
    tokenizes_messages: ClassVar[bool] = True
    """Whether /tokenize takes vLLM's requests; else llama.cpp's, with a text alone."""
    vllm_tokens: ClassVar[bool] = False
    """Whether /tokenize and /detokenize answer in vLLM's form."""

    # Planning with it
    defaults: ClassVar[EngineDefaults | None] = None
    """Times and limits that plans reckon with; None: nobody plans with it."""
    admits_by_prompts: ClassVar[bool] = False
    """Whether a request runs as soon as the KV cache has room for its prompt; else also for its answer."""
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

    def check_layout(self, layout: EngineLayout) -> None:
        """Raise InputError unless it runs the layout."""
        hint = "use the engine 'atoll'"
        if self.max_nodes is not None and layout.nodes > self.max_nodes:
            raise InputError(
                f"{layout.instance} has {layout.nodes} nodes, and {self.title} runs on one",
                field="engine",
                hint=hint,
            )
        for why in layout.irregularities:
            if why not in self.allows:
                message = f"{layout.instance} {why}, which {self.title} cannot run"
                raise InputError(message, field="engine", hint=hint)

    def runs(self, layout: EngineLayout) -> bool:
        """Return whether it runs the layout."""
        try:
            self.check_layout(layout)
        except InputError:
            return False
        return True

    def command(self, layout: EngineLayout, served: ServedModel, host: ServerHost) -> ServerCommand:
        """Return the command that serves an instance on one machine, its layout checked."""
        raise NotImplementedError(f"{self.name} is not started as one server")

    def rank_command(self, command: ServerCommand, rank: int, ranks: int, first: str) -> list[str]:
        """Return the command of one machine where an instance spans several; `first` is the leading node."""
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
