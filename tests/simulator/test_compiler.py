"""Finding a compiler, caching what it builds, several processes at once."""

import subprocess
import sys

import pytest

from mlx_flash import simulator
from mlx_flash.simulator import compiler

VISIBLE = 'extern "C" __attribute__((visibility("default"))) '
BUILD_AND_CALL = """
import sys
from pathlib import Path
from mlx_flash.simulator import compiler
compiler.cache_folder = lambda: Path(sys.argv[1])
library = compiler.build(sys.argv[2], "answer")
print(compiler.load(library).answer())
"""


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_missing_compiler_is_reported_with_what_to_install(monkeypatch):
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(simulator.SimulatorError, match=r"no C\+\+ compiler.*g\+\+"):
        compiler.find_compiler.__wrapped__()


def test_named_compiler_is_used_with_its_arguments(monkeypatch):
    monkeypatch.setattr(compiler.shutil, "which", lambda name: f"/opt/{name}")
    monkeypatch.setenv("CXX", "my-cxx --target=host")
    assert compiler.find_compiler.__wrapped__() == ("/opt/my-cxx", "--target=host")


def test_same_text_is_compiled_once(empty_cache, monkeypatch):
    text = VISIBLE + "int one() { return 1; }"
    first = compiler.build(text, "one")
    monkeypatch.setattr(compiler.subprocess, "run", None)
    assert compiler.build(text, "one") == first
    assert [path.name for path in empty_cache.iterdir()] == [first.name]


def test_changed_text_is_compiled_anew(empty_cache):
    one = compiler.build(VISIBLE + "int value() { return 1; }", "value")
    two = compiler.build(VISIBLE + "int value() { return 2; }", "value")
    assert (compiler.load(one).value(), compiler.load(two).value()) == (1, 2)


def test_processes_that_compile_the_same_text_at_once_all_succeed(tmp_path):
    text = VISIBLE + "int answer() { return 42; }"
    command = [sys.executable, "-c", BUILD_AND_CALL, str(tmp_path), text]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert [process.communicate()[0].strip() for process in running] == ["42"] * 4
    assert len(list(tmp_path.iterdir())) == 1


def test_failed_compilation_leaves_nothing_behind(empty_cache):
    with pytest.raises(simulator.SimulatorError, match="does not compile"):
        compiler.build("this is not C++", "bad")
    assert list(empty_cache.iterdir()) == []
