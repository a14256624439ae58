"""README's first steps, run as they are written there, in order, in an empty folder."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from atoll.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {
    "serve": "runs until Ctrl-C; that its weights are known is tested below",
    "demo": "brings up node processes; `make demo` runs it",
    "join": "needs a machine that joins",
}
"""Verbs that are not run here, and why."""


def first_steps() -> list[list[str]]:
    """The commands after prompts, in the order of the page, without their comments."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\$ (atoll .*)$", readme, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def test_the_steps_are_those_of_the_first_ten_minutes() -> None:
    assert [verb for _, verb, *_ in first_steps()] == ["init", "plan", "simulate", "serve"]


def test_a_fleet_is_planned_and_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first steps as written, but that the plan is not proven by simulation: that is most of the work."""
    steps = [[*step, "--capacity-only"] if step[1] == "plan" else step for step in first_steps()]
    first = next(at for at, (_, verb, *_) in enumerate(steps) if verb == "simulate")
    monkeypatch.chdir(tmp_path)

    def in_this_process(words: list[str]) -> str:
        capsys.readouterr()
        code = cli.run(words)
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out

    run_in(tmp_path, steps[: first + 1], in_this_process)


@pytest.mark.slow
def test_all_of_it_runs_as_written(tmp_path: Path) -> None:
    def as_written(words: list[str]) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "atoll", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    run_in(tmp_path, first_steps(), as_written)


def run_in(folder: Path, steps: list[list[str]], run: Callable[[list[str]], str]) -> None:
    """Run commands in order: each must succeed, write what it names, and say first what is kept."""
    # Paths in it are those of a checkout.
    (folder / "examples").symlink_to(ROOT / "examples")
    for program, verb, *arguments in steps:
        assert program == "atoll"
        if verb in SKIPPED:
            continue
        printed = run([verb, *arguments])
        line = shlex.join([program, verb, *arguments])
        for path in _written(arguments):
            assert (folder / path).stat().st_size > 0, line
        if verb in ("plan", "simulate") and "--capacity-only" not in arguments:
            first = printed.splitlines()[0]
            assert re.match(r"\S+ keeps its promises for .*% of requests \(\d", first), first


def _written(arguments: list[str]) -> list[str]:
    """What `-o` and `--report` name."""
    return [value for flag, value in pairwise(arguments) if flag in ("-o", "--out", "--report")]


def test_what_it_serves_needs_no_other_weights() -> None:
    if find_spec("torch") is None:
        pytest.skip("needs the extra 'engine'")
    from atoll.catalog import Catalog
    from atoll.engine.weights.sources import DEFAULT_MODEL
    from atoll.plan.files.read import read_plan
    from atoll.runtime.local.weights import choose_sources, list_needed

    for _, verb, *arguments in first_steps():
        if verb != "serve" or not arguments[0].startswith("examples/"):
            continue
        plan = read_plan(ROOT / arguments[0])
        services = {instance.service for instance in plan.instances}
        needed = list_needed(plan.models, sorted(services), Catalog.default(), plan)
        stand_in = "--stand-in" in arguments
        assert set(choose_sources(needed, (), DEFAULT_MODEL, stand_in=stand_in)) == services
