"""Markdown, code and mathematics as elements, in a real browser under the page's own security policy."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Site, Visit

LAST = "#turns > li:last-child"
HOSTILE = """<script>window.owned = 1</script>
<img src=x onerror="window.owned = 2">

[a link](javascript:window.owned=3) and [data](data:text/html,<script>1</script>) and
[with tabs](java\tscript:window.owned=4) ![picture](https://example.com/track.png)

<https://example.com/"onmouseover="window.owned=5>

| <b>cell</b> | [x](vbscript:x) |
|---|---|
| `</code><script>window.owned = 6</script>` | <svg onload=window.owned=7> |

```html
<script>window.owned = 8</script>
```
"""


def rendered(visit: Visit, text: str) -> str:
    """The HTML that the renderer makes of it, as elements say it."""
    html: str = visit.page.evaluate(
        """async text => {
            const { render } = await import('/page/markdown.js');
            const box = document.createElement('div');
            render(box, text);
            for (const figure of box.querySelectorAll('figcaption')) figure.remove();
            const left = ['tabindex', 'aria-label', 'role', 'rel', 'target'];
            for (const each of box.querySelectorAll('*')) left.forEach(name => each.removeAttribute(name));
            return new XMLSerializer().serializeToString(box).replaceAll(/ xmlns="[^"]*"/g, '');
        }""",
        text,
    )
    return html.removeprefix("<div>").removesuffix("</div>")


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "<p>plain</p>"),
        ("one\n\ntwo", "<p>one</p><p>two</p>"),
        ("*a* **b** ***c***", "<p><em>a</em> <strong>b</strong> <em><strong>c</strong></em></p>"),
        ("_d_ __e__ ~~f~~", "<p><em>d</em> <strong>e</strong> <s>f</s></p>"),
        ("snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"),
        ("**bold with *both* in it**", "<p><strong>bold with <em>both</em> in it</strong></p>"),
        ("**not closed and *neither this", "<p>**not closed and *neither this</p>"),
        ("`a * b` and ``c ` d``", "<p><code>a * b</code> and <code>c ` d</code></p>"),
        (r"\*no\* \`code\`", "<p>*no* `code`</p>"),
        ("# One\n### Three", "<h3>One</h3><h5>Three</h5>"),
        ("a\n***\nb", "<p>a</p><hr /><p>b</p>"),
        ("> quoted\n> **more**", "<blockquote><p>quoted\n<strong>more</strong></p></blockquote>"),
        ("- a\n- b\n  - c\n  - d\n- e",
         "<ul><li>a</li><li>b<ul><li>c</li><li>d</li></ul></li><li>e</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("1. a\n\n   more\n2. b", "<ol><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>"),
        ("- [ ] a\n- [x] b", '<ul><li class="task">☐ a</li><li class="task">☑ b</li></ul>'),
        ("```words\nx = '<b>'\n\ny\n```\nafter",
         '<figure class="code"><pre><code>x = \'&lt;b&gt;\'\n\ny</code></pre></figure><p>after</p>'),
        ("```\nnot closed", '<figure class="code"><pre><code>not closed</code></pre></figure>'),
        ("| a | b |\n|:-:|--:|\n| 1 | `x\\|y` |",
         '<div class="table"><table><thead><tr><th class="center">a</th><th class="right">b</th></tr></thead>'
         '<tbody><tr><td class="center">1</td><td class="right"><code>x|y</code></td></tr></tbody>'
         '</table></div>'),
        ("[t](https://a.example/b_c_d?e=*f*)", '<p><a href="https://a.example/b_c_d?e=*f*">t</a></p>'),
        ("see https://a.example/x_y.", '<p>see <a href="https://a.example/x_y">https://a.example/x_y</a>.</p>'),
        ("<b>x</b> &amp;", "<p>&lt;b&gt;x&lt;/b&gt; &amp;</p>"),
        ("[t](javascript:alert(1))", "<p>[t](javascript:alert(1))</p>"),
        ("[t](/admin)", "<p>[t](/admin)</p>"),
        ("![a cat](https://a.example/c.png)", '<p><a href="https://a.example/c.png">image: a cat</a></p>'),
        ("![a cat](data:image/png;base64,AA)", "<p>![a cat](data:image/png;base64,AA)</p>"),
        ("[m](mailto:a@b.example) www.a.example", '<p><a href="mailto:a@b.example">m</a> www.a.example</p>'),
        ("see [a]\n\n[a]: https://a.example/", '<p>see <a href="https://a.example/">a</a></p>'),
        ("two  \nlines", "<p>two<br />lines</p>"),
    ],
)  # fmt: skip
def test_markdown(reading: Visit, text: str, html: str) -> None:
    assert rendered(reading, text) == html


def test_hostile_words_stay_words(site: Site, visit: Visit) -> None:
    site.says(HOSTILE, step=7)
    visit.send("Attack")
    visit.answered()
    said = visit.page.locator(f"{LAST} > .said")
    assert visit.page.evaluate("window.owned") is None
    assert said.locator("script, img, svg:not(.icon), iframe, object, style, b").count() == 0
    links = said.locator("a")
    addresses = [links.nth(i).get_attribute("href") or "" for i in range(links.count())]
    assert addresses
    assert all(address.startswith("https://example.com/") for address in addresses)
    assert {links.nth(i).get_attribute("rel") for i in range(links.count())} == {"noopener noreferrer"}
    handlers = said.evaluate(
        """box => [...box.querySelectorAll('*')].flatMap(each => each.getAttributeNames())
            .filter(name => name.startsWith('on'))"""
    )
    assert handlers == []
    assert "<script>window.owned = 1</script>" in said.inner_text()


def test_the_browser_itself_would_refuse_what_slipped_through(visit: Visit) -> None:
    """Trusted types: even our own script cannot make HTML of text."""
    refused = visit.page.evaluate(
        "() => { try { document.body.innerHTML = '<p>x</p>'; return false; } catch { return true; } }"
    )
    assert refused
    visit.trouble.clear()  # the browser says that it refused


@pytest.mark.parametrize(
    "text",
    ["*" * 20_000, "[" * 20_000, "`" * 9_999 + "a", "_a " * 9_000, "> " * 3_000, "- " * 3_000,
     "**a *b " * 5_000, "|" * 5_000 + "\n" + "|-" * 5_000, "![](" * 6_000, "<http://" * 4_000],
    ids=lambda text: text[:6].strip() or "x",
)  # fmt: skip
def test_no_text_takes_long(reading: Visit, text: str) -> None:
    took = reading.page.evaluate(
        """async text => {
            const { render } = await import('/page/markdown.js');
            const began = performance.now();
            render(document.createElement('div'), text);
            return performance.now() - began;
        }""",
        text,
    )
    assert took < 2000


HUGE = {
    "a megabyte in one line": "word " * 200_000,
    "one line of marks": "**a* [b](c $d `e" * 12_000,
    "quotes within each other": "> " * 95_000 + "x",
    "lists within each other": "".join(f"{'  ' * depth}- a\n" for depth in range(400)),
    "rows of a table": "| a | b |\n|---|---|\n" + "| $1 | *2* |\n" * 15_000,
    "lines of code": "```py\n" + "print('x')\n" * 18_000,
    "formulas": ("$x_1$ " * 4000 + "\n\n") * 8,
    "blocks of code": "```py\nx = 1\n```\n" * 11_000,
    "blocks of code in a list": "- ```py\n  x = 1\n  ```\n" * 9_000,
    "beginnings of formulas": "\\( " * 10_000 + "\n\n" + "$x" * 10_000 + "\n\n" + "\\[\n" * 10_000,
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_no_size_hangs_the_page(reading: Visit, text: str) -> None:
    took, said = reading.page.evaluate(
        """async text => {
            const { render } = await import('/page/markdown.js');
            const box = document.createElement('div');
            render(document.createElement('div'), '$x$\\n```py\\nx\\n```');
            await new Promise(go => setTimeout(go, 300)); // the libraries are here
            const began = performance.now();
            for (const part of [text.slice(0, -100), text]) render(box, part, part === text);
            return [performance.now() - began, box.textContent.length];
        }""",
        text,
    )
    assert took < 2000
    assert said > 1000


ANSWER = """\
A first paragraph with **marks** and `code`.

## A heading
Intro to a list:
- one
- two
  1. inner

     more of it

after the list | with a bar

| a | b |
|---|--:|
| 1 | *2* |

```py
def f(x):
    return '$x$'
```
> quoted $a_1$

\\[
x = 1
- 2
\\]

1. a

2. b

***

[late]: https://late.example/
The [late] one.
"""


@pytest.mark.parametrize("text", [ANSWER, ANSWER.partition("[late]")[0]], ids=["", "no definitions"])
def test_a_growing_answer_ends_as_if_it_had_come_at_once_and_keeps_what_is_finished(
    reading: Visit, text: str
) -> None:
    grown, whole, kept, shown = reading.page.evaluate(
        """async text => {
            const { render } = await import('/page/markdown.js');
            const [box, once] = [document.createElement('div'), document.createElement('div')];
            const text_ = each => new XMLSerializer().serializeToString(each);
            const firsts = new Set();
            const shown = new Set();
            for (let end = 1; end <= text.length; end += 1) {
                render(box, text.slice(0, end), false);
                if (end > 60) firsts.add(box.firstElementChild);
                const said = each => `${each.tagName} ${each.textContent.slice(0, 14)}`;
                for (const each of box.children) shown.add(said(each));
            }
            render(box, text, true);
            render(once, text, true);
            return [text_(box), text_(once), firsts.size, [...shown]];
        }""",
        text,
    )
    assert grown == whole
    assert kept == 1, "the first paragraph was built again"
    assert [each for each in shown if each.startswith(("H4 Intro", "P | a", "P -", "P `", "P *"))] == []


ATOMS = [
    *("a", "word ", "**", "*", "_", "`", "```", "```js\n", "\n", "\n\n", "- ", "1. ", "2) ", "> ", "+ "),
    *("| a | b |\n", "|--|--|\n", "|", "# ", "---", "===", "\n---\n", "    ", "  ", "\t", "\r\n", "[ ] "),
    *("$", "$$", "\n$$\n", "x^2", "\\(", "\\)", "\\[", "\\]", "\n\\[\n", "\n\\]\n", "5 ", "<b>"),
    *("[a]", "(https://a.example)", "[a]: https://b.example\n", "![", "](", "https://c.example/ "),
]


@pytest.mark.chaos
def test_any_growing_text_ends_as_if_it_had_come_at_once(reading: Visit) -> None:
    wrong = reading.page.evaluate(
        """async atoms => {
            const { render } = await import('/page/markdown.js');
            const html = each => new XMLSerializer().serializeToString(each);
            let seed = 1;
            const any = below => (seed = (seed * 1103515245 + 12345) & 0x7fffffff) % below;
            const wrong = [];
            const some = () => Array.from({ length: 3 + any(28) }, () => atoms[any(atoms.length)]).join('');
            for (let number = 0; number < 1000; number += 1) {
                const text = some();
                const [grown, once] = [document.createElement('div'), document.createElement('div')];
                for (let end = 0; end <= text.length; end += 1 + any(4)) {
                    render(grown, text.slice(0, end), false);
                }
                render(grown, text, true);
                render(once, text, true);
                if (html(grown) !== html(once)) wrong.push(text);
            }
            return wrong;
        }""",
        ATOMS,
    )
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        ("$x^2$ and $n$th, $2x$ or $10$", ["x^2", "n", "2x", "10"]),
        ("it costs $5 and $6, or $7.50 a month", []),
        ("between $5 or 10$ and US$3 to A$4", []),
        ("$HOME/$USER and $PATH", []),
        ("$3 + 4 = 7$ for $20", ["3 + 4 = 7"]),
        (r"\$x\$ and `$y$`", []),
        (r"\(a\) then \[b\] and $$c$$", ["a", "b", "c"]),
        ("$$\na\n+ b\n$$\n\n- $$c$$\n\n$$d", ["a\n+ b", "c"]),
        ("Then:\n\\[\nx\n\\]\nas said", ["x"]),
        ("$ a $ or $$ $$", []),
    ],
)
def test_formulas_are_told_from_prices(reading: Visit, text: str, formulas: list[str]) -> None:
    found = reading.page.evaluate(
        """async text => {
            const { default: markdownIt } = await import('/page/vendor/markdown-it/markdown-it.esm.min.mjs');
            const { addFormulas } = await import('/page/maths.js');
            const parser = markdownIt();
            addFormulas(parser);
            const all = tokens => tokens.flatMap(each => [each, ...all(each.children ?? [])]);
            const found = all(parser.parse(text, {})).filter(each => each.type === 'formula');
            return found.map(each => each.content);
        }""",
        text,
    )
    assert found == formulas


def test_colours_and_mathematics_come_when_an_answer_needs_them(site: Site, visit: Visit) -> None:
    """The browser would complain about what its policy forbids, which fails each test."""
    site.says("Nothing special.")
    visit.send("Go")
    visit.answered()
    assert not [url for url in visit.requested if "/highlight/" in url or "/temml/" in url]
    formulas = (
        r"$\sqrt{x}$ \[\begin{align}a&=b\label{say}\tag{1}\end{align}\] $\href{javascript:alert(1)}{x}$"
        r" $\includegraphics{https://a.example/x.png}$ $\mathscr{L} \cancel{x} \boxed{y} \color{red} z$"
        r" $\frac{$"
    )
    site.says(f"```python\ndef f(): return 'a'  # <b>\n```\n\n{formulas}\n\n```nonsense\nx\n```")
    visit.send("Both")
    visit.answered()
    said = visit.page.locator(f"{LAST} > .said")
    visit.page.wait_for_selector(f"{LAST} .hljs-keyword")
    visit.page.wait_for_selector(f"{LAST} math msqrt")
    assert said.locator(".hljs-keyword").all_inner_texts() == ["def", "return"]
    assert said.locator("figure code").all_inner_texts() == ["def f(): return 'a'  # <b>", "x"]
    assert said.locator("[id], math [href], img, .temml-error").count() == 0
    assert r"$\frac{$" in said.inner_text(), "what is no formula stays as it is written"
    assert visit.page.evaluate("document.getElementById('say').tagName") == "TEXTAREA"
    grammars = {url.rsplit("/", 1)[1] for url in visit.requested if "/highlight/" in url}
    assert grammars == {"core.min.js", "python.min.js"}


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("language", "code", "kind"),
    [
        ("ts", "const a: number = 1", "keyword"), ("jsx", "const a = <b/>", "keyword"),
        ("sh", "echo $HOME", "built_in"),
        ("json", '{"a": 1}', "attr"), ("c++", "int main() {}", "type"), ("c", "int main() {}", "type"),
        ("rs", "fn main() {}", "keyword"), ("go", "func main() {}", "keyword"),
        ("swift", "let a = 1", "keyword"), ("java", "class A {}", "keyword"), ("SQL", "select 1", "keyword"),
        ("html", "<style>a{color:red}</style>", "attribute"),
        ("css", "a { color: red }", "attribute"), ("yml", "a: 1", "attr"), ("diff", "+ a", "addition"),
        ("md", "# a", "section"),
    ],
)  # fmt: skip
def test_each_language_has_its_colours(reading: Visit, language: str, code: str, kind: str) -> None:
    reading.page.evaluate(
        """async ([language, code]) => {
            const { codeBlock } = await import('/page/code.js');
            document.body.append(codeBlock(`${code}\n`, language));
        }""",
        [language, code],
    )
    reading.page.wait_for_selector(f"body > .code:last-child .hljs-{kind}")
    assert reading.page.inner_text("body > .code:last-child code") == code


def test_code_can_be_copied(site: Site, visiting: Any) -> None:
    visit: Visit = visiting(permissions=["clipboard-read", "clipboard-write"])
    site.says("```py\nprint('<b>')\n```")
    visit.send("Code")
    visit.answered()
    visit.page.click(f"{LAST} figure button")
    visit.page.wait_for_selector(f"{LAST} figure button:has-text('Copied')")
    assert visit.page.evaluate("navigator.clipboard.readText()") == "print('<b>')"
