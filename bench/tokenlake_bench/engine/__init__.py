"""`tokenlake bench engine` and `bench handover`: vLLM or transformers with the pool, and without."""
