from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError, InputError
from atoll.core.files import load_yaml
from atoll.plan.files.fleet_file import fleet_schema, load_fleet, parse_fleet
from atoll.plan.problem import Problem
from tests.plan.builders import small

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
START = ROOT / "src/atoll/plan/files/data/fleet.yaml"
SMALL = """\
services:
  chat:
    model: llama-3.1-8b
    ttft: 1s
    tpot: 50ms
    rate: 2/s
    lengths: 512x128
pool:
  cloud:
    regions: [us-east-2]
    node_types: [L4:1, L40S:1]
  owned:
    lab: {L4:4: 2}
"""


def changed(**sections: object) -> str:
    """The small fleet file with whole sections replaced or added."""
    data = yaml.safe_load(SMALL)
    data.update(sections)
    return yaml.safe_dump({key: value for key, value in data.items() if value is not None})


def chat(**fields: object) -> str:
    data = yaml.safe_load(SMALL)
    data["services"]["chat"].update(fields)
    return yaml.safe_dump(data)


def cloud(**fields: object) -> str:
    data = yaml.safe_load(SMALL)
    data["pool"]["cloud"].update(fields)
    return yaml.safe_dump(data)


# The examples


@pytest.mark.parametrize("path", [*EXAMPLES, START], ids=lambda path: path.stem)
def test_examples_load_and_come_back_from_json(path: Path) -> None:
    asked = load_fleet(path, environ={})
    assert Problem.from_json(asked.to_json()) == asked
    assert asked.catalog().models


def example(name: str) -> Problem:
    return load_fleet(ROOT / "examples" / f"{name}.yaml", environ={})


def test_there_are_the_examples_that_are_promised() -> None:
    names = {path.stem for path in EXAMPLES}
    assert names >= {"coral-core", "coral-extended", "owned-cluster", "quickstart"}


def test_coral_core_is_the_papers_set_up() -> None:
    asked = example("coral-core")
    assert len(asked.node_types) == 12
    assert asked.regions == ("aws/ap-northeast-2", "aws/us-east-2")
    assert len(asked.offers) == 24
    slos = {s.model: (s.ttft_s, s.tpot_s, s.rate_per_s) for s in asked.services}
    assert slos == {
        "qwen3-32b": (1.6, 0.1, 10.0),
        "gpt-oss-20b": (0.9, 0.03, 10.0),
        "phi-4-14b": (1.2, 0.06, 10.0),
    }
    assert (asked.settings.max_nodes_per_instance, asked.settings.memory_ratio) == (6, 12.0)
    price = Catalog.default().prices.cheapest("aws/us-east-2", "L40S:1")
    found = asked.offer("aws/us-east-2", "L40S:1", "on-demand")
    assert price is not None
    assert found is not None
    assert (found.usd_per_hour, found.instance) == (price.usd_per_hour, "g6e.xlarge")


def test_coral_extended_is_the_papers_set_up() -> None:
    asked = example("coral-extended")
    assert len(asked.node_types) == 20
    assert len(asked.regions) == 3
    slos = {s.model: (round(s.ttft_s * 1e3), round(s.tpot_s * 1e3)) for s in asked.services}
    assert slos == {
        "phi-4-14b": (1200, 60),
        "gpt-oss-20b": (900, 30),
        "qwen3-32b": (1600, 100),
        "llama-3-70b": (1500, 80),
        "gpt-oss-120b": (1000, 40),
        "qwen3-235b-a22b": (1800, 120),
    }
    assert {s.rate_per_s for s in asked.services} == {25.0}
    a100 = {o.region for o in asked.offers if o.node_type.startswith("A100")}
    assert a100 == {"gcp/us-central1"}


# What is understood


def test_the_small_fleet() -> None:
    asked = parse_fleet(SMALL, path="my fleet.yaml")
    assert asked.name == "my-fleet"
    (own,) = asked.services
    assert (own.name, own.model, own.ttft_s, own.tpot_s) == ("chat", "llama-3.1-8b", 1.0, 0.05)
    assert own.lengths.input_mean == 512.0
    keys = [offer.key for offer in asked.offers]
    assert keys == [
        ("aws/us-east-2", "L40S:1", "on-demand"),
        ("aws/us-east-2", "L4:1", "on-demand"),
        ("lab", "L4:4", "owned"),
    ]
    assert asked.offers[0].available == 32
    assert (asked.offers[2].available, asked.offers[2].usd_per_hour) == (2, 0.0)


