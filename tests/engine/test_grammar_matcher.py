"""One place in a grammar, on llguidance: masks, ends, drafts, forks, errors."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from loraplex_engine.protocol import Grammar
from loraplex_engine.structured.errors import (
    GrammarDeadEndError,
    GrammarFailedError,
    GrammarInvalidError,
)
from loraplex_engine.structured.matcher import LlMatcher
from loraplex_engine.structured.tokenizer import find_tokenizer
from loraplex_engine.structured.worker_frames import TokenizerSpec

from tests.platform.gateway import tiny_model
from tests.support.grammars import (
    END_IDS,
    SCHEMAS,
    VOCAB_SIZE,
    allowed_ids,
    open_matcher,
    schema,
    write_tokenizer,
)

JSON_OBJECT = Grammar(kind="json_object")
EVERYTHING = 0xFFFF_FFFF


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TokenizerSpec:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def say(matcher: LlMatcher, text: str) -> None:
    for token_id in tiny_model.ids_of(text):
        matcher.advance(token_id)


def text_of(ids: list[int]) -> str:
    return tiny_model.reference().decode(ids, skip_special_tokens=True)


def write(matcher: LlMatcher, seed: int, most: int = 2000) -> str:
    """Random allowed tokens until the text is complete."""
    choice, ids = random.Random(seed), []
    while not matcher.is_complete:
        assert len(ids) < most, "it does not come to an end"
        token_id = choice.choice(sorted(allowed_ids(matcher.masks_for()[0])))
        matcher.advance(token_id)
        ids.append(token_id)
    return text_of(ids)


# ------------------------------------------------------------------ masks and ends


def test_an_end_token_is_allowed_exactly_where_the_text_is_whole(spec: TokenizerSpec) -> None:
    matcher = open_matcher(spec, Grammar(kind="regex", value="(ab)+"))
    said = ""

    for character in "ababab":
        ends = allowed_ids(matcher.masks_for()[0]) & set(END_IDS)
        is_whole = bool(said) and len(said) % 2 == 0
        assert ends == (set(END_IDS) if is_whole else set()), said
        say(matcher, character)
        said += character
    assert not matcher.is_complete  # another "ab" may follow
    matcher.advance(END_IDS[1])
    assert matcher.is_complete


def test_nothing_but_an_end_token_left_means_complete(spec: TokenizerSpec) -> None:
    matcher = open_matcher(spec, JSON_OBJECT)
    say(matcher, '{"a": [1, "}"]')
    assert not matcher.is_complete

    say(matcher, "}")

    assert matcher.is_complete
    assert allowed_ids(matcher.masks_for()[0]) == set(END_IDS)


def test_control_tokens_and_padding_are_never_allowed(spec: TokenizerSpec) -> None:
    num_tokens = tiny_model.reference().get_vocab_size(with_added_tokens=True)
    assert num_tokens < VOCAB_SIZE
    matcher = open_matcher(spec, Grammar(kind="regex", value="(?s:.*)"))

    allowed = allowed_ids(matcher.masks_for()[0])

    special = {tiny_model.reference().token_to_id(text) for text in tiny_model.SPECIAL_TOKENS}
    assert allowed & special == set(END_IDS)
    assert max(allowed) < num_tokens
    assert len(allowed) > 300  # all that text can begin with


def test_whitespace_cannot_go_on_forever(spec: TokenizerSpec) -> None:
    matcher = open_matcher(spec, JSON_OBJECT)
    say(matcher, '{ "a" : ')

    allowed = {text_of([token_id]) for token_id in allowed_ids(matcher.masks_for()[0])}

    assert not any(text.startswith((" ", "\n", "\t")) for text in allowed)
    assert "{" in allowed


@pytest.mark.parametrize("index", range(0, len(SCHEMAS), 3))
def test_what_it_allows_is_valid(index: int, spec: TokenizerSpec) -> None:
    text = write(open_matcher(spec, schema(SCHEMAS[index])), seed=index)

    jsonschema.validate(
        json.loads(text),
        SCHEMAS[index],
        format_checker=jsonschema.FormatChecker(),
    )


def test_unicode_and_escapes_come_through(spec: TokenizerSpec) -> None:
    value = {"ключ": 'a "quoted" \\ back\nline ☃ 🙂', "b": [True, None, -1.5e3]}
    matcher = open_matcher(spec, JSON_OBJECT)

    say(matcher, json.dumps(value, ensure_ascii=False))

    assert matcher.is_complete


def test_half_a_surrogate_pair_cannot_be_written(spec: TokenizerSpec) -> None:
    matcher = open_matcher(spec, JSON_OBJECT)
    say(matcher, '{"a": "\\u')

    with pytest.raises(GrammarFailedError):
        say(matcher, "d800")


# ------------------------------------------------------------------ drafts


def test_masks_for_drafts_are_the_masks_after_them(spec: TokenizerSpec) -> None:
    drafts = tiny_model.ids_of('{"name": "x"')
    matcher = open_matcher(spec, JSON_OBJECT)
    walked = open_matcher(spec, JSON_OBJECT)

    masks = matcher.masks_for(drafts)

    assert masks.shape == (1 + len(drafts), -(-VOCAB_SIZE // 32))
    assert masks.dtype == np.uint32
    for row, draft in enumerate(drafts):
        assert (masks[row] == walked.masks_for()[0]).all()
        walked.advance(draft)
    assert (masks[-1] == walked.masks_for()[0]).all()


def test_drafts_are_not_consumed(spec: TokenizerSpec) -> None:
    matcher = open_matcher(spec, JSON_OBJECT)
    before = matcher.masks_for()
    drafts = tiny_model.ids_of('{"a": 1}')

    matcher.masks_for(drafts)
    assert matcher.validate_drafts(drafts) == len(drafts)

    assert (matcher.masks_for() == before).all()
    say(matcher, '{"other": 2}')
    assert matcher.is_complete


def test_a_refused_draft_ends_what_drafts_say(spec: TokenizerSpec) -> None:
    matcher = open_matcher(spec, schema({"type": "integer", "minimum": 0, "maximum": 99}))
    good, bad = tiny_model.ids_of("1")[0], tiny_model.ids_of("x")[0]

    masks = matcher.masks_for([good, bad, good])

    assert matcher.validate_drafts([good, bad, good]) == 1
    assert matcher.validate_drafts([bad]) == 0
    assert bad not in allowed_ids(masks[1])
    assert (masks[2:] == EVERYTHING).all()  # never used; above all, not stuck


def test_nothing_is_drafted_past_the_end(spec: TokenizerSpec) -> None:
    matcher = open_matcher(spec, Grammar(kind="regex", value="a"))
    a = tiny_model.ids_of("a")[0]

    masks = matcher.masks_for([a, a])

    assert allowed_ids(masks[0]) >= {a}
    assert (masks[1:] == EVERYTHING).all()
    matcher.advance(a)
    assert matcher.validate_drafts([a]) == 0


# ------------------------------------------------------------------ forks and errors


def test_forks_are_independent(spec: TokenizerSpec) -> None:
    matcher = open_matcher(spec, JSON_OBJECT)
    say(matcher, '{"a"')
    fork = matcher.fork()
    before = fork.masks_for()

    say(matcher, ": 1}")

    assert matcher.is_complete
    assert not fork.is_complete
    assert (fork.masks_for() == before).all()
    with pytest.raises(GrammarFailedError):
        matcher.advance(tiny_model.ids_of("x")[0])
    say(fork, ":2}")
    assert fork.is_complete


def test_a_refused_token_is_an_error_and_stays_one(spec: TokenizerSpec) -> None:
    matcher = open_matcher(spec, JSON_OBJECT)

    with pytest.raises(GrammarFailedError):
        matcher.advance(tiny_model.ids_of("x")[0])

    assert not matcher.is_complete
    with pytest.raises(GrammarFailedError):
        matcher.advance(tiny_model.ids_of("{")[0])
    with pytest.raises((GrammarFailedError, GrammarDeadEndError)):
        matcher.masks_for()


def test_an_end_token_before_the_end_is_an_error(spec: TokenizerSpec) -> None:
    matcher = open_matcher(spec, JSON_OBJECT)
    say(matcher, "{")

    with pytest.raises(GrammarFailedError):
        matcher.advance(END_IDS[0])


def test_an_empty_language_has_no_first_token(spec: TokenizerSpec) -> None:
    matcher = open_matcher(spec, Grammar(kind="regex", value=r"[^\s\S]"))

    with pytest.raises(GrammarDeadEndError):
        matcher.masks_for()


def test_a_panic_is_an_error_of_the_request() -> None:
    class Panic(BaseException):
        """As pyo3's: no `Exception`."""

    class Native:
        def is_stopped(self) -> bool:
            return False

        def consume_token(self, token_id: int) -> bool:
            raise Panic

    with pytest.raises(GrammarFailedError):
        LlMatcher(Native(), VOCAB_SIZE).advance(1)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(kind="regex", value="(a"), "unclosed group"),
        (Grammar(kind="lark", value="start: missing"), "unknown name"),
        (Grammar(kind="json_schema", value="{"), "cannot be read"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"enum": []}), "Unsatisfiable"),
        (schema({"$ref": "https://example.com/schema"}), "example.com"),
        (schema({"type": "string", "format": "made-up"}), "made-up"),
        (schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
    ],
)
def test_what_does_not_compile_says_why(grammar: Grammar, reason: str, spec: TokenizerSpec) -> None:
    with pytest.raises(GrammarInvalidError, match=reason):
        open_matcher(spec, grammar)


def test_a_folder_without_tokenizer_or_end_token_follows_no_grammar(tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path, VOCAB_SIZE, frozenset({2})) is None
    write_tokenizer(tmp_path)
    assert find_tokenizer(tmp_path, VOCAB_SIZE, frozenset()) is None
    assert find_tokenizer(tmp_path, VOCAB_SIZE, frozenset({VOCAB_SIZE})) is None
    found = find_tokenizer(tmp_path, VOCAB_SIZE, frozenset({2, 0, VOCAB_SIZE}))
    assert found is not None
    assert found.eos_token_ids == (0, 2)
