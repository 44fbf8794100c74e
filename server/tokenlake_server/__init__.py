"""The daemon of a node: it owns the memory and talks to its peers."""
