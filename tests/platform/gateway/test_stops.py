"""Stop strings: found across cuts, never shown, and nothing held that need not be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_engine.protocol import TokenLogprobs
from loraplex_platform.gateway.stops import StopMatcher
from loraplex_platform.gateway.text_stream import TextPiece, TextStream

from tests.platform.gateway import tiny_model

_TEXT = st.text(alphabet="abc", max_size=24)
_STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def _cut_off(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: the first end of any stop string; of those ending there, the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(_TEXT, _STOPS, st.lists(st.integers(0, 24), max_size=8))
def test_the_outcome_does_not_depend_on_the_cuts(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    shown, is_stopped = "", False

    for start, end in itertools.pairwise(bounds):
        match = matcher.push(text[start:end])
        shown += match.text
        is_stopped = match.is_stopped
        if is_stopped:
            break
    if not is_stopped:
        shown += matcher.flush()

    assert (shown, is_stopped) == _cut_off(text, stops)


@given(_TEXT, _STOPS)
def test_exactly_what_may_become_a_stop_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    so_far, shown = "", ""

    for character in text:
        match = matcher.push(character)
        so_far += character
        shown += match.text
        if match.is_stopped:
            return
        held = so_far[len(shown) :]
        possible = [
            length
            for length in range(len(so_far) + 1)
            if any(stop.startswith(so_far[len(so_far) - length :]) for stop in stops) or not length
        ]
        assert len(held) == matcher.num_held == max(possible)


@pytest.mark.parametrize(
    ("tokens", "stops", "shown", "num_used"),
    [
        (["ABC", "DEF", "G", "HIJ", "K"], ["DEFGHIJ"], "ABC", 4),
        (["a", "b", "c", "d"], ["bc", "abc"], "", 3),
        (["a", "b", "c", "d"], ["bcd", "c"], "ab", 3),
        (["one st", "op two"], ["stop"], "one ", 2),
        (["xENDy"], ["END"], "x", 1),
        (["a", "EN", "E", "ND", "z"], ["END"], "aEN", 4),
        (["no", "thing"], ["!"], "nothing", 2),
        (["half of a st"], ["stop"], "half of a st", 1),
    ],
)
def test_stops_across_tokens(
    tokens: list[str], stops: list[str], shown: str, num_used: int
) -> None:
    stream, text = _run([tiny_model.ids_of(token) for token in tokens], stops)

    assert text.text == shown
    expected = sum(len(tiny_model.ids_of(token)) for token in tokens[:num_used])
    assert stream.num_tokens <= expected


def _run(groups: list[list[int]], stops: list[str]) -> tuple[TextStream, TextPiece]:
    stream = TextStream(tiny_model.base_tokenizer().token_bytes, stops)
    whole = TextPiece()
    for position, token_id in enumerate(id_ for group in groups for id_ in group):
        whole.extend(stream.push(token_id, TokenLogprobs(-float(position), [], [])))
        if stream.is_stopped:
            return stream, whole
    whole.extend(stream.finish())
    return stream, whole


def test_the_token_that_completes_the_stop_is_the_last_one_counted() -> None:
    ids = tiny_model.ids_of("The capital of France is Paris")

    stream, _ = _run([ids], ["Fra"])

    text_of = [tiny_model.reference().decode(ids[:n]) for n in range(len(ids) + 1)]
    assert stream.is_stopped
    assert "Fra" in text_of[stream.num_tokens]
    assert "Fra" not in text_of[stream.num_tokens - 1]


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_logprobs_are_of_the_shown_text(text: str, stops: list[str]) -> None:
    token_bytes = tiny_model.base_tokenizer().token_bytes
    ids = tiny_model.ids_of(text)

    stream, whole = _run([ids], stops)

    shown_ids = [token.token_id for token in whole.tokens]
    assert shown_ids == ids[: len(shown_ids)]
    raw = b"".join(token_bytes.text_bytes(id_) for id_ in shown_ids)
    if stream.is_stopped:  # the token in which the stop begins is shown whole
        assert raw.startswith(whole.text.encode()[: len(raw)])
        assert raw.decode(errors="replace").startswith(whole.text)
    else:
        assert raw.decode(errors="replace") == whole.text
        assert shown_ids == ids
    for token in whole.tokens:
        assert token.offset <= len(whole.text)


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_a_logprob_is_never_ahead_of_its_text(text: str, stops: list[str]) -> None:
    token_bytes = tiny_model.base_tokenizer().token_bytes
    stream = TextStream(token_bytes, stops)
    shown, raw = "", b""

    for token_id in tiny_model.ids_of(text):
        piece = stream.push(token_id, TokenLogprobs(-1.0, [], []))
        shown += piece.text
        raw += b"".join(token_bytes.text_bytes(token.token_id) for token in piece.tokens)
        if stream.is_stopped:
            break
        assert len(raw.decode(errors="replace")) <= len(shown)


@given(_TEXT, _STOPS, st.integers(0, 24), st.lists(st.integers(0, 24), max_size=8))
def test_a_stop_string_may_begin_before_the_bound_but_not_end_there(
    text: str, stops: list[str], bound: int, cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    bounds = sorted({0, len(text), min(bound, len(text)), *(c for c in cuts if c <= len(text))})
    shown, is_stopped = "", False

    for start, end in itertools.pairwise(bounds):
        match = matcher.push(text[start:end], can_stop=end > bound)
        shown += match.text
        is_stopped = match.is_stopped
        if is_stopped:
            break
    if not is_stopped:
        shown += matcher.flush()

    ends = [
        (end, max(lengths))
        for end in range(bound + 1, len(text) + 1)
        if (lengths := [len(stop) for stop in stops if text[:end].endswith(stop)])
    ]
    expected = (text[: ends[0][0] - ends[0][1]], True) if ends else (text, False)
    assert (shown, is_stopped) == expected


@given(_TEXT, _STOPS, st.lists(st.integers(0, 24), max_size=8))
def test_a_shown_stop_string_is_shown_whole(text: str, stops: list[str], cuts: list[int]) -> None:
    hiding, showing = StopMatcher(stops), StopMatcher(stops, shows_stop=True)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    hidden, shown = "", ""

    for start, end in itertools.pairwise(bounds):
        less, more = hiding.push(text[start:end]), showing.push(text[start:end])
        hidden += less.text
        shown += more.text
        assert less.is_stopped == more.is_stopped
        if less.is_stopped:
            assert shown.startswith(hidden)
            assert shown[len(hidden) :] in stops
            return

    assert hidden + hiding.flush() == shown + showing.flush() == text
