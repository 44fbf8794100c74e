"""Tenants: which processes may connect, as which tenant, and how many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT, Prompt, daemons, outcomes, read, store
from tests.server.raw import Raw
from tests.server.scene import BLUE, RED, tenants, tenants_text
from tokenlake.config import load_config
from tokenlake.errors import CredentialRefused, Refused
from tokenlake.wire import Code, engine
from tokenlake_client import Pool
from tokenlake_server.engines.tenants import Tenants

pytestmark = pytest.mark.live


def opened(path: Path, token: str) -> set[int]:
    """The regions, of four, that a process with this token can map; the others are refused by number."""
    regions = set()
    with Raw.joined(path, token=token) as raw:
        for region in range(4):
            for write in (False, True):
                raw.send(engine.OpenRegion(9, region, write))
                reply = raw.reply()
                if isinstance(reply, engine.Region):
                    regions.add(region)
                else:
                    assert isinstance(reply, engine.Failed)
                    assert reply.kind == "CredentialRefused"
                    assert f"region {region} " in reply.reason
    return regions


def test_tenants_cannot_read_each_others_segments(tmp_path: Path) -> None:
    file = tenants(tmp_path)
    prompt = Prompt(80, 5)
    with daemons(config=file) as cluster:
        path = cluster.nodes[0].socket
        for token in (None, "no-token", "red-token-012345678", ""):
            with pytest.raises(CredentialRefused) as refused:
                Pool.connect(path, LAYOUT, token, deadlines=PATIENT)
            assert not token or token not in str(refused.value)
        red, blue = (Pool.connect(path, LAYOUT, token, deadlines=PATIENT) for token in (RED, BLUE))
        with red, blue:
            assert (red.engine.tenant, blue.engine.tenant) == ("red", "blue")
            store(red, prompt)
            keys = red.prefix(prompt.tokens).keys
            assert not set(keys) & set(blue.prefix(prompt.tokens).keys)
            with blue.match(keys) as lease:
                assert lease.hits == 0, "not even with the other tenant's keys"
            assert outcomes(store(blue, prompt)) == {Code.COMMITTED}
            assert read(red, prompt) == read(blue, prompt) == 5
            mapped, others = opened(path, RED), opened(path, BLUE)
            assert mapped
            assert others
            assert not mapped & others
            with pytest.raises(Refused, match="another tenant"):
                Pool.connect(path, LAYOUT, BLUE, session=red.engine.session, deadlines=PATIENT)


def of(text: str) -> Tenants:
    return Tenants(load_config(toml_text=text, environ={}, flags={"node": "a"}, uid=os.getuid()).config)


def test_a_caller_that_names_no_tenant_is_told_how() -> None:
    made = of(tenants_text())
    with pytest.raises(CredentialRefused, match="--tenant NAME"):
        made.of_caller("", None)


def test_the_query_engine_needs_no_allowed_uid(tmp_path: Path) -> None:
    """It runs as the daemon's user, who should not be allowed where there are several tenants."""
    made = of(tenants_text(allowed=os.getuid() + 1))
    assert made.identify(os.getuid(), f"{made.query_credential}:blue").name == "blue"
    for token in (BLUE, None, f"{made.query_credential}:green", ":blue"):
        with pytest.raises(CredentialRefused):
            made.identify(os.getuid(), token)


CONNECT_AS_NOBODY = """
import os, sys
from tests.robustness.live import LAYOUT, PATIENT
from tokenlake_client import Pool
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    Pool.connect(sys.argv[1], LAYOUT, deadlines=PATIENT)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_uid_that_is_not_allowed() -> None:
    with daemons() as cluster:
        node = cluster.nodes[0]
        node.socket.chmod(0o666)
        cluster.directory.chmod(0o755)
        ended = subprocess.run(
            [sys.executable, "-c", CONNECT_AS_NOBODY, str(node.socket)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        assert "CredentialRefused uid 65534 may not use this daemon" in ended.stdout, ended
