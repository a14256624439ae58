"""What the documentation shows can be run, and what it tabulates is what ships."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from atoll.catalog import Catalog
from atoll.catalog.overlay import apply_overlay
from atoll.engines.table import ENGINES
from atoll.perf.constants import OpClass, OpConstants, Tag, default_constants
from atoll.workload.lengths import BUILT_IN
from tests.cli.commands import run

DOCS = Path(__file__).resolve().parents[2] / "docs"
FITTED = [op for op in OpClass if op is not OpClass.ELEMENTWISE]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the documentation prints, in the current folder."""
    monkeypatch.delenv("ATOLL_CATALOG", raising=False)
    monkeypatch.chdir(tmp_path)
    catalog, perf = text("reference/catalog.md"), text("reference/perf.md")
    (tmp_path / "my-model").mkdir()
    for name, content in {
        "site.yaml": block(catalog, "yaml"),
        "my-model/config.json": block(catalog, "json"),
        "x48.yaml": block(text("guides/performance.md"), "yaml"),
        "steps.csv": next(b for b in blocks(perf, "") if b.startswith("model,node,tp")),
    }.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def block(page: str, language: str) -> str:
    (found,) = blocks(page, language)
    return found


def rows(page: str, first: str) -> dict[str, list[str]]:
    """The table whose header starts with `first`: first cell to the others."""
    lines = page[page.index(f"\n| {first} |") :].splitlines()[1:]
    table: dict[str, list[str]] = {}
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        table[name] = cells
    return table


def test_the_overlay_of_the_catalog_page_does_what_it_says(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = apply_overlay(Catalog.default(), site / "site.yaml")
    assert changed.gpu("X48").fp16_tflops == 120
    assert changed.gpu("RTX3090").tdp_w == 280
    assert changed.node("RTX3090:2").interconnect.name == "nvlink-bridge"
    assert changed.node("X48:4").interconnect.allreduce_for(4).bus_bandwidth_bytes_per_s == 3.7e9
    assert changed.model("llama-3.3-70b-32k").llm.max_context == 32768
    assert changed.model("my-model").llm.kv_dtype.name == "fp8"
    assert changed.links.in_region.bandwidth_bytes_per_s == 25e9 / 8
    assert changed.links.between("basement", "us-east-2").latency_s == 0.012
    out = run(capsys, "catalog", "prices", "--region", "basement", "--overlay", "site.yaml")
    assert "X48:4" in out
    compared = ("perf", "compare", "my-model", "--nodes", "RTX3090:2,L40S:1", "--json")
    table = json.loads(run(capsys, *compared, "--overlay", "site.yaml"))
    assert {row["region"] for row in table} >= {"own/basement"}


def test_the_constants_of_the_perf_page_run_a_new_gpu(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("perf", "show", "my-model", "X48:4", "--overlay", "site.yaml", "--json")
    shown = json.loads(run(capsys, *asked, "--overlay", "x48.yaml"))
    times = shown["facts"]["provenance"]
    assert times.startswith("proxy (L40S): attention_prefill")
    assert "measured (our rig, 2026): gemm" in times


@pytest.mark.usefixtures("site")
def test_the_table_of_steps_of_the_perf_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("perf", "show", "llama-3.1-8b", "L40S:1", "--backend", "steps.csv", "--json")
    assert "steps.csv, 8 points" in json.loads(run(capsys, *asked))["facts"]["provenance"]


def tag(constants: OpConstants) -> str:
    if constants.tag is not Tag.PROXY:
        return constants.tag.value
    return f"proxy: {re.split(r',| [(]', constants.source)[0]}"


def test_the_table_of_tags_is_that_of_the_constants() -> None:
    shipped = {
        gpu: [tag(ops[op]) if op in ops else "-" for op in FITTED]
        for gpu in default_constants().names()
        for ops in [default_constants().gpu(gpu).ops]
    }
    page = text("reference/perf.md")
    assert rows(page, "GPU") == shipped
    lent = {gpu.name: gpu.like for gpu in Catalog.default().gpus.values() if gpu.like is not None}
    assert {gpu: cells[0] for gpu, cells in rows(page, "GPU without its own").items()} == lent


def test_host_times_and_lengths_are_the_ones_used() -> None:
    page = text("reference/perf.md")
    for names, cells in rows(page, "Engine").items():
        for name in re.findall(r"`(\w+)`", names):
            shown = [float(cell.removesuffix(" ms")) * 1e-3 for cell in cells[:4]]
            defaults = ENGINES[name].defaults
            assert defaults is not None
            hosts = [defaults.hosts[mode] for mode in ("async", "sync")]
            assert shown == pytest.approx([s for h in hosts for s in (h.step_s, h.sequence_s)])
            assert cells[4].startswith(defaults.scheduling)
            assert ("stages" in cells[4]) == defaults.stages_wait
    lengths = rows(page, "Name")
    assert {name.strip("`") for name in lengths} == set(BUILT_IN)
    for name, cells in lengths.items():
        mix = BUILT_IN[name.strip("`")]
        shown = [float(cell.replace(",", "")) for cell in cells[:3]]
        expected = [mix.input_mean, mix.output_mean, mix.decode_context]
        assert shown == pytest.approx(expected, abs=0.5)


def anchors(page: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
