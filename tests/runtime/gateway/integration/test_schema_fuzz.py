"""Schemathesis reads the gateway's description of itself and tries everything it allows and forbids."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.runtime.gateway.integration.conftest import Fleet

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
OPTIONS = (
    *("--checks", CHECKS, "--max-examples", "60", "--seed", "1"),
    *("--phases", "examples,coverage,fuzzing"),
)


@pytest.mark.slow
def test_schemathesis_finds_nothing(fleet: Fleet) -> None:
    fleet.add_engine(step_ms=0)
    fleet.start()
    program = Path(sysconfig.get_path("scripts")) / "schemathesis"
    done = subprocess.run(
        [str(program), "run", f"{fleet.url}/openapi.json", *OPTIONS],
        cwd=fleet.folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    refused = [line for line in fleet.log if line["event"] == "request.bug"]
    assert refused == []
