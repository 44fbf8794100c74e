"""`tokenlake bench churn`: a cluster under load while a node joins, drains, is killed or returns, beside a cluster that
nothing happens to."""
