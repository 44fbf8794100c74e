"""Plug-ins for request routers: each asks the pool where a request starts soonest."""
