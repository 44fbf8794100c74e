"""Daemons that publish KV events, prompts in their pool, and Dynamo's indexer."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.robustness.live import LIMIT_S, PATIENT, SEGMENT_TOKENS
from tests.robustness.matrix.proxy import Proxy
from tests.server.kv_events.readers import Llmd
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_client.control import Control
from tokenlake_testing.cluster import Cluster, Node
from tokenlake_testing.ports import reserve_port

BLOCK = 8
MODEL = "meta-llama/tiny"
ROUTERS = Path(__file__).parents[3] / ".venv-routers" / "bin" / "python"
"""The interpreter with Dynamo's indexer, `make install-routers`."""


class Stream:
    """The addresses of one stream of a node."""

    def __init__(self, node: str) -> None:
        self.pod = f"node:{node}"
        self.topic = f"kv@{self.pod}@{MODEL}"
        ports = [reserve_port() for _ in range(2)]
        self.events, self.replay = (f"127.0.0.1:{port}" for port in ports)
        self.endpoints = f"tcp://{self.events}", f"tcp://{self.replay}"

    def toml(self, **more: object) -> str:
        """The table of this stream."""
        fields = {"model": MODEL, "endpoint": self.events, "replay": self.replay, "block_tokens": BLOCK, **more}
        given = [f"{name} = {json.dumps(value)}" for name, value in fields.items() if value is not None]
        return "\n".join(["[[kv_events]]", *given, ""])


@contextlib.contextmanager
def publishing(
    nodes: int = 1, memory: str = "16MiB", module: str = "tokenlake_server", text: str = "", **more: object
) -> Iterator[tuple[Cluster, list[Stream]]]:
    """Daemons, each with a stream. `more`: further fields of the stream. `text`: further tables of the file."""
    patient = {"match_deadline_ms": "20000", "suspect_ms": "20000"}
    cluster = Cluster(nodes, memory, "1MiB", None, module, **patient)
    streams = [Stream(node.name) for node in cluster.nodes]
    for stream in streams:
        given = [str(more.get(name) or "") for name in ("endpoint", "replay")]
        stream.endpoints = tuple(  # type: ignore[assignment]
            f"ipc://{each.removeprefix('ipc://')}" if each else default
            for each, default in zip(given, stream.endpoints, strict=True)
        )
    for node, stream in zip(cluster.nodes, streams, strict=True):
        file = cluster.directory / f"{node.name}.toml"
        file.write_text(text + stream.toml(**more))
        file.chmod(0o600)
        node.settings["config"] = str(file)
    cluster.deadlines = PATIENT
    with cluster:
        yield cluster, streams


