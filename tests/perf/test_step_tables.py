from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError, MissingDependencyError, UnknownNameError
from atoll.core.ids import Phase
from atoll.engines.limits import EngineLimits, HostTime
from atoll.engines.profile import EngineProfile, LaunchTime
from atoll.engines.table import EngineChoice, profile_engine
from atoll.perf.batch import Batch
from atoll.perf.capacity import CapacityModel, RoleLoad, table_of
from atoll.perf.operators import Array
from atoll.perf.step import AnalyticStepModel, Position, StepModel, analytic, step_seconds
from atoll.perf.step_tables import Surface, TableFile, TableStepModel
from atoll.workload.lengths import LengthMix
from tests.perf.builders import model, node_type

COLUMNS = [
    "model", "node", "tp", "phase", "tokens", "context", "kind", "layer_us", "embedding_us",
    "head_us", "host_us",
]  # fmt: skip
Row = dict[str, object]

# A factor of 1.41 between neighbours.
PROMPTS = [2.0 ** (i / 2) for i in range(12, 27)]
SEQUENCES = [2.0 ** (i / 2) for i in range(19)]
CACHED = [0.0, *(2.0 ** (i / 2) for i in range(14, 29))]
CONTEXTS = [2.0 ** (i / 2) for i in range(14, 29)]
NAMES = {"dense": ("llama-3.1-8b", "L40S:2"), "hybrid": ("gpt-oss-20b", "H100:1")}


def sampled(own: StepModel, name: str) -> Iterator[Row]:
    """Rows as a rig would write them, if the rig were the analytic model."""
    grid = [("prefill", t, c) for t in PROMPTS for c in CACHED]
    grid += [("decode", n, c) for n in SEQUENCES for c in CONTEXTS]
    for phase, tokens, context in grid:
        batch = (
            Batch.prefill(tokens, 1, context)
            if phase == "prefill"
            else Batch.decode(tokens, context)
        )
        parts = own.parts(batch)
        for kind, layer in enumerate(parts.layers):
            yield {
                "model": name,
                "node": own.node.id,
                "tp": own.tp,
                "phase": phase,
                "tokens": tokens,
                "context": context,
                "kind": kind,
                "layer_us": layer * 1e6,
                "embedding_us": parts.embedding * 1e6,
                "head_us": parts.head * 1e6,
                "host_us": parts.host * 1e6,
            }


def write(path: Path, rows: list[Row], columns: list[str] | None = None) -> Path:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns or COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def pairs(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[AnalyticStepModel, TableStepModel]]:
    out = {}
    for key, (name, machine) in NAMES.items():
        # As many sequences as are measured.
        limits = EngineLimits(max_num_seqs=512)
        own = analytic(model(name), node_type(machine), engine=EngineChoice("vllm", limits))
        # Times of experts jump where steps outgrow the graphs, and tables are smooth.
        own = replace(own, engine=replace(own.engine, launch=LaunchTime(1e-4)))
        path = write(tmp_path_factory.mktemp(key) / "steps.csv", list(sampled(own, name)))
        out[key] = own, TableFile(path).step_model(name, own.spec, own.node)
    return out


PAIRS = pytest.mark.parametrize("key", list(NAMES))


@PAIRS
def test_on_the_grid_the_table_is_exact(
    pairs: dict[str, tuple[AnalyticStepModel, TableStepModel]], key: str
) -> None:
    own, table = pairs[key]
    layers = own.spec.layers
    assert table.kinds == own.kinds
    for tokens in PROMPTS[::2]:
        for context in CACHED[::5]:
            batch = Batch.prefill(tokens, 1, context)
            for start, end in ((0, layers), (0, 1), (1, 2), (layers - 1, layers)):
                assert step_seconds(table, batch, start, end) == pytest.approx(
                    step_seconds(own, batch, start, end), rel=1e-6
                )
    for tokens in SEQUENCES[::3]:
        for context in CONTEXTS[::7]:
            batch = Batch.decode(tokens, context)
            assert step_seconds(table, batch, 0, layers) == pytest.approx(
                step_seconds(own, batch, 0, layers), rel=1e-6
            )


