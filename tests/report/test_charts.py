from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from atoll.cli import main as cli
from atoll.core.errors import InputError, MissingDependencyError, UsageError
from atoll.perf.step_curves import Picture, PlotLine
from atoll.report.charts import draw_picture, save

PNG = b"\x89PNG\r\n\x1a\n"
ESCAPE = "\x1b["
STEPS = Picture(
    "decode: step time",
    "sequences",
    "ms",
    (
        PlotLine("32 layers", (1.0, 10.0, 100.0), (20.0, 25.0, 60.0)),
        PlotLine("8 layers", (1.0,), (5.0,)),
    ),
    log_x=True,
)
NOTHING = Picture("prefill: throughput", "layers", "tokens/s", ())


# In the terminal


def test_a_drawing_names_its_axes_and_every_curve() -> None:
    text = draw_picture(STEPS, colours=False)
    assert text.startswith("decode: step time (ms against sequences)\n")
    assert text.endswith("a 32 layers   b 8 layers")


def test_without_colours_curves_are_told_apart_by_letters() -> None:
    body = draw_picture(STEPS, colours=False).partition("\n")[2].rpartition("\n")[0]
    assert ESCAPE not in body
    assert "a" in body
    assert "b" in body


def test_with_colours_there_are_no_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = draw_picture(STEPS, colours=True)
    assert ESCAPE in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert plain[-1] == "── 32 layers   ── 8 layers"
    assert not any("a" in line for line in plain[1:-1])


def test_a_picture_without_points_says_so() -> None:
    assert draw_picture(NOTHING) == "prefill: throughput: nothing to draw"


@pytest.mark.parametrize(
    ("xs", "ys"),
    [((1.0,), (2.0,)), ((1.0, 2.0), (3.0, 3.0)), ((1.0, 1e9), (1e-6, 1e6))],
    ids=["one point", "a level line", "fifteen decades"],
)
@pytest.mark.parametrize("log", [False, True])
def test_awkward_curves_are_drawn(xs: Sequence[float], ys: Sequence[float], log: bool) -> None:
    curve = PlotLine("only", tuple(xs), tuple(ys))
    text = draw_picture(Picture("t", "x", "y", (curve,), log_x=log, log_y=log), colours=False)
    assert text.endswith("a only")


def test_more_curves_than_letters_are_still_drawn() -> None:
    curves = tuple(PlotLine(f"c{i}", (1.0, 2.0), (1.0, float(i))) for i in range(9))
    named = draw_picture(Picture("t", "x", "y", curves), colours=False).splitlines()[-1]
    assert [word for word in named.split() if len(word) == 2] == [f"c{i}" for i in range(9)]


# In files


class References(HTMLParser):
    """Collects what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            local = name.rpartition(":")[2]
            if local in ("href", "src", "data", "action") and not (value or "").startswith("#"):
                self.fetched.append(value or "")


def references(page: str) -> References:
    parser = References()
    parser.feed(page)
    parser.close()
    return parser


def test_a_page_holds_everything_it_shows(tmp_path: Path) -> None:
    save(tmp_path / "p.html", [STEPS, NOTHING], title="m on L4:1", facts={"weights": "16GB"})
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert page.endswith("</html>\n")
    assert "<title>m on L4:1</title>" in page
    assert "<td>weights</td><td>16GB</td>" in page
    found = references(page)
    assert "svg" in found.tags
    assert found.tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed"})
    assert found.fetched == []
    assert "@import" not in page
    assert re.search(r"url\((?!#)", page) is None


def test_words_from_outside_are_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>&"
    curve = PlotLine(hostile, (1.0, 2.0), (1.0, 2.0))
    other = PlotLine("other", (1.0, 2.0), (2.0, 1.0))
    picture = Picture(hostile, hostile, hostile, (curve, other))
    save(tmp_path / "p.html", [picture], title=hostile, facts={hostile: hostile})
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "script" not in references(page).tags
    assert "&lt;script&gt;" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p.html", "p.png"])
def test_the_same_input_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        save(folder / name, [STEPS], title="t", facts={"k": "v"})
        written.append((folder / name).read_bytes())
    assert written[0] == written[1]


def test_an_existing_file_is_replaced_whatever_the_case_of_its_ending(tmp_path: Path) -> None:
    target = tmp_path / "p.PNG"
    target.write_text("old", encoding="utf-8")
    save(target, [STEPS], title="t")
    assert target.read_bytes().startswith(PNG)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", ["p.pdf", "p.svg", "p", "p.png.txt"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"\.png or \.html"):
        save(tmp_path / name, [STEPS], title="t")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_refused_and_not_created(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        save(tmp_path / "deep" / "p.png", [STEPS], title="t")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("without_matplotlib")
@pytest.mark.parametrize("name", ["p.html", "p.png"])
def test_without_matplotlib_the_extra_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(MissingDependencyError, match=r"atoll\[plots\]"):
        save(tmp_path / name, [STEPS], title="t")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_matplotlib")
def test_the_terminal_needs_no_matplotlib(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["perf", "show", "smollm2-135m", "L4:1"]) == 0
    assert "decode: step time" in capsys.readouterr().out
