"""The disk tier of one node: the rules (`tokenlake.disk`) decide which place of which device holds which segment; a
file layer beneath them writes and reads the places."""

from tokenlake.disk.index import NO_ENTRY
from tokenlake.disk.places import NOTE_BYTES, PLACE_BYTES, Place, pack_places, slab_bytes, stride, unpack_places

__all__ = [
    "NO_ENTRY",
    "NOTE_BYTES",
    "PLACE_BYTES",
    "Place",
    "pack_places",
    "slab_bytes",
    "stride",
    "unpack_places",
]