@PAIRS
def test_between_grid_points_the_table_is_close(
    pairs: dict[str, tuple[AnalyticStepModel, TableStepModel]], key: str
) -> None:
    own, table = pairs[key]
    rng = np.random.default_rng(5)
    zero = np.zeros(3000)
    one = zero + 1.0
    tokens = np.exp(rng.uniform(np.log(PROMPTS[0]), np.log(PROMPTS[-1]), 3000))
    cached = np.exp(rng.uniform(np.log(CACHED[1]), np.log(CACHED[-1]), 3000))
    running = np.exp(rng.uniform(0.0, np.log(SEQUENCES[-1]), 3000))
    for batch in (
        Batch(tokens, one, zero, zero, zero),
        Batch(tokens, one, cached, zero, zero),
        Batch(zero, zero, zero, running, cached),
    ):
        found, expected = table.parts(batch), own.parts(batch)
        for mine, exact in zip(
            (found.embedding, *found.layers, found.head),
            (expected.embedding, *expected.layers, expected.head),
            strict=True,
        ):
            assert np.max(np.abs(mine / exact - 1.0)) < 0.03
        assert found.host == pytest.approx(expected.host, rel=0.01)


@PAIRS
def test_floats_and_arrays_agree(
    pairs: dict[str, tuple[AnalyticStepModel, TableStepModel]], key: str
) -> None:
    _, table = pairs[key]
    rows = [(300.0, 1.0, 10.0, 0.0, 0.0), (0.0, 0.0, 0.0, 7.0, 900.0), (99.0, 1.0, 0.0, 5.0, 500.0)]
    tokens, prompts, before, running, cached = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    batch = Batch(tokens, prompts, before, running, cached)
    many = step_seconds(table, batch, 0, table.spec.layers, host=False)
    for i, row in enumerate(rows):
        one = step_seconds(table, Batch(*row), 0, table.spec.layers, host=False)
        assert isinstance(one, float)
        assert many[i] == pytest.approx(one, rel=1e-12)


def test_a_mixed_step_adds_both_phases(
    pairs: dict[str, tuple[AnalyticStepModel, TableStepModel]],
) -> None:
    _, table = pairs["dense"]
    both = table.parts(Batch(512.0, 1.0, 0.0, 16.0, 512.0))
    prefill, decode = table.parts(Batch.prefill(512)), table.parts(Batch.decode(16, 512))
    assert both.layers[0] == pytest.approx(prefill.layers[0] + decode.layers[0])
    assert both.head == pytest.approx(prefill.head + decode.head)


def test_a_mixed_step_pays_the_host_once(
    pairs: dict[str, tuple[AnalyticStepModel, TableStepModel]],
) -> None:
    _, table = pairs["dense"]
    both = table.parts(Batch(512.0, 1.0, 0.0, 16.0, 512.0))
    assert both.host == pytest.approx(table.parts(Batch.decode(16, 512)).host)


def test_host_times_of_one_phase_or_both(tmp_path: Path) -> None:
    host = profile_engine("vllm").host
    engine_s, both_s = host.seconds(1.0), host.seconds(2.0)
    rows = {
        "neither": [row(phase="prefill"), row()],
        "decode": [row(phase="prefill"), row(host_us=3000)],
        "both": [row(phase="prefill", host_us=5000), row(host_us=3000)],
    }
    expected = {
        "neither": (engine_s, engine_s, both_s),
        "decode": (engine_s, 3e-3, 3e-3),
        "both": (5e-3, 3e-3, 5e-3),
    }
    for name, measured in rows.items():
        path = write(tmp_path / "t.csv", measured)
        own = TableFile(path).step_model(
            "m", model("llama-3.1-8b"), node_type("H100:1"), engine=profile_engine("vllm")
        )
        asked = (Batch.prefill(1), Batch.decode(1, 0), Batch(1.0, 1.0, 0.0, 1.0, 0.0))
        assert tuple(own.parts(batch).host for batch in asked) == pytest.approx(expected[name])
        many: Batch[Array] = Batch(
            np.array([b.prefill_tokens for b in asked]),
            np.array([b.prefill_sequences for b in asked]),
            np.array([b.prefill_context for b in asked]),
            np.array([b.decode_sequences for b in asked]),
            np.array([b.decode_context for b in asked]),
        )
        hosts = np.broadcast_to(own.parts(many).host, (3,))
        assert hosts.tolist() == pytest.approx(expected[name])
        assert own.measures_host(Phase.DECODE) == (name != "neither")
        assert own.measures_host(Phase.PREFILL) == (name == "both")


def test_only_the_sum_of_prompt_tokens_counts(
    pairs: dict[str, tuple[AnalyticStepModel, TableStepModel]],
) -> None:
    _, table = pairs["dense"]
    assert table.parts(Batch.prefill(4096, 8)) == table.parts(Batch.prefill(4096, 1))


