"""Mode `ship` while daemons restart with kept memory: the query engine of each life maps the memory anew."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.engines.models import SEGMENT, prompt
from tests.engines.test_shipping import engine_at, generate, put, shipped, whole
from tests.query.scene import engine_of, serving, wait_serving
from tests.robustness.live import accounted, total, wait_until
from tokenlake_client.engines.transformers import layout_of

pytestmark = [pytest.mark.live, pytest.mark.rest]

NODES = 2
READER = 1
SEGMENTS = 6
HOW = ("in order", "killed")
WITHHELD = ("tokenlake_survivors", "tokenlake_withheld_slots")


def test_queries_go_on_and_nothing_is_withheld(model: Any) -> None:
    """Prompts at each of two nodes, read at one of them. A query engine of before, which maps the memory, withholds no
    slot from the next daemon."""
    rows = [prompt(SEGMENTS * SEGMENT + 3, 3000 + node) for node in range(NODES)]
    expected, _ = generate(model.generate, rows)
    with serving(NODES, "8MiB", keep_s="600") as cluster:
        for number, row in enumerate(rows):
            put(cluster, model, [row], number)

        def found() -> bool:
            """A prefix that is not found would be computed, and stored at the reader's node."""
            with cluster.connect(READER, layout_of(model, segment_tokens=SEGMENT)) as pool:
                matches = [pool.match(whole(pool, row), deadline_s=5.0) for row in rows]
                hits = [lease.hits for lease in matches]
                for lease in matches:
                    lease.release()
                return hits == [SEGMENTS] * NODES

        with engine_at(cluster, READER, model) as engine:

            def all_shipped() -> bool:
                before = engine.counts.tokens_shipped
                assert generate(engine.generate, rows)[0] == expected
                return engine.counts.tokens_shipped - before == shipped(rows)

            assert all_shipped()
            for number, how in itertools.product(range(NODES), HOW):
                node, old, sent = cluster.nodes[number], engine_of(cluster.nodes[number]), engine.counts.bytes_sent
                if how == "killed":
                    node.kill()
                else:
                    assert node.stop() == 0
                # Of a prompt at the other node, the engine would store its own copy.
                assert generate(engine.generate, rows[READER:])[0] == expected[READER:], "the node is down"
                node.start()
                cluster.wait_ready()
                wait_serving(cluster, number, old)
                wait_until(found, "both prefixes are found again")
                wait_until(all_shipped, "queries are shipped to both prefixes again")
                # The reader's node has copies of all, once the engine has fetched what it could not ship queries to.
                assert number == READER or engine.counts.bytes_sent > sent, "queries went to the kept prefix"
                wait_until(lambda: not Path(f"/proc/{old}").exists(), "the query engine of before has ended")  # noqa: B023
                wait_until(lambda: not any(total(node, name) for name in WITHHELD), "all slots are given out")  # noqa: B023
        for node in cluster.nodes:
            wait_until(lambda: accounted(node), "nothing is leased or withheld")  # noqa: B023
