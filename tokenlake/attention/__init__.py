"""Attention over cached segments: its shape, the place of a layer in a slot, partial results and their merging.

The package needs numpy alone; `tokenlake.attention.torch_merge` does the same merge for tensors of torch. Functions
allocate what they return and do not change their arguments. Views of slots (`SlotMap.views`) own no memory and are
valid as long as the lease on the segment.
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