def test_the_largest_step_is_measured_or_the_engines(
    pairs: dict[str, tuple[AnalyticStepModel, TableStepModel]],
) -> None:
    _, table = pairs["dense"]
    assert table.largest_batch(Phase.DECODE) == 512.0
    assert table.largest_batch(Phase.PREFILL) == 8192.0
    small = replace(table, engine=EngineProfile("x", max_sequences=8, max_tokens=100))
    assert (small.largest_batch(Phase.DECODE), small.largest_batch(Phase.PREFILL)) == (8.0, 100.0)
    large = replace(table, engine=EngineProfile("x", max_sequences=10**6))
    assert large.largest_batch(Phase.DECODE) == pytest.approx(512.0)


def test_capacity_from_a_table_is_that_of_its_source(
    pairs: dict[str, tuple[AnalyticStepModel, TableStepModel]],
) -> None:
    own, table = pairs["hybrid"]
    load = RoleLoad("x", own.spec, Phase.DECODE, 0.05, LengthMix.fixed(1024, 256))
    measured = TableStepModel(
        table.spec, table.node, table.tp, own.engine, table.surfaces, table.provenance
    )
    exact, found = table_of(load, own, 2), table_of(load, measured, 2)
    assert found.throughput == pytest.approx(exact.throughput, rel=0.03)
    assert found.provenance == "measured (steps.csv, 1050 points)"


def test_capacity_from_noisy_times_keeps_its_promises(tmp_path: Path) -> None:
    """A larger batch that was measured faster, or far slower, must not turn more layers into more."""
    own = analytic(model("llama-3.1-8b"), node_type("L40S:2"))
    rng = np.random.default_rng(9)
    rows = [
        r | {"layer_us": float(str(r["layer_us"])) * float(np.exp(rng.normal(0.0, 0.3)))}
        for r in sampled(own, "m")
    ]
    table = TableFile(write(tmp_path / "t.csv", rows)).step_model("m", own.spec, own.node)
    load = RoleLoad("x", own.spec, Phase.DECODE, 0.05, LengthMix.fixed(1024, 256))
    rates = table_of(load, table, 4).throughput
    assert np.all(np.diff(rates[:, :, 1:], axis=2) <= 0.0)
    capacity_model = CapacityModel(load, table)
    budgets = np.geomspace(1e-3, 1.0, 40)
    by_budget = np.stack(
        [capacity_model.throughput([1], [float(b)], Position.WHOLE)[0] for b in budgets]
    )
    assert np.all(np.diff(by_budget, axis=0) >= -1e-9 * by_budget.max())
    assert by_budget[-1, 32] > 0.0
    for budget in budgets:
        found = capacity_model.detail(32, 1, float(budget), Position.WHOLE)
        assert found.throughput == 0.0 or found.step_s <= budget * (1 + 1e-9)


# Beyond what was measured.


def surface() -> Surface:
    """Seconds = tokens x (context + 1), which is linear in logarithms."""
    tokens, context = np.array([1.0, 4.0, 16.0]), np.array([0.0, 9.0, 99.0])
    return Surface(tokens, context, tokens[:, None] * (context + 1.0))


@given(st.floats(1.0, 100.0), st.floats(0.0, 400.0))
def test_power_laws_are_exact_and_slopes_continue(tokens: float, context: float) -> None:
    found = surface().at(np.array([tokens]), np.array([context]))
    assert found[0] == pytest.approx(tokens * (context + 1.0), rel=1e-9)


def test_below_the_grid_the_first_point_counts() -> None:
    found = surface().at(np.array([0.25, 0.25]), np.array([0.0, 9.0]))
    assert found == pytest.approx([1.0, 10.0])


def test_far_beyond_the_grid_is_an_error() -> None:
    surface().at(np.array([4 * 16 + 64.0]), np.array([4 * 99 + 64.0]))
    for tokens, context, field in ((129.0, 0.0, "tokens"), (1.0, 461.0, "context")):
        with pytest.raises(InputError, match=r"far beyond the .* measured") as caught:
            surface().at(np.array([1.0, tokens]), np.array([0.0, context]))
        assert caught.value.field == field
        assert caught.value.hint is not None


def test_a_grid_of_one_point() -> None:
    one = Surface(np.array([8.0]), np.array([0.0]), np.array([[5.0]]))
    assert one.at(np.array([1.0, 8.0, 30.0]), np.zeros(3)) == pytest.approx([5.0, 5.0, 5.0])


