"""New cache that is stored layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, SEGMENT_TOKENS, Prompt, accounted, daemons, match, read, wait_until
from tokenlake.attention import SlotMap
from tokenlake.errors import LayoutRefused, Unreachable
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_client.transfer import LayerCache, Transfer
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

SLOTS = SlotMap.of(LAYOUT)


@pytest.fixture
def pool(shared: Cluster) -> Iterator[Pool]:
    with shared.connect(0, LAYOUT) as pool:
        yield pool
    wait_until(lambda: accounted(shared.nodes[0]), "all grants were given back")


def layer_of(prompt: Prompt, layer: int, segments: Sequence[int]) -> LayerCache:
    """A layer as an engine computes it: one array over all tokens, not contiguous, whose segments are the prompt's
    bytes."""
    parts = [SLOTS.views(np.frombuffer(prompt.content(index), np.uint8), layer) for index in segments]
    keys, values = (
        np.concatenate([part[side].reshape(LAYOUT.kv_heads, SEGMENT_TOKENS, -1) for part in parts], axis=1)
        for side in (0, 1)
    )
    return np.asfortranarray(keys), np.asfortranarray(values)


def put_all(pool: Pool, prompts: Sequence[Prompt], layers: Sequence[int], first: int = 0) -> list[bytes]:
    transfer = pool.engine.init_transfer([(pool.prefix(prompt.tokens).keys[first:], first) for prompt in prompts])
    for layer in layers:
        transfer.put(layer, [layer_of(each, layer, range(first, each.segments)) for each in prompts])
    assert transfer.wait(LIMIT_S)
    return transfer.codes


@pytest.mark.parametrize("layers", [[0, 1], [1, 0]])
def test_layers_are_read_as_whole_segments(pool: Pool, layers: list[int]) -> None:
    prompts = [Prompt(10 + layers[0], 3), Prompt(20 + layers[0], 5)]
    codes = put_all(pool, prompts, layers)
    assert codes == [bytes([Code.COMMITTED]) * 3, bytes([Code.COMMITTED]) * 5]
    assert [read(pool, prompt) for prompt in prompts] == [3, 5]


def test_only_new_segments_are_copied(pool: Pool) -> None:
    short = Prompt(30, 2)
    longer = Prompt(31, 2, short)
    assert put_all(pool, [short], [0, 1]) == [bytes([Code.COMMITTED]) * 2]
    assert put_all(pool, [longer], [0, 1]) == [bytes([Code.EXISTS]) * 2 + bytes([Code.COMMITTED]) * 2]
    assert put_all(pool, [Prompt(32, 1, longer)], [0, 1], first=4) == [bytes([Code.COMMITTED])]
    assert read(pool, longer) == 4


def test_nothing_is_found_before_the_last_layer(pool: Pool) -> None:
    prompt = Prompt(40, 2)
    transfer = pool.engine.init_transfer([(pool.prefix(prompt.tokens).keys, 0)])
    transfer.put(0, [layer_of(prompt, 0, range(2))])
    assert transfer.copied(LIMIT_S)
    assert not transfer.wait(0.0)
    assert transfer.codes == [bytes([Code.RESERVED]) * 2]
    with match(pool, prompt) as lease:
        assert lease.hits == 0
    transfer.abort()
    assert transfer.copied(LIMIT_S)
    assert transfer.codes == [bytes([Code.EXPIRED]) * 2]
    with match(pool, prompt) as lease:
        assert lease.hits == 0


def test_arrays_that_do_not_fit_are_refused(pool: Pool) -> None:
    prompt = Prompt(50, 2)
    transfer = pool.engine.init_transfer([(pool.prefix(prompt.tokens).keys, 0)])
    keys, values = layer_of(prompt, 0, range(2))
    with pytest.raises(LayoutRefused, match="values of shape"):
        transfer.put(0, [(keys, values[:, :-1])])
    with pytest.raises(LayoutRefused, match="float64"):
        transfer.put(0, [(np.zeros(keys.shape), values)])
    with pytest.raises(LayoutRefused, match="parts"):
        transfer.put(0, [])
    with pytest.raises(LayoutRefused, match="still to come: 0, 1"):
        transfer.put(2, [(keys, values)])
    transfer.put(0, [(keys, values)])
    with pytest.raises(LayoutRefused, match="still to come: 1"):
        transfer.put(0, [(keys, values)])
    transfer.abort()


def test_the_codes_after_the_death_of_the_daemon() -> None:
    prompt = Prompt(60, 2)
    with daemons() as cluster, cluster.connect(0, LAYOUT) as pool:
        transfer = pool.engine.init_transfer([(pool.prefix(prompt.tokens).keys, 0)])
        transfer.put(0, [layer_of(prompt, 0, range(2))])
        cluster.nodes[0].kill()
        transfer.put(1, [layer_of(prompt, 1, range(2))])
        assert transfer.wait(LIMIT_S)
        assert transfer.codes == [bytes([Code.EXPIRED]) * 2]
        with pytest.raises(Unreachable):
            pool.engine.init_transfer([(pool.prefix(prompt.tokens).keys, 0)])


def test_slots_that_are_being_written_are_not_given_back(pool: Pool) -> None:
    """The pool closes while a layer is copied, and another thread puts the next one: the daemon lends slots that it
    gets back to other engines."""
    prompt, going_on = Prompt(90, 3), threading.Event()
    executor = ThreadPoolExecutor(1)
    executor.submit(going_on.wait, LIMIT_S)
    transfer = Transfer(LAYOUT, [pool.store(pool.prefix(prompt.tokens).keys)], executor)
    transfer.put(0, [layer_of(prompt, 0, range(3))])
    executor.shutdown(wait=False)
    threading.Timer(0.1, going_on.set).start()
    transfer.put(1, [layer_of(prompt, 1, range(3))])
    assert going_on.is_set()
    assert transfer.codes == [bytes([Code.EXPIRED]) * 3]
