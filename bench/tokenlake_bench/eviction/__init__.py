"""`tokenlake bench eviction`: which policy keeps what will be read again, beside what nobody can beat."""
