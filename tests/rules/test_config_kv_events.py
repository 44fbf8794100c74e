"""The streams of KV events in the configuration file."""

from __future__ import annotations

import pytest

from tests.rules.settings import load
from tokenlake.config import Address
from tokenlake.errors import ConfigurationError

STREAM = '[[kv_events]]\nmodel = "m/x"\nendpoint = "127.0.0.1:5557"\n'


def test_a_stream_and_its_defaults() -> None:
    (stream,) = load('node = "n1"\n' + STREAM + 'replay = "tcp://127.0.0.1:5558"').config.kv_events
    assert (stream.endpoint, stream.replay) == (Address("127.0.0.1", 5557), Address("127.0.0.1", 5558))
    assert (stream.tenant, stream.topic, stream.block_tokens) == ("default", "kv@node:n1@m/x", 16)
    assert (stream.medium, stream.encoding) == ("CPU", "map")


def test_a_stream_is_read_at_a_unix_socket_by_default() -> None:
    """Beside the socket of engines, for the daemon's user and root, and for those that the file names."""
    (stream,) = load("socket = '/run/x/tokenlake-a.sock'\n[[kv_events]]\nmodel = 'm'\nuids = [1001]").config.kv_events
    assert (stream.endpoint, stream.replay, stream.uids) == ("/run/x/tokenlake-a.kv", None, (1001,))
    (named,) = load(STREAM.replace("127.0.0.1:5557", "ipc:///run/x/kv")).config.kv_events
    assert named.endpoint == "/run/x/kv"
    assert not stream.open_to_all


def test_tokens_leave_the_machine_by_consent_only() -> None:
    """The tokens of prompts leave the machine only where the file says so."""
    beyond = STREAM.replace("127.0.0.1", "0.0.0.0")
    with pytest.raises(ConfigurationError, match="beyond_loopback = true.*tokens of prompts"):
        load(beyond)
    (stream,) = load(beyond + "beyond_loopback = true").config.kv_events
    assert stream.endpoint == Address("0.0.0.0", 5557)
    assert stream.open_to_all


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[kv_events]]\nendpoint = '127.0.0.1:5557'", "required field `model`"),
        ("[[kv_events]]\nmodel = 'a'\n[[kv_events]]\nmodel = 'b'", "an 'endpoint' of its own"),
        (STREAM.replace("127.0.0.1:5557", "ipc://relative"), "ipc:///PATH or IP:PORT"),
        (STREAM.replace("127.0.0.1:5557", "/" + "x" * 107), "at most 107 bytes"),
        ("socket = '/run/a.sock'\n[[kv_events]]\nmodel = 'm'\nendpoint = '/run/a.sock'", "is given twice"),
        (STREAM + "uids = ['nobody']", "uids"),
        (STREAM + "block_tokens = 0", "block_tokens"),
        (STREAM + "medium = 'GPU'", "medium"),
        (STREAM + "encoding = 'xml'", "encoding"),
        (STREAM + "tenant = 'nobody'", "tenants of this daemon"),
        (STREAM + "topics = 'a'", "topics"),
        (STREAM + f"topic = '{'x' * 513}'", "topic"),
        (STREAM + "replay = '127.0.0.1:5557'", "each address once"),
        (STREAM + STREAM.replace("5557", "5559"), "each tenant and model once"),
        (STREAM.replace("127.0.0.1:5557", "localhost:5557"), "IP:PORT"),
        ("kv_events = 5", "array of tables"),
    ],
)
def test_a_stream_that_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        load(text)
