"""Headless Chromium, driven by playwright, and the page in it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.operator.scene import control_of
from tokenlake_client.control import Control
from tokenlake_testing.cluster import Node

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "google-chrome")
MISSING = "headless Chromium is needed: `apt-get install chromium`, and `make install-rest` for playwright"
PHONE, LAPTOP, WALL = (390, 844), (1280, 800), (3840, 2160)
LIMIT_MS = 30_000.0
"""Limit of the milliseconds in which the page must show something; many, because of machines under load."""


def chromium() -> str | None:
    """The path of Chromium; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def started() -> Iterator[Browser]:
    """A browser. Skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason=MISSING)
    path = chromium()
    if path is None:
        pytest.skip(MISSING)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


class Shown:
    """The page of a node in a tab of its own. `wrong` has what the browser complains about: errors of scripts, requests
    to other hosts, and violations of the page's policy."""

    def __init__(self, browser: Browser, size: tuple[int, int] = LAPTOP, **options: Any) -> None:
        """`options`: of the tab, such as `color_scheme`."""
        width, height = size
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, locale="en-GB", timezone_id="UTC", **options
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(LIMIT_MS)
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("console", self._heard)
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _heard(self, message: Any) -> None:
        # The browser logs each answer that is no success, and each connection that is refused.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.wrong.append(message.text)

    def open(self, url: str) -> None:
        """Load the page, and wait until it shows the state of the node."""
        self.page.goto(url)
        self.state("live")

    def state(self, *names: str) -> None:
        """Wait until the page is in one of these states."""
        wanted = ", ".join(f'body[data-state="{name}"]' for name in names)
        self.page.locator(wanted).wait_for(state="attached")

    def until(self, expression: str, argument: object = None) -> None:
        """Wait until a function of JavaScript returns true."""
        # The page's policy allows no code from strings, which playwright's own waiting needs in the page.
        self.page.wait_for_function(expression, arg=argument, polling=100)

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.page.locator(selector).inner_text())

    def close(self) -> None:
        """Close the tab, with its session."""
        self.context.close()


def url_of(node: Node, valid_s: float = 0.0, tenant: str = "") -> str:
    """The address of the page of a node, with a token."""
    with Control.local(control_of(node), call_s=20.0) as control:
        granted = control.grant_page(valid_s, tenant)
    return f"http://{granted.address}/#token={granted.token}"
