"""Parts that every engine integration uses. Importing this package imports neither an engine nor torch."""
