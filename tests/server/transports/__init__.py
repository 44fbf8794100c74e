"""Transports between two nodes of this process."""
