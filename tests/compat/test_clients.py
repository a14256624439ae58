"""Behaviours that clients of others need, on real nodes behind a gateway, one test for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compat.client_checks import CHECKS, ClientSite
from tests.served_fleet import Running

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_client(running: Running, check: Callable[[ClientSite], None]) -> None:
    for package in ("openai", "anthropic"):
        pytest.importorskip(package)
    check(ClientSite(running.fleet.url, "tiny"))
