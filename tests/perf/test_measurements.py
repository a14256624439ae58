from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError, UsageError
from atoll.perf.measurements import SCHEMAS, join_measurements, read_points
from tests.perf.builders import points

GEMM = """\
gpu,m,n,k,gemm_dtype,latency_ms
H100,1,4096,8192,bfloat16,0.03
H100,16,4096,8192,fp8,0.02
L4,1,4096,8192,,0.5
"""


def written(tmp_path: Path, text: str, name: str = "points.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_matrix_products(tmp_path: Path) -> None:
    found = read_points(written(tmp_path, GEMM))
    assert found.schema.kind == "gemm"
    assert len(found) == 3
    assert found.groups() == ("H100", "L4")
    assert found.sizes["m"].tolist() == [1.0, 16.0, 1.0]
    assert found.labels["gemm_dtype"].tolist() == ["bfloat16", "fp8", "bfloat16"]
    assert found.seconds == pytest.approx([3e-5, 2e-5, 5e-4])
    assert found.skipped == ()
    assert len(found.of("H100")) == 2
    assert found.of("H100", gemm_dtype="fp8").seconds == pytest.approx([2e-5])
    assert len(found.of(gemm_dtype="bfloat16")) == 2
    assert len(found.of("B200")) == 0


def test_compressed_files_are_the_same(tmp_path: Path) -> None:
    plain = read_points(written(tmp_path, GEMM))
    path = tmp_path / "points.csv.gz"
    path.write_bytes(gzip.compress(GEMM.encode()))
    packed = read_points(str(path))
    assert packed.seconds.tolist() == plain.seconds.tolist()
    assert packed.group.tolist() == plain.group.tolist()


@pytest.mark.parametrize(
    ("column", "scale"),
    [("latency_s", 1.0), ("latency_ms", 1e-3), ("latency_us", 1e-6), ("latency", 1e-3)],
)
def test_units_of_time(tmp_path: Path, column: str, scale: float) -> None:
    found = read_points(written(tmp_path, f"m,n,k,{column}\n1,2,3,4\n"))
    assert found.seconds == pytest.approx([4 * scale])
    assert found.groups() == ("",)


@pytest.mark.parametrize("column", ["gpu", "system", "machine", "node"])
def test_who_measured(tmp_path: Path, column: str) -> None:
    found = read_points(written(tmp_path, f"{column},m,n,k,latency_us\nx,1,2,3,4\n,1,2,3,4\n"))
    assert found.groups() == ("", "x")


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.kind)
def test_the_kind_follows_from_the_columns(tmp_path: Path, schema: object) -> None:
    own = next(s for s in SCHEMAS if s == schema)
    names = [*own.sizes, *own.labels]
    values = ["8"] * len(own.sizes) + ["text"] * len(own.labels)
    text = ",".join([*names, "latency_us"]) + "\n" + ",".join([*values, "7"]) + "\n"
    found = read_points(written(tmp_path, text))
    assert found.schema is own
    assert set(found.labels) == set(own.labels)
    assert all(found.labels[name].tolist() == ["text"] for name in own.labels)


def test_layers_in_their_own_unit(tmp_path: Path) -> None:
    text = "machine,model,kind,tokens_in_batch,ms_per_layer\nl4,llama,decode,8,1.5\n"
    found = read_points(written(tmp_path, text))
    assert found.schema.kind == "layer"
    assert found.seconds == pytest.approx([1.5e-3])
    assert found.of("l4", kind="decode", model="llama").sizes["tokens_in_batch"].tolist() == [8.0]


# What cannot be read.


