"""What the dashboard costs and how long people wait for it, in a real browser and with 200 pages open.

- first_paint_ms: from the address to the figures of the overview, with nothing cached (median of several).
- whatif_s: the slowest of several what-ifs about the quickstart fleet and an any-to-any one, all different,
  planned and simulated; of the any-to-any one the console makes a plan before anybody asks.
- pages200_gateway_cpu_share: how much of a core 200 open pages cost the gateway, beyond what it uses idle.
- transfer_kb: all that goes over the wire to see every page once, with nothing cached.
- history_query_ms: the slowest of the questions that the page of the history asks about 30 days of 20 models
  and 20 machines, of each as it is read in the gateway (CPU milliseconds).
- store_mb_30d: the file of that history, with its journal.

The browser is the machine's chromium; without one the two figures of the browser are null.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from atoll.telemetry.history import LEVELS, HistoryStore, MachineSums, ModelSums
from benchmarks.report import Figure, finish, leave_out, options
from benchmarks.serving.dashboard_site import FLEET, DashboardSite, Visitor, open_site

if TYPE_CHECKING:
    from playwright.sync_api import CDPSession

PAGES = (
    *("overview", "models", "chat", "deploy", "machines", "join"),
    *("history", "requests", "logs", "plan", "whatif", "keys", "traces"),
)
RECORDED = 20
"""Models, and machines, of the history."""
DAYS = 30
OPEN = 200
QUICKSTART = "quickstart"
ASKS: tuple[dict[str, Any], ...] = (
    {"demand": {"chat": 1.5}},
    {"demand": {"chat": 0.5, "small": 2.0}},
    {"prices": {"L40S": 1.4}},
    {"available": {"L40S": 0.25}},
    {"promises": {"chat": {"ttft_s": 2.0, "tpot_s": 0.06, "target": 0.95}}},
    {"budget_usd_per_hour": 10.0},
)
ANY_ASKS: tuple[dict[str, Any], ...] = (
    {"demand": {"assistant": 1.5}},
    {"prices": {"L40S": 1.4}},
    {"available": {"L4": 0.5}},
    {"budget_usd_per_hour": 20.0},
)


def ask_what_if(
    visitor: Visitor, changes: dict[str, Any], fleet: str = QUICKSTART
) -> tuple[float, dict[str, Any]]:
    """Return how long a what-if took, in seconds, and what it found."""
    begun_s = time.perf_counter()
    answer = visitor.post("/atoll/v1/whatif", {"fleet": fleet, **changes})
    seconds = time.perf_counter() - begun_s
    for block in answer.decode().split("\n\n"):
        if block.startswith("event: result"):
            found: dict[str, Any] = json.loads(block.partition("data: ")[2])
            return seconds, found
    raise RuntimeError(f"no result: {answer[-500:]!r}")


def open_pages(site: DashboardSite, visitor: Visitor, count: int) -> list[HTTPConnection]:
    """Open the stream of events that every page has, so many times."""
    opened = []
    for _ in range(count):
        connection = HTTPConnection(urlsplit(site.url).netloc, timeout=60)
        connection.request("GET", "/atoll/v1/live", headers={"cookie": visitor.cookie})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"a page got {answer.status}: {answer.read()[:200]!r}")
        answer.readline()
        opened.append(connection)
    return opened


def measure_pages(site: DashboardSite, visitor: Visitor, seconds: float) -> tuple[float, float]:
    """Return the gateway's CPU share with no page open, and with many."""

    def share() -> float:
        cpu_s, begun_s = site.gateway_cpu_s(), time.monotonic()
        time.sleep(seconds)
        return (site.gateway_cpu_s() - cpu_s) / (time.monotonic() - begun_s)

    idle = share()
    opened = open_pages(site, visitor, OPEN)
    busy = share()
    for connection in opened:
        connection.close()
    return idle, busy


def fill_history(store: HistoryStore, until_s: int) -> None:
    """Record 30 days: coarse steps where only those are kept, down to every ten seconds at the end."""
    draw = random.Random(0)
    begin_s = until_s - DAYS * 86400
    for number, level in enumerate(reversed(LEVELS)):
        finer = LEVELS[::-1][number + 1 :]
        end_s = until_s - finer[0].keep_s if finer else until_s
        for at_s in range(begin_s, end_s, level.step_s):
            step_s = float(level.step_s)
            models = {
                f"organisation/model-{n}": ModelSums(
                    step_s,
                    draw.randrange(200),
                    draw.randrange(90_000),
                    draw.randrange(9000),
                    draw.randrange(1, 90),
                    30.0 * draw.random(),
                    draw.randrange(1, 9000),
                    300.0 * draw.random(),
                    100,
                    draw.randrange(90, 100),
                    draw.random(),
                )
                for n in range(RECORDED)
            }
            machines = {
                f"site/machine-{n}": MachineSums(
                    step_s, *(step_s * draw.random() for _ in MachineSums._fields[1:])
                )
                for n in range(RECORDED)
            }
            store.add(at_s, models, machines)
        begin_s = end_s


