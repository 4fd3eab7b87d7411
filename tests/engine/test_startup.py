"""A server that could answer wrongly does not start, and says why; SGLang itself would log it and carry on."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from anabranch_server.engine import hooks, startup, versions
from anabranch_server.engine.serve import run, with_defaults
from anabranch_server.engine.versions import UnsupportedSGLang
from anabranch_server.models import traits


@pytest.fixture(scope="module")
def installed() -> None:
    """All hooks in place in this process, as in every process of a server."""
    hooks.install()
    HookRegistry.apply_hooks()


def test_every_hook_is_in_place_after_installation(installed: None):
    hooks.verify()


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.target.rpartition("srt.")[2])
def test_a_hook_that_was_undone_is_named(installed: None, hook: hooks.Hook, monkeypatch: pytest.MonkeyPatch):
    owner, name = hooks.resolve(hook.target)
    original = getattr(owner, name)
    unhooked = getattr(original, "__func__", original).__wrapped__
    monkeypatch.setattr(owner, name, classmethod(unhooked) if hasattr(original, "__func__") else unhooked)
    with pytest.raises(UnsupportedSGLang, match=hook.target):
        hooks.verify()


def test_a_hook_whose_target_is_gone_is_named(installed: None, monkeypatch: pytest.MonkeyPatch):
    owner, name = hooks.resolve(hooks.HOOKS[2].target)
    monkeypatch.delattr(owner, name)
    with pytest.raises(UnsupportedSGLang, match=name):
        hooks.verify()


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(versions, "installed", lambda: "0.4.0")
    versions.adapter.cache_clear()
    with pytest.raises(UnsupportedSGLang, match=r"SGLang 0\.4\.0 is not supported.*0\.5\.17"):
        versions.adapter()
    versions.adapter.cache_clear()


def test_serving_without_sglang_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    versions.adapter.cache_clear()
    assert run(["--help"]) == 2
    assert capsys.readouterr().err.strip().endswith("Run: pip install 'anabranch[server]'")
    versions.adapter.cache_clear()


ARGS = {
    "page_size": 1,
    "strip_thinking_cache": False,
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "dp_size": 1,
    "pp_size": 1,
    "dcp_size": 1,
    "disable_radix_cache": False,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "enable_hierarchical_cache": False,
    "enable_streaming_session": False,
    "enable_two_batch_overlap": False,
    "incremental_streaming_output": False,
    "skip_tokenizer_init": False,
    "attn_cp_size": 1,
    "enable_prefill_cp": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "kv_cache_dtype": "auto",
    "attention_backend": "anabranch",
    "tokenizer_worker_num": 1,
    "grpc_mode": False,
    "smg_grpc_mode": False,
    "api_key": None,
}


ATTENTION = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("strip_thinking_cache", True),
        ("dp_size", 2),
        ("pp_size", 2),
        ("dcp_size", 2),
        ("disable_radix_cache", True),
        ("speculative_algorithm", "EAGLE"),
        ("disaggregation_mode", "prefill"),
        ("enable_hierarchical_cache", True),
        ("enable_streaming_session", True),
        ("enable_two_batch_overlap", True),
        ("incremental_streaming_output", True),
        ("skip_tokenizer_init", True),
        ("attn_cp_size", 2),
        ("enable_prefill_cp", True),
        ("enable_lmcache", True),
        ("enable_flexkv", True),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("tokenizer_worker_num", 2),
        ("grpc_mode", True),
    ],
)
def test_a_flag_under_which_states_go_wrong_is_refused_by_name(flag: str, value: object):
    startup.refuse_flags(SimpleNamespace(**ARGS))
    with pytest.raises(UnsupportedSGLang, match=flag.replace("_", "-")):
        startup.refuse_flags(SimpleNamespace(**{**ARGS, flag: value}))


@pytest.mark.parametrize("which", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_our_attention_beside_another_is_refused(which: str):
    """A shift that one of them reads the other would not."""
    args = {**ARGS, "attention_backend": "triton"}
    startup.refuse_flags(SimpleNamespace(**args))
    startup.refuse_flags(SimpleNamespace(**args | dict.fromkeys(ATTENTION, "anabranch")))
    mixed = (
        {**dict.fromkeys(ATTENTION, "anabranch"), which: "triton"}
        if which != "attention_backend"
        else {**args, "decode_attention_backend": "anabranch"}
    )
    with pytest.raises(UnsupportedSGLang, match="attention-backend other than 'anabranch', beside it"):
        startup.refuse_flags(SimpleNamespace(**{**args, **mixed}))


def test_flags_of_the_user_stay():
    words = with_defaults(["--model-path", "m", "--attention-backend=triton", "--dtype", "bfloat16"], cpu=True)
    assert words[:5] == ["--model-path", "m", "--attention-backend=triton", "--dtype", "bfloat16"]
    assert "--attention-backend" not in words
    assert words.count("--dtype") == 1
    assert words[words.index("--radix-cache-backend") + 1] == "anabranch"
    assert "--device" not in with_defaults([], cpu=False)
    assert with_defaults([], cpu=False)[2:] == ["--attention-backend", "anabranch", "--disable-cuda-graph"]
    assert "--disable-cuda-graph" not in with_defaults(["--attention-backend", "triton"], cpu=False)


def test_traits_of_an_unsupported_model_name_the_feature():
    config = {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "max_position_embeddings": 8192}
    assert "sliding-window" in (traits(config).unsupported or "")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("flags", "env", "reason"),
    [
        (["--page-size", "16", "--attention-backend", "fa3"], {}, "--page-size 16 with the attention backend fa3"),
        ([], {"SGLANG_PLUGINS": "other"}, "SGLANG_PLUGINS"),
    ],
)
def test_serve_refuses_in_one_line(model_dir, flags: list[str], env: dict[str, str], reason: str):
    words = [sys.executable, "-m", "anabranch.cli", "serve", "--model-path", str(model_dir), *flags]
    done = subprocess.run(words, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr.strip().splitlines()[-1]
