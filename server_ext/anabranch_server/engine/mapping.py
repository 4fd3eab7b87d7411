"""Cache mappers on tensors: what one is, the two that come with the server, and how a derived segment gets its KV.

Which segments are derived, and when, is not decided here: `mappers.py` names them, `rebuilding.py` calls for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from anabranch_kernels import Rotary
from anabranch_server.engine.versions import UnsupportedSGLang
from anabranch_server.mappers import IDENTITY, configured
from anabranch_server.segments import Segment

if TYPE_CHECKING:
    from anabranch_server.engine.cache import AnabranchCache

GROUP = "anabranch.mappers"
"""Entry points by which other packages add kinds of mappers."""
CHUNK = 4096  # tokens that are mapped at once


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a mapper is made for. This rank has `kv_heads` heads from `first_head` on, of `total_heads`.

    rotary: the rotation that all layers share; None if the model has another kind of positions.
    """

    layers: int
    kv_heads: int
    first_head: int
    total_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: str
    rotary: Rotary | None = None


class Mapper(Protocol):
    def __call__(
        self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k: [tokens, kv_heads, head_dim], as stored: rotated at `positions`. v: [tokens, kv_heads, v_head_dim].
        positions: [tokens] int64, native. Returns both in the same shapes and dtypes. The tokens of a segment may come
        in several calls."""
        ...


Factory = Callable[[KVShape, str | None], Mapper]
"""Shape and argument to a mapper; raises ValueError or OSError if the argument does not fit."""


# ---------------------------------------------------------------- the mappers that come with the server


def identity(shape: KVShape, argument: str | None) -> Mapper:
    """Changes nothing. Raises ValueError for an argument."""
    if argument is not None:
        raise ValueError("identity takes no argument")
    return lambda k, v, positions, layer: (k, v)


class LowRank:
    """x + x @ down @ up for each head, in fp32, on keys as they were before rotation, and on values.

    `file`: safetensors with `layers.{i}.{k|v}.down` [total_heads, head_dim, r] and `.up` [total_heads, r, head_dim]
    (v_head_dim for v). What is missing stays unchanged. Raises ValueError, OSError.
    """

    NAME = re.compile(r"layers\.(\d+)\.([kv])\.(down|up)")

    def __init__(self, shape: KVShape, file: str | None):
        if not file:
            raise ValueError("low_rank needs a file: name=low_rank:/path/file.safetensors")
        self.rotary = shape.rotary
        self.sides: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        with safe_open(file, framework="pt") as tensors:
            names = [_matched(self.NAME, name) for name in tensors.keys()]  # noqa: SIM118 - it is no mapping
            for layer, side in dict.fromkeys((int(layer), side) for layer, side, _ in names):
                pair = []
                for part in ("down", "up"):
                    name = f"layers.{layer}.{side}.{part}"
                    if (str(layer), side, part) not in names:
                        raise ValueError(f"{name} is missing")
                    pair.append(tensors.get_tensor(name).float())
                self._add(layer, side, pair[0], pair[1], shape)

    def _add(self, layer: int, side: str, down: torch.Tensor, up: torch.Tensor, shape: KVShape) -> None:
        name, width = f"layers.{layer}.{side}", shape.head_dim if side == "k" else shape.v_head_dim
        rank = down.shape[-1]
        if layer >= shape.layers:
            raise ValueError(f"{name}: the model has {shape.layers} layers")
        expected = [shape.total_heads, width, rank], [shape.total_heads, rank, width]
        if [list(down.shape), list(up.shape)] != list(expected):
            raise ValueError(
                f"{name}: down is {list(down.shape)} and up {list(up.shape)}; they must be "
                f"[{shape.total_heads}, {width}, r] and [{shape.total_heads}, r, {width}]"
            )
        if not (down.isfinite().all() and up.isfinite().all()):
            raise ValueError(f"{name} is not finite")
        if side == "k" and shape.rotary is None:
            raise ValueError(f"{name}: the rotation of this model's keys is not known")
        mine = slice(shape.first_head, shape.first_head + shape.kv_heads)
        self.sides[layer, side] = down[mine].to(shape.device), up[mine].to(shape.device)

    def __call__(
        self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if (weights := self.sides.get((layer, "k"))) is not None:
            assert self.rotary is not None
            # A rotation is linear, so that only the change is turned: a change of zero leaves every bit as it was.
            change = _through(turned(k, -positions, self.rotary), weights)
            k = (k.float() + turned(change, positions, self.rotary)).to(k.dtype)
        if (weights := self.sides.get((layer, "v"))) is not None:
            v = (v.float() + _through(v, weights)).to(v.dtype)
        return k, v


KINDS: Mapping[str, Factory] = {IDENTITY: identity, "low_rank": LowRank}
"""Those that are always there; GROUP adds others."""


def turned(x: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Turn `x` [tokens, heads, head_dim] forward, each token by its own of `positions` [tokens]. Angles in fp64, result
    in fp32."""
    x = x.float()
    angle = positions[:, None].double() * rotary.inv_freq.to(device=x.device, dtype=torch.float64)
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
    dim = 2 * angle.shape[-1]
    head, rest = x[..., :dim], x[..., dim:]
    if rotary.interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
        head = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = head.chunk(2, dim=-1)
        head = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((head, rest), dim=-1)


def _through(x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    down, up = weights
    return torch.einsum("thr,hre->the", torch.einsum("thd,hdr->thr", x.float(), down), up)


def _matched(pattern: re.Pattern[str], name: str) -> tuple[str, ...]:
    found = pattern.fullmatch(name)
    if found is None or found[1] != str(int(found[1])):
        raise ValueError(f"{name!r} is not a name like layers.0.k.down")
    return found.groups()


# ---------------------------------------------------------------- building


def build(text: str, shape: KVShape) -> dict[str, Mapper]:
    """The mappers of `--anabranch-mappers`, by name, each tried. Raises UnsupportedSGLang, in one line."""
    added = {entry.name: entry for entry in entry_points(group=GROUP)}
    built: dict[str, Mapper] = {}
    for name, (kind, argument) in configured(text).items():
        if kind not in KINDS and kind not in added:
            kinds = ", ".join(sorted({*KINDS, *added}))
            raise UnsupportedSGLang(f"the mapper {name!r} is of the unknown kind {kind!r}; there are {kinds}")
        try:
            factory: Factory = KINDS[kind] if kind in KINDS else added[kind].load()
            built[name] = mapper = factory(shape, argument)
            _try(mapper, shape)
        except Exception as error:  # anything that another package may raise
            message = " ".join(f"{type(error).__name__}: {error}".split())
            raise UnsupportedSGLang(f"the mapper {name!r} ({kind}) cannot be used: {message}") from error
    return built


def build_for_server(context: Any, text: str) -> dict[str, Mapper]:
    """As `build`, in a scheduler process. context: SGLang's TreeCacheBuildContext."""
    from anabranch_server.engine.attention import rotary_of

    pool = context.params.token_to_kv_pool_allocator.get_kvcache()
    if type(pool) is not MHATokenToKVPool:  # others keep more than one tensor a side, or another layout
        if text:
            raise UnsupportedSGLang(f"mappers do not work with the KV pool {type(pool).__name__}")
        return {}
    try:
        rotary = rotary_of(context.tp_worker.model_runner.model)
    except UnsupportedSGLang:
        rotary = None
    total = context.model_config.get_total_num_kv_heads()
    return build(
        text,
        KVShape(
            layers=pool.layer_num,
            kv_heads=pool.head_num,
            first_head=context.tp_rank * total // context.tp_size,  # ranks that are more than heads share them
            total_heads=total,
            head_dim=pool.head_dim,
            v_head_dim=pool.v_head_dim,
            dtype=pool.dtype,
            device=str(pool.device),
            rotary=rotary,
        ),
    )


def check_configured(config: Any, text: str) -> None:
    """Raise UnsupportedSGLang for mappers that could not be built, before any process is started. config: SGLang's
    ModelConfig. The trial is on the CPU, with all heads, and with a rotation that turns nothing: weights are not
    loaded yet."""
    heads = config.get_total_num_kv_heads()
    rotary = Rotary(torch.zeros(config.head_dim // 2))
    size = config.head_dim, config.v_head_dim
    build(text, KVShape(config.num_hidden_layers, heads, 0, heads, *size, config.dtype, "cpu", rotary))


def _try(mapper: Mapper, shape: KVShape) -> None:
    k = torch.zeros(2, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
    v = torch.zeros(2, shape.kv_heads, shape.v_head_dim, dtype=shape.dtype, device=shape.device)
    positions = torch.arange(2, device=shape.device)
    for layer in range(shape.layers):
        run(mapper, k.clone(), v.clone(), positions, layer)


def run(
    mapper: Mapper, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a mapper. Raises ValueError if what it returns does not fit where it has to go."""
    mapped = mapper(k, v, positions, layer)
    for side, given, made in zip("kv", (k, v), mapped, strict=True):
        if (made.shape, made.dtype) != (given.shape, given.dtype):
            raise ValueError(
                f"it makes {side} {list(made.shape)} {made.dtype} of {list(given.shape)} {given.dtype} in layer {layer}"
            )
    return mapped


# ---------------------------------------------------------------- deriving


def derive(scheduler: Any, cache: AnabranchCache, segment: Segment) -> bool:
    """Bring a derived segment into memory; what it is made from must be there. False: there is no room for it now.

    Nothing is left of it if the mapper raises.
    """
    holdings, context = cache.store.holdings, segment.context
    assert context and segment.mapper is not None and not holdings.missing(context)
    source = context[0].segment
    cache.store.read(context)  # it stays in memory, whatever is evicted to make room
    try:
        needed = holdings.needed_of(segment)
        slots = _allocate(cache, holdings.in_pages(needed))
        if slots is None:
            return False
        try:
            _wait_for_forward(scheduler)
            pool = cache.token_to_kv_pool_allocator.get_kvcache()
            for start, stop in holdings.kept(segment):
                stop = min(stop, len(segment))
                for part in _chunks(start, stop):
                    positions = torch.arange(part.start, part.stop, device=slots.device) + segment.start
                    write(pool, cache.mappers[segment.mapper], source.slots[part], slots[part], positions)
        except Exception:
            cache.token_to_kv_pool_allocator.free(slots)
            raise
        holdings.restore(segment, slots[:needed])
        return True
    finally:
        cache.store.done_reading(context)


def write(pool: Any, mapper: Mapper, source: torch.Tensor, to: torch.Tensor, positions: torch.Tensor) -> None:
    """Read the KV of slots `source` [tokens], and write what `mapper` makes of it to slots `to` [tokens]. `positions`
    [tokens] are those at which the tokens were computed."""
    for layer in range(pool.layer_num):
        buffers = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
        # Small types are kept as bytes: not all of them can be indexed as what they are.
        k, v = (buffer.view(pool.store_dtype)[source].view(pool.dtype) for buffer in buffers)
        for buffer, made in zip(buffers, run(mapper, k, v, positions, layer), strict=True):
            buffer.view(pool.store_dtype)[to] = made.contiguous().view(pool.store_dtype)


def _chunks(start: int, stop: int) -> Iterator[slice]:
    return (slice(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK))


def _allocate(cache: AnabranchCache, size: int) -> torch.Tensor | None:
    """[size] slots, in whole pages; None, and nothing is evicted, if there are not enough."""
    allocator = cache.token_to_kv_pool_allocator
    if (lacking := size - allocator.available_size()) > 0:
        if lacking > cache.evictable_size():
            return None
        cache.evict(EvictParams(num_tokens=lacking))
    return allocator.alloc(size)


def _wait_for_forward(scheduler: Any) -> None:
    """What we read, and whose slots we were given, the forward that was launched last may still be writing.

    The other way round SGLang waits: `Scheduler.run_batch` lets its forward stream wait for the stream that we are on
    (`scheduler.py` 3566, 3719, 3793), and without overlap both are one.
    """
    if scheduler.device == "cuda":
        torch.cuda.current_stream().wait_stream(scheduler.forward_stream)
