"""`tokenlake explain` with real daemons, and the name that goes with a request through all logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result

from tests.operator.scene import run
from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT,
    PATIENT_S,
    SEGMENT_TOKENS,
    Prompt,
    daemons,
    store,
    wait_told,
    wait_until,
)
from tests.server.scene import OF_THIS_USER, RED, tenants
from tokenlake.errors import CredentialRefused
from tokenlake.wire.funnel import MissReason
from tokenlake_client import MatchOptions, Pool
from tokenlake_operator.explain import ask, explain
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    file = tenants(tmp_path_factory.mktemp("explain"), blue=OF_THIS_USER)
    with daemons(3, config=file) as cluster:
        yield cluster


def command(socket: Path, *arguments: str, token: str = "") -> Result:
    """`tokenlake explain` of a user with that token."""
    return run(explain, "--socket", socket, *arguments, env={"TOKENLAKE_ENGINE_CREDENTIAL": token} if token else None)


def test_only_the_tenant_of_a_request_is_answered(cluster: Cluster) -> None:
    writer, reader = cluster.nodes[0].socket, cluster.nodes[1].socket
    prompt = Prompt(1, 12)
    with (
        Pool.connect(writer, LAYOUT, RED, deadlines=PATIENT) as pool,
        Pool.connect(reader, LAYOUT, RED, deadlines=PATIENT) as other,
    ):
        store(pool, prompt)
        wait_told(cluster)
        longer = Prompt(2, 3, shared=prompt)
        keys = other.prefix(longer.tokens).keys
        options = MatchOptions(request="a name", prompt_tokens=len(longer.tokens) + 7)
        with other.match(keys, options, deadline_s=PATIENT_S) as lease:
            assert lease.hits == prompt.segments
            here = lease.local_hits
            arrays = lease.fetch(deadline_s=LIMIT_S)
            assert (len(arrays), prompt.wrong(arrays)) == (prompt.segments, 0)
            del arrays
            lease.takes(3, len(longer.tokens))
        other.match([]).release()
        answered = command(reader, "a name", "--json", token=RED)
        assert answered.exit_code == 0, answered.stderr
        funnel = json.loads(answered.stdout)
        hits, missing = prompt.segments * SEGMENT_TOKENS, 3 * SEGMENT_TOKENS
        assert (funnel["request"], funnel["node"], funnel["ideal"]) == ("a name", "node1", hits + missing + 7)
        assert funnel["here"] == here * SEGMENT_TOKENS
        assert sum(funnel["elsewhere"].values()) == funnel["fetched"] == hits - here * SEGMENT_TOKENS
        assert (funnel["supplied"], funnel["engine_had"], funnel["held"]) == (hits - 3, 3, 0)
        assert {each["reason"]: each["tokens"] for each in funnel["missed"]} == {
            MissReason.NEVER_STORED: missing,
            MissReason.TOO_SHORT: 7,
        }
        table = command(reader, "a name", token=RED)
        assert table.exit_code == 0
        for shown in ("a name", "ideal", "indexed", "engine had", "supplied", f"{hits:,}", "never stored", "too short"):
            assert shown in table.stdout
        assert f"leaves what is known within the tokens {hits} to {hits + SEGMENT_TOKENS - 1}\n" in table.stdout
        # No output holds a key, a token or a secret.
        for output in (answered.stdout, table.stdout):
            assert not any(secret in output for secret in (RED, "aa" * 8, "bb" * 8, keys[0].hex()[:16]))
        # Another tenant (by this user's uid), a node that did not serve the request, and another name find nothing.
        for stranger in (
            command(reader, "a name"),
            command(writer, "a name", token=RED),
            command(reader, "b name", token=RED),
        ):
            assert stranger.exit_code == 1
            assert "remembers no request" in stranger.stderr
            assert not stranger.stdout


def test_an_unknown_token_is_refused_and_not_shown(cluster: Cluster) -> None:
    refused = command(cluster.nodes[0].socket, "r", token="no-such-token")
    assert refused.exit_code == 1
    assert "the token belongs to no tenant" in refused.stderr
    assert "no-such-token" not in refused.stderr
    with pytest.raises(CredentialRefused):
        ask(cluster.nodes[0].socket, "r", "no-such-token")


def test_the_beginning_of_a_name_and_the_newest_requests(cluster: Cluster) -> None:
    """The API of an engine may return a shorter id than the one that the engine gives the pool."""
    socket = cluster.nodes[2].socket
    names = [f"cmpl-mine-{number}-0-85432ec{number}" for number in (1, 12, 3)]
    with Pool.connect(socket, LAYOUT, RED, deadlines=PATIENT) as pool:
        for name in names:
            pool.match(pool.prefix(Prompt(4, 1).tokens).keys, MatchOptions(request=name)).release()
    by_prefix = command(socket, "cmpl-mine-3", "--json", token=RED)
    assert json.loads(by_prefix.stdout)["request"] == names[2]
    ambiguous = command(socket, "cmpl-mine-1", token=RED)
    assert ambiguous.exit_code == 1
    assert "several requests begin with 'cmpl-mine-1'" in ambiguous.stderr
    assert [name for name in names if name in ambiguous.stderr] == names[:2]
    newest = command(socket, "--last", "2", "--json", token=RED)
    assert [json.loads(line)["request"] for line in newest.stdout.splitlines()] == [names[2], names[1]]
    for words in ((), ("a", "--last", "2")):
        assert "either REQUEST_ID or --last N" in command(socket, *words, token=RED).stderr
    assert "remembers no request of this tenant" in command(socket, "--last", "2").stderr


def test_a_name_controls_no_terminal(cluster: Cluster) -> None:
    with Pool.connect(cluster.nodes[0].socket, LAYOUT, RED, deadlines=PATIENT) as pool:
        names = [f"\x1b]0;title\x07\x9b31m-{number}" for number in (1, 2)]
        for name in names:
            pool.match(pool.prefix(Prompt(3, 1).tokens).keys, MatchOptions(request=name)).release()
        one = command(cluster.nodes[0].socket, names[0], token=RED)
        both = command(cluster.nodes[0].socket, "\x1b]0", token=RED)
        for text in (one.stdout, both.stderr):
            assert r"\x1b]0;title\x07\x9b31m-1" in text
            assert not {"\x1b", "\x07", "\x9b"} & set(text)


def logged(nodes: list[Node], text: str) -> bool:
    """True when the log of one of the nodes has the text."""
    return any(text in node.log.read_text() for node in nodes)


def test_all_logs_name_a_request(caplog: pytest.LogCaptureFixture) -> None:
    with daemons(3, log_level="debug") as cluster:
        check(cluster, caplog)


def check(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    writer, reader, third = cluster.nodes
    prompt = Prompt(1, 20)
    with cluster.connect(0, LAYOUT) as pool, cluster.connect(1, LAYOUT) as other, caplog.at_level(logging.DEBUG):
        with pool.store(pool.prefix(prompt.tokens).keys, request="the store") as write:
            write.fill(prompt.fill)
        assert logged([writer], "'the store': a Prepare")
        wait_told(cluster)
        with other.match(other.prefix(prompt.tokens).keys, MatchOptions(request="the match")) as lease:
            assert lease.request == "the match"
            assert lease.local_hits < lease.hits == prompt.segments
            assert len(lease.fetch(deadline_s=LIMIT_S)) == prompt.segments
        assert logged([reader], "'the match': a Match")
        assert logged([reader], "'the match': a Fetch")
        for nodes, text in (([writer, third], "'the match': a Lookup"), ([writer], "'the match': node1 pulls")):
            wait_until(lambda nodes=nodes, text=text: logged(nodes, text), text)  # type: ignore[misc]
        assert "'the match': match of 20 segments" in caplog.text
        with other.match([]) as unnamed:
            assert unnamed.request
            assert logged([reader], repr(unnamed.request))
