"""A plan carries where its weights come from: what starts it later reads that, not the catalog of the day."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.api.fleet import Fleet
from atoll.api.fleet_plan import FleetPlan
from atoll.catalog.catalog import Catalog
from atoll.catalog.checkpoints import Checkpoint
from atoll.catalog.overlay import apply_overlay
from atoll.cli.plan_commands import write_commands
from atoll.control.operation.options import OperationOptions, make_record
from atoll.core.errors import InputError
from atoll.plan.files.read import read_plan
from atoll.plan.plan import Plan
from atoll.runtime.local.weights import list_needed

FLEET = """
services:
  chat: {model: qwen3-8b@int4, ttft: 2s, tpot: 80ms, rate: 1/s, lengths: 512x128}
  code: {model: codellama-34b@fp8, ttft: 4s, tpot: 150ms, rate: 0.1/s, lengths: 512x128}
  odd: {model: phi-4-14b@mxfp4, ttft: 4s, tpot: 150ms, rate: 0.1/s, lengths: 512x128}
settings: {engines: [vllm]}
pool: {offers: [{region: here, node_type: "H100:1", available: 6, usd_per_hour: 2}]}
"""
AWQ = Checkpoint("Qwen/Qwen3-8B-AWQ", "4da05a8edb55c6046cce958586c33b61da07bb79", "awq")
PUBLISHED = {
    "chat": AWQ,
    "code": Checkpoint("codellama/CodeLlama-34b-Instruct-hf", method="fp8", quantization="fp8"),
}
LATER = apply_overlay(
    Catalog.default(), {"models": {"qwen3-8b": {"checkpoints": {"int4": "someone/else"}}}}
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[FleetPlan, Path]:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "fleet.yaml").write_text(FLEET)
    plan = Fleet.load(folder / "fleet.yaml").plan(capacity_only=True)
    plan.save(folder / "plan.json")
    return plan, folder


def test_a_plan_names_repository_revision_and_method(made: tuple[FleetPlan, Path]) -> None:
    plan, folder = made
    assert plan.checkpoints == PUBLISHED
    read = read_plan(folder / "plan.json")
    assert read.checkpoints == PUBLISHED
    written = json.loads((folder / "plan.json").read_text())["checkpoints"]
    assert written["chat"] == {
        "repository": "Qwen/Qwen3-8B-AWQ",
        "revision": AWQ.revision,
        "method": "awq",
    }
    assert read.to_json() == Plan.from_json(read.to_json()).to_json()


def test_commands_are_those_of_the_plan_and_not_of_a_later_catalog(
    made: tuple[FleetPlan, Path],
) -> None:
    plan = read_plan(made[1] / "plan.json")
    for catalog in (Catalog.default(), LATER):
        lines = {each.instance.split("-")[0]: each.lines for each in write_commands(plan, catalog)}
        (chat,) = lines["chat"]
        assert f"vllm serve {AWQ.repository} --revision {AWQ.revision} " in chat
        (code,) = lines["code"]
        assert "vllm serve codellama/CodeLlama-34b-Instruct-hf" in code
        assert "--quantization fp8" in code
        assert "--revision" not in code
        assert lines["odd"] == ()


def test_a_plan_without_checkpoints_takes_the_catalogs(made: tuple[FleetPlan, Path]) -> None:
    older = json.loads((made[1] / "plan.json").read_text())
    del older["checkpoints"]
    plan = Plan.from_json(json.dumps(older))
    assert plan.checkpoints == {}
    assert "checkpoints" not in json.loads(plan.to_json())
    lines = [line for each in write_commands(plan, LATER) for line in each.lines]
    assert any("vllm serve someone/else " in line for line in lines)


def test_up_and_serve_read_the_plan(made: tuple[FleetPlan, Path], tmp_path: Path) -> None:
    plan, folder = made
    problem = plan.problem
    changed = plan.model_copy(
        update={"checkpoints": {**PUBLISHED, "chat": Checkpoint("me/mine", "v1", "awq")}}
    )
    options = OperationOptions.model_validate({"models": ["odd=/models/odd"]})
    for given, expected in ((changed, "hf://me/mine@v1"), (None, AWQ.source)):
        record = make_record(options, problem, folder / "fleet.yaml", None, (), given)
        assert record.weights["chat"].source == expected
        assert record.weights["code"].quantization == "fp8"
        assert record.weights["odd"].source == "/models/odd"
    (chat,) = list_needed(plan.models, ["chat"], LATER, changed)
    assert chat.advice == "`models` chat=hf://me/mine@v1"


@pytest.mark.parametrize(
    "wrong",
    [{"repository": "a/b", "kept": ["x"]}, {"repository": "a/b", "more": 1}, {"revision": "v1"}, 3],
)
def test_a_plan_file_with_wrong_checkpoints_is_refused(
    made: tuple[FleetPlan, Path], wrong: object
) -> None:
    fields = json.loads((made[1] / "plan.json").read_text())
    fields["checkpoints"] = {"chat": wrong}
    with pytest.raises(InputError):
        Plan.from_json(json.dumps(fields))
