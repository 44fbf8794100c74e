"""All checks and measurements that need a GPU, as one command: `python -m tokenlake_bench.gpu`."""