class Prompts:
    """A growing tree of prompts, most of which begin like earlier ones."""

    def __init__(self, seed: int = 1) -> None:
        self._draw = random.Random(seed)
        self.all: list[list[int]] = []

    def new(self) -> list[int]:
        tokens: list[int] = []
        if self.all and self._draw.random() < 0.7:
            earlier = self._draw.choice(self.all[-200:])
            tokens = earlier[: SEGMENT_TOKENS * self._draw.randint(0, len(earlier) // SEGMENT_TOKENS)]
        tokens = tokens + [self._draw.randrange(1 << 17) for _ in range(SEGMENT_TOKENS * self._draw.randint(1, 8))]
        self.all.append(tokens)
        return tokens


def fill(index: int, slot: NDArray[np.uint8]) -> None:
    slot[:64] = index % 251


def store(pool: Pool, tokens: Sequence[int], model: str = MODEL) -> int:
    """Store a prompt. Returns the number of its segments that were committed."""
    prefix = pool.prefix(tokens)
    contents = pool.engine.contents(prefix, tokens, range(len(prefix.keys)), model)
    return pool.store_all(prefix.keys, fill, patience=LIMIT_S, contents=contents).count(Code.COMMITTED)


def held(node: Node) -> set[bytes]:
    """The keys of the READY segments of a node."""
    found: set[bytes] = set()
    with Control.local(node.socket.with_suffix(".control"), call_s=LIMIT_S) as control:
        for message in control.events():
            found |= {bytes(each.key) for each in message.snapshot.segments}
            if message.snapshot.complete:
                return found
    raise AssertionError("the stream ended")


def expected(pool: Pool, keys: set[bytes], prompts: Sequence[Sequence[int]]) -> list[int]:
    """The number of the first tokens of each prompt that a node with these segments has."""
    found = []
    for tokens in prompts:
        chain = pool.prefix(tokens).keys
        found.append(SEGMENT_TOKENS * next((at for at, key in enumerate(chain) if bytes(key) not in keys), len(chain)))
    return found


def until(expected: Any, function: Callable[[], Any], limit_s: float = 2 * LIMIT_S) -> None:
    """Call the function until it returns `expected`."""
    end = time.monotonic() + limit_s
    while (found := function()) != expected:
        assert time.monotonic() < end, _difference(found, expected)
        time.sleep(0.05)


def _difference(found: Any, expected: Any) -> str:
    """The first pairs of two lists of one length that differ; both values where they are no such lists."""
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return str([pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]][:5])
    return f"{found!r}, not {expected!r}"


def beliefs(router: Llmd, stream: Stream, prompts: Sequence[Sequence[int]]) -> list[int]:
    return [router.tokens(tokens, MODEL, stream.pod) for tokens in prompts]


def agree(node: Node, stream: Stream, pool: Pool, router: Llmd, prompts: Sequence[Sequence[int]]) -> None:
    """The router comes to believe what the node has."""
    truth = expected(pool, held(node), prompts)
    until(truth, lambda: beliefs(router, stream, prompts))


class Dynamo:
    """NVIDIA Dynamo's standalone indexer, with one instance for each stream."""

    def __init__(self, directory: Path, streams: Sequence[Stream], python: Path) -> None:
        self.port = reserve_port()
        self.log = directory / "dynamo.log"
        flags = {"block-size": BLOCK, "port": self.port, "threads": 1, "model-name": MODEL}
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen([python, "-m", "dynamo.indexer", *words], stdout=log, stderr=log)
        self._ways = [Proxy(_address(stream.events)).__enter__() for stream in streams]
        self._streams = streams
        for number, (stream, way) in enumerate(zip(streams, self._ways, strict=True), 1):
            events, replay = f"tcp://127.0.0.1:{way.port}", stream.endpoints[1]
            instance = {"instance_id": number, "endpoint": events, "replay_endpoint": replay, "block_size": BLOCK}
            until(True, lambda instance=instance: self._registered(instance))  # type: ignore[misc]

    def _registered(self, instance: dict[str, object]) -> bool:
        with contextlib.suppress(OSError):
            self.post("/register", {**instance, "model_name": MODEL})
            return True
        assert self._process.poll() is None, self.log.read_text()
        return False

    def __enter__(self) -> Dynamo:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        for way in self._ways:
            way.__exit__()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)

    def tokens(self, tokens: Sequence[int], instance: int = 1) -> int:
        answer = self.post("/query", {"token_ids": list(tokens), "model_name": MODEL})
        return int(answer["instances"].get(str(instance), {}).get("longest_matched", 0))

    def lose(self, lose: bool) -> None:
        """Lose the events of all streams, or no more: connections are cut and refused, and what is sent meanwhile is
        lost."""
        for way, stream in zip(self._ways, self._streams, strict=True):
            way.target = ("127.0.0.1", 1) if lose else _address(stream.events)
            if lose:
                way.cut()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


@pytest.fixture
def python() -> Path:
    """The interpreter with Dynamo's indexer; the test is skipped without one."""
    if not ROUTERS.exists() or subprocess.run([ROUTERS, "-c", "import dynamo.indexer.main"], check=False).returncode:
        pytest.skip("Dynamo's indexer is not installed (make install-routers)")
    return ROUTERS
