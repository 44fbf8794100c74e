"""`bench growth`: what a key costs with more keys in a call, more clients, more segments held."""
