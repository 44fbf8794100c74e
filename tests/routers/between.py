"""A gRPC server between a router and the control plane of a daemon, which delays calls and changes an answer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from tests.server.control.scene import socket_of
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_testing.cluster import Node


class Between(grpc.GenericRpcHandler):
    """Forwards each unary call to the daemon. `pause_s`: seconds before a question where a request starts soonest is
    forwarded. `named`: the instance in its answer, in place of the daemon's."""

    def __init__(self, node: Node) -> None:
        self.socket: Path = node.socket.with_suffix(".between")
        self.pause_s = 0.0
        self.named = ""
        self.asked = 0
        """Questions that have arrived here."""
        self.answered = 0
        """Questions that the daemon has answered."""
        self._channel = grpc.insecure_channel(f"unix:{socket_of(node)}", [("grpc.use_local_subchannel_pool", 1)])
        self._server = grpc.server(ThreadPoolExecutor(8), [self])
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def service(self, call: Any) -> Any:
        """The handler of any method."""
        return grpc.unary_unary_rpc_method_handler(lambda message, context: self._forward(call.method, message))

    def _forward(self, method: str, message: bytes) -> bytes:
        question = method.endswith("/GetStart")
        if question:
            self.asked += 1
            time.sleep(self.pause_s)
        forward: Any = self._channel.unary_unary(method)
        answer: bytes = forward(message, timeout=20)
        self.answered += question
        if question and self.named:
            changed = pb.GetStartResponse.FromString(answer)
            changed.chosen.instance = self.named
            answer = changed.SerializeToString()
        return answer

    def close(self) -> None:
        """End the server."""
        self._server.stop(None).wait()
        self._channel.close()
