"""An engine that cannot use the pool tells the daemon why."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.models import family, prompt
from tests.robustness.live import daemons, wait_until
from tests.server.control.scene import local
from tokenlake.wire import engine
from tokenlake_client.engines.common import connection as module
from tokenlake_client.engines.common.declined import declined
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine
from tokenlake_server.bulk.blocking_sockets import read_frame


def told(listener: socket.socket) -> Any:
    """The first message of the next connection."""
    with listener.accept()[0] as accepted:
        return engine.request_decoder.decode(read_frame(accepted, engine.MAX_FRAME))


def test_a_daemon_that_starts_later_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    path = tmp_path / "socket"
    connection = declined(path, None, "x" * 2 * engine.MAX_REASON)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(20)
        assert connection.get() is None
        assert told(listener) == engine.Bye("x" * engine.MAX_REASON)
        # The daemon has heard it: the next attempt is made after a pause.
        for thread in [connection._attempt]:
            assert thread is not None
            thread.join()
        listener.settimeout(0)
        assert connection.get() is None
        with pytest.raises(BlockingIOError):
            listener.accept()
    connection.close()


@pytest.mark.live
def test_a_model_that_the_pool_cannot_serve_is_named() -> None:
    model = family("llama-gqa")
    model.config.quantization_config = {"bits": 4}
    ids = torch.tensor([prompt(40)])
    with daemons() as cluster:
        node = cluster.nodes[0]
        with (
            TokenLakeEngine(model, node.socket, EngineOptions(segment_tokens=16)) as refused,
            local(node) as control,
        ):
            wait_until(lambda: [each.reason for each in control.status().refused] == ["declined"], "it is shown")
            assert "LlamaForCausalLM: model field 'quantization_config' is set" in control.status().refused[0].problem
            assert refused.generate(ids, max_new_tokens=2).shape == (1, 42)
