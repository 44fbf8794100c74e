"""What an engine imports to use the pool."""
