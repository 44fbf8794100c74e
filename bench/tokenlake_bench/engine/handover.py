"""`tokenlake bench handover`: prompts that one engine computes and another one decodes, beside a bare copy of the same
bytes, and requests that move from one engine to another."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake.layout import Layout
from tokenlake_bench.engine.command import VLLM_PYTHON
from tokenlake_bench.engine.environment import check_interpreter
from tokenlake_bench.engine.families import PATIENCE
from tokenlake_bench.engine.workload import prompt
from tokenlake_bench.report import table, write_json
from tokenlake_testing.children import end_with_parent
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.tiny_model import TinyModel, save_tiny_model

MODEL: Final = TinyModel(hidden=256, intermediate=512, layers=16, heads=4, kv_heads=4)
"""32 KiB of cache for each token, so that the cache of 4,000 tokens takes at least 50 ms to copy."""
NEW_TOKENS: Final = 8
FETCH_MS: Final = 2000
"""Deadline of the transfers of a load, with which other programs on the machine cost no transfer."""
PIECE: Final = 32 << 20
ROOM: Final = 1024
PREFILL: Final = {"do_remote_decode": True, "do_remote_prefill": False}
MOVES: Final = {"do_remote_prefill": True}


@dataclass(frozen=True, slots=True)
class HandoverArguments:
    """Arguments of the command `bench handover`; the command's options describe them."""

    handovers: int = 100
    tokens: int = 700
    long_tokens: int = 4000
    repeats: int = 5
    nodes: int = 2
    python: Path | None = None
    json_file: Path | None = None


def run_handover(arguments: HandoverArguments) -> dict[str, Any]:
    """Run the benchmark, print its result and return it; docs/results/handover.md describes the keys."""
    if arguments.nodes not in (1, 2):
        raise ConfigurationError("nodes", arguments.nodes, "1 or 2")
    python = str(arguments.python or VLLM_PYTHON.absolute())
    check_interpreter(python, "vllm")
    with tempfile.TemporaryDirectory(prefix="tokenlake-bench-") as name, ExitStack() as stack:
        directory = Path(name)
        model = save_tiny_model(directory / "model", MODEL)
        cluster = stack.enter_context(Cluster(arguments.nodes, "1GiB", "64MiB"))
        options: dict[str, Any] = {
            "kv_cache_memory_bytes": 512 << 20,
            "max_model_len": max(arguments.tokens, arguments.long_tokens) + ROOM,
            "max_num_batched_tokens": 1024,
        }
        engines = []
        for number, node in enumerate((None, cluster.nodes[0], cluster.nodes[-1])):
            pool = None if node is None else {"socket": str(node.socket), **PATIENCE, "fetch_ms": FETCH_MS}
            engine = Engine(model, directory / f"{number}.log", pool, python=python, **options)
            stack.callback(engine.close)
            engines.append(engine)
        bench = _Bench(arguments, *engines)
        result = bench.complete() | bench.timed() | bench.moves() | {"load_average": os.getloadavg()[0]}
    Console().print(table("hand-overs; ms are medians", (), [(name, _text(value)) for name, value in result.items()]))
    write_json(result, arguments.json_file)
    return result


