"""`recast rewards setup` on copies whose code would fail if it were run, through the command line."""

import hashlib
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from recast.cli import app
from recast.errors import RecastError
from recast.rewards import setup

SCRIPT = "inference_qwen/UnifiedReward-2.0-inference/point_score_ACS_image_generation.py"
MODULE = "hpsv3/dataset/data_collator_qwen.py"
TEMPLATE = "Grade this.\n- Alignment: 'x' {y} \"z\"\nCaption: [{prompt}]"
# Strings and an f-string beside each other, as the published script has them.
CODE = """from nothing.at.all import run
prompt = ''
problem = (
    "Grade this.\\n"
    "- Alignment: 'x' {y} \\"z\\"\\n"
    f"Caption: [{prompt}]"
)
images = [''] ; run(1 / 0)
"""
INSTRUCTION = ("\nRate {text_prompt} \n\n", "\nNow: <|Reward|>\n\nEND\n")


@pytest.fixture(autouse=True)
def data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


def known(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> str:
    """Let a text be the published one of a reward; returns its SHA-256."""
    found = hashlib.sha256(text.encode()).hexdigest()
    source = setup.SOURCES[name]
    fields = (source.option, source.origin, source.remedy, source.file, source.names, found)
    monkeypatch.setitem(setup.SOURCES, name, setup.Source(*fields))
    return found


def clone(folder: Path, file: str, code: str) -> Path:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(code)
    return folder


def wheel(path: Path, file: str, code: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(file, code)
    return path


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["rewards", "setup", *map(str, arguments)])


def error(*arguments: str | Path) -> str:
    """The one line of a call that ends with code 2."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_a_template_is_taken_out_of_a_clone_and_stored_where_the_reward_looks(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = known(monkeypatch, "unifiedreward", TEMPLATE)
    assert setup.stored("unifiedreward") is None
    result = call("unifiedreward", "--from", clone(tmp_path / "clone", SCRIPT, CODE))
    assert result.exit_code == 0, result.output
    path = data_folder / "recast" / "rewards" / "unifiedreward.txt"
    assert setup.stored("unifiedreward") == path
    assert path.read_bytes() == TEMPLATE.encode()
    assert [each.name for each in path.parent.iterdir()] == ["unifiedreward.txt"]
    for words in (str(path), f"SHA-256 {sha256}", "unifiedreward uses it by default"):
        assert words in result.output


@pytest.mark.parametrize("kind", ["wheel", "clone"])
def test_an_instruction_is_taken_out_of_a_wheel_or_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sha256 = known(monkeypatch, "hpsv3", "".join(INSTRUCTION))
    code = (
        f"import nothing.at.all\nINSTRUCTION = {INSTRUCTION[0]!r}\nprompt_with_special_token = '''{INSTRUCTION[1]}'''"
    )
    copy = wheel(tmp_path / "hpsv3.whl", MODULE, code) if kind == "wheel" else clone(tmp_path / "clone", MODULE, code)
    out = tmp_path / "folder" / "mine.txt"
    result = call("hpsv3", "--from", copy, "--out", out)
    assert result.exit_code == 0, result.output
    assert out.read_bytes() == "".join(INSTRUCTION).encode()
    assert f"hpsv3: {{instruction: {out}}}" in result.output
    assert sha256 in result.output
    assert setup.stored("hpsv3") is None


def test_windows_line_ends_of_a_clone_change_nothing(tmp_path: Path) -> None:
    code = f"INSTRUCTION = '''{INSTRUCTION[0]}'''\nprompt_with_special_token = '''{INSTRUCTION[1]}'''\n"
    folder = clone(tmp_path, MODULE, "")
    (folder / MODULE).write_bytes(code.replace("\n", "\r\n").encode())
    assert setup.extract("hpsv3", folder) == "".join(INSTRUCTION)


def test_another_text_than_the_published_one_is_refused_and_leaves_the_old_file(tmp_path: Path) -> None:
    place = setup.place("unifiedreward")
    place.parent.mkdir(parents=True)
    place.write_text("old {prompt}")
    line = error("unifiedreward", "--from", clone(tmp_path / "clone", SCRIPT, CODE))
    found = hashlib.sha256(TEMPLATE.encode()).hexdigest()[:12]
    assert "is not that of CodeGoat24/UnifiedReward at ff6f520" in line
    assert f"its SHA-256 is {found}…, not 75d52d3ae771…" in line
    assert "set the option template to a file of your own" in line
    assert place.read_text() == "old {prompt}"


@pytest.mark.parametrize(
    ("name", "file", "code", "words"),
    [
        (
            "unifiedreward",
            "README.md",
            "",
            "(No such file or directory): get a copy that has it with `git clone https:",
        ),
        ("hpsv3", "README.md", "", "(No such file or directory): get a copy that has it with `pip download --no-deps"),
        ("unifiedreward", SCRIPT, "question = 'x'", "(nothing is assigned to problem)"),
        ("unifiedreward", SCRIPT, "problem = ask('x')", "(line 1 is not a text)"),
        ("unifiedreward", SCRIPT, "\nproblem = f'{prompt!r}'", "(line 2 is not a text)"),
        ("unifiedreward", SCRIPT, "problem = f'{prompt:>9}'", "(line 1 is not a text)"),
        ("unifiedreward", SCRIPT, "problem = 3", "(line 1 is not a text)"),
        ("unifiedreward", SCRIPT, "problem = (", "('(' was never closed)"),
        ("hpsv3", MODULE, "INSTRUCTION = 'x'", "(nothing is assigned to prompt_with_special_token)"),
    ],
)
def test_a_wrong_folder_is_one_sentence(tmp_path: Path, name: str, file: str, code: str, words: str) -> None:
    line = error(name, "--from", clone(tmp_path / "wrong", file, code))
    assert f"wrong' has no {setup.SOURCES[name].option} of {name} in {setup.SOURCES[name].file}" in line
    assert words in line


def test_files_that_are_no_copy_and_rewards_that_need_none_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.whl").write_bytes(b"not a zip")
    assert "(File is not a zip file)" in error("hpsv3", "--from", tmp_path / "broken.whl")
    assert "(There is no item named" in error("hpsv3", "--from", wheel(tmp_path / "other.whl", "x.py", ""))
    assert "absent.whl' has no instruction" in error("hpsv3", "--from", tmp_path / "absent.whl")
    assert "the reward 'ocr' needs no setup: only unifiedreward and hpsv3" in error("ocr", "--from", tmp_path)


def test_help_has_examples() -> None:
    text = " ".join(call("--help").output.split())
    assert "Example: recast rewards setup unifiedreward --from UnifiedReward" in text
    assert "recast rewards setup hpsv3 --from hpsv3-1.0.0-py3-none-any.whl" in text


def test_a_relative_data_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """So says the XDG specification."""
    monkeypatch.setenv("XDG_DATA_HOME", "data")
    assert setup.place("hpsv3") == Path.home() / ".local/share/recast/rewards/hpsv3.txt"
    with pytest.raises(RecastError, match="needs no setup"):
        setup.extract("clipscore", ".")
