"""Which weights a plan needs, and whether what lies in a folder is them.

A plan is made for one model a service: its layers, its sizes. Other weights answer differently, and faster or
slower than planned; they are served only where somebody asked for a stand-in, and every answer says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError, InputError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.catalog.checkpoints import Checkpoint
    from atoll.catalog.models import ModelSpec
    from atoll.plan.plan import Plan

STAND_IN_MODEL = "smollm2-135m"
"""The model whose weights Atoll fetches by itself: small enough for any machine."""
_SIZES = (
    ("layers", "num_hidden_layers"),
    ("hidden", "hidden_size"),
    ("heads", "num_attention_heads"),
    ("kv_heads", "num_key_value_heads"),
)
"""Pairs that must agree: a field of the catalog's shapes, and of config.json."""


@dataclass(frozen=True, slots=True)
class NeededWeights:
    """Weights that a service needs: a model by name, its layers and shapes; None where nobody says.

    `checkpoint` is where they are published: as the plan says, else as the catalog does now.
    """

    service: str
    model: str | None
    layers: int | None = None
    spec: ModelSpec | None = None
    checkpoint: Checkpoint | None = None

    @property
    def described(self) -> str:
        """The service and its model: "chat (qwen3-32b)"."""
        return f"{self.service} ({self.model})" if self.model else self.service

    @property
    def gguf(self) -> str | None:
        """Where engines that load GGUF files alone find the weights; None: nobody knows."""
        known = self.spec.gguf if self.spec is not None else None
        return None if known is None else known.source

    @property
    def advice(self) -> str:
        """How to name the weights."""
        known = self.checkpoint
        return f"`models` {self.service}={known.source if known else 'FOLDER'}"


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where the weights of a service come from; `stand_in` says instead of what where they are others.

    `quantization` is the format that an engine turns them into as it loads them, `gguf` where those find
    them that load GGUF files alone.
    """

    source: str
    stand_in: str | None = None
    quantization: str | None = None
    gguf: str | None = None


def list_needed(
    models: Mapping[str, str],
    services: Iterable[str],
    catalog: Catalog,
    plan: Plan | None = None,
) -> list[NeededWeights]:
    """Return what each service needs; `models` are the names of theirs.

    A plan knows their layers, and the weights that it was reckoned with.
    """
    layers: dict[str, int] = {}
    for instance in plan.instances if plan is not None else ():
        last = max(node.end for node in instance.nodes)
        layers[instance.service] = max(last, layers.get(instance.service, 0))
    needed = []
    for service in services:
        name = models.get(service)
        try:
            spec = None if name is None else catalog.model(name)
        except AtollError:  # of a fleet file's own catalog, which is not at hand
            spec = None
        planned = None if plan is None else plan.checkpoints.get(service)
        known = planned or (None if spec is None else spec.checkpoint)
        needed.append(NeededWeights(service, name, layers.get(service), spec, known))
    return needed


def choose_sources(
    needed: Sequence[NeededWeights],
    given: Sequence[str],
    stand_in_source: str,
    *,
    stand_in: bool,
    published: bool = False,
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, WeightSource]:
    """Return where the weights of each service come from: `given` as SERVICE=SOURCE or SOURCE for all.

    Weights that Atoll has by itself serve their own model, and with `stand_in` all that nothing is given
    for; with `published` it is the repository that plan or catalog name. Else UsageError says what is missing
    and how to get it; `reasons` say of services why they are not on GPUs, whose engines get it themselves.
    """
    named = _read_given(given, [each.service for each in needed])
    chosen: dict[str, WeightSource] = {}
    missing: list[NeededWeights] = []
    for each in needed:
        known = each.checkpoint
        if each.service in named:
            source = named[each.service]
            # The same repository, at whatever revision, is turned into the same format.
            same = known is not None and source.partition("@")[0] == f"hf://{known.repository}"
            at_load = known.quantization if known is not None and same else None
            gguf = each.gguf if same else None
            chosen[each.service] = WeightSource(source, quantization=at_load, gguf=gguf)
        elif _is_stand_in_itself(each):
            chosen[each.service] = WeightSource(stand_in_source)
        elif stand_in:
            instead = f"{STAND_IN_MODEL} instead of {each.model or 'its own model'}"
            chosen[each.service] = WeightSource(stand_in_source, instead)
        elif published and known is not None:
            chosen[each.service] = WeightSource(
                known.source, quantization=known.quantization, gguf=each.gguf
            )
        else:
            missing.append(each)
    if missing:
        which = ", ".join(each.described for each in missing)
        why = next((reasons[each.service] for each in missing if reasons.get(each.service)), "")
        advice = " ".join(each.advice for each in missing[:3])
        unnamed = " its `fleet` file says which models they are;" if _lack_names(missing) else ""
        raise UsageError(
            f"the plan's weights are needed: {which}" + (f" on cores, since {why}" if why else ""),
            hint=f"{advice} (a folder, a .gguf file or hf://ORG/NAME);{unnamed} `stand_in` tries the plan "
            f"with {STAND_IN_MODEL} instead",
        )
    return chosen


def _read_given(texts: Sequence[str], services: Sequence[str]) -> dict[str, str]:
    """Read `SERVICE=SOURCE` and plain `SOURCE`, which is for all; what comes later counts."""
    named: dict[str, str] = {}
    for text in texts:
        name, sign, source = text.partition("=")
        if sign and "/" not in name and ":" not in name:
            if name not in services:
                raise UnknownNameError("model", name, services, field="models")
            if not source:
                raise UsageError(
                    f"no weights are named for {name}", field="models", hint=f"write {name}=FOLDER"
                )
            named[name] = source
        else:
            named = dict.fromkeys(services, text)
    return named


def _is_stand_in_itself(needed: NeededWeights) -> bool:
    return needed.spec is not None and needed.spec.name.partition("@")[0] == STAND_IN_MODEL


def _lack_names(missing: Sequence[NeededWeights]) -> bool:
    return any(each.model is None for each in missing)


def check_weights(needed: NeededWeights, folder: Path) -> None:
    """Raise InputError unless the model in a folder has the layers and sizes of the one that was planned."""
    found = _read_sizes(folder)
    expected: dict[str, int] = {}
    if needed.spec is not None and needed.spec.has_llm:
        shapes = needed.spec.llm
        expected = {field: int(getattr(shapes, field)) for field, _ in _SIZES}
    if needed.layers is not None:
        expected["layers"] = needed.layers
    wrong = [name for name in expected if name in found and found[name] != expected[name]]
    if wrong:
        has = ", ".join(f"{found[name]} {_words(name)}" for name in wrong)
        wants = ", ".join(f"{expected[name]}" for name in wrong)
        raise InputError(
            f"these are not the weights of {needed.described}: they have {has}, and the plan is for {wants}",
            path=folder,
            field="models",
            hint=f"{needed.advice}, or `stand_in` without `models` to try the plan with {STAND_IN_MODEL}",
        )


def _words(name: str) -> str:
    return {"hidden": "wide", "kv_heads": "KV heads"}.get(name, name)


def _read_sizes(folder: Path) -> dict[str, int]:
    """Read the sizes that config.json states; what it leaves out is not compared."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner = config.get("text_config") or config
    sizes = {field: inner[key] for field, key in _SIZES if isinstance(inner.get(key), int)}
    if "kv_heads" not in sizes and "heads" in sizes:
        sizes["kv_heads"] = sizes["heads"]
    return sizes
