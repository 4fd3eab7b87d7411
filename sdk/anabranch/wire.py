"""The wire contract: every message between SDK and server, as pydantic models shared by both.

It does no I/O and holds no defaults of the client or the server beyond those written in the protocol.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_REFS = 1024
MAX_PIECES = 4096
MAX_IDS = 4096
MAX_LEASE = 7 * 24 * 3600.0
_INT31 = 2**31 - 1

ErrorCode: TypeAlias = Literal[
    "invalid_request",
    "unauthorized",
    "state_not_found",
    "state_incompatible",
    "state_released",
    "context_too_long",
    "position_overflow",
    "unsupported_model_feature",
    "rate_limited",
    "pool_exhausted",
    "internal",
]

HTTP_STATUS: dict[ErrorCode, int] = {
    "invalid_request": 400,
    "unauthorized": 401,
    "state_not_found": 404,
    "state_incompatible": 409,
    "state_released": 410,
    "context_too_long": 413,
    "position_overflow": 422,
    "unsupported_model_feature": 422,
    "rate_limited": 429,
    "pool_exhausted": 503,
    "internal": 500,
}

# Fixed length, because SGLang aborts by id *prefix*; 128 random bits, so that nobody guesses one.
STATE_ID_PATTERN = r"^[0-9a-f]{32}$"
StateId: TypeAlias = Annotated[str, StringConstraints(pattern=STATE_ID_PATTERN)]
Index: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=_INT31)]
"""A token index, counted from 0 inside one state's own tokens."""
Position: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=_INT31)]
"""A rotary position."""
TokenId: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=_INT31)]
Name: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=64)]


Lease: TypeAlias = Annotated[float, Field(strict=True, gt=0, le=MAX_LEASE)]
"""Seconds for which a state is kept after it was last used or renewed."""


class Wire(BaseModel):
    """Base of all messages: immutable, unknown fields refused, NaN and infinity refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Reply(BaseModel):
    """Base of what the server sends: immutable; fields that a newer server adds are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


# ---------------------------------------------------------------- what a state is made from


class Ref(Wire):
    """One reference to an earlier state.

    `inherit` selects everything the state hands on and its own tokens (`upto`: only the first `upto` of them).
    `artifact` selects own tokens `span[0]:span[1]` only; no span means what the state generated.
    `base` is the effective position at which the reference's lowest token is placed; only with explicit placement.
    `mapper` names one of the server's cache mappers: everything selected is seen as it makes it.
    """

    kind: Literal["inherit", "artifact"]
    id: StateId
    span: tuple[Index, Index] | None = None
    upto: Index | None = None
    propagate: bool = Field(default=True, strict=True)
    base: Position | None = None
    mapper: Name | None = None

    @model_validator(mode="after")
    def _fields_fit_kind(self) -> Ref:
        if self.span is not None and self.kind != "artifact":
            raise ValueError("span belongs to an artifact reference; use upto to inherit a part")
        if self.upto is not None and self.kind != "inherit":
            raise ValueError("upto belongs to an inherit reference; use span for an artifact")
        if self.span is not None and self.span[0] > self.span[1]:
            raise ValueError(f"span is reversed: {self.span[0]} > {self.span[1]}")
        return self


class Explicit(Wire):
    """Explicit placement: each reference goes to its own `base` (none: it stays), new tokens begin at `start`
    (none: one after the largest visible position)."""

    start: Position | None = None


Policy: TypeAlias = Literal["keep", "concat", "same_start", "right_aligned"]
Place: TypeAlias = Annotated[
    Annotated[Policy, Tag("#policy")] | Annotated[Explicit, Tag("#explicit")],
    Discriminator(lambda value: "#explicit" if isinstance(value, dict | Explicit) else "#policy"),
]


class ContextSpec(Wire):
    """Which tokens a new state sees, and where, and how long it is kept. Also what `custom_params["anabranch"]`
    carries, as a JSON string.

    `keep_partial`: a generation that is cancelled leaves a state too, of what was generated so far. `lease`: none
    means the server's default.
    """

    id: StateId | None = None
    refs: tuple[Ref, ...] = Field(default=(), max_length=MAX_REFS)
    place: Place | None = None
    rules: Literal["strict"] | None = None
    keep: bool = Field(default=True, strict=True)
    keep_partial: bool = Field(default=False, strict=True)
    lease: Lease | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ContextSpec:
        if not isinstance(self.place, Explicit) and any(ref.base is not None for ref in self.refs):
            raise ValueError('base needs explicit placement: "place": {"start": ...} or {}')
        if self.rules == "strict" and len({ref.kind for ref in self.refs}) > 1:
            raise ValueError("strict rules: one state may not mix inherit and artifact references")
        if self.id is not None and any(ref.id == self.id for ref in self.refs):
            raise ValueError("a state cannot reference itself")
        return self


