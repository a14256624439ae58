"""`atoll gateway`: OpenAI's API for every model in a fabric."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.keys import DB_HELP
from atoll.cli.serving import need_fabric, need_serving
from atoll.core.errors import MissingDependencyError, UsageError
from atoll.core.units import parse_duration
from atoll.report.terminal import console, note

if TYPE_CHECKING:
    from atoll.fabric.identity.access import Access
    from atoll.runtime.federation.service import GatewayProcess, ServiceOptions

app = typer.Typer(add_completion=False)

# Nodes of a fabric come and go more often than the backends of a file.
_QUEUE_S = 30.0
_RETRY_S = 15.0
_ATTEMPTS = 6


@app.command()
def gateway(
    fabric: Annotated[
        str | None,
        typer.Option(
            "--fabric",
            envvar="ATOLL_FABRIC",
            show_envvar=False,
            help="Token, @file or open://host:port; else $ATOLL_FABRIC.",
        ),
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Default: this machine only.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Default 8080; 0: any.")] = None,
    db: Annotated[
        str | None, typer.Option("--db", envvar="ATOLL_DB", show_envvar=False, help=DB_HELP)
    ] = None,
    open_to_all: Annotated[
        bool, typer.Option("--open", help="Ask for no keys; with --db usage is counted still.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let --open listen beyond this machine.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help="learned (default: weights of a plan, else speeds seen), p2c, least-load, iwrr, ...",
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="NAME=MODEL", help="Another name of a model; repeatable."),
    ] = None,
    affinity: Annotated[
        bool,
        typer.Option("--affinity/--no-affinity", help="Keep conversations where they began."),
    ] = True,
    direct: Annotated[
        bool,
        typer.Option("--direct/--no-direct", help="Ask nodes without the tunnel where they allow."),
    ] = True,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings and backends of one's own; followed.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Its name in the fabric.")] = "gateway",
    region: Annotated[str, typer.Option("--region")] = "",
    log: Annotated[Path | None, typer.Option("--log", help="JSON lines, a request each.")] = None,
    journal: Annotated[
        Path | None, typer.Option("--journal", help="Folder for what the database lacks yet.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", help="Trace of requests without their text.")
    ] = None,
    otel: Annotated[
        str | None, typer.Option("--otel", help="OpenTelemetry collector, http://host:4318.")
    ] = None,
    drain: Annotated[
        str, typer.Option("--drain", help="How long to finish what runs when stopping.")
    ] = "30s",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the address as JSON once it listens.")
    ] = False,
) -> None:
    """Serve every model of a fabric behind one address, with keys, policies, failover and usage.

    Ctrl-C finishes what runs; a second one stops at once.
    """
    need_serving()
    need_fabric()
    from atoll.routing.policies import gateway_policy_code
    from atoll.runtime.federation.service import ServiceOptions
    from atoll.runtime.gateway.standalone import read_config

    file = read_config(config)
    changed: dict[str, object] = {"affinity": affinity, "direct": direct}
    given = {"host": host, "port": port, "policy": policy}
    changed |= {key: value for key, value in given.items() if value is not None}
    if policy is None and "policy" not in file.model_fields_set:
        changed["policy"] = "learned"
    changed["aliases"] = file.aliases | _aliases(alias or [])
    if "queue_s" not in file.model_fields_set:
        changed["queue_s"] = _QUEUE_S
    if "attempts" not in file.model_fields_set:
        changed["attempts"] = _ATTEMPTS
    if "deadlines" not in file.model_fields_set:
        changed["deadlines"] = replace(file.deadlines, retry_s=_RETRY_S)
    settings = file.model_copy(update=changed)
    gateway_policy_code(settings.policy)
    _check_open(settings.host, open_to_all=open_to_all, insecure=insecure)
    options = ServiceOptions(
        settings=settings,
        access=_access(fabric, needed=not file.backends),
        name=name,
        region=region,
        database=_database(db, open_to_all=open_to_all),
        journal=journal,
        keys_needed=not open_to_all,
        config=config,
        overruled=changed,
        log=log,
        record=record,
        spans=otel,
        drain_s=parse_duration(drain, field="--drain"),
    )
    _run(options, as_json=as_json)


def _access(text: str | None, *, needed: bool) -> Access | None:
    from atoll.fabric.identity.access import Access

    if not text and not needed:
        return None
    return Access.open(text)


def _aliases(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, sign, model = text.partition("=")
        if not sign or not name or not model:
            raise UsageError(f"cannot read {text!r}", field="--alias", hint="write NAME=MODEL")
        found[name] = model
    return found


def _check_open(host: str, *, open_to_all: bool, insecure: bool) -> None:
    from atoll.fabric.identity.access import is_loopback

    if open_to_all and not insecure and not is_loopback(host):
        raise UsageError(
            f"without keys anybody who reaches {host} could use every node",
            field="--open",
            hint="make keys with `atoll keys create`, or insist with --insecure",
        )


def _database(url: str | None, *, open_to_all: bool) -> str | None:
    if url is None and open_to_all:
        return None
    for package in ("sqlalchemy", "alembic"):
        if find_spec(package) is None:
            raise MissingDependencyError(package, "accounts", needed_for="keys and usage")
    from atoll.runtime.accounts.database import default_url

    return url or default_url()


def _run(options: ServiceOptions, *, as_json: bool) -> None:
    import gc

    from atoll.runtime.federation.service import serve
    from atoll.runtime.http.loop import run

    # What is loaded by now stays; a request leaves few cycles, so looking for them can be rarer.
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    run(serve(options, lambda service: _ready(service, as_json=as_json)))
    note("stopped")


def _ready(service: GatewayProcess, *, as_json: bool) -> None:
    """Say where to ask."""
    host, port = service.address
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    models = service.gateway.chooser.names()
    admin_socket = service.gateway.admin_socket
    if as_json:
        shown_socket = None if admin_socket is None else str(admin_socket)
        said = {"url": url, "models": models, "admin_socket": shown_socket}
        sys.stdout.write(json.dumps(said) + "\n")
    else:
        body = json.dumps(
            {
                "model": models[0] if models else "MODEL",
                "messages": [{"role": "user", "content": "Hello!"}],
                "stream": True,
            }
        )
        key = " -H 'authorization: Bearer KEY'" if service.options.keys_needed else ""
        out = console()
        out.print(f"answers at {url}/v1 until Ctrl-C", soft_wrap=True)
        out.print(f"models now: {', '.join(models) or 'none yet'}", soft_wrap=True)
        if admin_socket is not None:
            out.print(f"administered at {admin_socket}", soft_wrap=True)
        out.print(
            f"\n  curl -N {url}/v1/chat/completions{key} -d {shlex.quote(body)}\n", soft_wrap=True
        )
    sys.stdout.flush()
