"""`tokenlake bench attention`: attention over segments in the pool, each row beside its ceiling."""
