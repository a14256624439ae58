"""What is shown of a fleet whose target does not answer, and of one that is operated from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from atoll.cli.fleet_status import draw_fleet_status
from atoll.control.operation import fleet_status
from atoll.control.operation.fleet_home import Entrance, FleetHome, FleetRecord, WeightsRecord
from atoll.control.operation.fleet_status import look_at_fleet
from atoll.control.operation.gateways import TRAFFIC, GatewayAddress, GatewayReply
from atoll.control.operation.operated import TargetLook
from atoll.control.operation.sightings import Sightings
from atoll.control.operation.targets import PoolTarget
from atoll.core.errors import AtollError
from atoll.deploy.target_table import TargetSettings
from atoll.telemetry.traffic_page import ModelTraffic, TrafficPage, WindowSums
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


def test_traffic_is_that_of_all_gateways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    window = dict.fromkeys(WindowSums.model_fields, 0) | {"seconds": 300.0, "kinds": {}}
    counted = {"arrivals": 600, "judged": 10, "kept": 8}
    one = ModelTraffic.parse({"minute": window, "five_minutes": window | counted, "hour": window})

    async def ask(address: GatewayAddress, _method: str, page: str, _body: object) -> GatewayReply:
        if address.url == "http://dead":
            raise AtollError("it does not answer")
        said = TrafficPage(models={"m": one}) if page == TRAFFIC else None
        return GatewayReply(200, b"{}" if said is None else said.to_json().encode())

    monkeypatch.setattr(fleet_status, "ask_gateway", ask)
    monkeypatch.setattr(fleet_status, "look_at_targets", lambda *_: ())
    record = FleetRecord(
        name="lab",
        source="lab.yaml",
        targets=TargetSettings(names=("kubernetes",)),
        weights={"chat": WeightsRecord(source="w", names=("m",))},
        since_s=0.0,
        up=True,
        entrance=Entrance(
            url="http://dead",
            others=("http://a", "http://b"),
            admin_token="/t",
            token="/t",
            observer="/t",
        ),
    )
    (row,) = look_at_fleet(FleetHome(tmp_path), record, 60.0).traffic
    assert (row.requests_per_s, row.judged, row.kept) == (4.0, 20, 16)
