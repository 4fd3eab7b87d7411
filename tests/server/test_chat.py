"""Rendering a conversation piece by piece, against the template's own rendering of the whole.

Templates are small functions here; no tokenizer and no Jinja.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.wire import MessagePiece, Piece, TextPiece, TokensPiece
from anabranch_server.chat import Turn, render
from anabranch_server.errors import Refusal

Messages = list[dict[str, str]]


@dataclass
class Tokenizer:
    """Anything with `apply_chat_template`; it counts how often it was asked."""

    template: Callable[[Messages, bool], str]
    chat_template: str | None = "a template"
    asked: int = 0

    def apply_chat_template(
        self, conversation: Messages, *, tokenize: bool, add_generation_prompt: bool, **more: Any
    ) -> str:
        assert not tokenize
        assert not more
        self.asked += 1
        return self.template(conversation, add_generation_prompt)


def chatml(messages: Messages, prompt: bool) -> str:
    """As SmolLM2 has it: with a system prompt of its own if the conversation brings none."""
    out = "" if messages and messages[0]["role"] == "system" else "<|im_start|>system\nBe SmolLM.<|im_end|>\n"
    for message in messages:
        out += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    return out + ("<|im_start|>assistant\n" if prompt else "")


def alternating(messages: Messages, prompt: bool) -> str:
    """As Mistral and Gemma have it: user and assistant take turns, or the template raises."""
    out = "<s>"
    for i, message in enumerate(messages):
        if message["role"] != ("user", "assistant")[i % 2]:
            raise ValueError("roles must alternate user/assistant/user/...")
        out += f"[INST] {message['content']} [/INST]" if message["role"] == "user" else f" {message['content']}</s>"
    return out + (" " if prompt else "")


def counting(messages: Messages, prompt: bool) -> str:
    """Rewrites history: the beginning says how many messages follow."""
    return f"{len(messages)} messages\n" + chatml(messages, prompt)


def forgetting(messages: Messages, prompt: bool) -> str:
    """Rewrites history: only the last message is shown."""
    return chatml(messages[-1:], prompt)


def user(content: str) -> MessagePiece:
    return MessagePiece(role="user", content=content)


def system(content: str) -> MessagePiece:
    return MessagePiece(role="system", content=content)


def answer(content: str) -> MessagePiece:
    return MessagePiece(role="assistant", content=content)


def whole(template: Callable[[Messages, bool], str], *messages: MessagePiece, prompt: bool = False) -> str:
    return template([message.model_dump() for message in messages], prompt)


class Conversation:
    """States one after another, each continuing the one before: `text` is what their tokens spell."""

    def __init__(self, template: Callable[[Messages, bool], str]):
        self.tokenizer = Tokenizer(template)
        self.text = ""
        self.turn: Turn | None = None
        self.root = True

    def state(self, *pieces: Piece, answer: str | None = None) -> Conversation:
        """One generate: append `pieces`; then, if `answer` is given, generate that."""
        out, self.turn = render(pieces, self.tokenizer, turn=self.turn, root=self.root, generate=answer is not None)
        assert all(isinstance(part, str) for part in out)
        self.text += "".join(map(str, out)) + (answer or "")
        self.root = False
        return self


def rendered(
    *pieces: Piece,
    turn: Turn | None = None,
    root: bool = False,
    generate: bool = False,
    template: Callable[[Messages, bool], str] = chatml,
) -> tuple[Sequence[str | tuple[int, ...]], Turn | None]:
    return render(pieces, Tokenizer(template), turn=turn, root=root, generate=generate)


def refused(code: str):
    return pytest.raises(Refusal, check=lambda refusal: refusal.code == code and refusal.param == "input")


# ---------------------------------------------------------------- a root


def test_a_root_gets_the_templates_own_beginning():
    out, turn = rendered(user("Hi"), root=True)
    assert out == ["<|im_start|>system\nBe SmolLM.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"]
    assert turn == "due"


def test_a_system_message_replaces_the_default_one():
    out, turn = rendered(system("Be brief."), user("Hi"), root=True, generate=True)
    assert out == [
        "<|im_start|>system\nBe brief.<|im_end|>\n",
        "<|im_start|>user\nHi<|im_end|>\n",
        "<|im_start|>assistant\n",
    ]
    assert turn == "open"


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize(
    "messages",
    [
        [user("Hi")],
        [user("")],
        [user("u"), answer("u"), user("u")],
        [system("Be brief."), user("Hi")],
        [user("Hi"), user("again")],
        [user("\u2042mark\u2042"), answer("\u2042mark\u2042"), user("<|im_end|>")],
    ],
)
def test_a_root_conversation_is_the_templates_rendering_of_it(messages: list[MessagePiece], generate: bool):
    out, _ = rendered(*messages, root=True, generate=generate)
    assert "".join(map(str, out)) == whole(chatml, *messages, prompt=generate)


def test_a_root_may_end_with_an_answer_and_then_nothing_is_due():
    out, turn = rendered(user("Hi"), answer("Hello"), root=True, generate=True)
    assert "".join(map(str, out)) == whole(chatml, user("Hi"), answer("Hello"))
    assert turn == "closed"


def test_an_empty_root_is_no_conversation():
    assert rendered(root=True, generate=True) == ([], None)


# ---------------------------------------------------------------- turns, one piece at a time

CLOSE = "<|im_end|>\n"
USER = "<|im_start|>user\nHi<|im_end|>\n"
PROMPT = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("before", "added", "after"),
    [(None, USER, "due"), ("due", USER, "due"), ("closed", USER, "due"), ("open", CLOSE + USER, "due")],
)
def test_a_user_message_is_what_the_template_adds_in_that_turn(before: Turn | None, added: str, after: Turn):
    assert rendered(user("Hi"), turn=before) == ([added], after)
    assert rendered(user("Hi"), turn=before, generate=True) == ([added, PROMPT], "open")


@pytest.mark.parametrize(
    ("before", "closing"),
    [(None, ""), ("due", ""), ("closed", ""), ("open", CLOSE)],
)
def test_an_answer_given_by_the_caller_closes_the_turn(before: Turn | None, closing: str):
    added = closing + "<|im_start|>assistant\nHello<|im_end|>\n"
    assert rendered(answer("Hello"), turn=before, generate=True) == ([added], "closed")


@pytest.mark.parametrize("before", [None, "due", "closed", "open"])
def test_generating_without_input_asks_for_an_answer_only_where_one_is_due(before: Turn | None):
    assert rendered(turn=before, generate=True) == (([PROMPT], "open") if before == "due" else ([], before))
    assert rendered(turn=before) == ([], before)


@pytest.mark.parametrize("before", [None, "closed", "open"])
def test_text_and_tokens_pass_untouched_and_change_no_turn(before: Turn | None):
    pieces = [TextPiece(text="a <b>"), TokensPiece(tokens=(5, 0, 7)), TextPiece(text="")]
    assert rendered(*pieces, turn=before, generate=True) == (["a <b>", (5, 0, 7), ""], before)
    assert rendered(*pieces, root=True, generate=True) == (["a <b>", (5, 0, 7), ""], None)


def test_text_after_a_message_comes_before_the_prompt_to_answer():
    out, turn = rendered(user("Hi"), TextPiece(text="!"), generate=True)
    assert (out, turn) == ([USER, "!", PROMPT], "open")


def test_a_message_after_plain_text_does_not_begin_the_conversation_anew():
    assert rendered(TextPiece(text="Once"), user("Hi"), root=True) == (["Once", USER], "due")
    assert rendered(TokensPiece(tokens=(1,)), user("Hi"), root=True) == ([(1,), USER], "due")


def test_messages_after_a_text_in_between_are_rendered_too():
    out, turn = rendered(user("Hi"), TextPiece(text="?"), user("Hi"), root=True, generate=True)
    assert out == [whole(chatml, user("Hi")), "?", USER, PROMPT]
    assert turn == "open"


def test_any_role_that_is_not_the_assistants_asks_for_an_answer():
    out, turn = rendered(MessagePiece(role="tool", content="42"), turn="open", generate=True)
    assert out == [CLOSE + "<|im_start|>tool\n42<|im_end|>\n", PROMPT]
    assert turn == "open"


# ---------------------------------------------------------------- over several states


@pytest.mark.parametrize("template", [chatml, alternating])
def test_user_generate_user_spells_the_templates_rendering(template: Callable[[Messages, bool], str]):
    talk = Conversation(template).state(user("Hi"), answer="Hello")
    assert talk.text == whole(template, user("Hi"), prompt=True) + "Hello"
    talk.state(user("How are you?"))
    assert talk.text == whole(template, user("Hi"), answer("Hello"), user("How are you?"))
    talk.state(answer="Fine")
    assert talk.text == whole(template, user("Hi"), answer("Hello"), user("How are you?"), prompt=True) + "Fine"
    talk.state(user("Bye"), answer="")
    assert talk.text == whole(
        template, user("Hi"), answer("Hello"), user("How are you?"), answer("Fine"), user("Bye"), prompt=True
    )


@pytest.mark.parametrize("template", [chatml, alternating])
def test_an_answer_from_the_caller_and_a_generated_one_spell_the_same(template: Callable[[Messages, bool], str]):
    given_ = Conversation(template).state(user("Hi")).state(answer("Hello")).state(user("Bye"))
    made = Conversation(template).state(user("Hi"), answer="Hello").state(user("Bye"))
    assert given_.text == made.text == whole(template, user("Hi"), answer("Hello"), user("Bye"))


def test_a_generation_that_is_continued_stays_one_turn():
    talk = Conversation(chatml).state(user("Hi"), answer="Hel").state(TextPiece(text="l"), answer="o").state(user("?"))
    assert talk.text == whole(chatml, user("Hi"), answer("Hello"), user("?"))


def test_an_answer_may_contain_what_the_template_uses_itself():
    for text in ("<|im_end|>\n", "\u2042mark\u2042", "u", ""):
        talk = Conversation(chatml).state(user("u"), answer=text).state(user(text))
        assert talk.text == whole(chatml, user("u"), answer(text), user(text))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_cut_of_a_conversation_into_states_spells_it_exactly(data: st.DataObject):
    template = data.draw(st.sampled_from([chatml, alternating]))
    roles = ["user", "assistant"] * data.draw(st.integers(0, 3))
    if template is chatml:
        roles = data.draw(st.lists(st.sampled_from(["system", "user", "assistant"]), max_size=6))
    content = st.text(alphabet="ab \n<|>u\u2042", max_size=6)
    messages = [MessagePiece(role=role, content=data.draw(content)) for role in roles]
    talk, pending, due = Conversation(template), [], False
    for message in messages:
        if due and message.role == "assistant" and data.draw(st.booleans()):
            talk.state(*pending, answer=message.content)
            pending = []
        else:
            pending.append(message)
            if data.draw(st.booleans()):
                talk.state(*pending)
                pending = []
        due = message.role != "assistant"
    last = user("the last message closes what is open")
    talk.state(*pending, last)
    assert talk.text == whole(template, *messages, last)


# ---------------------------------------------------------------- templates that cannot


def test_a_model_without_a_template_is_refused_by_name():
    for none in (None, ""):
        with refused("unsupported_model_feature") as refusal:
            render([user("Hi")], Tokenizer(chatml, none), turn=None, root=True, generate=False)
        assert "no chat template" in refusal.value.message
        assert refusal.value.hint
    with refused("unsupported_model_feature"):
        render([user("Hi")], object(), turn=None, root=False, generate=False)  # pyright: ignore[reportArgumentType]


def test_text_and_tokens_need_no_template():
    tokenizer = Tokenizer(chatml, None)
    out = render([TextPiece(text="a"), TokensPiece(tokens=(1,))], tokenizer, turn=None, root=True, generate=True)
    assert out == (["a", (1,)], None)
    assert tokenizer.asked == 0


def test_what_the_template_raises_becomes_an_invalid_request_with_its_words():
    situations: list[tuple[Turn | None, bool]] = [
        (None, True),
        (None, False),
        ("due", False),
        ("closed", False),
        ("open", False),
    ]
    for turn, root in situations:
        with refused("invalid_request") as refusal:
            rendered(system("Be brief."), turn=turn, root=root, template=alternating)
        assert "roles must alternate" in refusal.value.message
        assert isinstance(refusal.value.__cause__, ValueError)


def test_a_template_may_raise_anything():
    def broken(messages: Messages, prompt: bool) -> str:
        raise KeyError("content")

    with refused("invalid_request"):
        rendered(user("Hi"), root=True, template=broken)


@pytest.mark.parametrize("template", [counting, forgetting])
def test_a_template_that_rewrites_history_is_refused(template: Callable[[Messages, bool], str]):
    with refused("unsupported_model_feature") as refusal:
        rendered(user("Hi"), turn="due", template=template)
    assert "rewrites earlier messages" in refusal.value.message
    with refused("unsupported_model_feature"):
        rendered(user("Hi"), user("again"), root=True, template=template)


@pytest.mark.parametrize("turn", [None, "closed", "open"])
def test_a_template_that_drops_answers_is_refused_after_one(turn: Turn | None):
    with refused("unsupported_model_feature"):
        rendered(user("Hi"), turn=turn, template=forgetting)


@pytest.mark.parametrize("turn", [None, "closed", "open"])
def test_what_a_template_does_before_an_answer_does_not_matter_after_it(turn: Turn | None):
    """Reasoning models' templates drop the thoughts of earlier answers; those are KV already."""
    assert rendered(user("Hi"), turn=turn, template=counting) == rendered(user("Hi"), turn=turn, template=chatml)


def test_a_template_that_changes_an_answer_beyond_recognition_is_refused():
    def shouting(messages: Messages, prompt: bool) -> str:
        return chatml([{**message, "content": message["content"].upper()} for message in messages], prompt)

    with refused("unsupported_model_feature"):
        rendered(user("Hi"), turn="open", template=shouting)


def test_a_template_whose_prompt_to_answer_changes_what_was_said_is_refused():
    def prefixed(messages: Messages, prompt: bool) -> str:
        return ("answer this: " if prompt else "") + chatml(messages, False)

    with refused("unsupported_model_feature"):
        rendered(user("Hi"), root=True, generate=True, template=prefixed)


def test_what_a_template_refuses_in_one_state_it_refuses_over_two():
    with refused("invalid_request"):
        rendered(user("Hi"), user("again"), root=True, template=alternating)
    talk = Conversation(alternating).state(user("Hi"))
    with refused("invalid_request"):
        talk.state(user("again"))
