"""A tenant that takes all that it may have of the control plane takes nothing from other tenants and operators."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, memory_of, pid_of, read, store, total, wait_until
from tests.server.control.scene import CALL_S, certificates, local, remote, served
from tests.server.control.test_limits import plans
from tests.server.scene import OF_THIS_USER, RED, tenants
from tokenlake.errors import Refused
from tokenlake_client import Pool
from tokenlake_client.control import Certificates
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_server.control.limits import READING, TENANT_CALLS
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

REPORT, PLANS = "/tokenlake.v1.Scheduling/Report", "/tokenlake.v1.Scheduling/GenPlans"


def channel(address: str, held: Certificates) -> Any:
    credentials = grpc.ssl_channel_credentials(
        held.ca.read_bytes(), held.key.read_bytes(), held.certificate.read_bytes()
    )
    options = [("grpc.ssl_target_name_override", "node0"), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(address, credentials, options)


def test_calls_messages_and_plans_of_one_tenant(tmp_path: Path) -> None:
    """Its calls wait or are refused; another tenant's calls, the operator and engines are served."""
    config = tenants(tmp_path, blue=OF_THIS_USER)
    cluster = Cluster(1, "4MiB", "1MiB", config=config, match_deadline_ms="2000")
    (address,) = served(cluster).values()
    done = threading.Event()

    def silent() -> Iterator[bytes]:
        done.wait()
        yield b""

    with cluster:
        node, ca = cluster.nodes[0], cluster.directory / "ca"
        flooding, quiet = (certificates(ca, f"s-{name}", "scheduler", name) for name in ("blue", "red"))
        pid = pid_of(node)
        with channel(address, flooding) as busy, remote(address, "node0", quiet) as other, local(node) as operator:
            before = memory_of(pid)
            held = [busy.stream_unary(REPORT).future(silent(), timeout=CALL_S) for _ in range(TENANT_CALLS)]
            wait_until(lambda: total(node, "tokenlake_control_calls") >= TENANT_CALLS, "all calls are counted")
            with pytest.raises(grpc.RpcError) as refused:
                busy.unary_unary(REPORT)(b"", timeout=CALL_S)
            error: Any = refused.value
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"{TENANT_CALLS} of one tenant" in error.details()
            assert total(node, "tokenlake_control_refused_calls") == 1
            assert total(node, "tokenlake_control_call_bytes") <= READING // 2, "a tenant has its part of the room"
            assert list(other.layouts()) == []
            assert operator.status().node == "node0"
            for each in held:
                each.cancel()
            wait_until(lambda: total(node, "tokenlake_control_calls") == 0, "the calls have ended")
            assert total(node, "tokenlake_control_call_bytes") == 0

            message = plans(4000, 200)
            fleet = pb.Fleet(name="x" * 257, layers=2, segment_bytes=1024, segment_tokens=16, query_bytes=64)
            message.fleet.MergeFrom(fleet)
            message.fleet.name = "f"
            heavy = message.SerializeToString()
            asked = [busy.unary_unary(PLANS).future(heavy, timeout=CALL_S) for _ in range(24)]
            with pytest.raises(Refused, match="256"):
                other.report(pb.ReportRequest(fleet=fleet))
            assert operator.status().node == "node0"
            with Pool.connect(node.socket, LAYOUT, RED, deadlines=PATIENT) as pool:
                store(pool, Prompt(1, 3))
                assert read(pool, Prompt(1, 3)) == 3
            for each in asked:
                with pytest.raises(grpc.RpcError):
                    each.result()
            assert memory_of(pid) < before + (64 << 20)
        done.set()
        assert operator_sees(cluster)


def operator_sees(cluster: Cluster) -> bool:
    with local(cluster.nodes[0]) as operator:
        return bool(operator.status().node)
