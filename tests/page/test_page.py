"""The page in headless Chromium, against real daemons. States that no three daemons have (a hundred nodes, hostile
names) come from the page's own server with a made state."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.page.browser import LAPTOP, LIMIT_MS, MISSING, PHONE, WALL, Shown, started, url_of
from tests.page.facts import HOSTILE, compressed, document
from tests.page.load import Load, three_nodes
from tests.robustness.live import daemons
from tests.server.test_metrics_page import pages
from tokenlake.errors import CredentialRefused
from tokenlake_server.metrics_page import MetricsServer
from tokenlake_testing.cluster import Cluster

pytestmark = [pytest.mark.live, pytest.mark.rest, pytest.mark.timeout(300)]

__all__ = ["pages"]
SIZES = {"phone": PHONE, "laptop": LAPTOP, "wall": WALL}
AXE_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def loaded(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes under load, of which a state with all parts is there."""
    with three_nodes(tmp_path_factory.mktemp("nodes")) as cluster:
        load = Load(cluster, requests_per_s=12.0)
        try:
            yield cluster
        finally:
            load.close()


@pytest.fixture
def shown(browser: Any, request: pytest.FixtureRequest) -> Iterator[Shown]:
    """A tab, which must give the browser nothing to complain about. Parameters are its options."""
    tab = Shown(browser, **getattr(request, "param", {}))
    yield tab
    wrong = list(tab.wrong)
    tab.close()
    assert wrong == []


class Answer(NamedTuple):
    body: bytes
    left_s: float = 3600.0


class Made:
    """The source of a page with a made state."""

    def __init__(self, body: bytes, left_s: float = 3600.0) -> None:
        self.answer = Answer(body, left_s)

    def read(self, token: str) -> Answer:
        if token != "given":
            raise CredentialRefused("the token has expired")
        return self.answer


def made(pages: tuple[MetricsServer, Any], source: Made) -> str:
    """The address of a page with that state."""
    server, _ = pages
    server.page.source = source
    return f"http://127.0.0.1:{server.address.port}/#token=given"


def violations(tab: Shown) -> list[str]:
    """What axe-core finds against WCAG 2.2 AA and its own good practice."""
    axe = pytest.importorskip("axe_playwright_python.base", reason=MISSING)
    tab.page.evaluate(Path(axe.AXE_FILE_PATH).read_text())
    found = tab.page.evaluate("rules => axe.run(document, { runOnly: rules })", AXE_RULES)
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:160]} {node['failureSummary'][:300]}"
        for each in found["violations"]
        for node in each["nodes"]
    ]


def wait_full(tab: Shown) -> None:
    """Wait until charts, tables and lists have content."""
    full = """() => document.querySelectorAll('#links tbody tr, #prefixes tbody tr, #calls .bar i').length >= 5
        && document.querySelector('#token-chart .area.supplied').getAttribute('d') !== ''"""
    tab.until(full)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_has_contrast(browser: Any, loaded: Cluster, size: str, scheme: str) -> None:
    tab = Shown(browser, SIZES[size], color_scheme=scheme)
    tab.open(url_of(loaded.nodes[0]))
    wait_full(tab)
    assert violations(tab) == []
    width = tab.page.evaluate("document.documentElement.scrollWidth")
    assert width <= SIZES[size][0], "no scrolling sideways"
    light = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    channels = [int(each) for each in re.findall(r"\d+", light)[:3]]
    assert (min(channels) > 200) == (scheme == "light")
    if size == "wall":
        height = tab.page.evaluate("document.documentElement.scrollHeight")
        assert height <= WALL[1], "all of it is seen at once"
    assert tab.wrong == []
    tab.close()


def test_it_shows_the_state_and_follows_it(shown: Shown, loaded: Cluster) -> None:
    node = loaded.nodes[0]
    shown.open(url_of(node))
    assert shown.page.title() == "gpu-a · TokenLake"
    assert "#" not in shown.page.url, "the token leaves the address"
    wait_full(shown)
    names = shown.page.locator("#nodes .name").all_inner_texts()
    assert names == ["gpu-a", "gpu-b", "gpu-c"]
    assert {"chat", "search", "documents", "trial"} == set(
        shown.page.locator("#tenants td:first-child").all_inner_texts()
    )
    before = shown.text("#stats")
    shown.until("before => document.querySelector('#stats').innerText !== before", before)
    assert "of 256" in before
    assert {url.partition("/")[2].lstrip("/").partition("/")[0] for url in shown.requests} == {
        f"127.0.0.1:{node.metrics_port}"
    }, "no request to another host"


