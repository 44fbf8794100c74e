"""`tokenlake bench growth`: how the daemon's cost per key grows with the keys per call, the number of clients and the
number of stored segments."""
