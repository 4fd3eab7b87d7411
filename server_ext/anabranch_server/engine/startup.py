"""Start-up: build the cache backend, or refuse to serve and say why.

SGLang logs what goes wrong in a plugin and carries on. A server without our hooks would answer with wrong positions,
so nothing is served unless every hook is in place and every flag is one that we support.
"""

from __future__ import annotations

from typing import Any

import sglang.srt.mem_cache.registry as registry
from sglang.srt.utils.common import get_device

from anabranch_server.engine import mapping, rows
from anabranch_server.engine.cache import AnabranchCache, Model
from anabranch_server.engine.versions import UnsupportedSGLang, adapter
from anabranch_server.limits import Limits
from anabranch_server.models import ModelStamp, ModelTraits, traits
from anabranch_server.tenancy import read_keys

BACKEND = "anabranch"
READ_TOKENS = {BACKEND, "flashinfer", "torch_native", "triton"}
"""Attention backends that look up every token's slot at any page size; others look up one slot a page."""


def build_cache(context: Any) -> AnabranchCache:
    """The factory behind `--radix-cache-backend anabranch`. Raises UnsupportedSGLang."""
    from anabranch_server.engine import hooks

    adapter()
    hooks.verify()
    args, config = context.server_args, context.model_config
    refuse_flags(args)
    refuse_model(args, config)
    model_traits = traits_of(config)
    backends = attention_of(args)
    stamp = ModelStamp(
        model=args.model_path,
        weights_version=str(args.weight_version),
        dtype=str(config.dtype),
        kv_dtype=args.kv_cache_dtype,
        rope=model_traits.rope,
    )
    can_shift = None if backends == {BACKEND} else f"the attention backend {' and '.join(sorted(backends))!r}"
    pool = context.params.token_to_kv_pool_allocator.size
    model = Model(
        traits=model_traits,
        stamp=stamp,
        can_shift=can_shift,
        max_context=_max_context(config.context_len, pool, args.page_size),
    )
    cache = AnabranchCache(registry.default_radix_cache_factory(context), model, limits())
    cache.mappers = mapping.build_for_server(context, cache.store.limits.mappers)
    rows.install(cache.rows)
    return cache


def traits_of(config: Any) -> ModelTraits:
    """config: SGLang's ModelConfig."""
    return traits(config.hf_text_config.to_dict(), config.hf_config.architectures)


def refuse_model(args: Any, config: Any) -> None:
    """Raise UnsupportedSGLang if our attention would have to run a model that it cannot run. config: a ModelConfig."""
    unsupported = traits_of(config).unsupported
    if BACKEND in attention_of(args) and unsupported is not None:
        raise UnsupportedSGLang(
            f"the attention backend 'anabranch' does not support {unsupported}; "
            "choose another --attention-backend to serve this model without states"
        )


def _max_context(context_length: int, pool: int, page_size: int) -> int:
    """What SGLang allows a request without cutting it: `tp_worker.get_worker_info` keeps a few tokens back, and
    `Scheduler.init_req_max_new_tokens` rounds the input up to whole pages and keeps one page more."""
    return min(context_length - 7, pool - max(7, 2 * page_size))


def limits() -> Limits:
    """What the operator set; raises UnsupportedSGLang."""
    try:
        found = Limits.read()
        if found.api_keys_file:
            read_keys(found.api_keys_file)
    except ValueError as error:
        raise UnsupportedSGLang(str(error)) from None
    return found


def refuse_flags(args: Any) -> None:
    """Raise UnsupportedSGLang, by name, for server arguments under which states would go wrong."""
    others = ", ".join(_read_pages(args))
    refused = {
        "--tokenizer-worker-num over 1": args.tokenizer_worker_num > 1,
        "--grpc-mode": args.grpc_mode or args.smg_grpc_mode,
        "--api-key, when there is a keys file (the operator's key is --admin-api-key),": args.api_key is not None
        and bool(limits().api_keys_file),
        f"--page-size {args.page_size} with the attention backend {others} (it reads whole pages)": bool(others),
        "--dp-size over 1": args.dp_size > 1,
        "--pp-size over 1": args.pp_size > 1,
        "--dcp-size over 1": (args.dcp_size or 1) > 1,
        "--attn-cp-size over 1": (args.attn_cp_size or 1) > 1,
        "--enable-prefill-cp": args.enable_prefill_cp,
        "--enable-lmcache": args.enable_lmcache,
        "--enable-flexkv": args.enable_flexkv,
        "--disable-radix-cache": args.disable_radix_cache,
        "--speculative-algorithm": args.speculative_algorithm is not None,
        "--disaggregation-mode": args.disaggregation_mode != "null",
        "--enable-hierarchical-cache": args.enable_hierarchical_cache,
        "--enable-streaming-session": args.enable_streaming_session,
        "--enable-two-batch-overlap": args.enable_two_batch_overlap,
        "--incremental-streaming-output": args.incremental_streaming_output,
        "--skip-tokenizer-init": args.skip_tokenizer_init,
        "--strip-thinking-cache": args.strip_thinking_cache,
        f"--prefill- or --decode-attention-backend other than {BACKEND!r}, beside it,": BACKEND in attention_of(args)
        and len(attention_of(args)) > 1,
        "--kv-cache-dtype " + str(args.kv_cache_dtype): BACKEND in attention_of(args)
        and "fp8" in str(args.kv_cache_dtype),
    }
    for flag, present in refused.items():
        if present:
            raise UnsupportedSGLang(f"{flag} is not supported together with --radix-cache-backend anabranch")


def _read_pages(args: Any) -> list[str]:
    """The attention backends that would read more of a page, or in another order, than a context has of it."""
    if (args.page_size or 1) == 1:
        return []
    return sorted(attention_of(args) - READ_TOKENS)


def attention_of(args: Any) -> set[str]:
    """The attention backends of prefill and decode."""
    special = (args.prefill_attention_backend, args.decode_attention_backend)
    return {one or args.attention_backend for one in special}


def on_cpu() -> bool:
    return get_device() == "cpu"
