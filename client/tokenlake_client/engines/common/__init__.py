"""Parts that every engine integration uses. None of its modules imports an engine, and only `slots` imports torch."""
