"""`tokenlake bench attention`: attention over segments where they lie, each row beside its ceiling."""
