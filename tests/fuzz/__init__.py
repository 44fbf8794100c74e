"""Whatever is sent or given to a node, it refuses with the documented error or goes on. `make test` runs a part of it
for seconds, `python -m tests.fuzz.atheris_run` the same for as long as one likes."""
