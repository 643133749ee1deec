"""The choice of the back end."""

import mlx.core as mx
import pytest

import mlx_flash
from mlx_flash import backend, flash_attention, use_backend
from oracle import assert_bit_equal
from strategies import Problem


@pytest.fixture(autouse=True)
def restored():
    with use_backend(backend()):
        yield


@pytest.mark.parametrize("gpu", ["metal", "cuda", None])
def test_default_is_the_gpu_of_the_machine_and_else_reference(monkeypatch, gpu):
    monkeypatch.setattr(mlx_flash.backends, "_selected", None)
    monkeypatch.setattr(mx.metal, "is_available", lambda: gpu == "metal")
    monkeypatch.setattr(mx.cuda, "is_available", lambda: gpu == "cuda")
    assert backend() == (gpu or "reference")


def test_plain_call_stays_and_context_is_undone():
    use_backend("reference")
    with use_backend("simulator"):
        assert backend() == "simulator"
        with use_backend("reference"):
            assert backend() == "reference"
        assert backend() == "simulator"
    assert backend() == "reference"


def test_context_is_undone_after_an_exception():
    use_backend("reference")
    with pytest.raises(ZeroDivisionError), use_backend("simulator"):
        _ = 1 / 0
    assert backend() == "reference"


def test_refused_choice_changes_nothing():
    use_backend("simulator")
    with pytest.raises(ValueError, match="unknown back end"):
        use_backend("gpu")
    assert backend() == "simulator"


def test_backward_runs_where_its_forward_ran(kernels_name):
    q, k, v, dout, _ = Problem(H=4, HKV=2).arrays()

    def loss_with(forward_name, backward_name):
        def loss(q, k, v):
            with use_backend(forward_name):
                out = flash_attention(q, k, v)
            use_backend(backward_name)
            return (out * dout).sum()

        return mx.grad(loss, argnums=(0, 1, 2))(q, k, v)

    expected = loss_with(kernels_name, kernels_name)
    for x, y in zip(loss_with(kernels_name, "reference"), expected, strict=True):
        assert_bit_equal(x, y)
