"""anabranch: a DAG of LLM states that share their KV. This is the SDK: `AsyncClient`, `Client`, `State`, errors.

It contains neither the server (`anabranch_server`) nor the kernels (`anabranch_kernels`).
"""

__version__ = "0.1.0"  # before the imports: cli.py reads it

from anabranch import render
from anabranch.client import AsyncClient
from anabranch.errors import (
    AnabranchError,
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    ClientClosedError,
    ContextTooLongError,
    InternalError,
    InvalidRequestError,
    PoolExhaustedError,
    PositionOverflowError,
    RateLimitedError,
    StateIncompatibleError,
    StateNotFoundError,
    StateReleasedError,
    UnauthorizedError,
    UnsupportedModelFeatureError,
)
from anabranch.graph import Reference
from anabranch.results import Explanation, Generation, Timings, TokenLogprob, Usage
from anabranch.scope import Scope
from anabranch.state import State
from anabranch.stream import Stream
from anabranch.sync import Client

__all__ = [
    "APIConnectionError",
    "APIStatusError",
    "APITimeoutError",
    "AnabranchError",
    "AsyncClient",
    "Client",
    "ClientClosedError",
    "ContextTooLongError",
    "Explanation",
    "Generation",
    "InternalError",
    "InvalidRequestError",
    "PoolExhaustedError",
    "PositionOverflowError",
    "RateLimitedError",
    "Reference",
    "Scope",
    "State",
    "StateIncompatibleError",
    "StateNotFoundError",
    "StateReleasedError",
    "Stream",
    "Timings",
    "TokenLogprob",
    "UnauthorizedError",
    "UnsupportedModelFeatureError",
    "Usage",
    "__version__",
    "render",
]