def test_a_reload_keeps_the_token_and_a_new_tab_does_not(browser: Any, shown: Shown, loaded: Cluster) -> None:
    shown.open(url_of(loaded.nodes[0]))
    shown.page.reload()
    shown.state("live")
    other = Shown(browser)
    other.page.goto(f"http://127.0.0.1:{loaded.nodes[0].metrics_port}/")
    other.state("none")
    assert "tokenlake page" in other.text("#gate")
    assert violations(other) == []
    assert other.page.locator("#main").is_hidden()
    other.close()


@pytest.mark.parametrize("shown", [{"reduced_motion": "reduce"}], indirect=True)
def test_the_keyboard_reaches_everything(shown: Shown, loaded: Cluster) -> None:
    shown.open(url_of(loaded.nodes[0]))
    wait_full(shown)
    reached = []
    for _ in range(12):
        shown.page.keyboard.press("Tab")
        at = shown.page.evaluate(
            """() => { const at = document.activeElement; const style = getComputedStyle(at);
            return [at.id || at.getAttribute('aria-label') || at.tagName, style.outlineStyle, style.outlineWidth]; }"""
        )
        reached.append(at[0])
        assert at[0] == "BODY" or (at[1] == "solid" and at[2] == "2px"), f"no visible focus at {at}"
        if at[0] == "token-chart":
            shown.page.keyboard.press("ArrowLeft")
            first = shown.page.locator("#token-chart").get_attribute("aria-valuetext")
            shown.page.keyboard.press("ArrowLeft")
            assert shown.page.locator("#token-chart").get_attribute("aria-valuetext") != first
            assert re.search(r"\d\d:\d\d:\d\d", shown.text("#token-legend .when"))
            shown.page.keyboard.press("Escape")
            assert shown.text("#token-legend .when") == ""
    assert reached[0] == "skip"
    assert {"token-chart", "nodes", "byte-chart", "Table of hot prefixes", "Table of tenants", "events"} <= set(reached)
    durations = shown.page.evaluate("getComputedStyle(document.querySelector('.bar i')).transitionDuration")
    assert durations == "0s"


def test_a_peer_that_is_killed(shown: Shown) -> None:
    with daemons(3) as cluster:
        shown.open(url_of(cluster.nodes[0]))
        shown.until("() => document.querySelectorAll('#nodes .node').length === 3")
        shown.page.locator("#events").get_by_text("'node2' is connected").wait_for()
        cluster.nodes[2].kill()
        lost = shown.page.locator("#nodes .node.bad")
        lost.wait_for(state="attached")
        assert "node2" in lost.inner_text()
        assert "unreachable" in lost.inner_text()
        shown.page.locator("#problem-list").get_by_text("node 'node2' is unreachable").wait_for()
        shown.page.locator("#events .warning").get_by_text("node2").first.wait_for()
        assert "1 not connected" in shown.text("#cluster-note")
        assert shown.page.title().startswith("▲")
        assert violations(shown) == []
        cluster.nodes[2].start()
        lost.wait_for(state="detached")
        shown.page.locator("#problems").wait_for(state="hidden")


def test_the_node_itself_is_killed(shown: Shown) -> None:
    with daemons(1) as cluster:
        shown.open(url_of(cluster.nodes[0]))
        cluster.nodes[0].kill()
        shown.state("silent")
        banner = shown.text("#banner")
        assert "does not answer" in banner
        assert re.search(r"What you see is of \d\d:\d\d:\d\d", banner)
        assert shown.page.locator("#nodes .name").all_inner_texts() == ["node0"], "the last state stays"
        assert violations(shown) == []
        cluster.nodes[0].start()
        cluster.wait_ready()
        shown.state("expired")
        assert "since its start" in shown.text("#banner")
        new = url_of(cluster.nodes[0])
        shown.page.evaluate("hash => { location.hash = hash; }", new.partition("#")[2])
        shown.state("live")
        assert shown.page.locator("#banner").is_hidden()


