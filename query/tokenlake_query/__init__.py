"""The query engine: computes attention over cached segments where they lie. A process that its daemon starts."""
