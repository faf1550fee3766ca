"""The vocabulary as llguidance sees it, and the bounds that its parser works under.

The bounds are the same where a grammar is tried (the worker) and where it is used (the engine), so that
what passed there passes here. Speeds below are llguidance's own figures.
"""

from __future__ import annotations

from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from loraplex_engine.protocol import Grammar
from loraplex_engine.structured.errors import GrammarInvalidError
from loraplex_engine.structured.worker_frames import TokenizerSpec

_JSON_OBJECT = '{"type":"object"}'


def find_tokenizer(
    model_dir: Path, vocab_size: int, eos_token_ids: frozenset[int]
) -> TokenizerSpec | None:
    """The tokenizer of a model folder; None: it has none, or no end token, so no grammar can be followed."""
    path = model_dir / "tokenizer.json"
    ends = tuple(sorted(id_ for id_ in eos_token_ids if 0 <= id_ < vocab_size))
    if not path.is_file() or not ends:
        return None
    return TokenizerSpec(path=str(path), vocab_size=vocab_size, eos_token_ids=ends)


def open_tokenizer(spec: TokenizerSpec) -> LLTokenizer:
    """The native tokenizer; takes some 100 ms.

    Raises:
        ValueError: the file is not a tokenizer, or holds more ids than the model.
    """
    return LLTokenizer(spec.path, n_vocab=spec.vocab_size, eos_token=list(spec.eos_token_ids))


def parser_limits() -> LLParserLimits:
    """Bounds on one matcher's work and memory."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # some 20 ms
        step_lexer_fuel=200_000,  # some 15 ms a mask at worst
        step_max_items=50_000,  # some 3 ms
        max_lexer_states=20_000,  # 1 to 2 KB each
        max_grammar_size=200_000,
        verbose_errors=False,  # messages go to clients, not the grammar's inner state
    )


def native_grammar(grammar: Grammar) -> str:
    """A grammar in llguidance's own form.

    Raises:
        GrammarInvalidError: a JSON schema that is not JSON.
    """
    try:
        match grammar.kind:
            case "json_object":
                return _from_schema(_JSON_OBJECT)
            case "json_schema":
                return _from_schema(grammar.value)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.value)
            case "lark":
                return LLMatcher.grammar_from_lark(grammar.value)
    except ValueError as error:
        raise GrammarInvalidError(f"the schema cannot be read: {error}") from error


def native_matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A native matcher at the beginning of `grammar`.

    Raises:
        GrammarInvalidError: it does not compile.
    """
    native = LLMatcher(tokenizer, native_grammar(grammar), log_level=0, limits=parser_limits())
    if native.is_error():
        raise GrammarInvalidError(f"the grammar does not compile: {native.get_error()}")
    return native


def _from_schema(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            # At most one space where JSON allows whitespace: a model can neither stall in an endless run
            # of it nor be kept from the style that it was trained on.
            "whitespace_pattern": " ",
            "lenient": False,
            "coerce_one_of": False,
        },
    )
