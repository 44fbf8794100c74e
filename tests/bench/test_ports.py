"""A reserved port belongs to the server that it was reserved for, before its start and between its lives."""

from __future__ import annotations

import socket

import pytest

from tokenlake_testing.ports import RESERVED, reserve_port


def test_a_server_listens_again_and_again_at_a_reserved_port() -> None:
    port = reserve_port()
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with (
            socket.create_server(("127.0.0.1", port)) as server,
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            accepted, _ = server.accept()
            # The server closes first: its end of the connection keeps the port for a minute.
            accepted.close()
            assert client.recv(1) == b""


def test_the_kernel_gives_a_reserved_port_to_no_other_socket() -> None:
    port = reserve_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    assert port not in {reserve_port() for _ in range(RESERVED - 1)}


def test_the_number_of_reserved_ports_is_bounded() -> None:
    port = reserve_port()
    for _ in range(RESERVED):
        reserve_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
