"""`anabranch serve`: SGLang's own launcher with our cache and attention selected, in a process that is supervised.

It adds flags that the user did not give, and checks; it starts no server that SGLang would not.
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields

from anabranch_server.engine.supervise import supervise
from anabranch_server.engine.versions import UnsupportedSGLang, adapter
from anabranch_server.limits import PREFIX, Limits
from anabranch_server.plugin import has_accelerator

DEFAULTS = {"--radix-cache-backend": "anabranch"}
ATTENTION_DEFAULTS = {"--attention-backend": "anabranch", "--disable-cuda-graph": None}
"""Where the user does not choose the attention: ours, which cannot run in CUDA graphs yet."""
CPU_DEFAULTS = {
    "--device": "cpu",
    "--disable-cuda-graph": None,
    "--dtype": "float32",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "outlines",
    "--mem-fraction-static": "0.8",
    "--max-total-tokens": "32768",
    "--sleep-on-idle": None,
}


def command(argv: list[str]) -> int:
    """Run the server until it is stopped. Returns the exit status."""
    return supervise([sys.executable, "-m", __name__, *argv])


def run(argv: list[str]) -> int:
    """The server itself, in a process that somebody cleans up after."""
    try:
        adapter()
        argv = with_limits(argv)
        if os.environ.get("SGLANG_PLUGINS", "anabranch").split(",").count("anabranch") == 0:
            raise UnsupportedSGLang("SGLANG_PLUGINS does not name 'anabranch', so SGLang would not load it")
    except UnsupportedSGLang as error:
        print(f"anabranch serve: {error}", file=sys.stderr)
        return 2

    from sglang.launch_server import run_server
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_itself_when_parent_died, kill_process_tree

    from anabranch_server.engine import hooks, mapping, startup

    kill_itself_when_parent_died()
    load_plugins()
    try:
        hooks.verify()
        words = with_defaults(argv, cpu=not has_accelerator())
        if startup.limits().api_keys_file:
            words.append("--skip-server-warmup")  # SGLang's own has no key: it would be refused, and end the server
        args = prepare_server_args(words)
        startup.refuse_flags(args)
        config = ModelConfig.from_server_args(args)
        startup.refuse_model(args, config)
        mapping.check_configured(config, startup.limits().mappers)
    except UnsupportedSGLang as error:
        print(f"anabranch serve: {error}", file=sys.stderr)
        return 2
    try:
        run_server(args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def with_limits(argv: list[str]) -> list[str]:
    """`argv` without our own flags, `--anabranch-max-states 100`, which go into the environment, where all processes
    of the server find them. Raises UnsupportedSGLang."""
    known = {f"--anabranch-{field.name.replace('_', '-')}": PREFIX + field.name.upper() for field in fields(Limits)}
    rest, words = [], iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--anabranch-"):
            rest.append(word)
        elif flag not in known:
            raise UnsupportedSGLang(f"there is no flag {flag}; there are {', '.join(sorted(known))}")
        elif (given := value if equals else next(words, None)) is None:
            raise UnsupportedSGLang(f"{flag} needs a value")
        else:
            os.environ[known[flag]] = given
    return rest


def with_defaults(argv: list[str], *, cpu: bool) -> list[str]:
    """`argv` and each of our flags that it does not already have."""
    given = {word.partition("=")[0] for word in argv}
    defaults = DEFAULTS | (CPU_DEFAULTS if cpu else {})
    if "--attention-backend" not in given:
        defaults |= ATTENTION_DEFAULTS
    missing = {flag: value for flag, value in defaults.items() if flag not in given}
    return [*argv, *(word for flag, value in missing.items() for word in (flag, value) if word is not None)]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
