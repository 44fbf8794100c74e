"""The tests mirror the packages."""
