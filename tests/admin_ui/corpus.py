"""What people and models might write that Markdown, Streamlit, a browser, a spreadsheet or an eye would take for more."""

from __future__ import annotations

from typing import Final

# Each is at most 80 characters, so that it may be the name of anything.
NAMES: Final = (
    "plain words, with a comma",
    "**bold** *italic* _under_ __both__ ~~gone~~",
    "`code` ``more`` and a lone ` tick",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<a href=javascript:alert(1)>x</a>",
    '"><script>alert(1)</script>',
    "' onmouseover='alert(1)",
    "<b>bold</b> &lt;b&gt; &amp; &#42;",
    "<details open ontoggle=alert(1)>",
    "<math><mtext></p><style><img src=x onerror=alert(1)>",
    "<style>*{display:none}</style>",
    "<!-- <script>alert(1)</script> -->",
    "[link](https://example.com) ![image](https://example.com/x.png)",
    "[x](javascript:alert(1)) [y](data:text/html;base64,PHNjcmlwdD4=)",
    "[ref]: https://example.com 'x'",
    "https://example.com and www.example.com and someone@example.com",
    "$x^2$ and $$y$$ and \\(z\\)",
    "$\\href{javascript:alert(1)}{x}$",
    ":smile: :material/key: :streamlit:",
    ":red[red] :blue-background[blue] :badge[x] :small[s]",
    "-> <- <-> -- >= <= ~= ---",
    "# not a heading",
    "1. not a list",
    "- [ ] not a task",
    "| not | a | table |",
    "> not a quote",
    "```js alert(1)```",
    "^sup^ ~sub~ ==mark== [^1]",
    r"back\slash \* and \\ two",
    "{{7*7}} ${7*7} <%= 7*7 %> #{7*7}",
    "%3Cscript%3Ealert(1)%3C/script%3E",
    "\\u003cscript\\u003e",
    "'; drop table tenants; --",
    "../../etc/passwd",
    "=cmd|' /C calc'!A0",
    "+1+1 @SUM(1) -2+3",
    '=HYPERLINK("https://example.com","x")',
    # Scripts, directions, and what has more bytes than it has letters.
    "ünïcödé 🙂 \u202eright to left",
    "مرحبا بالعالم 123",
    "שלום abc עולם",
    "user\u202egpj.exe",
    "\u2066isolated\u2069 \u200fmark\u200e",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 e\u0301",
    "Z̸̢͇̈́a̷l̵g̶o̴",
    "zero\u200bwidth\u2060joiner\ufeff",
    "漢字かな交じり文",
    "null undefined None NaN true",
)
# Names cannot be so long; messages, payloads and models' answers can.
LONG: Final = ("x" * 10_000, "🙂" * 2_500, "word " * 2_000, "<b>" * 3_334, "\u202e" + "y" * 9_999)
CORPUS: Final = NAMES + LONG
