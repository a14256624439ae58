"""Deploying, changing and removing models on a page, of a fleet that `atoll operate --pretend` keeps."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.dashboard.browser.conftest import Site, Visit, Visitor, check_axe
from tests.dashboard.browser.operated import LAB, OperatedSite

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow
_PATIENCE_MS = 240_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("torch", "transformers", "zmq", "tokenizers", "httptools", "zenoh"):
        pytest.importorskip(package, reason="needs the extras 'engine', 'fabric' and 'serve'")
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def operated(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedSite]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    on = ("--on", "local,joined", "--address", "127.0.0.1")
    options = ("--pretend", *on, "--ask", "page")
    site = OperatedSite(tmp_path_factory.mktemp("lab"), tiny, options=options)
    with site.operating():
        yield site


def approve(page: Page) -> None:
    page.get_by_role("button", name="Apply this change").click(timeout=_PATIENCE_MS)


def row_of(page: Page, service: str) -> object:
    table = page.get_by_role("region", name="Instances of the fleet")
    return table.get_by_role("row").filter(has_text=f"{service}-both")


def wait_ready(page: Page, service: str) -> None:
    row_of(page, service).get_by_text("ready").first.wait_for(timeout=_PATIENCE_MS)  # type: ignore[attr-defined]


@pytest.mark.engine
def test_a_model_is_deployed_changed_and_removed(operated: OperatedSite, visit: Visit) -> None:
    visitor = visit(operated)
    page = visitor.page
    visitor.go("/deploy?fleet=lab")
    approve(page)
    wait_ready(page, "chat")

    # Deploy: the plan first, with cost, promise, engine and standing; then the file; then it stands.
    page.get_by_role("button", name="Deploy a model").click()
    page.get_by_label("Model", exact=True).fill("qwen3-8b")
    page.get_by_label("Model", exact=True).press("Tab")
    assert page.get_by_label("Name", exact=True).input_value() == "qwen3-8b"
    page.get_by_label("Demand").fill("fast")
    page.get_by_label("Prompts and answers").fill("256x64")
    page.get_by_role("button", name="Show the plan").click()
    page.get_by_text("fast").first.wait_for()
    page.get_by_label("Demand").fill("0.2/s")
    page.get_by_role("button", name="Show the plan").click()
    planned = page.get_by_role("region", name="The plan with this change")
    planned.get_by_text("$1.60/h").first.wait_for(timeout=_PATIENCE_MS)
    words = planned.inner_text()
    assert "keeps every promise" in words
    assert "vllm" in words
    assert "tested" in words
    assert operated.file.read_text() == LAB
    check_axe(visitor)
    page.get_by_role("button", name="Deploy", exact=True).click()
    page.get_by_text("qwen3-8b added").first.wait_for()
    written = operated.file.read_text()
    assert written.startswith("# the fleet of the laboratory")
    assert yaml.safe_load(written)["services"]["qwen3-8b"]["rate"] == "0.2/s"
    approve(page)
    row_of(page, "qwen3-8b").get_by_role("button", name="Log").click(timeout=_PATIENCE_MS)  # type: ignore[attr-defined]
    page.locator("pre.log").wait_for()
    wait_ready(page, "qwen3-8b")
    page.wait_for_function(
        "() => /listen|ready|serv/i.test(document.querySelector('pre.log').innerText)"
    )
    check_axe(visitor)

    # The result is the fleet file, and stands in the history.
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the file").click()
    assert download.value.suggested_filename == "lab.yaml"
    assert Path(download.value.path()).read_text() == written
    history = json.loads(operated.run("history", "lab", "--last", "50", "--json"))
    assert any("qwen3-8b added" in event["text"] for event in history)

    # Change: another promise, and the controller moves only where it must.
    row = page.get_by_role("region", name="Services of the fleet file").get_by_role("row")
    row.filter(has_text="qwen3-8b").get_by_role("button", name="Change").click()
    page.get_by_label("Each further token within").fill("90ms")
    page.get_by_role("button", name="Show the plan").click()
    page.get_by_role("button", name="Change qwen3-8b", exact=True).click(timeout=_PATIENCE_MS)
    page.get_by_text("qwen3-8b changed (tpot)").first.wait_for()
    page.get_by_text("the fleet file has changed").nth(1).wait_for(timeout=_PATIENCE_MS)
    assert yaml.safe_load(operated.file.read_text())["services"]["qwen3-8b"]["tpot"] == "90ms"

    # Remove: by its name, after a look at the plan; what ran is drained once that is approved.
    row.filter(has_text="qwen3-8b").get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("textbox").fill("qwen3-8b")
    page.get_by_role("dialog").get_by_role("button", name="Show the plan").click()
    page.get_by_role("button", name="Remove qwen3-8b", exact=True).click(timeout=_PATIENCE_MS)
    page.get_by_text("qwen3-8b removed").first.wait_for()
    approve(page)
    row_of(page, "qwen3-8b").wait_for(state="detached", timeout=_PATIENCE_MS)  # type: ignore[attr-defined]
    assert operated.file.read_text() == LAB
    assert row_of(page, "chat").get_by_text("ready").count() == 1  # type: ignore[attr-defined]


def open_as(site: Site, visit: Visit, key: str) -> Visitor:
    visitor = visit(site, key=key)
    visitor.go("/deploy?fleet=lab")
    return visitor


def test_a_member_plans_and_a_viewer_looks(site: Site, visit: Visit) -> None:
    page = open_as(site, visit, "atoll-finance").page
    page.get_by_text("members plan changes, operators make them").wait_for()
    for name in ("Deploy a model", "Change", "Remove", "Edit as text", "Log"):
        assert page.get_by_role("button", name=name, exact=True).count() == 0, name

    page = open_as(site, visit, "atoll-notebook").page
    page.get_by_role("button", name="Edit as text").click()
    page.get_by_role("button", name="Show the plan").click()
    page.get_by_text("An operator can make this change").wait_for()
    assert page.locator("#apply").count() == 0


def test_the_file_is_edited_as_text_and_an_earlier_one_is_found_again(
    site: Site, visit: Visit
) -> None:
    visitor = visit(site)
    page = visitor.page
    visitor.go("/deploy?fleet=lab")
    page.get_by_role("button", name="Edit as text").click()
    area = page.get_by_label("Fleet file", exact=True)
    area.fill(area.input_value().replace("rate: 4/s", "rate: 5/s"))
    page.get_by_role("button", name="Show the plan").click()
    page.locator("#apply").click()
    page.get_by_text("The fleet file is replaced").first.wait_for()
    assert "rate: 5/s" in site.planner.file
    page.get_by_role("button", name="Look and go back").click()
    page.get_by_label("Fleet file", exact=True).wait_for()
    check_axe(visitor)


@pytest.mark.engine
def test_a_machine_is_added_and_serves(operated: OperatedSite, tiny: Path, visit: Visit) -> None:
    visitor = visit(operated)
    page = visitor.page
    visitor.go("/deploy?fleet=lab")
    table = page.get_by_role("region", name="Instances of the fleet")
    button = page.get_by_role("button", name="Apply this change")
    button.or_(table.get_by_text("ready")).first.wait_for(timeout=_PATIENCE_MS)
    if button.count():
        button.click()
        wait_ready(page, "chat")
    visitor.go("/join?fleet=lab")
    page.get_by_label("Name of the machine").fill("gpu7")
    page.get_by_role("button", name="Make the line to type there").click()
    page.get_by_text("Waiting for gpu7").wait_for()
    page.get_by_text("listens on this machine only").wait_for()
    line = shlex.split(page.locator(".snippet pre").first.inner_text())
    assert line[:2] == ["atoll", "join"]
    assert line[-2:] == ["--name", "gpu7"]
    check_axe(visitor)
    # What this machine lacks: a GPU, and the name of weights on a hub.
    machine = operated.start(*line[1:], "--gpus", "L4:1", "--models", str(tiny.parent))
    try:
        page.get_by_text("it has joined").wait_for(timeout=_PATIENCE_MS)
        assert "1\u00d7 L4" in page.locator(".facts").inner_text()
        assert page.get_by_label("Node type").input_value() == "L4:1"
        assert page.get_by_label("Region").input_value() == "joined"
        page.get_by_role("button", name="Measure it now").wait_for()
        page.get_by_role("button", name="Show the plan").click()
        page.get_by_role("button", name="Use it").click(timeout=_PATIENCE_MS)
        page.get_by_text("The fleet file counts it now").wait_for()
        pool = yaml.safe_load(operated.file.read_text())["pool"]
        assert "joined" in json.dumps(pool)
        check_axe(visitor)
        # It costs nothing an hour: the controller moves there once that is agreed to.
        visitor.go("/deploy?fleet=lab")
        approve(page)
        moved = table.get_by_role("row").filter(has_text="gpu7")
        moved.get_by_text("ready").first.wait_for(timeout=_PATIENCE_MS)
        visitor.go("/join?fleet=lab")
        page.get_by_role("button", name="Take back").click()
        page.get_by_text("revoked").wait_for()
        # It is told so, and leaves.
        assert machine.wait(120) != 0
    finally:
        machine.kill()
        machine.wait()
    operated.file.write_text(LAB)


def test_a_viewer_asks_no_machine(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-finance")
    visitor.go("/join?fleet=lab")
    visitor.page.get_by_text("Operators ask machines to come").wait_for()
    for name in ("Make the line to type there", "Take back"):
        assert visitor.page.get_by_role("button", name=name).count() == 0
