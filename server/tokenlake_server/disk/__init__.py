"""The disk tier's files: slabs of segments on each device of the setting `disk`, and the index over them."""
