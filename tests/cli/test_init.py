from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli import main as cli

LONG = "a" * 5000
Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [
        (LONG, 3, "cannot write: file name too long"),
        (f"{LONG}.yaml", 3, "cannot write: file name too long"),
        ("b" * 300, 3, "cannot write: file name too long"),
        (f"{LONG}/fleet.yaml", 2, "the folder aaa"),
        (f"{'deep/' * 2000}fleet.yaml", 2, "the folder deep"),
    ],
    ids=["long", "long.yaml", "300", "long folder", "deep"],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_path_too_long_is_refused_in_short(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    path: str,
    code: int,
    said: str,
    force: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["init", path, *(["--force"] if force else [])]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 600
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    for options in ([], ["--force"]):
        assert cli.run(["init", ".", *options]) == 2
        assert ". is a folder (fix: write fleet.yaml)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a[bold]b.yaml", "[b].yaml", ":gem:.yaml"])
def test_the_file_is_named_as_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["init", name]) == 0
    assert capsys.readouterr().err == f"wrote {name}; next: atoll plan {name}\n"
