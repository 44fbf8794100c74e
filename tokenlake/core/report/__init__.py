"""Reports on requests: trails for `tokenlake explain`, and counts of misses and refusals."""
