"""Attention over cached segments: its shape, where a layer lies in a slot, partial results and how they are merged.

numpy alone. Who owns what: the functions here allocate what they return and change none of their arguments; views of
slots (`SlotMap.views`) own nothing and are valid as long as the lease on the segment.
"""

from tokenlake.attention.dtypes import Stored, as_float32, from_float32, stored_dtype
from tokenlake.attention.partial import Partial, empty_partial, merge
from tokenlake.attention.reference import attend
from tokenlake.attention.shape import LSE_BYTES, AttentionShape
from tokenlake.attention.slots import Place, SlotMap

__all__ = [
    "LSE_BYTES",
    "AttentionShape",
    "Partial",
    "Place",
    "SlotMap",
    "Stored",
    "as_float32",
    "attend",
    "empty_partial",
    "from_float32",
    "merge",
    "stored_dtype",
]
