"""Schemathesis reads the one description of everything, and tries it on a real gateway and planner."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboard.browser.test_real import RealSite

pytestmark = pytest.mark.slow
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
# What plans, simulates, streams for ever or asks a model is tried elsewhere; this one logs nobody out.
LEFT_OUT = r"whatif|simulate|traces$|live$|^/v1/|/session$"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealSite]:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    made = RealSite(tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.mark.parametrize("role", ["admin", "viewer"])
def test_schemathesis_finds_nothing(site: RealSite, role: str, tmp_path: Path) -> None:
    program = Path(sysconfig.get_path("scripts")) / "schemathesis"
    if not program.exists():
        pytest.skip("schemathesis is not installed")
    key = site.make_key("admin" if role == "admin" else "viewer")
    options = ("--seed", "1", "--phases", "examples,coverage,fuzzing", "--max-examples", "4")
    done = subprocess.run(
        [
            *(str(program), "run", f"{site.url}/openapi.json", *options),
            *("--checks", ",".join(CHECKS), "--exclude-path-regex", LEFT_OUT),
            *("--header", f"Authorization: Bearer {key}"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