def test_the_order_of_the_file_changes_nothing() -> None:
    data = yaml.safe_load(SMALL)
    data["services"]["zz"] = data["services"]["chat"]
    turned = {
        "pool": {
            "owned": data["pool"]["owned"],
            "cloud": data["pool"]["cloud"] | {"node_types": ["L40S:1", "L4"]},
        },
        "services": dict(reversed(data["services"].items())),
    }
    one, other = (parse_fleet(yaml.safe_dump(d, sort_keys=False)) for d in (data, turned))
    assert one == other
    assert one.content_hash() == other.content_hash()


def test_models_default_to_their_name_and_are_written_canonically() -> None:
    data = yaml.safe_load(SMALL)
    entry = dict(data["services"]["chat"])
    del entry["model"]
    data["services"] = {"Llama-3.1-8B": entry, "quick": entry | {"model": "Llama-3.1-8B@fp8"}}
    asked = parse_fleet(yaml.safe_dump(data))
    assert [(s.name, s.model) for s in asked.services] == [
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("quick", "llama-3.1-8b@fp8"),
    ]


def test_phases_are_chosen_by_cost_unless_said() -> None:
    assert [s.phases for s in parse_fleet(SMALL).services] == ["auto"]
    assert [s.phases for s in parse_fleet(chat(phases="apart")).services] == ["apart"]


def test_machines_are_cut_unless_they_are_whole() -> None:
    def sizes(text: str) -> dict[str, tuple[int, ...]]:
        offers = parse_fleet(text).offers
        return {f"{o.region} {o.node_type}": o.sizes for o in offers if o.node_type == "L4:4"}

    assert sizes(SMALL) == {"lab L4:4": (1, 2, 4)}
    owned = SMALL.replace("L4:4: 2", "L4:4: {count: 2, whole: true}")
    assert sizes(owned) == {"lab L4:4": (4,)}
    entry = {"region": "lab", "node_type": "L4:4", "available": 1, "usd_per_hour": "$1/h"}
    for whole in (False, True):
        pool = {"offers": [entry | {"whole": whole}]}
        assert sizes(changed(pool=pool)) == {"lab L4:4": (4,) if whole else (1, 2, 4)}
    rented = cloud(node_types=["L4:4"], whole=True)
    assert set(sizes(rented).values()) == {(4,), (1, 2, 4)}  # the cloud's, and those of the lab


def test_machines_of_a_gpu_type_of_ones_own_are_cut_if_their_slices_are_known() -> None:
    own = {"X48": {"like": "L40S", "source": "here"}}
    for nodes, sizes in (
        ({"X48:4": {"interconnect": "pcie4"}}, None),
        ({f"X48:{n}": {"interconnect": "pcie4"} for n in (1, 2, 4)}, (1, 2, 4)),
    ):
        asked = parse_fleet(
            changed(catalog={"gpus": own, "nodes": nodes}, pool={"owned": {"lab": {"X48:4": 2}}})
        )
        (offer,) = asked.offers
        catalog = asked.catalog()
        assert all(catalog.node(kind) for kind in offer.kinds)
        assert sizes is None or offer.sizes == sizes


def test_every_field_of_a_model() -> None:
    text = chat(
        rate="120/min",
        phases="together",
        headroom=1.25,
        priority=3,
        only=["l4", "L40S:1"],
        avoid=["L4:2"],
        lengths={"input": 100, "output": 50, "input_cv": 1, "output_cv": 2, "input_tail": 800},
    )
    (own,) = parse_fleet(text).services
    assert (own.rate_per_s, own.phases, own.headroom, own.priority) == (2.0, "together", 1.25, 3.0)
    assert (own.only, own.avoid) == (("L4", "L40S:1"), ("L4:2",))
    moments = own.lengths
    assert (moments.input_mean_square, moments.output_mean_square) == (20000.0, 12500.0)
    assert moments.input_tail == 800.0


