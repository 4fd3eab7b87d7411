"""Who asks: what a keyring makes of a key, what a keys file may say, and that no error shows a key."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from anabranch_server.tenancy import OPERATOR, Caller, Keyring, label, read_keys
from tests.server.pool import refused

NAMED = {"sk-alice": "alice", "sk-bob": "bob"}


def asks(keyring: Keyring, key: str | None) -> Caller:
    return keyring.caller(None if key is None else f"Bearer {key}")


# ---------------------------------------------------------------- the keyring


def test_without_any_keys_everybody_is_let_in_and_each_key_is_a_tenant():
    keyring = Keyring()
    assert asks(keyring, None) == Caller("", operator=True)
    one, other = asks(keyring, "one"), asks(keyring, "other")
    assert one == asks(keyring, "one") != other
    assert not one.operator
    assert label(one.tenant) == label(other.tenant) == "unnamed"
    assert "one" not in one.tenant


def test_with_an_admin_key_nobody_else_is_the_operator():
    keyring = Keyring(admin_key="root")
    assert asks(keyring, "root") == Caller(OPERATOR, operator=True)
    assert asks(keyring, None) == Caller("", operator=False)
    assert not asks(keyring, "other").operator


def test_one_key_for_all_is_one_tenant():
    keyring = Keyring(api_key="sk")
    assert asks(keyring, "sk") == Caller("default", operator=True)
    for key in (None, "", "s", "sk2", "SK"):
        with refused("unauthorized"):
            asks(keyring, key)
    keyring = Keyring(api_key="sk", admin_key="root")
    assert asks(keyring, "sk") == Caller("default", operator=False)
    assert asks(keyring, "root") == Caller(OPERATOR, operator=True)


def test_of_named_keys_each_is_a_tenant_and_no_other_key_is_let_in():
    keyring = Keyring(NAMED, api_key="sk", admin_key="root")
    assert asks(keyring, "sk-alice") == Caller("alice")
    assert asks(keyring, "sk-bob") == Caller("bob")
    assert asks(keyring, "root") == Caller(OPERATOR, operator=True)
    for key in (None, "", "alice", "sk", "sk-alice2", "sk-alic"):
        with refused("unauthorized") as refusal:
            asks(keyring, key)
        assert refusal.value.status == 401
        assert "sk-" not in str(refusal.value.body())


def test_one_of_the_names_may_be_the_operator():
    assert asks(Keyring({"k": OPERATOR, "l": "l"}), "k") == Caller(OPERATOR, operator=True)
    assert not asks(Keyring({"k": OPERATOR, "l": "l"}), "l").operator


def test_an_empty_admin_key_is_nobodys():
    assert asks(Keyring(api_key="sk", admin_key=""), "sk").operator
    with refused("unauthorized"):
        asks(Keyring(api_key="sk", admin_key=""), "")


@pytest.mark.parametrize("header", ["Bearer sk-bob", "bearer sk-bob", "BEARER   sk-bob "])
def test_the_scheme_is_read_as_http_says(header: str):
    assert Keyring(NAMED).caller(header).tenant == "bob"


@pytest.mark.parametrize(
    "header", [None, "", "sk-bob", "Basic sk-bob", "Bearer", "Bearer ", "Bearersk-bob", "Bearer x"]
)
def test_what_is_no_bearer_key_is_no_key(header: str | None):
    with refused("unauthorized"):
        Keyring(NAMED).caller(header)
    assert bool(Keyring().caller(header).tenant) == (header == "Bearer x")


def test_a_key_of_any_letters_is_compared_without_a_fault():
    with refused("unauthorized"):
        asks(Keyring(NAMED, admin_key="é"), "ü")
    assert asks(Keyring(), "é") != asks(Keyring(), "ü")


# ---------------------------------------------------------------- the keys file


def test_a_keys_file_has_a_name_and_a_key_a_line(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# of the team\n\nalice sk-alice  # since May\n  bob\tsk-bob\n")
    assert read_keys(str(file)) == NAMED


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alice", "line 1"),
        ("alice sk-secret more", "line 1"),
        ("ok sk-1\n\n# \nal/ice sk-secret", "line 4"),
        ("key:0 sk-secret", "line 1"),
        (f"{'a' * 65} sk-secret", "line 1"),
        ("alice sk-secré-secret", "line 1"),
        ("sk-secret", "line 1"),
        ("alice sk-secret\nalice sk-2", "line 2 of .* repeats"),
        ("alice sk-secret\nbob sk-secret", "line 2 of .* repeats"),
        ("anonymous sk-secret", "line 1 .*'anonymous' is a name that the server uses"),
        ("unnamed sk-secret", "uses itself"),
        ("default sk-secret", "uses itself"),
        ("# sk-secret\n", "has no keys"),
        ("", "has no keys"),
    ],
)
def test_a_line_that_makes_no_sense_is_named_and_no_key_is_shown(tmp_path: Path, text: str, words: str):
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words) as error:
        read_keys(str(file))
    assert "sec" not in "".join(traceback.format_exception(error.value)).partition("ValueError")[2]
    assert str(file) in str(error.value)


def test_a_file_that_cannot_be_read_is_named_and_nothing_of_it_is_shown(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys(str(tmp_path / "none"))
    file = tmp_path / "latin"
    file.write_bytes(b"alice sk-secret\xe9")
    with pytest.raises(ValueError, match="cannot be read") as error:
        read_keys(str(file))
    assert "secret" not in str(error.value)
    assert error.value.__cause__ is None


def test_a_name_of_64_letters_is_allowed_and_operator_is_a_name(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text(f"{'a' * 64} k1\noperator k2\nA.b_c-9 k3\n")
    assert read_keys(str(file)) == {"k1": "a" * 64, "k2": OPERATOR, "k3": "A.b_c-9"}


def test_tenants_without_a_name_are_counted_together():
    assert [label(tenant) for tenant in ("", "alice", OPERATOR, "default", "key:12ab")] == [
        "anonymous",
        "alice",
        OPERATOR,
        "default",
        "unnamed",
    ]
