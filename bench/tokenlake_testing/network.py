"""A network of machines on this machine: one network namespace for each node, with real addresses, behind one router.

::

    namespace of node 1: eth0 10.77.1.2 ---- n1 10.77.1.1 \\
                                                            namespace of the router, which forwards
    namespace of node 2: eth0 10.77.2.2 ---- n2 10.77.2.1 /

The router drops packets without an answer, in one direction or both, and limits rates. It needs root, iproute2 and a
kernel with network namespaces; `missing` tells what is not there. The namespaces end with the `Network`; those of a
process that was killed are removed when the next one makes a network.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

Result = TypeVar("Result")

NAMESPACES: Final = Path("/run/netns")
CLONE_NEWNET: Final = 0x40000000
DROPS: Final = 100
"""Priority of the router's rules that drop packets, above those that forward."""


@functools.cache
def missing() -> str | None:
    """Returns the reason for which this machine can make no `Network`, to skip a test; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "sysctl"):
        if shutil.which(program) is None:
            return f"network namespaces need the program '{program}' (iproute2, procps)"
    try:
        with Network(["probe"]) as network:
            network.drop("probe", "probe")
            network.limit("probe", "8mbit")
    except subprocess.CalledProcessError as error:
        return f"this machine allows no network namespaces: {error.stderr.strip()}"
    return None


class Network:
    """The namespaces of `nodes` and of their router. A context manager that makes and removes them."""

    def __init__(self, nodes: Sequence[str], version: int = 4) -> None:
        """`version`: of the addresses that `address` and `host` return; every node has both an IPv4 and an IPv6
        address."""
        self._version = version
        self._number = {node: number for number, node in enumerate(nodes, start=1)}
        self._prefix = f"tokenlake-{os.getpid()}-"
        self._router = f"{self._prefix}router"

    def namespace(self, node: str) -> str:
        """The name of the node's namespace: `ip netns exec NAME command` runs a command there."""
        return f"{self._prefix}{self._number[node]}"

    def address(self, node: str, interface: int = 0) -> str:
        """One of the two addresses of the node, which stand for two network interfaces."""
        return self._address(node, self._version, interface)

    def host(self, node: str, interface: int = 0) -> str:
        """The address of the node as it stands before a port, an IPv6 address in brackets."""
        address = self.address(node, interface)
        return f"[{address}]" if self._version == 6 else address

    def _address(self, node: str, version: int, interface: int = 0) -> str:
        number = self._number[node]
        return f"10.77.{number}.{2 + interface}" if version == 4 else f"fd77:{number}::{2 + interface}"

    def __enter__(self) -> Network:
        _remove_leftovers()
        try:
            self._add_namespace(self._router)
            for setting in ("net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0", "net.ipv6.conf.all.forwarding=1"):
                _set(self._router, setting)
            for node in self._number:
                self._add(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for name in [self._router, *map(self.namespace, self._number)]:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def _add(self, node: str) -> None:
        name, number = self.namespace(node), self._number[node]
        self._add_namespace(name)
        _ip("link", "add", f"n{number}", "netns", self._router, "type", "veth", "peer", "name", "eth0", "netns", name)
        for address in (f"10.77.{number}.1/24", f"fd77:{number}::1/64"):
            _ip("-n", self._router, "addr", "add", address, "dev", f"n{number}")
        _ip("-n", self._router, "link", "set", f"n{number}", "up")
        _ip("-n", name, "link", "set", "eth0", "up")
        self.give_address(node)

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        # The detection of duplicates keeps an IPv6 address unusable for seconds.
        _set(name, "net.ipv6.conf.default.accept_dad=0")

    # -- faults

    def drop(self, source: str, target: str, interface: int = 0) -> None:
        """Drop all packets from `source` to one address of `target`, without an answer to `source`."""
        for version in (4, 6):
            self._rule("add", source, self._address(target, version, interface), version)

    def forward(self, source: str, target: str, interface: int = 0) -> None:
        """End `drop`."""
        for version in (4, 6):
            self._rule("del", source, self._address(target, version, interface), version)

    def _rule(self, act: str, source: str, target: str, version: int) -> None:
        ends = ("from", self._address(source, version), "to", target)
        _ip(f"-{version}", "-n", self._router, "rule", act, *ends, "blackhole", "pref", str(DROPS))

    def limit(self, node: str, rate: str) -> None:
        """Limit what the node receives to `rate`, as tc writes it: `80mbit`."""
        device = f"n{self._number[node]}"
        _run(
            *("tc", "-n", self._router, "qdisc", "replace", "dev", device, "root"),
            *("tbf", "rate", rate, "burst", "128kb", "latency", "200ms"),
        )

    def unlimit(self, node: str) -> None:
        """End `limit`."""
        _run("tc", "-n", self._router, "qdisc", "del", "dev", f"n{self._number[node]}", "root")

    def lose_address(self, node: str) -> None:
        """Take the addresses of the node away, and with them its routes."""
        _ip("-n", self.namespace(node), "addr", "flush", "dev", "eth0")

    def give_address(self, node: str) -> None:
        """Give the node its addresses and routes; at the start, and after `lose_address`."""
        name, number = self.namespace(node), self._number[node]
        for address in (f"10.77.{number}.2/24", f"fd77:{number}::2/64"):
            _ip("-n", name, "addr", "add", address, "dev", "eth0")
        for address in (f"10.77.{number}.3/32", f"fd77:{number}::3/128"):
            # Deprecated: the node opens no connection from its second address.
            _ip("-n", name, "addr", "add", address, "dev", "eth0", "preferred_lft", "0")
        _ip("-n", name, "route", "replace", "default", "via", f"10.77.{number}.1")
        _ip("-6", "-n", name, "route", "replace", "default", "via", f"fd77:{number}::1")

    # -- this process in a namespace

    def inside(self, node: str, act: Callable[[], Result]) -> Result:
        """Returns what `act` returns in a thread in the node's namespace: sockets that it opens belong there."""
        return in_namespace(self.namespace(node), act)


def in_namespace(name: str, act: Callable[[], Result]) -> Result:
    """Returns what `act` returns in a thread in the network namespace `name`; raises what it raises."""
    results: list[Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            with (NAMESPACES / name).open() as file:
                if libc.setns(file.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"the network namespace '{name}' cannot be entered")
            results.append(act())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def _remove_leftovers() -> None:
    """Remove the namespaces of processes that have ended."""
    for path in NAMESPACES.glob("tokenlake-*"):
        made_by = re.fullmatch(r"tokenlake-(\d+)-\w+", path.name)
        if made_by and not Path(f"/proc/{made_by[1]}").exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", path.name)


def _set(namespace: str, setting: str) -> None:
    _run("ip", "netns", "exec", namespace, "sysctl", "-q", setting)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
