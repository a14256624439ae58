"""`atoll fabric` and `atoll hub` as people use them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.cli.main import run as atoll
from atoll.fabric.identity.access import Access
from tests.fabric.transport.site import SETTINGS, free_port


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOLL_FABRIC", raising=False)
    assert atoll(["fabric", "init", "--name", "demo", "--hub", "127.0.0.1:7001", "--json"]) == 0
    return tmp_path


def test_init_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["fabric", "init", "--name", "demo", "--folder", str(tmp_path / "f")]
    assert atoll([*command, "--hub", "h1:1", "--hub", "h2"]) == 0
    said = capsys.readouterr().out
    for line in (f"atoll hub @{tmp_path}/f/hub-h1.token    # h2:7447", "atoll fabric issue"):
        assert line in said
    assert atoll([*command, "--hub", "h1:1"]) != 0
    assert "holds a fabric already" in capsys.readouterr().err


def test_tokens_are_renewed_with_the_hubs_of_today(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "alps.token"
    assert atoll(["fabric", "issue", "alps", "--provider", "x", "--out", str(out)]) == 0
    before = Access.open(f"@{out}")
    assert atoll(["fabric", "add-hub", "127.0.0.1:7002"]) == 0
    assert "atoll hub @fabric/hub-h1.token" in capsys.readouterr().err
    assert Access.open("@fabric/hub-h1.token").identity.role == "hub"
    assert atoll(["fabric", "renew", "alps", "--out", str(out)]) == 0
    after = Access.open(f"@{out}")
    assert (len(before.hubs), len(after.hubs)) == (1, 2)
    assert after.identity.slot == before.identity.slot
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    capsys.readouterr()
    assert atoll(["fabric", "renew", "nobody"]) != 0
    assert atoll(["fabric", "add-hub", "127.0.0.1:7002"]) != 0
    assert capsys.readouterr().err.count("error:") == 2


def test_a_fabric_grows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert atoll(["fabric", "grow", "--slots", "10000"]) == 0
    assert "atoll hub @fabric/hub-h0.token" in capsys.readouterr().err
    assert Access.open("@fabric/hub-h0.token").slots == 10_000
    assert atoll(["fabric", "grow", "--slots", "10001"]) != 0
    assert "error: --slots: there are 10000 slots" in capsys.readouterr().err


def test_members_come_and_go(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = ["fabric", "init", "--name", "demo", "--hub", "h:1", "--folder", "other", "--json"]
    assert atoll(other) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["hubs"] == [{"address": "h:1", "token": "other/hub-h0.token"}]
    assert atoll(["fabric", "issue", "alps", "--provider", "ethz"]) == 0
    token = capsys.readouterr().out.strip()
    assert Access.open(token).identity.name == "alps"
    out = folder / "como.token"
    issue = ["fabric", "issue", "como", "--provider", "x", "--role", "gateway", "--out", str(out)]
    assert atoll(issue) == 0
    said = capsys.readouterr()
    assert out.read_text().strip() not in said.out + said.err
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert atoll(issue) != 0
    assert "exists already" in capsys.readouterr().err
    assert atoll(["fabric", "show", f"@{out}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["role"] == "gateway"
    assert atoll(["fabric", "revoke", "alps"]) == 0
    capsys.readouterr()
    assert atoll(["fabric", "list", "--json"]) == 0
    members = {one["name"]: one["valid"] for one in json.loads(capsys.readouterr().out)}
    assert members == {"hub-0": True, "operator": True, "alps": False, "como": True}
    assert atoll(["fabric", "list"]) == 0
    assert "revoked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hub"], "which fabric?"),
        (["hub", "--open", "--listen", "0.0.0.0:1"], "anybody could read"),
        (["hub", "@fabric/fabric.token"], "not of a hub"),
        (["fabric", "issue", "x", "--provider", "p", "--folder", "none"], "no fabric is here"),
        (["fabric", "show"], "ATOLL_FABRIC"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert atoll(arguments) != 0
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_hub_is_a_process_that_ends_when_told(tmp_path: Path) -> None:
    port = free_port()
    hub = subprocess.Popen(
        [sys.executable, "-m", "atoll", "hub", "--open", "--listen", f"127.0.0.1:{port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={key: value for key, value in os.environ.items() if key != "ATOLL_FABRIC"},
    )
    try:
        assert hub.stdout is not None
        assert hub.stdout.readline().startswith(b"hub hub listens at 127.0.0.1:%d (" % port)
        asyncio.run(_visit(port))
    finally:
        hub.send_signal(signal.SIGTERM)
        _, log = hub.communicate(timeout=60)
    assert hub.returncode == 0, log
    events = [json.loads(line)["event"] for line in log.splitlines()]
    assert events == ["hub.listening", "fabric.joined", "fabric.left", "hub.stopping"]


_FORGETFUL = """
import asyncio, sys
from atoll.fabric.identity.access import Access
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.hub import Hub, hub_options
from atoll.fabric.registry.records import Metadata
from atoll.fabric.identity import fabric_keys as keys

async def main():
    port = int(sys.argv[1])
    hub = await Hub.start(hub_options(None, listen=[f"127.0.0.1:{port}"]))
    fabric = await Fabric.connect(
        Access.open_at([f"127.0.0.1:{port}"]), Metadata(name="x", provider="", role="worker")
    )
    fabric.subscribe(keys.outward_all(fabric.sid), print)
    fabric.subscribe(keys.inward_all(fabric.sid), print)
    sys.exit(3)

asyncio.run(main())
"""


def test_a_process_that_forgets_to_close_ends_in_order() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _FORGETFUL, str(free_port())],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 3, ended.stderr


async def _visit(port: int) -> None:
    from atoll.fabric.registry.records import Metadata
    from atoll.fabric.transport.fabric import Fabric

    fabric = await Fabric.connect(
        Access.open_at([f"127.0.0.1:{port}"]),
        Metadata(name="x", provider="", role="worker"),
        settings=SETTINGS,
    )
    assert [peer.metadata.role for peer in fabric.peers()] == ["hub"]
    await fabric.close()
