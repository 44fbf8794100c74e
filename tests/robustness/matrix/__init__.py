"""The fault matrix: each subject with each fault, what is promised, and a scenario that measures it."""
