"""The two ends of joining, without a network, and the tokens that people carry."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.errors import Code, ConfigError, ProtocolError, UserError
from mlxtp.identity.join_protocol import (
    LIFE_S,
    MAX_FAILURES,
    MAX_OPEN,
    MAX_OPEN_EACH,
    MAX_REMEMBERED,
    REMEMBERED_S,
    RESEND_S,
    Admitted,
    AskElsewhere,
    Granted,
    Host,
    Joiner,
    JoinToken,
    TokenIssuer,
    read_token,
    redirect,
    spoken,
)
from mlxtp.wire.certificates import (
    Authority,
    PrivateKey,
    authority_hash,
    check_node,
    fingerprint,
    found,
    new_key,
    point_of,
    sign,
)
from mlxtp.wire.peer_messages import JoinGrant, JoinOffer, JoinRefusal, JoinRequest

CLUSTER = "c1" * 8
FIRST, NEW, OTHER = "a1" * 16, "a2" * 16, "a3" * 16
NOW = 1_800_000_000.0

AUTHORITY = found(CLUSTER, new_key())
FIRST_KEY, NEW_KEY = new_key(), new_key()
FIRST_CERTIFICATE = AUTHORITY.certify(FIRST, FIRST_KEY.public_key())
FIRST_PIN, NEW_PIN = fingerprint(FIRST_KEY.public_key()), fingerprint(NEW_KEY.public_key())


class Story:
    """A first Mac with one open token, and another one that has it."""

    def __init__(self) -> None:
        self.desk = TokenIssuer(CLUSTER, authority_hash(AUTHORITY.certificate))
        self.token = self.desk.issue(b"s" * 16, NOW)
        self.members = {FIRST: FIRST_PIN}

    def host(self, nonce: bytes = b"h" * 32, address: str = "") -> Host:
        return Host(
            AUTHORITY,
            FIRST_CERTIFICATE,
            self.desk,
            nonce,
            members=self.members,
            peers=("10.0.0.1:52414",),
            address=address,
        )

    def joiner(self, token: JoinToken | None = None, *, nonce: bytes = b"j" * 32) -> Joiner:
        return Joiner(token or self.token, NEW, NEW_KEY, "mini", nonce)

    def request(self) -> JoinRequest:
        return self.joiner().on_offer(self.host().offer, FIRST_CERTIFICATE)

    def refused(self) -> tuple[Joiner, JoinRefusal]:
        """A joiner with a token without an issuer, and its refusal."""
        unknown = JoinToken(CLUSTER, self.token.authority_hash, b"u" * 16)
        host, joiner = self.host(os.urandom(32)), self.joiner(unknown)
        answer = host.on_request(joiner.on_offer(host.offer, FIRST_CERTIFICATE), NOW)
        assert isinstance(answer.message, JoinRefusal)
        return joiner, answer.message

    def grant(self, joiner: Joiner) -> JoinGrant:
        host = self.host()
        answer = host.on_request(joiner.on_offer(host.offer, FIRST_CERTIFICATE), NOW)
        assert isinstance(answer.message, JoinGrant)
        return answer.message

    def refusal(self, request: JoinRequest, now: float = NOW, address: str = "") -> str:
        answer = self.host(address=address).on_request(request, now)
        assert isinstance(answer.message, JoinRefusal)
        assert answer.admitted is None
        return answer.message.detail


@pytest.fixture
def story() -> Story:
    return Story()


def let_in(host: Host, joiner: Joiner, now: float = NOW) -> Granted:
    answer = host.on_request(joiner.on_offer(host.offer, FIRST_CERTIFICATE), now)
    assert isinstance(answer.message, JoinGrant), answer.message
    assert answer.admitted == Admitted(NEW, "mini", NEW_PIN)
    return joiner.on_grant(answer.message)


def test_a_mac_joins_and_joins_again_by_a_new_token(story: Story) -> None:
    granted = let_in(story.host(), story.joiner())
    assert granted.peers == ("10.0.0.1:52414",)
    node = check_node(granted.membership.certificate, AUTHORITY.certificate)
    assert (node.node_id, node.cluster_id, node.fingerprint) == (NEW, CLUSTER, NEW_PIN)
    assert granted.membership.authority == AUTHORITY.certificate
    story.members[NEW] = NEW_PIN
    story.token = story.desk.issue(b"t" * 16, NOW)
    let_in(story.host(), story.joiner(), NOW + 1)


def test_an_authority_of_the_same_name(story: Story) -> None:
    impostor = found(CLUSTER, new_key())
    certificate = impostor.certify(FIRST, FIRST_KEY.public_key())
    with pytest.raises(UserError, match=f"is for cluster {CLUSTER}, and another cluster answered") as caught:
        story.joiner().on_offer(JoinOffer(impostor.certificate, b"h" * 32), certificate)
    assert caught.value.code is Code.JOIN_REFUSED


@pytest.mark.parametrize(
    "shown", [found(CLUSTER, new_key()).certify(FIRST, FIRST_KEY.public_key()), b"no certificate"]
)
def test_an_attacker_in_between_who_passes_the_offer_on(story: Story, shown: bytes) -> None:
    """Not even where to ask instead is taken from it."""
    with pytest.raises(ProtocolError) as caught:
        story.joiner().on_offer(replace(story.host().offer, ask="studio"), shown)
    assert caught.value.code is Code.NOT_AUTHENTIC


def test_a_token_whose_parts_are_of_two_clusters(story: Story) -> None:
    mixed = JoinToken("c2" * 8, story.token.authority_hash, story.token.secret)
    with pytest.raises(ProtocolError, match="wrong cluster id"):
        story.joiner(mixed).on_offer(story.host().offer, FIRST_CERTIFICATE)


def test_a_member_that_cannot_let_anybody_in_names_who_can(story: Story) -> None:
    offer = redirect(AUTHORITY.certificate, b"h" * 32, "studio\n", ("10.0.0.1:52414", "10.0.0.2:52414"))
    with pytest.raises(AskElsewhere, match=r"studio\? can, at 10\.0\.0\.1:52414 or 10") as caught:
        story.joiner().on_offer(offer, FIRST_CERTIFICATE)
    assert caught.value.addresses == ("10.0.0.1:52414", "10.0.0.2:52414")
    assert caught.value.code is Code.JOIN_REFUSED


def test_a_grant_that_was_changed_or_is_of_another_exchange(story: Story) -> None:
    asked, asks_again = story.joiner(), story.joiner(nonce=b"k" * 32)
    grant = story.grant(asked)
    asks_again.on_offer(story.host().offer, FIRST_CERTIFICATE)
    foreign = AUTHORITY.certify(NEW, FIRST_KEY.public_key())
    for joiner, told in (
        (asked, replace(grant, proof=bytes(32))),
        (asked, replace(grant, certificate=foreign)),
        (asks_again, grant),
        (story.joiner(), grant),  # which has asked for nothing
    ):
        with pytest.raises(ProtocolError, match="does not know the join token") as caught:
            joiner.on_grant(told)
        assert caught.value.code is Code.NOT_AUTHENTIC


@pytest.mark.parametrize(("node_id", "key"), [(FIRST, NEW_KEY), (NEW, FIRST_KEY)])
def test_a_foreign_certificate(
    story: Story, monkeypatch: pytest.MonkeyPatch, node_id: str, key: PrivateKey
) -> None:
    certificate = AUTHORITY.certify(node_id, key.public_key())
    monkeypatch.setattr(Authority, "certify", lambda *_: certificate)
    joiner = story.joiner()
    with pytest.raises(ProtocolError, match="for another node or key than ours"):
        joiner.on_grant(story.grant(joiner))


def test_a_refusal_is_told_in_one_printable_line(story: Story) -> None:
    joiner, refusal = story.refused()
    signed = sign(
        AUTHORITY.key, b"mlxtp join refusal\0", joiner._transcript, b"expired\x1b[2J\nask again", b""
    )
    error = joiner.on_refusal(JoinRefusal("expired\x1b[2J\nask again", signed))
    assert error.detail == "the cluster did not let this Mac in: expired?[2J?ask again"
    assert error.code is Code.JOIN_REFUSED
    assert "is not known here" in joiner.on_refusal(refusal).detail


def test_a_refusal_counts_by_the_hand_of_the_authority_and_for_that_exchange_alone(story: Story) -> None:
    """A removed member still has a certificate and can answer a joiner."""
    joiner, refusal = story.refused()
    other, _ = story.refused()
    removed = sign(new_key(), b"mlxtp join refusal\0", joiner._transcript, refusal.detail.encode())
    wrong = (
        replace(refusal, detail="go away"),
        JoinRefusal("go away", removed),
        JoinRefusal("go away", b"x" * 8),
    )
    for who, said in (*((joiner, each) for each in wrong), (other, refusal), (story.joiner(), refusal)):
        with pytest.raises(ProtocolError, match="without the cluster's authority refused") as caught:
            who.on_refusal(said)
        assert caught.value.code is Code.NOT_AUTHENTIC


UNKNOWN = "is not known here, or its proof is wrong"


@pytest.mark.parametrize(
    "change",
    [
        {"node_id": b"x" * 16},
        {"name": "max"},
        {"public_key": point_of(FIRST_KEY.public_key())},
        {"nonce": b"x" * 32},
        {"proof": bytes(32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_request_that_was_changed(story: Story, change: dict[str, Any]) -> None:
    assert UNKNOWN in story.refusal(replace(story.request(), **change))
    assert story.host().on_request(story.request(), NOW).admitted, "the token is still good"


def test_a_request_for_another_exchange(story: Story) -> None:
    """Recorded and sent again, it meets another nonce. A member that passes it on has another certificate.

    What a stranger hears is the same for a token that was never issued.
    """
    between = AUTHORITY.certify("a3" * 16, new_key().public_key())
    unknown = JoinToken(CLUSTER, story.token.authority_hash, b"t" * 16)
    later, offer = story.host(b"i" * 32).offer, story.host().offer
    for request in (
        story.joiner().on_offer(later, FIRST_CERTIFICATE),
        story.joiner().on_offer(offer, between),
        story.joiner(unknown).on_offer(offer, FIRST_CERTIFICATE),
    ):
        assert story.refusal(request).startswith(f"this join token {UNKNOWN}")


class Pretender:
    """It shows the key of another Mac and signs by its own, or shows what is no key."""

    def __init__(self, shown: object) -> None:
        self._shown = shown

    def public_key(self) -> object:
        return self._shown

    def sign(self, data: bytes, algorithm: object) -> bytes:
        return NEW_KEY.sign(data, algorithm)  # type: ignore[arg-type]


class Nothing:
    def public_bytes(self, *_: object) -> bytes:
        return b"\4" + b"\1" * 64


@pytest.mark.parametrize("shown", [FIRST_KEY.public_key(), Nothing()])
def test_a_key_that_the_joiner_does_not_hold(story: Story, shown: object) -> None:
    joiner = Joiner(story.token, NEW, Pretender(shown), "mini", b"j" * 32)  # type: ignore[arg-type]
    request = joiner.on_offer(story.host().offer, FIRST_CERTIFICATE)
    assert "does not hold the key that it showed" in story.refusal(request)


def test_a_token_works_once(story: Story) -> None:
    let_in(story.host(), story.joiner())
    other = Joiner(story.token, "a3" * 16, new_key(), "max", b"k" * 32)
    request = other.on_offer(story.host().offer, FIRST_CERTIFICATE)
    assert "was used before; each token admits one Mac, once; make a new one" in story.refusal(request)


def test_a_mac_that_lost_the_answer_asks_again(story: Story) -> None:
    first = let_in(story.host(), story.joiner())
    story.members[NEW] = NEW_PIN
    again = let_in(story.host(b"i" * 32), story.joiner(nonce=b"k" * 32), NOW + RESEND_S - 1)
    assert again.membership.authority == first.membership.authority
    assert "was used before" in story.refusal(story.request(), NOW + RESEND_S)


def test_an_expired_token_is_called_that_only_to_its_holder(story: Story) -> None:
    late = NOW + LIFE_S + 5
    assert "expired 5 s ago; make a new one with `mlxtp token`" in story.refusal(story.request(), late)
    assert UNKNOWN in story.refusal(replace(story.request(), proof=bytes(32)), late)


def test_five_failures_kill_a_token(story: Story) -> None:
    guess = replace(story.request(), proof=bytes(32))
    for _ in range(MAX_FAILURES - 1):
        assert UNKNOWN in story.refusal(guess)
    assert story.host().on_request(story.request(), NOW).admitted
    assert UNKNOWN in story.refusal(guess)
    assert "is blocked after 5 wrong attempts" in story.refusal(story.request())
    assert UNKNOWN in story.refusal(guess), "guessing tells nothing new"


def test_who_guesses_from_another_address_ends_no_token(story: Story) -> None:
    """A removed member hears a token's id from the joiner that asks it."""
    for _ in range(MAX_FAILURES):
        story.host(address="10.0.0.66").on_request(replace(story.request(), proof=bytes(32)), NOW)
    assert "is blocked" in story.refusal(story.request(), address="10.0.0.66")
    assert story.host(address="10.0.0.7").on_request(story.request(), NOW).admitted


