"""Hub, gateway and graph servers of a fleet: processes here that outlive the command which started them.

The hub is where instances meet, the gateway where requests come in; graph servers stand behind the gateway
where the fleet has any-to-any services. All are started once, found again by
number and start time, and started anew if they have died. Their tokens are files for their owner alone; what
stands on a command line is the name of such a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from atoll.control.operation.fleet_home import Daemon, Entrance, FleetHome, GraphDaemon
from atoll.control.operation.graph_entrance import (
    NAMES,
    graph_backend,
    graph_config_of,
    read_graph_config,
)
from atoll.core.errors import AtollError, InputError, UsageError
from atoll.core.files import read_text_limited
from atoll.deploy.commands.node_commands import FABRIC_VARIABLE
from atoll.deploy.local.daemon import ProcessId, process_start
from atoll.runtime.http.listen_address import free_ports
from atoll.runtime.supervise.supervised_process import last_lines

_LISTENS_S = 60.0
"""How long hub and gateway may take to listen; a busy machine is slow to start Python."""
_END_S = 40.0
_POLL_S = 0.05
_NOT_HANDED_ON = ("ATOLL_FABRIC", "ATOLL_ENGINE_KEY", "HF_TOKEN")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_LINE_BYTES = 2**16
_MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class EntranceSettings:
    """Where hub and gateway listen.

    `address` is where nodes reach this machine: loopback where all of them are processes of it. `port` 0 is
    any that is free. `given` are more settings of the gateway; none: those it had before.
    """

    address: str = "127.0.0.1"
    host: str = "127.0.0.1"
    port: int = 8080
    given: Mapping[str, object] = field(default_factory=dict)


def open_entrance(
    home: FleetHome, name: str, settings: EntranceSettings, known: Entrance | None = None
) -> Entrance:
    """Return the entrance of a fleet with hub and gateway running: those that run already, or new ones.

    Where one of them cannot be brought up, what was started is ended again.
    """
    from atoll.runtime.http.listen_address import check_listen

    folder = home.folder / "fabric"
    _make_fabric(folder, name, settings.address)
    graphs = {graph.name: graph for graph in (known.graphs if known is not None else ())}
    ports = _graph_ports(home, graphs)
    _write_config(home, settings.given, ports)
    for graph in graphs.values() if not ports else ():
        end_daemon(graph)
    gateway = known.gateway if known is not None else None
    runs = gateway is not None and gateway.is_alive
    if not runs:
        settings = _gateway_address(settings, known)
        if settings.port:
            check_listen(settings.host, settings.port)
    hub = known.hub if known is not None else None
    started: list[Daemon] = []
    try:
        # Both at once: a gateway looks for its hub until it is there, and Python takes a second to start.
        if hub is None or not hub.is_alive:
            hub = _spawn_hub(home, folder)
            started.append(hub)
        if not runs:
            gateway = _spawn_gateway(home, folder, settings)
            started.append(gateway)
        assert gateway is not None
        if hub in started:
            _await_hub(hub, folder)
        missing = [own for own in ports if own not in graphs or not graphs[own].is_alive]
        for own in missing:
            graphs[own] = _spawn_graph(home, folder, name, own, ports[own])
            started.append(graphs[own])
        entrance = Entrance(
            token=str(folder / "instances.token"),
            observer=str(folder / "fabric.token"),
            hub=hub,
            gateway=gateway,
            graphs=tuple(graphs[own] for own in ports),
        )
        if not runs:
            ready = _await_gateway(gateway, home)
            return entrance.model_copy(
                update={"url": ready["url"], "admin_socket": ready["admin_socket"]}
            )
    except BaseException:
        for daemon in reversed(started):
            end_daemon(daemon)
        raise
    assert known is not None
    return entrance.model_copy(update={"url": known.url, "admin_socket": known.admin_socket})


def _graph_ports(home: FleetHome, known: Mapping[str, GraphDaemon]) -> dict[str, int]:
    """Return where the graph servers of a fleet listen, by name: where they did, else at free ports."""
    if not graph_config_of(home).exists():
        return {}
    free = dict(zip(NAMES, free_ports(len(NAMES)), strict=True))
    return free | {name: graph.port for name, graph in known.items()}


def _gateway_address(settings: EntranceSettings, known: Entrance | None) -> EntranceSettings:
    """Return where a gateway is to listen: who has the address of one before should find it there again."""
    from atoll.runtime.http.listen_address import check_listen

    if known is None or known.url is None or settings.port:
        return settings
    with contextlib.suppress(AtollError):
        port = urlsplit(known.url).port or 0
        check_listen(settings.host, port)
        return replace(settings, port=port)
    return settings


def keep_entrance(home: FleetHome, name: str, known: Entrance) -> Entrance:
    """Return the entrance of a fleet with those of its processes started anew that have died."""
    daemons = (known.hub, known.gateway, *known.graphs)
    alive = all(daemon is None or daemon.is_alive for daemon in daemons)
    if alive or known.hub is None or known.url is None:
        return known
    at = urlsplit(known.url)
    settings = EntranceSettings(host=at.hostname or "127.0.0.1", port=at.port or 0)
    return open_entrance(home, name, settings, known)


def use_fabric(
    home: FleetHome, fabric: str, url: str | None, admin_token: str | None = None
) -> Entrance:
    """Return an entrance of which others run hub and gateway; `fabric` is a token, @FILE or open://HOST:PORT.

    `url` may be several, with commas between. A token that came as text is kept in a file of its own:
    commands name files. `admin_token` is the file with which gateways are asked what they see.
    """
    from atoll.fabric.identity.access import Access
    from atoll.fabric.identity.authority import write_secret

    Access.open(fabric)
    path = Path(fabric.removeprefix("@"))
    if fabric.startswith("@") or path.exists():
        given = path / "fabric.token" if path.is_dir() else path
        token = str(given.resolve())
    else:
        kept = home.folder / "fabric"
        kept.mkdir(mode=0o700, exist_ok=True)
        (kept / "given.token").unlink(missing_ok=True)
        write_secret(kept / "given.token", fabric.strip() + "\n")
        token = str(kept / "given.token")
    first, *others = (each.strip() for each in url.split(",")) if url else (None,)
    return Entrance(
        url=first,
        others=tuple(filter(None, others)),
        admin_token=admin_token,
        token=token,
        observer=token,
    )


def close_entrance(entrance: Entrance) -> None:
    """End the gateway, which finishes what runs, then what stands behind it."""
    for daemon in (entrance.gateway, *entrance.graphs, entrance.hub):
        if daemon is not None:
            end_daemon(daemon)


def end_daemon(daemon: Daemon) -> None:
    """End a process: asked first, killed if it does not listen."""
    for number, max_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, 5.0)):
        until_s = time.monotonic() + max_s
        with contextlib.suppress(ProcessLookupError):
            if daemon.is_alive:
                os.kill(daemon.process.pid, number)
        while daemon.is_alive:
            if time.monotonic() > until_s:
                break
            _reap(daemon)
            time.sleep(_POLL_S)
        else:
            return


def find_address() -> str:
    """Return the address by which other machines reach this one: that of its way out."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only chooses the way.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _make_fabric(folder: Path, name: str, address: str) -> None:
    from atoll.fabric.identity.authority import Authority, write_secret

    tokens = {"gateway": "gateway", "instances": "worker"}
    if (folder / "fabric.json").exists():
        authority = Authority(folder)
    else:
        (port,) = free_ports(1)
        fabric = _NOT_IN_NAMES.sub("-", name)[:40].strip("-.") or "fleet"
        authority = Authority.create(folder, fabric, [f"{address}:{port}"])
    known = {member.name for member in authority.members}
    for member, role in tokens.items():
        path = folder / f"{member}.token"
        if not path.exists():
            # One that was issued and not written, because somebody was killed in between, is lost.
            made = authority.renew(member) if member in known else None
            access = made or authority.issue(member, authority.name, role)
            write_secret(path, access.pack() + "\n")


