"""Structured output: grammars that a request's text must follow, as masks over the vocabulary.

| module | does |
|---|---|
| `matcher.py` | one choice's place in its grammar: masks, drafts, advancing |
| `rows.py`, `mask_budget.py` | a step's requests under grammars, and the time that they may take of it |
| `meter.py` | counts for metrics |
| `compiler.py` | grammars to matchers, off the step loop, bounded in every direction |
| `worker.py`, `worker_process.py` | the killable process in which a grammar is tried first |
| `tokenizer.py` | the vocabulary as llguidance sees it, and its limits |
| `errors.py` | how a grammar can fail; each ends one request |

No torch. llguidance is imported by `tokenizer.py` and `worker.py` alone.
"""
