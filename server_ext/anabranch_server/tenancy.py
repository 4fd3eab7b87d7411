"""Who asks: from the key of a request to the tenant whose states it may touch.

It keeps no states and answers no requests; `store.py` keeps the states of tenants apart.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from anabranch_server.errors import Refusal

OPERATOR = "operator"
"""The name whose key may see the counts of all tenants and use the server's own controls."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_COMMENT = re.compile(r"(^|\s)#.*")
_UNNAMED = "key:"
_ANONYMOUS, _OTHERS = "anonymous", "unnamed"


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenant` is a name of the keys file, or made from the key; "" is who has none."""

    tenant: str = ""
    operator: bool = False


@dataclass(frozen=True, slots=True)
class Keyring:
    """The keys that are let in. `named` maps keys to names; if it is empty and there is no `api_key`, all are."""

    named: dict[str, str] = field(default_factory=dict)
    api_key: str | None = None
    admin_key: str | None = None

    def caller(self, authorization: str | None) -> Caller:
        """Raises Refusal `unauthorized`."""
        key = _bearer(authorization)
        if key and self.admin_key and _equal(key, self.admin_key):
            return Caller(OPERATOR, operator=True)
        if self.named:
            name = next((name for known, name in self.named.items() if _equal(key, known)), None)
            if name is None:
                raise _unauthorized()
            return Caller(name, operator=name == OPERATOR)
        if self.api_key:
            if not _equal(key, self.api_key):
                raise _unauthorized()
            return Caller("default", operator=not self.admin_key)
        if not key:
            return Caller(operator=not self.admin_key)
        return Caller(_UNNAMED + blake2b(key.encode(), digest_size=16).hexdigest())


def read_keys(path: str) -> dict[str, str]:
    """A file with one `name key` a line; a word that begins with `#` begins a comment.

    Raises ValueError, which shows no key.
    """
    named: dict[str, str] = {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the keys file {path} cannot be read: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        words = _COMMENT.sub("", line).split()
        if not words:
            continue
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not words[1].isascii():
            raise ValueError(f"line {number} of {path} is not `name key` (a name has letters, digits, and _ . -)")
        if words[0] in (_ANONYMOUS, _OTHERS, "default"):
            raise ValueError(f"line {number} of {path}: {words[0]!r} is a name that the server uses itself")
        if words[1] in named or words[0] in named.values():
            raise ValueError(f"line {number} of {path} repeats a name or a key")
        named[words[1]] = words[0]
    if not named:
        raise ValueError(f"the keys file {path} has no keys")
    return named


def is_unnamed(tenant: str) -> bool:
    """Whether the tenant is a key that the operator does not know."""
    return tenant.startswith(_UNNAMED)


def label(tenant: str) -> str:
    """The tenant's name in counts and metrics: those that no operator named are counted together."""
    if not tenant:
        return _ANONYMOUS
    return _OTHERS if is_unnamed(tenant) else tenant


def _bearer(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _equal(key: str, known: str) -> bool:
    return secrets.compare_digest(key.encode(), known.encode())


def _unauthorized() -> Refusal:
    return Refusal("unauthorized", "the API key is missing or unknown", hint="send Authorization: Bearer KEY")