def _spawn_hub(home: FleetHome, folder: Path) -> Daemon:
    from atoll.fabric.identity.authority import Authority

    (address,) = Authority(folder).hubs
    log = home.folder / "hub.log"
    return _spawn(
        ("atoll", "hub", f"@{folder / 'hub-h0.token'}", "--listen", address, "--log", str(log)), log
    )


def _await_hub(daemon: Daemon, folder: Path) -> None:
    from atoll.fabric.identity.authority import Authority

    (address,) = Authority(folder).hubs
    host, _, port = address.rpartition(":")
    until_s = time.monotonic() + _LISTENS_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return
        _check_daemon(daemon, "the hub", until_s)
        time.sleep(_POLL_S)


def _spawn_gateway(home: FleetHome, folder: Path, settings: EntranceSettings) -> Daemon:
    from atoll.fabric.identity.access import is_loopback

    said, log = home.folder / "gateway.json", home.folder / "gateway.log"
    said.unlink(missing_ok=True)
    words = [
        *("atoll", "gateway", "--fabric", f"@{folder / 'gateway.token'}", "--json"),
        *("--host", settings.host, "--port", str(settings.port)),
        *(("--open",) if is_loopback(settings.host) else ()),
        *("--config", str(_config_of(home))),
    ]
    return _spawn(words, log, said)


