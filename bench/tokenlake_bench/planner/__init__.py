"""`bench planner`: times of every way to use a cached prefix over shaped links, and the regret of the planner's
choices."""
