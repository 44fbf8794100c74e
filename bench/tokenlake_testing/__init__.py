"""Parts that tests and benchmarks share: child processes (daemons, engines), and one node on simulated time."""
