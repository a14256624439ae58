"""Commands that ask a console which runs here, before a real gateway: they say what the database says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.cli import main as cli
from atoll.cli.console_client import CONSOLE_VARIABLE, KEY_VARIABLE
from atoll.dashboard.links import LoginLinks, links_folder, socket_of
from tests.dashboard.browser.test_real import RealSite

Captured = pytest.CaptureFixture[str]


class ConsoleHere(RealSite):
    """A console that other processes of its user find, too."""

    async def _start(self) -> None:
        await super()._start()
        folder = links_folder(int(self.url.rpartition(":")[2]))
        self.announced = LoginLinks(folder)
        self.announced.announce(self.url)
        await self._dashboard.open_socket(socket_of(folder))

    async def _stop(self) -> None:
        self.announced.forget()
        await super()._stop()


@pytest.fixture
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConsoleHere]:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    for name in (CONSOLE_VARIABLE, KEY_VARIABLE, "ATOLL_DB"):
        monkeypatch.delenv(name, raising=False)
    made = ConsoleHere(tmp_path)
    made.start()
    yield made
    made.stop()


def ask(capsys: Captured, *words: str) -> Any:
    capsys.readouterr()
    assert cli.run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_keys_and_usage_are_those_of_the_gateway(console: ConsoleHere, capsys: Captured) -> None:
    db = ("--db", str(console.folder / "accounts.db"))
    made = ask(capsys, "keys", "create", "lab", "--tokens-per-day", "1M", "--provider", "ethz")
    (listed,) = ask(capsys, "keys", "list")
    assert made == {"key": made["key"]} | listed
    assert ask(capsys, "keys", "list", *db) == [listed]
    assert listed["policy"]["providers"] == ["ethz"]
    other = ask(capsys, "keys", "create", "free")
    assert console.ask(other["key"]) == 200
    until_s = time.monotonic() + 30.0
    while not (sums := ask(capsys, "usage", "--by", "model", *db)) and time.monotonic() < until_s:
        time.sleep(0.05)  # the ledger is written about once a second
    assert sums
    for words in (("usage", "--by", "model"), ("usage", "--key", "free"), ("keys", "show", "free")):
        assert ask(capsys, *words) == ask(capsys, *words, *db), words
    target = console.folder / "usage.csv"
    assert cli.run(["usage", "--csv", str(target)]) == 0
    assert len(target.read_text().splitlines()) == 2
    assert cli.run(["keys", "revoke", "free"]) == 0
    assert console.ask(other["key"]) == 401
    assert cli.run(["keys", "show", "nobody"]) == 4
    assert cli.run(["keys", "list", *db, "--console", console.url]) == 2


def test_a_fleet_is_the_same_by_url_by_socket_and_in_this_process(
    console: ConsoleHere, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ask(capsys, "status", "--state", str(console.folder / "home"))
    assert [each["operated"]["fleet"] for each in here] == ["lab"]
    monkeypatch.setenv(KEY_VARIABLE, console.make_key("viewer"))
    there = ask(capsys, "status", "lab", "--console", console.url)
    for said in (*here, *there):
        del said["operated"]["home"]
    assert there == here
    assert ask(capsys, "history", "lab", "--console", console.url) == []
    assert cli.run(["status", "other", "--console", console.url]) == 4
    # Lines may have words of requests in them.
    assert cli.run(["logs", "lab", "gateway", "--console", console.url]) == 1
    monkeypatch.setenv(KEY_VARIABLE, console.make_key("operator"))
    capsys.readouterr()
    assert cli.run(["logs", "lab", "gateway", "--console", console.url]) == 0
    assert capsys.readouterr().out == "gateway starts\n"


def test_a_console_of_another_state_folder_is_not_asked(
    console: ConsoleHere, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ask(capsys, "keys", "create", "lab")
    assert len(ask(capsys, "keys", "list", "--db", str(console.folder / "accounts.db"))) == 1
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "elsewhere"))
    assert ask(capsys, "keys", "list") == []
