"""LiteLLM's proxy as a process, with the plug-in, and small HTTP servers that stand for vLLM."""

from __future__ import annotations

import json
import os
import secrets
import socketserver
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Self

from tests.robustness.live import LAYOUT, SEGMENT_TOKENS
from tests.server.control.scene import local
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_testing.children import start_child
from tokenlake_testing.cluster import Cluster, parse_metrics
from tokenlake_testing.ports import reserve_port

ROUTERS = Path(__file__).parents[2] / ".venv-routers"
START_S = 90.0
WORKERS = ("--host", "127.0.0.1", "--timeout_worker_healthcheck", "90", "--num_workers")
DEADLINE_MS = 2000.0
"""The plug-in's deadline, in tests that are not about it."""
KEY = f"sk-{secrets.token_hex(32)}"


def under_way(cluster: Cluster) -> int:
    """Requests under way in the fleet, at the first node."""
    fleet = pb.Fleet(
        name="default",
        layers=LAYOUT.layers,
        segment_bytes=LAYOUT.segment_bytes,
        segment_tokens=SEGMENT_TOKENS,
        query_bytes=1,
    )
    with local(cluster.nodes[0]) as control:
        return control.report(pb.ReportRequest(fleet=fleet))


def tokens_of(text: str) -> list[int]:
    """The tokens of the stand-ins: the numbers in a text of numbers."""
    return [int(word) for word in text.split() if word.isdigit()]


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128


class Engine:
    """Answers chats and completions with its name, and `/tokenize`. `mode`: `well`; `no tokens` fails `/tokenize`;
    `silent` does not answer it; `down` fails all requests; `mute` sends no
    byte of an answer while `gate` is closed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mode = "well"
        self.served: list[list[int]] = []
        """The tokens of each request that was served."""
        self.gate = threading.Event()
        self.gate.set()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words: Any) -> None:
                pass

            def do_POST(self) -> None:
                engine.answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        """One request."""
        prompt = body.get("prompt")
        if prompt is None:
            prompt = " ".join(message["content"] for message in body["messages"])
        ids = prompt if isinstance(prompt, list) else tokens_of(prompt)
        if handler.path == "/tokenize":
            if self.mode == "silent":
                time.sleep(3)
            status = 500 if self.mode == "no tokens" else 200
            self._send(handler, status, {"count": len(ids), "tokens": ids, "max_model_len": 1 << 20})
            return
        if self.mode == "down":
            self._send(handler, 500, {"error": {"message": "down"}})
            return
        self.served.append(ids)
        if self.mode == "mute":
            self.gate.wait(20)
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1}
        chat = "chat" in handler.path
        common = {
            "id": "x",
            "created": 1,
            "model": body["model"],
            "object": "chat.completion" if chat else "text_completion",
        }
        if not body.get("stream"):
            self.gate.wait(20)
            piece = {"message": {"role": "assistant", "content": self.name}} if chat else {"text": self.name}
            choices = [{"index": 0, "finish_reason": "stop", **piece}]
            self._send(handler, 200, {**common, "choices": choices, "usage": usage})
            return
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        for at, word in enumerate((self.name, "!")):
            if at:
                self.gate.wait(20)
            piece = {"delta": {"role": "assistant", "content": word}} if chat else {"text": word}
            choices = [{"index": 0, "finish_reason": "stop" if at else None, **piece}]
            handler.wfile.write(b"data: " + json.dumps({**common, "choices": choices}).encode() + b"\n\n")
            handler.wfile.flush()
        handler.wfile.write(b"data: [DONE]\n\n")

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def close(self) -> None:
        """End the server."""
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


class Proxy:
    """LiteLLM's proxy with the plug-in."""

    def __init__(
        self, directory: Path, engines: Sequence[tuple[Engine, str]], settings: Mapping[str, object], workers: int = 1
    ) -> None:
        """`engines`: with the node of each. `settings`: those of the plug-in."""
        self.log = directory / "litellm.log"
        self.port = reserve_port()
        config = {
            "model_list": [
                {
                    "model_name": "m",
                    "litellm_params": {"model": "hosted_vllm/m", "api_base": engine.base, "api_key": "none"},
                    "model_info": {"tokenlake_node": node},
                }
                for engine, node in engines
            ],
            "litellm_settings": {
                "callbacks": ["prometheus", "tokenlake_client.routers.litellm.plugin"],
                "tokenlake": dict(settings),
                "num_retries": 0,
            },
            "general_settings": {"master_key": KEY, "cancel_on_disconnect": True},
            "router_settings": {"routing_strategy": "simple-shuffle", "cooldown_time": 5, "allowed_fails": 0},
        }
        # JSON is YAML.
        path = directory / "config.yaml"
        path.write_text(json.dumps(config))
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TOKENLAKE"))
        }
        environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
        environment |= {"PROMETHEUS_MULTIPROC_DIR": str(directory)} if workers > 1 else {}
        root = Path(__file__).parents[2]
        environment["PYTHONPATH"] = ":".join(str(root / each) for each in ("", "client", "proto"))
        command = [str(ROUTERS / "bin" / "litellm"), "--config", str(path), "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = start_child(
                [*command, *WORKERS, str(workers)],
                stdout=log,
                stderr=log,
                env=environment,
                cwd=directory,
                start_new_session=True,
            )

    def ready(self) -> Self:
        """Wait until it serves."""
        until = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health/liveliness", timeout=5).close()
                return self
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < until, self.log.read_text()[-3000:]
                time.sleep(0.1)

    def wait_log(self, text: str, times: int = 1) -> None:
        """Wait until the log has a text so many times."""
        until = time.monotonic() + START_S
        while self.log.read_text().count(text) < times:
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            time.sleep(0.05)

    def open(self, path: str, timeout_s: float = 60.0, **body: Any) -> Any:
        """Send a request; the answer, open. After `timeout_s` without an answer it goes away. Raises OSError."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/{path}",
            json.dumps({"model": "m", **body}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        return urllib.request.urlopen(request, timeout=timeout_s)

    def choices(self) -> dict[str, int]:
        """The choices of all workers by outcome, from the metrics page."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/metrics/", headers={"Authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            metrics = parse_metrics(answer.read().decode())
        begin = 'tokenlake_router_seconds_count{outcome="'
        return {
            name.removeprefix(begin).removesuffix('"}'): int(value)
            for name, value in metrics.items()
            if name.startswith(begin)
        }

    def chat(self, text: str) -> str:
        """The name of the engine that answered a chat."""
        with self.open("chat/completions", messages=[{"role": "user", "content": text}]) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])

    def complete(self, prompt: str) -> str:
        """The name of the engine that answered a completion."""
        with self.open("completions", prompt=prompt) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def stream(self, path: str = "chat/completions", **body: Any) -> Iterator[str]:
        """The text of the parts of a streamed answer."""
        with self.open(path, stream=True, **body) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text = choice.get("text") or choice.get("delta", {}).get("content")
                    if text:
                        yield text

    def close(self) -> None:
        """End the proxy and its workers."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except Exception:
            self.process.kill()
            self.process.wait()
