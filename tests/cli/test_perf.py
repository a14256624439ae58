from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from atoll.catalog import Catalog
from atoll.catalog.overlay import apply_overlay
from atoll.perf import operators
from atoll.perf.batch import Batch
from atoll.perf.constants import (
    ConstantTable,
    OpClass,
    OpConstants,
    OpSpeed,
    default_constants,
)
from atoll.perf.step import analytic, step_seconds
from tests.cli.commands import Atoll, Done, refused

SMALL = "smollm2-135m"
TRUE = {"e_f": 0.41, "e_b": 0.52, "t0_us": 6.0, "p": 2.0}
"""Constants that the synthetic matrix products are generated from; far from those of any GPU."""


def written(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# What the tests read from


def write(path: Path, header: str, rows: Sequence[str]) -> Path:
    path.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
    return path


def products(
    gpu: str = "L40S", *, named: bool = True, facts: Path | None = None
) -> tuple[str, list[str]]:
    """Matrix products that follow TRUE exactly, as CSV: header and rows."""
    kind = apply_overlay(Catalog.default(), facts or {}).gpu(gpu)
    rows = []
    for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192)):
        op = operators.gemm(
            n,
            k,
            OpSpeed(
                peak=kind.fp16_flops,
                bandwidth=kind.bandwidth_bytes_per_s,
                e_f=TRUE["e_f"],
                e_b=TRUE["e_b"],
                t0_s=TRUE["t0_us"] * 1e-6,
                p=TRUE["p"],
            ),
            weight_bytes=2.0,
        )
        for m in (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192):
            row = f"{m},{n},{k},{op.seconds(float(m)) * 1e6:.8g}"
            rows.append(f"{gpu},{row}" if named else row)
    return ("gpu," if named else "") + "m,n,k,latency_us", rows


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A CSV of matrix products on an L40S."""
    return write(tmp_path / "gemm.csv", *products())


STEP_HEADER = "model,node,tp,phase,tokens,context,layer_us"


def steps(decode_us: Sequence[float] = (100, 120, 200), node: str = "L4:1") -> list[str]:
    """Rows of a measured table of the small model, one context only."""
    prefill = [(64, 150), (8192, 6000)]
    decode = list(zip((1, 16, 256), decode_us, strict=True))
    return [
        f"{SMALL},{node},1,{phase},{tokens},{context},{us}"
        for phase, context, rows in (("prefill", 0, prefill), ("decode", 512, decode))
        for tokens, us in rows
    ]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A folder with a config.json."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    text = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
    }
    (folder / "config.json").write_text(json.dumps(text), encoding="utf-8")
    return folder


# atoll perf show


def curve(done: Done, picture: int, index: int = 0) -> dict[float, float]:
    chosen = done.json["pictures"][picture]["curves"][index]
    return dict(zip(chosen["x"], chosen["y"], strict=True))


def test_show_draws_four_pictures_under_the_facts(atoll: Atoll) -> None:
    done = atoll("perf", "show", "llama-3.1-8b", "L40S:1")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("llama-3.1-8b on L40S:1\n")
    for words in ("16.06GB in 32 layers", "(vllm, assumed)", "measured (aiconfigurator-core"):
        assert words in done.out
    for title in (
        "prefill: step time",
        "decode: step time, context",
        "prefill: throughput within 1,500 ms",
        "decode: throughput within 80 ms",
    ):
        assert title in done.out
    assert "\x1b[" not in done.out  # not a terminal: no colours


def test_show_as_json_holds_the_same_numbers_as_the_library(atoll: Atoll) -> None:
    done = atoll("perf", "show", SMALL, "L4:1", "--lengths", "512x128", "--json")
    assert (done.code, done.err) == (0, "")
    assert (done.json["model"], done.json["node"]) == (SMALL, "L4:1")
    catalog = Catalog.default()
    model = analytic(catalog.model(SMALL).llm, catalog.node("L4:1"))
    for sequences, ms in curve(done, 1).items():
        expected = step_seconds(model, Batch.decode(sequences, 512 + 64), 0, 30)
        assert ms == pytest.approx(expected * 1e3, rel=1e-9)


def test_show_curves_rise_with_work_and_fall_with_layers(atoll: Atoll) -> None:
    pictures = atoll("perf", "show", "qwen3-32b", "H100:2", "--json").json["pictures"]
    assert len(pictures) == 4
    for picture in pictures:
        assert len(picture["curves"]) == 3
        for drawn in picture["curves"]:
            assert drawn["x"] == sorted(drawn["x"])
            falling = picture["y_label"] == "tokens/s"
            assert drawn["y"] == sorted(drawn["y"], reverse=falling)
    for picture in pictures[:2]:  # most layers first
        most, half, quarter = (drawn["y"] for drawn in picture["curves"])
        assert all(a > b > c for a, b, c in zip(most, half, quarter, strict=True))


def test_show_takes_names_as_people_write_them(atoll: Atoll) -> None:
    done = atoll("perf", "show", "meta-llama/Llama-3.1-8B", "rtx 4090", "--json")
    assert (done.json["model"], done.json["node"]) == ("llama-3.1-8b", "RTX4090:1")


def test_show_of_a_model_that_does_not_fit_says_how_much_does(atoll: Atoll) -> None:
    asked = ("perf", "show", "llama-3-70b", "T4:1")
    assert atoll(*asked, "--json").json["facts"]["kv_tokens"] == 0
    assert re.search(r"does not fit; [1-9] of 80 layers do", atoll(*asked).out)


def test_show_splits_a_node_into_copies(atoll: Atoll) -> None:
    def split(model: str, *more: str) -> tuple[int, int]:
        facts = atoll("perf", "show", model, "L4:4", "--json", *more).json["facts"]
        return facts["tp"], facts["copies"]

    assert split("llama-3.2-1b") == (4, 1)
    assert split("llama-3.2-1b", "--tp", "2") == (2, 2)
    assert split(SMALL) == (1, 4)  # nine heads divide over one GPU only
    shown = atoll("perf", "show", "llama-3.2-1b", "L4:4", "--tp", "2").out
    assert "tensor parallel over 2, 2 copies" in shown


def test_show_adds_the_engines_host_time(atoll: Atoll) -> None:
    vllm, bare = (
        curve(atoll("perf", "show", SMALL, "L4:1", "--engine", name, "--json"), 1)
        for name in ("vllm", "none")
    )
    assert all(vllm[x] - bare[x] == pytest.approx(0.05 + 0.001 * x, abs=1e-6) for x in vllm)


def test_show_takes_a_precision_in_the_name(atoll: Atoll) -> None:
    wide = atoll("perf", "show", "llama-3.1-8b", "L4:1", "--json")
    narrow = atoll("perf", "show", "llama-3.1-8b@fp8,kv=fp8", "L4:1", "--json")
    assert narrow.json["model"] == "llama-3.1-8b@fp8,kv=fp8"
    assert curve(narrow, 1)[1.0] < 0.7 * curve(wide, 1)[1.0]


@pytest.mark.parametrize("name", ["my-model", "my-model/config.json"])
def test_show_reads_a_local_config(atoll: Atoll, config: Path, name: str) -> None:
    done = atoll("perf", "show", config.parent / name, "L4:1", "--json")
    assert done.json["model"] == "my-model"
    assert done.json["facts"]["layers"] == 4


def test_show_keeps_longer_promises_with_more_throughput(atoll: Atoll) -> None:
    tight = atoll("perf", "show", "llama-3.1-8b", "L40S", "--tpot", "30ms", "--json")
    loose = atoll("perf", "show", "llama-3.1-8b", "L40S", "--tpot", "0.1s", "--json")
    assert curve(tight, 3)[16.0] < curve(loose, 3)[16.0]


def test_an_overlay_changes_the_prediction(
    atoll: Atoll, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = tmp_path / "site.yaml"
    overlay.write_text("gpus:\n  L4:\n    bandwidth: 600GB/s\n", encoding="utf-8")
    plain = curve(atoll("perf", "show", "llama-3.1-8b", "L4:1", "--json"), 1)
    faster = atoll("perf", "show", "llama-3.1-8b", "L4:1", "--json", "--overlay", overlay)
    # One sequence is bound by reading the weights: twice the bandwidth, nearly half the time.
    assert 0.45 < curve(faster, 1)[1.0] / plain[1.0] < 0.6
    monkeypatch.setenv("ATOLL_CATALOG", str(overlay))
    assert atoll("perf", "show", "llama-3.1-8b", "L4:1", "--json").out == faster.out


def test_a_later_overlay_wins(atoll: Atoll, tmp_path: Path) -> None:
    for name, text in (("a", "600GB/s"), ("b", "300GB/s")):
        (tmp_path / f"{name}.yaml").write_text(f"gpus: {{L4: {{bandwidth: {text}}}}}\n")
    both = ("--overlay", "a.yaml", "--overlay", "b.yaml")
    plain = atoll("perf", "show", SMALL, "L4:1", "--json")
    assert atoll("perf", "show", SMALL, "L4:1", "--json", *both).out == plain.out


@pytest.mark.slow
def test_show_writes_pictures_and_says_so_on_stderr(atoll: Atoll, tmp_path: Path) -> None:
    done = atoll("perf", "show", SMALL, "L4:1", "--json", "-o", "a.png", "--out", "a.html")
    assert done.code == 0
    assert done.err == "wrote a.png\nwrote a.html\n"
    assert done.json["model"] == SMALL
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert f"<h1>{SMALL} on L4:1</h1>" in page
    assert done.json["facts"]["provenance"] in page
    atoll("perf", "show", SMALL, "L4:1", "-o", "b.html")
    assert (tmp_path / "b.html").read_text(encoding="utf-8") == page
    assert written(tmp_path) == {"a.png", "a.html", "b.html"}


BAD_SHOWS = [
    ((SMALL, "L4:1", "--backend", "magic"), 4, ("unknown backend 'magic'", "analytic")),
    ((SMALL, "L4:1", "--ttft", "1500"), 3, ("ttft", "no unit", "1600ms")),
    ((SMALL, "L4:1", "--ttft", "0ms"), 3, ("ttft: '0ms' is not a latency above 0",)),
    ((SMALL, "L4:1", "--tpot", "0s"), 3, ("tpot: '0s' is not a latency above 0",)),
    ((SMALL, "L4:2", "--tp", "3"), 2, ("does not divide the 2 GPUs",)),
    ((SMALL, "L4:1", "-o", "p.pdf"), 2, ("p.pdf", ".png or .html")),
    ((SMALL, "L4:1", "-o", "no/such/p.png"), 3, ("no/such: no such folder",)),
]


@pytest.mark.parametrize(("args", "code", "said"), BAD_SHOWS, ids=lambda v: str(v)[:50])
def test_show_refuses(
    atoll: Atoll, tmp_path: Path, args: Sequence[str], code: int, said: Sequence[str]
) -> None:
    # The pictures asked for must not be written either.
    refused(atoll("perf", "show", *args, "-o", "picture.html"), code, *said)
    assert written(tmp_path) == set()


# The backend of measured tables


def test_show_from_a_measured_table_passes_through_its_points(atoll: Atoll, tmp_path: Path) -> None:
    table = write(tmp_path / "steps.csv", STEP_HEADER, steps((100, 120, 200)))
    done = atoll("perf", "show", SMALL, "L4:1", "--backend", table, "--json")
    assert (done.code, done.err) == (0, "")
    assert done.json["facts"]["provenance"] == "measured (steps.csv, 5 points)"
    decode = curve(done, 1)
    for sequences, layer_us in ((1.0, 100), (16.0, 120), (256.0, 200)):
        near = min(decode, key=lambda x: abs(x - sequences))
        assert near == pytest.approx(sequences)
        host_ms = 0.05 + 0.001 * sequences
        assert decode[near] == pytest.approx(30 * layer_us * 1e-3 + host_ms, rel=1e-6)


BAD_TABLES = {
    "a column missing": (STEP_HEADER.replace(",layer_us", ""), [], 3, ("no column layer_us",)),
    "another model": (STEP_HEADER, [r.replace(SMALL, "m") for r in steps()], 4, ("m on L4:1",)),
    "one phase only": (STEP_HEADER, steps()[2:], 3, ("no measurements of prefill",)),
    "too small": (STEP_HEADER, [r.replace("8192", "128") for r in steps()], 3, ("far beyond",)),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_tables_are_refused(atoll: Atoll, tmp_path: Path, case: str) -> None:
    header, rows, code, said = BAD_TABLES[case]
    table = write(tmp_path / "t.csv", header, rows)
    done = atoll("perf", "show", SMALL, "L4:1", "--backend", table, "-o", "picture.png")
    refused(done, code, *said)
    assert written(tmp_path) == {"t.csv"}


def test_a_measured_host_time_is_called_measured(atoll: Atoll, tmp_path: Path) -> None:
    def shown(*hosts: str) -> tuple[str, float]:
        rows = [f"{row},{hosts[0] if ',prefill,' in row else hosts[1]}" for row in steps((9, 9, 9))]
        table = write(tmp_path / "t.csv", f"{STEP_HEADER},host_us", rows)
        asked = ("perf", "show", SMALL, "L4:1", "--backend", table)
        (line,) = (row for row in atoll(*asked).out.splitlines() if "host time" in row)
        facts = atoll(*asked, "--json").json["facts"]
        return line.removeprefix("  host time").strip(), round(facts["host_s"], 9)

    assert shown("900", "900") == ("900us per step (measured)", 9e-4)
    assert shown("1000", "900") == (
        "prefill 1ms per step (measured); decode 900us per step (measured)",
        9e-4,
    )
    assert shown("900", "") == (
        "prefill 900us per step (measured); decode 50us per step and 1us per sequence (vllm, assumed)",
        5.1e-5,
    )
    assert shown("", "") == ("50us per step and 1us per sequence (vllm, assumed)", 5.1e-5)


def test_show_joins_stages_by_the_interface_of_the_node(atoll: Atoll, tmp_path: Path) -> None:
    assert Catalog.default().links.nics.get("H100:8")
    overlay = tmp_path / "slow.yaml"
    overlay.write_text("links: {nics: {'H100:8': 10Mbit/s}}\n", encoding="utf-8")
    asked = ("perf", "show", "llama-3-70b", "H100:8", "--json")
    fast, slow = atoll(*asked), atoll(*asked, "--overlay", overlay)
    for picture in (2, 3):
        assert curve(slow, picture, 0) == curve(fast, picture, 0)  # one stage hands nothing over
        slower = slow.json["pictures"][picture]["curves"][1:]
        for pipeline in slower:
            assert max(pipeline["y"]) <= 10e6 / 8 / (8192 * 2) * (1 + 1e-9)
        assert max(curve(fast, picture, 1).values()) > 1000.0


def test_noise_in_a_table_is_no_error(atoll: Atoll, tmp_path: Path) -> None:
    times = ((1, 125), (8, 170), (16, 180), (32, 195), (64, 150), (512, 195))
    rows = [f"{SMALL},L4:1,1,decode,{tokens},1024,{us}" for tokens, us in times]
    table = write(tmp_path / "t.csv", STEP_HEADER, steps()[:2] + rows)
    asked = ("--backend", table, "--tpot", "6ms", "--lengths", "1024x64", "--json")
    done = atoll("perf", "show", SMALL, "L4:1", *asked)
    assert (done.code, done.err) == (0, "")
    for drawn in done.json["pictures"][3]["curves"]:
        assert drawn["y"] == sorted(drawn["y"], reverse=True)
        assert all(y > 0.0 for y in drawn["y"])


@pytest.fixture
def aic() -> None:
    pytest.importorskip("aiconfigurator_core", reason="needs the extra 'aic'")


@pytest.mark.aic
@pytest.mark.usefixtures("aic")
def test_show_from_aiconfigurator_tables(atoll: Atoll) -> None:
    done = atoll("perf", "show", "llama-3.1-8b", "H100:1", "--backend", "aic", "--json")
    assert (done.code, done.err) == (0, "")
    assert "aiconfigurator-core" in done.json["facts"]["provenance"]
    own = curve(atoll("perf", "show", "llama-3.1-8b", "H100:1", "--json"), 1)
    peer = curve(done, 1)
    assert all(0.7 < own[x] / peer[x] < 1.4 for x in own)


def test_aiconfigurator_has_no_tables_for_max_gpus(atoll: Atoll) -> None:
    refused(atoll("perf", "show", SMALL, "T4:1", "--backend", "aic"), 4, "'T4'", "H100")


@pytest.mark.aic
@pytest.mark.usefixtures("aic")
@pytest.mark.parametrize("variant", ["fp8", "int4", "kv=fp8"])
def test_aiconfigurator_has_no_variants(atoll: Atoll, variant: str) -> None:
    asked = ("perf", "show", f"llama-3.1-8b@{variant}", "H100:1", "--backend", "aic")
    refused(atoll(*asked), 2, "analytic backend")


@pytest.mark.aic
@pytest.mark.usefixtures("aic")
def test_what_aiconfigurator_lacks_is_said_in_our_words(atoll: Atoll) -> None:
    done = atoll("perf", "show", "gpt-oss-20b", "A100-80:1", "--backend", "aic")
    assert 0 < done.code < 70
    assert "bug in Atoll" not in done.err


def test_one_bad_picture_writes_none(atoll: Atoll, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for bad, code in (
        ("b.svg", 2),
        ("no/such/b.png", 3),
        ("folder.png", 3),
        ("b" * 300 + ".png", 3),
    ):
        done = atoll("perf", "show", SMALL, "L4:1", "-o", "a.png", "-o", "a.html", "-o", bad)
        refused(done, code, bad.rpartition("/")[0] or bad[-8:])
        assert written(tmp_path) == {"folder.png"}


@pytest.mark.usefixtures("sketched")
def test_a_file_is_named_as_it_is_called(atoll: Atoll) -> None:
    names = ("a[bold]b.png", "[b].html", ":gem:.html", "[/b].html", f"{'long/' * 40}x.html")
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
    done = atoll("perf", "show", SMALL, "L4:1", *(word for name in names for word in ("-o", name)))
    assert done.err == "".join(f"wrote {name}\n" for name in names)
    assert all(Path(name).stat().st_size for name in names)


def test_kernel_time_alone_warns_of_nothing(atoll: Atoll) -> None:
    done = atoll("perf", "show", SMALL, "L4:1", "--engine", "none", "--json")
    assert (done.code, done.err) == (0, "")
    served = atoll("perf", "show", SMALL, "L4:1", "--json")
    assert curve(served, 1)[1.0] - curve(done, 1)[1.0] == pytest.approx(0.051)


# atoll perf compare


def test_compare_sorts_by_what_a_request_costs(atoll: Atoll) -> None:
    done = atoll("perf", "compare", "llama-3.1-8b", "--nodes", "L4:1,H100:1,L40S:2,T4:1", "--json")
    assert (done.code, done.err) == (0, "")
    rows = done.json
    assert {row["node"] for row in rows} == {"L4:1", "H100:1", "L40S:2", "T4:1"}
    costs = [row["request_usd"] for row in rows if row["request_usd"] is not None]
    assert costs == sorted(costs)
    assert [row["request_usd"] is None for row in rows] == sorted(
        row["request_usd"] is None for row in rows
    )
    for row in rows:
        for phase in ("prefill", "decode"):
            copy = row[phase]
            if copy is None or copy["usd_per_hour"] is None:
                continue
            assert 1 <= copy["nodes"] <= 8
            assert copy["usd_per_hour"] == pytest.approx(row["usd_per_hour"] * copy["nodes"])
            per_million = copy["usd_per_hour"] / copy["tokens_per_s"] / 3600 * 1e6
            assert copy["usd_per_million_tokens"] == pytest.approx(per_million)


def test_compare_shows_the_promise_the_cheapest_node_and_the_tags(atoll: Atoll) -> None:
    nodes = "H100:4,A100-40:8,A10G:8"
    done = atoll("perf", "compare", "llama-3-70b", "--nodes", nodes, "--ttft", "2s")
    assert (done.code, done.err) == (0, "")
    assert "first token within 2s, then 80ms per token" in " ".join(done.out.split())
    assert "Cheapest per request: " in done.out
    for words in ("H100:4", "A100-40:8", "A10G:8", "measured", "proxy"):
        assert words in done.out


@pytest.mark.slow
def test_compare_of_all_nodes_covers_the_catalog(atoll: Atoll) -> None:
    done = atoll("perf", "compare", SMALL, "--nodes", "all", "--json")
    assert {row["node"] for row in done.json} == set(Catalog.default().nodes)
    assert all(row["provenance"] for row in done.json)


def test_compare_without_a_price_still_gives_throughput(atoll: Atoll) -> None:
    (row,) = atoll("perf", "compare", SMALL, "--nodes", "L40S:3", "--json").json
    assert row["usd_per_hour"] is None
    assert row["request_usd"] is None
    assert row["decode"]["tokens_per_s"] > 0.0
    assert row["decode"]["usd_per_million_tokens"] is None


def test_compare_shows_a_promise_that_nobody_keeps(atoll: Atoll) -> None:
    asked = ("perf", "compare", "llama-3-70b", "--nodes", "L4:1", "--tpot", "1us")
    (row,) = atoll(*asked, "--json").json
    assert row["decode"] is None
    assert row["request_usd"] is None
    shown = atoll(*asked)
    assert shown.code == 0
    assert "Cheapest per request" not in shown.out


def test_compare_takes_regions_and_spot(atoll: Atoll) -> None:
    def price(*more: str) -> tuple[float, str]:
        asked = ("perf", "compare", SMALL, "--nodes", "H100:8", "--json")
        (row,) = atoll(*asked, *more).json
        return row["usd_per_hour"], row["region"]

    anywhere, _ = price()
    usd, where = price("--region", "us-east-2")
    assert where == "aws/us-east-2"
    assert usd > anywhere
    assert price("--region", "us-east-2", "--region", "gcp")[0] <= usd
    assert price("--region", "us-east-2", "--spot")[0] < usd


def test_compare_takes_prices_and_models_of_an_overlay(
    atoll: Atoll, tmp_path: Path, config: Path
) -> None:
    overlay = tmp_path / "site.yaml"
    overlay.write_text(
        "models: {ours: {hf_config: my-model}}\n"
        "prices:\n  - {cloud: own, region: attic, node: 'L4:1', usd_per_hour: $0.01/h}\n",
        encoding="utf-8",
    )
    asked = ("perf", "compare", "ours", "--nodes", "L4:1", "--overlay", overlay, "--json")
    (row,) = atoll(*asked).json
    assert (row["usd_per_hour"], row["region"]) == (0.01, "own/attic")
    assert row["max_layers"] == 4


def test_compare_refuses_a_promise_of_no_time(atoll: Atoll) -> None:
    done = atoll("perf", "compare", SMALL, "--tpot", "0s")
    refused(done, 3, "tpot: '0s' is not a latency above 0")


# atoll perf calibrate


def test_calibrate_finds_the_constants_behind_the_measurements(
    atoll: Atoll, measured: Path
) -> None:
    done = atoll("perf", "calibrate", measured, "--json")
    assert done.code == 0
    (fit,) = done.json
    assert (fit["gpu"], fit["op"]) == ("L40S", "gemm")
    assert fit["constants"]["tag"] == "measured"
    assert fit["constants"]["source"] == "gemm.csv"
    for name, value in TRUE.items():
        assert fit["constants"][name] == pytest.approx(value, rel=0.01)
    assert fit["fitted"]["points"] + fit["held_out"]["points"] == 40
    assert fit["held_out"]["median"] < 0.1


def known(gpu: str) -> ConstantTable:
    """The shipped constants with TRUE for the matrix products of one GPU."""
    gemm = OpConstants(e_f=TRUE["e_f"], e_b=TRUE["e_b"], t0_us=TRUE["t0_us"], p=TRUE["p"])
    table = default_constants()
    return table.with_gpus([table.gpu(gpu).with_measured({OpClass.GEMM: gemm})])


def test_calibrated_constants_change_the_prediction_as_they_should(
    atoll: Atoll, measured: Path, tmp_path: Path
) -> None:
    done = atoll("perf", "calibrate", measured, "-o", "ours.yaml", "--source", "our rig")
    assert done.code == 0
    assert "Wrote ours.yaml" in done.out
    asked = ("perf", "show", "llama-3.1-8b", "L40S:1", "--lengths", "512x128", "--json")
    shipped = atoll(*asked)
    ours = atoll(*asked, "--overlay", "ours.yaml")
    assert "measured (our rig): gemm" in ours.json["facts"]["provenance"]
    catalog = Catalog.default()
    node, spec = catalog.node("L40S:1"), catalog.model("llama-3.1-8b").llm
    expected = analytic(spec, node, constants=known("L40S"))
    for sequences, ms in curve(ours, 1).items():
        seconds = step_seconds(expected, Batch.decode(sequences, 512 + 64), 0, 32)
        assert ms == pytest.approx(seconds * 1e3, rel=2e-3)
        assert ms > 1.1 * curve(shipped, 1)[sequences]
    # Other GPUs keep what ships.
    other = ("perf", "show", SMALL, "H100:1", "--json")
    assert atoll(*other, "--overlay", "ours.yaml").out == atoll(*other).out
    rows = [
        atoll("perf", "compare", "llama-3.1-8b", "--nodes", "L40S:1", "--json", *more).json[0]
        for more in ((), ("--overlay", "ours.yaml"))
    ]
    assert rows[1]["prefill"]["tokens_per_s"] < rows[0]["prefill"]["tokens_per_s"]
    assert written(tmp_path) == {"gemm.csv", "ours.yaml"}


def attention_rows() -> Iterator[str]:
    gpu = Catalog.default().gpu("L40S")
    for kv_heads in (4, 8):
        prefill = operators.prefill_attention(
            32,
            kv_heads,
            128,
            OpSpeed(
                peak=gpu.fp16_flops,
                bandwidth=gpu.bandwidth_bytes_per_s,
                e_f=0.3,
                e_b=0.6,
                t0_s=9e-6,
                p=1.2,
            ),
            kv_bytes=2.0,
            serial_ns=4.0,
        )
        decode = operators.decode_attention(
            32,
            kv_heads,
            128,
            OpSpeed(
                peak=gpu.fp16_flops, bandwidth=gpu.bandwidth_bytes_per_s, e_b=0.6, t0_s=9e-6, p=1.2
            ),
            kv_bytes=2.0,
            pad=9.0,
            serial_ns=0.0,
        )
        for batch in (1.0, 4.0, 32.0):
            for length in (128.0, 512.0, 1024.0, 4096.0, 8192.0):
                tokens = batch * length
                times = {
                    "prefill": prefill.seconds(0.5 * tokens * length, tokens, tokens, length),
                    "decode": decode.seconds(batch, length),
                }
                for kind, seconds in times.items():
                    shape = f"{batch:g},{length:g},32,{kv_heads},128"
                    yield f"l40s,{kind},{shape},{seconds * 1e3:.9g}"


ATTENTION = "system,kind,batch_size,seq_len,num_heads,num_key_value_heads,head_dim,latency_ms"


def test_calibrate_takes_several_files_and_operators(
    atoll: Atoll, measured: Path, tmp_path: Path
) -> None:
    attention = write(tmp_path / "attention.csv", ATTENTION, list(attention_rows()))
    done = atoll("perf", "calibrate", measured, attention, "-o", "ours.yaml")
    assert done.code == 0
    for words in ("gemm", "attention_prefill", "attention_decode"):
        assert words in done.out
    text = (tmp_path / "ours.yaml").read_text(encoding="utf-8")
    assert text.count("L40S:") == 1
    assert text.count("tag: measured") == 3
    shown = atoll("perf", "show", SMALL, "L40S:1", "--overlay", "ours.yaml", "--json")
    for ground in ("measured (gemm.csv)", "measured (attention.csv)"):
        assert ground in shown.json["facts"]["provenance"]


def test_calibrate_reads_compressed_files(atoll: Atoll, tmp_path: Path) -> None:
    header, rows = products()
    packed = tmp_path / "gemm.csv.gz"
    packed.write_bytes(gzip.compress("\n".join((header, *rows)).encode()))
    assert atoll("perf", "calibrate", packed, "--json").json[0]["gpu"] == "L40S"


def test_calibrate_takes_the_gpu_from_an_option(atoll: Atoll, tmp_path: Path) -> None:
    bare = write(tmp_path / "bare.csv", *products("RTX4090", named=False))
    refused(atoll("perf", "calibrate", bare), 3, "no GPU named", "--gpu")
    done = atoll("perf", "calibrate", bare, "--gpu", "rtx 4090", "--all-points", "--json")
    (fit,) = done.json
    assert fit["gpu"] == "RTX4090"
    assert fit["held_out"] is None
    assert fit["fitted"]["points"] == 40


def test_calibrate_takes_results_of_load_generators(atoll: Atoll, tmp_path: Path) -> None:
    result = tmp_path / "bench.json"
    fields = {"completed": 100, "duration": 50.0, "mean_ttft_ms": 50.0, "mean_tpot_ms": 6.0}
    fields |= {"total_input_tokens": 51_200, "total_output_tokens": 20_000}
    result.write_text(json.dumps(fields))
    refused(atoll("perf", "calibrate", result), 2, "do not say what served", "--model")
    options = ("--model", "llama-3.1-8b", "--node", "H200:1", "-o", "ours.yaml")
    done = atoll("perf", "calibrate", result, *options, "--json")
    # It answered a little slower than predicted, and is predicted nearer to that now.
    per_token = next(each for each in done.json["times"] if each["of"] == "per token")
    assert per_token["before_s"] < per_token["after_s"] <= per_token["seen_s"]
    assert done.json["server"]["memory"] > 1.0
    shown = atoll("perf", "show", "llama-3.1-8b", "H200:1", "--overlay", "ours.yaml")
    assert "profile of " in shown.out


def test_calibrate_keeps_nothing_unless_asked(atoll: Atoll, measured: Path, tmp_path: Path) -> None:
    done = atoll("perf", "calibrate", measured)
    assert (done.code, done.err) == (0, "")
    assert "Nothing written" in done.out
    assert written(tmp_path) == {"gemm.csv"}


def test_calibrate_leaves_bad_rows_out_and_says_which(atoll: Atoll, tmp_path: Path) -> None:
    header, rows = products()
    bad = ["L40S,many,4096,4096,3", "L40S,1,4096,4096,-3", "L40S,1,4096", "L40S,1,4096,4096,inf"]
    mixed = write(tmp_path / "mixed.csv", header, [*rows[:5], *bad, *rows[5:]])
    done = atoll("perf", "calibrate", mixed, "--json", "-o", "ours.yaml")
    assert done.code == 0
    said = done.err.strip()
    assert said == f"warning: {mixed}: left out 4 rows, first line 7: m: 'many' is not a number"
    (fit,) = done.json
    assert fit["constants"]["e_b"] == pytest.approx(TRUE["e_b"], rel=0.01)
    assert (tmp_path / "ours.yaml").exists()


def test_calibrate_writes_each_operator_once(atoll: Atoll, measured: Path, tmp_path: Path) -> None:
    more = write(tmp_path / "more.csv", *products())
    assert atoll("perf", "calibrate", measured, more, "-o", "ours.yaml").code == 0
    done = atoll("perf", "show", SMALL, "L40S:1", "--overlay", "ours.yaml", "--json")
    assert done.code == 0
    assert "measured (gemm.csv, more.csv): gemm" in done.json["facts"]["provenance"]


@pytest.mark.slow
def test_calibrate_fits_all_points_of_an_operator_together(atoll: Atoll, tmp_path: Path) -> None:
    header, rows = products()
    whole = write(tmp_path / "whole.csv", header, rows)
    # Twelve points each: too few alone, and under another spelling of the GPU's name.
    parts = [
        write(tmp_path / f"{i}.csv", header, rows[i::3] if i else [r.lower() for r in rows[::3]])
        for i in range(3)
    ]
    (together,) = atoll("perf", "calibrate", *parts, "--source", "x", "--json").json
    (once,) = atoll("perf", "calibrate", whole, "--source", "x", "--json").json
    assert together["fitted"]["points"] == once["fitted"]["points"]
    assert together["held_out"]["points"] == once["held_out"]["points"]
    for name, value in TRUE.items():
        assert together["constants"][name] == pytest.approx(value, rel=0.01)
    # The same file twice is one file.
    (twice,) = atoll("perf", "calibrate", whole, whole, "--source", "x", "--json").json
    assert twice == once


def test_calibrate_keeps_the_fastest_implementation(atoll: Atoll, tmp_path: Path) -> None:
    header, rows = products()
    named = [f"{row},good" for row in rows]
    slow = [f"{r.rpartition(',')[0]},{float(r.rpartition(',')[2]) * 3:.8g},bad" for r in rows[:30]]
    both = write(tmp_path / "both.csv", f"{header},impl", [*slow, *named])
    done = atoll("perf", "calibrate", both, "--json")
    assert done.code == 0
    assert done.err == (
        f"note: {both}: gemm: kept the fastest implementation of every shape, left out 30 rows\n"
    )
    (fit,) = done.json
    assert fit["fitted"]["points"] + fit["held_out"]["points"] == 40
    assert fit["constants"]["e_b"] == pytest.approx(TRUE["e_b"], rel=0.01)


@pytest.mark.slow
def test_the_fastest_implementation_may_have_a_file_of_its_own(
    atoll: Atoll, tmp_path: Path
) -> None:
    header, rows = products()
    good = [f"{row},good" for row in rows]
    slow = [f"{r.rpartition(',')[0]},{float(r.rpartition(',')[2]) * 3:.8g},bad" for r in rows[:30]]
    both = write(tmp_path / "both.csv", f"{header},impl", [*slow, *good])
    (fit,) = atoll("perf", "calibrate", both, "--json").json
    apart = [
        write(tmp_path / f"{name}.csv", f"{header},impl", own)
        for name, own in (("good", good), ("bad", slow))
    ]
    done = atoll("perf", "calibrate", *apart, "--json")
    assert "left out 30 rows" in done.err
    assert done.err.count("\n") == 1
    assert done.json[0]["fitted"] == fit["fitted"]


@pytest.mark.parametrize("kind", ["", "both"])
def test_calibrate_needs_the_kind_of_attention(atoll: Atoll, tmp_path: Path, kind: str) -> None:
    rows = [row.replace("prefill", kind).replace("decode", kind) for row in attention_rows()]
    data = write(tmp_path / "a.csv", ATTENTION, rows)
    refused(atoll("perf", "calibrate", data, "-o", "ours.yaml"), 3, "a.csv: kind: ")
    assert written(tmp_path) == {"a.csv"}


def test_calibrate_leaves_out_attention_of_no_known_kind(atoll: Atoll, tmp_path: Path) -> None:
    rows = list(attention_rows())
    odd = [row.replace("prefill", "both") for row in rows if "prefill" in row][:3]
    data = write(tmp_path / "a.csv", ATTENTION, [*rows, *odd])
    done = atoll("perf", "calibrate", data, "--json")
    assert len(done.json) == 2
    assert done.err == (
        f"warning: {data}: left out 3 rows whose kind is neither prefill nor decode\n"
    )


def test_one_file_without_anything_to_fit_spoils_the_rest(
    atoll: Atoll, measured: Path, tmp_path: Path
) -> None:
    rows = [row.replace("prefill", "").replace("decode", "") for row in attention_rows()]
    bad = write(tmp_path / "a.csv", ATTENTION, rows)
    refused(atoll("perf", "calibrate", measured, bad, "-o", "ours.yaml"), 3, "a.csv: kind: ")
    assert written(tmp_path) == {"gemm.csv", "a.csv"}


@pytest.mark.slow
def test_brackets_in_a_bad_row_are_only_words(atoll: Atoll, tmp_path: Path) -> None:
    header, rows = products()
    data = write(tmp_path / "a.csv", header, [*rows, "L40S,[/b],4096,4096,3"])
    done = atoll("perf", "calibrate", data)
    assert done.code == 0
    assert "'[/b]' is not a number" in done.err
    # In names of files too, and in one line however long.
    folder = tmp_path / ("[bold]" + "x" * 200)
    folder.mkdir()
    data.rename(folder / "[b].csv")
    done = atoll("perf", "calibrate", folder / "[b].csv", "-o", "[i]c.yaml")
    assert done.err == (
        f"warning: {folder}/[b].csv: left out 1 rows, first line 42: m: '[/b]' is not a number\n"
    )
    assert "Wrote [i]c.yaml; plan and simulate with it: --overlay [i]c.yaml," in done.out
    shown = atoll("perf", "show", SMALL, "L40S:1", "--overlay", "[i]c.yaml")
    assert "measured ([b].csv): gemm" in shown.out


BAD_DATA: dict[str, tuple[bytes, int, tuple[str, ...]]] = {
    "prose": (b"hello world\n1\n", 3, ("fit no kind of measurement", "gemm: m, n, k")),
    "no rows": (b"m,n,k,latency_us\n", 3, ("no usable rows",)),
    "no good rows": (b"m,n,k,latency_us\n1,2,3,x\n0,1,2,3\n", 3, ("no usable rows",)),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_calibrate_refuses(atoll: Atoll, tmp_path: Path, case: str) -> None:
    content, code, said = BAD_DATA[case]
    data = tmp_path / "data.csv"
    data.write_bytes(content)
    refused(atoll("perf", "calibrate", data, "--gpu", "L40S", "-o", "ours.yaml"), code, *said)
    assert written(tmp_path) == {"data.csv"}


def test_calibrate_needs_enough_points(atoll: Atoll, tmp_path: Path) -> None:
    header, rows = products()
    data = write(tmp_path / "data.csv", header, rows[:4])
    says = (f"{data}: 4 points of gemm", "too few")
    refused(atoll("perf", "calibrate", data, "-o", "ours.yaml"), 3, *says)
    refused(atoll("perf", "calibrate", data, "--all-points", "-o", "ours.yaml"), 3, *says)
    more = write(tmp_path / "more.csv", header, rows[4:7])
    done = atoll("perf", "calibrate", data, more, "-o", "ours.yaml")
    refused(done, 3, f"{data}, {more}: 7 points of gemm", "too few")
    assert written(tmp_path) == {"data.csv", "more.csv"}


def test_calibrate_refuses_what_it_cannot_write(
    atoll: Atoll, measured: Path, tmp_path: Path
) -> None:
    refused(atoll("perf", "calibrate", measured, "-o", "no/such/ours.yaml"), 3, "no/such")
    assert written(tmp_path) == {"gemm.csv"}


def test_constants_join_those_of_other_operators_and_leave_other_facts_alone(
    atoll: Atoll, measured: Path, tmp_path: Path
) -> None:
    attention = write(tmp_path / "attention.csv", ATTENTION, list(attention_rows()))
    for data in (measured, attention):
        assert atoll("perf", "calibrate", data, "-o", "ours.yaml").code == 0
    text = (tmp_path / "ours.yaml").read_text()
    assert [text.count(op) for op in ("gemm:", "attention_prefill:", "L40S:")] == [1, 1, 1]
    facts = tmp_path / "facts.yaml"
    facts.write_text("gpus: {L40S: {memory: 40GB}}\n")
    done = atoll("perf", "calibrate", measured, "-o", "facts.yaml")
    refused(done, 3, "facts.yaml", "name another file")
    assert facts.read_text() == "gpus: {L40S: {memory: 40GB}}\n"


def test_a_gpu_of_an_overlay_borrows_what_was_not_measured(atoll: Atoll, tmp_path: Path) -> None:
    overlay = tmp_path / "site.yaml"
    overlay.write_text("gpus: {X48: {like: L40S, fp16_tflops: 181}}\n", encoding="utf-8")
    asked = ("perf", "show", SMALL, "X48:1", "--overlay", overlay, "--json")
    done = atoll(*asked)
    assert (done.code, done.err) == (0, "")
    assert done.json["facts"]["provenance"].startswith("proxy (")
    measured = write(tmp_path / "x48.csv", *products("X48", facts=overlay))
    assert atoll("perf", "calibrate", measured, "--overlay", overlay, "-o", "c.yaml").code == 0
    times = atoll(*asked, "--overlay", "c.yaml").json["facts"]["provenance"]
    assert times.startswith("proxy (")
    assert "measured (x48.csv): gemm" in times
