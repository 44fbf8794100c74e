"""Hostile and damaged input to a node: it refuses the input with the documented error, or goes on. `make test` runs
these tests for seconds, `python -m tests.fuzz.atheris_run` without a limit."""
