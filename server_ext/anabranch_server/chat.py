"""Rendering the pieces of an input with the model's chat template, one piece at a time.

A state continues a conversation that is already KV, so a message is rendered as what the template would add to a
conversation in that condition. It neither tokenises nor knows states; the tokenizer is anything with
`apply_chat_template`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NoReturn, Protocol

from anabranch import wire
from anabranch_server.errors import Refusal

Turn = Literal["due", "open", "closed"]
"""How a conversation ends: an answer is due; the assistant's turn is open (it is generating, or has just generated);
the assistant's turn is closed. Plain text is no conversation: its turn is None."""

_USER = {"role": "user", "content": "u"}
_MARK = "\u2042mark\u2042"
_ANSWER = {"role": "assistant", "content": _MARK}


class ChatTokenizer(Protocol):
    chat_template: str | None

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


def render(
    pieces: Sequence[wire.Piece], tokenizer: ChatTokenizer, *, turn: Turn | None, root: bool, generate: bool
) -> tuple[list[str | tuple[int, ...]], Turn | None]:
    """Texts and token lists to append, in order, and the turn that the conversation is then in.

    `turn` is that of the context; `root` says that the context is empty, so that a first message gets the template's
    own beginning (default system prompt, start token). Raises Refusal if the template cannot render a message.
    """
    out: list[str | tuple[int, ...]] = []
    opening: list[dict[str, str]] | None = [] if root else None
    for piece in pieces:
        if not isinstance(piece, wire.MessagePiece):
            opening = None
            out.append(piece.text if isinstance(piece, wire.TextPiece) else piece.tokens)
            continue
        message = {"role": piece.role, "content": piece.content}
        if opening is not None:
            before = _template(tokenizer, opening) if opening else ""
            opening.append(message)
            out.append(_added(before, _template(tokenizer, opening)))
        else:
            out.append(_continued(tokenizer, message, turn))
        turn = "closed" if piece.role == "assistant" else "due"
    if generate and turn == "due":
        out.append(_added(_template(tokenizer, [_USER]), _template(tokenizer, [_USER], generation_prompt=True)))
        turn = "open"
    return out, turn


def _continued(tokenizer: ChatTokenizer, message: dict[str, str], turn: Turn | None) -> str:
    """What the template adds for one more message; it first closes the assistant's turn if that is open.

    What the template does to the answers before (some drop their thoughts) does not matter: they are KV already.
    """
    if turn == "due" or (message["role"] == "assistant" and turn != "open"):
        return _added(_template(tokenizer, [_USER]), _template(tokenizer, [_USER, message]))
    after_answer = _after_mark(_template(tokenizer, [_USER, _ANSWER, message]))
    if turn == "open":
        return after_answer
    return _added(_after_mark(_template(tokenizer, [_USER, _ANSWER])), after_answer)


def _after_mark(text: str) -> str:
    _, mark, after = text.partition(_MARK)
    return after if mark else _rewrites()


def _added(before: str, after: str) -> str:
    return after[len(before) :] if after.startswith(before) else _rewrites()


def _rewrites() -> NoReturn:
    raise Refusal(
        "unsupported_model_feature",
        "the model's chat template rewrites earlier messages when one is added",
        hint="append text or tokens instead of messages",
        param="input",
    )


def _template(tokenizer: ChatTokenizer, messages: list[dict[str, str]], *, generation_prompt: bool = False) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise Refusal(
            "unsupported_model_feature",
            "the model has no chat template",
            hint="append text instead of messages",
            param="input",
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        raise Refusal(
            "invalid_request", f"the model's chat template refuses this message: {error}", param="input"
        ) from error
