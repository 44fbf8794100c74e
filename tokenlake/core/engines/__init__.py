"""What the engines of this node ask for: sessions, matches, leases, writes, waits, and what they report."""
