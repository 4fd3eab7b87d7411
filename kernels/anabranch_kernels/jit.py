"""CUDA C++ to running kernels: compiled by NVRTC for sm_90a, kept on disk, launched through the driver.

It knows no kernel in particular. Compiling needs no card, no nvcc and no headers; launching allocates nothing and waits
for nothing, so it may be captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from anabranch_kernels import cache

ARCHITECTURE = "sm_90a"
_SOURCES = Path(__file__).parent / "csrc"
_LARGE_SHARED = 48 * 1024


class CompileError(RuntimeError):
    """A kernel did not compile, or there is nothing to compile it with. The message says which and why."""


def compile_cuda(file: str, defines: Mapping[str, str | int], written: Mapping[str, str] | None = None) -> bytes:
    """The cubin of `csrc/<file>` with `defines` as -D, from the disk if it is there. written: headers by name that are
    not in `csrc`.

    Raises CompileError with the compiler's words.
    """
    headers, options = _headers(written), _options(defines)
    source = (_SOURCES / file).read_text()
    name = cache.key(_compiler(), source, *options, *(part for item in headers.items() for part in item)) + ".cubin"
    cubin = cache.load(name)
    if cubin is None:
        cubin, _ = _nvrtc_compile(file, source, headers, options)
        cache.store(name, cubin)
    return cubin


def report(file: str, defines: Mapping[str, str | int], written: Mapping[str, str] | None = None) -> str:
    """What the assembler says of a kernel: registers, spills, losses. Compiles each time."""
    options = [*_options(defines), "--ptxas-options=-v"]
    return _nvrtc_compile(file, (_SOURCES / file).read_text(), _headers(written), options)[1]


def _headers(written: Mapping[str, str] | None) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(_SOURCES.glob("*.cuh"))} | dict(written or {})


def _options(defines: Mapping[str, str | int]) -> list[str]:
    language = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", "-default-device"]
    return language + [f"-D{name}={value}" for name, value in defines.items()]


def _bindings() -> tuple[Any, Any]:
    """The modules for the driver and for NVRTC. They are compiled, so nothing is known of their types."""
    try:
        return import_module("cuda.bindings.driver"), import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise CompileError(f"the package cuda-bindings cannot be imported: {error}") from error


@functools.cache
def _compiler() -> str:
    _, nvrtc = _bindings()
    try:
        error, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as missing:
        raise CompileError(f"NVRTC is not installed: {missing}") from missing
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    return f"nvrtc {major}.{minor}"


def _nvrtc_compile(file: str, source: str, headers: Mapping[str, str], options: list[str]) -> tuple[bytes, str]:
    """(cubin, the compiler's log)."""
    _, nvrtc = _bindings()
    names, texts = [name.encode() for name in headers], [text.encode() for text in headers.values()]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), len(names), texts, names)
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        words = log.decode(errors="replace").rstrip("\0\n")
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{file} does not compile ({_compiler()}, {' '.join(options)}):\n{words}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return bytes(cubin), words
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class Kernel:
    """A kernel on one card. `shared`: bytes of dynamic shared memory; `threads`: of a block."""

    def __init__(self, cubin: bytes, name: str, *, threads: int, device: torch.device, shared: int = 0) -> None:
        driver, _ = _bindings()
        self.threads, self.shared = threads, shared
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the card's context, which the driver's calls need
            module = _checked(driver.cuModuleLoadData(cubin))
            self._function = _checked(driver.cuModuleGetFunction(module, name.encode()))
            if shared > _LARGE_SHARED:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _checked(driver.cuFuncSetAttribute(self._function, attribute, shared))

    def blocks_per_multiprocessor(self) -> int:
        driver, _ = _bindings()
        return _checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, self.threads, self.shared))

    def launch(self, grid: tuple[int, int], *arguments: ctypes.Structure | ctypes._SimpleCData, overlap: bool) -> None:
        """Start on the current stream. overlap: it may begin before the kernel before it is complete; it waits itself
        where it must."""
        driver, _ = _bindings()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1)
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        _checked(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(addresses), 0))


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises RuntimeError by the error's name."""
    error, *values = answer
    if int(error):
        raise RuntimeError(f"the CUDA driver answers {error.name}")
    return values[0] if values else None