def test_a_step_far_beyond_the_table(
    pairs: dict[str, tuple[AnalyticStepModel, TableStepModel]],
) -> None:
    _, table = pairs["dense"]
    with pytest.raises(InputError, match="analytic backend"):
        table.parts(Batch.decode(1, 1e6))


# Small files.


def row(**changes: object) -> Row:
    base: Row = {
        "model": "m", "node": "H100:1", "tp": 1, "phase": "decode", "tokens": 1, "context": 0,
        "layer_us": 10,
    }  # fmt: skip
    return base | changes


def read(path: Path, name: str = "m", machine: str = "H100:1", tp: int | None = None) -> StepModel:
    return TableFile(path).step_model(name, model("llama-3.1-8b"), node_type(machine), tp=tp)


def test_what_is_not_measured_is_not_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [row(), row(tokens=2, layer_us=20)])
    parts = read(path).parts(Batch.decode(1, 0))
    assert parts.layers == pytest.approx((10e-6,))
    assert (parts.embedding, parts.head, parts.host) == (0.0, 0.0, 0.0)
    own = TableFile(path).step_model(
        "m",
        model("llama-3.1-8b"),
        node_type("H100:1"),
        engine=EngineProfile("mine", HostTime(step_s=0.25)),
    )
    assert own.parts(Batch.decode(1, 0)).host == 0.25


def test_every_step_of_an_array_has_its_own_host_time(tmp_path: Path) -> None:
    rows = [row(host_us=100), row(tokens=2, host_us=300)]
    own = read(write(tmp_path / "t.csv", rows, [*COLUMNS]))
    zero, two = np.zeros(2), np.array([1.0, 2.0])
    many = step_seconds(own, Batch(zero, zero, zero, two, zero), 1, 2)
    assert many == pytest.approx([step_seconds(own, Batch.decode(n, 0), 1, 2) for n in (1, 2)])


def test_one_kind_stands_for_all(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [row(kind=0), row(tokens=2, layer_us=20, kind=0)])
    own = TableFile(path).step_model("m", model("gpt-oss-20b"), node_type("H100:1"))
    assert own.parts(Batch.decode(1, 0)).layers == pytest.approx((10e-6, 10e-6))


def test_a_phase_without_measurements(tmp_path: Path) -> None:
    own = read(write(tmp_path / "t.csv", [row()]))
    with pytest.raises(InputError, match="no measurements of prefill for H100:1"):
        own.parts(Batch.prefill(8))


def test_keys_and_sizes(tmp_path: Path) -> None:
    rows = [row(), row(node="H100:8", tp=2, layer_us=20), row(node="L4:2", tp="", layer_us=30)]
    table = TableFile(write(tmp_path / "t.csv", rows))
    assert table.keys() == (("m", "H100:1", 1), ("m", "H100:8", 2), ("m", "L4:2", 0))
    llm = model("llama-3.1-8b")
    pair = table.step_model("m", llm, node_type("H100:8"), tp=2)
    assert pair.parts(Batch.decode(1, 0)).layers == pytest.approx((20e-6,))
    # No size in the file: all GPUs of the node.
    whole = table.step_model("m", llm, node_type("L4:2"))
    assert whole.tp == 2
    assert whole.parts(Batch.decode(1, 0)).layers == pytest.approx((30e-6,))
    for machine, tp in (("L4:2", 1), ("H100:8", 4), ("H100:8", None), ("L40S:1", None)):
        with pytest.raises(UnknownNameError, match="measured table") as caught:
            table.step_model("m", llm, node_type(machine), tp=tp)
        assert "m on H100:8 tp 2" in str(caught.value)


def test_an_unknown_model(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [row(model="llama-3.1-8b")])
    with pytest.raises(UnknownNameError, match=r"did you mean llama-3\.1-8b on H100:1 tp 1"):
        read(path, name="llama-3-8b")


