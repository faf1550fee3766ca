"""What people and models might write that Markdown, Streamlit or a browser would take for more."""

CORPUS = (
    "plain words, with a comma",
    "**bold** *italic* _under_ __both__ ~~gone~~",
    "`code` ``more`` and a lone ` tick",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<b>bold</b> &lt;b&gt; &amp; &#42;",
    "[link](https://example.com) ![image](https://example.com/x.png)",
    "https://example.com and www.example.com and someone@example.com",
    "$x^2$ and $$y$$",
    ":smile: :material/key: :streamlit:",
    ":red[red] :blue-background[blue] :badge[x]",
    "-> <- <-> -- >= <= ~= ---",
    "# not a heading",
    "1. not a list",
    "| not | a | table |",
    "> not a quote",
    r"back\slash \* and \\ two",
    "ünïcödé 🙂 \u202eright to left",
)
