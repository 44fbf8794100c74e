"""`tokenlake bench attention`: times attention over segments in the pool, each measurement beside its ceiling, the
fastest other way of the machine to do the same work."""
