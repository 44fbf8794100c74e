"""A line of the log for each call of the control plane: the caller, the operation, its arguments and its outcome. Calls
that change or grant something are logged at the level info, others at debug. Keys, tokens, salts and credentials are
not logged: of bytes and lists the length, of nested messages the name alone."""

from __future__ import annotations

import logging
import os
import pwd
import socket
import struct
import time
from pathlib import Path

from google.protobuf.message import Message

from tokenlake.errors import CredentialRefused
from tokenlake_proto.v1 import role_pb2
from tokenlake_server.control.callers import CONTROL_SOCKET, Caller

log = logging.getLogger(__name__)

CHANGES = frozenset(("Drain", "Remove", "Evict", "WeightsChanged", "Unpin", "GrantPage"))
SECRETS = frozenset(("token",))
"""Fields of text that are not logged."""
PINS = "Prefetch"
"""The method that is a change where its field `pin_s` is above 0."""
MAX_TEXT = 200
"""Limit of the characters of a value."""


class CallLog:
    """The line of one call, written when it has ended. Used in the admin thread."""

    def __init__(self, method: str, control_socket: Path | None) -> None:
        self._method = method
        self._socket = control_socket
        self._began = time.monotonic()
        self._level = logging.INFO if method in CHANGES else logging.DEBUG
        self._caller = self._arguments = ""

    def begins(self, caller: Caller, message: Message) -> None:
        """The message of the call has been read. Its caller is connected for as long as it waits for the answer."""
        if self._method == PINS and getattr(message, "pin_s", 0.0) > 0:
            self._level = logging.INFO
        if log.isEnabledFor(self._level):
            self._caller, self._arguments = self._name(caller), _fields(message)

    def ended(self, reply: object) -> None:
        """The caller has taken its reply, or all replies of a stream."""
        said = _fields(reply) if isinstance(reply, Message) and self._level == logging.INFO else ""
        self._write(self._level, f"done: {said}" if said else "done", "done")

    def failed(self, error: BaseException) -> None:
        """The call ends with an error. A call whose caller may not make it is logged in any case."""
        warns = isinstance(error, CredentialRefused) or self._level == logging.INFO
        level = logging.WARNING if warns else self._level
        kind = type(error).__name__
        self._write(level, f"failed: {kind}: {str(error)[:MAX_TEXT]}" if str(error) else f"failed: {kind}", kind)

    def _write(self, level: int, outcome: str, code: str) -> None:
        if log.isEnabledFor(level):
            took_s = time.monotonic() - self._began
            told = {
                "caller": self._caller or "not known",
                "operation": self._method,
                "arguments": self._arguments,
                "outcome": code,
                "took_s": round(took_s, 6),
                # Pins of routers come with each request; operators change few things.
                "kind": "control" if self._method in (PINS, "Unpin") or level != logging.INFO else "",
            }
            text = f"{told['caller']} called {self._method}({self._arguments}): {outcome}"
            log.log(level, "%s", text, extra=told)

    def _name(self, caller: Caller) -> str:
        if caller.name != CONTROL_SOCKET:
            role = role_pb2.Role.Name(caller.role).removeprefix("ROLE_").lower()
            of = f" of tenant '{caller.tenant}'" if caller.tenant else ""
            return f"'{caller.name}' ({role}{of})"
        users = sorted(users_of(self._socket)) if self._socket is not None else []
        return f"{' or '.join(map(_user, users)) or 'a user'} at the control socket"


def users_of(path: Path) -> set[int]:
    """The uids of the processes that are connected to a Unix socket of this process, as the kernel knows them. gRPC
    does not tell which connection a call came over: more than one user is named where several are connected, of which
    there can only be root and the user of the daemon."""
    found: set[int] = set()
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return found  # there is no /proc
    for number in numbers:
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            # The descriptor is gRPC's: it is neither copied nor closed here.
            sock = socket.socket(fileno=int(number))
        except OSError:
            continue  # it was closed meanwhile
        try:
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if sock.family == socket.AF_UNIX and not listens and sock.getsockname() == str(path):
                peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                found.add(struct.unpack("3i", peer)[1])
        except OSError:
            pass
        finally:
            sock.detach()
    return found


def _user(uid: int) -> str:
    try:
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"uid {uid}"


def _fields(message: Message) -> str:
    """The fields of a message that are set, without bytes, lists and nested messages but their length or name."""
    shown = []
    for field, value in message.ListFields():
        if isinstance(value, bytes) or field.name in SECRETS:
            shown.append(f"{field.name}: {len(value)} bytes")
        elif isinstance(value, Message):
            shown.append(field.name)
        elif isinstance(value, str | bool | int | float):
            shown.append(f"{field.name}={str(value)[:MAX_TEXT]}")
        else:
            shown.append(f"{field.name}: {len(value)}")
    return ", ".join(shown)
