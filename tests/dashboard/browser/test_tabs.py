"""Many tabs: those that nobody sees hold no connection."""

from __future__ import annotations

import pytest

from tests.dashboard.browser.conftest import Site, Visit

pytestmark = pytest.mark.slow
_HIDE = """hidden => {
  const value = hidden ? 'hidden' : 'visible';
  Object.defineProperty(document, 'visibilityState', {value, configurable: true});
  document.dispatchEvent(new Event('visibilitychange'));
}"""


def test_a_hidden_page_closes_its_stream_and_opens_it_again(site: Site, visit: Visit) -> None:
    page = visit(site).page
    page.clock.install()
    page.reload()
    page.get_by_text("live", exact=True).wait_for()
    page.evaluate(
        "() => { window.opened = 0; const Real = EventSource;"
        " window.EventSource = class extends Real { constructor(url) { super(url); window.opened++; } } }"
    )
    page.evaluate(_HIDE, True)
    page.clock.run_for(2000)
    page.evaluate(_HIDE, False)
    assert page.evaluate("opened") == 0  # a glance elsewhere changes nothing
    page.evaluate(_HIDE, True)
    page.clock.run_for(6000)
    page.evaluate(_HIDE, False)
    assert page.evaluate("opened") == 1
