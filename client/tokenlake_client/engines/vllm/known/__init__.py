"""The connector for models whose layout the pool knows."""
