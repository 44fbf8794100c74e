"""Workloads, benchmarks and the demonstration."""
