"""The daemon of a node: arena, sockets, threads and metrics around `tokenlake.core.NodeCore`.

Nothing here decides anything about segments; it turns what happens into events and carries out instructions.
"""
