"""The control plane of a daemon over gRPC (`proto/tokenlake/v1`), in the admin thread.

Nothing of it runs on the control loop but short functions that read or change the daemon's state (`bridge.py`).
"""
