"""Which back ends the tests run on, and how many examples hypothesis draws.

MLX multiplies float32 in TF32 on CUDA; here it is told not to, before it looks: the
tests compare with its operations, and the kernels follow what it is told.
"""

import os
from functools import partial

os.environ["MLX_ENABLE_TF32"] = "0"

import mlx.core as mx
import pytest
from hypothesis import settings

from mlx_flash import flash_attention, use_backend

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=25, database=None
)
settings.register_profile("dev", deadline=None, max_examples=100)
settings.register_profile("nightly", deadline=None, max_examples=1000, database=None)
settings.load_profile("ci")  # --hypothesis-profile chooses another one


def default_executor():
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else "simulator"


def pytest_addoption(parser):
    parser.addoption(
        "--executor",
        choices=("metal", "cuda", "simulator", "reference"),
        default=default_executor(),
        help="where the kernels run; 'reference' runs the tests without kernels",
    )


def pytest_report_header(config):
    return f"mlx {mx.__version__}, kernels on: {config.getoption('--executor')}"


def pytest_generate_tests(metafunc):
    """Give a test each back end, or only the kernels.

    A test with ``attention`` or ``backend_name`` runs on the reference and on the
    kernels, one with ``kernels`` on the kernels alone.
    """
    executor = metafunc.config.getoption("--executor")
    if "backend_name" in metafunc.fixturenames:
        names = dict.fromkeys(["reference", executor])
        metafunc.parametrize("backend_name", names, scope="module")
    if "kernels_name" in metafunc.fixturenames:
        names = [] if executor == "reference" else [executor]
        metafunc.parametrize("kernels_name", names, scope="module")


def attention_on(name, *args, **options):
    with use_backend(name):
        return flash_attention(*args, **options)


@pytest.fixture(scope="module")
def attention(backend_name):
    """``flash_attention`` on a back end; its gradient runs there too."""
    return partial(attention_on, backend_name)


@pytest.fixture(scope="module")
def kernels(kernels_name):
    """``flash_attention`` on the kernels."""
    return partial(attention_on, kernels_name)


@pytest.fixture(scope="module")
def gradients(attention):
    """dq, dk and dv by name, for given cotangents of out and (optionally) lse."""

    def call(q, k, v, dout, dlse=None, **options):
        def outputs(q, k, v):
            if dlse is None:
                return [attention(q, k, v, **options)]
            return attention(q, k, v, **options, return_lse=True)

        cotangents = [dout] if dlse is None else [dout, dlse]
        _, grads = mx.vjp(outputs, [q, k, v], cotangents)
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    return call
