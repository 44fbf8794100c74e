"""Which nodes record where a segment is: the hash ring, the record of its members, and the entries of one node."""