def test_bad_rows_are_skipped_with_their_lines(tmp_path: Path) -> None:
    text = (
        "m,n,k,latency_ms\n"
        "1,2,3,4\n"
        "x,2,3,4\n"
        "1,2,3,\n"
        "1,0,3,4\n"
        "1,2,3,-1\n"
        "1,2,3,nan\n"
        "1,2,3,inf\n"
        "1,2\n"
        "5,6,7,8,9\n"
    )
    found = read_points(written(tmp_path, text))
    assert found.sizes["m"].tolist() == [1.0, 5.0]
    assert len(found.seconds) == len(found.group) == len(found.labels["gemm_dtype"]) == 2
    assert [line for line, _ in found.skipped] == [3, 4, 5, 6, 7, 8, 9]
    reasons = dict(found.skipped)
    assert reasons[3] == "m: 'x' is not a number"
    assert reasons[4] == "latency_ms: '' is not a number"
    assert reasons[5] == "n: '0' is not a positive number"
    assert reasons[6] == "latency_ms: '-1' is not a positive number"
    assert "k: None is not a number" in reasons[9]
    # They stay with every selection.
    assert found.of(gemm_dtype="bfloat16").skipped == found.skipped


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "columns (none) fit no kind of measurement"),
        ("a,b,latency_ms\n1,2,3\n", "columns a, b, latency_ms fit no kind of measurement"),
        ("m,n,latency_ms\n1,2,3\n", "fit no kind of measurement"),
        ("m,n,k\n1,2,3\n", "no column with the measured time"),
    ],
)
def test_unknown_columns(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_points(path)
    assert says in str(caught.value)
    assert caught.value.path == str(path)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the file: no such file"):
        read_points(tmp_path / "none.csv")
    with pytest.raises(InputError, match="cannot read"):
        read_points(tmp_path)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"m,n,k,latency_ms\n\xff\xfe\n")
    with pytest.raises(InputError, match="not UTF-8 text"):
        read_points(binary)
    fake = tmp_path / "fake.csv.gz"
    fake.write_bytes(b"m,n,k,latency_ms\n")
    with pytest.raises(InputError, match="not a gzipped file"):
        read_points(fake)


def test_a_small_file_that_grows_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.perf.measurements.MAX_BYTES", 2**20)
    path = tmp_path / "bomb.csv.gz"
    path.write_bytes(gzip.compress(GEMM.encode() + bytes(2**20)))
    assert path.stat().st_size < 10_000
    with pytest.raises(InputError, match="larger than 1 MiB"):
        read_points(path)


def damaged(tmp_path: Path, how: str) -> Path:
    data = bytearray(gzip.compress(GEMM.encode() * 50))
    if how == "cut short":
        del data[-20:]
    else:
        data[20:40] = b"\xff" * 20
    path = tmp_path / "damaged.csv.gz"
    path.write_bytes(bytes(data))
    return path


@pytest.mark.parametrize("how", ["cut short", "scrambled"])
def test_a_damaged_archive(tmp_path: Path, how: str) -> None:
    with pytest.raises(InputError):
        read_points(damaged(tmp_path, how))


def test_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "bom.csv"
    path.write_bytes(b"\xef\xbb\xbfm,n,k,latency_ms\n1,2,3,4\n")
    assert len(read_points(path)) == 1


@pytest.mark.parametrize("text", ["m,n,k,latency_ms\n" + "1" * 200_000 + ",2,3,4\n"])
def test_text_that_csv_refuses(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError):
        read_points(written(tmp_path, text))


# Several implementations, several files.

KERNELS = """\
kind,impl,batch_size,seq_len,num_heads,num_key_value_heads,head_dim,latency_us
prefill,flash,1,128,32,8,128,9.5
prefill,cudnn,1,128,32,8,128,8.0
decode,flash,1,128,32,8,128,5.0
prefill,cudnn,1,256,32,8,128,12.0
prefill,cudnn,1,256,32,8,128,11.0
"""


def test_the_fastest_of_several_implementations(tmp_path: Path) -> None:
    found = read_points(written(tmp_path, KERNELS))
    assert found.labels["impl"].tolist() == ["flash", "cudnn", "flash", "cudnn", "cudnn"]
    fastest = found.fastest()
    # What one implementation ran twice stays twice.
    assert fastest.seconds * 1e6 == pytest.approx([8.0, 5.0, 12.0, 11.0])
    assert fastest.labels["impl"].tolist() == ["cudnn", "flash", "cudnn", "cudnn"]
    plain = read_points(written(tmp_path, GEMM))
    assert plain.fastest() is plain


