"""Addresses to listen on: which are free, and what to say of one that is not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from pathlib import Path

from atoll.core.errors import InputError
from atoll.core.paths import runtime_dir

_MODE = 0o600
_UNSENT_BYTES = 128 * 2**10
_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
"""Of Linux."""


def limit_unsent(server: asyncio.Server) -> None:
    """Have the machine keep little of what its clients have not read, so that the server learns of it soon.

    Otherwise it takes megabytes for every client that does not read. What is under way to a client that
    does is not limited. Connections have it from the socket that is listened on.
    """
    for listening in server.sockets:
        if listening.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):
                listening.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT_BYTES)


def cannot_listen(error: OSError, host: str, port: int, field: str = "--port") -> InputError:
    """Return what to tell a person whose address cannot be listened on."""
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return InputError(
            f"{host!r} is no address of this machine",
            field="--host",
            hint="use 127.0.0.1 for this machine only, 0.0.0.0 for all its addresses",
        )
    if error.errno == errno.EADDRINUSE:
        return InputError(
            f"port {port} of {host} is in use",
            field=field,
            hint="stop what listens there, or name another port; 0 takes any that is free",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return InputError(
            f"port {port} of {host} may not be listened on", field=field, hint="use one above 1023"
        )
    reason = (error.strerror or type(error).__name__).lower()
    return InputError(
        f"cannot listen on {host}:{port}: {reason}", field=field, hint="name another address"
    )


def check_listen(host: str, port: int, field: str = "--port", *, share: bool = False) -> None:
    """Raise InputError where nobody could listen now, before anything is started for those who would ask.

    With `share`, others may listen there who share it, too.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as tried:
                # As servers do: a port whose last owner has just gone is free.
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if share:
                    tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    # Else this address would also take that of IPv4, which is tried by itself.
                    tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                tried.bind(address)
    except OSError as error:
        raise cannot_listen(error, host, port, field) from error


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        # All are bound before any is closed, so that no port comes twice.
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def is_listening(path: Path) -> bool:
    """Whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        # One that is busy refuses at once too, but says that it is.
        asking.setblocking(False)
        try:
            asking.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            return True
    return True


def own_socket(kind: str, name: int | str) -> Path:
    """Return where a process of a kind listens for its user unless told otherwise, by a name of its own.

    What those that were killed left in that folder is removed.
    """
    folder = runtime_dir()
    for path in folder.glob(f"{kind}-*.sock"):
        # Whatever else has such a name is not ours, and none of it keeps a process from starting.
        with contextlib.suppress(OSError):
            if path.is_socket() and not is_listening(path):
                path.unlink()
    return folder / f"{kind}-{name}.sock"


def bind_private(path: Path, *, field: str, taken: str, hint: str) -> socket.socket:
    """Return a Unix socket that only this user can open, bound to a path and not listening yet.

    One that a dead process left is replaced; `taken` says what is wrong where a living one listens, and
    `field` and `hint` belong to what is said of a path that cannot be used.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            if is_listening(path):
                raise InputError(taken, field=field, hint="name another path, or stop that one")
            path.unlink(missing_ok=True)
        bound.bind(str(path))
        # Nobody can connect before it listens.
        path.chmod(_MODE)
    except OSError as error:
        bound.close()
        raise InputError(
            f"cannot listen at {path}: {error.strerror or error}", field=field, hint=hint
        ) from error
    except InputError:
        bound.close()
        raise
    return bound
