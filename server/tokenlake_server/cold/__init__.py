"""The cold tier: objects of segments in a directory or bucket that the nodes of several clusters share, and an index of
them that needs no listing of all objects (docs/operations/cold-tier.md)."""