def test_files_of_one_kind_joined(tmp_path: Path) -> None:
    named = read_points(written(tmp_path, KERNELS))
    header, *rows = KERNELS.replace(",impl", "").splitlines()
    bare = "\n".join([header, *(",".join(r.split(",")[:1] + r.split(",")[2:]) for r in rows)])
    both = join_measurements([named, read_points(written(tmp_path, bare))])
    assert len(both) == 10
    assert both.labels["impl"].tolist()[5:] == [""] * 5
    assert both.sizes["seq_len"].tolist() == named.sizes["seq_len"].tolist() * 2
    assert both.schema is named.schema
    with pytest.raises(UsageError, match="different kinds"):
        join_measurements([named, read_points(written(tmp_path, GEMM))])


# Setting points aside.

PINNED = "..x...x..xx...xx"

sizes = st.lists(
    st.tuples(st.integers(1, 4096), st.integers(1, 65536), st.integers(1, 65536)),
    min_size=1,
    max_size=60,
)


@given(sizes)
def test_held_out_depends_on_the_sizes_alone(
    rows: list[tuple[int, int, int]],
) -> None:
    m, n, k = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    own = points("gemm", {"m": m, "n": n, "k": k}, {"gemm_dtype": "bfloat16"})
    held = own.held_out()
    assert held.dtype == np.bool_
    assert held.tolist() == own.held_out().tolist()
    order = np.argsort(n * 7919 % 104729, kind="stable")
    turned = points(
        "gemm", {"m": m[order], "n": n[order], "k": k[order]}, {"gemm_dtype": "fp8"}, group="other"
    )
    assert turned.held_out().tolist() == held[order].tolist()
    # And each point decides for itself.
    alone = points("gemm", {"m": m[:1], "n": n[:1], "k": k[:1]}, {"gemm_dtype": "bfloat16"})
    assert alone.held_out()[0] == held[0]


@given(sizes)
def test_a_split_is_a_partition(rows: list[tuple[int, int, int]]) -> None:
    m, n, k = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    own = points("gemm", {"m": m, "n": n, "k": k}, {"gemm_dtype": "bfloat16"})
    train, test = own.split()
    assert len(train) + len(test) == len(own)
    assert not train.held_out().any()
    assert test.held_out().all()
    both = [
        tuple(float(part.sizes[name][i]) for name in ("m", "n", "k"))
        for part in (train, test)
        for i in range(len(part))
    ]
    assert sorted(both) == sorted((float(a), float(b), float(c)) for a, b, c in rows)


def test_about_half_is_held_out() -> None:
    grid = [(2**i, 256 * n, 512 * k) for i in range(12) for n in range(1, 13) for k in range(1, 13)]
    m, n, k = (np.array(column, dtype=np.float64) for column in zip(*grid, strict=True))
    held = points("gemm", {"m": m, "n": n, "k": k}, {"gemm_dtype": "bfloat16"}).held_out()
    assert 0.45 < held.mean() < 0.55
    # Also along each size, or a fit would never see some of them.
    for column in (m, n, k):
        for value in np.unique(column):
            assert 0.3 < held[column == value].mean() < 0.7


def test_the_choice_never_changes() -> None:
    own = points(
        "gemm", {"m": range(1, 17), "n": [4096.0] * 16, "k": [8192.0] * 16}, {"gemm_dtype": "fp8"}
    )
    assert "".join("x" if held else "." for held in own.held_out()) == PINNED


def test_no_points() -> None:
    none = points("gemm", {"m": [], "n": [], "k": []}, {"gemm_dtype": "fp8"})
    assert len(none) == 0
    assert [len(part) for part in none.split()] == [0, 0]
    assert none.groups() == ()
