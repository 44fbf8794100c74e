"""The fault matrix: for each subject and fault a promise, and a scenario that measures it."""
