"""Attention over a part of the tokens, with the log-sum-exp by which it is merged with attention over the other tokens.

This module does in torch what `tokenlake.attention` does in numpy. Queries are [rows, heads, tokens, dim], keys and
values [rows, KV heads, tokens, dim] with heads a multiple of KV heads; the output of a part is float32. The merges
change the tensors of their first part, and no function changes another argument.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tokenlake.attention.torch_merge import RunningMerge

MAX_LOGITS = 1 << 24
"""The largest number of logits that are materialised at a time."""

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Part(NamedTuple):
    """Attention over a part of the tokens. `out`: float32 [rows, heads, tokens, value dim]; `lse`, the log-sum-exp:
    float32 [rows, heads, tokens], natural logarithm."""

    out: Any
    lse: Any


def attend(query: Any, keys: Any, values: Any, scale: float, mask: Any = None) -> Part:
    """Attention of all queries over all tokens of `keys`, at least one. `mask`: bool [rows, 1, query tokens, tokens of
    `keys`], True where a query sees a token; each query must see at least one."""
    rows, heads, tokens, dim = query.shape
    group = heads // keys.shape[1]
    # The query heads that share a KV head are passed to the kernel as several queries of one head, which is 9 times
    # faster for one bfloat16 query token.
    folded = query.reshape(rows, keys.shape[1], group * tokens, dim)
    if mask is not None and tokens > 1:
        mask = mask.repeat(1, 1, group, 1)
    out, lse = _attend(folded, keys, values, scale, mask, causal=False)
    return Part(out.reshape(rows, heads, tokens, -1), lse.reshape(rows, heads, tokens))


def attend_own(query: Any, keys: Any, values: Any, scale: float, mask: Any = None) -> Part:
    """Causal attention, where the tokens of the queries are the last ones of `keys`. `mask`: as in `attend`; it
    replaces the causal mask."""
    tokens = query.shape[2]
    if mask is not None or tokens == 1:
        return attend(query, keys, values, scale, mask)
    cached = keys.shape[2] - tokens
    own = Part(*_attend(query, keys[:, :, cached:], values[:, :, cached:], scale, None, causal=True))
    if not cached:
        return own
    return merge(attend(query, keys[:, :, :cached], values[:, :, :cached], scale), own)


def merge(one: Part, other: Part) -> Part:
    """Attention over the tokens of both parts, merged by their log-sum-exps. Neither part may be empty. Changes the
    tensors of `one`."""
    merged = RunningMerge(*one)
    merged.add(*other)
    return Part(merged.out, merged.lse)


def merge_rows(whole: Part, rows: list[int], part: Part) -> Part:
    """Merge `part` into the rows `rows` of `whole` by their log-sum-exps, and return the result. Changes the tensors of
    `whole`."""
    if rows == list(range(len(whole.lse))):
        return merge(whole, part)
    merged = merge(Part(whole.out[rows], whole.lse[rows]), part)
    whole.out[rows], whole.lse[rows] = merged
    return whole


def _attend(query: Any, keys: Any, values: Any, scale: float, mask: Any, *, causal: bool) -> tuple[Any, Any]:
    if query.device.type != "cpu" or keys.shape[-1] != values.shape[-1]:
        return _materialised(query, keys, values, scale, mask, causal=causal)
    # For an input whose last stride is not 1 the fused kernel returns a wrong result without an error.
    query, keys, values = (
        tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, keys, values)
    )
    bias = None if mask is None else torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    out, lse = _fused(query, keys, values, 0.0, causal, attn_mask=bias, scale=scale)
    return out.float(), lse.float()


def _materialised(query: Any, keys: Any, values: Any, scale: float, mask: Any, *, causal: bool) -> tuple[Any, Any]:
    """Attention that materialises the logits, for inputs that the fused kernel does not support: devices other than a
    CPU, and values with another dimension than the keys."""
    rows, heads, tokens, _ = query.shape
    group = heads // keys.shape[1]
    keys, values = (tensor.float().repeat_interleave(group, dim=1) for tensor in (keys, values))
    if causal:
        mask = torch.ones((1, 1, tokens, tokens), dtype=torch.bool, device=query.device).tril()
    block = max(1, MAX_LOGITS // (rows * heads * keys.shape[2]))
    parts: list[tuple[Any, Any]] = []
    for start in range(0, tokens, block):
        logits = (query[:, :, start : start + block].float() @ keys.mT) * scale
        if mask is not None:
            seen = mask if mask.shape[2] == 1 else mask[:, :, start : start + block]
            logits = logits.masked_fill(~seen, -torch.inf)
        parts.append((logits.softmax(-1) @ values, logits.logsumexp(-1)))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)
