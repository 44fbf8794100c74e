"""The identity of LMCache's objects: all that gives their bytes their meaning. Imports no engine.

Servers share objects only if all of it is equal. The layout is opaque: the pool does not understand the bytes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenlake.errors import LayoutRefused
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client.engines.lmcache.settings import AdapterSettings
from tokenlake_client.weights import digest_of_directory

HASH_BYTES = 32
"""The length of LMCache's hashes with `--hash-algorithm blake3` and `sha256_cbor`."""


class ObjectForm(NamedTuple):
    """What LMCache tells of objects of one kind."""

    model: str
    """The name or the directory of the model in the engine's command."""
    group: int
    """The object group: layers of one kind."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    nbytes: int


def form_of(key: Any, shapes: Sequence[Any], dtypes: Sequence[Any]) -> ObjectForm:
    """The form of the object of LMCache's `key`. `shapes`, `dtypes`: torch's, of each tensor in the object."""
    dims = tuple(tuple(int(size) for size in shape) for shape in shapes)
    nbytes = sum(math.prod(shape) * int(dtype.itemsize) for shape, dtype in zip(dims, dtypes, strict=True))
    return ObjectForm(str(key.model_name), int(key.object_group_id), dims, tuple(str(each) for each in dtypes), nbytes)


def name_of(key: Any) -> str:
    """The name of an object among those of its form, in hexadecimal: LMCache's hash of all tokens up to its end, the
    rank and the sizes of the parallelism, and the `cache_salt` of the request. Raises `ValueError` for a short hash: it
    does not tell prompts apart reliably."""
    if len(key.chunk_hash) != HASH_BYTES:
        raise ValueError(
            f"LMCache's hash has {len(key.chunk_hash)} bytes; expected {HASH_BYTES} (LMCache's flag "
            "--hash-algorithm blake3)"
        )
    words = json.dumps([key.chunk_hash.hex(), int(key.kv_rank), str(key.cache_salt)])
    return hashlib.blake2b(words.encode(), digest_size=HASH_BYTES).hexdigest()


def layout_of(form: ObjectForm, lmcache: str, settings: AdapterSettings) -> OpaqueLayout:
    """The layout of the objects of one form. `lmcache`: LMCache's version. Reads the model's files the first time.
    Raises `LayoutRefused` for weights that cannot be identified."""
    cache = {"lmcache": lmcache, "group": form.group, "shapes": form.shapes, "dtypes": form.dtypes}
    layout = OpaqueLayout(
        model_id=Path(form.model).name[-200:] or "model",
        weights_digest=settings.weights_digest or digest_of_directory(directory_of(form.model)),
        engine=settings.engine,
        cache=json.dumps(cache, sort_keys=True, separators=(",", ":")),
        shards=1,
        shard_bytes=form.nbytes,
        segment_tokens=settings.chunk_tokens,
    )
    layout.check()
    return layout


def directory_of(model: str) -> Path:
    """The directory with the weights of LMCache's model name. Raises `LayoutRefused` for a name that is none: LMCache
    does not tell which revision of a model the engine has loaded."""
    if not Path(model).is_dir():
        raise LayoutRefused(f"LMCache's model name {model!r} is no directory here; set 'weights_digest'")
    return Path(model)
