"""`tokenlake bench planner`: times of each way to use a cached prefix over links of given speed, and how much slower
the planner's choices are than the fastest ways (regret)."""
