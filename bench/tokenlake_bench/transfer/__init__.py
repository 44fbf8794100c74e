"""`tokenlake bench transfer`: what the pool costs per call, beside the machine's ceilings and beside other pools."""
