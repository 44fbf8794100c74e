"""`bench growth`: cost of a key with more keys per call, more clients, more segments held."""
