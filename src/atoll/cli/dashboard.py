"""`atoll dashboard`: pages that show and run what is served, planned and used."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli.beside import DASHBOARD_PORT, end_with_input
from atoll.cli.console_inside import PlannerInside, load_api
from atoll.cli.find_gateway import find_gateway, read_gateway
from atoll.cli.options import VerbSettings, json_field, verb
from atoll.core.errors import InputError, UsageError
from atoll.core.extras import require_extras
from atoll.core.files import read_text_limited
from atoll.core.options import option
from atoll.core.paths import runtime_dir
from atoll.core.roles import Role, read_role
from atoll.report.terminal import console, note

if TYPE_CHECKING:
    from atoll.dashboard.server import DashboardSettings
    from atoll.dashboard.services import ServiceAddress, ServiceDirectory
    from atoll.dashboard.trust import ProxyTrust

app = typer.Typer(add_completion=False)
TOKEN_VARIABLE = "ATOLL_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
_proxied = partial(option, panel="Behind a reverse proxy")
_VALID = "good once, for 10 minutes; `atoll dashboard --link` makes another"


class DashboardCommandSettings(VerbSettings):
    """Options of `atoll dashboard`."""

    gateway: str | None = option(
        None,
        "The gateway: a URL, its admin socket, or the name of a fleet. Default: what runs here.",
        metavar="URL|SOCKET|FLEET",
    )
    admin_socket: Path | None = option(None, "The admin socket of the gateway at a URL.")
    admin_token: Path | None = option(
        None, "File with the gateway's admin token; else $ATOLL_ADMIN_TOKEN is the token."
    )
    fleets: tuple[Path, ...] = option(
        (), "A fleet file to plan with; repeatable.", "--fleet", metavar="FILE"
    )
    states: tuple[Path, ...] = option(
        (),
        "The folder of a fleet that is operated with --state; repeatable.",
        "--state",
        metavar="DIR",
    )
    planner: bool = option(
        True,
        "Plan and simulate, too; workers do so in processes beside.",
        "--planner/--no-planner",
    )
    host: str = option("127.0.0.1", "Where to listen.")
    port: int = option(DASHBOARD_PORT, "0: any.", ge=0, le=65535)
    insecure: bool = option(False, "Listen beyond this machine, without TLS.")
    open_browser: bool = option(False, "Open it in a browser.", "--open")
    link: bool = option(False, "Print a new link to the dashboard that runs, and end.")
    base_url: str | None = option(
        None, "The address of models that pages show. Default: the gateway's, with /v1."
    )
    static: Path | None = option(None, "Other pages, read anew for every request.")
    public_url: tuple[str, ...] = _proxied(
        (), "Address that browsers have; repeatable.", metavar="URL"
    )
    secure: bool = _proxied(False, "Browsers come by https only: cookies say so.")
    trust_proxy: tuple[str, ...] = _proxied(
        (), "Address whose X-Forwarded- headers are believed; repeatable.", metavar="IP"
    )
    trust_header: str | None = _proxied(
        None, "Header in which that proxy says who is logged in, X-Forwarded-User."
    )
    role_header: str | None = _proxied(
        None, "Header with that person's groups, X-Forwarded-Groups."
    )
    roles: str | None = _proxied(None, "Roles of groups.", metavar="GROUP=ROLE,...")
    default_role: str = _proxied("viewer", "Role of who is in none of these groups.")
    with_parent: bool = option(
        False, "End when standard input does: for who starts it beside another."
    )
    as_json: bool = json_field("Print the address as JSON once it listens.")


@verb(app, DashboardCommandSettings)
def dashboard(options: DashboardCommandSettings) -> None:
    """Show what is served, planned and used in a browser, and change it there.

    Without --gateway it shows the gateway that runs on this machine, and waits for one. The link that it
    prints logs in once, as an admin; others log in with their API keys and have the role of the key.
    """
    require_extras("serve")
    if options.link:
        _print_link(options)
        return
    from atoll.runtime.http.listen_address import check_listen
    from atoll.runtime.http.program import run

    settings = _read_settings(options)
    if options.port:
        check_listen(options.host, options.port)
    planner = _make_planner(options)
    services = _find_services(options, planner)
    run(_serve(options, settings, services, planner))


def _print_link(options: DashboardCommandSettings) -> None:
    from atoll.dashboard.links import LoginLinks, list_dashboards

    running = list_dashboards()
    if "port" in options.model_fields_set:
        running = tuple(d for d in running if d.folder.name == f"dashboard-{options.port}")
    if not running:
        raise UsageError("no dashboard of yours runs here", hint="start one: atoll dashboard")
    for each in running:
        link = f"{each.url}/#token={LoginLinks(each.folder).make()}"
        _announce(each.url, link, as_json=options.as_json)


def _read_settings(options: DashboardCommandSettings) -> DashboardSettings:
    from atoll.dashboard.headers import is_loopback
    from atoll.dashboard.server import DashboardSettings
    from atoll.dashboard.static import FOLDER

    local = is_loopback(options.host)
    if not local and not options.insecure:
        raise UsageError(
            f"beyond this machine keys and cookies would travel to {options.host} without TLS",
            field="--host",
            hint="leave --host out and put a web server with TLS in front (--public-url), or insist with "
            "--insecure",
        )
    if options.trust_header is not None and not local and not options.trust_proxy:
        raise UsageError(
            "anybody who reaches this address could say who they are",
            field="--trust-header",
            hint="name the proxy's address: --trust-proxy 10.0.0.7",
        )
    return DashboardSettings(
        host=options.host,
        port=options.port,
        public_urls=options.public_url,
        base_url=options.base_url,
        secure=options.secure,
        trust=_read_trust(options, local=local),
        static=options.static or FOLDER,
        follow_static=options.static is not None,
    )


def _read_trust(options: DashboardCommandSettings, *, local: bool) -> ProxyTrust:
    from atoll.dashboard.trust import ProxyTrust, read_network

    proxies = options.trust_proxy
    if options.trust_header is not None and local and not proxies:
        proxies = ("127.0.0.1", "::1")
    roles: dict[str, Role] = {}
    for part in filter(None, (options.roles or "").split(",")):
        group, sign, role = part.partition("=")
        if not sign or not group:
            raise UsageError(
                f"cannot read {part!r}", field="--roles", hint="admins=admin,lab=member"
            )
        roles[group.strip()] = read_role(role.strip())
    return ProxyTrust(
        proxies=tuple(map(read_network, proxies)),
        header=options.trust_header,
        role_header=options.role_header,
        roles=roles,
        default_role=read_role(options.default_role),
    )


def _make_planner(options: DashboardCommandSettings) -> PlannerInside | None:
    for path in options.fleets:
        if not path.is_file():
            raise InputError("there is no such file", path=path, hint="name a fleet file")
    return PlannerInside(options.fleets, options.states) if options.planner else None


def _find_services(
    options: DashboardCommandSettings, planner: PlannerInside | None
) -> ServiceDirectory:
    from atoll.dashboard.services import ServiceDirectory

    named = None
    if options.gateway is not None:
        named = read_gateway(options.gateway, options.admin_socket, _read_token(options))
    if named is not None:
        return ServiceDirectory(named, planner)

    def find() -> ServiceAddress | None:
        return find_gateway(options.gateway, options.states)

    return ServiceDirectory(find(), planner, find)


def _read_token(options: DashboardCommandSettings) -> str | None:
    if options.admin_token is not None:
        return read_text_limited(options.admin_token).strip()
    return os.environ.get(TOKEN_VARIABLE) or None


async def _serve(
    options: DashboardCommandSettings,
    settings: DashboardSettings,
    services: ServiceDirectory,
    planner: PlannerInside | None,
) -> None:
    from atoll.dashboard.links import LoginLinks, links_folder, socket_of
    from atoll.dashboard.server import Dashboard
    from atoll.runtime.http.program import close_when_told

    # The folder is called by the port, which is known once it is listened on.
    dashboard = Dashboard(settings, services, LoginLinks(runtime_dir()), load_api)
    host, port = await dashboard.start()
    if planner is not None:
        planner.start()
    links = dashboard.links = LoginLinks(links_folder(port))
    await dashboard.open_socket(socket_of(links_folder(port)))
    url = options.public_url[0].rstrip("/") if options.public_url else _write_url(host, port)
    links.announce(url)
    gateway = services.gateway
    # Without rights of its own at the gateway a link would open empty pages.
    link = url
    if gateway is None or gateway.is_owned:
        link = f"{url}/#token={links.make()}"
    _announce(url, link, as_json=options.as_json)
    if gateway is None and not options.as_json:
        note("no gateway runs here yet; pages show one as soon as there is one")
    if options.open_browser:
        import webbrowser

        webbrowser.open(link)
    if options.with_parent:
        end_with_input()
    try:
        await close_when_told(dashboard.close)
    finally:
        links.forget()


def _write_url(host: str, port: int) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def _announce(url: str, link: str, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"url": url, "link": link}) + "\n")
    else:
        out = console()
        out.print(f"dashboard: {link}", soft_wrap=True, markup=False, highlight=False)
        if link != url:
            out.print(f"           ({_VALID})", soft_wrap=True, markup=False, highlight=False)
    sys.stdout.flush()
