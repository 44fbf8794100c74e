"""`bench soak`: mixed load with kills and stops, every byte compared, and what must stay flat meanwhile."""