class TextPiece(Wire):
    """Plain text, tokenised on its own; only at the very start of a root with the tokenizer's special tokens."""

    text: str


class MessagePiece(Wire):
    """A chat message, rendered with the model's chat template."""

    role: Name
    content: str


class TokensPiece(Wire):
    """Token ids, taken as they are."""

    tokens: tuple[TokenId, ...]


def _kind_of_piece(value: object) -> str | None:
    """The kind that is meant, by the fields that are there; so a fault is reported for that kind only."""
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else getattr(value, "model_fields_set", ())
    kinds = {"text": "#text", "tokens": "#tokens", "role": "#message", "content": "#message"}
    return next((kind for field, kind in kinds.items() if field in fields), None)


Piece: TypeAlias = Annotated[
    Annotated[TextPiece, Tag("#text")]
    | Annotated[TokensPiece, Tag("#tokens")]
    | Annotated[MessagePiece, Tag("#message")],
    Discriminator(
        _kind_of_piece,
        custom_error_type="piece",
        custom_error_message="A piece of input has text, or tokens, or role and content",
    ),
]


class Sampling(Wire):
    """Sampling arguments; OpenAI's names, SGLang's where OpenAI has none. A number is a number: "0.5" is refused."""

    max_tokens: Annotated[int, Field(strict=True, ge=0, le=_INT31)] = 128
    temperature: Annotated[float, Field(strict=True, ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(strict=True, ge=-1, le=_INT31)] = -1
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0
    frequency_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(strict=True, gt=0, le=2)] = 1.0
    min_tokens: Annotated[int, Field(strict=True, ge=0, le=_INT31)] = 0
    stop: Annotated[tuple[Annotated[str, StringConstraints(min_length=1)], ...], Field(max_length=64)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=64)] = ()
    ignore_eos: bool = Field(default=False, strict=True)
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    logprobs: bool = Field(default=False, strict=True)
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=128)] = 0

    @model_validator(mode="after")
    def _consistent(self) -> Sampling:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}")
        if sum(grammar is not None for grammar in (self.regex, self.json_schema, self.ebnf)) > 1:
            raise ValueError("give one of regex, json_schema and ebnf")
        return self


class GenerateRequest(ContextSpec):
    """`POST /anabranch/v1/generate`. `sampling.max_tokens = 0` computes the state and generates nothing.

    Sent again with the same id and body, it attaches to the first or returns its result; another body is refused.
    `again` makes a state once more that was lost or released; if it had generated, `generated` are those tokens: they
    follow the input and count as generated.
    """

    id: StateId  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    input: tuple[Piece, ...] = Field(default=(), max_length=MAX_PIECES)
    again: bool = Field(default=False, strict=True)
    generated: tuple[TokenId, ...] | None = None
    sampling: Sampling = Sampling()
    stream: bool = Field(default=False, strict=True)

    @model_validator(mode="after")
    def _generated_before(self) -> GenerateRequest:
        if (self.again or self.generated is not None) and self.sampling.max_tokens:
            raise ValueError("a state that is made again generates nothing new: max_tokens must be 0")
        return self


class ExplainRequest(Wire):
    """`POST /anabranch/v1/explain`: of an existing state (`id`), or of a context that was never run (`spec`)."""

    id: StateId | None = None
    spec: ContextSpec | None = None

    @model_validator(mode="after")
    def _one_of(self) -> ExplainRequest:
        if (self.id is None) == (self.spec is None):
            raise ValueError("give either id or spec")
        return self


class RenewRequest(Wire):
    """`POST /anabranch/v1/states/renew`: begin the leases of these states anew. `lease`: none means as before."""

    ids: Annotated[tuple[StateId, ...], Field(max_length=MAX_IDS)]
    lease: Lease | None = None


class RenewOneRequest(Wire):
    """`POST /anabranch/v1/states/{id}/renew`."""

    lease: Lease | None = None


class ReleaseRequest(Wire):
    """`POST /anabranch/v1/states/release`: give these states up, all in one step."""

    ids: Annotated[tuple[StateId, ...], Field(max_length=MAX_IDS)]


# ---------------------------------------------------------------- what comes back


class Usage(Reply):
    """Token counts of one generate. `context_tokens` is what was visible before the new input."""

    context_tokens: int
    reused_tokens: int
    computed_tokens: int
    generated_tokens: int


