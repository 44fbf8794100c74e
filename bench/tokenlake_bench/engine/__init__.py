"""`tokenlake bench engine`: vLLM or transformers with the pool, and without."""
