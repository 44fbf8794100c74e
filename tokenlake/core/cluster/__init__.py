"""What nodes ask of each other: lookups, leases and sends, ownership, statistics, and changes of the ring."""
