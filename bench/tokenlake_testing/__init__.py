"""Daemons and engines as child processes, for the tests and for the benchmarks."""
