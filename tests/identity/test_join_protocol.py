"""The two ends of joining, without a network: what each takes from the other, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mlxtp.errors import Code, ProtocolError, UserError
from mlxtp.identity.join_protocol import (
    LIFE_S,
    MAX_FAILURES,
    RESEND_S,
    Admitted,
    AskElsewhere,
    Granted,
    Host,
    Joiner,
    JoinToken,
    TokenIssuer,
    redirect,
    spoken,
)
from mlxtp.wire.certificates import (
    Authority,
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
        host, joiner = (
            self.host(new_key().public_key().public_numbers().x.to_bytes(32, "big")),
            self.joiner(unknown),
        )
        answer = host.on_request(joiner.on_offer(host.offer, FIRST_CERTIFICATE), NOW)
        assert isinstance(answer.message, JoinRefusal)
        return joiner, answer.message

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


def test_a_mac_joins(story: Story) -> None:
    granted = let_in(story.host(), story.joiner())
    assert granted.peers == ("10.0.0.1:52414",)
    node = check_node(granted.membership.certificate, AUTHORITY.certificate)
    assert (node.node_id, node.cluster_id, node.fingerprint) == (NEW, CLUSTER, NEW_PIN)
    assert granted.membership.authority == AUTHORITY.certificate


# --- what the joiner does not take ------------------------------------------------------------------


def test_the_token_of_another_cluster(story: Story) -> None:
    other = TokenIssuer("c2" * 8, authority_hash(found("c2" * 8, new_key()).certificate)).issue(
        b"s" * 16, NOW
    )
    with pytest.raises(UserError, match=f"is for cluster {'c2' * 8}, and another cluster answered") as caught:
        story.joiner(other).on_offer(story.host().offer, FIRST_CERTIFICATE)
    assert caught.value.code is Code.JOIN_REFUSED


def test_an_authority_of_the_same_name(story: Story) -> None:
    impostor = found(CLUSTER, new_key())
    certificate = impostor.certify(FIRST, FIRST_KEY.public_key())
    with pytest.raises(UserError, match="another cluster answered"):
        story.joiner().on_offer(JoinOffer(impostor.certificate, b"h" * 32), certificate)


@pytest.mark.parametrize("ask", ["", "studio"])
@pytest.mark.parametrize(
    "shown",
    [
        found(CLUSTER, new_key()).certify(FIRST, FIRST_KEY.public_key()),
        Authority(AUTHORITY.certificate, new_key()).certify(FIRST, FIRST_KEY.public_key()),
        AUTHORITY.certificate,
        b"",
        b"no certificate",
    ],
)
def test_an_attacker_in_between_who_passes_the_offer_on(story: Story, shown: bytes, ask: str) -> None:
    """Not even where to ask instead is taken from it."""
    with pytest.raises(ProtocolError) as caught:
        story.joiner().on_offer(replace(story.host().offer, ask=ask), shown)
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


def wrong_proof(grant: JoinGrant) -> JoinGrant:
    return replace(grant, proof=bytes(32))


def another_certificate(grant: JoinGrant) -> JoinGrant:
    return replace(grant, certificate=AUTHORITY.certify(NEW, FIRST_KEY.public_key()))


@pytest.mark.parametrize("change", [wrong_proof, another_certificate])
def test_a_grant_that_was_changed(story: Story, change: Callable[[JoinGrant], JoinGrant]) -> None:
    host, joiner = story.host(), story.joiner()
    answer = host.on_request(joiner.on_offer(host.offer, FIRST_CERTIFICATE), NOW)
    assert isinstance(answer.message, JoinGrant)
    with pytest.raises(ProtocolError, match="does not know the join token") as caught:
        joiner.on_grant(change(answer.message))
    assert caught.value.code is Code.NOT_AUTHENTIC


def test_the_grant_of_an_earlier_exchange(story: Story) -> None:
    host, joiner = story.host(), story.joiner()
    answer = host.on_request(joiner.on_offer(host.offer, FIRST_CERTIFICATE), NOW)
    again = story.joiner(nonce=b"k" * 32)
    again.on_offer(story.host().offer, FIRST_CERTIFICATE)
    assert isinstance(answer.message, JoinGrant)
    with pytest.raises(ProtocolError, match="does not know the join token"):
        again.on_grant(answer.message)
    with pytest.raises(ProtocolError, match="does not know the join token"):
        story.joiner().on_grant(answer.message)  # which has asked for nothing


@pytest.mark.parametrize(("node_id", "key"), [(FIRST, NEW_KEY), (NEW, FIRST_KEY)])
def test_a_foreign_certificate(
    story: Story, monkeypatch: pytest.MonkeyPatch, node_id: str, key: object
) -> None:
    certificate = AUTHORITY.certify(node_id, key.public_key())  # type: ignore[attr-defined]
    monkeypatch.setattr(Authority, "certify", lambda *_: certificate)
    host, joiner = story.host(), story.joiner()
    answer = host.on_request(joiner.on_offer(host.offer, FIRST_CERTIFICATE), NOW)
    assert isinstance(answer.message, JoinGrant)
    with pytest.raises(ProtocolError, match="for another node or key than ours"):
        joiner.on_grant(answer.message)


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


# --- what the host does not take --------------------------------------------------------------------

UNKNOWN = "is not known here, or its proof is wrong"

CHANGES: dict[str, Callable[[JoinRequest], JoinRequest]] = {
    "another node id": lambda request: replace(request, node_id=b"x" * 16),
    "another name": lambda request: replace(request, name="max"),
    "another key": lambda request: replace(request, public_key=point_of(FIRST_KEY.public_key())),
    "another nonce": lambda request: replace(request, nonce=b"x" * 32),
    "no proof": lambda request: replace(request, proof=bytes(32)),
    "a proof with one bit changed": lambda request: replace(
        request, proof=bytes((request.proof[0] ^ 1,)) + request.proof[1:]
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_request_that_was_changed(story: Story, what: str) -> None:
    assert UNKNOWN in story.refusal(CHANGES[what](story.request()))
    assert story.host().on_request(story.request(), NOW).admitted, "the token is still good"


def test_a_request_of_another_exchange(story: Story) -> None:
    """Recorded and sent again, it meets another nonce."""
    request = story.request()
    answer = story.host(b"i" * 32).on_request(request, NOW)
    assert isinstance(answer.message, JoinRefusal)
    assert UNKNOWN in answer.message.detail


def test_a_request_that_a_member_passes_on_as_its_own(story: Story) -> None:
    """The joiner proved itself to whom it saw in TLS, and that was not this host."""
    between = AUTHORITY.certify("a3" * 16, new_key().public_key())
    request = story.joiner().on_offer(story.host().offer, between)
    assert UNKNOWN in story.refusal(request)


def test_a_key_that_the_joiner_does_not_hold(story: Story) -> None:
    class Pretender:
        def public_key(self) -> object:
            return FIRST_KEY.public_key()

        def sign(self, data: bytes, algorithm: object) -> bytes:
            return NEW_KEY.sign(data, algorithm)  # type: ignore[arg-type]

    joiner = Joiner(story.token, NEW, Pretender(), "mini", b"j" * 32)  # type: ignore[arg-type]
    request = joiner.on_offer(story.host().offer, FIRST_CERTIFICATE)
    assert "does not hold the key that it showed" in story.refusal(request)
    for signature in (b"x" * 70, b"\x30\x06\x02\x01\x00\x02\x01\x00"):
        assert "does not hold" in story.refusal(replace(story.request(), signature=signature))


def test_a_key_that_is_none(story: Story) -> None:
    class Nothing:
        def public_key(self) -> object:
            return self

        def public_bytes(self, *_: object) -> bytes:
            return b"\4" + b"\1" * 64

        def sign(self, data: bytes, algorithm: object) -> bytes:
            return b"s" * 70

    joiner = Joiner(story.token, NEW, Nothing(), "mini", b"j" * 32)  # type: ignore[arg-type]
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
    for _ in range(MAX_FAILURES):
        assert UNKNOWN in story.refusal(replace(story.request(), proof=bytes(32)))
    assert "is blocked after 5 wrong attempts" in story.refusal(story.request())
    assert UNKNOWN in story.refusal(replace(story.request(), proof=bytes(32))), "guessing tells nothing new"


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


def test_a_token_that_was_never_issued(story: Story) -> None:
    unknown = JoinToken(CLUSTER, story.token.authority_hash, b"t" * 16)
    request = story.joiner(unknown).on_offer(story.host().offer, FIRST_CERTIFICATE)
    texts = {story.refusal(request), story.refusal(replace(story.request(), proof=bytes(32)))}
    assert len(texts) == 1, "an unknown token and a wrong proof look alike"


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


def test_a_member_may_join_again_with_a_new_token(story: Story) -> None:
    let_in(story.host(), story.joiner())
    story.members[NEW] = NEW_PIN
    story.token = story.desk.issue(b"t" * 16, NOW)
    let_in(story.host(), story.joiner(), NOW + 1)


def test_names_are_made_fit_to_be_shown() -> None:
    assert spoken("Anna's Mac mini – 東京") == "Anna's Mac mini – 東京"
    assert spoken("a\x1b]0;x\x07\n\u202eb") == "a?]0;x???b"
    assert len(spoken("x" * 100)) == 64