def _spawn_graph(home: FleetHome, folder: Path, fleet: str, name: str, port: int) -> GraphDaemon:
    log = home.folder / f"{name}.log"
    words = [
        *("atoll.deploy.commands.graph_node", "--fleet", fleet, "--name", name),
        *("--config", str(graph_config_of(home)), "--port", str(port)),
    ]
    told = {FABRIC_VARIABLE: f"@{folder / 'instances.token'}"}
    started = _spawn(words, log, environment=told)
    return GraphDaemon(process=started.process, log=started.log, name=name, port=port)


def _write_config(
    home: FleetHome, given: Mapping[str, object], graph_ports: Mapping[str, int]
) -> None:
    """Write the gateway's settings: those given, else those it had, and the graph servers if there are any.

    A gateway that runs follows the file; there may be a token in it.
    """
    from atoll.fabric.identity.authority import write_secret

    path = _config_of(home)
    had: dict[str, object] = {}
    if path.exists():
        had = json.loads(read_text_limited(path, _MAX_CONFIG_BYTES))
    settings = dict(given or had)
    settings.pop("backends", None)
    if graph_ports:
        config = read_graph_config(home)
        settings["backends"] = [graph_backend(config, *each) for each in graph_ports.items()]
    if settings != had or not path.exists():
        write_secret(path, json.dumps(settings))


def _config_of(home: FleetHome) -> Path:
    return home.folder / "gateway.yaml"


def _await_gateway(daemon: Daemon, home: FleetHome) -> dict[str, str]:
    """Return what the gateway says once it listens: its address, and the socket of its admin."""
    until_s = time.monotonic() + _LISTENS_S
    while not (text := _read_said(home.folder / "gateway.json")).endswith("\n"):
        _check_daemon(daemon, "the gateway", until_s)
        time.sleep(_POLL_S)
    ready: dict[str, str] = json.loads(text)
    return ready


def _read_said(path: Path) -> str:
    return read_text_limited(path, _MAX_LINE_BYTES) if path.exists() else ""


def _spawn(
    words: Sequence[str],
    log: Path,
    out: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Daemon:
    """Start a module with its words in a session of its own: it outlives this process and its terminal."""
    handed = {k: v for k, v in os.environ.items() if k not in _NOT_HANDED_ON} | dict(environment)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(out or log), flags, 0o600),
        (os.POSIX_SPAWN_OPEN, 2, str(log), flags, 0o600),
    ]
    argv = [sys.executable, "-m", *words]
    try:
        pid = os.posix_spawn(sys.executable, argv, handed, file_actions=actions, setsid=True)
    except OSError as error:
        raise InputError(f"cannot start {words[1]}: {error.strerror}", path=log) from error
    return Daemon(process=ProcessId(pid=pid, start=process_start(pid) or ""), log=str(log))


def _check_daemon(daemon: Daemon, what: str, until_s: float) -> None:
    _reap(daemon)
    if not daemon.is_alive:
        last = last_lines(Path(daemon.log), 1)
        raise UsageError(
            f"{what} ended at once: {last[0] if last else 'no word'}", hint=f"see {daemon.log}"
        )
    if time.monotonic() > until_s:
        raise UsageError(f"{what} does not listen after {_LISTENS_S:g} s", hint=f"see {daemon.log}")


def _reap(daemon: Daemon) -> None:
    """Take note of the end of one's own child, so that its number is free."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(daemon.process.pid, os.WNOHANG)
