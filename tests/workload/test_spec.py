from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import AtollError
from atoll.workload.requests import Requests, collect
from atoll.workload.spec import DEFAULT_S, generate, lengths_of, workload_of
from atoll.workload.stats import summarise
from atoll.workload.synthetic import Mixed


def drawn(spec: str, seed: int = 0) -> Requests:
    return collect(workload_of(spec), seed)


def same(one: Requests, other: Requests) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("arrival_s", "model", "klass", "input", "output")
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


SPECS = [
    "azure-conv@10/s",
    "azure-code@100/s keep=gaps for=2min",
    "multimodal n=500",
    "burstgpt@36000/h n=500 start=9h",
    "poisson:10/s lengths=1024x128 for=10min",
    "gamma:600/min cv=2.5 lengths=lognormal:1024/1.2x128/0.9 n=1k",
    "weibull:5/s cv=0.5 lengths=normal:1024/0.3x128/0.2 n=1k curve=week start=2d",
    "poisson:5/s lengths=long-context n=100 models=a:0.7,b:0.3",
    "azure-conv@10/s model=a + azure-code@20/s model=b for=1min",
    "azure-conv@x2 n=100 + azure-conv@x2 n=100",
]


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_seed_gives_the_same_bits(spec: str) -> None:
    one = drawn(spec, 5)
    assert len(one) > 50
    assert same(one, drawn(spec, 5))
    assert not same(one, drawn(spec, 6))
    assert np.all(np.diff(one.arrival_s) >= 0)
    assert one.input.min() >= 1
    assert one.output.min() >= 1
    assert sum(len(chunk) for chunk in generate(spec, 5)) == len(one)


def test_rates_lengths_and_ends() -> None:
    found = drawn("poisson:100/s lengths=1024x128 for=100s")
    assert len(found) == pytest.approx(10_000, rel=0.05)
    assert (set(found.input.tolist()), set(found.output.tolist())) == ({1024}, {128})
    assert found.arrival_s[-1] < 100.0
    assert len(drawn("poisson:100/s n=777")) == 777
    assert len(drawn("poisson:100/s n=777 for=1s")) < 200
    assert drawn("poisson:100/s").arrival_s[-1] == pytest.approx(DEFAULT_S, abs=1.0)
    assert len(drawn("azure-conv@50/s for=2h")) == pytest.approx(50 * 7200, rel=0.15)


def test_a_longer_run_starts_like_a_shorter_one() -> None:
    short, long = drawn("azure-conv@20/s n=200", 1), drawn("azure-conv@20/s for=1h", 1)
    assert same(short, long.take(slice(0, 200)))


def test_models_come_by_their_shares() -> None:
    found = drawn("poisson:1000/s models=a:7,b:2,c:1 n=50k")
    assert found.models == ("a", "b", "c")
    assert np.bincount(found.model) / 50_000 == pytest.approx([0.7, 0.2, 0.1], abs=0.01)
    # Which model a request is for changes nothing else.
    alone = drawn("poisson:1000/s model=a n=50k")
    assert np.array_equal(found.arrival_s, alone.arrival_s)
    assert np.array_equal(found.input, alone.input)


def test_parts_run_together() -> None:
    found = drawn("poisson:10/s model=a class=x for=5min + gamma:30/s model=b cv=2")
    counts = summarise([found]).stats().models
    assert counts["a"] == pytest.approx(3000, rel=0.1)
    assert counts["b"] == pytest.approx(9000, rel=0.1)
    assert found.arrival_s[-1] < 300.0
    assert {found.classes[i] for i in found.klass[found.model == found.models.index("a")]} == {"x"}


def test_parts_that_are_alike_differ() -> None:
    found = drawn("poisson:10/s model=a + poisson:10/s model=b")
    a, b = (found.arrival_s[found.model == i] for i in (0, 1))
    assert not np.isin(a, b).any()


def test_names_of_a_mix_keep_their_index() -> None:
    mixed = workload_of("poisson:1/s model=late for=3000s + poisson:5000/s model=early n=200k")
    assert isinstance(mixed, Mixed)
    seen: tuple[str, ...] = ()
    for chunk in mixed.chunks(0):
        assert chunk.models[: len(seen)] == seen
        seen = chunk.models
    assert sorted(seen) == ["early", "late"]


def test_keeping_gaps_makes_bursts_shorter() -> None:
    clock, gaps = (
        summarise(workload_of(f"azure-code@25.667/s n=100k keep={keep}").chunks(3)).stats()
        for keep in ("clock", "gaps")
    )
    native = summarise(workload_of("azure-code n=100k").chunks(3)).stats()
    assert gaps.iat_cv == pytest.approx(native.iat_cv, rel=0.2)
    assert clock.iat_cv is not None
    assert gaps.iat_cv is not None
    assert clock.iat_cv > 2 * gaps.iat_cv


