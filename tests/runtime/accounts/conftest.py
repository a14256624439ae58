"""Databases to test against: a file of SQLite, and a PostgreSQL of our own where its programs exist."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.accounts.helpers import fresh_database, sqlite_url


def _program(name: str) -> str | None:
    known = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    return str(known[0]) if known else shutil.which(name)


def _as_user() -> dict[str, object]:
    """PostgreSQL refuses to run as root: become somebody else."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    pytest.skip("PostgreSQL refuses to run as root, and there is nobody else here")


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server without a port, which is gone after the tests."""
    initdb, pg_ctl = _program("initdb"), _program("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("initdb and pg_ctl of PostgreSQL are not installed")
    user = _as_user()
    folder = Path(tempfile.mkdtemp(prefix="atoll-pg-", dir="/tmp"))
    if user:
        os.chown(folder, int(str(user["user"])), int(str(user["group"])))

    def run(*command: str) -> None:
        subprocess.run(  # type: ignore[call-overload]
            command, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=60, **user
        )

    data, socket = str(folder / "data"), str(folder)
    try:
        run(initdb, "-D", data, "-U", "atoll", "--auth=trust", "--no-sync", "-E", "UTF8")
        options = f"-c listen_addresses='' -k {socket} -c fsync=off -c max_connections=40"
        run(pg_ctl, "-D", data, "-l", str(folder / "log"), "-o", options, "-w", "start")
        try:
            yield f"postgresql://atoll@/postgres?host={socket}"
        finally:
            run(pg_ctl, "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def empty_database(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a new database without tables, of SQLite or PostgreSQL."""
    if kind == "sqlite":
        return f"sqlite:///{tmp_path}/accounts.db"
    return fresh_database(request.getfixturevalue("postgres"))


# Where accounts ask a database the two are one; where they differ, `test_database.py` asks both.
@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, of each kind."""
    return empty_database(request.param, request, tmp_path)


@pytest.fixture
def url(empty_url: str, tmp_path: Path) -> str:
    """The URL of a database of each kind; SQLite's has its tables."""
    return sqlite_url(tmp_path) if empty_url.startswith("sqlite") else empty_url
