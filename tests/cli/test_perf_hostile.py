"""`atoll perf` with what nobody should type, and on terminals nobody should use."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from atoll.catalog import Catalog
from atoll.core.errors import InputError, UnknownNameError
from atoll.perf.step_curves import Picture, PlotLine
from atoll.report.charts import draw_picture
from atoll.workload.lengths import LengthMix, length_mix
from tests.cli.commands import Atoll, refused

SMALL = "smollm2-135m"
LONG = "a" * 5000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}


# Names


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ((LONG, "L4:1"), 4, "unknown model 'aaa"),
        ((f"{LONG}.json", "L4:1"), 3, "file name too long"),
        ((f"{SMALL}@{LONG}=3", "L4:1"), 3, "is no variant"),
        ((SMALL, LONG), 3, "is not a node type"),
        ((SMALL, "L4:1", "--backend", LONG), 4, "unknown backend"),
        ((SMALL, "L4:1", "-o", f"{LONG}.png"), 3, "file name too long"),
        ((SMALL, "L4:1", "-o", f"{LONG}/p.png"), 3, "file name too long"),
        ((SMALL, "L4:1", "-o", LONG), 2, "cannot write aaa"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_very_long_names_are_refused_in_short(
    atoll: Atoll, args: tuple[str, ...], code: int, said: str
) -> None:
    refused(atoll("perf", "show", *args), code, said, "...")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config.json in a folder called like a model of the catalog."""
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


@pytest.mark.usefixtures("config")
def test_the_catalog_comes_before_a_folder_of_the_same_name(atoll: Atoll) -> None:
    def layers(name: str) -> int:
        facts = atoll("perf", "show", name, "L40S:1", "--json").json["facts"]
        return int(facts["layers"])

    assert layers("llama-3.1-8b") == 32
    assert layers("./llama-3.1-8b") == 4
    assert layers("llama-3.1-8b/config.json") == 4


def test_a_folder_may_hold_an_at_sign(atoll: Atoll, config: Path) -> None:
    config.parent.rename(config.parent.with_name("llama-3.1-8b@ours"))
    done = atoll("perf", "show", "llama-3.1-8b@ours/config.json", "L40S:1", "--json")
    assert done.json["facts"]["layers"] == 4


