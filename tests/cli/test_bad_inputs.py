"""What people get wrong, over all commands: a line says what is wrong and what to change; no work begins."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
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
HEAD = "arrival_s,input_tokens,output_tokens\n"
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
    """A folder with a good fleet, a good cluster, the plan of the fleet, and a folder."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "good.yaml").write_text(FLEET)
    (folder / "cluster.yaml").write_text(CLUSTER)
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


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run a command that must be refused, and return the one line that says why."""
    capsys.readouterr()
    code = run(list(args))
    printed = capsys.readouterr()
    line = printed.err.strip()
    assert code in (2, 3, 4, 7), (code, line)
    assert line.startswith("error: "), line
    assert "\n" not in line
    assert any(words in line for words in FIXES), line
    assert not LEAKS.search(line), line
    return line


FLEETS: list[tuple[str, str, str]] = [
    ("ttft: 1200ms, ", "", "ttft: this field is required"),
    ("ttft: 1200ms", "ttft: fast", "as a duration"),
    ("ttft: 1200ms", "ttft: 1200", "less than or equal to 600"),
    ("ttft: 1200ms", "ttft: -1s", "negative"),
    ("ttft: 1200ms", "ttft: 0s", "greater than 0"),
    ("rate: 10/s", "rate: -1/s", "negative"),
    ("rate: 10/s", "rate: often", "as a rate"),
    ("lengths: 512x128", "lengths: long", "unknown length mix"),
    ("lengths: 512x128", "lengths: 0x128", "cannot read 296 as lengths"),
    ("lengths: 512x128", "lengths: {input: 5}", "lengths.output: this field is required"),
    ("lengths: 512x128", "lengths: [1, 2]", "1024x256"),
    ("lengths: 512x128", "lengths: 7", "1024x256"),
    ("phi-4-14b", "phi-5", "unknown model"),
    ("phi-4-14b", "phi-4-14b@fp3", "unknown dtype"),
    ("phi-4-14b", "./nowhere/config.json", "unknown model"),
    ("L4:1", "L5:1", "unknown gpu"),
    ("L4:1", "L4:0", "not a node type"),
    ("available: 8", "available: -1", "greater than or equal to 0"),
    ("available: 8", "available: many", "valid integer"),
    ("usd_per_hour: 0.80", "usd_per_hour: cheap", "as a price"),
    ("available: 8", "avail: 8", "no such field"),
    ("phases: together", "phases: both", "'apart'"),
    ("max_nodes_per_instance: 3", "max_nodes_per_instance: 0", "greater than or equal to 1"),
    ("settings: {", "settings: {colour: red, ", "no such field"),
    ("rate: 10/s", "rate: 10/s, attainment: 120%", "attainment"),
    ("rate: 10/s", "rate: 10/s, burstiness: -1", "burstiness"),
    ("rate: 10/s", "rate: 10/s, headroom: 0", "headroom"),
    ("rate: 10/s", "rate: 10/s, only: [Z9]", "unknown gpu"),
    ("pool:", "poool:", "write 'pool'"),
    ("services:\n", "services: {}\nx:\n", "services: at least 1 needed"),
    ("  chat:", "  'a b':", "not a valid name"),
    ("services:\n", "services: [\n", "not valid YAML"),
    ("services:\n", "services:\n\tx: 1\n", "spaces, not tabs"),
    ("settings:", "services: {}\nsettings:", "given twice"),
    ("settings:", "limits: {budget: free}\nsettings:", "as a price"),
    ("settings:", "catalog: {gpus: {X9: {memory: 1}}}\nsettings:", "gpus.X9.memory"),
    ("pool:\n", "pool:\n  cloud: {regions: [mars]}\n", "unknown region"),
    ("pool:\n", "pool:\n  owned: {here: {RTX3090:2: four}}\n", "valid integer"),
]


@pytest.mark.parametrize(("old", "new", "said"), FLEETS)
def test_fleet_files(
    here: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    assert old in FLEET
    (here / "bad.yaml").write_text(FLEET.replace(old, new, 1))
    line = refused(capsys, "plan", "bad.yaml", "-o", "never.json")
    assert said in line
    assert line.startswith("error: bad.yaml")
    assert not (here / "never.json").exists()


CLUSTERS: list[tuple[str, str, str]] = [
    ("[a, b]", "[a, a]", "names two things"),
    ("L4:1", "L9:1", "unknown gpu"),
    ("10Gbit/s", "fast", "as a bandwidth"),
    ("10Gbit/s", "10", "bandwidth"),
    ("latency: 1ms", "latency: -1ms", "negative"),
    ('["*", "*"]', '["*"]', "at least 2 needed"),
    ('["*", "*"]', '["a", "zz"]', "unknown node or site"),
    ("  nodes:", "  nodez:", "write 'nodes'"),
    ("[a, b]", "0", "greater than or equal to 1"),
    ("cluster:", "pool: {owned: {here: {L4:1: 2}}}\ncluster:", "beside a pool"),
]


@pytest.mark.parametrize(("old", "new", "said"), CLUSTERS)
def test_cluster_files(
    here: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    assert old in CLUSTER
    (here / "bad.yaml").write_text(CLUSTER.replace(old, new, 1))
    assert said in refused(capsys, "plan", "bad.yaml")


PLANS: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("layers", lambda p: p["instances"][0]["nodes"][-1].update(end=999), ", 999)"),
    ("service", lambda p: p["instances"][0].update(service="nobody"), "no role of nobody"),
    ("routes", lambda p: p.update(routes=[]), "no request is sent to"),
    ("gpu", lambda p: p["instances"][0]["nodes"][0].update(node_type="ZZ:1"), "unknown gpu"),
    ("nothing", lambda p: p.update(instances=[]), "no instances"),
    ("share", lambda p: p["routes"][0].update(share=7), "less than or equal to 1"),
    ("nobody", lambda p: p["routes"][0].update(instances=["zz"]), "which is not in the plan"),
    ("version", lambda p: p.update(schema_version=9), "schema_version"),
    ("cost", lambda p: p.update(usd_per_hour=0), "instances cost"),
    ("field", lambda p: p.update(colour="red"), "leave 'colour' out"),
    ("empty", lambda p: p.clear(), "this field is required"),
]


@pytest.mark.parametrize(("name", "change", "said"), PLANS, ids=[name for name, _, _ in PLANS])
def test_plans(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: Callable[[dict[str, Any]], object],
    said: str,
) -> None:
    changed = plan_of(here)
    change(changed)
    (here / f"bad-{name}.json").write_text(json.dumps(changed))
    assert said in refused(capsys, "simulate", f"bad-{name}.json", "--fleet", "good.yaml")


TRACES: list[tuple[str, str]] = [
    ("", "empty"),
    ("a,b\n1,2\n", "names no known columns"),
    (HEAD, "no requests"),
    (HEAD + "x,y,z\n", "not a time"),
    (HEAD + "-1,5,5\n", "not a time"),
    (HEAD + "0,0,5\n", "whole number from 1"),
    (HEAD + "1,2\n", "not 3 fields"),
    ("input_tokens,output_tokens\n5,5\n", "no arrivals"),
    ('{"timestamp": 0, "input_length": 5}\n', "output_length"),
    (AZURE + "yesterday,5,5\n", "not a date and time"),
    (
        AZURE + "2026-11-16 18:15:46,5,5\n2026-11-16T18:15:47+02:00,5,5\n",
        "some times state their time zone (+02:00 at line 3) and others do not (line 2)",
    ),
]


@pytest.mark.parametrize(("text", "said"), TRACES)
@pytest.mark.parametrize("verb", ["describe", "simulate"])
def test_traces(
    here: Path, capsys: pytest.CaptureFixture[str], verb: str, text: str, said: str
) -> None:
    (here / "bad.csv").write_text(text)
    asked = {
        "describe": ("trace", "describe", "bad.csv"),
        "simulate": ("simulate", "plan.json", "--fleet", "good.yaml", "--trace", "bad.csv"),
    }
    assert said in refused(capsys, *asked[verb])


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


OVERLAYS: list[tuple[str, str]] = [
    ("gpuz: {}\n", "write 'gpus'"),
    ("gpus: {X9: {like: NOPE}}\n", "unknown gpu"),
    ("gpus: {L4: {memory: lots}}\n", "as a size"),
    ("gpus: 5\n", "a mapping is needed"),
    ("- gpus\n", "a mapping of sections"),
]


@pytest.mark.parametrize(("text", "said"), OVERLAYS)
def test_overlays(here: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    (here / "bad-overlay.yaml").write_text(text)
    assert said in refused(capsys, "plan", "good.yaml", "--overlay", "bad-overlay.yaml")


SIMULATE = "simulate plan.json --fleet good.yaml"
COMMANDS: list[tuple[str, str]] = [
    ("plan missing.yaml", "no such file"),
    ("plan folder", "is a directory"),
    ("plan plan.json", "is a plan, not a fleet file"),
    ("plan good.yaml --deadline 0s", "--deadline is 0"),
    ("plan good.yaml --deadline soon", "--deadline: cannot read"),
    ("plan good.yaml --gap big", "--gap: cannot read"),
    ("plan good.yaml --effort huge", "as an effort"),
    ("plan good.yaml --solver best", "unknown solver"),
    ("plan good.yaml --objective speed", "unknown objective"),
    ("plan good.yaml -o nowhere/plan.json", "no such folder"),
    ("plan good.yaml -o folder", "is a directory"),
    ("plan good.yaml -o good.yaml", "read or written for this plan already"),
    ("plan good.yaml -o same.html --report same.html", "read or written for this plan already"),
    ("plan good.yaml --report r.pdf", ".html or .svg"),
    ("plan good.yaml --report r.svg", ".html file"),
    ("plan good.yaml --overlay missing.yaml", "no such file"),
    ("plan good.yaml --running missing.json", "no such file"),
    ("plan good.yaml --running good.yaml", "is no plan"),
    ("plan good.yaml --stats-out s.txt", ".json file"),
    ("plan good.yaml --partial", "for fixed clusters"),
    ("plan cluster.yaml --solver optimal", "fixed cluster"),
    ("plan", "Missing argument"),
    ("plan good.yaml extra", "unexpected extra argument"),
    ("plan good.yaml --colour", "No such option"),
    ("pln good.yaml", "Did you mean 'plan'"),
    ("simulate plan.json", "add --fleet"),
    ("simulate good.yaml --fleet good.yaml", "is no plan"),
    ("simulate plan.json --fleet cluster.yaml", "unknown service"),
    (f"{SIMULATE} --trace missing.csv", "no such file"),
    (f"{SIMULATE} --trace azure", "did you mean"),
    (f"{SIMULATE} --trace azure-conv@fast", "as a rate"),
    (f"{SIMULATE} --service chat", "add --trace"),
    (f"{SIMULATE} --trace azure-conv@1/s --service nobody", "--service: unknown service"),
    (f"{SIMULATE} --for 0s", "give it some time"),
    (f"{SIMULATE} --for ever", "--for: cannot read"),
    (f"{SIMULATE} --policy luck", "unknown policy"),
    (f"{SIMULATE} --batching x", "unknown batching"),
    (f"{SIMULATE} --seed -1", "--seed"),
    (f"{SIMULATE} --fail x", "60s INSTANCE/NODE"),
    (f"{SIMULATE} --until 0s", "ends before it begins"),
    (f"{SIMULATE} --attain 200%", "--attain: cannot read"),
    (f"{SIMULATE} --report r.pdf", ".html file"),
    (f"{SIMULATE} --requests nowhere/r.csv", "no such folder"),
    ("trace describe missing.csv", "no such file"),
    ("trace generate azure", "did you mean"),
    ("trace convert missing.csv x.foo", "cannot tell the format"),
    ("explain plan.json", "Missing option '--fleet'"),
    ("explain missing.json --fleet good.yaml", "no such file"),
    ("validate good.yaml", "is no plan"),
    ("diff plan.json missing.json", "no such file"),
    ("templates nope", "unknown model"),
    ("templates qwen3-32b --nodes L9:1", "unknown gpu"),
    ("perf show nope L4:1", "unknown model"),
    ("perf calibrate missing.csv", "no such file"),
    ("catalog show nope", "unknown name"),
    ("catalog prices --region mars", "unknown region"),
    ("import helix missing", "Missing option"),
    ("init good.yaml", "exists already"),
    ("init nowhere/fleet.yaml", "does not exist"),
    ("demo --examples folder", "has no quickstart.yaml"),
]


@pytest.mark.parametrize(("command", "said"), COMMANDS)
def test_commands(here: Path, capsys: pytest.CaptureFixture[str], command: str, said: str) -> None:
    before = {path: path.read_bytes() for path in here.iterdir() if path.is_file()}
    assert said in refused(capsys, *command.split())
    assert {path: path.read_bytes() for path in here.iterdir() if path.is_file()} == before


SERVING: list[tuple[str, str]] = [
    ("serve missing.json", "no such file"),
    ("serve plan.json --port 99999", "less than or equal to 65535"),
    ("serve plan.json --port -1", "--port"),
    ("serve plan.json --port http", "--port"),
    ("serve plan.json --port BUSY", "is in use"),
    ("serve plan.json --host 203.0.113.7", "no address of this machine"),
    ("serve plan.json --engine tgi", "unknown engine"),
    ("serve plan.json --policy luck", "unknown policy"),
    ("serve plan.json --kv lots", "as a size"),
    ("serve plan.json --deadline x", "--deadline: cannot read"),
    ("serve plan.json --drain -1s", "negative"),
    ("serve plan.json --log nowhere/x.log", "no such folder"),
    ("serve plan.json --port 0", "weights are needed: chat (phi-4-14b), mini (llama-3.1-8b)"),
    ("serve good.yaml --port 0", "--model chat=hf://microsoft/phi-4"),
    ("serve plan.json --port 0 --only nobody", "--only: unknown model"),
    ("serve plan.json --port 0 --model nobody=/x", "--model: unknown model"),
    ("serve plan.json --port 0 --model /nowhere", "no such model"),
    ("serve plan.json --port 0 --model ftp://x", "unknown kind of model source"),
    ("serve plan.json --port 0 --model hf://", "hf://ORG/NAME"),
    ("serve good.yaml --port 0 --fleet good.yaml", "leave --fleet out"),
]
FABRIC: list[tuple[str, str]] = [
    ("serve plan.json --port 0 --fabric @missing", "no such file"),
    ("serve plan.json --port 0 --stand-in --fabric open://127.0.0.1:1", "not offered to a fabric"),
    ("gateway --port BUSY --fabric open://127.0.0.1:1", "is in use"),
    ("gateway --port 99999", "less than or equal to 65535"),
    ("gateway --port 0 --config missing.yaml", "no such file"),
    ("gateway --port 0", "no fabric is named"),
    ("gateway --port 0 --fabric rubbish", "no fabric token"),
    ("hub @missing", "no such file"),
    ("hub rubbish", "no fabric token"),
    ("hub --open --log nowhere/x.log", "cannot write"),
    ("join --fabric rubbish", "no fabric token"),
    ("nodes --fabric missing", "no fabric token"),
    ("assign n --fabric missing", "--model or --stop"),
    ("fabric init --name lab --hub host:99999", "is no address"),
    ("fabric issue x", "Missing option '--provider'"),
]


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port of this machine that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("command", "said"), SERVING)
def test_serving(
    capsys: pytest.CaptureFixture[str], busy_port: int, command: str, said: str
) -> None:
    for package in ("torch", "transformers", "zmq", "tokenizers", "httptools", "msgspec"):
        pytest.importorskip(package, reason="needs the extras 'engine' and 'serve'")
    assert said in refused(capsys, *command.replace("BUSY", str(busy_port)).split())


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("command", "said"), FABRIC)
def test_fabrics(
    capsys: pytest.CaptureFixture[str], busy_port: int, command: str, said: str
) -> None:
    for package in ("zenoh", "cryptography", "sqlalchemy", "alembic", "httptools", "torch"):
        pytest.importorskip(package, reason="needs the extras 'fabric', 'accounts' and 'engine'")
    assert said in refused(capsys, *command.replace("BUSY", str(busy_port)).split())


@pytest.mark.parametrize(
    "flags",
    [
        ["-o", "nowhere/plan.json"],
        ["--report", "nowhere/r.html"],
        ["--report", "r.svg"],
        ["--stats-out", "s.txt"],
        ["--deadline", "soon"],
        ["--gap", "big"],
        ["--effort", "huge"],
        ["--objective", "speed"],
        ["--overlay", "missing.yaml"],
        ["--running", "missing.json"],
    ],
)
@pytest.mark.usefixtures("here")
def test_flags_are_checked_before_planning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    def plan(*_: object, **__: object) -> None:
        raise AssertionError("planning began")

    monkeypatch.setattr("atoll.api.fleet.Fleet.plan", plan)
    monkeypatch.setattr("atoll.prove.planning.plan", plan)
    refused(capsys, "plan", "good.yaml", *flags)
