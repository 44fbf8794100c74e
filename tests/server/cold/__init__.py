"""The cold tier: objects, index, places, and their damage."""
