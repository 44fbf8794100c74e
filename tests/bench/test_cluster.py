"""The daemons of a benchmark, before they are started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenlake_testing.cluster import Cluster


@pytest.mark.parametrize("nbytes", [0, 1 << 30])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_each_node_gets_a_disk_of_its_own(tmp_path: Path, nbytes: int, elsewhere: bool) -> None:
    cluster = Cluster(2, "64MiB", "64MiB")
    cluster.give_disks(tmp_path if elsewhere else None, nbytes)
    paths = []
    for node in cluster.nodes:
        path, _, size = node.settings["disk"].partition(":")
        assert int(size or 0) == nbytes
        assert Path(path).stat().st_mode & 0o777 == 0o700
        paths.append(Path(path))
    assert len(set(paths)) == 2
    cluster.close()
    assert [path.exists() for path in paths] == [elsewhere] * 2
