"""`atoll gateway`: OpenAI's API for every model in a fabric."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli.beside import CompanionProcess, DashboardOptions, check_dashboard, start_dashboard
from atoll.cli.keys import DB_HELP
from atoll.cli.options import json_field, verb
from atoll.core.errors import MissingDependencyError, UsageError
from atoll.core.extras import require_extras
from atoll.core.files import check_target
from atoll.core.options import option
from atoll.core.quantities import Duration
from atoll.report.terminal import console, note

if TYPE_CHECKING:
    from atoll.fabric.identity.access import Access
    from atoll.runtime.federation.federated_gateway import GatewayProcess, ServiceOptions
    from atoll.runtime.gateway.settings import GatewayFile

app = typer.Typer(add_completion=False)

# Nodes of a fabric come and go more often than the backends of a file.
_QUEUE_S = 30.0
_RETRY_S = 15.0
_ATTEMPTS = 6


class GatewayCommandSettings(DashboardOptions):
    """Options of `atoll gateway`; those of `--config` count where they are not given here."""

    fabric: str | None = option(
        None,
        "Token, @file or open://host:port; else $ATOLL_FABRIC.",
        env="ATOLL_FABRIC",
        repr=False,
    )
    host: str | None = option(None, "Default: this machine only.")
    port: int | None = option(None, "Default 8080; 0: any.", ge=0, le=65535)
    share_port: bool = option(
        False, "Listen beside other gateways on this machine that share the port."
    )
    db: str | None = option(None, DB_HELP, env="ATOLL_DB")
    open_to_all: bool = option(
        False, "Ask for no keys; with --db usage is counted still.", "--open"
    )
    insecure: bool = option(False, "Let --open listen beyond this machine.")
    policy: str | None = option(
        None, "learned (default: weights of a plan, else speeds seen), p2c, least-load, iwrr, ..."
    )
    aliases: dict[str, str] = option(
        {}, "Another name of a model; repeatable.", "--alias", metavar="NAME=MODEL"
    )
    affinity: bool = option(
        True, "Keep conversations where they began.", "--affinity/--no-affinity"
    )
    direct: bool = option(
        True, "Ask nodes without the tunnel where they allow.", "--direct/--no-direct"
    )
    config: Path | None = option(None, "Settings and backends of one's own; followed.")
    name: str = option("gateway", "Its name in the fabric.")
    region: str = option("", "")
    log: Path | None = option(None, "JSON lines, a request each.")
    journal: Path | None = option(None, "Folder for what the database lacks yet.")
    record: Path | None = option(None, "Trace of requests without their text.")
    otel: str | None = option(None, "OpenTelemetry collector, http://host:4318.")
    drain: Duration = option("30s", "How long to finish what runs when stopping.")
    as_json: bool = json_field("Print the address as JSON once it listens.")


@verb(app, GatewayCommandSettings)
def gateway(options: GatewayCommandSettings) -> None:
    """Serve every model of a fabric behind one address, with keys, policies, failover and usage.

    Ctrl-C finishes what runs; a second one stops at once.
    """
    require_extras("serve")
    require_extras("fabric")
    from atoll.routing.policies import gateway_policy_code
    from atoll.runtime.federation.federated_gateway import ServiceOptions
    from atoll.runtime.gateway.standalone import read_config
    from atoll.runtime.http.listen_address import check_listen

    file = read_config(options.config)
    changed = _overrules(options, file)
    settings = file.model_copy(update=changed)
    gateway_policy_code(settings.policy)
    if settings.port:
        check_listen(settings.host, settings.port, share=settings.share_port)
    if options.log is not None:
        check_target(options.log)
    check_dashboard(options)
    _check_open(settings.host, open_to_all=options.open_to_all, insecure=options.insecure)
    service_options = ServiceOptions(
        settings=settings,
        access=_access(options.fabric, needed=not file.backends),
        name=options.name,
        region=options.region,
        database=_database(options.db, open_to_all=options.open_to_all),
        journal=options.journal,
        keys_needed=not options.open_to_all,
        config=options.config,
        overruled=changed,
        log=options.log,
        record=options.record,
        spans=options.otel,
        drain_s=options.drain,
    )
    _run(service_options, options)


def _overrules(options: GatewayCommandSettings, file: GatewayFile) -> dict[str, object]:
    """Return the settings that stay whatever the file says: what is given, and what a fabric needs."""
    changed: dict[str, object] = {"aliases": file.aliases | options.aliases}
    for name in ("host", "port", "share_port", "policy", "affinity", "direct"):
        if name in options.model_fields_set:
            changed[name] = getattr(options, name)
    usual = {
        "policy": "learned",
        "affinity": options.affinity,
        "queue_s": _QUEUE_S,
        "attempts": _ATTEMPTS,
        "deadlines": replace(file.deadlines, retry_s=_RETRY_S),
    }
    return {n: value for n, value in usual.items() if n not in file.model_fields_set} | changed


def _access(text: str | None, *, needed: bool) -> Access | None:
    from atoll.fabric.identity.access import Access

    if not text and not needed:
        return None
    return Access.open(text)


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


def _run(service_options: ServiceOptions, options: GatewayCommandSettings) -> None:
    import gc

    from atoll.runtime.federation.federated_gateway import serve
    from atoll.runtime.http.program import run

    # What is loaded by now stays; a request leaves few cycles, so looking for them can be rarer.
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    beside: list[CompanionProcess] = []

    def ready(service: GatewayProcess) -> None:
        _ready(service, as_json=options.as_json)
        admin = service.gateway.admin_socket
        reached = () if admin is None else ("--admin-socket", str(admin))
        shown = start_dashboard(options, ("--gateway", _url_of(service), *reached))
        beside.extend(() if shown is None else (shown,))

    try:
        run(serve(service_options, ready))
    finally:
        for process in beside:
            process.stop()
    note("stopped")


def _url_of(service: GatewayProcess) -> str:
    host, port = service.address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _ready(service: GatewayProcess, *, as_json: bool) -> None:
    """Say where to ask."""
    url = _url_of(service)
    models = service.gateway.chooser.names()
    admin_socket = service.gateway.admin_socket
    if as_json:
        shown_socket = None if admin_socket is None else str(admin_socket)
        ready_line = {"url": url, "models": models, "admin_socket": shown_socket}
        sys.stdout.write(json.dumps(ready_line) + "\n")
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
