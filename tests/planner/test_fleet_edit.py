"""Edits of a fleet file: what becomes of it, and what stays as somebody wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError, UnknownNameError
from atoll.planner.fleet_edit import FleetEdit, describe_difference, edit_text
from atoll.planner.source import read_edited
from atoll.planner.yaml_text import rewrite

FLEET = """\
# ours
name: lab   # and theirs
services:
  # people talk to it
  chat: {model: llama-3.1-8b, ttft: 1500ms, tpot: 80ms, rate: 1/s, lengths: 512x128}  # in a line
  code:
    model: qwen3-8b
    ttft: 2s
    tpot: 100ms
    rate: 1/s   # measured in May
    lengths: 1024x256

  # the pool follows
pool:
  offers:
    - {region: here, node_type: L4:1, available: 4, usd_per_hour: 0.80}
"""


def edited(**edit: object) -> tuple[str, dict[str, Any]]:
    text = edit_text(FLEET, FleetEdit.parse(edit))
    return text, yaml.safe_load(text)


def test_a_service_comes_changes_and_goes_and_comments_stay() -> None:
    new = {"model": "gemma-2-9b", "ttft": "2s", "tpot": "50ms", "rate": "2/s", "lengths": "9x9"}
    text, data = edited(services={"code": {"rate": "3/s"}, "mail": new, "chat": {"rate": "2/s"}})
    assert data["services"]["mail"] == new
    assert list(data["services"]) == ["chat", "code", "mail"]
    assert data["services"]["code"]["rate"] == "3/s"
    kept = ("# ours", "# and theirs", "# people talk to it", "# in a line", "# measured in May")
    for comment in (*kept, "# the pool follows"):
        assert comment in text
    # Nothing but those lines is another.
    gone = set(FLEET.splitlines()) - set(text.splitlines())
    assert {line.split()[0] for line in gone} == {"chat:", "rate:"}
    text, data = edited(services={"code": None})
    assert list(data["services"]) == ["chat"]
    assert "measured in May" not in text
    assert "# the pool follows" in text
    _, data = edited(services={"code": {"lengths": None, "attainment": "99%"}})
    assert "lengths" not in data["services"]["code"]
    assert data["services"]["code"]["attainment"] == "99%"


def test_what_cannot_be_edited_is_refused_with_its_field() -> None:
    with pytest.raises(UnknownNameError, match="cod"):
        edited(services={"cod": None})
    with pytest.raises(InputError, match="no service would be left"):
        edited(services={"chat": None, "code": None})
    with pytest.raises(InputError, match="only 4 L4:1"):
        edited(machines=[{"region": "here", "node_type": "L4:1", "count": -5}])


def test_machines_are_added_where_the_file_has_such_ones() -> None:
    _, data = edited(machines=[{"region": "here", "node_type": "L4:1", "count": 2}])
    assert data["pool"]["offers"][0]["available"] == 6
    _, data = edited(machines=[{"region": "lab", "node_type": "A100:2"}])
    assert data["pool"]["owned"] == {"lab": {"A100:2": 1}}
    cluster = "services: {a: {}}\ncluster: {nodes: {x: {L4:1: 2, T4:1: [t0]}}, links: []}\n"
    edit = {"machines": [{"region": "x", "node_type": "L4:1"}]}
    assert yaml.safe_load(edit_text(cluster, FleetEdit.parse(edit)))["cluster"]["nodes"] == {
        "x": {"L4:1": 3, "T4:1": ["t0"]}
    }
    named = {"machines": [{"region": "x", "node_type": "T4:1", "names": ["t1"]}]}
    assert yaml.safe_load(edit_text(cluster, FleetEdit.parse(named)))["cluster"]["nodes"]["x"] == {
        "L4:1": 2,
        "T4:1": ["t0", "t1"],
    }
    with pytest.raises(InputError, match="have names"):
        edit_text(cluster, FleetEdit.parse({"machines": [{"region": "x", "node_type": "T4:1"}]}))


def test_a_model_of_ones_own_stands_in_the_file_with_its_weights(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
    }
    path = tmp_path / "lab.yaml"
    path.write_text(FLEET)
    edit = {
        "models": {"mine": {"hf_config": config, "hf_id": "/models/mine"}},
        "services": {"code": {"model": "mine"}},
    }
    found = read_edited(path, FleetEdit.parse(edit))
    model = found.problem.catalog().model("mine")
    assert model.llm.layers == 36
    assert model.checkpoint is not None
    assert model.checkpoint.source == "/models/mine"
    assert path.read_text() == FLEET
    assert "# measured in May" in found.text


def test_a_difference_is_said_in_words() -> None:
    before = yaml.safe_load(FLEET)
    _, after = edited(services={"code": {"rate": "3/s"}, "chat": None, "new": {"model": "x"}})
    after["limits"] = {"budget": "$1/h"}
    assert describe_difference(before, after) == (
        "chat removed, code changed (rate), new added (x), limits changed"
    )
    assert describe_difference(before, before) == "nothing that counts"


_KEYS = st.sampled_from(["a", "b", "c d", "1", "yes"])
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from(["x", "a: b", "# no", "", "1e3"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)
_DATA = st.dictionaries(_KEYS, _VALUES, min_size=1, max_size=4)


@given(_DATA, _DATA, st.booleans())
def test_a_text_that_is_rewritten_reads_as_it_shall(
    before: dict[str, Any], after: dict[str, Any], flow: bool
) -> None:
    text = yaml.safe_dump(before, default_flow_style=flow or None, sort_keys=False)
    assert yaml.safe_load(rewrite(f"# first\n{text}# last", after)) == after
