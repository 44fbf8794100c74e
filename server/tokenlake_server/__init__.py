"""The daemon of a node: arena, sockets, threads and metrics around `tokenlake.core.NodeCore`.

This package decides nothing about segments: it turns requests, frames and timers into events for the rules and carries
out the instructions that the rules return.
"""
