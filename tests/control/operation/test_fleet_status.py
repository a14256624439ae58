"""What is shown of a fleet whose target does not answer, and of one that is operated from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from atoll.cli.fleet_status import draw_fleet_status
from atoll.control.operation import fleet_status
from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.control.operation.fleet_status import look_at_fleet
from atoll.control.operation.operated import TargetLook
from atoll.control.operation.sightings import Sightings
from atoll.control.operation.targets import PoolTarget
from atoll.deploy.target_table import TargetSettings
from tests.control.operation.test_cluster_lease import target
from tests.deploy.kubernetes.builders import build_order
from tests.deploy.kubernetes.tiny_api import TinyApi


def show(home: FleetHome, now_s: float) -> str:
    record = FleetRecord(
        name="lab",
        source="lab.yaml",
        targets=TargetSettings(names=("kubernetes",)),
        since_s=now_s - 60.0,
        up=True,
    )
    console = Console(width=200)
    with console.capture() as captured:
        console.print(draw_fleet_status(look_at_fleet(home, record, now_s), now_s))
    return captured.get()


def test_what_stood_on_a_target_that_does_not_answer_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = FleetHome(tmp_path)
    silent = TargetLook("kubernetes", None, error="the API does not answer")
    monkeypatch.setattr(fleet_status, "look_at_targets", lambda *_: (silent,))
    assert "lab: nothing is known on kubernetes" in show(home, 100.0)
    assert "who operates it is not known" in show(home, 100.0)
    api = TinyApi()
    order = build_order("chat-0")
    home.store.keep(order.instance)
    target(api).start(order)
    sightings = Sightings(home.store.sightings_path, 60.0, lambda _: True)
    sightings.hear("kubernetes", target(api).list("lab"), 90.0)
    sightings.write()
    text = show(home, 100.0)
    assert "lab: 0 of 0 ready, 1 unknown on kubernetes" in text
    assert "was starting when kubernetes last answered" in text


def test_who_holds_the_lease_of_the_cluster_operates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = TinyApi()
    deployer = target(api)
    look = TargetLook("kubernetes", PoolTarget(deployer, ()))
    monkeypatch.setattr(fleet_status, "look_at_targets", lambda *_: (look,))
    home = FleetHome(tmp_path)
    assert "nobody operates it" in show(home, api.now_s)
    deployer.lease("lab", "elsewhere", 90).acquire(api.now_s)
    assert "operated by elsewhere" in show(home, api.now_s + 80.0)
    assert "nobody operates it" in show(home, api.now_s + 100.0)
