"""Compiling: parts and entries, what numba's insides must go on doing, and the cache."""

from __future__ import annotations

import importlib
import linecache
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core import compiling, linking, waiting
from atoll.core.compiling import CompiledEntry, entry, part

COMPILED_AS = "the tests"


@part
def double(values: Any, at: int) -> float:
    return float(values[at] * 2.0)


@part
def total(values: Any, most: int) -> float:
    found = 0.0
    for i in range(min(most, len(values))):
        found += double(values, i)
    return found


@entry("(float64[::1], int64)")
def run(values: Any, most: int) -> float:
    return total(values, most) + double(values, 0)


def entry_of(function: Any) -> CompiledEntry:
    return next(one for one in compiling.ENTRIES if one.dispatcher is function)


def test_an_entry_is_made_of_parts() -> None:
    assert run(np.array([1.0, 2.0, 4.0]), 2) == 8.0
    assert run(np.array([1.0, 2.0, 4.0]), 9) == 16.0


def test_a_part_has_one_version_whatever_it_is_called_with() -> None:
    run(np.ones(3), 2)
    # What an earlier run has left in the cache needs no parts.
    entry_of(run).dispatcher.recompile()
    # `double` is called with a variable and with the literal 0.
    assert len(vars(double)["overloads"]) == 1


def test_python_may_not_call_parts_but_entries_made_of_them() -> None:
    run(np.ones(3), 2)
    with pytest.raises(TypeError, match="total is a part"):
        total(np.ones(3), 2)
    assert entry("(float64[::1], int64)")(total)(np.ones(3), 2) == 4.0


def test_an_entry_may_not_be_called_by_another() -> None:
    @entry("(float64[::1],)")
    def outer(values: Any) -> float:
        return run(values, 1)

    with pytest.raises(TypeError, match="run is an entry"):
        outer(np.ones(2))


def test_numba_itself_compiles_as_before_after_an_entry() -> None:
    from numba import njit
    from numba.core.codegen import JITCodeLibrary

    run(np.ones(3), 2)

    def plain_python(values: Any) -> Any:
        return max(values[0], 2.0) + len(values)

    plain = njit(plain_python)
    assert plain(np.ones(3)) == 5.0
    (made,) = plain.overloads.values()
    assert type(made.library) is JITCodeLibrary


def test_who_waits_is_told_what_for() -> None:
    @entry("(int64,)")
    def slow(x: int) -> int:
        return x + 1

    slow_again = slow
    heard: list[str] = []
    entry_of(slow).dispatcher._cache.disable()
    with waiting.listening(heard.append):
        assert slow(1) == 2
        assert slow_again(2) == 3
    assert heard == ["compiling the tests, once on this machine"]
    waiting.say("nobody listens")
    assert len(heard) == 1


def run_anew() -> tuple[int, bool, int]:
    """What a program says that has just started: its answer, whether it is compiled, hits of the cache."""
    for name in ("folder", "folder.main", "folder.other"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    linecache.clearcache()
    function = importlib.import_module("folder.main").run
    found = entry_of(function)
    return function(3), found.is_compiled, sum(found.dispatcher.stats.cache_hits.values())


def test_the_cache_notices_a_change_of_a_part_in_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    # Python itself tells versions of a file apart by whole seconds.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    package = tmp_path / "folder"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "main.py").write_text(
        "from atoll.core.compiling import entry\nfrom folder.other import there\n\n\n"
        '@entry("(int64,)")\ndef run(x):\n    return there(x)\n'
    )
    other = package / "other.py"
    source = "from atoll.core.compiling import part\n\n\n@part\ndef there(x):\n    return x + {}\n"
    other.write_text(source.format(1))
    assert run_anew() == (4, True, 0)
    other.write_text(source.format(2))
    assert run_anew() == (5, True, 0)
    other.write_text(source.format(1))
    assert run_anew() == (4, True, 1)


PROGRAM = """
from atoll.core.compiling import entry

@entry("(int64,)")
def run(x):
    return x + 1

print(run(3), sum(run.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_a_process_finds_what_another_has_compiled(tmp_path: Path) -> None:
    # Files beside it count, in an order that no process makes up for itself.
    for name in "abcdef":
        (tmp_path / f"{name}.py").write_text(name)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    said = [
        subprocess.run(
            [sys.executable, str(program)],
            env=environment | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert said == [["4", "0"], ["4", "1"]]


def test_an_entry_works_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere(linking.EntryCache):
        def __init__(self, _function: Any) -> None:
            raise RuntimeError("no locator available")

    with monkeypatch.context() as without:
        without.setattr(linking, "EntryCache", Nowhere)

        @entry("(int64,)")
        def alone(x: int) -> int:
            return x + 1

    assert alone(1) == 2
    assert not entry_of(alone).is_compiled


def test_another_numba_compiles_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr("numba.__version__", "99.1.0")
        assert compiling._load_linking() is None
        other.setattr(compiling, "LINKING", None)

        @part
        def inner(x: float) -> float:
            return x / 2.0

        @entry("(float64,)")
        def outer(x: float) -> float:
            return inner(inner(x))

        assert not entry_of(outer).is_compiled
        entry_of(outer).compile()
        assert outer(8.0) == 2.0
        assert inner(8.0) == 4.0
    assert compiling._load_linking() is linking


def numbered(value: int) -> Any:
    """An entry that brings an intrinsic: a number."""
    from numba import types
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def constant(_typing: Any) -> Any:
        def codegen(context: Any, _builder: Any, _signature: Any, _args: Any) -> Any:
            return context.get_constant(types.int64, value)

        return types.int64(), codegen

    @entry("()")
    def number() -> Any:
        return constant()

    return number


def test_entries_bring_intrinsics_of_their_own_one_after_the_other() -> None:
    assert [numbered(value)() for value in (1, 2, 3)] == [1, 2, 3]
