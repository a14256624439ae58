"""Rates of components for `atoll profile`: measured here, or derived from measurements of executors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.profile_settings import ProfileSettings
from atoll.cli.progress import live_line
from atoll.core.errors import InputError, MissingDependencyError, UsageError, shorten
from atoll.core.files import atomic_write, check_target, load_yaml, read_text_limited
from atoll.core.ids import parse_node_type
from atoll.core.units import format_duration
from atoll.report.terminal import console, emit, table

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable, Group

    from atoll.perf.components.measured import MeasuredRate
    from atoll.runtime.local.component_profile import ComponentProfile
    from atoll.runtime.local.executor_profile import ExecutorRates

_ENDINGS = (".yaml", ".yml", ".json")
_UNITS = {"image": "images/s", "audio_s": "s of sound/s", "speech_s": "s of speech/s"}
_MAX_PAGE_BYTES = 8 * 2**20
_PAGE_S = 10.0
"""How long an executor may take to give its metrics."""
Tree = dict[str, object]


def show_component(asked: ProfileSettings, part: str) -> None:
    """Measure a component of a model of the catalog on this machine, and print or write its rate."""
    from atoll.catalog.load import load_catalog
    from atoll.runtime.local.component_profile import (
        RunOptions,
        check_component,
        find_device,
        profile_component,
    )
    from atoll.runtime.local.component_sections import ItemOptions

    out = asked.out
    if asked.model is None:
        raise UsageError(
            "--component needs --model", hint="name a model of the catalog: atoll catalog models"
        )
    on = _one_gpu(asked.node_type)
    if out is not None:
        check_target(out, _ENDINGS)
    spec = load_catalog().model(asked.model)
    check_component(spec, part)
    name = asked.name or spec.name
    width, height = _size(asked.size)
    item = ItemOptions(width, height, asked.seconds, asked.text_tokens, asked.steps, asked.guided)
    options = RunOptions(_batches(asked.batch), asked.items, asked.shrink, asked.threads)
    if find_spec("torch") is None:
        raise MissingDependencyError("torch", "engine", needed_for="running a component")
    device = find_device()
    if device != "cpu" and on == "CPU":
        raise InputError(
            "the component would run on a GPU, not on a CPU",
            field="--as",
            hint="name the GPU as the catalog does, like H200:1",
        )
    with live_line("building") as say:
        found = profile_component(spec, part, item, options, say)
    rate = found.rate(on)
    data = {
        **found.model_dump(mode="json"),
        "best_batch": found.best.batch,
        "rates": _rates([rate]),
    }
    emit(data, asked.as_json, lambda: _draw(found, rate, name))
    _write(out, name, [rate])


def show_executors(asked: ProfileSettings, path: Path) -> None:
    """Turn measured throughputs of executors into seconds and rates, and print or write them."""
    from atoll.runtime.local.executor_profile import derive_rates, fill_in, read_executor_profile

    service, out = asked.name or asked.model, asked.out
    if out is not None:
        check_target(out, _ENDINGS)
        if service is None:
            raise UsageError("--out needs --name", hint="name the service of the fleet file")
    kind = parse_node_type(asked.node_type, field="--as")
    profile = read_executor_profile(path)
    try:
        profile = fill_in(profile, lambda page: _read_page(page, path.parent))
        found = derive_rates(profile, kind.gpu if kind.gpu_count == 1 else str(kind))
    except InputError as error:
        raise error.locate(path=path) from error
    data = {
        "alpha": found.alpha,
        "seconds": [
            {
                "executor": one.executor,
                "on": one.on,
                "class": one.klass,
                "part": one.part,
                "seconds": one.seconds,
            }
            for one in found.seconds
        ],
        "rates": _rates(found.rates),
    }
    emit(data, asked.as_json, lambda: _draw_executors(found, path))
    _write(out, service or "", found.rates)


def _read_page(where: str, folder: Path) -> str:
    """Return the metrics of an executor that runs, or those that were saved in a file beside the profile."""
    import urllib.error
    import urllib.request

    if not where.startswith(("http://", "https://")):
        return read_text_limited(folder / where, _MAX_PAGE_BYTES)
    try:
        with urllib.request.urlopen(where, timeout=_PAGE_S) as answer:
            page: bytes = answer.read(_MAX_PAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{shorten(where)} does not answer: {error}", hint="is it running?"
        ) from error
    if len(page) > _MAX_PAGE_BYTES:
        raise InputError(
            f"{shorten(where)} is larger than any page of metrics", hint="name /metrics"
        )
    return page.decode("utf-8", "replace")


def _one_gpu(node_type: str) -> str:
    kind = parse_node_type(node_type, field="--as")
    if kind.gpu_count != 1:
        raise InputError(
            f"a component is measured on one GPU, {kind} has {kind.gpu_count}",
            field="--as",
            hint=f"write {kind.gpu}:1; its rate counts for each GPU",
        )
    return kind.gpu


def _size(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    wide, cross, high = text.lower().partition("x")
    if not (cross and wide.isdecimal() and high.isdecimal() and len(text) < 16):
        raise InputError(
            f"{shorten(text)!r} is no size in pixels",
            field="--size",
            hint="write WIDTHxHEIGHT, like 448x448",
        )
    return int(wide), int(high)


def _batches(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 6 for word in words):
        raise InputError(
            f"{shorten(text)!r} are no batch sizes", field="--batch", hint="write 1,2,4,8"
        )
    return tuple(sorted({int(word) for word in words}))


def _draw(found: ComponentProfile, rate: MeasuredRate, name: str) -> ConsoleRenderable:
    entry = f"{{{rate.part}: {{{rate.on}: {{{rate.unit}: {_per_s(rate)}}}}}}}"
    lines = [
        f"An item is one {found.item}.",
        f"Best: {rate.per_s:.4g} {_UNITS[found.unit]} in batches of {found.best.batch}.",
        *(f"Note: {text}." for text in found.notes),
        *([f"Note: a CPU plays {rate.on}."] if found.device == "cpu" != rate.on.lower() else []),
        f"For the fleet file, in services.{name}: rates: {entry}",
    ]
    drawn = table(
        ("batch", "takes", "per item", "items/s"),
        [
            (
                one.batch,
                format_duration(one.seconds),
                format_duration(one.seconds / one.batch),
                f"{one.items_per_s:.4g}",
            )
            for one in found.batches
        ],
        title=f"{found.part} of {found.model} on {found.device}, {found.dtype}",
        right=("batch", "takes", "per item", "items/s"),
    )
    return _above(drawn, lines)


def _draw_executors(found: ExecutorRates, path: Path) -> ConsoleRenderable:
    alone = [rate for rate in found.rates if "+" not in rate.part]
    rates = ", ".join(f"{r.part} {_per_s(r)} on {r.on}" for r in alone)
    whole = ", ".join(f"{r.part} {_per_s(r)} on {r.on}" for r in found.rates if r not in alone)
    lines = [f"Requests that use a part, of parts alone: {rates}."]
    lines += [f"Requests of the mix, of whole executors: {whole}."] if whole else []
    drawn = table(
        ("executor", "on", "class", "part", "seconds", "slowed by"),
        [
            (
                one.executor,
                one.on,
                one.klass,
                one.part,
                format_duration(one.seconds),
                f"{found.alpha[one.executor]:.3g}",
            )
            for one in found.seconds
        ],
        title=f"Seconds of a request, from {path.name}",
        right=("seconds", "slowed by"),
    )
    return _above(drawn, lines)


def _above(drawn: ConsoleRenderable, lines: Iterable[str]) -> Group:
    """A table with lines below it that are not folded to its width."""
    from rich.console import Group
    from rich.text import Text

    return Group(drawn, *(Text(line) for line in lines))


def _per_s(rate: MeasuredRate) -> str:
    return f"{rate.per_s:.6g}/s"


def _rates(rates: Iterable[MeasuredRate]) -> dict[str, dict[str, dict[str, object]]]:
    """Rates as a fleet file has them: part -> GPU or node type -> unit -> rate, or seconds of batches."""
    found: dict[str, dict[str, dict[str, object]]] = {}
    for rate in rates:
        table = {size: f"{seconds:.6g}s" for size, seconds in rate.batches}
        found.setdefault(rate.part, {}).setdefault(rate.on, {})[rate.unit] = table or _per_s(rate)
    return found


def _write(out: Path | None, name: str, rates: Iterable[MeasuredRate]) -> None:
    """Add rates to a file that has nothing but rates."""
    if out is None:
        return
    import yaml

    known: Tree = {}
    if out.exists():
        known = _known(out)
    merged = _merge(known, {"services": {name: {"rates": _rates(rates)}}})
    if out.suffix.lower() == ".json":
        atomic_write(out, json.dumps(merged, indent=2) + "\n")
    else:
        atomic_write(out, yaml.safe_dump(merged, sort_keys=False, allow_unicode=True))
    console(stderr=True).print(f"wrote {out}", markup=False)


def _known(out: Path) -> Tree:
    """The rates of a file that was written before; others would lose what else they say."""
    data = load_yaml(out)
    # `models` is the older name of the key.
    key = next(
        (k for k in ("services", "models") if isinstance(data, dict) and set(data) == {k}), ""
    )
    services = data[key] if isinstance(data, dict) and key else None
    if not isinstance(services, dict) or not all(
        isinstance(entry, dict) and set(entry) == {"rates"} and isinstance(entry["rates"], dict)
        for entry in services.values()
    ):
        raise InputError(
            "the file has more than rates, which would be lost",
            path=out,
            field="--out",
            hint="name a new file, and copy its rates into this one",
        )
    return {"services": services}


def _merge(old: Tree, new: Tree) -> Tree:
    """Mappings of both, level by level; of anything else the new."""
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            merged[key] = _merge(before, value)
        else:
            merged[key] = value
    return merged
