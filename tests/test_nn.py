"""``mlx_flash.nn.MultiHeadAttention`` beside its twin in ``mlx.nn``."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import mlx_flash.nn
from mlx_flash import use_backend
from oracle import assert_equal_up_to_rounding

B, Tq, Tk, DIMS, H = 2, 17, 25, 64, 4
SIZES = [
    {},
    {"bias": True},
    {
        "query_input_dims": 24,
        "key_input_dims": 40,
        "value_input_dims": 16,
        "value_dims": 32,
        "value_output_dims": 48,
        "bias": True,
    },
]


@pytest.fixture(autouse=True)
def on_the_reference():
    with use_backend("reference"):
        yield


def inputs(layer):
    shapes = [
        (B, T, projection.weight.shape[1])
        for T, projection in (
            (Tq, layer.query_proj),
            (Tk, layer.key_proj),
            (Tk, layer.value_proj),
        )
    ]
    return [mx.random.normal(shape) for shape in shapes]


def weights(layer):
    return tree_flatten(layer.parameters())


def array_mask(causal, window):
    own, keys = mx.arange(Tq)[:, None] + Tk - Tq, mx.arange(Tk)
    visible = mx.ones((Tq, Tk), mx.bool_)
    if causal:
        visible &= keys <= own
    if window is not None:
        visible &= keys > own - window
    return visible


@pytest.mark.parametrize("sizes", SIZES, ids=["", "bias", "all dims"])
def test_weights_load_in_both_directions_and_results_agree(sizes):
    ours = mlx_flash.nn.MultiHeadAttention(DIMS, H, **sizes)
    twin = nn.MultiHeadAttention(DIMS, H, **sizes)
    arrays = inputs(twin)
    for source, target in ((twin, ours), (ours, twin)):
        target.load_weights(weights(source))
        assert_equal_up_to_rounding(ours(*arrays), twin(*arrays))
        twin.query_proj.weight += 0.1


@pytest.mark.parametrize("window", [None, 6])
def test_causal_and_window_equal_an_array_mask(window):
    ours = mlx_flash.nn.MultiHeadAttention(DIMS, H, causal=True, window=window)
    twin = nn.MultiHeadAttention(DIMS, H)
    twin.load_weights(weights(ours))
    arrays = inputs(twin)
    mask = array_mask(True, window)
    assert_equal_up_to_rounding(ours(*arrays), twin(*arrays, mask))

    def gradients(layer, *mask):
        def loss(layer):
            return layer(*arrays, *mask).square().sum()

        return dict(tree_flatten(nn.value_and_grad(layer, loss)(layer)[1]))

    expected = gradients(twin, mask)
    for name, x in gradients(ours).items():
        assert_equal_up_to_rounding(x, expected[name])


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
def test_array_mask_equals_the_twin(additive):
    ours = mlx_flash.nn.MultiHeadAttention(DIMS, H)
    twin = nn.MultiHeadAttention(DIMS, H)
    twin.load_weights(weights(ours))
    mask = array_mask(True, 9)
    if additive:
        mask = mx.where(mask, 0.0, mx.finfo(mx.float32).min)
    arrays = inputs(twin)
    assert_equal_up_to_rounding(ours(*arrays, mask), twin(*arrays, mask))


@pytest.mark.parametrize("HKV", [1, 2])
def test_grouped_heads_equal_repeated_ones(HKV):
    sizes = {"value_dims": 32, "bias": True}
    ours = mlx_flash.nn.MultiHeadAttention(DIMS, H, num_kv_heads=HKV, **sizes)
    twin = nn.MultiHeadAttention(DIMS, H, **sizes)

    def repeated(x):  # the rows of a head, for each query head of its group
        heads = x.reshape(HKV, -1, *x.shape[1:])
        return mx.repeat(heads, H // HKV, axis=0).reshape(-1, *x.shape[1:])

    twin.load_weights(
        [
            (name, repeated(x) if name.startswith(("key", "value")) else x)
            for name, x in weights(ours)
        ]
    )
    arrays = inputs(twin)
    assert_equal_up_to_rounding(ours(*arrays), twin(*arrays))


def test_rope_sees_queries_at_the_last_positions():
    rope = nn.RoPE(DIMS // H)
    ours = mlx_flash.nn.MultiHeadAttention(DIMS, H, causal=True, rope=rope)
    x = mx.random.normal((B, Tk, DIMS))
    whole = ours(x, x, x)
    assert_equal_up_to_rounding(ours(x[:, -Tq:], x, x), whole[:, -Tq:])
    ours.rope = None
    assert not mx.allclose(ours(x, x, x), whole, atol=1e-3).item()
    ours.rope = lambda x, offset=0: rope(x, offset=offset + 5)
    assert_equal_up_to_rounding(ours(x, x, x), whole)


def test_rope_adds_no_parameters():
    plain, rotated = (
        mlx_flash.nn.MultiHeadAttention(DIMS, H, rope=rope)
        for rope in (None, nn.RoPE(DIMS // H))
    )
    assert [name for name, _ in weights(plain)] == [
        name for name, _ in weights(rotated)
    ]
    plain.load_weights(weights(rotated))


def test_takes_its_place_in_a_layer_of_mlx():
    layer = nn.TransformerEncoderLayer(DIMS, H)
    x = mx.random.normal((B, Tq, DIMS))
    expected = layer(x, None)
    attention = mlx_flash.nn.MultiHeadAttention(DIMS, H)
    attention.load_weights(weights(layer.attention))
    layer.attention = attention
    assert_equal_up_to_rounding(layer(x, None), expected)


@pytest.mark.parametrize(
    "sizes",
    [{"num_kv_heads": 3}, {"num_kv_heads": 8}, {"num_kv_heads": 0}, {"value_dims": 30}],
    ids=str,
)
def test_heads_that_do_not_divide_raise(sizes):
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads"):
        mlx_flash.nn.MultiHeadAttention(DIMS, H, **sizes)


def test_memory_is_linear_in_the_length():
    layer = mlx_flash.nn.MultiHeadAttention(8, 1, causal=True, window=16)

    def peak(T):
        x = mx.random.normal((1, T, 8))
        mx.eval(x, layer.parameters())
        mx.reset_peak_memory()
        before = mx.get_active_memory()

        def loss(layer):
            return layer(x, x, x).sum()

        mx.eval(nn.value_and_grad(layer, loss)(layer))
        return mx.get_peak_memory() - before

    scores = 4 * 4096**2
    assert peak(4096) < scores / 4
