"""The disk tier's files: slabs of segments on each device of the setting `disk`, and a table of each."""
