"""The one style sheet of the control API's own pages: system fonts, light and dark."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #ffffff; --text: #1b1f24; --quiet: #5c6670;
  --line: #d5dae0; --accent: #2f5fd0; --on-accent: #ffffff; --error-bg: #fdecec; --error: #9c1c1c;
  --note-bg: #e9f2ec; --note: #1d5a34; --code: #eef1f4; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --card: #1d2126; --text: #e7eaee;
  --quiet: #9aa5b1; --line: #363d46; --accent: #7ea2f5; --on-accent: #10151f; --error-bg: #3b1d1f;
  --error: #ffb3b3; --note-bg: #1c3326; --note: #a9dcbc; --code: #262b32; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
body.centred { min-height: 100vh; display: grid; place-items: center; padding: 1rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 2rem; width: 100%; max-width: 24rem; }
h1 { margin: 0; font-size: 1.5rem; letter-spacing: -0.01em; }
.quiet { color: var(--quiet); margin: 0.25rem 0 1.5rem; }
label { display: block; font-size: 0.875rem; margin: 1rem 0 0.25rem; }
input { width: 100%; font: inherit; color: inherit; background: var(--bg);
  border: 1px solid var(--line); border-radius: 8px; padding: 0.6rem 0.75rem; }
input:focus-visible, button:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
button { width: 100%; margin-top: 1.5rem; font: inherit; font-weight: 600; border: 0; cursor: pointer;
  border-radius: 8px; padding: 0.65rem; background: var(--accent); color: var(--on-accent); }
.error, .note { border-radius: 8px; padding: 0.6rem 0.75rem; margin: 0; font-size: 0.9375rem; }
.error { background: var(--error-bg); color: var(--error); }
.note { background: var(--note-bg); color: var(--note); }
.page { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
.page h2 { margin: 2.5rem 0 0.5rem; font-size: 1.25rem; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  margin: 0.5rem 0; padding: 0 1rem; }
summary { padding: 0.75rem 0; cursor: pointer; overflow-wrap: anywhere; }
summary .quiet { margin: 0; }
.verb { display: inline-block; min-width: 4.5rem; font-weight: 600; color: var(--accent); }
pre, code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: 0.875rem; }
pre { background: var(--code); border-radius: 8px; padding: 0.75rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 1rem; font-size: 0.9375rem; }
th, td { text-align: left; vertical-align: top; padding: 0.35rem 0.75rem 0.35rem 0;
  border-bottom: 1px solid var(--line); }
"""
