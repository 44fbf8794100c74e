"""The log names the caller of the control plane, the operation, its arguments and its outcome."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.robustness.live import LAYOUT, Prompt, daemons, store, wait_until
from tests.server.control.scene import certificates, local, remote, served
from tokenlake.errors import CredentialRefused, TokenLakeError
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live


class Scene(NamedTuple):
    cluster: Cluster
    node: Node
    address: str
    ca: Path

    def lines(self) -> list[dict[str, Any]]:
        """The objects of the log about calls."""
        found = map(json.loads, self.node.log.read_text().splitlines())
        return [each for each in found if each["logger"].endswith("call_log")]

    def last(self, operation: str) -> dict[str, Any]:
        """The newest line about an operation, once there is one."""
        wait_until(lambda: any(each["fields"]["operation"] == operation for each in self.lines()), operation)
        return [each for each in self.lines() if each["fields"]["operation"] == operation][-1]


@pytest.fixture(scope="module")
def one() -> Iterator[Scene]:
    cluster = Cluster(1, "4MiB", "1MiB", match_deadline_ms="2000", log_format="json", log_level="debug")
    (address,) = served(cluster).values()
    with cluster:
        yield Scene(cluster, cluster.nodes[0], address, cluster.directory / "ca")


def user() -> str:
    return f"uid {os.getuid()} ({pwd.getpwuid(os.getuid()).pw_name}) at the control socket"


def test_a_grant_is_logged_without_its_token(one: Scene) -> None:
    with local(one.node) as control:
        token = control.grant_page(valid_s=60).token
    line = one.last("GrantPage")
    assert line["level"] == "info"
    assert "valid_s=60" in line["fields"]["arguments"]
    assert token not in one.node.log.read_text()


def test_a_change_over_the_socket_names_the_user(one: Scene) -> None:
    with one.cluster.connect(0, LAYOUT) as pool, local(one.node) as control:
        prompt = Prompt(1, 3)
        store(pool, prompt)
        control.evict(keys=list(pool.prefix(prompt.tokens).keys))
    line = one.last("Evict")
    assert line["level"] == "info"
    assert line["fields"]["caller"] == user()
    assert line["fields"]["arguments"] == "keys: 96 bytes"
    assert line["message"] == f"{user()} called Evict(keys: 96 bytes): done: evicted=3"


def test_a_read_is_logged_at_debug(one: Scene) -> None:
    with local(one.node) as control:
        control.status()
    assert one.last("GetStatus")["level"] == "debug"


def test_a_change_over_tls_names_the_certificate(one: Scene) -> None:
    with remote(one.address, "node0", certificates(one.ca, "alice", "admin")) as control:
        control.evict(everything=True)
    line = one.last("Evict")
    assert line["fields"]["caller"] == "'alice' (admin)"
    assert line["fields"]["outcome"] == "done"


def test_a_refused_call_is_a_warning(one: Scene) -> None:
    bob = certificates(one.ca, "bob", "reader")
    with remote(one.address, "node0", bob) as control, pytest.raises(CredentialRefused):
        control.evict(everything=True)
    line = one.last("Evict")
    assert (line["level"], line["fields"]["outcome"]) == ("warning", "CredentialRefused")
    assert "'bob' does not have" in line["message"]


def test_arguments_forge_no_line(one: Scene) -> None:
    with local(one.node) as control, pytest.raises(TokenLakeError):
        control.remove("x\n2026-01-01T00:00:00Z INFO forged: 'root' called Remove()\u2028")
    raw = one.node.log.read_text()
    assert raw.isascii()
    assert all(json.loads(line)["time"] for line in raw.splitlines())
    assert "forged" in one.last("Remove")["message"]
    with daemons(1) as cluster:
        with local(cluster.nodes[0]) as control, pytest.raises(TokenLakeError):
            control.remove("x\n2026-01-01T00:00:00Z INFO forged\u2028")
        log = cluster.nodes[0].log
        wait_until(lambda: "forged" in log.read_text(), "the call is in the log")
        assert not [line for line in log.read_text().splitlines() if line.startswith("2026-01-01")]
