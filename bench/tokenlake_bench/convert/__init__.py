"""`tokenlake workload convert`: logs of requests and published traces as traces that the benchmarks read, without their
text (`docs/traces.md`)."""
