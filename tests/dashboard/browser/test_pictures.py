"""Pictures of pages in docs/img, from a fleet that runs and is asked; `make screenshots` takes them.

Two services of a small real model (SmolLM2) on cores, and machines that are processes here: nothing that is
shown is made up, but the prices.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.engine.weights.sources import DEFAULT_MODEL
from tests.dashboard.browser.conftest import Visit, Visitor
from tests.dashboard.browser.operated import OperatedSite
from tests.e2e.operated_site import until

FOLDER = "ATOLL_SCREENSHOTS"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.skipif(FOLDER not in os.environ, reason="pictures are made by `make screenshots`"),
]
FLEET = """\
# two services of one small model
name: lab
services:
  chat: {model: smollm2-135m, ttft: 30s, tpot: 2s, rate: 0.25/s, lengths: 32x24}
  code: {model: smollm2-135m, ttft: 45s, tpot: 2s, rate: 0.1/s, lengths: 32x24}
pool:
  offers:
    - {region: zurich, node_type: L4:1, available: 4, usd_per_hour: 0.80}
    - {region: lausanne, node_type: L40S:1, available: 2, usd_per_hour: 1.80}
settings: {max_nodes_per_instance: 2}
"""
QUESTIONS = (
    ("chat", "Name three lakes of the Alps."),
    ("code", "Write a function that adds two numbers."),
    ("chat", "Why is the sea salty?"),
    ("chat", "What does a lighthouse do?"),
)
REQUESTS = 16
"""So many are answered before the first picture."""
MAX_BYTES = 200_000
PATIENCE_MS = 240_000
PAGES = ("overview", "requests", "plan", "whatif")


class AskedFleet:
    """A fleet that is asked all the time, a few requests at once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._questions = itertools.cycle(QUESTIONS)
        self._over = threading.Event()
        self.answered = 0
        self.error: Exception | None = None
        self._threads = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def has_answered(self, requests: int) -> bool:
        """Whether so many were; raises what went wrong."""
        if self.error is not None:
            raise self.error
        return self.answered >= requests

    def close(self) -> None:
        """Ask no more."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self) -> None:
        while not self._over.wait(0.5):
            try:
                self._ask(*next(self._questions))
            except OSError as error:
                self.error = error
                return
            self.answered += 1

    def _ask(self, model: str, question: str) -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 16,
            "stream": True,
        }
        asked = urllib.request.Request(
            f"{self._url}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            answer.read()


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedSite]:
    """A fleet that serves, with traffic."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = ("--pretend", "--yes", "--model", DEFAULT_MODEL)
    site = OperatedSite(tmp_path_factory.mktemp("lab"), None, FLEET, options)
    with site.operating():
        seen = site.folder / "state" / "fleets" / "lab" / "seen.json"

        def ready() -> int:
            listed = json.loads(seen.read_text())["seen"] if seen.exists() else []
            return sum(one["state"] == "ready" for one in listed)

        until(lambda: ready() >= 2, "ready", 900)
        (told,) = json.loads(site.run("status", "lab", "--json"))
        traffic = AskedFleet(told["operated"]["url"])
        try:
            until(lambda: traffic.has_answered(REQUESTS), f"{REQUESTS} requests answered", 900)
            yield site
        finally:
            traffic.close()


def _settle(visitor: Visitor, name: str) -> None:
    """Bring a page into the state that says most about it."""
    page = visitor.page
    asks = "?fleet=lab" if name in ("plan", "whatif") else ""
    visitor.go(f"/{name}{asks}", PATIENCE_MS)
    if name == "whatif":
        page.locator(".verdict").wait_for(timeout=PATIENCE_MS)
        dial = page.get_by_role("slider", name="Demand of chat")
        old = page.locator(".verdict").inner_text()
        dial.focus()
        for _ in range(15):
            page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "old => document.querySelector('.verdict').innerText !== old",
            arg=old,
            timeout=PATIENCE_MS,
        )
    if name == "requests":
        page.get_by_role("table").get_by_role("row").nth(1).get_by_role("link").first.click()
    page.wait_for_timeout(1500)
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")


def _take(visitor: Visitor, name: str) -> None:
    path = Path(os.environ[FOLDER]) / f"dashboard-{name}.png"
    visitor.page.screenshot(path=path)
    assert 10_000 < path.stat().st_size < MAX_BYTES, path


def test_pages(asked: OperatedSite, visit: Visit) -> None:
    visitor = visit(asked, height=860)
    for name in PAGES:
        _settle(visitor, name)
        _take(visitor, name)
