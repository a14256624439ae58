"""Which gateway a dashboard is for: the one that is named, else one that runs on this machine."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError, UsageError
from atoll.core.files import read_text_limited
from atoll.core.paths import runtime_dir, state_dir

if TYPE_CHECKING:
    from atoll.dashboard.services import ServiceAddress

_SOCKET = re.compile(r"gateway-(\d+)\.sock")


def read_gateway(
    text: str, admin_socket: Path | None, admin_token: str | None
) -> ServiceAddress | None:
    """Read what `--gateway` says: a URL or a socket; None where it is the name of a fleet."""
    from atoll.dashboard.services import ServiceAddress

    if "://" in text:
        if not text.startswith(("http://", "https://")):
            raise UsageError(f"{text!r} is no URL of a gateway", field="--gateway")
        return ServiceAddress(text.rstrip("/").removesuffix("/v1"), admin_socket, admin_token)
    path = Path(text)
    if "/" not in text and not path.exists():
        return None
    if not path.is_socket():
        raise UsageError(
            f"{text} is no socket",
            field="--gateway",
            hint="a URL, the path of a gateway's admin socket, or the name of a fleet",
        )
    known = next((a for a in list_gateways() if a.socket == path.absolute()), None)
    return known or ServiceAddress(_guess_url(path), path.absolute(), admin_token)


def find_gateway(fleet: str | None = None, states: tuple[Path, ...] = ()) -> ServiceAddress | None:
    """Return the gateway of this machine, that of a fleet where one is named, or None."""
    return next(list_gateways(fleet, states), None)


def list_gateways(
    fleet: str | None = None, states: tuple[Path, ...] = ()
) -> Iterator[ServiceAddress]:
    """Yield the gateways that run here: of operated fleets, of served ones (the newest first), others.

    `states` are folders of fleets that are operated from elsewhere than the user's state folder.
    """
    from atoll.dashboard.services import ServiceAddress
    from atoll.runtime.http.listen_address import is_listening
    from atoll.runtime.local.fleet_state import list_running_fleets

    yield from _list_operated(fleet, states)
    for state in reversed(list_running_fleets()):
        admin = Path(state.admin_socket) if state.admin_socket else None
        if fleet in (None, state.name) and admin is not None and is_listening(admin):
            yield ServiceAddress(state.url, admin)
    if fleet is None:
        for path in sorted(runtime_dir().glob("gateway-*.sock")):
            if is_listening(path):
                yield ServiceAddress(_guess_url(path), path)


def _list_operated(fleet: str | None, states: tuple[Path, ...]) -> Iterator[ServiceAddress]:
    if not states and not any((state_dir() / "fleets").glob("*")):
        return  # and what knows of them need not be loaded
    from atoll.control.operation.fleet_home import list_homes
    from atoll.dashboard.services import ServiceAddress
    from atoll.runtime.http.listen_address import is_listening

    for home in list_homes(states):
        with contextlib.suppress(AtollError, OSError):
            record = home.read()
            at = None if record is None or not record.up else record.entrance
            if record is None or at is None or fleet not in (None, record.name):
                continue
            admin = None if at.admin_socket is None else Path(at.admin_socket)
            if admin is not None and not is_listening(admin):
                continue
            token = None if at.admin_token is None else _read_token(Path(at.admin_token))
            if at.url is not None or admin is not None:
                yield ServiceAddress(at.url, admin, token)


def _read_token(path: Path) -> str:
    return read_text_limited(path).strip()


def _guess_url(path: Path) -> str | None:
    """Gateways call their socket by their port."""
    found = _SOCKET.fullmatch(path.name)
    return None if found is None else f"http://127.0.0.1:{found[1]}"
