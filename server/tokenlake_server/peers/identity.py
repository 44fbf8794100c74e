"""SPIFFE identities: the URI in a certificate, which names a node of a cluster, or a caller of its control plane."""

from __future__ import annotations

ROLES = ("reader", "scheduler", "admin")
"""The roles of callers of the control plane; each may do what the former ones may."""


def cluster_uri(cluster: str) -> str:
    """The SPIFFE trust domain of a cluster."""
    return f"spiffe://{cluster}"


def node_uri(cluster: str, node: str) -> str:
    """The SPIFFE identity of a node."""
    return f"{cluster_uri(cluster)}/tokenlake/node/{node}"


def node_of(uri: str) -> str:
    """The name of the node in a SPIFFE identity of any cluster; empty for an identity of none."""
    cluster, _, name = uri.partition("/tokenlake/node/")
    return name if cluster.startswith(cluster_uri("")) and name and "/" not in name else ""


def role_uri(cluster: str, role: str, name: str, tenant: str = "") -> str:
    """The SPIFFE identity of a caller of the control plane: with a tenant, a caller for this tenant only."""
    return f"{cluster_uri(cluster)}/tokenlake/{role}/{f'{tenant}/' if tenant else ''}{name}"


def role_of(cluster: str, uri: str) -> tuple[str, str, str] | None:
    """The (role, tenant, name) that a SPIFFE identity gives; the tenant is empty where it names none, as that of an
    admin always is. None for an identity without a role in this cluster."""
    prefix = f"{cluster_uri(cluster)}/tokenlake/"
    parts = uri.removeprefix(prefix).split("/")
    if not uri.startswith(prefix) or parts[0] not in ROLES or not all(parts) or not 2 <= len(parts) <= 3:
        return None
    tenant = parts[1] if len(parts) == 3 else ""
    # The actions of an admin concern all tenants, so that an identity of an admin names none.
    return None if tenant and parts[0] == "admin" else (parts[0], tenant, parts[-1])
