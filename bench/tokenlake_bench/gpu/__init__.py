"""Everything that needs a GPU, as one command: `python -m tokenlake_bench.gpu`."""
