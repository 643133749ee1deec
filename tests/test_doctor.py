"""``python -m mlx_flash doctor``: what it prints, and the exit status."""

import subprocess
import sys

import mlx.core as mx
import pytest

from mlx_flash import doctor, kernels, reference
from mlx_flash.__main__ import main

KERNELS = ("forward", "dq", "dk", "dv", "dkv", "dmask")


def test_kernels_of_this_machine_are_well(request, capsys):
    executor = request.config.getoption("--executor")
    if executor == "reference":
        pytest.skip("no kernels")
    assert main(["doctor", "--backend", executor]) == 0
    text = capsys.readouterr().out
    if executor != "cuda":  # there dk and dv are one kernel for all head dims
        assert all(f"ok      attention_{name} " in text for name in KERNELS)
        assert "ok      lane map" in text
    assert "WRONG" not in text
    assert text.endswith("All is well.\n")


def test_description_names_what_the_machine_has():
    words = doctor.description("simulator")
    assert words["MLX"] == mx.__version__
    assert words["back end"] == doctor.backend()
    assert words["kernels on"] == "simulator"
    assert words["tiles"] == "of the tables"
    assert doctor.description("reference")["compiler"] == "none"


@pytest.fixture
def well(monkeypatch):
    """Kernels that are the reference."""
    for name in ("attention_forward", "attention_backward"):
        function = getattr(reference, name)

        def kernel(*arrays, backend, precise, function=function, **options):
            return function(*arrays, **options)

        monkeypatch.setattr(kernels, name, kernel)
    monkeypatch.setattr(kernels, "check_lane_map", lambda where: None)


@pytest.mark.usefixtures("well")
@pytest.mark.parametrize("fault", ["q", "k", "v", "mask", "sinks", "nan", "lse"])
def test_wrong_kernel_is_noticed(monkeypatch, capsys, fault):
    forward, backward = kernels.attention_forward, kernels.attention_backward

    def wrong_forward(*arrays, **options):
        out, lse = forward(*arrays, **options)
        return (out * mx.nan, lse) if fault == "nan" else (out, lse + 0.5)

    def wrong_backward(*arrays, **options):
        gradients = backward(*arrays, **options)
        if fault in gradients:
            gradients[fault] = gradients[fault] * 1.1
        return gradients

    if fault in ("nan", "lse"):
        monkeypatch.setattr(kernels, "attention_forward", wrong_forward)
    else:
        monkeypatch.setattr(kernels, "attention_backward", wrong_backward)
    assert main(["doctor", "--backend", "simulator"]) == 1
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert "checks failed" in text


@pytest.mark.usefixtures("well")
def test_check_that_raises_is_a_finding_and_not_the_end(monkeypatch, capsys):
    def check(where):
        raise kernels.LaneMapError("another lane map")

    monkeypatch.setattr(kernels, "check_lane_map", check)
    assert main(["doctor", "--backend", "simulator"]) == 1
    text = capsys.readouterr().out
    assert "FAILED  of the GPU: LaneMapError: another lane map" in text
    assert "ok      attention_forward" in text
    assert "1 of 8 checks failed" in text


@pytest.mark.usefixtures("well")
def test_progress_is_drawn_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["doctor", "--backend", "simulator"]) == 0
    captured = capsys.readouterr()
    assert "of the GPU" in captured.err
    assert "8/8" in captured.err
    assert "\r" not in captured.out


@pytest.mark.parametrize("there", [True, False])
def test_kernels_run_on_the_simulator_where_it_is_installed(monkeypatch, there):
    monkeypatch.setattr(doctor, "backend", lambda: "reference")
    monkeypatch.setattr(doctor, "cpp_compiler", lambda: "c++" if there else None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name)
    assert doctor.place_of_kernels() == ("simulator" if there else "reference")


def test_back_end_that_is_missing_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert main(["doctor", "--backend", "metal"]) == 1
    assert "needs a Mac" in capsys.readouterr().out


def test_command_line():
    command = [sys.executable, "-m", "mlx_flash"]
    run = subprocess.run(
        [*command, "doctor", "--backend", "reference"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "No kernel was checked" in run.stdout
    assert run.stderr == ""
    assert subprocess.run(command, capture_output=True).returncode == 2