def test_a_token_ends_with_the_membership_of_the_mac_that_asked_for_it(story: Story) -> None:
    story.token = story.desk.issue(b"t" * 16, NOW, asked_by=OTHER)
    story.desk.keep({FIRST, OTHER})
    assert story.host().on_request(story.request(), NOW).admitted == Admitted(NEW, "mini", NEW_PIN, OTHER)
    story.token = story.desk.issue(b"u" * 16, NOW, asked_by=OTHER)
    story.desk.keep({FIRST})
    story.desk.keep({FIRST, OTHER})  # it came back
    assert "the member that requested this join token was removed" in story.refusal(story.request())


def test_a_member_cannot_join_again_by_its_own_token(story: Story) -> None:
    story.members[NEW] = NEW_PIN
    story.token = story.desk.issue(b"t" * 16, NOW, asked_by=NEW)
    assert "cannot join by a token that it requested itself" in story.refusal(story.request())


def test_a_proof_by_the_key_that_unknown_tokens_have(story: Story) -> None:
    class Unknown(JoinToken):
        @property
        def key(self) -> bytes:
            return story.desk.key(b"unknown!")

        @property
        def id(self) -> bytes:
            return b"unknown!"

    token = Unknown(CLUSTER, story.token.authority_hash, b"t" * 16)
    assert UNKNOWN in story.refusal(story.joiner(token).on_offer(story.host().offer, FIRST_CERTIFICATE))


