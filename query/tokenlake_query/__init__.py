"""The query engine: a process that a daemon starts to compute attention over cached segments in place."""
