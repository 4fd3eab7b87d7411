"""Every seam to SGLang, in one list: what is registered where, and that it holds.

The hooks themselves are in the modules that they serve; README.md says why each is where it is.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.managers import io_struct, tokenizer_control_mixin
from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import add_attention_backend_choices

from anabranch_server.engine import (
    access,
    admission,
    channel,
    control,
    paging,
    placing,
    routes,
    sealing,
    startup,
    stepping,
    supervise,
)
from anabranch_server.engine.cache import find
from anabranch_server.engine.startup import BACKEND
from anabranch_server.engine.versions import UnsupportedSGLang, installed


class Hook(NamedTuple):
    target: str
    function: Callable[..., Any]
    kind: HookType


def _after_init_request_dispatcher(result: Any, scheduler: Any) -> None:
    sealing.bind(scheduler.tree_cache)
    control.serve(scheduler)


def _around_support_triton(original: Callable[[str], bool], backend: str) -> bool:
    """SGLang takes an unknown attention backend for one that has Triton, which a CPU has not."""
    return False if backend == BACKEND and not torch.cuda.is_available() else original(backend)


def _around_group_coordinator(original: Callable[..., None], group: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's tensor parallelism insists on NCCL; on the CPU gloo does it."""
    if not torch.cuda.is_available():
        kwargs.update(use_pynccl=False, use_custom_allreduce=False)
    original(group, *args, **kwargs)


def _after_weight_update(result: Any, updater: Any, received: Any) -> None:
    """States computed under the old weights stay readable by nobody."""
    cache = find(getattr(updater.scheduler, "tree_cache", None))
    if cache is not None and result.success:
        stamp = cache.model.stamp
        version, _, count = stamp.weights_version.partition("+")
        cache.model.stamp = replace(stamp, weights_version=f"{version}+{int(count or 0) + 1}")


_MANAGERS = "sglang.srt.managers."
_ALLOCATION = "sglang.srt.mem_cache.allocation."
_UPDATER = _MANAGERS + "scheduler_components.weight_updater.SchedulerWeightUpdaterManager."

HOOKS = (
    Hook("sglang.srt.utils.common.support_triton", _around_support_triton, HookType.AROUND),
    Hook("sglang.srt.distributed.parallel_state.GroupCoordinator.__init__", _around_group_coordinator, HookType.AROUND),
    Hook("sglang.srt.server_args.PortArgs.init_new", supervise.after_port_args, HookType.AFTER),
    Hook("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", placing.after_init_new, HookType.AFTER),
    Hook(
        _MANAGERS + "schedule_batch.ScheduleBatch.prepare_for_extend",
        placing.after_prepare_for_extend,
        HookType.AFTER,
    ),
    Hook(_ALLOCATION + "alloc_paged_token_slots_extend", paging.around_alloc_extend, HookType.AROUND),
    Hook(_ALLOCATION + "alloc_paged_token_slots_decode", paging.around_alloc_decode, HookType.AROUND),
    Hook(
        _MANAGERS + "schedule_batch.ScheduleBatch.new_tokens_required_next_decode",
        paging.around_new_tokens_required,
        HookType.AROUND,
    ),
    Hook(
        _MANAGERS + "scheduler_components.invariant_checker.SchedulerInvariantChecker._get_total_uncached_sizes",
        paging.around_uncached_sizes,
        HookType.AROUND,
    ),
    Hook(
        _MANAGERS + "scheduler.Scheduler.handle_generate_request",
        admission.around_handle_generate_request,
        HookType.AROUND,
    ),
    Hook(
        _MANAGERS + "scheduler.Scheduler.process_input_requests",
        stepping.around_process_input_requests,
        HookType.AROUND,
    ),
    Hook(_MANAGERS + "scheduler.Scheduler.abort_request", admission.around_abort_request, HookType.AROUND),
    Hook(_MANAGERS + "scheduler.Scheduler.init_request_dispatcher", _after_init_request_dispatcher, HookType.AFTER),
    Hook(_MANAGERS + "schedule_batch.Req.update_finish_state", sealing.around_update_finish_state, HookType.AROUND),
    Hook(
        _MANAGERS + "tokenizer_manager.TokenizerManager.generate_request",
        access.around_generate_request,
        HookType.AROUND,
    ),
    Hook(
        _MANAGERS + "tokenizer_manager.TokenizerManager._handle_abort_req",
        access.around_handle_abort_req,
        HookType.AROUND,
    ),
    Hook(
        _MANAGERS + "tokenizer_manager.TokenizerManager.init_request_dispatcher",
        routes.after_init_request_dispatcher,
        HookType.AFTER,
    ),
    *(
        Hook(_UPDATER + name, _after_weight_update, HookType.AFTER)
        for name in (
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
        )
    ),
)


def install() -> None:
    """Register everything. SGLang applies the hooks after this returns. A second call does nothing."""
    if BACKEND in registered_radix_cache_backends():
        return
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind)
    io_struct.hook_custom_types(channel.ControlRequest, channel.ControlReply)
    tokenizer_control_mixin._COMMUNICATOR_SPECS.append((channel.NAME, channel.ControlReply))
    add_attention_backend_choices([BACKEND])

    @register_attention_backend(BACKEND)
    def _attention(model_runner: Any) -> Any:
        from anabranch_server.engine.attention import AnabranchAttention

        return AnabranchAttention(model_runner)

    register_radix_cache_backend(BACKEND, startup.build_cache)


def verify() -> None:
    """Raise UnsupportedSGLang, naming the seam, unless every hook is in place in this process."""
    for hook in HOOKS:
        if not _wraps(hook):
            raise UnsupportedSGLang(
                f"the hook on {hook.target} is not in place. SGLang {installed()} may have changed there, or another "
                "plugin replaced it; see the log above for the reason"
            )


def _wraps(hook: Hook) -> bool:
    """Whether the target, as it is now, is a chain of SGLang's wrappers that has our function in it."""
    try:
        function = getattr(*resolve(hook.target))
    except (ImportError, AttributeError):
        return False
    function = getattr(function, "__func__", function)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook.function for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def resolve(target: str) -> tuple[Any, str]:
    """The module or class that has the target, and the target's name in it."""
    owner, _, name = target.rpartition(".")
    return pkgutil.resolve_name(owner), name
