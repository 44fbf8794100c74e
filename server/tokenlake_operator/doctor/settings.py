"""Checks for settings that a daemon accepts although they are unwise."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec

from tokenlake.config import ServerConfig, format_size, is_loopback, parse_address
from tokenlake_operator.doctor.base import Finding


def check_settings(config: ServerConfig) -> Iterator[Finding]:
    """Yield findings about tenants, pages and connections that other machines can read, and modules that are not
    installed."""
    yield from _tenants(config)
    if config.metrics_tenants and config.metrics and not is_loopback(parse_address(config.metrics).host):
        yield Finding(
            "warning",
            "metrics-open",
            f"metrics = {config.metrics}",
            "all who reach this address read the names of tenants, because 'metrics_tenants' is true",
            "set 'metrics_tenants' to false (tenants are numbers then), or 'metrics' to an address at 127.0.0.1",
        )
    if config.unencrypted_beyond_loopback and not config.certificate:
        yield Finding(
            "warning",
            "unencrypted",
            "unencrypted_beyond_loopback",
            "every machine on the way between nodes can read and change all caches",
            "give each node a certificate (`tokenlake ca init`, `tokenlake ca issue NODE`), and remove the setting",
        )
    for stream in config.kv_events:
        if stream.open_to_all:
            yield Finding(
                "warning",
                "kv-events-open",
                f"kv_events = {stream}",
                f"each process that reaches these ports reads the tokens of the prompts of tenant '{stream.tenant}', "
                "because 'beyond_loopback' is true: nothing is encrypted, and no reader proves who it is",
                "leave 'endpoint' out (a Unix socket is the default) where the router can run on this machine, or let "
                "a firewall admit the routers only",
            )
    remote = ",".join(str(each) for each in config.etcd if not is_loopback(each.host))
    lacking = [name for name in ("etcd_ca", "etcd_user") if not getattr(config, name)]
    if config.etcd_certificate:
        lacking = []  # etcd knows its clients by their certificates
    if remote and lacking:
        yield Finding(
            "warning",
            "etcd-open",
            f"etcd = {remote}",
            f"{' and '.join(lacking)} not set: a program that reaches etcd can read the password, or change the ring",
            "give etcd TLS and a user, and set 'etcd_ca', 'etcd_user' and 'etcd_password'",
        )
    own, listen = parse_address(config.advertise or config.listen), parse_address(config.listen)
    elsewhere = not config.peers or not all(is_loopback(peer.host) for peer in config.peers)
    if is_loopback(own.host) and not is_loopback(listen.host) and elsewhere:
        yield Finding(
            "error",
            "advertise-loopback",
            f"advertise = {config.advertise}",
            f"other machines are told to reach this node at their own loopback; it listens at {listen}",
            "set 'advertise' to the address at which the other nodes reach this one; unset it where that is 'listen'",
        )
    if not is_loopback(listen.host) and is_loopback(bound := _resolved(listen.host)):
        yield Finding(
            "error",
            "listen-loopback",
            f"listen = {config.listen}",
            f"this machine resolves the name to {bound}, an address of its own that no other machine reaches",
            f"take the name out of the line with {bound} in /etc/hosts, or set 'listen' to the address",
        )
    if config.query_engine and find_spec("torch") is None:
        problem = "the module 'torch' is not installed"
        yield Finding("error", "module", "query_engine", problem, "run `pip install 'tokenlake[query]'`")


def _resolved(host: str) -> str:
    """The address of a host as the daemon resolves it; the host itself where it cannot be resolved."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host


def _tenants(config: ServerConfig) -> Iterator[Finding]:
    limited = [tenant for tenant in config.tenants if tenant.quota < 1]
    quotas = sum(tenant.quota for tenant in limited)
    if quotas > 1 + 1e-9:
        listed = ", ".join(f"{tenant.name} {tenant.quota:g}" for tenant in limited)
        yield Finding(
            "warning",
            "quotas",
            "tenants",
            f"the quotas ({listed}) are {quotas:g} times the memory: when all tenants need it, none gets its quota",
            "give quotas whose sum is at most 1",
        )
    regions = config.regions
    for tenant in config.tenants:
        if int(tenant.quota * regions) < 1:
            yield Finding(
                "warning",
                "quota-small",
                f"tenant {tenant.name}",
                f"its quota of {tenant.quota:g} is below one region ({format_size(config.region_size)}); it gets one",
                "give a larger quota, or a smaller 'region_size' of at least one segment",
            )
    if len(config.tenants) > regions:
        yield Finding(
            "warning",
            "regions",
            "region_size",
            f"{len(config.tenants)} tenants share {regions} regions: some have no memory at times",
            "give a smaller 'region_size' of at least one segment, or more 'memory'",
        )
    allowed = {*(config.allow_uids or (os.geteuid(),)), *(uid for tenant in config.tenants for uid in tenant.uids)}
    if len(config.tenants) > 1 and os.geteuid() in allowed:
        yield Finding(
            "warning",
            "tenants-uid",
            "allow_uids",
            f"engines may run as the daemon's own user, uid {os.geteuid()}: through /proc they can read the memory of "
            "every tenant",
            "run engines as other users, list these in 'allow_uids' (without it the daemon's own uid is allowed), and "
            "leave the daemon's uid out of it and of 'uids' of tenants",
        )