@pytest.mark.parametrize(
    ("written", "share", "quantile"),
    [
        ("10%", 0.1, None),
        (0.25, 0.25, None),
        ({"quantile": "95%"}, None, 0.95),
        ({"share": "10%", "quantile": 0.9}, 0.1, 0.9),
    ],
)
def test_a_reserve_is_a_share_or_a_quantile(
    written: object, share: float | None, quantile: float | None
) -> None:
    (own,) = parse_fleet(chat(reserve=written)).services
    assert own.reserve is not None
    assert (own.reserve.share, own.reserve.quantile) == (share, quantile)
    (plain,) = parse_fleet(chat()).services
    assert plain.reserve is None
    # Fleets without one keep their hash.
    assert "reserve" not in plain.model_dump()


def test_a_reserve_beyond_its_range_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="reserve"):
        parse_fleet(chat(reserve={"quantile": "100%"}))


def test_a_cloud_in_every_way() -> None:
    text = cloud(
        regions=["aws/us-east-2", "gcp"],
        gpus=["L4"],
        node_types=["H100:8"],
        spot=True,
        imputed=True,
        available={"default": 5, "L4": 7, "L4:8": 1},
        spot_available=2,
    )
    asked = parse_fleet(text)
    assert asked.regions == ("aws/us-east-2", "gcp/us-central1", "lab")
    assert asked.node_types == ("H100:8", "L4:1", "L4:2", "L4:4", "L4:8")
    left = {(o.node_type, o.market): o.available for o in asked.offers if o.market != "owned"}
    assert left["L4:8", "on-demand"] == 1
    assert left["L4:2", "on-demand"] == 7
    assert left["H100:8", "on-demand"] == 5
    assert {n for (_, market), n in left.items() if market == "spot"} == {2}
    spot = asked.offer("aws/us-east-2", "L4:1", "spot")
    assert spot is not None
    assert spot.usd_per_hour < 0.5


def test_all_that_is_sold() -> None:
    text = cloud(node_types=None, on_demand=False, spot=True)
    asked = parse_fleet(text)
    sold = Catalog.default().prices.cheapest_by_node("aws/us-east-2", spot=True)
    rented = {o.node_type for o in asked.offers if o.market != "owned"}
    assert rented == set(sold)


def test_written_offers_win() -> None:
    pool = yaml.safe_load(SMALL)["pool"]
    pool["offers"] = [
        {"region": "aws/us-east-2", "node_type": "L4", "available": 1, "usd_per_hour": "$9/h"},
        {
            "region": "moon",
            "node_type": "T4:1",
            "market": "spot",
            "available": 1,
            "usd_per_hour": 2,
        },
    ]
    asked = parse_fleet(changed(pool=pool))
    found = asked.offer("aws/us-east-2", "L4:1", "on-demand")
    assert found is not None
    assert (found.available, found.usd_per_hour) == (1, 9.0)
    assert asked.offer("moon", "T4:1", "spot") is not None


def test_limits_and_settings() -> None:
    asked = parse_fleet(
        changed(
            name="mine",
            limits={"budget": "$100/h", "spot_share": "50%", "max_nodes": 9, "spread": 2},
            settings={"max_nodes_per_instance": 3, "init_penalty": 0.2, "on_shortage": "priority"},
        )
    )
    assert asked.name == "mine"
    assert asked.limits.budget_usd_per_hour == 100.0
    assert (asked.limits.spot_share, asked.limits.max_nodes, asked.limits.spread) == (0.5, 9, 2)
    assert asked.settings.max_nodes_per_instance == 3
    assert (asked.settings.init_penalty, asked.settings.on_shortage) == (0.2, "priority")


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
FACTS = {
    "models": {"tiny": {"hf_config": "tiny"}},
    "interconnects": {
        "fast": {"kind": "pcie", "allreduce": {2: {"alpha_us": 1, "bus_bandwidth": "30GB/s"}}}
    },
    "nodes": {"L4:2": {"interconnect": "fast"}},
}


