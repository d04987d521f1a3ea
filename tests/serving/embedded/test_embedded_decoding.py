"""How an answer is put together from segments; no model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from serving.embedded.backend import Segment
from serving.embedded.decoding import SEGMENT_TOKENS, Decoding
from serving.embedded.sampling import SamplingParams

END = 0  # shown as <end> unless special tokens are skipped


def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Letters by code point; 1 and 2 are the halves of one multi-byte character."""
    text = "".join("" if i == END and skip_special_tokens else "<end>" if i == END else chr(i) for i in ids)
    return text.replace("\x01\x02", "é").replace("\x01", "\ufffd").replace("\x02", "\ufffd")


def start(*, limit: int = 100, **params) -> Decoding:
    return Decoding([65, 66], SamplingParams(**params), limit=limit, decode=decode)


def feed(decoding: Decoding, text: str, *, ended: bool = False) -> Decoding:
    tokens = [ord(letter) for letter in text] + ([END] if ended else [])
    decoding.feed(Segment(tokens=tokens, ended_by_model=ended, cached_tokens=0, prompt_s=0.0))
    return decoding


def test_the_end_token_is_kept_in_the_ids_and_left_out_of_the_text():
    """output_ids includes the token that stopped the answer; text does not."""
    decoding = feed(start(), "hello", ended=True)
    assert decoding.output_ids == [*map(ord, "hello"), END]
    assert decoding.text() == "hello"
    assert decoding.finish_reason == {"type": "stop", "matched": END}


def test_an_end_token_in_last_place_is_a_stop():
    """An answer that ends by itself exactly at the limit has finished, and was not cut."""
    assert feed(start(limit=3), "hi", ended=True).finish_reason == {"type": "stop", "matched": END}


def test_the_limit_cuts():
    """At the limit the answer finishes with its length."""
    decoding = feed(start(limit=3), "abc")
    assert decoding.finish_reason == {"type": "length", "length": 3}
    assert decoding.text() == "abc"


def test_no_tokens_asked_for_is_finished_at_once():
    """max_new_tokens 0 needs no call to the model."""
    assert start(limit=0).finish_reason == {"type": "length", "length": 0}


def test_a_stop_token_cuts_the_segment_after_it():
    """What was sampled behind a stop token in the same segment is dropped."""
    decoding = feed(start(stop_token_ids=frozenset({ord("c")})), "abcde")
    assert decoding.output_ids == [*map(ord, "abc")]
    assert decoding.text() == "ab"
    assert decoding.finish_reason == {"type": "stop", "matched": ord("c")}


def test_ignore_eos_ignores_stop_tokens_too():
    """In SGLang ignore_eos switches off every stop by token."""
    decoding = feed(start(stop_token_ids=frozenset({ord("c")}), ignore_eos=True), "abcde")
    assert decoding.finish_reason is None


@pytest.mark.parametrize("split", range(1, 8))
def test_a_stop_string_is_found_wherever_segments_are_cut(split):
    """A stop string that spans two segments stops the answer at its last token."""
    decoding = start(stop=("STOP",))
    feed(decoding, "abSTOPcd"[:split])
    if decoding.finish_reason is None:
        feed(decoding, "abSTOPcd"[split:])
    assert decoding.finish_reason == {"type": "stop", "matched": "STOP"}
    assert decoding.output_ids == [*map(ord, "abSTOP")]
    assert decoding.text() == "ab"


def test_no_stop_trim_keeps_what_matched():
    """With no_stop_trim the stop string stays in the text."""
    assert feed(start(stop=("ST",), no_stop_trim=True), "abSTcd").text() == "abST"


def test_the_first_stop_in_the_text_wins():
    """Of two stop strings, the one that is complete first stops the answer."""
    decoding = feed(start(stop=("cd", "b")), "abcd")
    assert decoding.finish_reason == {"type": "stop", "matched": "b"}


def test_a_special_token_can_be_a_stop_string():
    """Stop strings are looked for in the text with special tokens, as SGLang does."""
    decoding = start(stop=("<end>",))
    feed(decoding, "ab\x00cd")
    assert decoding.output_ids == [ord("a"), ord("b"), END]


def test_an_unfinished_character_is_held_back_until_it_is_whole():
    """A stream never shows half a character, and the finished text has all of it."""
    decoding = feed(start(), "a\x01")
    assert decoding.text() == "a"
    assert feed(decoding, "\x02").text() == "aé"


def test_segments_never_ask_for_more_than_the_limit():
    """The last segment is cut to what is left."""
    decoding = start(limit=SEGMENT_TOKENS + 5)
    assert decoding.next_body()["n_predict"] == SEGMENT_TOKENS
    feed(decoding, "x" * SEGMENT_TOKENS)
    body = decoding.next_body()
    assert body["n_predict"] == 5
    assert body["prompt"] == [65, 66, *[ord("x")] * SEGMENT_TOKENS]


def test_penalties_look_at_the_answer_alone():
    """With a penalty on, each token is its own segment and the window is the answer so far."""
    decoding = start(presence_penalty=0.5)
    assert (decoding.next_body()["n_predict"], decoding.next_body()["repeat_last_n"]) == (1, 0)
    feed(decoding, "abc")
    assert decoding.next_body()["repeat_last_n"] == 3


def test_seeds_repeat_and_differ():
    """A seed gives the same numbers again, others for each segment, sample and request."""

    def seeds(seed, index=0):
        decoding = Decoding(
            [65], SamplingParams(sampling_seed=seed), limit=100, decode=decode, sample_index=index
        )
        first = decoding.next_body()["seed"]
        return first, feed(decoding, "abc").next_body()["seed"]

    assert seeds(7) == seeds(7)
    assert len({*seeds(7), *seeds(8), *seeds(7, 1), *seeds(None), *seeds(None)}) == 10


def test_an_abort_keeps_what_there_is():
    """An aborted answer has its partial ids and says so."""
    decoding = feed(start(), "abc")
    decoding.abort()
    assert decoding.finish_reason["type"] == "abort"
    assert (decoding.text(), len(decoding.output_ids)) == ("abc", 3)
