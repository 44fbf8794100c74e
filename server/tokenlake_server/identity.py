"""SPIFFE identities: the URI in a certificate that names the node and its cluster."""

from __future__ import annotations

__all__ = ["cluster_uri", "node_uri"]


def cluster_uri(cluster: str) -> str:
    """The SPIFFE trust domain of a cluster."""
    return f"spiffe://{cluster}"


def node_uri(cluster: str, node: str) -> str:
    """The SPIFFE identity of a node."""
    return f"{cluster_uri(cluster)}/tokenlake/node/{node}"
