"""The memory of a device that computes, and copies between it and the host's memory."""
