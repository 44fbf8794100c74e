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


def test_tokens_leave_the_machine_by_consent_only() -> None:
    """The tokens of prompts leave the machine only where the file says so."""
    beyond = STREAM.replace("127.0.0.1", "0.0.0.0")
    with pytest.raises(ConfigurationError, match="beyond_loopback = true.*tokens of prompts"):
        load(beyond)
    assert load(beyond + "beyond_loopback = true").config.kv_events[0].endpoint.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[kv_events]]\nmodel = 'm'", "a model and an endpoint"),
        (STREAM + "block_tokens = 0", "block_tokens"),
        (STREAM + "medium = 'GPU'", "medium"),
        (STREAM + "encoding = 'xml'", "encoding"),
        (STREAM + "tenant = 'nobody'", "tenants of this daemon"),
        (STREAM + "topics = 'a'", "topics"),
        (STREAM + "topic = ''", "topic"),
        (STREAM + "replay = '127.0.0.1:5557'", "each address once"),
        (STREAM + STREAM.replace("5557", "5559"), "each tenant and model once"),
        (STREAM.replace("127.0.0.1:5557", "localhost:5557"), "IP:PORT"),
        ("kv_events = 5", "array of tables"),
    ],
)
def test_a_stream_that_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        load(text)
