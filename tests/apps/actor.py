"""A scripted engine under the real HTTP side: agents run whole turns of 50,000 tokens on two cores.

HTTP, tokenizer, chat template, tool parsers and grammars are the real ones, with the embedded model's
tokenizer. In place of the model a script reads the prompt. The user dictates the turn's steps:

    DO call NAME {"argument": 1}     call this tool
    DO json {"answer": 9}            write this JSON
    DO say "some text"               write this text

Each step waits for the result of the call before it; calls of tools that are not offered are left out. After
the last call the actor repeats the result. A request with a grammar gets what the grammar allows and nothing
else. `python -m tests.apps.actor --help` serves it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from tokenizers import Tokenizer

from mlxtp.api.app import create_app
from mlxtp.api.backend import ModelInfo, StreamEnd, TokenEvent, Tokens
from mlxtp.api.server import bind, serve
from mlxtp.client import FILE as AGENT_FILE
from mlxtp.engine.grammar import Grammars, Matcher, unpack
from mlxtp.engine.logit_shaping import AnswerBudget
from mlxtp.text.conversation import Call, ChatMessage, Conversation, Tool
from mlxtp.text.tokenizer import Text
from mlxtp.wire.messages import Generate

from ..api.conftest import FakeAnswer, FakeBackend, score
from ..reference import TINY
from ..text.families import WRITERS

CONTEXT = 200_000  # tokens
LONGEST_RESULT = 2000  # characters of a tool's result that are repeated
PIECE = 8  # tokens of one event
KEY = "actor"  # of the commands in its home
TURN = re.compile(r"<\|(system|user|assistant)\|>(.*?)(?=<\|(?:system|user|assistant)\|>|\Z)", re.DOTALL)
STEP = re.compile(r"\bDO (?:call ([\w.-]+)|(json|say))\s+(?=[{\[\"])")
OFFERED = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
RESULT = re.compile(r"<tool_response>\n(.*?)\n?</tool_response>", re.DOTALL)


@dataclass(frozen=True)
class Step:
    """One dictated step. `tool`: the tool that a call names, else empty. `text` is JSON."""

    tool: str
    says: bool
    text: str

    @property
    def ways(self) -> list[str]:
        """The texts that express the step, best first."""
        if not self.tool:
            return [json.loads(self.text) if self.says else self.text]
        call = f'{{"name": {json.dumps(self.tool)}, "arguments": {self.text}}}'
        return [f"<tool_call>\n{call}\n</tool_call>", call]


def steps(text: str) -> list[Step]:
    """The steps that a user's words dictate."""
    found = []
    for match in STEP.finditer(text):
        with contextlib.suppress(ValueError):
            _, end = json.JSONDecoder().raw_decode(text, match.end())
            found.append(Step(match[1] or "", match[2] == "say", text[match.end() : end]))
    return found


def wishes(prompt: str) -> list[str]:
    """Ways to say the next answer, best first."""
    turns = [(role, text.replace("<|end|>", "")) for role, text in TURN.findall(prompt)]
    tools = [line for _, text in turns if (found := OFFERED.search(text)) for line in found[1].splitlines()]
    offered = {json.loads(line)["function"]["name"] for line in tools}
    plan: list[Step] = []
    results: list[str] = []
    for role, text in turns:
        if role == "user" and text.startswith("<tool_response>"):
            results += RESULT.findall(text)
        elif role == "user" and (new := steps(text)):
            plan, results = new, []
        elif role == "assistant" and text and "<tool_call>" not in text:
            plan, results = [], []
    calls = [step for step in plan if step.tool in offered]
    last = [step for step in plan if not step.tool]
    if len(results) < len(calls):
        return calls[len(results)].ways
    if last:
        return last[-1].ways
    if results:
        return [f"The tool returned: {results[-1].strip()[:LONGEST_RESULT]}"]
    if plan and offered:
        return [f"There is no tool {plan[0].tool} among {sorted(offered)}."]
    return [f"The actor has read {len(prompt)} characters."]


