"""`tokenlake bench transfer`: cost of the pool's calls, beside the machine's own rates and beside other stores."""