class Timings(Reply):
    """Seconds. `kv_prepare` is making the visible KV addressable; `first_token` counts from arrival."""

    queue: float = 0.0
    compile: float = 0.0
    kv_prepare: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    total: float = 0.0


class TokenLogprob(Reply):
    """Natural log probability of a generated token, and of the likeliest alternatives as (token, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]


class GenerateResponse(Reply):
    """The whole result. `tokens` are the generated tokens that the new state owns, so a matched stop token or stop
    string is not among them; without a state, those that were generated. `kept` is false if there is no state: the
    request asked not to keep it, or it was cancelled (with `keep_partial`, a cancelled one may be kept)."""

    id: StateId
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    kept: bool = True


class DeltaEvent(Reply):
    """SSE: text and tokens that are new since the last event."""

    type: Literal["delta"] = "delta"
    text: str
    tokens: tuple[int, ...] = ()


class FinalEvent(Reply):
    """SSE: the last event of a stream that succeeded."""

    type: Literal["final"] = "final"
    response: GenerateResponse


class ErrorBody(Reply):
    """What went wrong, in a stable code, and what to do next."""

    code: ErrorCode
    message: str
    hint: str | None = None
    param: str | None = None
    request_id: str | None = None


class ErrorResponse(Reply):
    """The body of every response that is not 2xx."""

    error: ErrorBody


class ErrorEvent(Reply):
    """SSE: the last event of a stream that failed after it had begun."""

    type: Literal["error"] = "error"
    error: ErrorBody


Event: TypeAlias = Annotated[DeltaEvent | FinalEvent | ErrorEvent, Field(discriminator="type")]


class Interval(Reply):
    """Own tokens `start:stop` of `state` as one consumer sees them. `native` is the position at which token `start`
    was computed, `effective` the one at which the consumer sees it. `mapper`: through which it is seen; several, the
    first applied first, are joined by "+"."""

    state: StateId
    start: int
    stop: int
    native: int
    effective: int
    propagate: bool = True
    mapper: str | None = None

    @property
    def delta(self) -> int:
        return self.effective - self.native


class Explanation(Reply):
    """A compiled context: disjoint intervals in contract order, and where new tokens begin."""

    intervals: tuple[Interval, ...]
    start: int
    context_tokens: int


class StateInfo(Reply):
    """A state on the server. Own tokens are `input_tokens` and then `generated_tokens`; they sit at native positions
    `start`, `start + 1`, ... One that waits for a parent has no counts yet. `lease`: seconds left. `resident`: whether
    its KV is in memory; if not, it is computed again when it is next needed."""

    id: StateId
    status: Literal["waiting", "running", "sealed"]
    input_tokens: int
    generated_tokens: int
    start: int
    context_tokens: int
    refs: tuple[Ref, ...] = ()
    lease: float | None = None
    resident: bool = True


class StateList(Reply):
    states: tuple[StateInfo, ...]


class Renewal(Reply):
    """Which of the states are there, and which are not: expired, released, or never made."""

    renewed: tuple[StateId, ...] = ()
    lost: tuple[StateId, ...] = ()


class Released(Reply):
    """Which of the states were given up, and which were not there."""

    released: tuple[StateId, ...] = ()
    unknown: tuple[StateId, ...] = ()


class Counts(Reply):
    """States by condition, KV tokens, and events since the server started; of one API key, or of all.

    `held_tokens` are in memory for states; of these, `shared_tokens` are seen by several states or requests,
    `pinned_tokens` belong to segments that a running request reads, and `reclaimable_tokens` can be evicted and
    computed again. `evicted_tokens` are not in memory.
    """

    states: int = 0
    running: int = 0
    waiting: int = 0
    evicted_states: int = 0
    held_tokens: int = 0
    shared_tokens: int = 0
    pinned_tokens: int = 0
    reclaimable_tokens: int = 0
    evicted_tokens: int = 0
    created: int = 0
    freed: int = 0
    expired: int = 0
    lost: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    evictions: int = 0
    rebuilds: int = 0


class TenantCounts(Counts):
    """The counts of one API key, under the name that the operator gave it."""

    tenant: str


class Stats(Counts):
    """The caller's counts. To the operator: those of all keys, key by key too, and the pool, in which
    `free + evictable + held + in_use` is `total_tokens` (`evictable` is SGLang's own prefix cache)."""

    total_tokens: int
    free_tokens: int | None = None
    evictable_tokens: int | None = None
    in_use_tokens: int | None = None
    tenants: tuple[TenantCounts, ...] = ()


class Health(Reply):
    status: Literal["ok"]
    version: str
    sglang_version: str
    model: str
    attention_backend: str
