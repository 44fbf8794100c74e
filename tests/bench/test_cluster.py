"""The daemons of a benchmark: their files and their pages."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tokenlake_testing.cluster import Cluster, Node


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


def test_a_page_that_is_not_served_in_time_is_read_again(tmp_path: Path) -> None:
    """A daemon that is not run for seconds answers for its metrics with the status 503."""
    answers = [(503, b"the control loop did not answer"), (503, b""), (200, b"# TYPE a gauge\na 1\n")]

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        node = Node("a", tmp_path, {})
        node.metrics_port = server.server_port
        try:
            assert node.metrics() == {"a": 1.0}
        finally:
            server.shutdown()
            thread.join()
    assert answers == []
