"""Synthetic workloads: generators of traces whose lengths, sharing of prefixes and skew are parameters
(`docs/simulation.md`)."""