def measure_history(folder: Path) -> tuple[float, float]:
    """Return milliseconds of the slowest question, and megabytes of the file."""
    path, until_s = folder / "history.db", 1_800_000_000
    store = HistoryStore(path)
    fill_history(store, until_s)
    waits = []
    for span_s in (3600, 6 * 3600, 86400, 7 * 86400, DAYS * 86400):
        for kind in ("models", "machines"):
            begun_s = time.process_time()
            found = store.read(kind, until_s - span_s, until_s, 160)
            waits.append(1000.0 * (time.process_time() - begun_s))
            if len(found.series) != RECORDED:
                raise RuntimeError(f"{len(found.series)} {kind} were read")
            print(f"  history of {kind} over {span_s / 3600:.0f} h: {waits[-1]:.0f} ms")
    store.close()
    return max(waits), sum(each.stat().st_size for each in folder.glob("history.db*")) / 1e6


def measure_browser(site: DashboardSite, times: int) -> dict[str, float] | None:
    """Return milliseconds to first paint and figures, and kB for all pages; None without a browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        leave_out("the browser: playwright is not installed")
        return None
    from tests.dashboard.browser.conftest import find_chromium

    path = find_chromium()
    if path is None:
        leave_out("the browser: no chromium here")
        return None
    first, figures, sizes = [], [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for _ in range(times):
            # Each with a cache and cookies of its own; the link is part of what a new user waits for.
            context = browser.new_context()
            page = context.new_page()
            devtools = context.new_cdp_session(page)
            devtools.send("Network.enable")
            received = _count(devtools)
            page.goto(site.make_link())
            page.wait_for_selector("main .figure-value")
            figures.append(page.evaluate("performance.now()"))
            first.append(
                page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            )
            for name in PAGES:
                page.evaluate(
                    "p => import('/static/js/app.js').then((app) => app.go(p))", f"/{name}"
                )
                page.wait_for_timeout(1500)
            sizes.append(sum(received) / 1000)
            context.close()
        browser.close()
    return {
        "fcp_ms": statistics.median(first),
        "figures_ms": statistics.median(figures),
        "transfer_kb": max(sizes),
    }


def _count(devtools: CDPSession) -> list[float]:
    """Return a list that the bytes of every answer are added to, as they went over the wire."""
    received: list[float] = []

    def note(event: dict[str, float]) -> None:
        received.append(event["encodedDataLength"])

    devtools.on("Network.loadingFinished", note)
    return received


def main() -> None:
    chosen = options(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder, open_site(Path(folder)) as site:
        visitor = Visitor(site)
        first_s, found = ask_what_if(visitor, {})
        print(f"  first what-if, with the console just started: {first_s:.2f} s")
        some = slice(2 if chosen.quick else None)
        asks = [(QUICKSTART, each) for each in ASKS[some]]
        asks += [(FLEET.name, each) for each in ANY_ASKS[some]]
        ask_what_if(visitor, {}, FLEET.name)
        waits, works = [], []
        for fleet, changes in asks:
            cpu_s = site.planner_cpu_s()
            seconds, found = ask_what_if(visitor, changes, fleet)
            waits.append(seconds)
            works.append(site.planner_cpu_s() - cpu_s)
            then = found["then"]
            print(
                f"  {json.dumps(changes):70s} {seconds:5.2f} s, {works[-1]:.2f} CPU-s "
                f" ${then['usd_per_hour']:.2f}/h, "
                f"serves {then['served']:.0%}"
            )
        idle, busy = measure_pages(site, visitor, 10.0 if chosen.quick else 30.0)
        print(f"  gateway: {idle:.2%} of a core without pages, {busy:.2%} with {OPEN}")
        seen = measure_browser(site, 3 if chosen.quick else 7) or {}
        query_ms, store_mb = measure_history(Path(folder))
        print(f"  history of {DAYS} days: {query_ms:.0f} ms at most, {store_mb:.1f} MB")
    finish(
        [
            Figure("first_paint_ms", seen.get("figures_ms"), 1500, "to the overview's figures"),
            Figure("whatif_s", max(waits), 5, f"slowest of {len(waits)}"),
            Figure(
                "whatif_cpu_s",
                max(works),
                note="CPU seconds of the one with most, whoever else works",
            ),
            Figure("pages200_gateway_cpu_share", max(0.0, busy - idle), 0.02, "of a core"),
            Figure("transfer_kb", seen.get("transfer_kb"), 1500, f"all {len(PAGES)} pages"),
            Figure("history_query_ms", query_ms, 300, f"{DAYS} days, {RECORDED} models"),
            Figure("store_mb_30d", store_mb, 200, "with as many machines"),
            Figure("fcp_ms", seen.get("fcp_ms"), note="first contentful paint"),
            Figure("whatif_first_s", first_s, note="in a console that was just started"),
        ]
    )


if __name__ == "__main__":
    main()
