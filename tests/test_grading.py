"""Which words are a right answer: tables of what models write."""

from __future__ import annotations

import pytest

from vlcache.bench.grading import choice_of, is_answer

OPTIONS = ["A clock", "low conflict", "conflict", "5%", "0.5%", "the E. coli strain", "<image 1>", "12 N", "I", "10:30"]


@pytest.mark.parametrize(
    ("words", "letter"),
    [
        *[(words, "C") for words in ("C", "c", " C.\n", "(C)", "**C**", "'C'", "C)", "C:", "\\(C\\)")],
        *[
            (words, "C")
            for words in ("C. conflict", "(C) conflict", "C: conflict", "C - conflict", "C\nSince it is so.")
        ],
        *[
            (words, "C")
            for words in ("Answer: C", "answer is C", "The answer is: (C).", "The correct option is **C**.")
        ],
        ("The answer is B. Option A is wrong because it is late.", "B"),
        ("Answer: A\nNo, wait.\nAnswer: C", "C"),
        ("It is C, I think, so the answer is:\n\n**C. conflict**", "C"),
        ("Answer: option C", "C"),
        ("I think that it must be (C)", "C"),
        ("A clock", "A"),
        ("Answer: a clock.", "A"),
        ("Conflict", "C"),
        ("Low  conflict", "B"),
        ("I would say low conflict, going by the chart", "B"),
        ("about 0.5%, it seems", "E"),
        ("the E. coli strain", "F"),
        ("They meet at 10:30, as it says", "J"),
        # no choice, or more than one
        ("", None),
        ("K", None),
        ("Z. none of them", None),
        ("I think it is a clown", None),
        ("A dog", None),
        ("between (A) and (C)", None),
        ("either a clock or 12 N", None),
        ("-5% and 15%", None),
        ("112 N", None),
        ("some 12 Nm", None),
        ("at 10:30.5, it seems", None),
        ("the image 1", None),
    ],
)
def test_the_letter_that_words_choose(words: str, letter: str | None) -> None:
    assert choice_of(words, OPTIONS) == letter


def test_options_of_the_same_text_are_not_told_apart() -> None:
    assert choice_of("yes", ["yes", "yes", "no"]) is None
    assert choice_of("B", ["yes", "yes", "no"]) == "B"


def test_letters_stop_where_options_do() -> None:
    assert choice_of("C", ["yes", "no"]) is None
    assert choice_of("A: 5; B: 6", ["A: 4; B: 6", "A: 5; B: 6"]) == "B"


SENTENCE = "Elements tend to be grouped if they form a simple pattern"

RIGHT = [
    *[("Int", "8", words) for words in ("8", "8.0", " 8.\n", "Answer: 8", "There are 8 charts.", "8 of them, yes 8")],
    *[("Int", "1202", words) for words in ("1202", "1,202", "$1,202")],
    ("Int", "-3", "-3"),
    ("Int", "3-5", "3-5"),
    *[("Float", "18.29%", words) for words in ("18.29%", "18.29", "0.1829", "18.2 %", "about 18.4 percent")],
    *[("Float", "0.21", words) for words in ("0.21", "21%", ".21", "0.212")],
    ("Float", "1,000.5", "1000"),
    ("Float", "0", "0"),
    *[
        ("Str", "Less well-off", words)
        for words in ("Less well-off", "less  WELL-OFF.", '"Less well-off"', "Less well off")
    ],
    ("Str", "White", "**white**"),
    ("Str", "$5", "5"),
    *[("Str", "White", words) for words in ("Answer: White", "The final answer is: White.", "**Answer:** White")],
    ("Str", "Experimental Psychology", "It is called Experimental Psychology there"),
    ("Str", "Berlin School of Experimental Psychology", "It was the Berlin School of Experimental Psychology."),
    ("Str", SENTENCE, SENTENCE.replace("simple", "regular")),
    ("Str", "https://w.wiki/6gb", "https://w.wiki/6gb"),
    ("Str", "Don’t know", "don't know"),
    ("Str", "Not answerable", "The document does not say."),
    *[
        ("List", "['White', '10%']", words)
        for words in ("['10%', 'White']", "White, 10%", "10% and White", "White\n10%")
    ],
    *[
        ("List", "['a', 'b', 'c']", words)
        for words in ("a, b and c", "a, b, and c", "- c\n- b\n- a", "1. a\n2. b\n3. c")
    ],
    ("List", "['a', 'b']", "[a; b]"),
    ("List", "['salt and pepper', 'oil']", "oil, salt and pepper"),
    ("List", "['Circle', 'Rectangles']", "['Rectangle', 'circle']"),
    ("List", "[1, 2]", "2, 1"),
    ("List", "White", "white"),
    *[
        ("None", "Not answerable", words)
        for words in (
            "Not answerable",
            "Answer: not answerable.",
            "This cannot be determined",
            "It isn’t: no information",
        )
    ],
]
WRONG = [
    *[("Int", "8", words) for words in ("9", "8 of 12", "88", "8.5", "-8", "eight", "", "Q8", "8,5", "v1.8.2")],
    *[("Float", "18.29%", words) for words in ("18.6", "1829", "0.19", "18.29 of 20", "none")],
    *[("Float", "0.21", words) for words in ("21", "0.22", "2100%")],
    ("Float", "21%", "2100%"),
    *[("Str", "White", words) for words in ("While", "Whites", "", "White and blue")],
    ("Str", "female", "male"),
    ("Str", "Berlin School of Experimental Psychology", "The University of Vienna, in Austria"),
    ("Str", SENTENCE, SENTENCE[:20]),
    ("Str", SENTENCE, " ".join([SENTENCE] * 3)),
    ("Str", "0-375 miles of river", "0-475 miles of river"),
    ("Str", "Purple mountains", "Not answerable"),
    *[
        ("Str", answer, words)
        for answer, words in [
            ("2015-2016", "2015 2016"),
            ("2015-2016", "2015-2017"),
            ("+49 170 1234567", "+49 170 1234568"),
            ("+49 170 1234567", "+49 1701 234567"),
            ("https://w.wiki/6gb", "https://w.wiki/gb"),
            ("someone@example.org", "someone@example.com"),
            ("WikidataMap.ipynb", "WikidataMap.ipyn"),
            ("March 2016", "Match 2016"),
            ("3rd December 2016", "3rd November 2016"),
            ("page fortyseven", "page fortysix"),
            ("at 10:30 a.m.", "at 10:30 p.m."),
        ]
    ],
    *[("List", "['White', '10%']", words) for words in ("White", "White, 11%", "White, 10%, Black", "['White']", "")],
    *[("None", "Not answerable", words) for words in ("7", "", "The answer is White", "Notable")],
]


@pytest.mark.parametrize(("answer_format", "answer", "words"), RIGHT)
def test_right_answers(answer_format: str, answer: str, words: str) -> None:
    assert is_answer(words, answer, answer_format)


@pytest.mark.parametrize(("answer_format", "answer", "words"), WRONG)
def test_wrong_answers(answer_format: str, answer: str, words: str) -> None:
    assert not is_answer(words, answer, answer_format)


@pytest.mark.parametrize("text", ["1" * 4000 + "x", "mar" * 2000 + "!", "a" * 4000 + " 9 a"])
def test_grading_takes_no_longer_on_odd_texts(text: str) -> None:
    """These made earlier patterns try every way to cut them up."""
    assert is_answer(text, text, "Str")
    assert not is_answer("else", text, "Str")
    assert choice_of(text, ["one", text[:100]]) is None
