"""A hub as a process with certificates: whom it turns away it logs, and its own secrets it keeps."""

from __future__ import annotations

import asyncio
import shlex
import signal
import ssl
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.cli import gateway as command
from atoll.core.errors import UsageError
from atoll.fabric.identity.access import Access
from atoll.fabric.identity.authority import Authority
from atoll.fabric.transport.fabric_settings import FabricSettings
from atoll.fabric.transport.link import FabricLink, UnreachableError
from tests.fabric.transport.site import free_port

_SETTINGS = FabricSettings(connect_s=0.5)


async def _strangers(port: int, foreign: Access, good: Access) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"hello")
        assert await asyncio.wait_for(reader.read(1), 60) == b""
        writer.close()
    except (ssl.SSLError, ConnectionError):
        pass
    with pytest.raises(UnreachableError):
        await FabricLink.open(replace(foreign, authority=good.authority), _SETTINGS)
    link = await FabricLink.open(good, FabricSettings(connect_s=60.0))
    await link.close()


def test_strangers_are_logged_and_secrets_are_not(tmp_path: Path) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    authority = Authority.create(tmp_path / "ca", "test", [address])
    foreign = Authority.create(tmp_path / "other", "test", [address]).issue("w", "p", "worker")
    token = tmp_path / "ca" / "hub-h0.token"
    for name in ("hub-h0.token", "fabric.token", "ca.key"):
        assert stat.S_IMODE((tmp_path / "ca" / name).stat().st_mode) == 0o600
    hub = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "atoll",
            "hub",
            f"@{token}",
            "--listen",
            address,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        assert hub.stdout is not None
        lines = [hub.stdout.readline()]
        while b" listens at " not in lines[-1]:
            lines.append(hub.stdout.readline())
            assert lines[-1]
        # What a neighbour on the machine sees of it.
        seen = Path(f"/proc/{hub.pid}/cmdline").read_bytes()
        asyncio.run(_strangers(port, foreign, authority.issue("w", "p", "worker")))
    finally:
        hub.send_signal(signal.SIGTERM)
        rest, _ = hub.communicate(timeout=60)
    said = b"".join(lines) + rest
    warned = [line for line in rest.splitlines() if b"WARN" in line or b"ERROR" in line]
    assert any(b"certificate" in line.lower() for line in warned), said.decode()
    secret = token.read_bytes().strip()
    for place in range(40, len(secret) - 40, 200):
        assert secret[place : place + 40] not in said + seen


def test_a_models_name_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    class Chooser:
        def names(self) -> list[str]:
            return ["x'; touch /tmp/owned; echo '", "[/red]"]

    class Gateway:
        chooser = Chooser()
        admin_socket = None
        metrics_address = None

    class Options:
        keys_needed = True

    class Service:
        address = ("127.0.0.1", 8080)
        gateway = Gateway()
        options = Options()

    command._ready(Service(), as_json=False)  # type: ignore[arg-type]
    line = next(row for row in capsys.readouterr().out.splitlines() if "curl" in row)
    words = shlex.split(line)
    assert words[0] == "curl"
    assert words[-2] == "-d"
    assert "touch /tmp/owned" in words[-1]
    assert ";" not in " ".join(words[:-1])


def test_nobody_is_issued_a_name_below_anothers(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca", "test", ["h"])
    authority.issue("lab", "ethz", "worker")
    with pytest.raises(UsageError, match="NAME"):
        authority.issue("lab/gpu1", "evil", "worker")
    assert [m.name for m in authority.members if m.role == "worker"] == ["lab"]
