"""The page of a node for browsers, on the metrics port: what `tokenlake status`, `top`, `explain` and `events` show."""
