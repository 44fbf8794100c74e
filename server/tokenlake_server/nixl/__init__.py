"""Reads out of the memory of other nodes with NIXL. Imported only where the setting `transport` names it."""
