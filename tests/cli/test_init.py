from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli import main as cli
from atoll.plan.files.examples import find_example, list_examples
from atoll.plan.files.fleet_file import load_fleet

LONG = "a" * 5000
Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [
        (f"{LONG}.yaml", 3, "cannot write: file name too long"),
        (f"{LONG}/fleet.yaml", 2, "the folder aaa"),
    ],
    ids=["long.yaml", "long folder"],
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_example_is_written_and_speaks_of_the_new_file(folder: Path, capsys: Captured) -> None:
    assert cli.run(["init", "--example", "quickstart"]) == 0
    assert capsys.readouterr().err == "wrote quickstart.yaml; next: atoll plan quickstart.yaml\n"
    text = (folder / "quickstart.yaml").read_text("utf-8")
    assert "\n#   atoll plan quickstart.yaml\n" in text
    assert [service.name for service in load_fleet("quickstart.yaml").services] == [
        "chat", "code", "small",
    ]  # fmt: skip


def test_an_example_that_is_a_plan_is_for_serving(folder: Path, capsys: Captured) -> None:
    assert cli.run(["init", "mine.json", "--example", "demo-plan"]) == 0
    assert capsys.readouterr().err == "wrote mine.json; next: atoll serve mine.json\n"
    assert (folder / "mine.json").read_bytes() == find_example("demo-plan").read_bytes()


def test_an_example_does_not_replace_a_file_unasked(folder: Path, capsys: Captured) -> None:
    (folder / "quickstart.yaml").write_text("mine", encoding="utf-8")
    assert cli.run(["init", "--example", "quickstart"]) == 2
    assert "quickstart.yaml exists already" in capsys.readouterr().err
    assert (folder / "quickstart.yaml").read_text(encoding="utf-8") == "mine"


def test_an_unknown_example_is_named_with_the_known_ones(folder: Path, capsys: Captured) -> None:
    assert cli.run(["init", "--example", "quikstart"]) == 4
    err = capsys.readouterr().err
    assert err.startswith("error: unknown example 'quikstart'; did you mean quickstart?")
    assert "owned-cluster" in err
    assert list(folder.iterdir()) == []


def test_the_list_says_what_each_example_shows(capsys: Captured) -> None:
    assert cli.run(["init", "--list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(list_examples())
    assert rows["cluster-shared"] == {
        "name": "cluster-shared",
        "file": "cluster-shared.yaml",
        "about": "Two models share the machines of one room.",
    }
    assert cli.run(["init", "--list"]) == 0
    assert "Three models on rented mid-range GPUs: plans in seconds." in capsys.readouterr().out
