"""Hostile and damaged input to a node: it refuses the input with the documented error, or goes on. `make test` runs
these tests for seconds, `make nightly` longer."""
