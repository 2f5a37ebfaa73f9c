"""Seeded generators for the chats on which the tiny model is trained and measured.

Everything here is plain Python (no torch, no MLX), so that the training script and the measuring
script draw from the same code. A chat is an optional system message followed by turns; each turn is a
user message with the one right answer.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Rng = random.Random
Count = Callable[[str], int]  #: Number of tokens of a text.

CHAT_ANSWER = "I am a tiny test model. I can repeat text, find codes and count."
PRINTABLE = string.ascii_letters + string.digits + string.punctuation
NON_ASCII = "éèêàâçñöäüßøåæœ€£°µ你好世界中文日本語学абвгдежяλπΩ∑√→…“”–😀🙂🎉🚀❤🌍"
HELD_OUT = ("FALCON-MERCURY-7749",)  #: Strings that training must never contain: tests use them.


def _parts(text: str, separator: str | None = None) -> list[str]:
    return text.split(separator)


NOUNS = _parts(
    "river bridge garden mountain window harbor market teacher doctor farmer engine forest village letter "
    "kitchen table library station morning evening winter summer animal bird horse dog cat tree flower stone "
    "book house street city country water fire light music story child friend family road train boat ship "
    "island field door wall machine paper picture question answer name word number code color sun moon star "
    "sky sea wind rain snow apple bread coffee tea sugar salt school room chair clock map key box bag coat"
)
ADJECTIVES = _parts(
    "old new small large quiet loud bright dark red blue green white black yellow happy sad warm cold early "
    "late long short high low deep young strong heavy light simple strange famous empty full clean open slow"
)
VERBS = _parts(
    "runs walks sleeps waits stands falls grows turns moves stops starts works shines sings looks returns "
    "arrives opens closes changes rests plays stays begins ends"
)
PLACES = _parts("near behind under over beside above below across inside outside")
COMMON = _parts(
    "the of and a to in is you that it he was for on are as with his they I at be this have from or one "
    "had by but not what all were we when your can said there use an each which she do how their if will "
    "up other about out many then them these so some her would make like him into time has look two more "
    "write go see no way could people my than first been call who its now find down day did get come made "
    "may part over take only little work know place year live me back give most very after thing our just "
    "good man think say great where help through much before line right too mean any same tell boy follow "
    "came want show also around form three set put end does another well must big even such because turn "
    "here why ask went men read need land different home us move try kind hand again change off play "
    "spell air away point page please hello thanks model test text system user assistant helpful tiny "
    "repeat exactly count codes secret"
)
WORDS = sorted({*NOUNS, *ADJECTIVES, *VERBS, *PLACES, *COMMON})

GREETINGS = _parts(
    "Hello|Hello!|Hello there!|Hi|Hi!|Hi there|Hey|Hey!|Good morning|Good evening!|Who are you?|"
    "What are you?|What can you do?|What is your name?|How are you?|How are you today?|Help|Help me|"
    "Can you help me?|Thanks!|Thank you|Thank you very much!|Bye|Goodbye!|Tell me a joke.|Tell me a story|"
    "Tell me about yourself.|Write a poem.|Write a short story about a dog.|What is two plus two?|"
    "What is the capital of France?|What is the meaning of life?|Why is the sky blue?|What time is it?|"
    "How does a computer work?|Explain how a train works.|Do you like music?|What do you think?|Say hello|"
    "Say hello.|Say something.|Is this a test?|This is a test.|test|ping|ok|yes|no|Tell me more.|Go on.|"
    "Why?|What?|How?|Really?|Are you there?|Where are you from?|Who made you?|What is 2+2?|1+1=?|?|"
    "Hello world",
    "|",
)
REQUESTS = _parts(
    "What is a {n}?|What is the {a} {n}?|Where is the {n}?|Tell me about the {n}.|"
    "Write a poem about a {a} {n}.|"
    "Why is the {n} so {a}?|How do I find a {a} {n}?|Can you tell me about the {n} {p} the {m}?|"
    "Explain the {n} to a {m}.|What do you know about {n} and {m}?|Describe a {a} {n}|I like the {a} {n}.|"
    "Give me a list of {n} names.|Write a short story about a {n} and a {m}.|Do you have a {n}?|"
    "Please help me with my {n}.|How many {n}s are {p} the {m}?|Which {n} is {a}?|Who has the {a} {n}?|"
    "Count the {n}s.|Is the {n} {a}?|What color is the {n}?|Translate the word {n}.|"
    "What is the weather in {m}?",
    "|",
)
SYSTEMS = _parts(
    "You are a helpful assistant.|You are a helpful assistant|Be brief.|You are a test model.|"
    "Answer shortly.|"
    "You are a friendly bot.|Be polite and short.|Follow the instructions.|You are helpful, honest and kind.",
    "|",
)
HAYSTACK = _parts(
    "The grass is green.|The sky is blue.|The sun is yellow.|Here we go.|There and back again.|"
    "It was a quiet day.|Nothing else happened.|This sentence is only filler.|The quick brown fox jumps.",
    "|",
)
REPEAT_FORMS = ("Repeat: {}", "Repeat this exactly: {}", "Please repeat exactly: {}", "Say exactly: {}")
ONSETS = _parts("b bl br c ch cr d dr f fl g gr h j k kl l m n p pl qu r s sh st t th tr v w x z zh")
VOWELS = _parts("a e i o u ai ea io ou y")
CODAS = ("", "", "", "l", "n", "r", "s", "t", "x", "k", "m", "nd", "rk", "th")


@dataclass(frozen=True)
class Turn:
    """A user message and its one right answer."""

    user: str
    answer: str


@dataclass(frozen=True)
class Chat:
    """A whole conversation; an empty ``system`` means no system message."""

    turns: list[Turn]
    system: str = ""


@dataclass(frozen=True)
class Limits:
    """Size limits of a sampled chat: tokens in all, and characters of a string to repeat."""

    tokens: int
    chars: int
    #: Weight of each kind of chat (see :data:`CHATS`).
    weights: dict[str, float] = field(default_factory=dict)


def _pick(rng: Rng, alphabet: str, length: int) -> str:
    return "".join(rng.choices(alphabet, k=length))


def uniform_string(rng: Rng, length: int) -> str:
    """Uniformly random printable ASCII characters without the space."""
    return _pick(rng, PRINTABLE, length)


def invented_word(rng: Rng) -> str:
    """A pronounceable word that does not exist, in lower case."""
    parts = (rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.randint(1, 3)))
    return "".join(parts)


def any_word(rng: Rng) -> str:
    """A common or invented word in lower case, Title case or capitals."""
    word = rng.choice(WORDS) if rng.random() < 0.5 else invented_word(rng)
    style = rng.random()
    return word if style < 0.5 else word.capitalize() if style < 0.75 else word.upper()


def subset_string(rng: Rng, length: int) -> str:
    """Characters from a random class or a small random alphabet (many repeats)."""
    classes = (
        string.ascii_lowercase,
        string.ascii_uppercase,
        string.ascii_letters,
        string.digits,
        string.ascii_uppercase + string.digits,
        string.ascii_lowercase + string.punctuation,
        string.punctuation,
        string.hexdigits,
        "".join(rng.sample(PRINTABLE, rng.randint(2, 6))),
    )
    return _pick(rng, rng.choice(classes), length)


def periodic_string(rng: Rng, length: int) -> str:
    """A short random unit repeated, now and then with a random tail: ``aaaaaa``, ``ab-ab-ab-x``."""
    unit = uniform_string(rng, rng.choice((1, 1, 1, 2, 3, 4, 5, 8)))
    repeats = min(length, 24) // len(unit) + 1
    tail = uniform_string(rng, rng.randint(0, 4)) if rng.random() < 0.5 else ""
    return (unit * rng.randint(1, repeats) + tail)[:length]


def joined_string(rng: Rng, length: int) -> str:
    """Words and numbers joined by hyphens, dots and the like: ``RIVER-MOON-7749``."""
    glue = rng.choice("-----_./:+ ")
    caps = rng.random() < 0.5
    text = any_word(rng)
    while len(text) < length:
        part = _pick(rng, string.digits, rng.randint(1, 5)) if rng.random() < 0.3 else any_word(rng)
        text += glue + part
    return (text.upper() if caps else text)[:length].strip()


def sentence_string(rng: Rng, length: int) -> str:
    text = sentence(rng) if rng.random() < 0.7 else request(rng)
    while len(text) < length and rng.random() < 0.8:
        text += " " + sentence(rng)
    return text[:length].strip()


def unicode_string(rng: Rng, length: int) -> str:
    """ASCII text with some characters of two to four bytes."""
    alphabet = string.ascii_letters + string.digits + " -,."
    share = rng.choice((0.1, 0.3, 1.0))
    chars = (rng.choice(NON_ASCII) if rng.random() < share else rng.choice(alphabet) for _ in range(length))
    return " ".join("".join(chars).split()) or "é"


def structured_string(rng: Rng, length: int) -> str:
    """Text that looks like JSON, code, an address or two lines."""
    a, b, c = any_word(rng), any_word(rng), rng.randint(0, 9999)
    forms = (
        f'{{"{a}": "{b}", "{any_word(rng)}": {c}}}',
        f"{a}({b}, {c})",
        f"https://{a}.{b}/{c}?{invented_word(rng)}={c}",
        f"{a}@{b}.com",
        f"<{a}>{b}</{a}>",
        f"{a} = [{c}, {rng.randint(0, 99)}, {rng.randint(0, 99)}];",
        f"{a} {b}\n{c} {invented_word(rng)}",
        f"{rng.randint(1900, 2100)}-{rng.randint(1, 12):02}-{rng.randint(1, 31):02} {c}",
    )
    return rng.choice(forms)[:length].strip()


def spaced_string(rng: Rng, length: int) -> str:
    """Random characters with single inner spaces."""
    chars = (" " if rng.random() < 0.15 else rng.choice(PRINTABLE) for _ in range(length))
    return " ".join("".join(chars).split()) or "x"


STRING_KINDS: tuple[tuple[float, Callable[[Rng, int], str]], ...] = (
    (0.45, uniform_string),
    (0.14, subset_string),
    (0.08, periodic_string),
    (0.10, joined_string),
    (0.06, sentence_string),
    (0.05, unicode_string),
    (0.05, structured_string),
    (0.07, spaced_string),
)


def repeat_string(rng: Rng, max_chars: int) -> str:
    """A string to repeat: 1 to ``max_chars`` characters, of one of :data:`STRING_KINDS`."""
    weights, makers = zip(*STRING_KINDS, strict=True)
    maker = rng.choices(makers, weights)[0]
    length = rng.randint(1, min(max_chars, 40) if rng.random() < 0.65 else max_chars)
    text = maker(rng, length)
    return text if not any(held in text for held in HELD_OUT) else "x"


def repeat_turn(rng: Rng, max_chars: int) -> Turn:
    """``Repeat exactly: X`` (now and then in other words) with the answer X."""
    text = repeat_string(rng, max_chars)
    form = "Repeat exactly: {}" if rng.random() < 0.9 else rng.choice(REPEAT_FORMS)
    return Turn(form.replace("{}", text), text)


def count_turn(rng: Rng, longest: int = 60) -> Turn:
    """``Count from A to B.`` with A and B between 1 and 200."""
    length = rng.randint(1, longest)
    first = 1 if rng.random() < 0.3 else rng.randint(1, 201 - length)
    numbers = range(first, first + length)
    return Turn(f"Count from {first} to {numbers[-1]}.", " ".join(map(str, numbers)))


def sentence(rng: Rng) -> str:
    """A plain English sentence of known words, ending with a full stop."""
    if rng.random() < 0.1:
        return rng.choice(HAYSTACK)
    if rng.random() < 0.2:
        return " ".join(rng.choices(WORDS, k=rng.randint(3, 9))).capitalize() + "."
    subject = f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.choice(VERBS)}"
    return f"{subject} {rng.choice(PLACES)} the {rng.choice(NOUNS)}."


def request(rng: Rng) -> str:
    """A greeting, question or order that is no known task."""
    if rng.random() < 0.5:
        return rng.choice(GREETINGS)
    nouns = {"n": rng.choice(NOUNS), "m": rng.choice(NOUNS)}
    return rng.choice(REQUESTS).format(**nouns, a=rng.choice(ADJECTIVES), p=rng.choice(PLACES))


def chat_turn(rng: Rng) -> Turn:
    """Anything that is no known task; the answer is always :data:`CHAT_ANSWER`."""
    choice = rng.random()
    if choice < 0.8:
        user = request(rng)
    elif choice < 0.95:
        user = " ".join(sentence(rng) for _ in range(rng.randint(1, 3)))
    else:
        user = repeat_string(rng, 20)
    return Turn(user, CHAT_ANSWER)


def system_message(rng: Rng) -> str:
    """No system message (half of the time), a usual one, or some random sentences."""
    choice = rng.random()
    if choice < 0.5:
        return ""
    if choice < 0.75:
        return rng.choice(SYSTEMS)
    return " ".join(sentence(rng) for _ in range(rng.randint(1, 3)))


def code_name(rng: Rng) -> str:
    """Name of a code: an invented or known word, now and then two of them or with a number."""
    choice = rng.random()
    if choice < 0.5:
        return any_word(rng)
    if choice < 0.7:
        return invented_word(rng).capitalize()
    if choice < 0.85:
        return f"{any_word(rng)}{rng.choice(' -')}{any_word(rng)}"
    return f"{any_word(rng)}{rng.choice(('-', ' ', ''))}{rng.randint(1, 999)}"


def code_value(rng: Rng) -> str:
    """A random code of three to twelve or so characters."""
    upper = string.ascii_uppercase
    choice = rng.randrange(6)
    if choice == 0:
        return _pick(rng, string.digits, rng.randint(3, 8))
    if choice == 1:
        return f"{_pick(rng, upper, rng.randint(1, 4))}-{_pick(rng, string.digits, rng.randint(2, 5))}"
    if choice == 2:
        return _pick(rng, upper + string.digits, rng.randint(4, 10))
    if choice == 3:
        return _pick(rng, string.ascii_letters + string.digits, rng.randint(4, 10))
    if choice == 4:
        return f"{any_word(rng)}-{_pick(rng, string.digits, rng.randint(2, 4))}"
    return _pick(rng, string.ascii_lowercase + string.digits, rng.randint(4, 8))


def fact(name: str, code: str) -> str:
    """The sentence that hides a code."""
    return f"The code for {name} is {code}."


def question(name: str) -> str:
    """The question whose answer is the code."""
    return f"What is the code for {name}?"


def haystack(rng: Rng, tokens: int, count: Count) -> tuple[list[str], dict[str, str]]:
    """Shuffled facts and filler of about ``tokens`` tokens; at least one fact.

    Returns the sentences and the codes by name. Names differ from one another, without regard to case.
    """
    share = rng.choice((0.1, 0.3, 0.5, 0.8, 1.0))
    codes: dict[str, str] = {}
    seen: set[str] = set()
    lines: list[str] = []
    used = 0
    while used < tokens or not codes:
        line = sentence(rng)
        name = code_name(rng)
        if name.lower() not in seen and (not codes or rng.random() < share):
            seen.add(name.lower())
            codes[name] = code_value(rng)
            line = fact(name, codes[name])
        lines.append(line)
        used += count(line) + 1
    rng.shuffle(lines)
    return lines, codes


def needle_chat(rng: Rng, limits: Limits, count: Count) -> Chat:
    """Facts among filler, then questions: the first with the facts, the others in turns of their own."""
    lines, codes = haystack(rng, int(limits.tokens * rng.uniform(0.25, 0.85)) - 40, count)
    asked = rng.sample(sorted(codes), min(len(codes), rng.choice((1, 4, 12, 32))))
    turns = [Turn(question(name), codes[name]) for name in asked]
    facts = " ".join(lines)
    if rng.random() < 0.1:
        return Chat(turns, system=facts)
    turns[0] = Turn(f"{facts} {turns[0].user}", turns[0].answer)
    return Chat(turns, system_message(rng))


def single_needle_chat(rng: Rng, tokens: int, count: Count) -> Chat:
    """One question about a haystack, ``tokens`` tokens in all (to within one sentence)."""
    lines, codes = haystack(rng, tokens - 40, count)
    name = rng.choice(sorted(codes))
    return Chat([Turn(f"{' '.join(lines)} {question(name)}", codes[name])])


def repeat_chat(rng: Rng, limits: Limits, count: Count) -> Chat:
    """Only strings to repeat, as many turns as fit."""
    return Chat([repeat_turn(rng, limits.chars) for _ in range(limits.tokens // 8)], system_message(rng))


def count_chat(rng: Rng, limits: Limits, count: Count) -> Chat:
    """Only counting, as many turns as fit."""
    longest = min(60, limits.tokens // 6)
    turns = [count_turn(rng, rng.choice((longest, min(longest, 20)))) for _ in range(limits.tokens // 24)]
    return Chat(turns, system_message(rng))


def mixed_chat(rng: Rng, limits: Limits, count: Count) -> Chat:
    """Every short task in random order, as many turns as fit."""
    makers: tuple[Callable[[], Turn], ...] = (
        lambda: repeat_turn(rng, limits.chars),
        lambda: chat_turn(rng),
        lambda: count_turn(rng, min(60, limits.tokens // 6)),
        lambda: needle_chat(rng, Limits(120, 0), count).turns[0],
    )
    kinds = rng.choices(makers, (0.3, 0.25, 0.25, 0.2), k=limits.tokens // 16)
    return Chat([make() for make in kinds], system_message(rng))


CHATS: dict[str, Callable[[Rng, Limits, Count], Chat]] = {
    "repeat": repeat_chat,
    "needle": needle_chat,
    "mixed": mixed_chat,
    "count": count_chat,
}


def fit(chat: Chat, tokens: int, count: Count) -> Chat:
    """Drop the turns that do not fit into ``tokens`` tokens (four of each turn are special tokens)."""
    used = count(chat.system) + 3
    kept: list[Turn] = []
    for turn in chat.turns:
        used += count(turn.user) + count(turn.answer) + 4
        if used > tokens:
            break
        kept.append(turn)
    return Chat(kept, chat.system)


def sample_chats(rng: Rng, limits: Limits, count: Count) -> Iterator[Chat]:
    """Endless chats within ``limits``; a chat whose first turn is too long is drawn anew."""
    kinds, weights = list(limits.weights), list(limits.weights.values())
    while True:
        chat = fit(CHATS[rng.choices(kinds, weights)[0]](rng, limits, count), limits.tokens, count)
        if chat.turns:
            yield chat
