"""What happens before imports happens for the command alone."""

import os
import signal
import sys

import pytest

from recast import _start


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (["python", "-m", "recast", "run"], True),
        (["python", "-X", "dev", "-m", "recast"], True),
        (["python", "-m", "mytrainer.train", "recast"], False),
        (["python", "-m", "recast.integrations.flow_factory", "config.yaml"], False),
    ],
)
def test_only_the_command_itself_is_prepared(
    words: list[str], taken: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Another module that imports this package first keeps its import path and its Ctrl-C."""
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "path", [os.getcwd(), "elsewhere"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _start.prepare()
        assert (signal.getsignal(signal.SIGINT) is _start.interrupt) == taken
        assert sys.path == (["elsewhere"] if taken else [os.getcwd(), "elsewhere"])
    finally:
        signal.signal(signal.SIGINT, before)
