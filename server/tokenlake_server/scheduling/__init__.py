"""The service `Scheduling`, by which routers ask where prefixes are and where a request starts soonest."""
