"""Schemathesis reads the gateway's description of itself and tries everything it allows and forbids."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.runtime.gateway.integration.conftest import Fleet

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
OPTIONS = ("--checks", CHECKS, "--seed", "1", "--phases", "examples,coverage,fuzzing")
CONSOLE = "^/atoll/v1/"


@pytest.mark.slow
@pytest.mark.parametrize(
    "selection",
    [
        ("--exclude-path-regex", CONSOLE, "--max-examples", "60"),
        # To a stranger all of it is closed, whatever is sent.
        ("--include-path-regex", CONSOLE, "--max-examples", "5"),
    ],
    ids=["models", "console"],
)
def test_schemathesis_finds_nothing(fleet: Fleet, selection: tuple[str, ...]) -> None:
    fleet.add_engine(step_ms=0)
    fleet.start()
    program = Path(sysconfig.get_path("scripts")) / "schemathesis"
    done = subprocess.run(
        [str(program), "run", f"{fleet.url}/openapi.json", *OPTIONS, *selection],
        cwd=fleet.folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    refused = [line for line in fleet.log if line["event"] == "request.bug"]
    assert refused == []