def test_a_frozen_node_is_said_to_be_late(shown: Shown) -> None:
    with daemons(1) as cluster:
        node = cluster.nodes[0]
        shown.open(url_of(node))
        node.freeze()
        shown.state("late", "silent")
        assert "answer" in shown.text("#banner")
        node.thaw()
        shown.state("live")


def test_a_token_that_expires(shown: Shown, loaded: Cluster) -> None:
    shown.open(url_of(loaded.nodes[0], valid_s=8.0))
    assert "The token expires in" in shown.text("#banner")
    shown.state("expired")
    assert "The token has expired; `tokenlake page` prints an address with a new one" in shown.text("#banner")
    asked = len(shown.requests)
    assert shown.page.evaluate("sessionStorage.length") == 0
    shown.page.reload()
    shown.state("none")
    assert [url for url in shown.requests[asked:] if "page.json" in url] == []


@pytest.mark.parametrize("size", SIZES)
def test_a_hundred_nodes_with_hostile_names(browser: Any, pages: tuple[MetricsServer, Any], size: str) -> None:
    tab = Shown(browser, SIZES[size])
    name = HOSTILE + "-with-a-name-that-does-not-end" * 5
    tab.open(made(pages, Made(compressed(document(100, 1000, name, tenant="")))))
    tab.until("() => document.querySelectorAll('#nodes .node').length === 100")
    assert tab.page.evaluate("window.hacked") is None
    assert tab.page.locator("#main img, #main script").count() == 0
    shown_name = tab.page.locator("#nodes .name").nth(1).inner_text()
    assert "<img src=x onerror=" in shown_name
    assert "\u202e" not in tab.text("#main"), "no name turns the direction of the text around it"
    assert "900 more not shown" in tab.text("#tenant-note")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    assert violations(tab) == []
    assert tab.wrong == []
    tab.close()


def test_behind_a_proxy_under_a_path(shown: Shown, loaded: Cluster) -> None:
    url = url_of(loaded.nodes[0])
    base, _, fragment = url.partition("#")

    def forward(route: Any) -> None:
        path = route.request.url.partition("/pool/a/")[2]
        route.fulfill(response=route.fetch(url=base + path))

    shown.page.route("**/pool/a/**", forward)
    shown.open(f"https://ops.example/pool/a/#{fragment}")
    assert "gpu-a" in shown.text("h1")
    assert all(each.startswith("https://ops.example/pool/a/") for each in shown.requests)


def test_no_frame_shows_it(browser: Any, loaded: Cluster) -> None:
    tab = Shown(browser)
    inner = f"http://127.0.0.1:{loaded.nodes[0].metrics_port}/"
    tab.page.route(
        "**/outer", lambda route: route.fulfill(body=f"<iframe src='{inner}'></iframe>", content_type="text/html")
    )
    tab.page.goto("http://localhost:1/outer")
    frame = tab.page.frames[-1]
    assert frame.url.startswith("chrome-error:"), "the browser shows an error in place of the page"
    assert frame.locator("#gate").count() == 0
    tab.close()


def test_a_hidden_tab_asks_nothing(shown: Shown, loaded: Cluster) -> None:
    shown.open(url_of(loaded.nodes[0]))
    shown.page.evaluate(
        """() => { Object.defineProperty(document, 'hidden', { value: true, configurable: true });
        document.dispatchEvent(new Event('visibilitychange')); }"""
    )
    # An answer that is on its way may still come.
    shown.page.wait_for_load_state("networkidle")
    asked = len(shown.requests)
    shown.page.evaluate("() => new Promise(done => setTimeout(done, 3000))")
    assert len(shown.requests) == asked
    shown.page.evaluate("() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); }")
    with shown.page.expect_response("**/page.json", timeout=LIMIT_MS) as answer:
        pass
    assert json.loads(answer.value.body())["node"] == "gpu-a"
