"""`atoll profile` of components: rates that a fleet file takes, and what people get wrong."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.cli.main import run
from atoll.plan.files.fleet_file import parse_fleet
from tests.runtime.local.test_executor_profile import WORKED

SMALL = ["--model", "qwen3-omni-30b", "--seconds", "0.1", "--batch", "1", "--items", "1"]
SMALL += ["--shrink", "8"]
FLEET = """\
services:
  talk:
    model: qwen3-omni-30b
    rate: 1/s
    ttft: 3s
    tpot: 100ms
    classes:
      text: {share: 50%, input: 400, output: 150}
      audio -> audio: {share: 50%, input: 50, output: 60, audio: 8s, speech: 12s}
pool:
  owned: {here: {"L4:4": 2}}
"""


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run a command that must be refused, and return the one line that says why."""
    capsys.readouterr()
    assert run(["profile", *args]) in (2, 3, 4)
    line = capsys.readouterr().err.strip()
    assert line.startswith("error: ")
    assert "\n" not in line
    assert "(fix: " in line or "known: " in line
    return line


@pytest.mark.engine
@pytest.mark.skipif(find_spec("torch") is None, reason="needs the extra 'engine'")
def test_a_measured_rate_goes_into_a_fleet_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rates.yaml"
    asked = ["--component", "code2wav", *SMALL, "--name", "talk", "--as", "L4:1", "-o", str(out)]
    assert run(["profile", *asked, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["unit"] == "speech_s"
    assert printed["best_batch"] == 1
    assert any("one layer in 8" in note for note in printed["notes"])
    rates = yaml.safe_load(out.read_text())["services"]["talk"]["rates"]
    assert rates == printed["rates"]
    seconds = printed["batches"][0]["seconds"]
    assert float(rates["code2wav"]["L4"]["speech_s"].removesuffix("/s")) == pytest.approx(
        0.1 / seconds, rel=1e-4
    )
    fleet = yaml.safe_load(FLEET)
    fleet["services"]["talk"]["rates"] = rates
    (rate,) = parse_fleet(yaml.safe_dump(fleet)).services[0].rates
    assert (rate.part, rate.on, rate.unit) == ("code2wav", "L4", "speech_s")


def test_executors_become_seconds_and_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "executors.json", tmp_path / "rates.json"
    path.write_text(json.dumps(WORKED))
    asked = ["profile", "--from-executors", str(path), "--as", "L4:1"]
    assert run(asked) == 0
    text = capsys.readouterr().out
    assert "333.3ms" in text
    assert "vision 4/s on L4" in text
    assert run([*asked, "--name", "see", "-o", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["alpha"]["both"] == pytest.approx(4 / 3)
    assert len(printed["seconds"]) == 6
    rates = {
        "vision": {"L4": {"request": "4/s"}},
        "llm": {"L4": {"request": "4/s"}},
        "vision+llm": {"L4": {"request": "2/s"}},
    }
    assert printed["rates"] == rates
    assert json.loads(out.read_text()) == {"services": {"see": {"rates": rates}}}


def test_rates_are_added_to_those_that_a_file_has(tmp_path: Path) -> None:
    path, out = tmp_path / "executors.json", tmp_path / "rates.yaml"
    path.write_text(json.dumps(WORKED))
    first = {"talk": {"rates": {"llm": {"L4": {"request": "1/s", "token": "9/s"}}}}}
    out.write_text(yaml.safe_dump({"services": first}))
    for name in ("talk", "other"):
        asked = ["profile", "--from-executors", str(path), "--as", "L4:1", "--name", name]
        assert run([*asked, "-o", str(out)]) == 0
    found: dict[str, Any] = yaml.safe_load(out.read_text())["services"]
    assert found["talk"]["rates"]["llm"] == {"L4": {"request": "4/s", "token": "9/s"}}
    assert found["talk"]["rates"]["vision"] == {"L4": {"request": "4/s"}}
    assert set(found) == {"talk", "other"}


def test_a_fleet_file_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, fleet = tmp_path / "executors.json", tmp_path / "fleet.yaml"
    path.write_text(json.dumps(WORKED))
    for text in (FLEET, "services: {talk: {rate: 1/s}}", "- 1", "models: {}\npool: {}"):
        fleet.write_text(text)
        asked = ["--from-executors", str(path), "--name", "talk", "-o", str(fleet)]
        assert "more than rates" in refused(capsys, *asked)
        assert fleet.read_text() == text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--component", "dit"], "--component needs --model"),
        (["--component", "eyes", "--model", "qwen-image"], "unknown component of qwen-image"),
        (["--component", "code2wav", *SMALL, "--as", "L4:2"], "--as: a component is measured on"),
        (["--component", "code2wav", *SMALL, "--size", "448"], "--size: '448' is no size"),
        (["--component", "code2wav", *SMALL, "--batch", "1,many"], "--batch: '1,many'"),
        (["--component", "code2wav", *SMALL, "-o", "rates.txt"], ".yaml or .yml or .json"),
        (["--component", "code2wav", *SMALL, "--server", "http://x"], "give one of them"),
        (["--from-executors", "x.json", "-o", "rates.yaml"], "--out needs --name"),
        (["--from-executors", "x.json", "--component", "dit"], "give it alone"),
    ],
)
def test_what_people_get_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOLL_CATALOG", raising=False)
    assert said in refused(capsys, *args)
    assert not list(tmp_path.iterdir())
