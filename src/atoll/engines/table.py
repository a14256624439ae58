"""The table of engines: every file of this package that defines ENGINE has a row."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import InputError, UnknownNameError
from atoll.core.ids import Phase
from atoll.engines.engine import Engine
from atoll.engines.limits import EngineLimits
from atoll.engines.profile import NO_LIMITS, EngineProfile

if TYPE_CHECKING:
    from atoll.catalog.gpus import GpuType
    from atoll.catalog.transformer import TransformerSpec

AUTO = "auto"
"""Asks for the first engine in the order of preference that runs an instance."""
FREE = "free"
"""In the place of engines to plan with: any layout, also one that no engine runs."""
UNKNOWN = "openai"
"""Kind of a server that nobody recognises."""


def _read_package() -> dict[str, Engine]:
    package = __name__.rpartition(".")[0]
    engines: list[Engine] = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        found = getattr(import_module(f"{package}.{module.name}"), "ENGINE", None)
        if isinstance(found, Engine):
            engines.append(found)
    engines.sort(key=lambda engine: (engine.preference, engine.name))
    return {engine.name: engine for engine in engines}


ENGINES: dict[str, Engine] = _read_package()
"""Engines by name, in the order of preference."""


def find_engine(name: str, *, field: str | None = None) -> Engine:
    """Return an engine by name."""
    engine = ENGINES.get(name)
    if engine is None:
        raise UnknownNameError("engine", name, ENGINES, field=field)
    return engine


def find_launched(name: str, *, field: str | None = None) -> Engine:
    """Return an engine by name that Atoll can start."""
    return _find_among(name, lambda engine: engine.launches, field)


def find_executor_engine(name: str, *, field: str | None = None) -> Engine:
    """Return an engine by name that can be all executors of an any-to-any service."""
    return _find_among(name, lambda engine: engine.runs_executors, field)


def list_launched() -> tuple[Engine, ...]:
    """Return the engines that Atoll can start, in the order of preference."""
    return tuple(engine for engine in ENGINES.values() if engine.launches)


def find_planned(name: str, *, field: str | None = None) -> Engine:
    """Return an engine by name that instances can be planned for."""
    return _find_among(name, _is_planned, field)


def list_planned() -> tuple[Engine, ...]:
    """Return the engines that instances can be planned for, in the order of preference."""
    planned = (engine for engine in ENGINES.values() if _is_planned(engine))
    return tuple(sorted(planned, key=lambda engine: engine.plan_preference or engine.preference))


def read_engines(names: Iterable[str], *, field: str) -> tuple[str, ...]:
    """Return engines to plan with as a problem has them, each once: none where "free" asks for any layout."""
    asked = tuple(dict.fromkeys(names))
    if asked == (FREE,):
        return ()
    return tuple(find_planned(name, field=field).name for name in asked)


def settle_placed(names: Sequence[str], engine: str, *, field: str) -> str:
    """Return the engine that machines of a fixed cluster are placed for: the one named, else `engine`."""
    if len(names) > 1:
        raise InputError(
            f"machines of a fixed cluster are placed for one engine, not for {', '.join(names)}",
            field=field,
            hint="name one",
        )
    return names[0] if names else engine


def _is_planned(engine: Engine) -> bool:
    return engine.launches and engine.defaults is not None


def recognise(name: str) -> Engine | None:
    """Return an engine by a name under which nodes announce it; None: it is none that is known."""
    wanted = name.strip().lower()
    for engine in ENGINES.values():
        if wanted == engine.name or wanted in engine.aliases:
            return engine
    return None


def list_kinds() -> tuple[str, ...]:
    """Return the kinds that a backend of a gateway may have."""
    return tuple(dict.fromkeys(engine.kind for engine in ENGINES.values()))


def profile_engine(
    name: str,
    gpu: GpuType | None = None,
    limits: EngineLimits | None = None,
    draft: TransformerSpec | None = None,
    copies: int | None = None,
) -> EngineProfile:
    """Return an engine's profile by name; "none" has no host time and gives the time of kernels run alone.

    What `limits` leave open is what the engine takes on this kind of GPU (None: on a large one). A name may
    have a version: "vllm@0.12" is vLLM as it schedules by itself in that version. `draft` is the small model
    that guesses tokens, where it is one of the catalog, `copies` are those that share their experts.
    """
    engine, _, version = name.partition("@")
    defaults = _find_among(engine, lambda found: found.defaults is not None).defaults
    assert defaults is not None
    if version:
        limits = EngineLimits.model_validate((limits or NO_LIMITS).given | {"version": version})
    return defaults.profile(engine, gpu, limits, draft, copies)


def is_asked_in_turn(name: str, phase: Phase) -> bool:
    """Return whether instances of a phase are asked alone: some that decode are, others beside prefill."""
    connector = find_engine(name).connector
    return phase is not Phase.DECODE or connector is None or connector.recomputes


def _find_among(name: str, which: Callable[[Engine], bool], field: str | None = None) -> Engine:
    known = {key: engine for key, engine in ENGINES.items() if which(engine)}
    if name not in known:
        raise UnknownNameError("engine", name, known, field=field)
    return known[name]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine by name, with the limits it is started with, and the `draft` model that they name.

    `copies` of the layers share their experts where it spreads them; None: those on a node.
    """

    name: str
    limits: EngineLimits = NO_LIMITS
    draft: TransformerSpec | None = None
    copies: int | None = None

    def on(self, gpu: GpuType | None) -> EngineProfile:
        """Return the engine's profile on a kind of GPU; None: on a large one."""
        return profile_engine(self.name, gpu, self.limits, self.draft, self.copies)
