"""A fleet's file over HTTP: read, checked, replaced by an operator, kept; and models to put into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.control.operation.fleet_home import FleetHome, FleetRecord, home_of
from atoll.deploy.target_table import TargetSettings
from atoll.planner.planner_api import PlannerApi
from tests.planner.asking import ask, running
from tests.planner.test_fleet_edit import FLEET

PATH = "/atoll/v1/fleets/lab/file"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetHome:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    source = tmp_path / "lab.yaml"
    source.write_text(FLEET)
    found = home_of("lab")
    found.make()
    targets = TargetSettings.parse({"names": ["local"], "local": {"pretend": True}})
    found.write(FleetRecord(name="lab", source=str(source), targets=targets, since_s=7.0))
    return found


async def put(at: PlannerApi, file: str, version: str, **headers: str) -> tuple[int, Any]:
    return await ask(at, "PUT", PATH, {"file": file, "version": version}, **headers)


async def test_an_operator_replaces_the_file_and_others_look(
    home: FleetHome, tmp_path: Path
) -> None:
    source = tmp_path / "lab.yaml"
    wanted = FLEET.replace("rate: 1/s   #", "rate: 2/s   #")
    async with running() as at:
        status, said = await ask(at, "GET", PATH, role="viewer")
        assert (status, said["file"], said["can_change"]) == (200, FLEET, True)
        assert said["services"]["code"]["rate"] == "1/s"
        version = said["version"]
        for role in ("viewer", "member"):
            assert (await put(at, wanted, version, role=role))[0] == 403
        assert source.read_text() == FLEET
        who = {"role": "operator", "owner": "ada"}
        status, said = await put(at, wanted, version, **who)
        assert (status, said["changed"]) == (200, "code changed (rate)")
        assert source.read_text() == wanted
        last = home.history.read(last=1)[0]
        assert last.text == "ada has replaced the fleet file: code changed (rate)"
        # Based on what it was: somebody has been there meanwhile.
        status, refused = await put(at, FLEET, version)
        assert (status, refused["error"]["code"]) == (409, "changed")
        _, said = await ask(at, "GET", PATH)
        assert [each["version"] for each in said["earlier"]] == [version]
        _, old = await ask(at, "GET", f"{PATH}?version={version}")
        assert old["file"] == FLEET


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("name: lab\n  x: [", None),
        ("[]", "file"),
        (FLEET.replace("llama-3.1-8b", "no-such-model"), "services.chat.model"),
        (FLEET.replace("rate: 1/s   #", "rate: fast #"), "services.code.rate"),
        (FLEET.replace("name: lab", "name: other"), "file.name"),
        (f"{FLEET}catalog: /etc/hostname\n", "file.catalog"),
        (
            f"{FLEET}  a.b: 1\n".replace(
                "  code:", "  c.d: {model: qwen3-8b, rate: 1/s, classes: /etc/hostname}\n  code:"
            ),
            "file.services.c.d.classes",
        ),
    ],
    ids=["yaml", "list", "model", "unit", "name", "catalog", "classes"],
)
async def test_what_is_no_fleet_of_that_name_changes_nothing(
    home: FleetHome, tmp_path: Path, text: str, field: str | None
) -> None:
    del home
    async with running() as at:
        version = (await ask(at, "GET", PATH))[1]["version"]
        status, said = await put(at, text, version)
        assert status in (400, 404), said
        if field is not None:
            assert said["error"]["param"] == field
        assert "/etc" not in json.dumps(said) or "name another" in said["error"]["message"]
    assert (tmp_path / "lab.yaml").read_text() == FLEET


async def test_weights_that_nobody_finds_are_refused(home: FleetHome, tmp_path: Path) -> None:
    del home, tmp_path
    own = "catalog: {models: {mine: {like: qwen3-8b, hf_id: null}}}\n"
    service = "  mine: {model: mine, ttft: 2s, tpot: 100ms, rate: 1/s, lengths: 9x9}\n"
    text = FLEET.replace("  # the pool", f"{service}  # the pool") + own
    async with running() as at:
        version = (await ask(at, "GET", PATH))[1]["version"]
        status, said = await put(at, text, version)
        assert status == 400
        assert "weights" in said["error"]["message"]
        status, _ = await put(at, text.replace("null", "/models/mine"), version)
        assert status == 200


async def test_an_example_is_read_and_not_replaced(home: FleetHome) -> None:
    del home
    path = "/atoll/v1/fleets/quickstart/file"
    async with running() as at:
        _, said = await ask(at, "GET", path)
        assert said["can_change"] is False
        body = {"file": said["file"], "version": said["version"]}
        status, refused = await ask(at, "PUT", path, body)
        assert (status, refused["error"]["code"]) == (409, "not_operated")


async def test_models_are_listed_and_read_from_a_folder(home: FleetHome, tmp_path: Path) -> None:
    del home
    path = "/atoll/v1/catalog/models"
    folder = tmp_path / "My Model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    async with running() as at:
        _, said = await ask(at, "GET", path, role="viewer")
        by_name = {each["name"]: each for each in said["models"]}
        assert by_name["qwen3-8b"]["is_text"]
        assert by_name["qwen3-8b"]["params"] > 8e9
        _, known = await ask(at, "POST", path, {"source": "Qwen/Qwen3-8B"})
        assert (known["name"], known["entry"]) == ("qwen3-8b", None)
        _, own = await ask(at, "POST", path, {"source": str(folder)})
        assert own["name"] == "my-model"
        assert own["entry"] == {"hf_config": config, "hf_id": str(folder)}
        assert own["has_weights"]
        for wrong in ("nonsense", str(tmp_path / "none"), "/etc"):
            status, refused = await ask(at, "POST", path, {"source": wrong})
            assert status in (400, 404), refused
        asked = await ask(at, "POST", path, {"source": str(folder)}, role="member")
        assert asked[0] == 403


async def test_logs_of_a_fleets_own_processes_are_shown_to_operators(home: FleetHome) -> None:
    (home.folder / "gateway.log").write_text("".join(f"line {n}\n" for n in range(5)))
    path = "/atoll/v1/fleets/lab/logs"
    async with running() as at:
        _, said = await ask(at, "GET", f"{path}/gateway?lines=2", role="operator")
        assert said["text"].split("\n") == ["line 3", "line 4"]
        assert (await ask(at, "GET", f"{path}/gateway", role="member"))[0] == 403
        assert (await ask(at, "GET", f"{path}/chat-1"))[0] == 404
