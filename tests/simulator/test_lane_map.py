"""The kernels assume Apple's lane map; a probe notices any other before they run."""

import mlx.core as mx
import pytest

from mlx_flash import flash_attention, kernels, simulator, use_backend


@pytest.fixture
def unprobed():
    kernels.check_lane_map.cache_clear()
    yield
    kernels.check_lane_map.cache_clear()


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("seed", [1, 2])
def test_attention_on_another_lane_map_raises(seed):
    q = mx.zeros((1, 1, 8, 16))
    with (
        use_backend("simulator"),
        simulator.lane_map(simulator.permuted_lane_map(seed)),
        pytest.raises(kernels.LaneMapError, match="use_backend\\('reference'\\)"),
    ):
        flash_attention(q, q, q)


@pytest.mark.usefixtures("unprobed")
def test_two_lanes_that_change_places_are_noticed():
    pairs = list(simulator.APPLE_LANE_MAP)
    pairs[30], pairs[31] = pairs[31], pairs[30]
    with simulator.lane_map(pairs), pytest.raises(kernels.LaneMapError):
        kernels.check_lane_map("simulator")
    kernels.check_lane_map("simulator")