@pytest.mark.parametrize("column", ["model", "node", "phase", "tokens", "context", "layer_us"])
def test_a_missing_column(tmp_path: Path, column: str) -> None:
    path = write(tmp_path / "t.csv", [row()], [name for name in COLUMNS if name != column])
    with pytest.raises(InputError, match=f"no column {column}") as caught:
        TableFile(path)
    assert caught.value.path == str(path)
    assert "layer_us" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"layer_us": "fast"}, "layer_us", "'fast' is not a positive number"),
        ({"layer_us": "0"}, "layer_us", "'0' is not a positive number"),
        ({"layer_us": "-3"}, "layer_us", "not a positive number"),
        ({"layer_us": "nan"}, "layer_us", "not a positive number"),
        ({"layer_us": "inf"}, "layer_us", "not a positive number"),
        ({"layer_us": ""}, "layer_us", "empty"),
        ({"tokens": "0"}, "tokens", "not a positive number"),
        ({"tokens": "many"}, "tokens", "'many' is not a positive number"),
        ({"context": "-1"}, "context", "'-1' is not a number of 0 or more"),
        ({"head_us": "x"}, "head_us", "'x' is not a positive number"),
        ({"kind": "-1"}, "kind", "not a number of 0 or more"),
        ({"tp": "two"}, "tp", "'two' is not a positive number"),
        ({"phase": "both"}, "phase", "'both' is not prefill or decode"),
        ({"model": ""}, "model", "empty"),
    ],
)
def test_bad_values_are_named_with_their_line(
    tmp_path: Path, changes: Row, field: str, says: str
) -> None:
    path = write(tmp_path / "t.csv", [row(), row(tokens=2), row(tokens=4) | changes])
    with pytest.raises(InputError) as caught:
        read(path)
    error = caught.value
    assert (error.path, error.line, error.field) == (str(path), 4, field)
    assert says in str(error)
    assert str(error).startswith(f"{path}:4: {field}: ")


def test_a_hole_in_the_grid(tmp_path: Path) -> None:
    rows = [row(tokens=t, context=c) for t in (1, 2, 4) for c in (0, 100)]
    read(write(tmp_path / "t.csv", rows))
    with pytest.raises(InputError, match="decode has no row with tokens 2 and context 100") as hole:
        read(
            write(tmp_path / "t.csv", [r for r in rows if (r["tokens"], r["context"]) != (2, 100)])
        )
    assert hole.value.hint == "measure a full grid of tokens x context"


def test_rows_may_come_in_any_order(tmp_path: Path) -> None:
    rows = [
        row(tokens=t, context=c, layer_us=10 * t + c, phase=p)
        for p in ("prefill", "decode")
        for t in (1, 2, 4)
        for c in (0, 100)
    ]
    forward = read(write(tmp_path / "a.csv", rows))
    backward = read(write(tmp_path / "b.csv", rows[::-1]))
    batch = Batch.decode(3, 50)
    assert forward.parts(batch) == backward.parts(batch)


def test_a_point_measured_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [row(), row(layer_us=99)])
    with pytest.raises(InputError, match="the same sizes as line 2") as caught:
        read(path)
    assert (caught.value.path, caught.value.line) == (str(path), 3)
    # Layers of another kind are other points.
    read(write(tmp_path / "t.csv", [row(kind=0), row(kind=1)]))


def test_a_node_that_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [row(), row(node="H100:x")])
    with pytest.raises(InputError, match="is not a node type") as caught:
        TableFile(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (str(path), 3, "node")


def test_a_field_that_csv_refuses(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [row(), row(tokens="1" * 200_000)])
    with pytest.raises(InputError, match="not readable as CSV") as caught:
        TableFile(path)
    assert (caught.value.path, caught.value.line) == (str(path), 3)


def test_a_node_without_a_count_is_one_gpu(tmp_path: Path) -> None:
    read(write(tmp_path / "t.csv", [row(node="H100")]))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.csv"):
        TableFile(tmp_path / "none.csv")
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    with pytest.raises(InputError, match="no column model"):
        TableFile(empty)


# Parquet.


def test_parquet_says_the_same_as_csv(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        row(tokens=t, context=c, layer_us=10.0 * t + c, head_us=h)
        for t, h in ((1, 5.0), (2, 6.0))
        for c in (0, 100)
    ]
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    same = read(write(tmp_path / "t.csv", rows))
    batch = Batch.decode(1.5, 40)
    assert read(path).parts(batch) == same.parts(batch)
    assert read(path).provenance == "measured (t.parquet, 4 points)"


def test_a_bad_parquet_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1 no more")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        TableFile(path)
    with pytest.raises(InputError, match="not a readable Parquet file"):
        TableFile(tmp_path / "none.parquet")
    parquet.write_table(pyarrow.table({"model": ["m"], "tokens": [1]}), path)
    with pytest.raises(InputError, match="no column node, phase, context, layer_us"):
        TableFile(path)
    parquet.write_table(pyarrow.Table.from_pylist([row(), row(layer_us=None)]), path)
    with pytest.raises(InputError, match="empty") as caught:
        TableFile(path)
    assert (caught.value.line, caught.value.field) == (2, "layer_us")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingDependencyError, match=r"atoll\[aic\]"):
        TableFile(tmp_path / "t.parquet")
