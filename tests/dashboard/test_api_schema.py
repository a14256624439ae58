"""Schemathesis reads the one description of everything, and tries it on a real gateway and planner."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.core.roles import Role
from tests.dashboard.browser.test_real import RealSite

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
# What plans, simulates, streams for ever or asks a model is tried elsewhere; this one logs nobody out.
LEFT_OUT = r"whatif|simulate|traces$|live$|^/v1/|/session$"
NAMES = """
[parameters]
"path.name" = "lab"
"path.instance" = "gateway"
"path.machine" = "gpu7"
"query.follow" = false
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealSite]:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = RealSite(tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("role", "examples"),
    [
        pytest.param("admin", 1, id="a few"),
        pytest.param("admin", 4, id="admin", marks=pytest.mark.slow),
        pytest.param("viewer", 4, id="viewer", marks=pytest.mark.slow),
    ],
)
def test_schemathesis_finds_nothing(
    site: RealSite, role: Role, examples: int, tmp_path: Path
) -> None:
    program = Path(sysconfig.get_path("scripts")) / "schemathesis"
    if not program.exists():
        pytest.skip("schemathesis is not installed")
    # An admin asks about what is there, so that answers are looked at, too.
    (tmp_path / "schemathesis.toml").write_text(NAMES if role == "admin" else "")
    phases = "examples,coverage,fuzzing" if examples > 1 else "fuzzing"
    done = subprocess.run(
        [
            *(str(program), "run", f"{site.url}/openapi.json", "--seed", "1"),
            *("--phases", phases, "--max-examples", str(examples)),
            *("--checks", ",".join(CHECKS), "--exclude-path-regex", LEFT_OUT),
            *("--header", f"Authorization: Bearer {site.make_key(role)}"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
