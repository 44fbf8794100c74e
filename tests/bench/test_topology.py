"""The study of locations: domains of the simulated network, and nodes and routers that know them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake_bench.simulation.command import SimulateArguments
from tokenlake_bench.simulation.network import Link, Network, NetworkShape
from tokenlake_bench.simulation.topology import FASTER, Measured, main, study

MB = 10**6


def test_a_domain_has_links_of_its_own() -> None:
    """A transfer between domains delays none within a domain, and only its bytes count as slow."""
    slow, fast = Link(0.001, 100 * MB), Link(0.001, FASTER * 100 * MB)
    network = Network(NetworkShape(slow, domain_nodes=2, near=fast), 4)
    assert network.transfer(0.0, 0, 2, 100 * MB, background=True) == pytest.approx((1.0, 1.001))
    assert network.transfer(0.0, 0, 1, 100 * MB) == pytest.approx((0.1, 0.101))
    assert network.transfer(0.0, 0, 3, 100 * MB) == pytest.approx((2.0, 2.001))
    assert network.between_domains == {True: 100 * MB, False: 100 * MB}
    assert (network.link(0, 1), network.link(1, 2)) == (fast, slow)


def test_a_router_that_knows_domains_reads_within_them(tmp_path: Path) -> None:
    """Requests share a prefix. Those that its owner cannot start at once go to nodes beside it."""
    prompts: list[tuple[int, list[int]]] = []
    for group in range(0, 400, 100):
        prompts.append((400 * group, [group, group + 1]))
        behind = [range(group + at, group + at + 8) for at in (9, 19, 29)]
        prompts += [(400 * group + 20_000, [group, group + 1, *each]) for each in behind]
    lines = [
        msgspec.json.encode({"timestamp": at, "input_length": 512 * len(ids), "output_length": 2, "hash_ids": ids})
        for at, ids in prompts
    ]
    trace, file = tmp_path / "trace.jsonl", tmp_path / "study.json"
    trace.write_bytes(b"\n".join(lines))
    words = ["--trace", trace, "--nodes", 8, "--domains", 2, "--capacity-tokens", 400_000, "--json", file]
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == 0, done.output
    found = {each.variant: each for each in msgspec.json.decode(file.read_bytes(), type=list[Measured])}
    assert found.keys() == {"blind", "nodes", "router", "both"}
    assert found["blind"].between_domains > 0
    assert found["both"].slow == found["router"].slow == 0 < found["both"].row.bytes_moved
    assert all(each.slow <= each.row.bytes_moved for each in found.values())
    assert "x" in done.output


def test_domains_have_equal_numbers_of_nodes() -> None:
    with pytest.raises(ConfigurationError, match="domains"):
        study([SimulateArguments(nodes=3)], 2, ["blind"], Console(quiet=True))
    with pytest.raises(ConfigurationError, match="variants"):
        study([SimulateArguments(nodes=4)], 2, ["sighted"], Console(quiet=True))
