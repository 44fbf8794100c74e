"""Two engine processes and a real daemon: one computes and stores, the other reads."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.models import family, prompt
from tests.robustness.live import PATIENT
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine
from tokenlake_testing.children import start_child

pytestmark = pytest.mark.live

SEGMENT = 16
PROMPTS = 4
SERVE = "import sys; from tokenlake.command import main; sys.exit(main())"

OTHER_ENGINE = """
import json, sys, torch
from tests.engines.test_live import greedy, prompts
from tests.engines.models import family
from tests.robustness.live import PATIENT
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine
torch.set_num_threads(1)
model = family("llama-gqa")
with TokenLakeEngine(model, sys.argv[1], EngineOptions(segment_tokens=16, deadlines=PATIENT)) as engine:
    tokens = [greedy(engine.generate, ids) for ids in prompts()]
    print(json.dumps([tokens, engine.counts.tokens_hit, engine.counts.failures]))
"""


def prompts() -> list[Any]:
    return [torch.tensor([prompt(5 * SEGMENT + seed, seed)]) for seed in range(PROMPTS)]


def greedy(generate: Any, ids: Any) -> list[list[int]]:
    output: list[list[int]] = generate(ids, max_new_tokens=12, do_sample=False).tolist()
    return output


class Daemon:
    """A daemon process that can be killed and started again at the same socket."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "socket"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Returns once it serves."""
        options = ["--memory", "64MiB", "--socket", str(self.socket), "--node", "a", "--metrics", ""]
        self.process = start_child(
            [sys.executable, "-c", SERVE, "serve", *options, "--listen", f"127.0.0.1:{self.port}"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        assert any("is ready" in line for line in self.process.stderr), "the daemon ended before it was ready"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path)
    yield running
    running.kill()


def test_another_process_uses_the_computed_segments(daemon: Daemon) -> None:
    model = family("llama-gqa")
    expected = [greedy(model.generate, ids) for ids in prompts()]
    with TokenLakeEngine(model, daemon.socket, EngineOptions(segment_tokens=SEGMENT, deadlines=PATIENT)) as engine:
        assert [greedy(engine.generate, ids) for ids in prompts()] == expected
        assert engine.flush(20)
        assert engine.counts.tokens_hit == engine.counts.failures == 0
        assert engine.counts.tokens_not_stored == 0
    command = [sys.executable, "-c", OTHER_ENGINE, str(daemon.socket)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    tokens, hit, failures = json.loads(output.splitlines()[-1])
    assert tokens == expected
    # The first prompt ends with a segment, whose last token is left to compute.
    assert (hit, failures) == ((4 + 5 * (PROMPTS - 1)) * SEGMENT, 0)


def test_a_killed_daemon_changes_no_token(daemon: Daemon) -> None:
    model = family("llama-gqa")
    ids = prompts()[0]
    expected = greedy(model.generate, ids)
    with TokenLakeEngine(model, daemon.socket, EngineOptions(segment_tokens=SEGMENT, deadlines=PATIENT)) as engine:
        assert greedy(engine.generate, ids) == expected
        daemon.kill()
        assert greedy(engine.generate, ids) == expected
        daemon.start()
        hits = engine.counts.tokens_hit
        # The engine does not use a failed pool for a second, and its client reconnects meanwhile.
        while engine.counts.tokens_hit == hits:
            assert greedy(engine.generate, ids) == expected
            engine.flush(20)
