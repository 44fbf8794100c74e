"""The connector for models whose layout the pool does not know: a backend of vLLM's own OffloadingConnector."""
