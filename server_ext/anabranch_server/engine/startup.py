"""Start-up: build the cache backend, or refuse to serve and say why.

SGLang logs what goes wrong in a plugin and carries on. A server without our hooks would answer with wrong positions,
so nothing is served unless every hook is in place and every flag is one that we support.
"""

from __future__ import annotations

from typing import Any

import sglang.srt.mem_cache.registry as registry
from sglang.srt.utils.common import get_device

from anabranch_server.engine import rows
from anabranch_server.engine.cache import AnabranchCache, Model
from anabranch_server.engine.versions import UnsupportedSGLang, adapter
from anabranch_server.limits import Limits
from anabranch_server.models import ModelStamp, traits
from anabranch_server.tenancy import read_keys

BACKEND = "anabranch"


def build_cache(context: Any) -> AnabranchCache:
    """The factory behind `--radix-cache-backend anabranch`. Raises UnsupportedSGLang."""
    from anabranch_server.engine import hooks

    adapter()
    hooks.verify()
    args, config = context.server_args, context.model_config
    refuse_flags(args)
    model_traits = traits(config.hf_text_config.to_dict())
    ours = args.attention_backend == BACKEND
    if ours and model_traits.unsupported is not None:
        raise UnsupportedSGLang(
            f"the attention backend 'anabranch' does not support {model_traits.unsupported}; "
            "choose another --attention-backend to serve this model without states"
        )
    stamp = ModelStamp(
        model=args.model_path,
        weights_version=str(args.weight_version),
        dtype=str(config.dtype),
        kv_dtype=args.kv_cache_dtype,
        rope=model_traits.rope,
    )
    can_shift = None if ours else f"the attention backend {args.attention_backend!r}"
    pool = context.params.token_to_kv_pool_allocator.size
    model = Model(
        traits=model_traits,
        stamp=stamp,
        can_shift=model_traits.unshiftable or can_shift,
        max_context=min(config.context_len, pool) - 7,  # what SGLang keeps back: tp_worker.get_worker_info
    )
    cache = AnabranchCache(registry.default_radix_cache_factory(context), model, limits())
    rows.install(cache.rows)
    return cache


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
    refused = {
        "--tokenizer-worker-num over 1": args.tokenizer_worker_num > 1,
        "--grpc-mode": args.grpc_mode or args.smg_grpc_mode,
        "--api-key, when there is a keys file (the operator's key is --admin-api-key),": args.api_key is not None
        and bool(limits().api_keys_file),
        "--page-size over 1": (args.page_size or 1) > 1,
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
        "--kv-cache-dtype " + str(args.kv_cache_dtype): args.attention_backend == BACKEND
        and "fp8" in str(args.kv_cache_dtype),
    }
    for flag, present in refused.items():
        if present:
            raise UnsupportedSGLang(f"{flag} is not supported together with --radix-cache-backend anabranch")


def on_cpu() -> bool:
    return get_device() == "cpu"
