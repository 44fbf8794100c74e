"""The page over HTTP: what everybody may read, what a token allows, and what a hostile browser or reader can do."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.operator.scene import control_of, run
from tests.page.scene import get
from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT, PATIENT_S, Prompt, daemons, store, wait_told, wait_until
from tests.server.control.scene import certificates, local, remote, served
from tests.server.scene import BLUE, OF_THIS_USER, RED, tenants
from tokenlake.errors import CredentialRefused, Refused
from tokenlake_client import MatchOptions, Pool
from tokenlake_operator.page import page
from tokenlake_server.page import http
from tokenlake_server.page.document import PageDocument
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live

POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    file = tenants(tmp_path_factory.mktemp("page"), blue=OF_THIS_USER, red="quota = 0.5")
    with daemons(2, config=file) as cluster:
        yield cluster


@pytest.fixture
def node(cluster: Cluster) -> Node:
    return cluster.nodes[0]


def granted(node: Node, tenant: str = "", valid_s: float = 0.0) -> str:
    """A token."""
    with local(node) as control:
        return control.grant_page(valid_s, tenant).token


def shown(node: Node, token: str) -> PageDocument:
    """The JSON of the page, which has all fields and no others."""
    answer = get(node.metrics_port, token=token)
    assert answer.status == 200, answer.body
    return msgspec.json.decode(answer.body, type=PageDocument)


@pytest.mark.parametrize("path", sorted(http.FILES))
def test_files_load_nothing_from_elsewhere(node: Node, path: str) -> None:
    answer = get(node.metrics_port, path)
    assert answer.status == 200
    assert answer.headers["Content-Security-Policy"].startswith(POLICY)
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    text = answer.body.decode()
    assert set(re.findall(r"https?://[^\"' )]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<style|style=|<script(?! type=\"module\" src=)|\bon[a-z]+=\"|innerHTML|eval\(", text)
    assert not re.search(r"(?:src|href|from|import|fetch\()\s*=?\s*[\"']/", text), "an address that is not relative"
    again = get(node.metrics_port, path, If_None_Match=answer.headers["ETag"])
    assert (again.status, again.body) == (304, b"")
    packed = get(node.metrics_port, path, Accept_Encoding="gzip")
    assert gzip.decompress(packed.body) == answer.body


def test_without_a_token_there_is_no_state(node: Node) -> None:
    token = granted(node)
    for given in (None, "", "x", token[:-2], "é" * 10, "a" * 5000, token + "AAAA"):
        answer = get(node.metrics_port, token=given and given.encode().decode("latin-1"))
        assert answer.status == 401, given
        assert "`tokenlake page` prints" in answer.json["error"]
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    basic = get(node.metrics_port, Authorization=f"Basic {token}")
    assert basic.status == 401
    query = get(node.metrics_port, f"/page.json?token={token}")
    assert query.status == 401
    assert get(node.metrics_port, "/health").json["healthy"]
    assert b"tokenlake_" in get(node.metrics_port, "/metrics").body


@pytest.mark.parametrize("path", ["/page.json", "/", "/page.js"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_the_page_can_only_be_read(node: Node, path: str, method: str) -> None:
    answer = get(node.metrics_port, path, granted(node), method=method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"


def test_no_other_path_is_served(node: Node) -> None:
    for path in ("/page.html", "/static/page.js", "/../page.js", "/page.js/", "/%2e%2e/document.py"):
        assert get(node.metrics_port, path).status == 404, path


def test_the_state_of_the_node(cluster: Cluster, node: Node) -> None:
    prompt = Prompt(1, 12)
    with (
        Pool.connect(node.socket, LAYOUT, RED, deadlines=PATIENT) as pool,
        Pool.connect(cluster.nodes[1].socket, LAYOUT, RED, deadlines=PATIENT) as other,
    ):
        store(other, prompt)
        wait_told(cluster)
        name = "<b>a & name</b>"
        options = MatchOptions(request=name, prompt_tokens=len(prompt.tokens) + 7)
        with pool.match(pool.prefix(prompt.tokens).keys, options, deadline_s=PATIENT_S) as lease:
            assert len(lease.fetch(deadline_s=LIMIT_S)) == 12
        token = granted(node)
        wait_until(lambda: shown(node, token).tokens.supplied > 0, "the tokens are counted")
        state = shown(node, token)
    assert (state.node, state.cluster, state.tenant) == (node.name, "tokenlake", "")
    assert state.tokens.asked == len(prompt.tokens) + 7
    assert [(each.name, each.state) for each in state.nodes] == [("node0", "this node"), ("node1", "connected")]
    assert [(each.name, each.quota_bytes) for each in state.tenants] == [("red", 2 << 20), ("blue", 4 << 20)]
    assert state.tenants[0].used_bytes == 12 * LAYOUT.segment_bytes
    assert [(each.node, each.received_bytes) for each in state.links] == [("node1", 12 * LAYOUT.segment_bytes)]
    assert [(each.tenant, each.newest) for each in state.prefixes] == [("red", name)]
    call = next(each for each in state.calls if each.call == "fetch")
    assert (call.tenant, call.request) == ("red", name)
    assert call.explanation is not None
    assert call.explanation.elsewhere == {"node1": 192}
    assert (call.explanation.supplied, [each.reason for each in call.explanation.missed]) == (192, ["too_short"])
    wait_until(lambda: "node1" in str(shown(node, token).events), "a sample tells of the connection")


def test_a_token_of_a_tenant_shows_that_tenant(cluster: Cluster, node: Node) -> None:
    with Pool.connect(node.socket, LAYOUT, RED, deadlines=PATIENT) as pool:
        store(pool, Prompt(2, 4))
        options = MatchOptions(request="secret of red")
        with pool.match(pool.prefix(Prompt(2, 4).tokens).keys, options, deadline_s=PATIENT_S) as lease:
            lease.fetch(deadline_s=LIMIT_S)
    blue = granted(node, "blue")
    state = shown(node, blue)
    assert state.tenant == "blue"
    assert [each.name for each in state.tenants] == ["blue"]
    text = get(node.metrics_port, token=blue).body
    assert b"red" not in text.replace(b'"requests"', b"").replace(b"shared", b"").replace(b"refused", b"")
    assert [each.name for each in shown(node, granted(node, "red")).tenants] == ["red"]


def test_callers_are_granted_what_they_may_see(tmp_path: Path) -> None:
    file = tenants(tmp_path, blue=OF_THIS_USER)
    cluster = Cluster(2, "4MiB", "1MiB", config=file)
    addresses = served(cluster)
    ca = cluster.directory / "ca"
    with cluster:
        at = addresses["node0"]
        port = cluster.nodes[0].metrics_port
        with remote(at, "node0", certificates(ca, "bob", role="reader", tenant="blue")) as control:
            token = control.grant_page().token
            assert get(port, token=token).json["tenant"] == "blue"
            with pytest.raises(CredentialRefused, match="only an admin"):
                control.grant_page(tenant="red")
            for wrong in (-1.0, 1e9, float("nan")):
                with pytest.raises(Refused, match="valid_s"):
                    control.grant_page(wrong)
        with (
            remote(at, "node0", certificates(ca, "eve", role="reader")) as control,
            pytest.raises(CredentialRefused, match="several tenants"),
        ):
            control.grant_page()
        with remote(at, "node0", certificates(ca, "root", role="admin")) as control:
            assert get(port, token=control.grant_page().token).json["tenant"] == ""
            with pytest.raises(CredentialRefused, match="no tenant 'nobody'"):
                control.grant_page(tenant="nobody")
        with remote(at, "node0", certificates(ca, "bob2", role="reader"), BLUE) as control:
            assert get(port, token=control.grant_page().token).json["tenant"] == "blue"


def test_a_token_ends(node: Node) -> None:
    token = granted(node, valid_s=1.0)
    first = get(node.metrics_port, token=token)
    assert first.status in (200, 401)
    wait_until(lambda: get(node.metrics_port, token=token).status == 401, "the token expires")
    assert "has expired" in get(node.metrics_port, token=token).json["error"]
    long = get(node.metrics_port, token=granted(node, valid_s=1000.0))
    assert 900 < float(long.headers["Token-Expires-In"]) <= 1000
    assert long.headers["Cache-Control"] == "no-store"


def test_a_token_ends_with_the_daemon() -> None:
    with daemons(1) as cluster:
        token = granted(cluster.nodes[0])
        assert get(cluster.nodes[0].metrics_port, token=token).status == 200
        cluster.nodes[0].kill()
        cluster.nodes[0].start()
        cluster.wait_ready()
        assert "since its start" in get(cluster.nodes[0].metrics_port, token=token).json["error"]


def test_many_viewers_share_one_state(node: Node) -> None:
    token, other = granted(node), granted(node)
    bodies: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: bodies.append(get(node.metrics_port, token=token).body)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bodies.append(get(node.metrics_port, token=other).body)
    made = {json.loads(body)["made_s"] for body in bodies}
    assert len(made) <= 2, "all ask within the time for which a state is fresh, or at its end"


def test_without_a_control_plane_it_says_so() -> None:
    with daemons(1, control_socket="") as cluster:
        port = cluster.nodes[0].metrics_port
        answer = get(port, token="x")
        assert answer.status == 503
        assert "has no control plane" in answer.json["error"]
        assert get(port, "/").status == 200


def test_the_command_prints_the_address(node: Node) -> None:
    result = run(page, "--socket", control_of(node), "--for", "60")
    assert result.stdout.startswith(f"http://127.0.0.1:{node.metrics_port}/#token=")
    assert "valid for 60.0 s at most" in result.stderr
    token = result.stdout.strip().partition("#token=")[2]
    assert shown(node, token).node == node.name
    told = json.loads(run(page, "--socket", control_of(node), "--tenant", "blue", "--json").stdout)
    assert shown(node, told["token"]).tenant == "blue"
    assert told["url"].endswith(told["token"])


def test_the_command_of_a_node_without_a_page() -> None:
    with daemons(0) as cluster:
        node = cluster.add("a")
        node.settings["metrics"] = ""
        node.start()
        wait_until(control_of(node).exists, "the control socket is there")
        result = run(page, "--socket", control_of(node))
    assert result.exit_code == 1
    assert "its setting 'metrics' is empty" in result.stderr
