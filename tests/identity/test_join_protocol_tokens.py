"""Tokens as people handle them, and the desk that counts what becomes of them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.errors import Code, ConfigError, UserError
from mlxtp.identity.join_protocol import (
    LIFE_S,
    MAX_FAILURES,
    MAX_OPEN,
    MAX_OPEN_EACH,
    MAX_REMEMBERED,
    REMEMBERED_S,
    RESEND_S,
    JoinToken,
    TokenIssuer,
    read_token,
)

TOKEN = JoinToken("0123456789abcdef", b"h" * 16, b"s" * 16)
TEXT = TOKEN.text()
NOW = 1_800_000_000.0


# --- the text ---------------------------------------------------------------------------------------


@given(
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
)
def test_what_is_written_is_read(cluster: bytes, authority: bytes, secret: bytes) -> None:
    token = JoinToken(cluster.hex(), authority, secret)
    text = token.text()
    assert len(text) == 72
    assert text.isalnum()
    assert read_token(text) == token


@pytest.mark.parametrize(
    "pasted",
    [
        TEXT.lower(),
        f"  {TEXT}\n",
        "-".join(TEXT[at : at + 8] for at in range(0, 72, 8)),
        " \u2013 ".join(TEXT[at : at + 6] for at in range(0, 72, 6)),
        TEXT[:40] + "\r\n    " + TEXT[40:],
        "\t".join(TEXT),
    ],
)
def test_how_it_was_pasted_does_not_matter(pasted: str) -> None:
    assert read_token(pasted) == TOKEN


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        (" -\n", "is empty"),
        (TEXT[:-1], "has 71 characters instead of 72"),
        (TEXT + "A", "has 73 characters instead of 72"),
        ("0" + TEXT[1:], "character 1 of the join token is '0'"),
        (TEXT[:30] + "!" + TEXT[31:], "character 31 of the join token is '!'"),
        (TEXT[:30] + "\u00c4" + TEXT[31:], "letters and the digits 2 to 7 only"),
    ],
)
def test_what_is_wrong_with_it_is_said(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_token(text)


def test_every_wrong_letter_is_noticed_and_nothing_of_the_token_repeated() -> None:
    for place, letter in enumerate(TEXT):
        wrong = "A" if letter != "A" else "B"
        with pytest.raises(ConfigError, match="has a typo") as caught:
            read_token(TEXT[:place] + wrong + TEXT[place + 1 :])
        assert TEXT[:10] not in caught.value.detail
        assert TEXT[-10:] not in caught.value.detail


def test_two_letters_in_the_wrong_order_are_noticed() -> None:
    for place in range(71):
        swapped = TEXT[:place] + TEXT[place + 1] + TEXT[place] + TEXT[place + 2 :]
        if swapped != TEXT:
            with pytest.raises(ConfigError, match="has a typo"):
                read_token(swapped)


def test_a_token_of_a_later_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxtp.identity.join_protocol.VERSION", 2)
    later = TOKEN.text()
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"is of version 2 and this mlxtp reads version 1"):
        read_token(later)


def test_the_secret_shows_neither_in_texts_nor_in_what_is_sent() -> None:
    assert "ssss" not in repr(TOKEN)
    assert TOKEN.secret not in TOKEN.key + TOKEN.id
    assert not TOKEN.key.startswith(TOKEN.id)


def test_every_part_counts_in_what_is_derived() -> None:
    others = [
        JoinToken("0123456789abcdee", b"h" * 16, b"s" * 16),
        JoinToken("0123456789abcdef", b"H" * 16, b"s" * 16),
        JoinToken("0123456789abcdef", b"h" * 16, b"S" * 16),
    ]
    assert len({token.key for token in (TOKEN, *others)}) == 4
    assert len({token.id for token in (TOKEN, *others)}) == 4


# --- the desk ---------------------------------------------------------------------------------------


def desk() -> TokenIssuer:
    return TokenIssuer("0123456789abcdef", b"h" * 16)


def secret(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.mark.parametrize(
    ("ran", "wall", "open"), [(1, 1, True), (1, LIFE_S, False), (LIFE_S, -9e6, False), (1, -9e6, True)]
)
def test_a_token_expires_by_the_earlier_of_two_clocks(
    monkeypatch: pytest.MonkeyPatch, ran: float, wall: float, open: bool
) -> None:
    """One stands still while a Mac sleeps; the other may be set back, which lengthens nothing."""
    here, started = desk(), time.time()
    monkeypatch.setattr(time, "time", lambda: started)
    token = here.issue(secret(1), NOW)
    monkeypatch.setattr(time, "time", lambda: started + wall)
    assert here.why_not(token.id, "mini", NOW + ran) == ("" if open else "this join token expired 0 s ago")


def test_a_token_opens_once() -> None:
    here = desk()
    token = here.issue(secret(1), NOW)
    assert token == JoinToken("0123456789abcdef", b"h" * 16, secret(1))
    assert here.knows(token.id)
    assert here.key(token.id) == token.key
    assert here.why_not(token.id, "mini", NOW) == ""
    here.use(token.id, "mini", NOW + 1)
    assert "was used before" in here.why_not(token.id, "studio", NOW + 2)


def test_the_same_mac_may_ask_again_when_the_answer_was_lost() -> None:
    here = desk()
    token = here.issue(secret(1), NOW)
    here.use(token.id, "mini", NOW)
    assert here.why_not(token.id, "mini", NOW + RESEND_S - 1) == ""
    here.use(token.id, "mini", NOW + RESEND_S - 1)  # which does not give it more time
    assert "was used before" in here.why_not(token.id, "mini", NOW + RESEND_S)


def test_a_token_expires_after_a_quarter_of_an_hour() -> None:
    here = desk()
    token = here.issue(secret(1), NOW)
    assert LIFE_S == 900
    assert here.why_not(token.id, "mini", NOW + LIFE_S - 0.1) == ""
    assert "expired 0 s ago" in here.why_not(token.id, "mini", NOW + LIFE_S)
    assert "expired 60 s ago" in here.why_not(token.id, "mini", NOW + LIFE_S + 60)


def test_five_failures_are_the_end_of_a_token_and_of_no_other() -> None:
    here = desk()
    token, other = here.issue(secret(1), NOW), here.issue(secret(2), NOW)
    for _ in range(MAX_FAILURES - 1):
        here.count_wrong_proof(token.id)
    assert here.why_not(token.id, "mini", NOW) == ""
    here.count_wrong_proof(token.id)
    assert "blocked after 5 wrong attempts" in here.why_not(token.id, "mini", NOW)
    assert here.why_not(other.id, "mini", NOW) == ""


def test_a_token_without_an_issuer() -> None:
    here = desk()
    here.count_wrong_proof(TOKEN.id)
    assert not here.knows(TOKEN.id)
    assert here.key(TOKEN.id) != TOKEN.key
    assert len(here.key(TOKEN.id)) == 32


def test_members_take_four_each_and_none_of_the_owner_s() -> None:
    here = desk()
    for member in ("mini", "air"):
        for number in range(MAX_OPEN_EACH):
            here.issue(secret(number) + member.encode(), NOW, asked_by=member)
        with pytest.raises(UserError, match="4 join tokens that the same Mac requested are open"):
            here.issue(secret(99), NOW, asked_by=member)
    for number in range(MAX_OPEN):
        here.issue(secret(number), NOW, asked_by="studio", own=True)


def test_64_of_the_owner_s_own_may_be_open() -> None:
    here = desk()
    tokens = [here.issue(secret(number), NOW + number) for number in range(MAX_OPEN)]
    with pytest.raises(UserError, match=r"64 join tokens .*are open.* wait 880 s until the oldest") as caught:
        here.issue(secret(99), NOW + 20)
    assert caught.value.code is Code.OVERLOADED
    here.use(tokens[3].id, "mini", NOW + 20)
    here.issue(secret(99), NOW + 20)
    for _ in range(MAX_FAILURES):
        here.count_wrong_proof(tokens[4].id)
    with pytest.raises(UserError, match="which is the limit"):
        here.issue(secret(98), NOW + 20)
    void = desk()
    for number in range(MAX_OPEN_EACH):
        void.issue(secret(number), NOW, asked_by="mini")
    void.keep({"studio"})
    void.issue(secret(99), NOW, asked_by="mini")
    with pytest.raises(UserError, match="which is the limit"):
        here.issue(secret(97), NOW + 20)
    here.issue(secret(97), NOW + LIFE_S)


def test_what_became_of_a_token_is_known_for_an_hour() -> None:
    here = desk()
    token = here.issue(secret(1), NOW)
    here.issue(secret(2), NOW + LIFE_S + REMEMBERED_S - 1)
    assert here.knows(token.id)
    here.issue(secret(3), NOW + LIFE_S + REMEMBERED_S)
    assert not here.knows(token.id)


def test_the_desk_does_not_grow() -> None:
    here = desk()
    for number in range(MAX_REMEMBERED + 50):
        token = here.issue(secret(number), NOW + number)
        here.use(token.id, "mini", NOW + number)
    known = [
        here.knows(JoinToken("0123456789abcdef", b"h" * 16, secret(n)).id) for n in range(MAX_REMEMBERED + 50)
    ]
    assert sum(known) == MAX_REMEMBERED + 1
    assert known[-1]
    assert not known[0]