def _text(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


class _Bench:
    """An engine without the pool, one that computes prompts, and one that decodes them."""

    def __init__(self, arguments: HandoverArguments, plain: Engine, first: Engine, second: Engine) -> None:
        self._arguments = arguments
        self._plain = plain
        self._first = first
        self._second = second

    def _prefill(self, tokens: Sequence[int]) -> Any:
        """Let the first engine compute a prompt. Returns the fields of its answer."""
        (fields,) = self._first.timed([tokens], 1, params=PREFILL).params
        return fields

    def complete(self) -> dict[str, Any]:
        """Hand prompts over at once, and count those of which the second engine computed one token."""
        equal = True
        before = self._second.call("counts")
        for number in range(self._arguments.handovers):
            tokens = prompt(self._arguments.tokens + number, f"complete {number}")
            answer = self._second.timed([tokens], NEW_TOKENS, params=self._prefill(tokens))
            if number < self._arguments.repeats:
                equal = equal and answer.tokens == self._plain.generate([tokens], NEW_TOKENS)
        after = self._second.call("counts")
        return {
            "nodes": self._arguments.nodes,
            "handovers": self._arguments.handovers,
            "complete": after["prefills_taken"] - before["prefills_taken"],
            "tokens_equal": equal,
        }

    def timed(self) -> dict[str, Any]:
        """The time to the first token of long prompts at the second engine, at once and after the first engine has
        stored them, beside a bare copy of the same bytes."""
        layout = Layout.decode(bytes.fromhex(self._second.call("layout")))
        segments = -(-self._arguments.long_tokens // layout.segment_tokens)
        samples: dict[str, list[float]] = {}
        wire = _Wire()
        try:
            for number in range(self._arguments.repeats):
                for name in ("at_once", "stored"):
                    tokens = prompt(self._arguments.long_tokens, f"{name} {number}")
                    fields = self._prefill(tokens)
                    if name == "stored":
                        self._first.call("flush")
                    run = self._second.timed([tokens], 1, params=fields)
                    samples.setdefault(f"first_token_{name}_ms", []).append(1e3 * run.seconds)
                    self._second.call("forget")
                for name, seconds in self._second.call("bare_copy", segments=segments).items():
                    samples.setdefault(name, []).append(1e3 * seconds)
                samples.setdefault("wire_ms", []).append(1e3 * wire.receive(segments * layout.segment_bytes))
                run = self._plain.timed([prompt(self._arguments.long_tokens, f"plain {number}")], 1)
                samples.setdefault("computed_ms", []).append(1e3 * run.seconds)
        finally:
            wire.close()
        medians = {name: median(values) for name, values in samples.items()}
        bare_ms = medians["cache_copy_ms"] + (medians["wire_ms"] if self._arguments.nodes > 1 else 0.0)
        return {
            "prompt_tokens": self._arguments.long_tokens,
            "bytes": segments * layout.segment_bytes,
            **medians,
            "bare_ms": bare_ms,
            "ratio_stored": medians["first_token_stored_ms"] / bare_ms,
            "ratio_at_once": medians["first_token_at_once_ms"] / bare_ms,
        }

    def moves(self) -> dict[str, Any]:
        """Abort requests at the first engine while they generate, and let the second one go on. Returns the largest
        number of tokens that it computed."""
        most, equal = 0, True
        for number in range(self._arguments.repeats):
            tokens = prompt(self._arguments.tokens + 31 * number, f"moves {number}")
            generated = self._first.call("aborted", prompt=tokens, tokens=20 + 13 * number)
            moved = [*tokens, *generated]
            answer = self._second.timed([moved], NEW_TOKENS, params=MOVES)
            most = max(most, len(moved) - answer.cached)
            expected = self._plain.generate([tokens], len(generated) + NEW_TOKENS)[0]
            equal = equal and [*generated, *answer.tokens[0]] == expected
        return {"moves": self._arguments.repeats, "tokens_computed_after_move": most, "moved_tokens_equal": equal}


class _Wire:
    """Another process that sends as many bytes as it is asked for, over bare TCP; `close` ends it."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            context = multiprocessing.get_context("spawn")
            self._process = context.Process(target=_send, args=(listener.getsockname(),), daemon=True)
            self._process.start()
            self._sock, _ = listener.accept()
        self._memory = memoryview(bytearray(PIECE))

    def receive(self, nbytes: int) -> float:
        """Seconds in which `nbytes` arrive from the other process."""
        began = time.perf_counter()
        self._sock.sendall(nbytes.to_bytes(8, "little"))
        while nbytes:
            received = self._sock.recv_into(self._memory[: min(PIECE, nbytes)], 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionError("the other process of the bare transfers has ended")
            nbytes -= received
        return time.perf_counter() - began

    def close(self) -> None:
        """End the other process."""
        self._sock.close()
        self._process.join()


def _send(address: tuple[str, int]) -> None:
    end_with_parent()
    memory = memoryview(bytearray(PIECE))
    with socket.create_connection(address) as sock:
        while asked := sock.recv(8, socket.MSG_WAITALL):
            nbytes = int.from_bytes(asked, "little")
            for start in range(0, nbytes, PIECE):
                sock.sendall(memory[: min(PIECE, nbytes - start)])
