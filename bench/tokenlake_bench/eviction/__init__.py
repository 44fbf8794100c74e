"""`tokenlake bench eviction`: the hit rates of eviction policies beside the bounds that no policy can exceed."""
