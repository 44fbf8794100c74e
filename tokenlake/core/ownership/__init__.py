"""Which node owns a segment: directory nodes, owners, and how segments change their owner."""