def test_a_copied_home_is_told_so_and_the_token_stays_good(story: Story) -> None:
    story.members[NEW] = "f3" * 32
    assert f"another member has node id {NEW} already" in story.refusal(story.request())
    del story.members[NEW]
    assert story.host().on_request(story.request(), NOW).admitted


def test_names_are_made_fit_to_be_shown() -> None:
    assert spoken("Anna's Mac mini – 東京") == "Anna's Mac mini – 東京"
    assert spoken("a\x1b]0;x\x07\n\u202eb") == "a?]0;x???b"
    assert len(spoken("x" * 100)) == 64


TOKEN = JoinToken("0123456789abcdef", b"h" * 16, b"s" * 16)
TEXT = TOKEN.text()


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
        f"  {TEXT.lower()}\n",
        " \u2013 ".join(TEXT[at : at + 6] for at in range(0, 72, 6)),
        TEXT[:40] + "\r\n    " + TEXT[40:],
    ],
)
def test_how_it_was_pasted_does_not_matter(pasted: str) -> None:
    assert read_token(pasted) == TOKEN


@pytest.mark.parametrize(
    ("text", "why"),
    [
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


def test_a_token_of_a_later_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxtp.identity.join_protocol.VERSION", 2)
    later = TOKEN.text()
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"is of version 2 and this mlxtp reads version 1"):
        read_token(later)


def test_every_part_counts_in_what_is_derived_and_the_secret_shows_nowhere() -> None:
    others = [replace(TOKEN, cluster_id="f" * 16), replace(TOKEN, authority_hash=b"H" * 16)]
    others.append(replace(TOKEN, secret=b"S" * 16))
    assert len({token.key for token in (TOKEN, *others)}) == 4
    assert "ssss" not in repr(TOKEN)
    assert TOKEN.secret not in TOKEN.key + TOKEN.id
    assert not TOKEN.key.startswith(TOKEN.id)


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


def test_what_became_of_a_token_is_known_for_an_hour_and_of_256_at_most() -> None:
    here = desk()
    token = here.issue(secret(1), NOW)
    here.issue(secret(2), NOW + LIFE_S + REMEMBERED_S - 1)
    assert here.knows(token.id)
    here.issue(secret(3), NOW + LIFE_S + REMEMBERED_S)
    assert not here.knows(token.id)
    here, tokens = desk(), []
    for number in range(MAX_REMEMBERED + 50):
        tokens.append(here.issue(secret(number), NOW + number))
        here.use(tokens[-1].id, "mini", NOW + number)
    assert [here.knows(each.id) for each in tokens] == [False] * 49 + [True] * (MAX_REMEMBERED + 1)
