"""The tables of docs/engines.md say what the code says, and what they rest on is there."""

from __future__ import annotations

import json

import pytest

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase, parse_node_type
from atoll.deploy.target_table import TARGETS
from atoll.engines.engine import Engine, Standing
from atoll.engines.table import find_planned, list_planned
from tests.engines.standings import (
    COLUMNS,
    EXECUTORS_TESTED,
    KINDS,
    LAYOUTS,
    PAGE,
    REFUSED,
    SERVED,
    TESTED,
    PlanKind,
    best_of,
    draw_tables,
    find_tests,
    judge,
    put_tables,
    read_servers,
    standing_of,
)

CATALOG = Catalog.default()
BY_TITLE = {kind.title: kind for kind in KINDS}


def test_the_page_has_the_tables_that_the_code_gives() -> None:
    page = PAGE.read_text("utf-8")
    expected = put_tables(page, draw_tables(CATALOG))
    assert page == expected, "write it anew: python -m tests.engines.standings"
    assert set(COLUMNS) > set(TARGETS)


@pytest.mark.parametrize("key", TESTED, ids=" ".join)
def test_a_test_that_is_named_is_there(key: tuple[str, str, str]) -> None:
    engine, title, column = key
    path, _, name = TESTED[key].partition("::")
    assert name in find_tests(path)
    assert column in COLUMNS
    assert judge(find_planned(engine), BY_TITLE[title], column, CATALOG).word != REFUSED


def test_the_test_of_executors_is_there() -> None:
    path, _, name = EXECUTORS_TESTED.partition("::")
    assert name in find_tests(path)


@pytest.mark.parametrize("key", SERVED, ids=" ".join)
def test_a_record_that_is_named_is_of_that_engine_layout_and_gpu(key: tuple[str, str, str]) -> None:
    engine, title, column = key
    kind, server = BY_TITLE[title], read_servers()[SERVED[key]]
    program = find_planned(engine).program
    assert program is not None
    commands = server.get("servers") or [server["server"]]
    roles = {words[at + 1] for words in map(str.split, commands) for at in _handovers(words)}
    for one in kind.instances(engine):
        if one.phase in _ROLE:
            assert any(_ROLE[one.phase] in role for role in roles)
        assert parse_node_type(one.nodes[0].node_type).whole_gpu in server["gpu"]
        for words in map(str.split, commands):
            assert program.fullmatch(words[2] if words[1] == "-m" else words[0])
            assert _tensor_parallel(words) == one.nodes[0].tp
            told = words[words.index("--quantization") + 1] if "--quantization" in words else None
            assert told == kind.quantization
    assert column == "local"


def _tensor_parallel(words: list[str]) -> int:
    """Return over how many GPUs a server's layers are split, as its command says."""
    if "--order" in words:
        order = json.loads(words[words.index("--order") + 1])
        return int(order["instance"]["nodes"][0]["tp"])
    return int(words[words.index("--tensor-parallel-size") + 1])


def _handovers(words: list[str]) -> list[int]:
    return [at for at, word in enumerate(words) if word == "--kv-transfer-config"]


_ROLE = {Phase.PREFILL: "kv_producer", Phase.DECODE: "kv_consumer"}


@pytest.mark.parametrize("engine", list_planned(), ids=lambda engine: engine.name)
def test_an_engine_says_that_it_served_where_a_record_is_kept(engine: Engine) -> None:
    gpus = {
        parse_node_type(node.node_type).gpu
        for name, title, _ in SERVED
        if name == engine.name
        for one in BY_TITLE[title].instances(name)
        for node in one.nodes
    }
    found = {CATALOG.gpu(gpu) for gpu in gpus}
    assert engine.served_on == {gpu.architecture for gpu in found if gpu.shares == 1}
    assert engine.served_shares_on == {gpu.architecture for gpu in found if gpu.shares > 1}


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.title)
@pytest.mark.parametrize("engine", list_planned(), ids=lambda engine: engine.name)
def test_plans_show_the_standing_that_the_tables_prove(engine: Engine, kind: PlanKind) -> None:
    best = best_of(judge(engine, kind, column, CATALOG) for column in COLUMNS)
    if best != REFUSED:
        assert best == standing_of(engine, kind, CATALOG)


def test_what_is_refused_says_why() -> None:
    kind = BY_TITLE["a pipeline with unlike tensor parallel sizes"]
    cell = judge(find_planned("vllm"), kind, "local", CATALOG)
    assert (cell.word, cell.why) == (
        REFUSED,
        "it mixes tensor parallel sizes, which vLLM cannot run",
    )
    unlike = judge(
        find_planned("vllm"), BY_TITLE["a pipeline over unlike GPUs"], "skypilot", CATALOG
    )
    assert "of a SkyPilot task are alike" in unlike.why
    assert (
        judge(find_planned("vllm"), BY_TITLE["one GPU"], "slurm", CATALOG).word == Standing.WRITTEN
    )
