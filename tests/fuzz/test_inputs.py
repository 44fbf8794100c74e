"""Inputs of a node other than messages: configuration from every source, layouts, event logs, frames on blocking
sockets.

Each is taken, or refused with the documented error; no memory is allocated for a stated length before its bytes are
there.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.hostile import BOUNDS, damaged
from tests.profiles import examples
from tests.rules.settings import FIELDS, load, tenant
from tokenlake.config import ServerConfig, load_config
from tokenlake.core import CoreConfig, events
from tokenlake.directory.ring_record import RingRecord
from tokenlake.errors import ConfigurationError, LayoutRefused, ProtocolRefused
from tokenlake.layout import Layout
from tokenlake_client.engines.vllm.settings import EngineSettings, read_settings
from tokenlake_server.bulk.blocking_sockets import read_frame
from tokenlake_testing.event_log import Recorder, replay

PEAK_BYTES = 1 << 20

# -- configuration

TOKEN = "a-token-that-nobody-may-read"
FILE = f"""
node = "n0"
memory = "1GiB"
region_size = 67108864
lease_s = 2.5
peers = ["n1=127.0.0.1:1/1GiB", "n2=[::1]:2/2GiB"]
allow_uids = [1000, 1001]
huge_pages = false
cluster_secret = "{"ab" * 16}"
{tenant("a", uids=[7], tokens=[TOKEN])}{tenant("b")}"""
WORDS = [
    "nan",
    "-inf",
    "1e999",
    "0x10",
    "1_000",
    "-0",
    "\0",
    "",
    "[",
    "]",
    "{",
    "'",
    '"""',
    "= =",
    "true",
    "٣",
    "1GiB",
    "\ud800",
]


@given(data=st.data())
@settings(max_examples=examples(300))
def test_a_damaged_file_is_taken_or_refused(data: st.DataObject) -> None:
    text = data.draw(st.one_of(damaged(FILE.encode()).map(lambda body: body.decode(errors="replace")), st.text()))
    with contextlib.suppress(ConfigurationError):
        assert isinstance(load(text).config, ServerConfig)


@given(
    environ=st.dictionaries(
        st.sampled_from([*(f"TOKENLAKE_{field.upper()}" for field in FIELDS), "TOKENLAKE_", "TOKENLAKE_NODES", "HOME"]),
        st.one_of(st.sampled_from(WORDS), st.text(max_size=20), st.sampled_from(BOUNDS).map(str)),
        max_size=3,
    ),
    runtime=st.one_of(st.none(), st.text(max_size=200)),
    file=st.sampled_from([None, FILE]),
)
@settings(max_examples=examples(300))
def test_any_environment_is_taken_or_refused_by_name(
    environ: dict[str, str], runtime: str | None, file: str | None
) -> None:
    given_ = environ | ({} if runtime is None else {"XDG_RUNTIME_DIR": runtime})
    try:
        load_config(toml_text=file, environ=given_, flags={}, uid=1000)
    except ConfigurationError as error:
        named = error.field.upper()
        assert f"TOKENLAKE_{named}" in environ or named in ("SOCKET", "REGION_SIZE", "METRICS", "PEERS")


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12), st.booleans())
@settings(max_examples=examples(100))
def test_no_refusal_shows_a_token(field: str, tables: bool) -> None:
    value = [{"name": "a", "secret": "00" * 16, "tokens": [TOKEN], field: TOKEN}] if tables else TOKEN
    for name in ("tenants", "cluster_secret"):
        try:
            load(None, {}, **{name: value})
        except ConfigurationError as error:
            assert TOKEN not in str(error)


ENGINE_FIELDS = EngineSettings.__struct_fields__
engine_values = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(BOUNDS),
    st.floats(),
    st.sampled_from(WORDS),
    st.lists(st.integers(), max_size=2),
)


@given(
    extra=st.dictionaries(st.one_of(st.sampled_from(ENGINE_FIELDS), st.text(max_size=8)), engine_values, max_size=3),
    environ=st.dictionaries(
        st.sampled_from([f"TOKENLAKE_ENGINE_{field.upper()}" for field in ENGINE_FIELDS]),
        st.sampled_from(WORDS),
        max_size=2,
    ),
)
@settings(max_examples=examples(300))
def test_an_engines_settings_are_taken_or_refused_by_name(extra: dict[str, Any], environ: dict[str, str]) -> None:
    try:
        found = read_settings(extra, environ)
    except ConfigurationError as error:
        assert error.field in extra or f"TOKENLAKE_ENGINE_{error.field.upper()}" in environ
    else:
        assert 0 < found.match_ms <= 60_000
        assert 0 <= found.write_patience_s <= 3600
        assert found.segment_tokens > 0
        assert found.write_queue > 0


# -- layouts

LAYOUT = Layout(
    model_id="m", weights_digest="00", dtype="float16", layers=2, kv_heads=8, key_dim=64, value_dim=64, position="rope"
)
layout_pairs = st.lists(
    st.tuples(
        st.sampled_from([*Layout.__struct_fields__, "other"]),
        st.one_of(st.sampled_from(BOUNDS), st.text(max_size=9), st.sampled_from(["float16", "full", "none"])),
    ),
    max_size=14,
)


@given(data=st.data())
@settings(max_examples=examples(300))
def test_any_layout_is_taken_or_refused(data: st.DataObject) -> None:
    pairs = dict(LAYOUT_PAIRS) | dict(data.draw(layout_pairs))
    encoded = msgspec.msgpack.encode([LAYOUT_VERSION, list(pairs.items())])
    body = data.draw(st.one_of(st.just(encoded), damaged(encoded), damaged(LAYOUT.encode()), st.binary(max_size=60)))
    with contextlib.suppress(LayoutRefused):
        layout = Layout.decode(body)
        assert 0 < layout.segment_bytes <= 1 << 31
        assert layout.shard_bytes * layout.shards == layout.segment_bytes
        assert Layout.decode(layout.encode()) == layout


LAYOUT_VERSION, LAYOUT_PAIRS = msgspec.msgpack.decode(LAYOUT.encode())

# -- event logs


def recorded(path: Path) -> bytes:
    """A short log."""
    config = CoreConfig("n0", 1, RingRecord.of({"n0": 1 << 20, "n1": 1 << 20}), 1, 1 << 20)
    recorder = Recorder(path, config, 1.0)
    recorder.add(2.0, events.Tick(), [])
    recorder.close()
    return path.read_bytes()


@given(data=st.data())
@settings(max_examples=examples(200))
def test_any_event_log_is_replayed_or_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log"
        good = recorded(path)
        path.write_bytes(data.draw(st.one_of(damaged(good), st.binary(max_size=80))))
        with contextlib.suppress(ProtocolRefused):
            replay(path)


@pytest.mark.parametrize("size", [b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff"], ids=["2 GiB", "4 GiB"])
def test_a_log_that_promises_much_takes_no_memory(tmp_path: Path, size: bytes) -> None:
    """Reading a record by its stated length would allocate up to 4 GiB for a damaged log."""
    path = tmp_path / "log"
    path.write_bytes(recorded(path) + size + b"cut")
    tracemalloc.start()
    try:
        assert replay(path).cut_off == len(size) + 3
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()


# -- blocking sockets


@pytest.mark.parametrize("size", [1 << 31, (1 << 32) - 1, 1001])
def test_a_frame_beyond_the_bound_is_refused_before_it_is_read(size: int) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(size.to_bytes(4, "little") + b"rest")
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolRefused, match=f"a frame of {size} bytes"):
                read_frame(near, 1000)
            assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
        finally:
            tracemalloc.stop()
        assert near.recv(9) == b"rest"
