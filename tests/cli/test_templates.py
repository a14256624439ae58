from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from atoll.catalog.catalog import Catalog
from atoll.cli import main as cli
from atoll.solve.templates.spectrum import distribution, price_templates, widest_gap
from tests.cli.commands import Captured, run

SMALL = ("templates", "phi-4-14b", "--nodes", "L4:1,L40S:1,A10G:1", "--max-nodes", "3")
MANY = ",".join(f"{gpu}:{count}" for gpu in ("L4", "L40S", "A10G") for count in range(1, 9))
EAST = ("--regions", "aws/us-east-2")


@pytest.fixture(autouse=True)
def folder(planning: Path) -> Path:
    """A folder of its own."""
    return planning


def test_templates_are_listed_and_drawn(capsys: Captured) -> None:
    out = run(capsys, *SMALL, *EAST)
    assert "phi-4-14b: TTFT 1.5s, TPOT 80ms" in out
    for part in ("prefill: ", "decode: ", "useful of 19 node sets", "tok/s per $", "best per"):
        assert part in out
    assert "one node type (" in out


def test_json_has_the_best_first_with_their_prices(capsys: Captured) -> None:
    data = json.loads(run(capsys, *SMALL, *EAST, "--json", "--top", "5", "--phase", "prefill"))
    (own,) = data["phases"]
    assert own["phase"] == "prefill"
    assert 1 < own["templates"] <= own["multisets"] == 19
    values = [best["per_s_per_usd"] for best in own["best"]]
    assert values == sorted(values, reverse=True)
    assert len(values) <= 5
    prices = Catalog.default().prices
    for best in own["best"]:
        usd = 0.0
        for kind, count in best["nodes"].items():
            price = prices.cheapest("aws/us-east-2", kind, include_imputed=True)
            assert price is not None
            usd += count * (price.usd_per_hour or 0.0)
        assert best["usd_per_hour"] == pytest.approx(usd)
        assert best["per_s_per_usd"] == pytest.approx(best["throughput_per_s"] / usd)
    assert own["best_homogeneous"]["per_s_per_usd"] <= values[0]
    assert own["widest_gap"] <= own["widest_gap_homogeneous"]
    for curve in own["spectrum"]["curves"]:
        assert curve["y"] == sorted(curve["y"])
        assert (curve["x"][0], curve["x"][-1], curve["y"][-1]) == (0.0, 1.0, 1.0)


def test_both_phases_on_the_same_nodes(capsys: Captured) -> None:
    data = json.loads(run(capsys, *SMALL, *EAST, "--json", "--phase", "both"))
    assert [own["phase"] for own in data["phases"]] == ["both"]
    assert "req/s per $" in run(capsys, *SMALL, *EAST, "--phase", "both")


def test_uses_filters_what_is_listed_only(capsys: Captured) -> None:
    everything, some = (
        json.loads(run(capsys, *SMALL, *EAST, "--json", "--phase", "prefill", *more))["phases"][0]
        for more in ((), ("--uses", "L4"))
    )
    assert all("L4:1" in best["nodes"] for best in some["best"])
    assert 0 < len(some["best"]) < len(everything["best"])
    assert some["spectrum"] == everything["spectrum"]


def test_nothing_keeps_an_impossible_promise(capsys: Captured) -> None:
    out = run(capsys, *SMALL, *EAST, "--tpot", "1ms", "--phase", "decode")
    assert "no template" in out
    useless = run(capsys, *SMALL, *EAST, "--tpot", "60ms", "--phase", "decode", "--uses", "L4:1")
    assert "no useful template with L4:1" in useless


def test_nodes_nobody_sells_have_no_price(capsys: Captured) -> None:
    nodes = ("templates", "llama-3.1-8b", "--nodes", "RTX3090:2,L4:1", "--max-nodes", "2")
    data = json.loads(run(capsys, *nodes, *EAST, "--json", "--phase", "decode"))
    free = [best for best in data["phases"][0]["best"] if "RTX3090:2" in best["nodes"]]
    assert free
    assert all(best["usd_per_hour"] is None and best["region"] is None for best in free)


def test_a_config_is_a_model(folder: Path, capsys: Captured) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    asked = ("--nodes", "L4:1", "--max-nodes", "2", "--phase", "decode", "--json")
    for name in ("tiny", "tiny/config.json"):
        (own,) = json.loads(run(capsys, "templates", name, *asked))["phases"]
        assert own["best"][0]["layout"] == "[0, 16) L4:1"


@pytest.mark.usefixtures("sketched")
def test_pictures_are_written(folder: Path, capsys: Captured) -> None:
    asked = (*SMALL, *EAST, "--phase", "prefill", "--out", "x.png", "--out", "x.html")
    run(capsys, *asked)
    assert (folder / "x.png").read_bytes().startswith(b"\x89PNG")
    first = (folder / "x.html").read_text("utf-8")
    assert "<svg" in first
    run(capsys, *asked)
    assert (folder / "x.html").read_text("utf-8") == first


def test_the_cache_is_used_unless_told_otherwise(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_CACHE", str(folder / "cache"))
    run(capsys, *SMALL, *EAST, "--no-cache")
    assert not (folder / "cache").exists()
    run(capsys, *SMALL, *EAST)
    assert len(list((folder / "cache" / "templates").glob("*.npz"))) == 2


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["phi-4-14b", "--phase", "encode"], 4, "unknown phase"),
        (["phi-4-14b", "--nodes", ","], 2, "--nodes"),
        (["phi-4-14b", "--regions", "mars"], 4, "unknown region"),
        (["phi-4-14b", "--regions", ","], 2, "--regions"),
        (["phi-4-14b", "--uses", "T4"], 2, "--uses T4"),
        (["phi-4-14b", "--max-nodes", "9"], 3, "max-nodes"),
        (["phi-4-14b", "--memory-ratio", "0"], 3, "memory_ratio"),
        (["phi-4-14b", "--out", "x.pdf"], 2, ".png or .html"),
        (["phi-4-14b", "--nodes", MANY, "--max-nodes", "8"], 2, "fewer --nodes"),
    ],
)
def test_errors_are_one_line(capsys: Captured, args: list[str], code: int, said: str) -> None:
    assert cli.run(["templates", *args]) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said.lower() in err.lower()


def test_a_set_is_priced_where_all_of_it_is_sold() -> None:
    counts = np.array([[1, 0], [0, 1], [1, 1]], np.int8)
    rates = np.array([1.0, 2.0, 3.0])
    prices = {("east", "a"): 1.0, ("east", "b"): 5.0, ("west", "b"): 2.0}
    own = price_templates(counts, rates, ("a", "b"), ("east", "west"), prices)
    assert own.usd.tolist() == [1.0, 2.0, 6.0]
    assert own.region.tolist() == [0, 1, 0]
    assert own.best_first().tolist() == [1, 0, 2]
    assert np.isinf(price_templates(counts, rates, ("a", "b"), ("west",), prices).usd[[0, 2]]).all()
    assert price_templates(counts, rates, ("a", "b"), (), {}).value.tolist() == [0.0, 0.0, 0.0]


def test_the_spectrum_is_a_distribution() -> None:
    rates = np.arange(1.0, 1001.0)
    x, y = distribution(rates, 1000.0)
    assert len(x) <= 200
    assert (np.diff(x) > 0).all()
    assert (x[-1], y[-1]) == (1.0, 1.0)
    assert x[0] == pytest.approx(0.001)
    assert widest_gap(rates, 1000.0) == pytest.approx(0.001)
    assert widest_gap(np.array([5.0]), 20.0) == pytest.approx(0.75)
