"""A small server of the OpenAI API with the metrics page of vLLM, whose faults a test chooses."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BLOCK = 16
"""Tokens of a block of its prefix cache."""


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


class OpenAiServer:
    """Answers completions and chats with one part for each token. `fault`: by number of a request, what happens to it:
    a status such as `429`, `garbage`, `stall`, `cut`, or nothing. `apis`: the paths that it has. `ids`: prompts may be
    token ids below `vocabulary`. `strict`: it refuses fields that OpenAI does not have. `key`: the API key."""

    def __init__(
        self,
        fault: Callable[[int], str] = lambda number: "",
        *,
        apis: tuple[str, ...] = ("completions", "chat/completions"),
        ids: bool = True,
        vocabulary: int = 1 << 20,
        strict: bool = False,
        key: str = "",
        context: int | None = 8192,
        model: str = "m",
        metrics: bool = True,
    ) -> None:
        self.fault, self.apis, self.ids, self.vocabulary, self.strict = fault, apis, ids, vocabulary, strict
        self.key, self.context, self.model, self.has_metrics = key, context, model, metrics
        self.prompts: list[Any] = []
        self.keys_at_metrics: set[str | None] = set()
        self.most_at_once = 0
        self.gate = threading.Event()
        """Stalled answers go on once it is set."""
        self._lock = threading.Lock()
        self._at_once = 0
        self._cache: set[tuple[int, ...]] = set()
        self._counts = {"prompt": 0, "own": 0}
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.wfile.write(server.page(self))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server._at_once += 1
                    server.most_at_once = max(server.most_at_once, server._at_once)
                last = b""
                try:
                    last = server.answer(self, body)
                finally:
                    with server._lock:
                        server._at_once -= 1
                # Behind the count, because the client sends its next request once it has these bytes.
                self.wfile.write(last)

        self._server = _Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def page(self, handler: BaseHTTPRequestHandler) -> bytes:
        """Begin the answer with models or metrics. Returns its body."""
        if handler.path == "/metrics":
            self.keys_at_metrics.add(handler.headers["Authorization"])
        elif self.key and handler.headers["Authorization"] != f"Bearer {self.key}":
            return _send(handler, 401, {"error": {"message": "no key"}})
        if handler.path == "/v1/models":
            return _send(handler, 200, {"data": [{"id": self.model, "max_model_len": self.context}]})
        if handler.path != "/metrics" or not self.has_metrics:
            return _send(handler, 404, {"detail": "Not Found"})
        name, labels = "vllm:prompt_tokens", 'engine="0",model_name="m"'
        prompt, own = self._counts["prompt"], self._counts["own"]
        sources = {"local_compute": prompt - own, "local_cache_hit": own, "external_kv_transfer": 0}
        lines = [f"# TYPE {name} counter", f"{name}_total{{{labels}}} {prompt}", f"# TYPE {name}_by_source counter"]
        lines += [f'{name}_by_source_total{{{labels},source="{each}"}} {n}' for each, n in sources.items()]
        data = ("\n".join(lines) + "\n").encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        return data

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bytes:
        """Answer one request, but for the last bytes, which are returned."""
        api = handler.path.removeprefix("/v1/")
        if api not in self.apis:
            return _send(handler, 404, {"detail": "Not Found"})
        chat = api.startswith("chat")
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        tokens = prompt if isinstance(prompt, list) else [hash(word) for word in prompt.split()]
        if isinstance(prompt, list) and not self.ids:
            return _send(handler, 422, {"detail": "prompt: expected a string"})
        if isinstance(prompt, list) and max(prompt) >= self.vocabulary:
            return _send(handler, 400, {"error": {"message": f"Token id {max(prompt)} is out of vocabulary"}})
        if self.strict and "ignore_eos" in body:
            return _send(handler, 400, {"error": {"message": "Unrecognized request argument: ignore_eos"}})
        if self.context is not None and len(tokens) + body["max_tokens"] > self.context:
            message = f"This model's maximum context length is {self.context} tokens"
            return _send(handler, 400, {"error": {"message": message}})
        probe = len(tokens) <= 2
        with self._lock:
            number = len(self.prompts)
            if not probe:
                self.prompts.append(prompt)
        fault = "" if probe else self.fault(number)
        if fault.isdigit():
            return _send(handler, int(fault), {"error": {"message": f"fault {fault}"}})
        own = self._count(tokens)
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        for at in range(body["max_tokens"]):
            failing = fault if at == min(1, body["max_tokens"] - 1) else ""
            if failing == "garbage":
                return b"<html>what</html>\n\n"
            if failing == "stall":
                self.gate.wait(60)
            if failing == "cut":
                handler.connection.shutdown(socket.SHUT_RDWR)
                return b""
            last = at + 1 == body["max_tokens"]
            piece: dict[str, Any] = {"delta": {"content": "x"}} if chat else {"text": "x"}
            _event(handler, {"choices": [{"index": 0, "finish_reason": "length" if last else None, **piece}]})
        usage = {"prompt_tokens": len(tokens), "completion_tokens": body["max_tokens"]}
        _event(handler, {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": own}}})
        return b"data: [DONE]\n\n"

    def _count(self, tokens: list[int]) -> int:
        """Count a prompt, and return the tokens of it that its cache had."""
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        with self._lock:
            own = max((end for end in ends if tuple(tokens[:end]) in self._cache), default=0)
            self._cache |= {tuple(tokens[:end]) for end in ends}
            self._counts["prompt"] += len(tokens)
            self._counts["own"] += own
        return own

    def close(self) -> None:
        """End the server: it refuses connections from now on."""
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> OpenAiServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _event(handler: BaseHTTPRequestHandler, part: dict[str, Any]) -> None:
    handler.wfile.write(b"data: " + json.dumps(part).encode() + b"\n\n")
    handler.wfile.flush()


def _send(handler: BaseHTTPRequestHandler, status: int, body: object) -> bytes:
    """Send the head of a reply. Returns its body."""
    data = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True
    return data