def test_a_folder_without_a_config_is_no_model(atoll: Atoll, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    refused(atoll("perf", "show", "folder", "L4:1"), 4, "unknown model 'folder'")
    refused(atoll("perf", "show", ".", "L4:1"), 4, "unknown model '.'")


@pytest.mark.parametrize("name", ["", " "])
def test_no_name_is_no_model(atoll: Atoll, tmp_path: Path, name: str) -> None:
    # Not even beside a config.json: '' must not mean the folder one stands in.
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    for verb in (("show", name, "L4:1"), ("compare", name)):
        refused(atoll("perf", *verb), 4, "unknown model ''")
    assert atoll("perf", "show", ".", "L4:1", "--json").json["facts"]["layers"] == 4


def test_compare_needs_regions_and_nodes_that_exist(atoll: Atoll) -> None:
    asked = ("perf", "compare", SMALL, "--nodes")
    refused(atoll(*asked, "L4:1", "--region", "mars"), 4, "unknown region 'mars'", "aws/us-east-2")
    mixed = atoll(*asked, "L4:1", "--region", "us-east-2", "--region", "")
    refused(mixed, 4, "unknown region ''")
    for nodes in ("", " , "):
        refused(atoll(*asked, nodes), 2, "--nodes", "L4:1")
    assert atoll(*asked, "L4:1,", "--region", "AWS").code == 0


# Lengths


@pytest.mark.parametrize("name", ["1_0x5", "+1x5"])
def test_only_plain_digits_are_lengths(name: str) -> None:
    with pytest.raises(UnknownNameError, match="1024x256"):
        length_mix(name)


def test_leading_zeros_are_only_zeros() -> None:
    assert length_mix("008x08") == LengthMix.fixed(8.0, 8.0)
    with pytest.raises(InputError, match="'00x8' asks for prompts of 0 tokens"):
        length_mix("00x8")


# What programs read


def test_facts_are_numbers_in_base_units(atoll: Atoll) -> None:
    facts = atoll("perf", "show", "llama-3.1-8b", "L4:4", "--tp", "2", "--json").json["facts"]
    assert set(facts) == {
        "weight_bytes",
        "layers",
        "usable_bytes_per_gpu",
        "kv_tokens",
        "tp",
        "copies",
        "host_s",
        "provenance",
    }
    assert isinstance(facts.pop("provenance"), str)
    assert all(isinstance(value, int | float) for value in facts.values())
    spec = Catalog.default().model("llama-3.1-8b").llm
    assert facts["weight_bytes"] == spec.weight_bytes
    assert (facts["layers"], facts["tp"], facts["copies"]) == (spec.layers, 2, 2)
    assert 0.5 * 24e9 < facts["usable_bytes_per_gpu"] < 24e9
    assert facts["kv_tokens"] > 100_000
    assert 0.0 < facts["host_s"] < 0.1


# Files that cannot be written


def test_a_picture_that_cannot_be_written_is_refused(atoll: Atoll, tmp_path: Path) -> None:
    (tmp_path / "p.png").mkdir()
    done = atoll("perf", "show", SMALL, "L4:1", "-o", "p.png")
    refused(done, 3, "p.png: cannot write: is a directory", "fix:")


def test_calibrate_without_scipy_says_only_that(
    atoll: Atoll, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("scipy", "scipy.optimize"):
        monkeypatch.setitem(sys.modules, name, None)
    rows = [
        f"L40S,{m},{n},4096,{5 + m * n * 4e-5:.4f}"
        for n in (1024, 2048, 4096, 8192, 14336)
        for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    ]
    data = tmp_path / "gemm.csv"
    data.write_text("\n".join(("gpu,m,n,k,latency_us", *rows)), encoding="utf-8")
    refused(atoll("perf", "calibrate", "gemm.csv"), 6, "'scipy'", "atoll[calibrate]")
    for name in ("scipy", "scipy.optimize"):
        monkeypatch.delitem(sys.modules, name)


# Terminals

COLOUR = re.compile(r"\x1b\[(?:\d+;)*3[0-7]m")
LETTERED = re.compile(r"^a \d+ layers", re.MULTILINE)


def test_no_colours_and_letters_in_a_pipe(atoll: Atoll) -> None:
    done = atoll("perf", "show", SMALL, "L4:1")
    assert "\x1b" not in done.out
    assert LETTERED.search(done.out)


def test_colours_are_asked_for_and_refused_as_rich_does(
    atoll: Atoll, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    forced = atoll("perf", "show", SMALL, "L4:1").out
    assert COLOUR.search(forced)
    assert not LETTERED.search(forced)
    monkeypatch.setenv("NO_COLOR", "1")
    for verb in (("show", SMALL, "L4:1"), ("compare", SMALL, "--nodes", "L4:1")):
        assert not COLOUR.search(atoll("perf", *verb).out)
    assert LETTERED.search(atoll("perf", "show", SMALL, "L4:1").out)


def test_a_dumb_terminal_gets_letters(atoll: Atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = atoll("perf", "show", SMALL, "L4:1").out
    assert not COLOUR.search(out)
    assert LETTERED.search(out)


@pytest.mark.parametrize("columns", [200, 100, 80, 60, 40, 30, 24, 20])
def test_drawings_fit_the_terminal(
    atoll: Atoll, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    out = re.sub(r"\x1b\[[0-9;]*m", "", atoll("perf", "show", SMALL, "L4:1").out)
    assert max(map(len, out.splitlines())) <= columns
    # Folded rows would break the column of the axis.
    axes = [line for line in out.splitlines() if line.startswith("-" * 11)]
    assert len(axes) == 4
    assert out.count("^") == 4


PICTURE = Picture(
    "decode: step time",
    "sequences in the batch",
    "ms",
    (
        PlotLine("32 layers", (1.0, 256.0), (20.0, 60.0)),
        PlotLine("8 layers", (1.0, 256.0), (5.0, 9.0)),
    ),
    log_x=True,
)


def rows(columns: int, picture: Picture = PICTURE) -> list[str]:
    return draw_picture(picture, columns=columns, colours=False).splitlines()


def canvas(columns: int) -> int:
    """Columns between the axis and the edge."""
    return max(
        len(row.partition("| ")[2]) for row in rows(columns) if re.match(r" +[\d.]+ \| ", row)
    )


@pytest.mark.parametrize(
    ("columns", "width"), [(300, 64), (80, 64), (79, 63), (60, 44), (40, 24), (39, 23), (30, 14)]
)
def test_the_drawing_follows_the_terminal(columns: int, width: int) -> None:
    assert canvas(columns) == width
    assert max(map(len, rows(columns))) <= columns


@pytest.mark.parametrize("columns", [200, 80, 40, 20])
@pytest.mark.parametrize(("x", "y"), [("tokens", "tokens/s"), ("", ""), ("t" * 90, "y" * 90)])
def test_no_axis_has_an_empty_label(columns: int, x: str, y: str) -> None:
    text = rows(columns, Picture("t", x, y, PICTURE.curves))[1 + (x == "t" * 90) :]
    assert not any("()" in row for row in text)


def test_axes_carry_their_units_where_there_is_room() -> None:
    wide, narrow = rows(120), rows(60)
    assert any(row.strip() == "(ms)    ^" for row in wide)
    assert any(row.endswith("-> (sequences in the batch)") for row in wide)
    assert any(row.endswith("|----->") for row in narrow)
    assert narrow[0] == "decode: step time (ms against sequences in the batch)"


def test_names_of_curves_stay_whole_on_a_narrow_terminal() -> None:
    assert rows(20)[-2:] == ["a 32 layers", "b 8 layers"]
    assert rows(80)[-1] == "a 32 layers   b 8 layers"
