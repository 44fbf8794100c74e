"""The page of the documentation for each check of the doctor."""

from __future__ import annotations

from typing import Final

from tokenlake.documentation import page

_RUNBOOK = "operations/runbook"
_TENANTS = "operations/tenants"
_CERTIFICATES = "operations/certificates"
_ADDRESSES = "operations/two-machines#start-and-check"
_SETTINGS = "reference#settings-of-a-daemon"
_SOCKET = "reference#the-local-socket"
_DISK = f"{_RUNBOOK}#the-disk-tier-is-set-aside"

PAGES: Final = {
    "address": _ADDRESSES,
    "advertise-loopback": _ADDRESSES,
    "ca": _CERTIFICATES,
    "certificate": _CERTIFICATES,
    "certificate-expired": f"{_CERTIFICATES}#renewal",
    "certificate-expires": f"{_CERTIFICATES}#renewal",
    "clock-skew": f"{_CERTIFICATES}#refused-connections",
    "cluster-secret": _TENANTS,
    "cold": "operations/cold-tier",
    "cold-silent": f"{_RUNBOOK}#the-cold-tier-is-set-aside",
    "corrupt-memory": f"{_RUNBOOK}#wrong-bytes",
    "daemon-silent": f"{_RUNBOOK}#a-daemon-is-down",
    "disk": "operations/disk",
    "disk-full": _DISK,
    "disk-lost": _DISK,
    "disk-set-aside": _DISK,
    "engine": f"{_RUNBOOK}#engines-are-refused",
    "etcd": f"{_RUNBOOK}#etcd-does-not-answer",
    "etcd-file": "operations/two-machines#the-members-in-etcd",
    "etcd-open": "operations/two-machines#the-members-in-etcd",
    "huge-pages": _SETTINGS,
    "kernel": "operations/containers",
    "key": _CERTIFICATES,
    "kv-events": "operations/routers",
    "layouts": "reference#layout",
    "limit": "operations/limits",
    "listen-loopback": _ADDRESSES,
    "locations": "operations/locations",
    "members-absent": f"{_RUNBOOK}#a-daemon-is-down",
    "members-differ": "operations/members#with-a-list-of-peers",
    "membership": f"{_RUNBOOK}#etcd-does-not-answer",
    "memory": "operations/limits",
    "memory-unusable": "operations/sizing",
    "metrics-open": "operations/monitoring",
    "module": "reference#commands",
    "name-taken": "operations/members#what-failures-of-etcd-do",
    "not-admitted": f"{_RUNBOOK}#etcd-does-not-answer",
    "other-ring": "operations/members#with-a-list-of-peers",
    "peer": f"{_RUNBOOK}#peers-are-not-connected",
    "peer-certificate": f"{_CERTIFICATES}#refused-connections",
    "peer-encryption": f"{_CERTIFICATES}#refused-connections",
    "peer-secret": _TENANTS,
    "peer-version": "operations/upgrade",
    "quota-small": _TENANTS,
    "quotas": _TENANTS,
    "regions": _TENANTS,
    "settings": _SETTINGS,
    "socket": _SOCKET,
    "state-directory": "operations/disk#evictions-and-retired-weights",
    "stores-refused": f"{_RUNBOOK}#stores-are-refused",
    "tenant-secrets": _TENANTS,
    "tenants-uid": _TENANTS,
    "unencrypted": _CERTIFICATES,
    "versions": "operations/upgrade",
}
"""By the name of a check, or by its beginning up to a hyphen: the longest one counts."""
SYMPTOMS: Final = "operations/symptoms"
"""The page of all other checks."""


def page_of(check: str) -> str:
    """The address of the page that has more on a finding of this check."""
    name = check
    while name not in PAGES and "-" in name:
        name = name.rpartition("-")[0]
    return page(PAGES.get(name, SYMPTOMS))