def test_a_curve_from_a_file(folder: Path) -> None:
    (folder / "c.csv").write_text("t_s,rate\n0,0\n100,30\n200,0\n300,10\n")
    found = drawn("poisson:100/s curve=c.csv for=4000s")
    counts = np.histogram(found.arrival_s % 400, 4, (0, 400))[0] / len(found)
    # Straight lines between the middles of the quarters.
    assert counts == pytest.approx(np.array([5, 22.5, 5, 7.5]) / 40, abs=0.03)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rate,t_s\n1,2\n", "t_s,rate"),
        ("t_s,rate\n0,1\n", "two rates"),
        ("t_s,rate\n0,1\n5,x\n", "c.csv:3: not a time"),
        ("t_s,rate\n0,1\n5,-1\n", "c.csv:3: a rate is 0 or more"),
        ("t_s,rate\n0,1\n5,1\n6,1\n", "even steps"),
        ("t_s,rate\n0,0\n5,0\n", "not all 0"),
    ],
)
def test_bad_curves(folder: Path, text: str, words: str) -> None:
    (folder / "c.csv").write_text(text)
    with pytest.raises(AtollError, match=words):
        workload_of("poisson:1/s curve=c.csv")


def test_lengths_from_a_file(folder: Path) -> None:
    (folder / "l.csv").write_text("input_tokens,output_tokens\n10,1\n20,2\n")
    found = drawn("poisson:10/s lengths=l.csv n=200")
    assert np.array_equal(found.input, found.output * 10)
    assert set(found.output.tolist()) == {1, 2}


@pytest.mark.parametrize(
    ("text", "mean_in", "mean_out"),
    [("1024x128", 1024, 128), ("long-context", 12035.1, 342.6), ("lognormal:500/1x50/2", 500, 50)],
)
def test_lengths_in_words(text: str, mean_in: float, mean_out: float) -> None:
    mix = lengths_of(text).mix()
    assert (mix.input_mean, mix.output_mean) == pytest.approx((mean_in, mean_out))


BAD = [
    ("", "empty"),
    ("  ", "empty"),
    ("+", "empty"),
    ("azure-conv +", "empty"),
    ("azure-conv@10", "rate: cannot read '10' as a rate: it has no unit"),
    ("azure-conv@0/s", "rate: '0/s' is not a rate above 0"),
    ("azure-conv@-1/s", "negative"),
    ("azure-conv@xx", "factor above 0"),
    ("azure-conv@x-2", "factor above 0"),
    ("azure-con@10/s", "did you mean azure-conv"),
    ("poison:10/s", "unknown workload"),
    ("poisson:10", "poisson: cannot read '10' as a rate"),
    ("poisson:0/s", "rate"),
    ("poisson:1e9/s", "rate"),
    ("poisson:10/s cv=2", "use gamma or weibull"),
    ("gamma:10/s cv=x", "cv: 'x' is not a number"),
    ("gamma:10/s cv=-1", "cv"),
    ("gamma:10/s keep=gaps", "no burstiness to keep"),
    ("poisson:10/s for=10", "for: cannot read '10' as a duration"),
    ("poisson:10/s for=0s", "for: 0.0 s is not a duration above 0"),
    ("poisson:10/s n=0", "n: 0 is not"),
    ("poisson:10/s n=1.5", "n: count"),
    ("poisson:10/s n=", "NAME=VALUE"),
    ("poisson:10/s fast", "NAME=VALUE"),
    ("poisson:10/s n=1 n=2", "n: the option is given twice"),
    ("poisson:10/s fro=10min", "did you mean for"),
    ("poisson:10/s lengths=azure", "unknown length mix"),
    ("poisson:10/s lengths=0x5", "0 tokens"),
    ("poisson:10/s lengths=99999999999x5", "input_mean"),
    ("poisson:10/s lengths=normal:5", "normal:MEAN/CVxMEAN/CV"),
    ("poisson:10/s lengths=lognormal:5x5", "lengths: '5' is not MEAN/CV"),
    ("poisson:10/s lengths=lognormal:0/1x5/1", "lengths: 0.0 is not a length"),
    ("poisson:10/s curve=year", "unknown rate curve 'year'"),
    ("poisson:10/s start=noon", "start"),
    ("poisson:10/s models=a", "models: 'a' is not MODEL:SHARE"),
    ("poisson:10/s models=a:x", "models"),
    ("poisson:10/s models=a:0,b:0", "models: shares"),
    ("poisson:10/s models=a:1,a:1", "models: a model is named twice"),
    ("poisson:10/s models=a:1 model=b", "use one of the two"),
    ("azure-conv keep=all", "unknown way to keep burstiness"),
    ("absent.csv", "absent.csv: cannot read the file: no such file"),
    ("absent.csv@2/s", "absent.csv"),
    ("absent.csv lengths=1x1", "unknown option of absent.csv"),
    ("servegen:nowhere/m-small", "no such folder"),
    ("servegen:m-small", "FOLDER/POOL"),
    ("poisson:10/s 'n=1", "close every quote"),
    ("x" * 20_000, "characters"),
]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("spec", "words"), BAD, ids=lambda v: str(v)[:40])
def test_what_is_no_workload(spec: str, words: str) -> None:
    with pytest.raises(AtollError) as caught:
        drawn(spec)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_a_workload_or_an_error_in_one_line(text: str) -> None:
    try:
        workload_of(text)
    except AtollError as error:
        assert "\n" not in str(error)  # noqa: PT017
