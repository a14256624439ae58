"""How each kind of mistake reaches the terminal: one line says what to change, and no work begins.

What may stand in a file or an option is tested where it is read; here is one of each kind, and what only a
command can find: options that contradict each other, files that are mistaken for others, ports and hosts.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.main import run
from tests.cli.fleets import FLEET

CLUSTER = """\
services:
  m: {model: llama-3.1-8b, ttft: 2s, tpot: 100ms, rate: 1/s, lengths: 512x128}
cluster:
  nodes: {here: {"L4:1": [a, b]}}
  links:
    - {between: ["*", "*"], bandwidth: 10Gbit/s, latency: 1ms}
"""
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
LEAKS = re.compile(
    r"instance of|pydantic|Traceback|\b[A-Z]\w+Entry\b|after validation|Errno|bug in Atoll|\bdict\b"
)
"""What only somebody who knows the code could understand."""
FIXES = ("(fix: ", "known: ", "did you mean", "(see 'atoll", "(Possible options:")


def plan_of(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return read


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good fleet, a good cluster, the plan of the fleet, an empty trace, and a folder."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "good.yaml").write_text(FLEET)
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "empty.csv").write_text("")
    (folder / "folder").mkdir()
    plan = ["plan", str(folder / "good.yaml"), "--capacity-only", "-o", str(folder / "plan.json")]
    assert run(plan) == 0
    return folder


@pytest.fixture
def here(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same as the current folder; what a command leaves there is found and removed."""
    monkeypatch.chdir(site)
    monkeypatch.setenv("ATOLL_DB", f"sqlite:///{site / 'keys.db'}")
    monkeypatch.delenv("ATOLL_FABRIC", raising=False)
    before = set(site.iterdir())
    yield site
    for path in set(site.iterdir()) - before:
        path.unlink()


def refused(capsys: pytest.CaptureFixture[str], code: int, *args: str) -> str:
    """Run a command that must be refused with this code, and return the one line that says why."""
    capsys.readouterr()
    ended = run(list(args))
    printed = capsys.readouterr()
    line = printed.err.strip()
    assert ended == code, line
    assert line.startswith("error: "), line
    assert "\n" not in line
    assert any(words in line for words in FIXES), line
    assert not LEAKS.search(line), line
    return line


FLEETS: list[tuple[str, str, str]] = [
    ("ttft: 1200ms, ", "", "bad.yaml:2: services.chat.ttft: this field is required"),
    ("ttft: 1200ms", "ttft: fast", "bad.yaml:2: services.chat.ttft: cannot read 'fast' as a durat"),
    ("available: 8", "available: -1", "bad.yaml:6: pool.offers.0.available: input should be great"),
    ("rate: 10/s", "rate: 10/s, attainment: 120%", "bad.yaml:2: services.chat.attainment: "),
    ("rate: 10/s", "rate: 10/s, burstiness: -1", "bad.yaml:2: services.chat.burstiness: "),
    ("max_nodes_per_instance: 3", "max_nodes_per_instance: 0", "bad.yaml:10: settings.max_nodes"),
    ("phi-4-14b", "phi-5", "bad.yaml:2: services.chat.model: unknown model"),
    ("pool:", "poool:", "bad.yaml:4: poool: there is no such field (fix: write 'pool')"),
    ("services:\n", "services: [\n", "bad.yaml:3: not valid YAML"),
]


