"""Which response a judge's sentences call better on one criterion: declarative phrasings only, silence for the rest.

A text is cut into sentences in which every name of a response has become @A or @B. Sentences that suppose are passed
over, and so are clauses that concede or deny. What is left is searched for verdicts ("@A is better", "the edge goes to
@B", "a draw"), and where there is none for comparisons ("@A is more legible", "@B is not as sharp"). A side is returned
only where all that was found agrees; None asks for another reader.
"""

from __future__ import annotations

import re
from typing import Literal

Side = Literal["A", "B", "tie", "na"]
LONGEST = 8000
"""Letters of a text that is read; a longer one is no answer to a question about one criterion."""


def _any(*lists: str) -> str:
    """One of the phrases of comma-separated lists."""
    return "(?:" + "|".join(phrase.strip() for words in lists for phrase in words.split(",")) + ")"


def _search(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


_QUOTED = re.compile(r"\"[^\"\n]*\"|“[^”\n]*”|(?<!\w)['‘][^'’\n]*['’](?!\w)")
_MARKUP = re.compile(r"[*`#\[\]]+")
_NOUN = _any("response, image, picture, option, output, candidate, result, render, version, one, entry, generation")
_NAMES = tuple(
    (_search(pattern), sides)
    for pattern, sides in (
        (rf"\b{_NOUN}[\s-]*(a|b)\b", {"a": "A", "b": "B"}),
        (rf"\b{_NOUN}[\s-]*(1|2|one|two)\b", {"1": "A", "2": "B", "one": "A", "two": "B"}),
        (rf"\bthe (first|second) {_NOUN}\b", {"first": "A", "second": "B"}),
        (r"\bthe (former|latter)\b", {"former": "A", "latter": "B"}),
    )
)
_VERBS = _any(
    "and, or, vs, over, is, was, has, had, does, did, wins, takes, beats, gets, edges, comes, looks, feels, seems",
    "appears, shows, renders, follows, captures, better, slightly, clearly, also, still, outperforms, surpasses",
    "excels, adheres, matches, produces, offers, provides, delivers, includes, depicts, contains, misses, omits, fails",
    "lacks, only, in terms, on this, here, due to, because, since, by, for, with its, thanks",
)
# A letter alone is a response, unless it is an article ("A better …") or a letter somebody painted.
_BARE = re.compile(
    rf"(?<![\w@'-])(?<!letter )(?<!letters )(?:([AB])(?='s\b|\s*(?:[.,;:!)>=]|$)|\s+{_VERBS}\b)"
    r"|(?<=than )([AB])\b|(?<=over )([AB])\b|(?<=to )([AB])\b|(?<=for )(B)\b|(?<=in )(B)\b"
    r"|(?<=with )(B)\b|(B)(?=\s+[a-z]))"
)
_SUPPOSED = _search(
    r"\b"
    + _any(
        "would have, could have, might have, would be, were it not, if (?!anything|only|pressed), could argue",
        "could be argued, may be argued, one might, might prefer, some may, tempting, at first glance, would not call",
        "don't think, do not think, cannot be said, can't be said, could not, couldn't, normally, seems? the obvious",
        "until you, personally",
    )
    + r"\b"
)
_CONCEDED = _search(
    r"\b"
    + _any(
        "although, though, even though, even if, while, whilst, whereas, despite, in spite of, notwithstanding, for all"
    )
    + r"\b[^,;.]*[,;]?"
)
_CONCLUDED = _search(
    "^"
    + _any(
        "so, thus, therefore, hence, overall, ultimately, in summary, in conclusion, in sum, in short, on balance",
        "all in all, consequently, as a result, for this reason, for these reasons, taken together, because of this",
        "to sum up, verdict, final verdict, conclusion",
    )
    + r"\b"
)
_DENIED = _search(r"\b(?:not|never|no longer|hardly|neither|nor|nothing|cannot)\b|n't\b")
_IS = "(?: " + _any("is, was, are, remains, stands, comes, looks, feels, appears, seems, proves, ends up, being") + ")"
_HOW = (
    "(?: "
    + _any(
        "a, an, the, just, only, still, also, far, much, significantly, noticeably, notably, considerably, slightly",
        "marginally, clearly, clear, decisively, arguably, overall, generally, therefore, thus, somewhat, vastly",
        "substantially, visibly, visually, technically, aesthetically, bit, little, lot, hair, touch, by far, simply",
        "definitely, the more, even, overwhelmingly",
        "ultimately, easily, markedly, moderately, very, objectively, undeniably, undoubtedly, narrowly, strictly",
        "actually, in fact, obviously, strongly",
    )
    + ")*"
)
_BETTER = _any(
    "better, superior, stronger, preferable, preferred, best, winner, ahead",
    "more faithful, more accurate, more successful, more convincing, more compliant, more aligned, more in line",
    "of higher quality, higher quality, higher in quality, higher",
)
_LEAD = "(?:has|holds) (?:the|an|a)(?: \\w+){0,2} (?:edge|advantage|lead)"
_WINS = _any(
    "wins?, takes this, takes it, takes the, beats, outperforms?, outclasses, outshines?, surpass(?:es)?, exceeds",
    "edges out, edges ahead, comes out ahead, comes out on top, pulls ahead, prevails, triumphs, excels, leads",
    "is closer to, goes further, (?:does|did) (?:\\w+ )*?better",
    "(?:does|did) (?:a |the )?(?:\\w+ )?(?:better|superior) job",
    "performs (?:\\w+ )?better, fares (?:\\w+ )?better, aligns (?:\\w+ )?(?:better|more), scores (?:\\w+ )?higher",
    "adheres (?:\\w+ )?(?:better|more), follows (?:[\\w ]+ )?(?:better|more \\w+)",
    "better (?:\\w+ )?(?:adheres|follows|matches|captures|aligns|reflects|fits|meets|fulfil?ls|satisfies|respects)",
)
_GIVEN = _any(
    "edge, win, advantage, preference, nod, point, vote, victory, winner, verdict, favou?rs?, prefer, preferred",
    "leans?, leaning, better response, better image, better adherence, better quality, better one, better overall",
    "better choice, full marks, go with, i'd pick, i'd choose, i'd take, hair better, credit, goes to, goes clearly to",
    "goes narrowly to, goes slightly to",
)
_LINK = (
    r"(?:\s*"
    + _any(
        "[:=-], is, goes, go, to, towards?, for, with, should, must, clearly, narrowly, slightly, therefore, the, here",
        "on this, in, of, a, marginally, by, belongs, overall, ultimately",
    )
    + r")*\s*"
)
_SHARP = _any("better, stronger, superior, higher, edge, advantage, win, nod, upper hand, lead, victory")
_LOSES = _any("falls short, falls further short, misses the mark, falls behind, lags behind, loses out, loses here")
_LESS = _any("worse, inferior, weaker, less faithful, less accurate, less successful")
_BEATEN = _any("outperformed, beaten, surpassed, bettered, outclassed, outshone, edged out") + " by"
_MORE = _any(
    r"more \w+, cleaner, sharper, crisper, nearer, closer, nicer, tidier, smoother, clearer, neater, brighter, richer"
)
_HAS = _any("has, have, shows, offers, features, exhibits, delivers, provides, presents, displays, renders, produces")
_PLUS = r"(?:better|superior|fewer|cleaner|sharper|crisper|stronger|higher)"
# A pattern names one response; where it is marked True, the other one is the better.
_VERDICTS = (
    (_search(rf"@([AB]){_IS}{_HOW} {_BETTER}\b(?! (?:at|in the|composed))"), False),
    (_search(rf"@([AB]){_HOW} (?:{_WINS}|{_LEAD})\b"), False),
    (_search(rf"\b{_GIVEN}{_LINK}@([AB])"), False),
    (_search(r"@([AB]) ?[>≻]"), False),
    (_search(rf"@([AB]){_IS}{_HOW} (?:{_BEATEN}|{_LESS})\b"), True),
    (_search(rf"@([AB]) {_LOSES}\b"), True),
    (_search(rf"\bmakes? @([AB]){_HOW} {_BETTER}"), False),
    (_search(rf"\b(?:gives?|giving|hands?|earns?) @([AB]){_HOW} {_SHARP}\b"), False),
    (_search(rf"\b{_SHARP}(?: [\w-]+)* (?:in|from|by|of) @([AB])[.!:]?"), False),
    (_search(rf"\b(?:quality|adherence|faithfulness|fidelity) (?:of|in) @([AB]){_IS}{_HOW} {_BETTER}\b"), False),
    (_search(r"^@([AB])[.,]?(?: (?:comfortably|clearly|narrowly|easily|by a \w+))?[.,]?$"), False),
    (_search(r"\b(?:found in|is|: ?)@([AB])[.!]?$"), False),
)
_COMPARISONS = (
    (_search(rf"@([AB]){_IS}{_HOW} {_MORE}\b"), False),
    (_search(rf"@([AB]){_HOW} {_HAS}[^@,;]*?\b{_PLUS}\b"), False),
    (_search(rf"@([AB]){_HOW} (?:more|better) \w+ly? \w+s\b"), False),
    (_search(rf"@([AB]){_IS}{_HOW} (?:not (?:quite |nearly )?as|less) \w+"), True),
    (_search(rf"\b{_PLUS}\b[^@.]*:\s*@([AB])[.!]?$"), False),
    (_search(r"\bmore \w+[^@.]* (?:is|in|from) (?:the one from |found in )?@([AB])"), False),
    (_search(r"\bonly @([AB])\b|@([AB]) alone\b"), False),
)
_GAP = "(?:meaningful |significant |real |noticeable |discernible |clear |major |visible |appreciable )?"
_TIED = _search(
    r"(?:^|\b(?:a|an? \w+|is|it's) )(?:tied?(?! to)|draw|wash|dead heat|stalemate)\b|\b"
    + _any(
        "equal(?:ly)?, on par, on a par, neck and neck, no (?:clear |real |obvious )?winner, evenly matched",
        "equivalent, indistinguishable, comparabl[ey], same (?:degree|level|extent|standard|quality), both nail",
        f"no {_GAP}(?:difference|gap|distinction|advantage), nothing to separate, rate them the same",
        "(?:are|is|as|equally|both) (?:identical|similar) in, no preference",
        "neither[^.]*\\b(?:better|superior|ahead|edge|advantage|wins?)",
        "call it even, even match, (?:basically|practically|essentially|about) the same",
        "(?:cannot|can't|hard to|difficult to|impossible to) (?:choose|separate|distinguish|put one|pick|tell)",
        "cancel out, cancel each other out, both (?:\\w+ )?(?:equally|fully|perfectly)",
    )
    + r"\b"
)
_NOT_APPLICABLE = _search(
    r"\b"
    + _any(
        "not[ _-]applicable, n/?a, does not apply, doesn't apply, not relevant, isn't relevant, irrelevant, no bearing",
        "(?:cannot|can't|can not)(?: really)? be (?:assessed|judged|evaluated|compared), skipped, inapplicable",
    )
    + r"\b"
)


def side(text: str) -> Side | None:
    """The response that a criterion's text calls better, "tie", "na", or None where the phrasings do not say.

    >>> side("Although A has richer colours, Response B is clearly better."), side("Both are equal."), side("N/A")
    ('B', 'tie', 'na')
    >>> side("Response A has two crates, Response B has three.") is None
    True
    """
    if len(text) > LONGEST:
        return None
    stated = [sentence for sentence in _sentences(text) if not _SUPPOSED.search(sentence)]
    last = [sentence for sentence in stated[-1:] if _CONCLUDED.search(sentence) and not _TIED.search(sentence)]
    if last and len(concluded := _claims(last[0], _VERDICTS)) == 1:
        return concluded.pop()
    verdicts = {found for sentence in stated for found in _claims(sentence, _VERDICTS)}
    tied = any(_TIED.search(sentence) for sentence in stated)
    if _NOT_APPLICABLE.search(text):
        return None if verdicts else "na"
    if tied:
        return None if verdicts else "tie"
    found = verdicts or {found for sentence in stated for found in _claims(sentence, _COMPARISONS)}
    return found.pop() if len(found) == 1 else None


def _sentences(text: str) -> list[str]:
    """Sentences without quotes and emphasis, names of responses as @A and @B."""
    text = _QUOTED.sub(" ", _MARKUP.sub(" ", text.replace("_", " ")))
    for pattern, sides in _NAMES:
        text = pattern.sub(lambda match, sides=sides: f"@{sides[match[1].lower()]}", text)  # type: ignore[misc]
    text = _BARE.sub(lambda match: "@" + next(filter(None, match.groups())), text)
    return [" ".join(part.split()) for part in re.split(r"(?<=[.!?;])\s+|\n+", text) if part.strip()]


def _claims(sentence: str, patterns: tuple[tuple[re.Pattern[str], bool], ...]) -> set[Literal["A", "B"]]:
    """The sides that a sentence calls better; none where it denies."""
    kept = _CONCEDED.sub(" ", sentence)
    kept = kept if "@" in kept else sentence
    found: set[Literal["A", "B"]] = set()
    for pattern, turned in patterns:
        for match in pattern.finditer(kept):
            is_a = next(filter(None, match.groups())).upper() == "A"
            before = kept[: match.start()].rsplit(",", 1)[-1] + ("" if turned else match[0])
            if not _DENIED.search(before):
                found.add("A" if is_a != turned else "B")
    return found
