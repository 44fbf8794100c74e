"""LMCache's server. Run as a module: a client of it."""