@pytest.mark.parametrize("inline", [True, False])
def test_own_facts_travel_with_the_problem(tmp_path: Path, inline: bool) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "facts.yaml").write_text(yaml.safe_dump(FACTS), encoding="utf-8")
    data = yaml.safe_load(chat(model="tiny"))
    data["catalog"] = FACTS if inline else "facts.yaml"
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    asked = load_fleet(tmp_path / "fleet.yaml", environ={})
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    again = Problem.from_json(asked.to_json())
    catalog = again.catalog()
    assert catalog.model("tiny").llm.layers == 8
    assert catalog.node("L4:2").interconnect.allreduce[2].alpha_us == 1.0
    assert again == asked


def test_overlays_from_outside_come_first(tmp_path: Path) -> None:
    for name, memory in (("a", "20GB"), ("b", "21GB")):
        text = f"gpus: {{L4: {{memory: {memory}}}, T4: {{memory: {memory}}}}}"
        (tmp_path / name).write_text(text, encoding="utf-8")
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(changed(catalog={"gpus": {"T4": {"memory": "22GB"}}}), encoding="utf-8")
    asked = load_fleet(
        fleet, overlays=[tmp_path / "b"], environ={"ATOLL_CATALOG": str(tmp_path / "a")}
    )
    catalog = asked.catalog()
    assert len(asked.overlays) == 3
    assert (catalog.gpu("L4").memory_bytes, catalog.gpu("T4").memory_bytes) == (21e9, 22e9)


def test_what_runs_is_read_from_a_plan(tmp_path: Path) -> None:
    _, made = small()
    (tmp_path / "plan.json").write_text(made.to_json(), encoding="utf-8")
    (tmp_path / "fleet.yaml").write_text(changed(running="plan.json"), encoding="utf-8")
    assert load_fleet(tmp_path / "fleet.yaml", environ={}).running == made.instances


