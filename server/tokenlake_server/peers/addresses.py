"""The addresses of the other nodes, and the TCP options of connections with them.

Host names are resolved off the control loop: when a node is dialled, and again in every attempt, so that a node that
was restarted at another address is found. Threads that open further connections use the last address that answered.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

from tokenlake.config import Address, parse_address
from tokenlake_server.loop.started_threads import started_threads

RESOLVE_S = 5.0
"""Seconds after which an attempt to resolve a host name fails; the resolver of the system may take longer."""
RESOLVE_THREADS = 4
"""Number of the threads that resolve host names."""
IDLE_S, INTERVAL_S, PROBES = 5, 2, 3
"""A connection on which nothing arrives for `IDLE_S` seconds is probed every `INTERVAL_S` seconds, and closed after
`PROBES` probes without an answer: a node that lost power frees its connections within about 11 s."""
UNACKNOWLEDGED_S = 15.0
"""Seconds after which a connection is closed that has bytes to send and whose other side acknowledges none of them."""


class Endpoint(NamedTuple):
    """A resolved address of a node."""

    family: socket.AddressFamily
    address: tuple[str | int | bytes, ...]
    """In the form that `socket.connect` takes."""


class PeerAddresses:
    """The address of each other node. `change`, `tell`, `resolve`, `at` and `close` are called on the control loop;
    the other methods may be called from any thread, of which `failed` changes the order of the endpoints of a node."""

    def __init__(
        self, addresses: Mapping[str, Address | None], *, loopback_only: bool = False, threads: Executor | None = None
    ) -> None:
        """`addresses`: None where the address of a node is not known. `loopback_only`: connections are plain, and an
        address beyond loopback, which etcd may name, is an error. `threads`: those of another object, which closes
        them. Raises `LimitReached` when the threads cannot be started."""
        self._configured = dict(addresses)
        self._loopback_only = loopback_only
        self._own = started_threads(RESOLVE_THREADS, "resolve") if threads is None else None
        self._threads = self._own or threads
        """Threads of their own: a resolver that does not answer keeps them for longer than `RESOLVE_S`, and other work
        of the daemon must not wait for it."""
        self._told: dict[str, list[Endpoint]] = {}
        """By node, its further endpoints for bulk connections, as that node announced them."""
        self._endpoints: dict[str, list[Endpoint]] = {}
        """The endpoints of each node as they were resolved last; the first one is dialled next."""

    def empty(self) -> PeerAddresses:
        """An object for other nodes, with the same rules and no addresses yet."""
        return PeerAddresses({}, loopback_only=self._loopback_only, threads=self._threads)

    def __contains__(self, node: object) -> bool:
        return node in self._configured

    def __len__(self) -> int:
        return len(self._configured)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the other nodes."""
        return tuple(self._configured)

    def shown(self, node: str) -> str:
        """The address of a node, as it was configured, for people."""
        return str(self._configured.get(node) or "no address")

    def at(self, host: str) -> list[str]:
        """The nodes whose address is `host`, an IP address: the configured one, or one that its name had when it was
        resolved last."""
        host = host.removeprefix("::ffff:")
        found = []
        for name, address in self._configured.items():
            known = {str(endpoint.address[0]) for endpoint in self._endpoints.get(name, ())}
            if host in known or (address is not None and host == address.host):
                found.append(name)
        return found

    def change(self, addresses: Mapping[str, Address | None]) -> list[str]:
        """Replace all addresses; see `__init__`. Nodes whose address changed are resolved anew. Returns those that had
        another address before: their daemons were started elsewhere."""
        moved = [
            name
            for name, address in addresses.items()
            if address is not None and self._configured.get(name) not in (None, address)
        ]
        kept = {name for name, address in addresses.items() if self._configured.get(name) == address}
        self._endpoints = {name: found for name, found in self._endpoints.items() if name in kept}
        self._told = {name: told for name, told in self._told.items() if name in kept}
        self._configured = dict(addresses)
        return moved

    def tell(self, node: str, addresses: Sequence[str]) -> None:
        """Replace the further addresses at which `node` accepts bulk connections, as it tells them. Raises ValueError
        for one that is no address, or is not allowed; the others are used."""
        told, refused = [], []
        for text in addresses:
            try:
                endpoint = _literal(*parse_address(text))
                told += [self._allowed(endpoint)] if endpoint is not None else []
            except (ValueError, OSError) as error:
                refused.append(f"{text} ({error})")
        self._told[node] = told
        if refused:
            raise ValueError(f"bulk connections cannot go to {', '.join(refused)}")

    async def resolve(self, node: str) -> Endpoint:
        """The endpoint to dial for a control connection. A host name with several addresses yields another one of them
        in each attempt. Raises OSError if the name cannot be resolved, the node has no address any more, or
        its address is not allowed."""
        configured = self._configured.get(node)
        if configured is None:
            raise OSError(f"the address of node '{node}' is not known")
        host, port = configured
        literal = _literal(host, port)
        if literal is not None:
            found = [literal]
        else:
            ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
            try:
                async with asyncio.timeout(RESOLVE_S):
                    answers = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
            except TimeoutError:
                raise OSError(f"the host name '{host}' was not resolved within {RESOLVE_S:.0f} s") from None
            except UnicodeError as error:
                raise OSError(f"'{host}' is no host name: {error}") from None
            found = [Endpoint(socket.AddressFamily(family), address) for family, _, _, _, address in answers]
        tried = self._endpoints.get(node, [])[:1]
        self._endpoints[node] = [each for each in found if each not in tried] + [
            each for each in found if each in tried
        ]
        return self._allowed(self._endpoints[node][0])

    def last(self, node: str) -> Endpoint:
        """The endpoint for a further connection with `node`: the one that was dialled last, or the address of the
        configuration if it is no host name. Never blocks. Raises OSError if the name was not resolved yet, or the node
        has no address any more."""
        found = self._endpoints.get(node)
        if found:
            return self._allowed(found[0])
        configured = self._configured.get(node)
        literal = _literal(*configured) if configured is not None else None
        if literal is None:
            raise OSError(f"the address of node '{node}' ({configured or 'none'}) is not known yet")
        return self._allowed(literal)

    def bulk(self, node: str) -> list[Endpoint]:
        """The endpoints for bulk connections with `node`, each once: that of `last`, which raises the same errors, and
        those that the node told."""
        return list(dict.fromkeys([self.last(node), *self._told.get(node, [])]))

    def failed(self, node: str, endpoint: Endpoint) -> None:
        """The endpoint that `last` returned took no connection: let another one of the name come next, if there is one.
        A node that was dialled does not know which address of the other node's name can be reached."""
        found = self._endpoints.get(node, [])
        if found[:1] == [endpoint]:
            self._endpoints[node] = [*found[1:], endpoint]

    def close(self) -> None:
        """End the threads once the resolver has answered. No name is resolved afterwards."""
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)

    def _allowed(self, endpoint: Endpoint) -> Endpoint:
        host = str(endpoint.address[0])
        if self._loopback_only and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            raise OSError(f"{host} is beyond loopback, and this node has no 'certificate'")
        return endpoint


def _literal(host: str, port: int) -> Endpoint | None:
    if host == "localhost":
        return Endpoint(socket.AF_INET, ("127.0.0.1", port))
    try:
        version = ipaddress.ip_address(host.partition("%")[0]).version
    except ValueError:
        return None
    if version == 4:
        return Endpoint(socket.AF_INET, (host, port))
    address, _, scope = host.partition("%")
    return Endpoint(socket.AF_INET6, (address, port, 0, socket.if_nametoindex(scope) if scope else 0))


def no_connection(error: OSError) -> str:
    """The reason why there is no connection. The text of asyncio names the call instead."""
    return os.strerror(error.errno) if error.errno else str(error) or "no answer in time"


def set_tcp_options(sock: socket.socket) -> None:
    """Set the options of every connection between nodes: no delay of small messages, and an end of the connection when
    the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNACKNOWLEDGED_S * 1e3))
