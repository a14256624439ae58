"""The command line as tests call it: the real entry point in this process, and how a command ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from atoll.cli import main as cli

Captured = pytest.CaptureFixture[str]
Run = Callable[..., str]
"""The fixture `run`: a command that must succeed, and what it printed on stdout."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, with NaN and infinities refused as JSON refuses them."""
        return json.loads(self.out, parse_constant=pytest.fail)


class Atoll(Protocol):
    """The fixture `atoll`: any command, however it ends."""

    def __call__(self, *args: str | Path) -> Done: ...


def call(capsys: Captured, *args: str | Path) -> Done:
    """Run a command and return how it ended."""
    capsys.readouterr()
    code = cli.run([str(arg) for arg in args])
    captured = capsys.readouterr()
    return Done(code, captured.out, captured.err)


def run(capsys: Captured, *args: str | Path) -> str:
    """Run a command that must succeed, and return what it printed on stdout."""
    done = call(capsys, *args)
    assert done.code == 0, done.err
    return done.out


def refused(done: Done, code: int, *said: str) -> None:
    """Check that a command failed with one short line on stderr and nothing on stdout."""
    assert (done.code, done.out) == (code, ""), done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert len(done.err) < 600
    for words in said:
        assert words in done.err
    assert "bug in Atoll" not in done.err