@pytest.mark.parametrize(("old", "new", "said"), FLEETS)
def test_fleet_files(
    here: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    assert old in FLEET
    (here / "bad.yaml").write_text(FLEET.replace(old, new, 1))
    line = refused(capsys, 3, "plan", "bad.yaml", "-o", "never.json")
    assert line.startswith(f"error: {said}")
    assert not (here / "never.json").exists()


PLANS: list[tuple[str, Callable[[dict[str, Any]], object], int, str]] = [
    ("layers", lambda p: p["instances"][0]["nodes"][-1].update(end=999), 7, ", 999)"),
    ("nothing", lambda p: p.update(instances=[]), 3, "no instances"),
    ("field", lambda p: p.update(colour="red"), 3, "leave 'colour' out"),
]


@pytest.mark.parametrize(
    ("name", "change", "code", "said"), PLANS, ids=[name for name, *_ in PLANS]
)
def test_plans(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: Callable[[dict[str, Any]], object],
    code: int,
    said: str,
) -> None:
    changed = plan_of(here)
    change(changed)
    (here / f"bad-{name}.json").write_text(json.dumps(changed))
    asked = ("simulate", f"bad-{name}.json", "--fleet", "good.yaml")
    assert said in refused(capsys, code, *asked)


def test_times_of_several_zones_are_converted_with_a_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "2026-11-16T18:15:46Z,5,5\n2026-11-16T20:15:47+02:00,5,5\n"
    (here / "zones.csv").write_text(AZURE + rows)
    for asked in (
        ("trace", "describe", "zones.csv"),
        ("simulate", "plan.json", "--fleet", "good.yaml", "--trace", "zones.csv"),
    ):
        assert run(list(asked)) == 0
        assert "several time zones (Z, +02:00) and were converted" in capsys.readouterr().err


SIMULATE = "simulate plan.json --fleet good.yaml"
COMMANDS: list[tuple[str, int, str]] = [
    # How it is called.
    ("plan", 2, "Missing argument"),
    ("plan good.yaml extra", 2, "unexpected extra argument"),
    ("plan good.yaml --colour", 2, "No such option"),
    ("pln good.yaml", 2, "Did you mean 'plan'"),
    ("explain plan.json", 2, "Missing option '--fleet'"),
    ("import helix missing", 2, "Missing option"),
    # What an option says.
    ("plan good.yaml --deadline soon", 3, "--deadline: cannot read"),
    ("plan good.yaml --deadline 0s", 2, "--deadline is 0"),
    ("plan good.yaml --gap 200%", 3, "--gap: cannot read '200%' as a share"),
    ("plan good.yaml --effort huge", 2, "as an effort"),
    ("plan good.yaml --solver optimus", 4, "did you mean optimal?"),
    ("plan good.yaml --objective speed", 4, "unknown objective"),
    ("catalog prices --region mars", 4, "unknown region"),
    (f"{SIMULATE} --seed -1", 3, "--seed"),
    # Files that are read.
    ("plan missing.yaml", 3, "no such file"),
    ("plan folder", 3, "is a directory"),
    ("plan plan.json", 2, "is a plan, not a fleet file"),
    ("plan good.yaml --running good.yaml", 3, "is no plan"),
    ("simulate plan.json", 2, "add --fleet"),
    ("simulate plan.json --fleet cluster.yaml", 7, "unknown service"),
    ("trace describe empty.csv", 3, "the trace is empty"),
    (f"{SIMULATE} --trace empty.csv", 3, "the trace is empty"),
    ("demo --examples folder", 2, "has no quickstart.yaml"),
    # Files that are written.
    ("plan good.yaml -o nowhere/plan.json", 3, "no such folder"),
    ("plan good.yaml -o folder", 3, "is a directory"),
    ("plan good.yaml -o good.yaml", 2, "read or written for this plan already"),
    ("plan good.yaml -o same.html --report same.html", 2, "read or written for this plan already"),
    ("plan good.yaml --report r.pdf", 2, ".html or .svg"),
    ("plan good.yaml --report r.svg", 2, ".html file"),
    ("plan good.yaml --stats-out s.txt", 2, ".json file"),
    (f"{SIMULATE} --report r.pdf", 2, ".html file"),
    (f"{SIMULATE} --requests nowhere/r.csv", 3, "no such folder"),
    ("init nowhere/fleet.yaml", 2, "does not exist"),
    # What does not go together.
    ("plan good.yaml --partial", 2, "for fixed clusters"),
    ("plan cluster.yaml --solver optimal", 2, "fixed cluster"),
    (f"{SIMULATE} --service chat", 2, "add --trace"),
    (f"{SIMULATE} --trace azure-conv@1/s --service nobody", 4, "--service: unknown service"),
    (f"{SIMULATE} --until 0s", 3, "ends before it begins"),
]


@pytest.mark.parametrize(("command", "code", "said"), COMMANDS)
def test_commands(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, code: int, said: str
) -> None:
    before = {path: path.read_bytes() for path in here.iterdir() if path.is_file()}
    assert said in refused(capsys, code, *command.split())
    assert {path: path.read_bytes() for path in here.iterdir() if path.is_file()} == before


SERVING: list[tuple[str, int, str]] = [
    ("serve plan.json --port 99999", 3, "less than or equal to 65535"),
    ("serve plan.json --port http", 2, "--port"),
    ("serve plan.json --port BUSY", 3, "is in use"),
    ("serve plan.json --host 203.0.113.7", 3, "no address of this machine"),
    ("serve plan.json --log nowhere/x.log", 3, "no such folder"),
    ("serve plan.json --port 0", 2, "weights are needed: chat (phi-4-14b), mini (llama-3.1-8b)"),
    ("serve good.yaml --port 0", 2, "--model chat=hf://microsoft/phi-4"),
    ("serve plan.json --port 0 --only nobody", 4, "--only: unknown model"),
    ("serve plan.json --port 0 --model nobody=/x", 4, "--model: unknown model"),
    ("serve plan.json --port 0 --model hf://", 3, "hf://ORG/NAME"),
    ("serve good.yaml --port 0 --fleet good.yaml", 2, "leave --fleet out"),
]
FABRIC: list[tuple[str, int, str]] = [
    ("serve plan.json --port 0 --fabric @missing", 3, "no such file"),
    ("gateway --port BUSY --fabric open://127.0.0.1:1", 3, "is in use"),
    ("gateway --port 0", 2, "no fabric is named"),
    ("hub rubbish", 3, "no fabric token"),
    ("hub --open --log nowhere/x.log", 2, "cannot write"),
    ("join --fabric rubbish", 3, "no fabric token"),
    ("assign n --fabric missing", 2, "--model or --stop"),
    ("fabric issue x", 2, "Missing option '--provider'"),
]


def skip_without(*packages: str) -> None:
    """Skip where one of these is not installed; none is loaded, for refusals need none."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port of this machine that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("command", "code", "said"), SERVING)
def test_serving(
    capsys: pytest.CaptureFixture[str], busy_port: int, command: str, code: int, said: str
) -> None:
    skip_without("torch", "transformers", "zmq", "tokenizers", "httptools", "msgspec")
    assert said in refused(capsys, code, *command.replace("BUSY", str(busy_port)).split())


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("command", "code", "said"), FABRIC)
def test_fabrics(
    capsys: pytest.CaptureFixture[str], busy_port: int, command: str, code: int, said: str
) -> None:
    skip_without("zenoh", "cryptography", "sqlalchemy", "alembic", "httptools", "torch")
    assert said in refused(capsys, code, *command.replace("BUSY", str(busy_port)).split())


@pytest.mark.parametrize(
    "flags", [["-o", "nowhere/plan.json"], ["--effort", "huge"], ["--running", "missing.json"]]
)
@pytest.mark.usefixtures("here")
def test_flags_are_checked_before_planning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    def plan(*_: object, **__: object) -> None:
        raise AssertionError("planning began")

    monkeypatch.setattr("atoll.api.fleet.Fleet.plan", plan)
    monkeypatch.setattr("atoll.prove.planning.plan", plan)
    capsys.readouterr()
    assert run(["plan", "good.yaml", *flags]) in (2, 3)
    assert "planning began" not in capsys.readouterr().err
