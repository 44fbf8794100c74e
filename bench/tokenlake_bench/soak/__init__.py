"""`bench soak`: mixed load with kills and stops, every byte compared, and gauges that must stay flat."""
