from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.structure import find_circles, find_imports, find_problems, main, parse_modules


def package(folder: Path, **texts: str) -> Path:
    """Write a package `p`; a key `a__b` is the module `p.a.b`."""
    for name, text in texts.items():
        path = folder.joinpath("p", *name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "p" / "__init__.py").touch()
    return folder / "p"


LAZY = "def f():\n    from p.a import x\n"
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p import a\n"


@pytest.mark.parametrize("back", ["from p.a import x", "import p.a", LAZY, TYPES])
def test_a_circle_is_found_however_it_is_closed(tmp_path: Path, back: str) -> None:
    made = package(tmp_path, a="from p.b import y", b="import os\nfrom p.c import z", c=back)
    assert find_problems(made, {}) == [
        "import circle of 3 modules:",
        "  p.a -> p.b",
        "  p.b -> p.c",
        "  p.c -> p.a",
    ]


def test_a_name_of_a_package_is_its_own_module_or_the_package(tmp_path: Path) -> None:
    made = package(tmp_path, a="from p.room import b, word", room__b="")
    (made / "room" / "__init__.py").write_text("from p.room import b", encoding="utf-8")
    assert find_imports(parse_modules(made)) == {
        "p": set(),
        "p.a": {"p.room", "p.room.b"},
        "p.room": {"p.room.b"},
        "p.room.b": set(),
    }
    assert find_problems(made, {}) == []


def test_a_class_name_means_one_thing(tmp_path: Path) -> None:
    made = package(tmp_path, a="class Hop: ...\nclass One: ...", b="class Hop: ...")
    assert find_problems(made, {}) == ["class name Hop is taken 2 times: p.a, p.b"]
    assert find_problems(made, {"Hop": "why"}) == []
    assert find_problems(made, {"Hop": "why", "One": "why"}) == [
        "class name One is allowed twice, but is not there"
    ]


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20))
def test_circles_are_the_strongly_connected_components(edges: set[tuple[int, int]]) -> None:
    imports = {str(n): {str(b) for a, b in edges if a == n != b} for n in range(8)}
    reached = {module: {module} for module in imports}
    for _ in imports:
        for module, others in imports.items():
            reached[module] |= {far for other in others for far in reached[other]}
    groups = {
        tuple(b for b in sorted(imports) if b in reached[a] and a in reached[b]) for a in imports
    }
    assert sorted(find_circles(imports)) == sorted(list(g) for g in groups if len(g) > 1)


def test_the_exit_code_says_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = package(tmp_path, a="class A: ...", b="class A: ...")
    monkeypatch.setattr("sys.argv", ["structure.py", str(made)])
    monkeypatch.setattr("tools.structure.ALIKE", {})
    assert main() == 1
    assert "class name A" in capsys.readouterr().out
    (made / "b.py").unlink()
    assert main() == 0
