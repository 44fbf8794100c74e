"""The commands of an operator: they ask the control planes of daemons, and check a node.

The package is apart from the daemon, because it uses the daemon's checks and the client of the control plane.
"""
