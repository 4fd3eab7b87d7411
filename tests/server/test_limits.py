"""Limits: what the environment may say, and what is refused by name."""

from __future__ import annotations

import pytest

from anabranch_server.limits import Limits


def test_nothing_said_means_the_defaults(monkeypatch: pytest.MonkeyPatch):
    assert Limits.read({}) == Limits()
    assert Limits.read({"HOME": "/", "ANABRANCH_UNKNOWN": "x"}) == Limits()
    monkeypatch.setenv("ANABRANCH_MAX_STATES", "7")
    assert Limits.read() == Limits(max_states=7)


def test_every_setting_has_a_variable_of_its_name():
    said = {
        "ANABRANCH_DEFAULT_LEASE": "60.5",
        "ANABRANCH_MAX_LEASE": "100",
        "ANABRANCH_MAX_STATES": "5",
        "ANABRANCH_MAX_HELD_TOKENS": "1000",
        "ANABRANCH_MAX_UNFINISHED": "0",
        "ANABRANCH_PINNED_SHARE": "0.25",
        "ANABRANCH_EVICT": "no",
        "ANABRANCH_API_KEYS_FILE": "/etc/keys",
        "ANABRANCH_MAPPERS": "short=low_rank:/etc/short",
        "ANABRANCH_ADAPTER_READS": "calm:base",
    }
    known = Limits(60.5, 100.0, 5, 1000, 0, 0.25, False, "/etc/keys", "short=low_rank:/etc/short", "calm:base")
    assert Limits.read(said) == known
    assert isinstance(Limits.read(said).max_lease, float)


@pytest.mark.parametrize(
    ("text", "on"), [("0", False), ("false", False), ("No", False), ("1", True), ("TRUE", True), ("yes", True)]
)
def test_a_switch_is_turned_by_what_people_write(text: str, on: bool):
    assert Limits.read({"ANABRANCH_EVICT": text}).evict is on


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MAX_STATES", "many"),
        ("MAX_STATES", ""),
        ("MAX_STATES", "-1"),
        ("MAX_STATES", "1.5"),
        ("MAX_HELD_TOKENS", "1e6"),
        ("MAX_UNFINISHED", "-3"),
        ("DEFAULT_LEASE", "nan"),
        ("DEFAULT_LEASE", "-1"),
        ("DEFAULT_LEASE", "1h"),
        ("DEFAULT_LEASE", "0"),
        ("DEFAULT_LEASE", "86401"),
        ("MAX_LEASE", "3599"),
        ("PINNED_SHARE", "0"),
        ("PINNED_SHARE", "1.01"),
        ("PINNED_SHARE", "nan"),
        ("EVICT", "2"),
        ("EVICT", ""),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_name_of_the_variable(name: str, text: str):
    with pytest.raises(ValueError, match=f"ANABRANCH_{name}"):
        Limits.read({f"ANABRANCH_{name}": text})


def test_the_ends_of_the_ranges_are_allowed():
    assert Limits.read({"ANABRANCH_PINNED_SHARE": "1"}).pinned_share == 1
    assert Limits.read({"ANABRANCH_DEFAULT_LEASE": "86400"}).default_lease == 86400
    assert Limits.read({"ANABRANCH_MAX_STATES": "0"}).max_states == 0
