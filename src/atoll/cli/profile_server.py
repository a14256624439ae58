"""`atoll profile --server`: a short load of our own on a server that runs, and what it says of the server."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml

from atoll.catalog.measured_servers import HOST_TIMES
from atoll.cli.profile_settings import ProfileSettings
from atoll.cli.progress import bar
from atoll.core.errors import InputError, UsageError
from atoll.core.files import atomic_write, check_target, load_yaml
from atoll.core.units import format_duration
from atoll.report.terminal import emit, note, table

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable

    from atoll.perf.server_fit import ServerFit, ServerLoad
    from atoll.runtime.local.load_probes import AskWords, LoadProbes


class _Served(NamedTuple):
    """A server as it says it is: what requests call the model, engine and version."""

    name: str
    engine: str


def profile_server(options: ProfileSettings, url: str, model: str) -> None:
    """Measure a server under a load of our own, and write it as an entry of an overlay."""
    from atoll.catalog.load import load_catalog
    from atoll.engines.table import profile_engine
    from atoll.perf.server_fit import fit_server
    from atoll.runtime.local.load_probes import LoadProbes
    from atoll.runtime.local.server_profile import check_address

    if options.out is not None:
        check_target(options.out, (".yaml", ".yml"))
    catalog = load_catalog(options.overlay)
    spec, node = catalog.model(model), catalog.node(options.node_type)
    if options.engine is not None:
        profile_engine(options.engine)
    if node.gpu.shares > 1:
        raise UsageError(
            "a server on a share of a GPU says nothing of others",
            field="--as",
            hint=f"measure it on a whole {node.gpu.whole.name}",
        )
    probes = LoadProbes(
        prompts=read_counts(options.prompts, "--prompts"),
        clients=read_counts(options.clients, "--clients"),
        answer=options.answer,
    )
    check_address(url)
    served = asyncio.run(_look(url, options))
    loads = asyncio.run(_measure(url, served, probes, options.deadline))
    fit = fit_server(
        loads,
        spec.llm,
        node,
        tp=options.tp,
        engine=served.engine,
        model=spec.name,
        date=datetime.now(UTC).date().isoformat(),
    )
    show_fit(fit, options.out, as_json=options.as_json)


async def _look(url: str, options: ProfileSettings) -> _Served:
    """Ask the server what it serves and by which engine; what the options say counts."""
    from atoll.engines.table import profile_engine
    from atoll.runtime.join.offers import Inspector, KnownServer, UnhealthyError

    try:
        offer = await Inspector(KnownServer(url.rstrip("/"))).look(prove=True)
    except UnhealthyError as error:
        raise InputError(f"{url}: {error}", field="--server") from error
    names = [service.model for service in offer.services]
    if options.model is not None and options.model not in names:
        raise InputError(
            f"{url} serves {', '.join(names)}, not {options.model}",
            field="--model",
            hint="leave it out",
        )
    engine = options.engine
    if engine is None:
        if not offer.engine:
            raise UsageError(
                f"{url} does not say which engine it is", hint="add --engine, such as vllm@0.22"
            )
        version = re.match(r"\d{1,4}(\.\d{1,4}){0,2}", offer.version)
        engine = f"{offer.engine}@{version[0]}" if version else offer.engine
        profile_engine(engine)
    return _Served(options.model or names[0], engine)


async def _measure(
    url: str, served: _Served, probes: LoadProbes, deadline_s: float
) -> list[ServerLoad]:
    """Load the server, alone and then with clients at a time, within a deadline."""
    from atoll.runtime.local.load_probes import Words, measure_alone, measure_loops
    from atoll.runtime.local.server_profile import words_client

    begun_s = time.monotonic()
    loads: list[ServerLoad] = []
    alone = 0
    ask: AskWords = words_client(url, served.name)
    words = Words(seed=time.time_ns())
    try:
        async with asyncio.timeout(deadline_s):
            with bar("alone", 1.0) as say:
                loads += await measure_alone(ask, words, probes, say)
            alone = len(loads)
            spent_s = time.monotonic() - begun_s
            fitting = probes.within(loads, 0.7 * (deadline_s - spent_s))
            about_s = max(1.0, fitting.seconds(loads))
            note(
                f"{', '.join(map(str, fitting.clients))} clients at a time, with answers of"
                f" {fitting.answer} tokens: this takes about {about_s:.0f} s"
            )
            with bar("at a time", 1.0) as say:
                async for load in measure_loops(ask, words, fitting, say):
                    loads.append(load)
    except TimeoutError:
        if len(loads) == alone:
            raise InputError(
                f"not done after {format_duration(deadline_s)}",
                field="--deadline",
                hint="give more time, or fewer --clients and shorter --prompts",
            ) from None
        note(f"out of time: more than {loads[-1].clients:.0f} clients were not measured")
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return loads


def read_counts(text: str, field: str) -> tuple[int, ...]:
    """Read whole numbers of 1 and more, separated by commas; each once, in ascending order."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 1 << 20 for part in parts):
        raise InputError(
            f"{text!r} is no list of whole numbers", field=field, hint="write it like 4,16,64"
        )
    return tuple(sorted({int(part) for part in parts}))


def show_fit(fit: ServerFit, out: Path | None, *, as_json: bool) -> None:
    """Show what a server took and as what it is predicted, and write it to an overlay."""
    if out is not None:
        add_server(out, fit)
    data = {"server": fit.server.entry(), "times": [one._asdict() for one in fit.judged]}
    emit(data, as_json, lambda: _draw(fit))
    if out is not None:
        note(
            f"wrote {out}; plan and simulate with it: --overlay {out}, or catalog: of a fleet file"
        )


def _draw(fit: ServerFit) -> ConsoleRenderable:
    def ratio(predicted: float, seen: float) -> str:
        return f"{predicted / seen - 1.0:+.0%}"

    server, entry = fit.server, fit.server.entry()
    host = ", ".join(f"{name} {entry[name]}" for name in HOST_TIMES)
    return table(
        ("load", "time", "measured", "predicted before", "with this"),
        [
            (
                one.what,
                one.of,
                format_duration(one.seen_s),
                ratio(one.before_s, one.seen_s),
                ratio(one.after_s, one.seen_s),
            )
            for one in fit.judged
        ],
        title=f"{server.model} on {server.gpu}:{server.tp}, {server.engine_name}",
        caption=(
            f"Over what is predicted: arithmetic x {server.compute:.3g}, memory x {server.memory:.3g},"
            f" launches x {server.launch:.3g}. Host: {host}."
        ),
        right=("measured", "predicted before", "with this"),
    )


def add_server(path: Path, fit: ServerFit) -> None:
    """Add a server to an overlay, which may have other sections before those that were measured."""
    entry = yaml.safe_dump([fit.server.entry()], sort_keys=False, allow_unicode=True)
    text = path.read_text("utf-8").rstrip("\n") + "\n" if path.exists() else ""
    known = (load_yaml(path) if text else None) or {}
    if not isinstance(known, dict):
        raise InputError("not an overlay", path=path, hint="name another file")
    added = text + ("" if "servers" in known else "servers:\n") + entry
    listed = [*(known.get("servers") or ()), fit.server.entry()]
    try:
        is_added = yaml.safe_load(added) == {**known, "servers": listed}
    except yaml.YAMLError:
        is_added = False
    if not is_added:
        raise InputError(
            "a server can be added where `servers` is the last section, as a list without indents",
            path=path,
            hint="name another file; --overlay may be repeated",
        )
    atomic_write(path, added)
