from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import AtollError
from atoll.workload.requests import collect
from atoll.workload.servegen import ClientPool
from atoll.workload.spec import workload_of
from atoll.workload.stats import summarise

REFERENCE = (
    Path(__file__).resolve().parents[3] / "shared" / "data" / "reference" / "traces" / "servegen"
)
HEADER = "client,t_s,rate_req_s,cv,iat_family,shape,scale\n"


def pdf(client: int, field: str, values: dict[int, float], at: int = 0) -> str:
    return json.dumps({"client": client, "t_s": at, "field": field, "pdf": list(values.items())})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Client 0 is steady; client 1 wakes in the second window; client 2 has no published lengths."""
    windows = [
        "0,0,2.0,1.0,Gamma,1.0,0.5", "0,600,2.0,1.0,Gamma,1.0,0.5",
        "1,600,4.0,2.0,Weibull,0.6,0.2", "2,600,1.0,1.0,Gamma,1.0,1.0",
    ]  # fmt: skip
    (tmp_path / "mini_client_windows.csv").write_text(HEADER + "\n".join(windows) + "\n")
    laws = [
        pdf(0, "input_tokens", {100: 1.0}), pdf(0, "output_tokens", {10: 0.5, 20: 0.5}),
        pdf(1, "text_tokens", {50: 1.0}), pdf(1, "image_count", {0: 0.5, 2: 0.5}),
        pdf(1, "image_tokens", {1000: 1.0}), pdf(1, "output_tokens", {7: 1.0}),
    ]  # fmt: skip
    (tmp_path / "mini_pdfs.jsonl.gz").write_bytes(gzip.compress("\n".join(laws).encode()))
    return tmp_path


def test_clients_send_at_their_rates_with_their_lengths(folder: Path) -> None:
    pool = ClientPool(str(folder), "mini", 1200.0)
    found = collect(pool, 1)
    first = found.arrival_s < 600.0
    assert first.sum() == 1200
    assert (~first).sum() == 1200 + 2400 + 600
    assert np.all(np.diff(found.arrival_s) >= 0)
    assert found.arrival_s[-1] < 1200.0
    assert set(found.input[first].tolist()) == {100}
    assert found.output[first].mean() == pytest.approx(15.0, abs=0.5)
    assert found.items is not None
    assert set(found.input[found.items == 2].tolist()) == {2050}
    assert np.array_equal(found.klass == 1, found.items > 0)
    assert (found.output == 7).sum() >= 2400  # client 1, and client 2 if it borrowed from it
    again = collect(pool, 1)
    assert np.array_equal(again.arrival_s, found.arrival_s)
    assert np.array_equal(again.input, found.input)
    assert not np.array_equal(collect(pool, 2).arrival_s[:9], found.arrival_s[:9])


def test_another_rate_keeps_shares(folder: Path) -> None:
    own = ClientPool(str(folder), "mini", 1200.0)
    assert own.mean_rate() == pytest.approx(4.5)
    found = collect(workload_of(f"servegen:{folder}/mini@9/s for=20min model=m"))
    assert len(found) == pytest.approx(2 * 5400, abs=4)
    assert found.models == ("m",)
    assert len(collect(workload_of(f"servegen:{folder}/mini@x0.1 for=20min"))) == pytest.approx(
        540, abs=4
    )


def test_part_of_the_time(folder: Path) -> None:
    found = collect(ClientPool(str(folder), "mini", 300.0, start_s=450.0))
    assert 0.0 <= found.arrival_s[0] < 5.0
    assert 295.0 < found.arrival_s[-1] < 300.0
    # The pool repeats after its last window.
    assert len(collect(ClientPool(str(folder), "mini", 600.0, start_s=1200.0))) == 1200


def test_quantiles_stand_in_for_pdfs(folder: Path) -> None:
    (folder / "mini_pdfs.jsonl.gz").unlink()
    names = ["pool", "client", "t_s", "window_s", "field", "mean", "q1", "q50", "q100"]
    rows = ["mini,0,0,21600,input_tokens,0,10,50,90", "mini,0,0,21600,output_tokens,0,5,5,5"]
    (folder / "client_quantiles_6h.csv").write_text(",".join(names) + "\n" + "\n".join(rows))
    found = collect(ClientPool(str(folder), "mini", 1200.0))
    assert np.quantile(found.input, 0.5) == pytest.approx(50, abs=2)
    assert found.input.min() >= 10
    assert found.input.max() <= 90
    assert set(found.output.tolist()) == {5}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("x,0,1,1,Gamma,1,1", ":2: not a row"),
        ("0,0,1,1,Pareto,1,1", ":2: a value is out of range"),
        ("0,0,-1,1,Gamma,1,1", ":2: a value is out of range"),
        ("0,0,1,1,Gamma,0,1", ":2: a value is out of range"),
        ("0,0", ":2: not a row"),
        ("", "no client is ever active"),
    ],
)
def test_bad_windows(folder: Path, row: str, words: str) -> None:
    (folder / "mini_client_windows.csv").write_text(HEADER + row + "\n")
    with pytest.raises(AtollError, match=words):
        collect(ClientPool(str(folder), "mini", 600.0))


def test_unknown_pools(folder: Path) -> None:
    with pytest.raises(AtollError, match="unknown client pool 'min'; did you mean mini"):
        collect(ClientPool(str(folder), "min", 600.0))
    (folder / "mini_pdfs.jsonl.gz").write_bytes(b'{"client": 0}')
    with pytest.raises(AtollError, match=r"mini_pdfs\.jsonl\.gz:1: not a row"):
        collect(ClientPool(str(folder), "mini", 600.0))


@pytest.mark.parametrize(
    ("name", "rate", "cv"),
    [
        ("mm-image", 12.63, 1.32),
        pytest.param("deepseek-r1", 12.97, 1.67, marks=pytest.mark.slow),
    ],
)
def test_public_pools_give_the_published_hour(name: str, rate: float, cv: float) -> None:
    if not REFERENCE.exists():
        pytest.skip("the public reference data is not here")
    found = summarise(
        workload_of(f"servegen:{REFERENCE}/{name} start=10h for=1h").chunks(0)
    ).stats()
    assert found.rate_per_s == pytest.approx(rate, rel=0.01)
    assert found.iat_cv == pytest.approx(cv, rel=0.05)
