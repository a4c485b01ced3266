"""How the command starts and ends: signals, launchers, folders and outputs that are not there."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recast import _start, cli, processes
from recast.errors import RecastError

RESUME = "{}: run the same command again to resume"
START = [sys.executable, "-c", _start.COMMAND.format(module="recast.cli")]


def run(command: list[str], **options: object) -> tuple[int, str]:
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)  # type: ignore[call-overload]
    return found.returncode, found.stderr


@pytest.mark.parametrize("module", ["numpy", "typer"])
def test_an_interrupt_during_the_imports_is_one_sentence(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("import os, time\nos.kill(os.getpid(), 2)\ntime.sleep(9)")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code, said = run([sys.executable, "-m", "recast", "weigh", "x.json"], env=os.environ | {"PYTHONPATH": path})
    assert (code, said) == (130, "interrupted: run the same command again to resume\n")


@pytest.mark.parametrize("start", [START, [sys.executable, "-m", "recast"]])
def test_the_working_folder_is_not_searched_for_libraries(tmp_path: Path, start: list[str]) -> None:
    for module in ("numpy", "yaml", "typer", "json"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('the wrong module')")
    env = os.environ | {"PYTHONPATH": str(Path(_start.__file__).parents[1])}
    code, said = run([*start, "weigh", "none.json"], cwd=tmp_path, env=env)
    assert (code, said) == (2, "error: none.json: cannot be read: No such file or directory\n")


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        (
            "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
            143,
            "terminated: run the same command again to resume",
        ),
        (
            "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
            130,
            "interrupted: run the same command again to resume",
        ),
        ("sys.exit(0)", 1, ""),
        ("raise PermissionError(13, 'Permission denied', 'there')", 2, "error: there: Permission denied"),
        ("raise BrokenPipeError(32, 'Broken pipe')", 141, ""),
    ],
)
def test_how_a_command_ends(what: str, code: int, said: str) -> None:
    script = f"import os, signal, sys, time\nimport recast.cli as cli\ndef app(**_): {what}\ncli.app = app\ncli.main()"
    assert run([sys.executable, "-c", script]) == (code, f"{said}\n" if said else "")


def test_an_output_that_is_full_and_a_folder_that_is_gone_are_one_sentence(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run([*START, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (found.returncode, found.stderr) == (2, "error: No space left on device\n")
    gone = tmp_path / "gone"
    gone.mkdir()
    script = "import os, sys; os.chdir(sys.argv.pop(1)); os.rmdir(os.getcwd()); os.execv(sys.executable, sys.argv[1:])"
    env = os.environ | {"PYTHONPATH": str(Path(_start.__file__).parents[1])}
    code, said = run([sys.executable, "-c", script, str(gone), *START, "weigh", "x.json"], env=env)
    assert (code, said) == (2, "error: the working folder does not exist any more: change to another one\n")


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "abc"},
        {"RANK": "-1"},
        {"RANK": "1"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "1.5"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"LOCAL_RANK": ""},
        {"RANK": "9" * 400},
    ],
)
def test_variables_of_a_launcher_are_checked(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        importlib.reload(processes)
        with pytest.raises(RecastError, match="the environment variable [A-Z_]+ = .*: launchers"):
            processes.check()
        assert processes.cores() >= 1
    finally:
        monkeypatch.undo()
        importlib.reload(processes)
    processes.check()


def test_a_rank_that_is_no_number_is_one_sentence() -> None:
    code, said = run([*START, "weigh", "x.json"], env=os.environ | {"RANK": "abc"})
    assert code == 2
    assert said.startswith("error: the environment variable RANK = 'abc' must be a whole number")
    assert said.count("\n") == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # a library that is imported changes nothing


def test_the_end_of_another_process_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:27011.\nGLHF!")
    assert cli._known(gloo) == ""  # alone, it is something else
    monkeypatch.setattr(processes, "COUNT", 2)
    said = cli._known(gloo)
    assert said.startswith("another of the 2 processes has ended ([gloo/transport/tcp/pair.cc:553] Connection closed")
    assert "\n" not in said
    assert cli._known(RuntimeError("shapes differ")) == ""
