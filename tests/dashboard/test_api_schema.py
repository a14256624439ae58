"""Schemathesis reads the one description of everything, and tries it on a real gateway and planner."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cli.console_inside import load_api
from atoll.core.roles import ROLES, Role
from atoll.runtime.http.api_route import JSON
from tests.dashboard.browser.test_real import RealSite

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
# What streams for ever is tried elsewhere; so is what plans and simulates, which takes seconds a request.
LEFT_OUT = r"/live$|/whatif$|/simulate$"
COVERED = 63
"""Operations of the document that are tried, of 66."""
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


def test_every_answer_has_a_type() -> None:
    api = load_api()
    untyped = [
        f"{route.method} {route.shown_path}"
        for routes in api.routes.values()
        for route in routes
        if JSON in route.makes and route.gives is None
    ]
    assert untyped == []
    paths = [path for path, all_of in api.document["paths"].items() for _ in all_of]
    assert len([path for path in paths if not re.search(LEFT_OUT, path)]) == COVERED


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_schemathesis_finds_nothing(site: RealSite, role: Role, tmp_path: Path) -> None:
    program = Path(sysconfig.get_path("scripts")) / "schemathesis"
    if not program.exists():
        pytest.skip("schemathesis is not installed")
    # An admin asks about what is there, so that answers are looked at, too.
    (tmp_path / "schemathesis.toml").write_text(NAMES if role == "admin" else "")
    done = subprocess.run(
        [
            *(str(program), "run", f"{site.url}/openapi.json", "--seed", "1"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "4"),
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
