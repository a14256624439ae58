"""Kept compilations: whose folders they are, what is set, what is removed and what is in use."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.core.errors import InputError
from atoll.engines.engine import Engine, EngineLayout, ServedModel
from atoll.engines.limits import EngineLaunch
from atoll.engines.llamacpp import ENGINE as LLAMACPP
from atoll.engines.sglang import ENGINE as SGLANG
from atoll.engines.stage import ENGINE as STAGE
from atoll.engines.vllm import ENGINE as VLLM
from atoll.runtime.endpoints.compile_cache import (
    KeptLaunch,
    enter,
    find_version,
    own_folder,
    prune,
    set_caches,
)
from atoll.runtime.join.engine_command import read_command

LAUNCH = KeptLaunch(
    VLLM,
    EngineLayout("one", 1, 1, 1, (32,)),
    ServedModel("hf://org/name", ("chat",), EngineLaunch(max_num_seqs=8)),
    frozenset({"H200"}),
)
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def test_the_folder_is_named_or_among_other_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No test writes where the user's own engines keep what they compiled.
    assert Path.home() not in own_folder().parents
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path))
    monkeypatch.setenv("ATOLL_COMPILED", "/scratch/compiled")
    assert own_folder() == Path("/scratch/compiled")
    monkeypatch.delenv("ATOLL_COMPILED")
    assert own_folder() == tmp_path / "compiled"


def fill(folder: Path, name: str, size: int, age_s: float = 0.0) -> Path:
    """A folder of a launch that nobody uses any more."""
    home, lock = enter(folder, name)
    (home / "vllm").mkdir(exist_ok=True)
    (home / "vllm" / "graph").write_bytes(b"x" * size)
    then = time.time() - age_s
    os.utime(lock, (then, then))
    os.close(lock)
    return home


def run(folder: Path, home: Path, **environment: str) -> dict[str, str]:
    """The environment that a command gets."""
    words = [sys.executable, "-c", SHOW]
    inherited = {k: v for k, v in os.environ.items() if "CACHE" not in k}
    done = subprocess.run(
        LAUNCH.wrap(words, sys.executable, folder),
        env=inherited | {"HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found | {"stderr": done.stderr}


def test_a_launch_has_one_name_whatever_its_service_is_called() -> None:
    assert LAUNCH.key.startswith("name-H200-")
    named = replace(LAUNCH, served=replace(LAUNCH.served, names=("other", "names")))
    assert named.key == LAUNCH.key
    dummy = EngineLaunch(max_num_seqs=8, load_format="dummy")
    assert replace(LAUNCH, served=replace(LAUNCH.served, launch=dummy)).key == LAUNCH.key
    others = (
        replace(LAUNCH, gpus=frozenset({"L4"})),
        replace(LAUNCH, engine=SGLANG),
        replace(LAUNCH, layout=EngineLayout("one", 1, 2, 1, (32,))),
        replace(LAUNCH, served=replace(LAUNCH.served, source="hf://org/name@abc")),
        replace(LAUNCH, served=replace(LAUNCH.served, launch=EngineLaunch(max_num_seqs=9))),
    )
    assert len({LAUNCH.key, *(each.key for each in others)}) == 1 + len(others)


def test_launches_of_the_stage_engine_share_what_they_compiled_for_a_model() -> None:
    stage = replace(LAUNCH, engine=STAGE)
    assert stage.key.startswith("name-H200-")
    limits = replace(stage, served=replace(stage.served, launch=EngineLaunch(max_num_seqs=9)))
    cut = replace(stage, layout=EngineLayout("two", 2, 1, 1, (20, 12)))
    assert {limits.key, cut.key} == {stage.key}
    other = replace(stage, served=replace(stage.served, source="hf://other/name"))
    assert len({stage.key, other.key, replace(stage, gpus=frozenset({"L4"})).key}) == 3


def test_a_wrapped_command_is_still_read_as_its_engine() -> None:
    words = ["vllm", "serve", "org/name", "--port", "{port}"]
    wrapped = LAUNCH.wrap(words, "python3", "/shared/vllm")
    assert wrapped[-5:] == words
    assert wrapped[:2] == ["python3", "-m"]
    read = read_command(wrapped, port=8123)
    assert (read.engine, read.port, read.model) == ("vllm", 8123, "org/name")


@pytest.mark.parametrize(("engine", "folder"), [(LLAMACPP, "/folder"), (VLLM, None)])
def test_without_a_folder_or_anything_to_keep_commands_are_as_they_are(
    engine: Engine, folder: str | None
) -> None:
    assert replace(LAUNCH, engine=engine).wrap(["a", "b"], "python3", folder) == ["a", "b"]


def test_a_command_gets_caches_of_its_own_and_what_the_user_has_stays(tmp_path: Path) -> None:
    seen = run(tmp_path / "kept", tmp_path, TRITON_CACHE_DIR="/mine")
    assert seen["TRITON_CACHE_DIR"] == "/mine"
    assert "FLASHINFER_WORKSPACE_BASE" in seen
    root = Path(seen["VLLM_CACHE_ROOT"])
    assert root.is_dir()
    assert root.parent.name.endswith(LAUNCH.key)
    assert root.parent.name.startswith("vllm-unknown-")  # this Python has no vLLM
    for each in (root, root.parent, root.parent.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    # Kernels that were brought along stay at home.
    (tmp_path / ".cache" / "flashinfer").mkdir(parents=True)
    again = run(tmp_path / "kept", tmp_path)
    assert again["VLLM_CACHE_ROOT"] == str(root)
    assert "FLASHINFER_WORKSPACE_BASE" not in again


def test_an_engine_starts_also_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    seen = run(tmp_path / "file", tmp_path)
    assert "VLLM_CACHE_ROOT" not in seen
    assert "compilations are not kept" in seen["stderr"]


def test_the_command_holds_its_folder_as_long_as_it_runs(tmp_path: Path) -> None:
    wait = [sys.executable, "-c", "print('up', flush=True); input()"]
    with subprocess.Popen(
        LAUNCH.wrap(wait, sys.executable, tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        assert server.stdout.readline() == "up\n"
        (home,) = tmp_path.glob("user-*/vllm-*")
        prune(tmp_path, max_folders=0)
        assert home.is_dir()
        server.stdin.write("\n")
    prune(tmp_path, max_folders=0)
    assert not home.exists()


def test_folders_that_others_may_write_to_are_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(InputError, match="everybody may write"):
        enter(shared, "a")
    shared.chmod(0o1777)  # as /tmp: nobody can put another folder in the place of mine
    home, lock = enter(shared, "a")
    os.close(lock)
    home.parent.chmod(0o770)
    with pytest.raises(InputError, match="yours alone"):
        enter(shared, "a")
    home.parent.rename(tmp_path / "elsewhere")
    home.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="yours alone"):
        enter(shared, "a")


def test_what_was_used_longest_ago_is_removed(tmp_path: Path) -> None:
    new, middle, old = (fill(tmp_path, f"{age_s:g}", 1000, age_s) for age_s in (0.0, 60.0, 120.0))
    prune(tmp_path, max_bytes=2500)
    assert new.is_dir()
    assert middle.is_dir()
    assert not old.exists()
    prune(tmp_path, max_age_s=30.0)
    assert new.is_dir()
    assert not middle.exists()
    assert [path.name for path in new.parent.iterdir()] == ["0"]


def test_what_is_in_use_stays_and_what_comes_meanwhile_is_whole(tmp_path: Path) -> None:
    fill(tmp_path, "held", 10)
    home, lock = enter(tmp_path, "held")
    second = enter(tmp_path, "held")[1]  # several servers of one launch
    prune(tmp_path, max_bytes=0)
    os.close(lock)
    prune(tmp_path, max_bytes=0)
    assert (home / "vllm" / "graph").is_file()
    os.close(second)
    prune(tmp_path, max_bytes=0)
    assert not home.exists()


def test_whoever_waits_for_a_folder_that_goes_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is removed between being opened and being locked."""
    fill(tmp_path, "a", 10)
    real, calls = fcntl.flock, []

    def flock(lock: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            prune(tmp_path, max_folders=0)
        real(lock, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    home, lock = enter(tmp_path, "a")
    assert (home / ".lock").stat().st_ino == os.fstat(lock).st_ino
    assert not (home / "vllm").exists()
    os.close(lock)


def test_a_version_is_that_of_the_python_that_runs_the_program(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text(f"#!{tmp_path}/python\n")
    program.chmod(0o755)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ntest "$3" = vllm && echo 9.8.7+cu\n')
    python.chmod(0o755)
    assert find_version("vllm", [str(program), "serve"]) == "9.8.7+cu"
    assert find_version("vllm", ["env", "A=b", str(program), "serve"]) == "9.8.7+cu"
    assert find_version("vllm", [str(python), "-m", "vllm"]) == "9.8.7+cu"
    assert find_version("no-such-package", ["no-such-program"]) == "unknown"


def test_every_engine_names_folders_that_differ(tmp_path: Path) -> None:
    for engine in (VLLM, SGLANG):
        found = set_caches(engine.compile_caches, tmp_path, {})
        assert len(set(found.values())) == len(found) >= 3
