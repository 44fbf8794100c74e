"""The segments of this node in vLLM's KV-event format, for routers that read the events of engines (llm-d, Dynamo)."""

from tokenlake_server.kv_events.publisher import KvEvents

__all__ = ["KvEvents"]
