"""GenEval's clauses: hand-written detections with the results they must have, and the published rules as laws."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recast.errors import RecastError
from recast.rewards.geneval_clauses import CLASSES, COLORS, RELATIONS, Objects, assess, colored, parse, relations

Row = dict[str, Any]


def box(x: float, y: float, width: float = 10, height: float = 10) -> tuple[float, float, float, float]:
    """A box by its centre."""
    return (x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def things(**centres: list[tuple[float, float]]) -> Objects:
    """Objects of size 10 at these centres, scores falling; an underscore is a space in the class."""
    return {
        name.replace("_", " "): [(0.99 - 0.01 * k, box(*centre)) for k, centre in enumerate(group)]
        for name, group in centres.items()
    }


def entry(name: str, count: int = 1, **more: object) -> Row:
    return {"class": name, "count": count, **more}


def row(tag: str, *include: Row, exclude: list[Row] | None = None) -> Row:
    return {"tag": tag, "prompt": tag, "include": list(include)} | ({"exclude": exclude} if exclude else {})


BOWL = row("single_object", entry("bowl"))
PAIR = row("two_object", entry("bowl"), entry("cat"))
TWO = row("counting", entry("dog", 2), exclude=[entry("dog", 3)])
PURPLE = row("colors", entry("cup", color="purple"))
BOTH = row("color_attr", entry("cup", color="pink"), entry("car", color="black"))
RIGHT = row("position", entry("tv"), entry("cow", position=["right of", 0]))
NO_CAT = row("two_object", entry("dog"), exclude=[entry("cat", 1)])
HERD = row("position", entry("tv", 2), entry("cow", 2, position=["above", 0]))
RED_RIGHT = row("position", entry("tv", color="red"), entry("cow", color="blue", position=["right of", 0]))
CHAIN = row(
    "position",
    entry("tv"),
    entry("cow", position=["right of", 0]),
    entry("dog", position=["below", 1]),
)
HERE, EAST, NORTH, FAR = (50.0, 50.0), (90.0, 50.0), (50.0, 10.0), (130.0, 50.0)

# What is asked, what is found and of which colors; then the clauses in order (o, n, c, p for object, count, color and
# position, a capital where confirmed), and the scores: clauses, strict, nft.
TABLE = [
    (BOWL, things(bowl=[HERE]), {}, "O", 1, 1, 1),
    (BOWL, things(), {}, "o", 0, 0, 0),
    (BOWL, things(cat=[HERE]), {}, "o", 0, 0, 0),
    (BOWL, things(bowl=[HERE, EAST]), {}, "O", 1, 0, 0),
    (BOWL, things(bowl=[HERE, EAST, NORTH]), {}, "O", 1, 0, -1),
    (BOWL, things(bowl=[HERE] * 16), {}, "O", 1, 0, -14),
    (PAIR, things(bowl=[HERE], cat=[EAST], dog=[NORTH]), {}, "OO", 1, 1, 1),
    (PAIR, things(bowl=[HERE]), {}, "Oo", 1 / 2, 0, 1 / 2),
    (PAIR, things(cat=[HERE]), {}, "oO", 1 / 2, 0, 1 / 2),
    (PAIR, things(bowl=[HERE], cat=[EAST, NORTH]), {}, "OO", 1, 0, 1 / 2),
    (PAIR, things(), {}, "oo", 0, 0, 0),
    (TWO, things(), {}, "on", 0, 0, 0),
    (TWO, things(dog=[HERE]), {}, "On", 1 / 2, 0, 1 / 2),
    (TWO, things(dog=[HERE, EAST]), {}, "ON", 1, 1, 1),
    (TWO, things(dog=[HERE, EAST, NORTH]), {}, "On", 1 / 2, 0, 1 / 2),
    (TWO, things(dog=[HERE] * 4), {}, "On", 1 / 2, 0, 0),
    (TWO, things(dog=[HERE] * 9), {}, "On", 1 / 2, 0, -5 / 2),
    (row("counting", entry("dog", 3)), things(dog=[HERE] * 4), {}, "ON", 1, 0, 2 / 3),
    (row("counting", entry("dog")), things(dog=[HERE]), {}, "ON", 1, 1, 1),
    (row("single_object", entry("dog", 2)), things(dog=[HERE]), {}, "On", 1 / 2, 0, 1 / 2),
    (row("single_object", entry("dog", 2)), things(dog=[HERE, EAST]), {}, "ON", 1, 1, 1),
    (NO_CAT, things(dog=[HERE]), {}, "ON", 1, 1, 1),
    (NO_CAT, things(dog=[HERE], cat=[EAST]), {}, "On", 1 / 2, 0, 1),
    (PURPLE, things(cup=[HERE]), {"cup": ["purple"]}, "OC", 1, 1, 1),
    (PURPLE, things(cup=[HERE]), {"cup": ["blue"]}, "Oc", 1 / 2, 0, 1 / 2),
    (PURPLE, things(), {}, "oc", 0, 0, 0),
    (PURPLE, things(cup=[HERE, EAST]), {"cup": ["purple"]}, "OC", 1, 0, 0),
    (PURPLE, things(cup=[HERE, EAST]), {"cup": ["blue", "purple"]}, "Oc", 1 / 2, 0, 0),
    (
        row("colors", entry("cup", 2, color="red")),
        things(cup=[HERE, EAST]),
        {"cup": ["red", "blue"]},
        "ONc",
        2 / 3,
        0,
        3 / 4,
    ),
    (BOTH, things(cup=[HERE], car=[EAST]), {"cup": ["pink"], "car": ["black"]}, "OCOC", 1, 1, 1),
    (BOTH, things(cup=[HERE], car=[EAST]), {"cup": ["black"], "car": ["pink"]}, "OcOc", 1 / 2, 0, 1 / 2),
    (BOTH, things(cup=[HERE], car=[EAST]), {"cup": ["pink"], "car": ["pink"]}, "OCOc", 3 / 4, 0, 3 / 4),
    (BOTH, things(car=[EAST]), {"car": ["black"]}, "ocOC", 1 / 2, 0, 1 / 2),
    (RIGHT, things(tv=[HERE], cow=[EAST]), {}, "OOP", 1, 1, 1),
    # A wrong relation gives a 0 and a 1.
    (RIGHT, things(tv=[EAST], cow=[HERE]), {}, "OOp", 2 / 3, 0, 3 / 4),
    (RIGHT, things(tv=[HERE], cow=[NORTH]), {}, "OOp", 2 / 3, 0, 3 / 4),
    (RIGHT, things(tv=[HERE], cow=[HERE]), {}, "OOp", 2 / 3, 0, 3 / 4),
    (RIGHT, things(cow=[EAST]), {}, "oOp", 1 / 3, 0, 1 / 3),
    (RIGHT, things(tv=[HERE]), {}, "Oop", 1 / 3, 0, 1 / 3),
    (RIGHT, things(), {}, "oop", 0, 0, 0),
    # The cow with the highest score is meant, and only nft and strict mind that there is another.
    (RIGHT, things(tv=[HERE], cow=[EAST, NORTH]), {}, "OOP", 1, 0, 1 / 3),
    (RIGHT, things(tv=[HERE], cow=[NORTH, EAST]), {}, "OOp", 2 / 3, 0, 1 / 3),
    (RIGHT, things(tv=[HERE, NORTH], cow=[EAST]), {}, "OOP", 1, 0, 1 / 3),
    (HERD, things(tv=[HERE, FAR], cow=[NORTH, (130, 10)]), {}, "ONONp", 4 / 5, 0, 3 / 4),
    (HERD, things(tv=[HERE, (51, 50)], cow=[NORTH, (51, 10)]), {}, "ONONP", 1, 1, 1),
    (HERD, things(tv=[HERE], cow=[NORTH, (51, 10)]), {}, "OnONp", 3 / 5, 0, 1 / 2),
    (RED_RIGHT, things(tv=[HERE], cow=[EAST]), {"tv": ["red"], "cow": ["blue"]}, "OCOCP", 1, 1, 1),
    (RED_RIGHT, things(tv=[HERE], cow=[EAST]), {"tv": ["pink"], "cow": ["blue"]}, "OcOCp", 3 / 5, 0, 3 / 5),
    (RED_RIGHT, things(tv=[HERE], cow=[EAST]), {"tv": ["red"], "cow": ["pink"]}, "OCOcp", 3 / 5, 0, 3 / 4),
    (CHAIN, things(tv=[HERE], cow=[EAST], dog=[(90, 90)]), {}, "OOPOP", 1, 1, 1),
    (CHAIN, things(tv=[EAST], cow=[HERE], dog=[(50, 90)]), {}, "OOpOp", 3 / 5, 0, 2 / 3),
    (CHAIN, things(tv=[HERE, NORTH], cow=[EAST], dog=[(90, 90)]), {}, "OOPOP", 1, 0, 2 / 5),
]


@pytest.mark.parametrize(("metadata", "objects", "colors", "letters", "clauses", "strict", "nft"), TABLE)
def test_detections_and_what_they_confirm(
    metadata: Row, objects: Objects, colors: dict, letters: str, clauses: float, strict: float, nft: float
) -> None:
    request = parse(metadata, "a prompt")
    assert request is not None
    assessment = assess(request, objects, colors)
    short = {"object": "o", "count": "n", "color": "c", "position": "p"}
    found = [short[clause.kind].upper() if clause.confirmed else short[clause.kind] for clause in assessment.clauses]
    assert "".join(found) == letters
    scores = [assessment.score("clauses"), assessment.score("strict"), assessment.score("nft")]
    np.testing.assert_allclose(scores, [clauses, strict, nft], atol=1e-12)
    assert assessment.score("correct") == letters.isupper()


def test_the_table_has_every_tag() -> None:
    tags = {metadata["tag"] for metadata, *_ in TABLE}
    assert tags == {"single_object", "two_object", "counting", "colors", "position", "color_attr"}


@pytest.mark.parametrize(
    ("centre", "expected"),
    [
        ((0, 0), set()),
        ((2, 0), set()),  # a tenth of 10 + 10: all of it is margin
        ((2.0005, 0), set()),
        ((4, 0), set()),  # 2 of 4 are beyond the margin: half, not more
        ((4.01, 0), {"right of"}),
        ((-4, 0), set()),
        ((-4.01, 0), {"left of"}),
        ((0, 4), set()),
        ((0, 4.01), {"below"}),
        ((0, -4.01), {"above"}),
        ((20, 20), {"right of", "below"}),
        ((-20, 20), {"left of", "below"}),
        ((4, 4), set()),
        ((20, 13), {"right of"}),  # (13 − 2) / 23.9 = 0.46
        ((20, 15), {"right of", "below"}),  # (15 − 2) / 25 = 0.52
    ],
)
def test_relations_at_their_borders(centre: tuple[float, float], expected: set[str]) -> None:
    assert relations(box(*centre), box(0, 0)) == expected


def test_relations_of_long_boxes_mind_each_side() -> None:
    """60 wide and 10 high: 7 of margin across, 2 down."""
    assert relations(box(14, 0), box(0, 0, 60, 10)) == set()
    assert relations(box(14.1, 0), box(0, 0, 60, 10)) == {"right of"}
    assert relations(box(0, 4.1), box(0, 0, 60, 10)) == {"below"}


def test_next_to_no_offset_is_none_however_small_the_boxes() -> None:
    assert relations(box(5e-4, 0, 1e-4, 1e-4), box(0, 0, 1e-4, 1e-4)) == set()
    assert relations(box(5e-3, 0, 1e-4, 1e-4), box(0, 0, 1e-4, 1e-4)) == {"right of"}


def original(metadata: Row, objects: Objects, colors: dict[str, list[str]], exactly: bool) -> bool:
    """Whether GenEval calls an image correct: the top `count` of each entry, or, strictly, exactly so many."""
    matched: list[np.ndarray | None] = []
    for wanted in metadata["include"]:
        n, found = wanted["count"], objects.get(wanted["class"], [])
        good = len(found) == n if exactly else len(found) >= n
        good = good and all(color == wanted.get("color", color) for color in colors.get(wanted["class"], [])[:n])
        boxes = np.array([each for _, each in found[:n]])
        if good and "position" in wanted:
            relation, other = wanted["position"][0], matched[wanted["position"][1]]
            good = other is not None and all(relation in slowly(a, b) for a, b in product(boxes, other))
        matched.append(boxes if good else None)
    fewer = all(len(objects.get(each["class"], [])) < each["count"] for each in metadata.get("exclude", []))
    return fewer and all(group is not None for group in matched)


def trained_on(metadata: Row, objects: Objects, colors: dict[str, list[str]]) -> float:
    """The score of the RL codebases from its description: the mean of terms per entry, without exclusions."""
    terms: list[float] = []
    groups: list[np.ndarray | None] = []
    for wanted in metadata["include"]:
        n, found = wanted["count"], objects.get(wanted["class"], [])
        terms.append((n - abs(n - len(found))) / n)
        good, boxes = len(found) == n, np.array([each for _, each in found])
        if not good:
            terms += [0] * bool({"color", "position"} & wanted.keys())
        elif "color" in wanted:
            terms.append(colors[wanted["class"]].count(wanted["color"]) / n)
            good = terms[-1] == 1
        if good and "position" in wanted:
            other = groups[wanted["position"][1]]
            good = other is not None and all(wanted["position"][0] in slowly(a, b) for a, b in product(boxes, other))
            terms += [1] if good else [0] if other is None else [0, 1]
        groups.append(boxes if good else None)
    return sum(terms) / len(terms)


def slowly(a: np.ndarray, b: np.ndarray) -> list[str]:
    off = (a[:2] + a[2:] - b[:2] - b[2:]) / 2
    rev = np.sign(off) * np.clip(np.abs(off) - 0.1 * (a[2:] - a[:2] + b[2:] - b[:2]), 0, None)
    if (np.abs(rev) < 1e-3).all():
        return []
    (dx, dy), limit = rev / np.sqrt((off**2).sum()), 0.5
    return [r for r, yes in zip(RELATIONS, (dx < -limit, dx > limit, dy < -limit, dy > limit), strict=True) if yes]


SPOTS = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda spot: (6.0 * spot[0], 6.0 * spot[1]))


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Row, Objects, dict[str, list[str]]]:
    names = ["dog", "cat", "cow"]
    include: list[Row] = []
    for k, name in enumerate(draw(st.permutations(names))[: draw(st.integers(1, 3))]):
        include.append(entry(name, draw(st.integers(1, 2))))
        if draw(st.booleans()):
            include[-1]["color"] = draw(st.sampled_from(["red", "blue"]))
        if k and draw(st.booleans()):
            include[-1]["position"] = [draw(st.sampled_from(RELATIONS)), draw(st.integers(0, k - 1))]
    exclude = draw(st.lists(st.builds(entry, st.sampled_from(names), st.integers(1, 3)), max_size=1))
    objects = things(**{name: draw(st.lists(SPOTS, max_size=3)) for name in names})
    colors = {name: [draw(st.sampled_from(["red", "blue"])) for _ in objects[name]] for name in names}
    return row(draw(st.sampled_from(["counting", "position"])), *include, exclude=exclude), objects, colors


@given(scenes())
def test_the_modes_are_the_published_rules(scene: tuple[Row, Objects, dict[str, list[str]]]) -> None:
    metadata, objects, colors = scene
    request = parse(metadata, "")
    assert request is not None
    assessment = assess(request, objects, colors)
    assert assessment.score("correct") == original(metadata, objects, colors, exactly=False)
    assert assessment.score("strict") == original(metadata, objects, colors, exactly=True)
    assert assessment.score("nft") == pytest.approx(trained_on(metadata, objects, colors), abs=1e-12)
    assert assessment.score("correct") <= assessment.score("clauses") <= 1
    assert (assessment.score("correct") == 1) == (assessment.score("clauses") == 1)
    needed = colored(request, objects)
    assert assess(request, objects, {name: colors[name][:number] for name, number in needed.items()}) == assessment


def test_only_colors_that_can_matter_are_asked_for() -> None:
    request = parse(row("colors", entry("cup", 2, color="red"), entry("car", color="red"), entry("cat")), "")
    assert request is not None
    assert colored(request, things(cup=[HERE], car=[EAST, NORTH, FAR], cat=[HERE])) == {"car": 1}
    assert colored(request, things(cup=[HERE] * 4)) == {"cup": 2}


def test_rows_of_the_files_kind_parse() -> None:
    for metadata in (BOWL, PAIR, TWO, PURPLE, BOTH, RIGHT):
        request = parse(metadata, metadata["prompt"])
        assert request is not None
        assert [each.name for each in request.include] == [each["class"] for each in metadata["include"]]
        assert request.counting == (metadata["tag"] == "counting")
    for name in CLASSES:
        assert parse(row("single_object", entry(name)), "") is not None
    for color in COLORS:
        assert parse(row("colors", entry("cup", color=color)), "") is not None
    table = row("single_object", {"class": "cup", "count": 1, "color": None, "position": None}) | {"exclude": None}
    assert parse(table, "") == parse(row("single_object", entry("cup")), "")  # as tables of mixed rows have it


def test_the_three_names_of_its_own_and_the_order() -> None:
    assert len(CLASSES) == len(set(CLASSES)) == 80
    assert CLASSES[64:67] == ("computer mouse", "tv remote", "computer keyboard")
    assert [CLASSES.index(name) for name in ("person", "stop sign", "dog", "dining table", "toothbrush")] == [
        0,
        11,
        16,
        60,
        79,
    ]


@pytest.mark.parametrize("metadata", [None, {}, {"tag": "ocr"}, {"include": []}, {"include": None}])
def test_rows_without_include_do_not_apply(metadata: Row | None) -> None:
    assert parse(metadata, "a prompt") is None


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ([entry("mouse")], [], "unknown class 'mouse': of the 80 known the nearest are horse, computer mouse, toas"),
        ([{"count": 1}], [], "unknown class None"),
        ([entry("cup", 0)], [], "a count is an integer from 1 to 16, .*, not 0"),
        ([entry("cup", -2)], [], "not -2"),
        ([entry("cup", 17)], [], "not 17"),
        ([entry("cup", True)], [], "not True"),
        ([entry("cup", "two")], [], "not 'two'"),
        ([{"class": "cup"}], [], "a count is .*, not None"),
        ([entry("cup", color="teal")], [], "unknown color 'teal': choose one of red, orange, .*, white"),
        ([entry("cup", colour="red")], [], "unknown key 'colour' in 'include': an entry has class, count, color"),
        ([entry("cup", position=["above", 0])], [], "names entry 0: the earlier ones are none, as it is the first"),
        ([entry("cup"), entry("cat", position=["above", 1])], [], "entry 1 names entry 1: the earlier ones are 0"),
        ([entry("cup"), entry("cat", position=["above", -1])], [], "names entry -1"),
        ([entry("cup"), entry("cat"), entry("dog", position=["above", "0"])], [], "names entry '0': .* from 0 to 1"),
        ([entry("cup"), entry("cat", position=["under", 0])], [], "unknown relation 'under': .* left of, right of, ab"),
        ([entry("cup"), entry("cat", position="above")], [], "a position is a relation and .*, not 'above'"),
        (["cup"], [], "'include' must be a list of objects .*, not"),
        ("cup", [], "'include' must be a list of objects .*, not 'cup'"),
        ([entry("cup")], {"cat": 1}, "'exclude' must be a list"),
        ([entry("cup")], [entry("kitten", 1)], "unknown class 'kitten'"),
        ([entry("cup")], [entry("cat", 0)], "a count is an integer of at least 1, not 0"),
        ([entry("cup")], [entry("cat", color="red")], "unknown key 'color' in 'exclude': an entry has class, count"),
    ],
)
def test_malformed_rows_name_the_prompt_and_the_value(include: Any, exclude: Any, message: str) -> None:
    with pytest.raises(RecastError, match=f"the prompt 'a cup' cannot be used: .*{message}"):
        parse({"tag": "colors", "include": include, "exclude": exclude}, "a cup")
