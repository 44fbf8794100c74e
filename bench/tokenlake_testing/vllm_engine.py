"""An engine of vLLM, in the process that serves its commands (`tokenlake_testing.engine_lines`)."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any


class VllmEngine:
    """An engine of vLLM in this process. Its public methods are the commands that the process serves."""

    def __init__(
        self,
        model: str,
        pool: dict[str, Any] | list[dict[str, Any]] | None,
        transfer: dict[str, Any],
        arguments: dict[str, Any],
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        settings: dict[str, Any] = {
            "enforce_eager": True,
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 4096,
            "max_num_seqs": 16,
            "seed": 0,
            "skip_tokenizer_init": True,
            **arguments,
        }
        if events := settings.pop("kv_events", None):
            from vllm.config.kv_events import KVEventsConfig

            settings["kv_events_config"] = KVEventsConfig(**events)
        transfer = (transfer_of(pool) if pool is not None else {}) | transfer
        if transfer and pool is None:
            _accept_cffi_libraries()
        if transfer:
            settings["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._pool = pool
        self._planted: tuple[Any, str, Any] | None = None
        self._adapters: dict[str, int] = {}
        self._llm = LLM(model=model, **settings)

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        salt: str | None,
        adapter: str | None = None,
        params: Any = None,
        image: Any = None,
    ) -> dict[str, Any]:
        """The fields of `Timed` but the seconds. `params`: the `kv_transfer_params` of all requests, or a list with
        those of each, which are objects."""
        from vllm import SamplingParams

        each = isinstance(params, list) and [isinstance(one, dict | None) for one in params] == [True] * len(prompts)
        greedy = [
            SamplingParams(
                temperature=0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args=None if fields is None else {"kv_transfer_params": fields},
            )
            for fields in (params if each else [params] * len(prompts))
        ]
        extra: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
        if image is not None:
            seed, name = image
            extra["multi_modal_data"] = {"image": [image_of(seed)]}
            if name is not None:
                extra["multi_modal_uuids"] = {"image": [name]}
        asked: Any = [{"prompt_token_ids": prompt, **extra} for prompt in prompts]
        lora = None if adapter is None else self._lora(adapter)
        outputs = self._llm.generate(asked, greedy, use_tqdm=False, lora_request=lora)
        tokens_of_each = [list(output.outputs[0].token_ids) for output in outputs]
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return {
            "tokens": tokens_of_each,
            "cached": cached,
            "params": [output.kv_transfer_params for output in outputs],
        }

    def aborted(self, prompt: list[int], tokens: int) -> list[int]:
        """Generate greedily for one request, and abort it when it has `tokens` tokens, which are returned."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        greedy = SamplingParams(temperature=0, max_tokens=2 * tokens, ignore_eos=True, detokenize=False)
        engine.add_request("moves", {"prompt_token_ids": prompt}, greedy)
        answer: list[int] = []
        while len(answer) < tokens:
            for output in engine.step():
                answer = list(output.outputs[0].token_ids)
        engine.abort_request(["moves"])
        return answer

    def begin(self, prompt: list[int]) -> None:
        """Give the engine a request whose lookup begins, without a step in which a load could begin."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        engine.add_request("begun", {"prompt_token_ids": prompt}, greedy)
        if self.door() != "connector":
            # The lookup begins in the first step, which does not wait for its answer.
            engine.step()

    def abort(self) -> None:
        """Abort the request of `begin`."""
        self._llm.llm_engine.abort_request(["begun"])
        self.idle()

    def idle(self) -> None:
        """The step that vLLM's server makes after the end of the last request: the connector takes the outcomes."""
        self._llm.llm_engine.step()

    def hinted(self, prompt: list[int], tokens: int, actions: list[dict[str, Any]], salt: str | None) -> list[int]:
        """Generate greedily for one request that carries actions of a router in vLLM's field for them."""
        from vllm import SamplingParams
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

        engine = self._llm.llm_engine
        greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        hints = KvHintsEnvelope("1.0", "m", [KvHintAction(**each) for each in actions])
        extra: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
        engine.add_request("hinted", {"prompt_token_ids": prompt, **extra}, greedy, kv_hints=hints)
        answer: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer = list(output.outputs[0].token_ids)
        return answer

    def traced(self, name: str, prompt: list[int], tokens: int, headers: dict[str, str]) -> list[int]:
        """Generate greedily for one request with these headers of a trace, and empty vLLM's own cache. The loads and
        stores of the request have ended on return."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": prompt}, greedy, trace_headers=headers)
        answer: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer = list(output.outputs[0].token_ids)
        self.flush()
        assert self.forget()
        return answer

    def load_adapter(self, directory: str) -> bool:
        """Load a LoRA adapter, in place if it was loaded before, as vLLM's server does on request."""
        return bool(self._llm.llm_engine.add_lora(self._lora(directory, load_inplace=True)))

    def _lora(self, directory: str, **fields: Any) -> Any:
        from vllm.lora.request import LoRARequest

        number = self._adapters.setdefault(directory, len(self._adapters) + 1)
        return LoRARequest(f"adapter {number}", number, directory, **fields)

    def forget(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def reset(self, how: str) -> bool:
        """Reset vLLM's prefix cache and the connector's state; the pool keeps its segments. `how`: "sleep" puts the
        engine to sleep and wakes it up, any other value resets directly. Returns whether vLLM did it."""
        if how == "sleep":
            self._llm.sleep(level=1)
            self._llm.wake_up()
            return True
        return bool(self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True))

    def reload(self, directory: str, version: str | None) -> None:
        """Replace the model's weights by those in `directory`, and set the version of the weights."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})
        if version is not None:
            self._llm.llm_engine.set_weight_version(version)

    def interrupted(self, prompt: list[int], tokens: int, directory: str, preempt: bool) -> dict[str, Any]:
        """Generate tokens greedily for one request, in the middle of which the caches are reset and the weights
        replaced by those in `directory`. Returns the tokens and the reply to the reset. `preempt`: the reset takes the
        request's blocks away."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.add_request("interrupted", {"prompt_token_ids": prompt}, greedy)
        reset: bool | None = None
        answer: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer = list(output.outputs[0].token_ids)
            if reset is None and len(answer) >= tokens // 2:
                reset = bool(engine.reset_prefix_cache(reset_running_requests=preempt, reset_connector=True))
                self.reload(directory, None)
        return {"tokens": answer, "reset": reset}

    def flush(self) -> bool:
        return self._pool is None or all(rank.flush(20) for rank in _ours(self._rank()))

    def counts(self) -> dict[str, float]:
        """Counts of TokenLake's connector, summed over its scheduler side and its rank side, which are both in this
        process."""
        total: dict[str, float] = {}
        for side in (*_ours(self._side()), *_ours(self._rank())) if self._pool is not None else ():
            counts = side.counts
            sums = {"tokens_asked": counts.tokens_asked, "tokens_hit": counts.tokens_hit}
            for name, value in (asdict(counts) | sums).items():
                total[name] = total.get(name, 0) + value
        return total

    def metrics(self) -> str:
        """vLLM's metrics page; it needs the argument `disable_log_stats=False`."""
        from prometheus_client import REGISTRY, generate_latest

        return str(generate_latest(REGISTRY).decode())

    def layout(self) -> str:
        """The layout of the engine's segments, in hexadecimal; empty before it is known."""
        layout = _ours(self._side())[0].layout
        return "" if layout is None else str(layout.encode().hex())

    def door(self) -> str:
        """How the pool serves the engine: "connector" (the model's layout is the pool's), "offloading" (behind vLLM's
        OffloadingConnector), or "none"."""
        from tokenlake_client.engines.vllm.known.connector import KnownLayoutConnector

        if self._pool is None:
            return "none"
        side = _ours(self._side())[0]
        if isinstance(side, KnownLayoutConnector):
            return "connector" if side.layout is not None else "none"
        return "offloading"

    def spoil_writes(self) -> None:
        """From now on, store zeros in place of the cache, with checksums that fit. Where ranks are processes of their
        own, this needs vLLM's variable VLLM_ALLOW_INSECURE_SERIALIZATION."""
        self._llm.collective_rpc(_spoil_writes)

    def save(self, on: bool) -> None:
        import msgspec

        side = self._planner()
        side._settings = msgspec.structs.replace(side._settings, save=on)

    def slow_loads(self, seconds: float) -> None:
        """Make every load of a segment into the engine take `seconds` longer from now on."""
        for rank in _ours(self._rank()):
            copy = rank.on_rank()._copy
            copy.from_slot = _after(seconds, type(copy).from_slot.__get__(copy))

    def slow_saves(self, seconds: float) -> None:
        """Make every copy of a segment out of the engine's blocks take `seconds` longer from now on."""
        for rank in _ours(self._rank()):
            copy = rank.on_rank()._copy
            copy.to_slot = _after(seconds, type(copy).to_slot.__get__(copy))

    def expect_prefill(self, token_s: float) -> None:
        """Make the planner expect `token_s` seconds per computed token, by replacing all measurements of prefills that
        it remembers."""
        from tokenlake.planner.fits import NEWEST

        for number in range(NEWEST):
            tokens = 100 * (number + 1)
            self._side()._scheduler.rates.prefill.add(tokens, 0, tokens * token_s, time.monotonic())

    def hook_ms(self, tokens: int) -> float | None:
        """Milliseconds that vLLM's scheduler spends in the connector on a new prompt, for hashing it, sending the match
        and taking the reply; the least of 20 measurements. vLLM's own hashing of the prompt is not part of it."""
        if self._pool is None:
            return None
        side = self._side()
        best = float("inf")
        for number in range(20):
            request = self._request(f"hook {number}", [(number + at) % 1000 for at in range(tokens)])
            spent = -time.perf_counter()
            side.on_new_request(request)
            answer, _ = side.get_num_new_matched_tokens(request, 0)
            spent += time.perf_counter()
            while answer is None:
                time.sleep(0.03)
                began = time.perf_counter()
                answer, _ = side.get_num_new_matched_tokens(request, 0)
                last = time.perf_counter() - began
                spent += last if answer is not None else 0.0
            best = min(best, spent)
            side.request_finished_all_groups(request, ([],) * self._groups())
        return best * 1e3

    def _request(self, name: str, tokens: list[int]) -> Any:
        """A request as vLLM's scheduler has it."""
        from vllm import SamplingParams
        from vllm.v1.request import Request, RequestStatus

        core = self._llm.llm_engine.engine_core.engine_core
        params = SamplingParams(temperature=0, max_tokens=1)
        request = Request(name, tokens, params, None, block_hasher=core.request_block_hasher)
        request.status = RequestStatus.FINISHED_ABORTED
        return request

    def _groups(self) -> int:
        """The number of groups of layers of vLLM's cache."""
        return len(self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups)

    def plant(self, call: str, error: str) -> None:
        """Let a call, such as "Pool.match" or "ChunkManager.step_ends", raise the error of this name from now on,
        and the call of the last `plant` work again. An empty `call`: only the latter."""
        import builtins

        from tokenlake import errors
        from tokenlake_client import lease, match, pool
        from tokenlake_client.engines.vllm.offloading import manager

        if self._planted is not None:
            owner, name, right = self._planted
            setattr(owner, name, right)
            self._planted = None
        if not call:
            return
        kind, name = call.split(".")
        owner = next(getattr(module, kind) for module in (pool, match, lease, manager) if hasattr(module, kind))
        raised = getattr(errors, error, None) or getattr(builtins, error)

        def broken(*_: Any, **__: Any) -> Any:
            raise raised(f"{call} is broken")

        self._planted = owner, name, owner.__dict__[name]
        setattr(owner, name, property(broken) if isinstance(owner.__dict__[name], property) else broken)

    def _planner(self) -> Any:
        """The object that plans loads and stores in vLLM's scheduler, of the connector of either kind."""
        side = self._side()
        return side._scheduler if self.door() != "offloading" else side.connector_scheduler.manager.chunks

    def _side(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler.connector

    def _rank(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()


def _spoil_writes(rank: Any) -> None:
    """Let the process of a rank store zeros."""
    write: Any = importlib.import_module("tokenlake_client.write")
    right = write.shard_checksums

    def spoil(segment: Any, *args: Any) -> bytes:
        segment[:] = 0
        return bytes(right(segment, *args))

    write.shard_checksums = spoil


def _accept_cffi_libraries() -> None:
    """Make vLLM's search for Triton kernels pass over libraries of cffi, which LMCache imports: `vars()` of such a
    library is a function."""
    import builtins

    from vllm.triton_utils import dispatcher

    def attributes(value: Any) -> dict[str, Any]:
        found: Any = builtins.vars(value)
        return found if isinstance(found, dict) else {}

    dispatcher.vars = attributes


def transfer_of(pool: dict[str, Any] | list[dict[str, Any]]) -> dict[str, Any]:
    """The text of `--kv-transfer-config` for one connector with these settings, or for several."""
    if isinstance(pool, list):
        connectors = {"connectors": [transfer_of(settings) for settings in pool]}
        return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": connectors}
    return {
        "kv_connector": "TokenLakeConnector",
        "kv_connector_module_path": "tokenlake_client.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": pool,
    }


def image_of(seed: int) -> Any:
    """An image of random squares, for the models of `families.save_pictures`."""
    import numpy as np
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(squares.repeat(8, axis=0).repeat(8, axis=1))


def _after(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
    def late(*args: Any) -> Any:
        time.sleep(seconds)
        return call(*args)

    return late


def _ours(connector: Any) -> list[Any]:
    """The TokenLake connectors in this process: `connector` itself, or those within a `MultiConnector`."""
    return list(getattr(connector, "sub_connectors", [connector]))
