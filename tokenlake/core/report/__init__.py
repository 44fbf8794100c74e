"""What the rules report of requests: trails for `tokenlake explain`, and counts of misses and refusals."""
