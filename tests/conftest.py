"""Which back ends the tests run on, and how many examples hypothesis draws.

MLX multiplies float32 in TF32 on CUDA; here it is told not to, before it looks: the
tests compare with its operations, and the kernels follow what it is told.
"""

import os
from functools import partial
from pathlib import Path

os.environ["MLX_ENABLE_TF32"] = "0"

import mlx.core as mx
import pytest
from hypothesis import settings

from mlx_flash import flash_attention, tiles, use_backend

# The tests are about the tables, not about what somebody tuned on this machine.
tiles.TUNED_FOLDER = Path(__file__).parent / "no_tuned_tiles"

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=25, database=None
)
settings.register_profile("dev", deadline=None, max_examples=100)
settings.register_profile("nightly", deadline=None, max_examples=1000, database=None)
settings.register_profile("checked", settings.get_profile("ci"), max_examples=3)
settings.load_profile("ci")  # --hypothesis-profile chooses another one

# What a checked run has: the files that try the kernels on many problems, and of them
# these head dims: q and k in registers, fused dk and dv; q and k in threadgroup memory,
# dk and dv apart.
CHECKED_FILES = ("test_forward", "test_backward", "test_features", "test_splitting")
CHECKED_HEAD_DIMS = (16, 128)


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

    parser.addoption(
        "--checked",
        action="store_true",
        help="only the tests of the kernels, on fewer shapes, on the simulator with "
        "all its checks on",
    )


def pytest_configure(config):
    if config.getoption("--checked"):
        config.option.executor = "simulator"
        settings.load_profile("checked")


def pytest_report_header(config):
    checked = ", checked" if config.getoption("--checked") else ""
    return (
        f"mlx {mx.__version__}, kernels on: {config.getoption('--executor')}{checked}"
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("--checked"):
        items[:] = [item for item in items if belongs_to_a_checked_run(item)]


def belongs_to_a_checked_run(item):
    params = getattr(item, "callspec", None) and item.callspec.params
    if item.path.stem not in CHECKED_FILES or not params:
        return False
    if "simulator" not in (
        params.get("backend_name"),
        params.get("kernels_name"),
    ):
        return False
    return params.get("D", 16) in CHECKED_HEAD_DIMS


@pytest.fixture(scope="session", autouse=True)
def checks(request):
    """All checks of the simulator, for every kernel of a checked run."""
    if not request.config.getoption("--checked"):
        yield
        return
    from mlx_flash import simulator  # a Mac may run the tests without it

    with simulator.checked():
        yield


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
    """Gradients by name, for given cotangents of out and (optionally) lse.

    Of q, k, v, and of an additive mask and sinks if the options have them.
    """

    def call(q, k, v, dout, dlse=None, **options):
        primals = {"q": q, "k": k, "v": v}
        mask, sinks = options.get("mask"), options.get("sinks")
        if mask is not None and mask.dtype != mx.bool_:
            primals["mask"] = options.pop("mask")
        if sinks is not None:
            primals["sinks"] = options.pop("sinks")

        def outputs(*arrays):
            inputs = dict(zip(primals, arrays, strict=True))
            if dlse is None:
                return [attention(**inputs, **options)]
            return attention(**inputs, **options, return_lse=True)

        cotangents = [dout] if dlse is None else [dout, dlse]
        _, grads = mx.vjp(outputs, list(primals.values()), cotangents)
        return {f"d{name}": x for name, x in zip(primals, grads, strict=True)}

    return call