# What is not


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (SMALL.replace("ttft", "tfft"), ("f.yaml:4:", "services.chat.tfft", "write 'ttft'")),
        (SMALL.replace("    rate: 2/s\n", ""), (":2:", "services.chat.rate", "required")),
        (SMALL.replace("50ms", '"50"'), (":5:", "services.chat.tpot", "it has no unit", "1600ms")),
        (SMALL.replace("1s", "1600"), (":4:", "services.chat.ttft", "less than or equal to 600")),
        (SMALL.replace("2/s", "2/fortnight"), (":6:", "services.chat.rate", "unknown unit")),
        (SMALL.replace("llama-3.1-8b", "lama-3.1-8b"), (":3:", "chat.model", "did you mean llama")),
        (SMALL.replace("512x128", "azure"), (":7:", "chat.lengths", "unknown length mix")),
        (SMALL.replace("512x128", "200000x1"), (":7:", "chat.lengths", "exceed the model's")),
        (SMALL.replace("512x128", "{inptu: 3, output: 4}"), (":7:", "chat.lengths.in")),
        (SMALL.replace("512x128", "{input: 3}"), (":7:", "chat.lengths.output", "required")),
        (SMALL.replace("512x128", "[1, 2]"), (":7:", "chat.lengths")),
        (SMALL.replace("us-east-2", "us-east-9"), (":10:", "regions.0", "unknown region")),
        (SMALL.replace("L4:1", "L9:1"), (":11:", "node_types.0", "unknown gpu 'L9'")),
        (SMALL.replace("L4:1", "L4:2"), ("node_types.0", "no L4:2 is sold", "'imputed: true'")),
        (SMALL.replace("L4:1", "A6000:1"), ("no A6000:1 is sold", "runpod/any")),
        (SMALL.replace("node_types: [L4:1, L40S:1]", "gpus: [L4:1]"), ("gpus.0", "'node_types'")),
        (SMALL.replace("L4:4: 2", "L4:4: -2"), (":13:", "pool.owned.lab.L4:4", "greater than")),
        (SMALL.replace("L4:4: 2", "L4:4: {cuont: 2}"), (":13:", "write 'count'")),
        (SMALL.replace("lab:", "a room:"), (":13:", "is not a valid name")),
        (cloud(available={"L4:1": 1, "l4:1": 2}), ("available.l4:1", "given twice")),
        (cloud(on_demand=False), ("on_demand", "neither on demand nor spot")),
        (cloud(regions=[]), ("pool.cloud.regions", "at least 1 needed")),
        (chat(only=["H100"]), ("services.chat.only", "no node type of the pool")),
        (chat(only=["H1000"]), ("services.chat.only.0", "unknown gpu")),
        (chat(headroom=0.5), ("services.chat.headroom", "greater than or equal to 1")),
        (chat(phases="both"), ("services.chat.phases", "'auto', 'apart' or 'together'")),
        (chat(model="qwen-image"), ("services.chat", "no class says what requests bring")),
        (changed(pool={}), ("pool", "the pool is empty", "cloud, owned or offers")),
        (changed(pool=None), ("no nodes", "add a 'pool'")),
        (changed(services={}), ("services", "at least 1 needed")),
        (
            changed(services={"a b": yaml.safe_load(SMALL)["services"]["chat"]}),
            ("not a valid name",),
        ),
        (changed(limits={"spot_share": "half"}), ("limits.spot_share", "50% or 0.5")),
        (changed(limits={"spot_share": "150%"}), ("limits.spot_share", "less than or equal to 1")),
        (changed(limits={"budget": "$100"}), ("limits.budget", "has no unit")),
        (changed(settings={"engine": "tgi"}), ("settings.engine", "unknown engine")),
        (changed(name="not a name"), ("name", "is not a valid name")),
        (changed(catalog="nowhere.yaml"), ("nowhere.yaml", "cannot read the file")),
        (changed(catalog={"gpus": {"L4": {"memory": "1"}}}), ("catalog.gpus.L4.memory", "unit")),
        (changed(catalog={"gpus": {"L4": {"when": "2001-01-01"}}}), ("catalog.gpus.L4.when",)),
        (changed(running="nowhere.json"), ("nowhere.json", "cannot read the file")),
        ("- 1\n- 2\n", ("a fleet file is a mapping of sections", "start with name, services")),
        ("", ("services", "required")),
        ("services: [", ("not valid YAML",)),
        ("services: {}\nservices: {}\n", ("'services' is given twice",)),
    ],
)
def test_errors_say_where_and_what_to_change(text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(AtollError) as caught:
        parse_fleet(text, path="f.yaml")
    line = str(caught.value)
    assert "\n" not in line
    for part in parts:
        assert part in line


def test_an_offer_given_twice_has_its_line() -> None:
    pool = """\
pool:
  offers:
    - {region: a, node_type: L4, available: 1, usd_per_hour: 1}
    - {region: a, node_type: "L4:1", available: 1, usd_per_hour: 2}
"""
    with pytest.raises(InputError, match=r"f.yaml:11: pool.offers.1: a L4:1 on-demand is offered"):
        parse_fleet(SMALL[: SMALL.index("pool:")] + pool, path="f.yaml")


def test_errors_in_other_files_name_those(tmp_path: Path) -> None:
    (tmp_path / "facts.yaml").write_text("gpus:\n  L4: {memroy: 1GB}\n", encoding="utf-8")
    (tmp_path / "fleet.yaml").write_text(changed(catalog="facts.yaml"), encoding="utf-8")
    with pytest.raises(InputError, match=r"facts\.yaml:2: gpus\.L4\.memroy.*write 'memory'"):
        load_fleet(tmp_path / "fleet.yaml", environ={})
    (tmp_path / "plan.json").write_text("{}", encoding="utf-8")
    (tmp_path / "fleet.yaml").write_text(changed(running="plan.json"), encoding="utf-8")
    with pytest.raises(InputError, match=r"plan\.json: problem_hash: this field is required"):
        load_fleet(tmp_path / "fleet.yaml", environ={})


# Whatever is in the file, the answer is a problem or an error of ours


def answered(text: str) -> None:
    problem, error = None, ""
    try:
        problem = parse_fleet(text)
    except AtollError as raised:
        error = str(raised)
    assert "\n" not in error
    if problem is not None:
        assert Problem.from_json(problem.to_json()) == problem


SOURCES = st.sampled_from([SMALL, (ROOT / "examples/owned-cluster.yaml").read_text("utf-8")])


@given(SOURCES, st.data())
def test_mutilated_text(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 12))
    noise = data.draw(st.text(alphabet=" \n:{}[]-,&*!|>'\"%@0aZ\t\u00e9", max_size=6))
    answered(text[:start] + noise + text[start + length :])


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-5, 10**13)
    | st.floats()
    | st.sampled_from(["", "x", "1s", "5/s", "$1/h", "L4", "L4:2", "aws", "1e400", "8k", "-1%"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["L4", "default", "gpus", "count", "a"]), inner, max_size=2
        )
    ),
    max_leaves=4,
)


