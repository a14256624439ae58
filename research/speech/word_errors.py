"""Words of two texts compared, as one compares what was said with what was heard."""

from __future__ import annotations

import re
import unicodedata

_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = (*("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"),)
_SCALES = ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_SHORT = {"mr": "mister", "mrs": "missus", "dr": "doctor", "vs": "versus", "okay": "ok"} | {
    "&": "and",
    "%": "percent",
    "+": "plus",
}
_MAX = 10**12
_DOLLARS = re.compile(r"\$(\d{1,3}(?:,\d{3})+|\d+)(?:\.(\d\d)(?!\d))?")
_TIME = re.compile(r"(?<!\d)(\d{1,2}):(\d\d)(?!\d)")
_WORD = re.compile(
    r"(?P<number>\d+(?:,\d{3})*(?:\.\d+)?)(?P<ending>st|nd|rd|th)?(?![^\W\d_])"
    r"|[^\W_]+(?:['\u2019][^\W\d_]+)*|[&%+]"
)


def words_of(text: str) -> list[str]:
    """Return the words as they are spoken: lower case, no punctuation, numbers written out."""
    text = unicodedata.normalize("NFKC", text).lower()
    text = _DOLLARS.sub(lambda found: _dollars(found[1], found[2]), text)
    text = _TIME.sub(lambda found: _time(int(found[1]), found[2]), text)
    words: list[str] = []
    for found in _WORD.finditer(text):
        if found["number"]:
            words += _number(found["number"], ordinal=bool(found["ending"]))
        else:
            word = found[0].replace("'", "").replace("\u2019", "")
            words.append(_SHORT.get(word, word))
    return words


def word_errors(said: str, heard: str) -> tuple[int, int]:
    """Return the word errors and the words said: their quotient is the word error rate.

    Errors are the fewest words to change, leave out and put in that make what was heard of what was said.
    """
    wanted, got = words_of(said), words_of(heard)
    row = list(range(len(got) + 1))
    for number, word in enumerate(wanted, 1):
        above, row[0] = row[0], number
        for column, other in enumerate(got, 1):
            changed = above + (word != other)
            above = row[column]
            row[column] = min(changed, above + 1, row[column - 1] + 1)
    return row[-1], len(wanted)


def _number(text: str, *, ordinal: bool) -> list[str]:
    whole, _, part = text.replace(",", "").partition(".")
    if int(whole) >= _MAX or (len(whole) > 1 and whole[0] == "0"):
        words = [_ONES[int(digit)] for digit in whole]
    elif not part and not ordinal and "," not in text and _is_year(int(whole)):
        words = _year(int(whole))
    else:
        words = _whole(int(whole))
    if part:
        words += ["point", *(_ONES[int(digit)] for digit in part)]
    if ordinal:
        words[-1] = _ordinal(words[-1])
    return words


def _whole(number: int) -> list[str]:
    if number < 20:
        return [_ONES[number]]
    if number < 100:
        return [_TENS[number // 10], *([_ONES[number % 10]] if number % 10 else [])]
    size, name = next((size, name) for size, name in _SCALES if number >= size)
    rest = _whole(number % size) if number % size else []
    return [*_whole(number // size), name, *rest]


def _is_year(number: int) -> bool:
    return 1100 <= number <= 1999 or 2010 <= number <= 2099


def _year(number: int) -> list[str]:
    """Return a number as years are read, in two pairs."""
    century, rest = divmod(number, 100)
    if not rest:
        return [*_whole(century), "hundred"]
    return [*_whole(century), *(["oh"] if rest < 10 else []), *_whole(rest)]


def _ordinal(word: str) -> str:
    if word in _ORDINALS:
        return _ORDINALS[word]
    return word[:-1] + "ieth" if word.endswith("y") else word + "th"


def _dollars(whole: str, cents: str | None) -> str:
    unit = "dollar" if whole == "1" else "dollars"
    return f"{whole} {unit}" + (f" and {cents} cents" if cents and cents != "00" else "")


def _time(hour: int, minutes: str) -> str:
    if minutes == "00":
        return f"{hour}"
    return f"{hour} " + (f"oh {minutes[1]}" if minutes[0] == "0" else minutes)
