"""The routers, as child processes: LiteLLM's proxy with the plug-in, and vLLM's router."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from tokenlake_bench.router.child import HttpChild
from tokenlake_bench.router.engines import MODEL_NAME
from tokenlake_testing.cluster import Node
from tokenlake_testing.ports import reserve_port

PLUGIN = "tokenlake_client.routers.litellm.plugin"


def litellm(
    routers: Path, directory: Path, engines: Sequence[HttpChild], nodes: Sequence[Node], deadline_ms: float
) -> HttpChild:
    """LiteLLM's proxy with the plug-in, which asks the control plane of the first node. `routers`: directory of the
    environment. `nodes`: of each engine; none for a proxy without the plug-in."""
    port, key = reserve_port(), f"sk-{secrets.token_hex(32)}"
    plugin: dict[str, object] = {"callbacks": ["prometheus"]}
    if nodes:
        controls = [str(node.socket.with_suffix(".control")) for node in nodes]
        plugin = {
            "callbacks": ["prometheus", PLUGIN],
            "tokenlake": {"control": controls, "deadline_ms": deadline_ms},
        }
    config = {
        "model_list": [
            {
                "model_name": MODEL_NAME,
                "litellm_params": {
                    "model": f"hosted_vllm/{MODEL_NAME}",
                    "api_base": f"{engine.base}/v1",
                    "api_key": "none",
                },
                "model_info": {"tokenlake_node": node.name} if node else {},
            }
            for engine, node in zip_longest(engines, nodes)
        ],
        "litellm_settings": {**plugin, "num_retries": 0},
        "general_settings": {"master_key": key},
    }
    # JSON is YAML.
    path = directory / "litellm.yaml"
    path.write_text(json.dumps(config))
    environment = _environment() | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
    command = [str(routers / "bin" / "litellm"), "--config", str(path), "--port", str(port), "--host", "127.0.0.1"]
    headers = {"Authorization": f"Bearer {key}"}
    return HttpChild(command, port, directory / "litellm.log", environment, "/health/readiness", headers)


def vllm_router(routers: Path, directory: Path, engines: Sequence[HttpChild], policy: str) -> HttpChild:
    """vLLM's router with its defaults and this policy."""
    port = reserve_port()
    command = [str(routers / "bin" / "vllm-router"), "--policy", policy, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(reserve_port()), "--worker-startup-check-interval", "1"]
    command += ["--worker-urls", *(engine.base for engine in engines)]
    return HttpChild(command, port, directory / f"vllm-router-{policy}.log", _environment(), "/health")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TOKENLAKE")}
