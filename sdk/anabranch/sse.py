"""An incremental parser of server-sent events: bytes in, in pieces of any size; data payloads out.

It does no I/O and does not know what the payloads mean; event names, ids and retry fields are ignored.
"""

from __future__ import annotations

import codecs


class SSEDecoder:
    """Feed it bytes as they come. Lines may end in LF, CR or CRLF, and be cut anywhere, inside a character too."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._begun: list[str] = []
        """Pieces of the line that has not ended yet: joined once, so that a long line costs linear time."""
        self._data: list[str] = []
        self._after_cr = False
        self._first = True

    def feed(self, chunk: bytes) -> list[str]:
        """The payloads that `chunk` completes, in order."""
        text = self._decode(chunk)
        if self._first and text:
            text = text.removeprefix("\ufeff")
            self._first = False
        if self._after_cr and text:
            # The LF of a CRLF that was cut in two does not end a second line.
            text = text.removeprefix("\n")
            self._after_cr = False
        if not text:
            return []
        self._after_cr = text.endswith("\r")
        *ended, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        payloads: list[str] = []
        for line in ended:
            payload = self._line("".join((*self._begun, line)))
            self._begun.clear()
            if payload is not None:
                payloads.append(payload)
        if rest:
            self._begun.append(rest)
        return payloads

    def _line(self, line: str) -> str | None:
        """One whole line; returns a payload if the line ends an event that has data."""
        if not line:
            payload = "\n".join(self._data)
            self._data.clear()
            return payload or None
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return None