_SPECIAL = re.compile(
    r"<[a-z]+_of_[a-z]+>|<[|｜][^<>]*[|｜]>|<[|][a-z_]+>|<[a-z_]+[|]>|\[/?[A-Z_]{3,}\]|</?think>|\]<\]minimax\[>\[|\[e~\[|\]~!?b[\][]"
)


def with_template(template: Path, folder: Path) -> Path:
    """Make a folder of the embedded model with another chat template, whose markers are tokens."""
    shutil.copytree(TINY, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    text = template.read_text()
    (folder / "chat_template.jinja").write_text(text)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(sorted({*_SPECIAL.findall(text)}))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": tokenizer.get_vocab_size()}))
    return folder


def end_tokens(text: Text) -> tuple[int, ...]:
    """The special tokens that the template writes behind an answer's words and behind its calls."""
    asked, call = ChatMessage("user", "zqa"), Call("call_0", "zqtool", '{"zqkey": "zqb"}')
    said = (ChatMessage("assistant", "zqb"), ChatMessage("user", "zqc"))
    called = (ChatMessage("assistant", "", calls=(call,)), ChatMessage("tool", "zqc", call_id="call_0"))
    found = []
    for turns, closes in ((said, ""), (called, text.tool_calls.end_mark)):
        prompt = text.rendered(Conversation((asked, *turns), (Tool("zqtool", "", {}),)))
        behind = prompt[prompt.rindex("zqb") :].removeprefix("zqb").partition(closes or "zqb")
        places = {(behind[2] or behind[0]).find(each): id_ for id_, each in text.specials.items()}
        first = min([at for at in places if at >= 0], default=None)
        found += text.eos if first is None else [places[first]]
    return tuple(dict.fromkeys(found))


def reply(prompt: str, text: Text, thinks: bool) -> str:
    """The next answer as a model of this template writes it. A call was made where its words come again."""
    places = [match for match in STEP.finditer(prompt) if steps(prompt[match.start() :])]
    plan: list[tuple[Step, int]] = []  # with the place behind each step; those of one message stand together
    for match in reversed(places):
        step = steps(prompt[match.start() :])[0]
        end = match.end() + len(step.text)
        if not plan or plan[0][1] - end < len(plan[0][0].text) + 99:
            plan.insert(0, (step, end))
    said, at = "The actor has read it.", plan[-1][1] if plan else 0
    for step, _ in plan:
        if step.says:
            said = json.loads(step.text)
        elif step.tool and re.search(rf"(?<!DO call )\b{re.escape(step.tool)}\b", prompt):
            values = [each for each in json.loads(step.text).values() if isinstance(each, str)]
            at = prompt.find(values[0].partition("\n")[0], at)
            if at < 0:
                said = WRITERS[text.tool_calls.name]([(step.tool, json.loads(step.text))])
                break
            said = f"The tool returned: {_SPECIAL.sub(' ', prompt[at:])[:LONGEST_RESULT].strip()}"
    else:
        said = f"{text.answer_prefix}{said}"
    closes = text.markup.think[1] if thinks and text.markup.think else ""
    return f"{closes}{said}"


@dataclass
class Seen:
    """One request in the ledger. An earlier prompt and its answer begin with `shared` tokens of `prompt`."""

    prompt: tuple[int, ...]
    shared: int
    max_tokens: int
    grammar: str
    answer: tuple[int, ...] = ()
    reason: str = "cancel"


@dataclass
class Actor(FakeBackend):
    """The backend. `first_token_s` is the length of the prefill.

    `rambles`: where it is held to a schema it closes nothing that may go on, as small models do.
    """

    context: int = CONTEXT
    folder: Path = TINY
    first_token_s: float = 0.0
    rambles: bool = False
    log: Path | None = None
    wishes: ClassVar[Callable[[str], list[str]]] = staticmethod(wishes)
    ledger: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.vocabulary = json.loads((self.folder / "config.json").read_text())["vocab_size"]
        self.eos = (5, 1) if self.folder == TINY else end_tokens(self.loaded_text)
        self.grammars = Grammars(self.folder, self.vocabulary, frozenset(self.eos))

    def models(self) -> tuple[ModelInfo, ...]:
        return tuple(replace(model, id="actor", path=self.folder, eos=self.eos) for model in super().models())

    def generate(self, request: Generate, **whose: Any) -> FakeAnswer:
        self.requests.append(request)
        shaping = request.shaping
        kept = [(*seen.prompt, *seen.answer) for seen in self.ledger]
        shared = max((common(request.tokens, each) for each in kept), default=0)
        grammar = f"{shaping.grammar_kind}: {shaping.grammar}" if shaping.grammar_kind else ""
        self.ledger.append(Seen(request.tokens, shared, request.max_tokens, grammar))
        self.answers.append(Played(self, request, self.ledger[-1]))
        return self.answers[-1]

    def ids(self, text: str) -> tuple[int, ...]:
        return self.loaded_text.encoded(text, special=True)

    def written(self, request: Generate, matcher: Matcher | None, room: AnswerBudget | None) -> Iterator[int]:
        """The answer's tokens, without an end."""
        text = self.loaded_text
        prompt = text.decoded(request.tokens)
        if self.folder == TINY:
            ways = [self.ids(way) for way in self.wishes(prompt)]
        else:
            ways = [self.ids(reply(prompt, text, text.thinks_on(request.tokens)))]
        if matcher is None or room is None:
            yield from ways[0]
            return
        wish = max(ways, key=lambda ids: followed(matcher.copy(), ids, self.vocabulary))
        described = '"properties"' in request.shaping.grammar
        one_beginning = unpack(matcher.mask(), self.vocabulary).sum() == 1  # else it may call or answer
        rambles = self.rambles and described and bool(one_beginning)
        yield from self.guided(matcher, room, wish, rambles, request.max_tokens)

    def guided(
        self, matcher: Matcher, room: AnswerBudget, wish: Sequence[int], rambles: bool, most: int
    ) -> Iterator[int]:
        """The wish as far as the grammar goes along with it, then the shortest way to an end."""
        random = Random(most)
        [quote], [letter] = self.ids('"'), self.ids("~")
        [comma], closing = self.ids(","), {*self.ids("}"), *self.ids("]")}
        usual = [token for c in '}]"0e' for token in self.ids(c)]
        strays = False
        for at in range(most):
            allowed = unpack(room.fitting(matcher, most - at), self.vocabulary)
            token = wish[at] if at < len(wish) and not strays else -1
            if token < 0 or not allowed[token]:
                in_string = allowed[quote] and allowed[letter]
                ends = [quote] if in_string else [*self.eos, *usual]
                strays, token = True, next((t for t in ends if allowed[t]), -1)
            going_on = [int(t) for t in np.flatnonzero(allowed) if t not in closing and t not in self.eos]
            if token < 0 or (rambles and going_on and (strays or token in closing)):
                first = not strays and token in closing and allowed[comma]
                strays, token = True, comma if first else random.choice(going_on)
            if token in self.eos:
                return
            yield token
            matcher.accept(token)
            if matcher.finished:
                return

    def close(self) -> None:
        self.grammars.close()


class Played(FakeAnswer):
    """The answer to one request. It holds itself to the request's grammar."""

    def __init__(self, actor: Actor, request: Generate, seen: Seen) -> None:
        super().__init__(actor, self._script)
        self._actor, self._request, self._seen = actor, request, seen
        self._matcher: Matcher | None = None

    async def accepted(self) -> None:
        shaping = self._request.shaping
        if shaping.grammar_kind:
            compile_ = self._actor.grammars.compile
            grammar = await asyncio.to_thread(compile_, shaping.grammar_kind, shaping.grammar)
            self._matcher = grammar.matcher()

    async def _script(self) -> AsyncIterator[TokenEvent]:
        await asyncio.sleep(self._actor.first_token_s)
        request, seen, waiting = self._request, self._seen, list[int]()
        seen.reason = "stop"
        room = None if self._matcher is None else AnswerBudget(self._matcher, request.max_tokens)
        for token in self._actor.written(request, self._matcher, room):
            if len(seen.answer) == request.max_tokens:
                seen.reason = "length"
                break
            seen.answer += (token,)
            waiting.append(token)
            if len(waiting) == PIECE:
                yield self._tokens(waiting)
                waiting = []
                await asyncio.sleep(0)
        if waiting:
            yield self._tokens(waiting)
        if room is not None and room.cut:
            seen.reason = "length"
        # An end token is counted and not passed on; a grammar ends without one.
        ended = seen.reason == "stop" and self._matcher is None
        generated = len(seen.answer) + ended
        yield StreamEnd(seen.reason, generated, min(seen.shared, len(seen.prompt) - 1))  # type: ignore[arg-type]
        if self._actor.log is not None:
            with self._actor.log.open("a") as file:
                numbers = {"prompt": len(seen.prompt), "answer": self._actor.loaded_text.decoded(seen.answer)}
                file.write(json.dumps(asdict(seen) | numbers) + "\n")

    def _tokens(self, tokens: Sequence[int]) -> Tokens:
        top = self._request.logprobs
        return Tokens(tuple(tokens), tuple(score(i, top) for i in range(len(tokens))) if top >= 0 else ())


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of leading tokens that two sequences share."""
    same, most = 0, min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same


def followed(matcher: Matcher, ids: Sequence[int], vocabulary: int) -> int:
    """The number of leading tokens that the matcher takes. The matcher is used up."""
    for at, token in enumerate(ids):
        if matcher.finished or not unpack(matcher.mask(), vocabulary)[token]:
            return at
        matcher.accept(token)
    return len(ids)


class Recorded:
    """The app, which leaves every request with a body as one JSON file in a folder."""

    def __init__(self, app: Any, folder: Path | None) -> None:
        self._app, self._folder = app, folder

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, written = bytearray(), False

        async def received() -> Any:
            nonlocal written
            message = await receive()
            body.extend(message.get("body", b""))
            if self._folder and body and not written and not message.get("more_body"):
                written = True
                name = f"{len(list(self._folder.iterdir())):04}.json"
                with contextlib.suppress(ValueError):
                    text = json.dumps({"path": scope["path"], "body": json.loads(body)}, indent=1)
                    (self._folder / name).write_text(text)
            return message

        await self._app(scope, received, send)


@dataclass
class Stage:
    """A running actor and its address."""

    actor: Actor
    port: int

    def write_home(self, home: Path) -> None:
        """Make `home` one in which commands such as `mlxtp launch` find the actor."""
        (home / AGENT_FILE).write_text(json.dumps({"url": self.url, "key": KEY, "certificate": ""}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ledger(self) -> list[Seen]:
        return self.actor.ledger


@contextlib.contextmanager
def stage(
    port: int = 0,
    record: Path | None = None,
    keep_alive_s: float = 3.0,
    make: type[Actor] = Actor,
    **options: Any,
) -> Iterator[Stage]:
    """A served actor on loopback, in a thread of its own. `options` are the fields of `Actor`."""
    actor = make(Text.load(options.get("folder", TINY)), **options)
    sock = bind("127.0.0.1", port)
    admin: Any = SimpleNamespace(
        key=KEY, status=lambda: {"model": "actor", "state": "ready", "reason": None, "deployments": []}
    )
    app = Recorded(create_app(actor, admin=admin, keep_alive_s=keep_alive_s), record)
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(app, sock, stop, grace_s=1)))
    found = Stage(actor, sock.getsockname()[1])
    thread.start()
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
        actor.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.apps.actor", description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=52499)
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens")
    parser.add_argument("--first-token-s", type=float, default=0.0, help="seconds before the first token")
    parser.add_argument("--keep-alive-s", type=float, default=3.0, help="longest silence of a stream")
    parser.add_argument("--rambles", action="store_true", help="close no JSON object that may go on")
    parser.add_argument("--log", type=Path, help="file that gets one JSON line for each request")
    parser.add_argument("--home", type=Path, help="folder in which `mlxtp launch` is to find the actor")
    parser.add_argument("--record", type=Path, help="folder that gets the requests themselves")
    arguments = vars(parser.parse_args())
    for folder in (home := arguments.pop("home"), arguments["record"]):
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.set())
    with stage(**arguments) as found:
        if home:
            found.write_home(home)
        print(f"the actor listens on {found.url}", flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
