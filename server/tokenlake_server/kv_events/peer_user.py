"""The user of the process at the other end of a connection within this machine."""

from __future__ import annotations

import ipaddress
import socket
import struct

_CREDENTIALS = struct.Struct("iII")
_DIAGNOSE, _REQUEST = 20, 1  # SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST
_NETLINK_SOCK_DIAG = 4
_HEAD = struct.Struct("=IHHII")
_ASK = struct.Struct("=BBBBI2s2s16s16sIII")
_FOUND = struct.Struct("=BBBB48xIIIII")
_ESTABLISHED = 1
_ANY = 0xFFFFFFFF


def peer_user(sock: socket.socket) -> int | None:
    """The uid of the process that connected to this socket: by SO_PEERCRED for a Unix socket, by the kernel's table of
    sockets (sock_diag) for TCP on a loopback address. None where the kernel does not say, and for a connection that the
    other side has closed. Does not wait."""
    if sock.family == socket.AF_UNIX:
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return int(uid)
    try:
        return _tcp_user(sock)
    except (OSError, struct.error, ValueError):
        return None


def _tcp_user(sock: socket.socket) -> int | None:
    # The socket at the other end has the two addresses the other way round.
    (source, source_port), (target, target_port) = sock.getpeername()[:2], sock.getsockname()[:2]
    ports = (port.to_bytes(2, "big") for port in (source_port, target_port))
    addresses = [ipaddress.ip_address(each.partition("%")[0]) for each in (source, target)]
    family = socket.AF_INET6 if addresses[0].version == 6 else socket.AF_INET
    packed = (each.packed.ljust(16, b"\0") for each in addresses)
    ask = _ASK.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY, *ports, *packed, 0, _ANY, _ANY)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, _NETLINK_SOCK_DIAG) as kernel:
        kernel.sendto(_HEAD.pack(_HEAD.size + len(ask), _DIAGNOSE, _REQUEST, 1, 0) + ask, (0, 0))
        answer = kernel.recv(4096)
    _, kind, *_ = _HEAD.unpack_from(answer)
    if kind != _DIAGNOSE:
        return None
    _, state, _, _, _, _, _, uid, inode = _FOUND.unpack_from(answer, _HEAD.size)
    return uid if state == _ESTABLISHED and inode else None