@given(SOURCES, st.data())
def test_mutilated_data(text: str, data: st.DataObject) -> None:
    document: Any = yaml.safe_load(text)
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and data.draw(st.booleans()):
            place = inner
            continue
        action = data.draw(st.sampled_from(("replace", "drop", "rename")))
        if action == "replace":
            place[key] = data.draw(values)
        else:
            del place[key]
            if action == "rename" and isinstance(place, dict):
                place[data.draw(st.sampled_from(["x", "models", 3, None, 1.5]))] = inner
        break
    answered(yaml.safe_dump(document))


@given(st.binary(max_size=60))
def test_anything_at_all(raw: bytes) -> None:
    answered(raw.decode("latin-1"))


# The schema for editors


def test_the_schema_knows_every_section_and_describes_every_field() -> None:
    schema: Any = fleet_schema()
    assert set(schema["properties"]) == {
        "name", "services", "pool", "cluster", "limits", "settings", "catalog", "running",
        "share_instances", "objective", "grid", "risk",
    }  # fmt: skip
    assert schema["required"] == ["services"]
    assert schema["oneOf"] == [{"required": ["pool"]}, {"required": ["cluster"]}]
    for entry in (schema, *schema["$defs"].values()):
        if entry["title"] == "GridSpec":  # its other keys are regions
            assert entry["additionalProperties"] is not True
        else:
            assert entry["additionalProperties"] is False
        for name, field in entry["properties"].items():
            described = schema["$defs"][field["$ref"].split("/")[-1]] if "$ref" in field else field
            assert described.get("description"), name
    json.dumps(schema)


def test_the_example_that_init_writes_mentions_every_key() -> None:
    schema: Any = fleet_schema()
    text = START.read_text("utf-8")
    written = {name: own for name, own in schema["$defs"].items() if name != "NodeProfile"}
    for entry in (schema, *written.values()):
        for name in entry["properties"]:
            assert f"{name}:" in text, name


def test_the_commented_lines_of_the_example_are_valid() -> None:
    lines = START.read_text("utf-8").splitlines()
    # Take the comments off the optional blocks at the end, which stand on their own.
    tail = next(i for i, line in enumerate(lines) if line.startswith("# limits:"))
    block = [line.removeprefix("# ") for line in lines[tail:] if line.startswith("#")]
    optional = yaml.safe_load("\n".join(block))
    del optional["catalog"], optional["running"]
    base: Any = load_yaml(START)
    asked = parse_fleet(yaml.safe_dump(base | optional))
    assert asked.limits.budget_usd_per_hour == 100.0


def test_older_name_of_services() -> None:
    older = SMALL.replace("services:", "models:")
    assert parse_fleet(older) == parse_fleet(SMALL)
    # Errors speak of the key that the file has.
    for text, key in ((older, "models"), (SMALL, "services")):
        with pytest.raises(InputError, match=rf"fleet.yaml:4: {key}.chat.tfft: .*write 'ttft'"):
            parse_fleet(text.replace("ttft", "tfft"))
        with pytest.raises(InputError, match=rf"{key}.chat.only: no node type"):
            parse_fleet(text.replace("    rate:", "    only: [H100]\n    rate:"))
    with pytest.raises(InputError, match=r"models: this is the older name of 'services'.*keep one"):
        parse_fleet(f"{SMALL}\nmodels: {{}}\n")
