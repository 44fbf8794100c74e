"""A daemon that cannot start the threads of transfers, or whose instructions about bytes fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness.live import (
    LAYOUT,
    Prompt,
    accounted,
    daemons,
    match,
    read,
    store,
    wait_told,
    wait_until,
)
from tokenlake.wire import Code

pytestmark = [pytest.mark.live, pytest.mark.rest]


@pytest.mark.parametrize("fault", ["threads", "sinks"])
@pytest.mark.parametrize("number", [0, 1], ids=["receiver", "sender"])
def test_a_daemon_that_cannot_carry_out_a_transfer_keeps_no_slot(number: int, fault: str, tmp_path: Path) -> None:
    """Neither a slot nor a connection nor a fetch waits for a thread that does not exist."""
    file = tmp_path / "fault"
    with daemons(2) as cluster:
        cluster.nodes[number].kill()
        cluster.nodes[number].start("tests.robustness.faulty_daemon", fault=str(file))
        cluster.wait_ready()
        with cluster.connect(0, LAYOUT) as reader, cluster.connect(1, LAYOUT) as writer:
            prompts = [Prompt(70_000 + seed, 2) for seed in range(4)]
            for prompt in prompts:
                assert store(writer, prompt) == bytes([Code.COMMITTED]) * 2
            wait_told(cluster)
            leases = [match(reader, prompt) for prompt in prompts]
            assert [lease.hits for lease in leases] == [2] * 4
            file.write_text(fault)
            for lease in leases:
                lease.fetch(deadline_s=0.2)
                lease.release()
            for node in cluster.nodes:
                wait_until(lambda node=node: accounted(node), f"the slots of {node.name} add up")  # type: ignore[misc]
            file.write_text("")
            wait_until(lambda: all(read(reader, prompt) == 2 for prompt in prompts), "all is read")
            for node in cluster.nodes:
                wait_until(lambda node=node: accounted(node), f"the slots of {node.name} add up")  # type: ignore[misc]
