"""`tokenlake bench soak`: a mixed load while processes are killed and stopped. Every byte read is compared, and gauges
such as memory must stay flat."""
