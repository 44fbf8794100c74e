"""Readers of KV events as routers are: the messages of llm-d's index, and a client of vLLM's replay socket.

`Llmd` follows llm-d's `pkg/kvevents` (topic, decoding by position, engine keys that lead to request keys), with a hash
of its own for the request keys.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


def events_of(payload: bytes) -> list[dict[str, Any]]:
    """The events of a message, in either encoding, as maps with the field `type`."""
    _, events, rank = msgspec.msgpack.decode(payload)
    assert rank == 0
    return [
        each if isinstance(each, dict) else {"type": each[0], **dict(zip(FIELDS[each[0]], each[1:], strict=True))}
        for each in events
    ]


class Llmd:
    """An index of blocks by pod."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._pods: dict[int, set[tuple[str, str]]] = defaultdict(set)
        """By request key, the pods and tiers that have the block."""
        self._request_keys: dict[int, int] = {}
        """By engine key (a hash of a block), the request key."""
        self.orphans = 0
        """Events that were dropped because their parent is not known."""

    def take(self, topic: bytes, payload: bytes) -> None:
        kind, pod, model = topic.decode().split("@")
        assert kind == "kv"
        for event in events_of(payload):
            match event["type"]:
                case "BlockStored":
                    self._stored(pod, event["lora_name"] or model, event)
                case "BlockRemoved":
                    for hash_ in event["block_hashes"]:
                        self._evict(hash_, (pod, event["medium"].lower()))
                case "AllBlocksCleared":
                    for owners in self._pods.values():
                        owners.difference_update([owner for owner in owners if owner[0] == pod])

    def _stored(self, pod: str, model: str, event: dict[str, Any]) -> None:
        parent: int | None = None
        if event["parent_block_hash"]:
            parent = self._request_keys.get(event["parent_block_hash"])
            if parent is None:
                self.orphans += 1
                return
        assert event["block_size"] == self._block
        keys = self.request_keys(event["token_ids"], model, parent)
        assert len(keys) == len(event["block_hashes"])
        for hash_, key in zip(event["block_hashes"], keys, strict=True):
            self._request_keys[hash_] = key
            self._pods[key].add((pod, event["medium"].lower()))

    def _evict(self, hash_: int, owner: tuple[str, str]) -> None:
        key = self._request_keys.get(hash_)
        if key is not None:
            self._pods[key].discard(owner)
            if not self._pods[key]:
                del self._pods[key], self._request_keys[hash_]

    def request_keys(self, tokens: Sequence[int], model: str, parent: int | None = None) -> list[int]:
        keys = []
        for start in range(0, len(tokens) - self._block + 1, self._block):
            parent = hash((parent, model, tuple(tokens[start : start + self._block])))
            keys.append(parent)
        return keys

    def tokens(self, tokens: Sequence[int], model: str, pod: str) -> int:
        """The number of the first tokens of a prompt that a pod has."""
        found = 0
        for key in self.request_keys(tokens, model):
            if not any(owner[0] == pod for owner in self._pods.get(key, ())):
                break
            found += self._block
        return found


class Subscriber:
    """A thread that reads a stream and passes its messages on, in order. It asks for messages that it missed: those
    before one that comes and, until the first one comes, all, because a stream may have sent its only messages before
    the subscription reached it."""

    def __init__(self, endpoint: str, replay: str, take: Callable[[bytes, bytes], None]) -> None:
        self._take = take
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.connect(endpoint)
        self._events.subscribe(b"")
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay)
        self.lose = False
        """The messages that come are lost."""
        self.last = -1
        self._live = False
        """A message has come by the subscription: from now on a gap shows each message that is missed."""
        self.replays: list[tuple[int, int]] = []
        """(first sequence number that was asked for, messages that came) of each replay."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _read(self) -> None:
        while not self._ended.is_set():
            if not self._events.poll(20):
                if not self._live:
                    with self._lock:
                        self._ask(self.last + 1)
                continue
            topic, word, payload = self._events.recv_multipart()
            self._live = True
            if self.lose:
                continue
            sequence = int.from_bytes(word, "big")
            with self._lock:
                if sequence > self.last + 1:
                    self._ask(self.last + 1)
                if sequence > self.last:
                    self._take(topic, payload)
                    self.last = sequence

    def _ask(self, start: int) -> None:
        self._replay.send_multipart([b"", start.to_bytes(8, "big")])
        came = 0
        while not self._ended.is_set():
            if not self._replay.poll(20):
                continue
            empty, topic, word, payload = self._replay.recv_multipart()
            assert empty == b""
            if not payload:
                assert int.from_bytes(word, "big", signed=True) == -1
                break
            came += 1
            self._take(topic, payload)
            self.last = int.from_bytes(word, "big")
        self.replays.append((start, came))

    def quiet(self, function: Callable[[], Any]) -> Any:
        """Call a function while no message is taken."""
        with self._lock:
            return function()
