"""`tokenlake bench router`: vLLM servers behind LiteLLM with the plug-in and the pool, and behind other routers."""
