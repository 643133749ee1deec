"""Attention and its gradients in float64 NumPy, and the one tolerance of all tests."""

import math

import mlx.core as mx
import numpy as np

# Distance from 1 to the next larger number, and the smallest positive number.
SPACING = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
SMALLEST = {mx.float32: 2.0**-149, mx.float16: 2.0**-24, mx.bfloat16: 2.0**-133}


def to_numpy(x):
    """The values of an MLX array as float64; bfloat16 has no NumPy counterpart."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


def masked_scores(q, k, scale, causal):
    s = scale * (q @ k.swapaxes(-1, -2))
    if causal:
        Tq, Tk = s.shape[-2:]
        visible = np.arange(Tk) <= np.arange(Tq)[:, None] + Tk - Tq
        s = np.where(visible, s, -np.inf)
    return s


def finite(x):
    return np.where(np.isneginf(x), 0.0, x)


def log_sum_exp(s):
    m = finite(s.max(axis=-1))
    with np.errstate(divide="ignore"):  # a row that sees no key: log(0) = -inf
        return m + np.log(np.exp(s - m[..., None]).sum(axis=-1))


def repeat_heads(x, H):
    """``[B, HKV, T, D]`` as ``[B, H, T, D]``: head h reads h // (H // HKV)."""
    return np.repeat(x, H // x.shape[1], axis=1)


def sum_heads(x, HKV):
    """``[B, H, T, D]`` as ``[B, HKV, T, D]``: the adjoint of :func:`repeat_heads`."""
    B, H, T, D = x.shape
    return x.reshape(B, HKV, H // HKV, T, D).sum(axis=2)


def attention(q, k, v, *, scale, causal):
    """``out`` and ``lse`` of float64 arrays."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    s = masked_scores(q, k, scale, causal)
    lse = log_sum_exp(s)
    p = np.exp(s - finite(lse)[..., None])
    return p @ v, lse


def gradients(q, k, v, dout, dlse, *, scale, causal):
    """``dq``, ``dk`` and ``dv`` of ``sum(dout * out) + sum(dlse * lse)``."""
    HKV = k.shape[1]
    out, lse = attention(q, k, v, scale=scale, causal=causal)
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    s = masked_scores(q, k, scale, causal)
    delta = (dout * out).sum(axis=-1) - dlse
    p = np.exp(s - finite(lse)[..., None])
    dv = p.swapaxes(-1, -2) @ dout
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - delta[..., None])
    dq = scale * (ds @ k)
    dk = scale * (ds.swapaxes(-1, -2) @ q)
    return dq, sum_heads(dk, HKV), sum_heads(dv, HKV)


def native(q, k, v, dout=None, dlse=None, *, scale, causal):
    """The same quantities from MLX's own operations, in the dtype of the inputs.

    ``out`` is ``mx.fast.scaled_dot_product_attention`` and ``lse`` a float32
    ``mx.logsumexp``, both on the CPU: its fallback path covers every shape in both
    directions and is the same on every machine. Rows that see no key are left out of
    the call, because the native result there is the mean of v, and set to 0 and -inf.
    """
    B, H, Tq, _ = q.shape
    HKV, Tk = k.shape[1:3]
    empty = max(Tq - Tk, 0) if causal else 0

    def outputs(q, k, v):
        out = mx.fast.scaled_dot_product_attention(
            q, k, v, scale=scale, mask="causal" if causal else None
        )
        q, k = q.astype(mx.float32), k.astype(mx.float32)
        s = scale * (q.reshape(B, HKV, -1, *q.shape[2:]) @ k[:, :, None].mT)
        if causal:
            hidden = mx.triu(mx.ones(s.shape[-2:]), k=1 + s.shape[-1] - s.shape[-2])
            s = mx.where(hidden == 1, -math.inf, s)
        return out, mx.logsumexp(s, axis=-1).reshape(B, H, -1)

    def pad(x, value):
        widths = [(0, 0), (0, 0), (empty, 0)] + [(0, 0)] * (x.ndim - 3)
        return np.pad(to_numpy(x), widths, constant_values=value)

    with mx.stream(mx.cpu):
        q = q[:, :, empty:]
        if dout is None:
            out, lse = outputs(q, k, v)
            return {"out": pad(out, 0.0), "lse": pad(lse, -np.inf)}
        (out, lse), (dq, dk, dv) = mx.vjp(
            outputs, [q, k, v], [dout[:, :, empty:], dlse[:, :, empty:]]
        )
        return {
            "out": pad(out, 0.0),
            "lse": pad(lse, -np.inf),
            "dq": pad(dq, 0.0),
            "dk": to_numpy(dk),
            "dv": to_numpy(dv),
        }


def truth(q, k, v, dout=None, dlse=None, *, scale, causal):
    """The same quantities in float64."""
    out, lse = attention(q, k, v, scale=scale, causal=causal)
    values = {"out": out, "lse": lse}
    if dout is not None:
        grads = gradients(q, k, v, dout, dlse, scale=scale, causal=causal)
        values |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return values


def rounding(q, k, v, dout=None, dlse=None, *, scale, causal, dtype):
    """Size of the rounding errors that the terms of each sum carry, per element.

    Each line is a line of the equations with its terms squared: independent errors
    add in quadrature. Tensors that a kernel stores or multiplies in the dtype (p, ds,
    out) carry one spacing of the dtype; a float32 sum of n terms carries sqrt(n)
    spacings of float32. The error of an exponent becomes a relative error of p.
    """
    H, HKV, D, Tq, Tk = q.shape[1], k.shape[1], q.shape[3], q.shape[2], k.shape[2]
    low, single = SPACING[dtype], SPACING[mx.float32]
    keys, values = repeat_heads(k, H), repeat_heads(v, H)
    s = masked_scores(q, keys, scale, causal)
    out, lse = attention(q, k, v, scale=scale, causal=causal)
    p = np.exp(s - finite(lse)[..., None])
    lse_size = np.abs(finite(lse))[..., None]
    s_size = abs(scale) * np.sqrt(q**2 @ (keys**2).swapaxes(-1, -2))

    s_error = single * (np.sqrt(D) * s_size + lse_size + np.sqrt(Tk))
    p_error = p * (low + s_error)
    sizes = {
        "out": np.sqrt(p_error**2 @ values**2),
        "lse": (p * s_error).sum(axis=-1),
    }
    if dout is not None:
        delta = (dout * out).sum(axis=-1, keepdims=True) - dlse[..., None]
        delta_size = np.sqrt(((dout * out) ** 2).sum(axis=-1) + dlse**2)[..., None]
        dp = dout @ values.swapaxes(-1, -2)
        dp_size = np.sqrt(dout**2 @ (values**2).swapaxes(-1, -2))
        delta_error = (low + single * np.sqrt(D)) * delta_size
        dp_error = single * np.sqrt(D) * dp_size
        ds_error = np.sqrt(
            (p_error * (dp - delta)) ** 2 + p**2 * (dp_error**2 + delta_error**2)
        )
        p_error = p * (low + s_error + single * np.sqrt(Tq))
        dv = p_error.swapaxes(-1, -2) ** 2 @ dout**2
        dk = ds_error.swapaxes(-1, -2) ** 2 @ q**2
        sizes["dq"] = abs(scale) * np.sqrt(ds_error**2 @ keys**2)
        sizes["dk"] = abs(scale) * np.sqrt(sum_heads(dk, HKV))
        sizes["dv"] = np.sqrt(sum_heads(dv, HKV))
    return sizes


def finite_differences(function, x, step=1e-5):
    """Gradient of a scalar function of a float64 array, by central differences."""
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        shift = np.zeros_like(x)
        shift[index] = step
        gradient[index] = (function(x + shift) - function(x - shift)) / (2 * step)
    return gradient


def spacing_at_largest(values, dtype):
    """Spacing of the numbers of a dtype at the largest magnitude of an array."""
    largest = np.abs(values).max(initial=0.0)
    power = 2.0 ** math.floor(math.log2(largest)) if largest else 0.0
    return max(SPACING[dtype] * power, SMALLEST[dtype])


def largest_error(actual, expected):
    """``(error, index)`` of the worst element; a NaN anywhere is the worst."""
    errors = np.abs(actual - expected)
    index = np.unravel_index(errors.argmax(), errors.shape)
    return float(errors[index]), tuple(map(int, index))


def relative_error(actual, expected):
    """Largest error over largest expected magnitude."""
    return largest_error(to_numpy(actual), expected)[0] / np.abs(expected).max()


def assert_within_bound(
    actual, q, k, v, dout=None, dlse=None, *, scale=None, causal=False
):
    """Assert that results are as accurate as their dtype allows.

    The rule, for each name in ``actual``, in the largest absolute error ``err``::

        err(actual, truth) <= 2 * err(native at the same dtype, truth) + 2 * ulp(truth)

    where ``ulp(truth)`` is the spacing of the dtype at the largest magnitude of truth.
    A native error is a sample: with few terms it may be 0 by luck, or by design. With
    one key, for example, ``ds = p (dp - delta)`` is exactly 0 in truth and natively;
    but a backward that recomputes p takes delta from the rounded out and p from an lse
    rounded to float32, which the native operation does not store. So the native error
    counts as no less than the rounding errors of the terms that truth is a sum of
    (:func:`rounding`). On random inputs the two are about equal.

    A native result that is not finite (float16 scores overflow) does not count. Rows
    that see no key must be exactly 0 and -inf.

    Args:
        actual: Results by name, any of out, lse, dq, dk, dv.
        q: Queries, as given to the function under test.
        k: Keys.
        v: Values.
        dout: Cotangent of out, where gradients are checked.
        dlse: Cotangent of lse. Default: zeros.
        scale: Default: ``D ** -0.5``.
        causal: Whether the mask is causal.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if dout is not None and dlse is None:
        dlse = mx.zeros(q.shape[:3])
    arrays = [x for x in (q, k, v, dout, dlse) if x is not None]
    doubles = [to_numpy(x) for x in arrays]
    dtype = mx.result_type(q, k, v)
    options = {"scale": scale, "causal": causal}
    expected = truth(*doubles, **options)
    terms = rounding(*doubles, **options, dtype=dtype)
    # The dtype of the results is the promoted one, so is that of the native call.
    q, k, v = (x.astype(dtype) for x in arrays[:3])
    own = native(q, k, v, *arrays[3:], **options)

    for name, result in actual.items():
        kind = mx.float32 if name == "lse" else dtype
        assert result.dtype == kind, f"{name} has dtype {result.dtype}, not {kind}"
        want, got = expected[name], to_numpy(result)
        assert got.shape == want.shape, (
            f"{name} has shape {got.shape}, not {want.shape}"
        )
        if name in ("out", "lse", "dq"):
            empty = np.isneginf(expected["lse"])
            exact = -np.inf if name == "lse" else 0.0
            assert (got[empty] == exact).all(), f"{name} of an empty row is not {exact}"
        if name == "lse":
            got, want, own["lse"] = (
                np.where(empty, 0.0, x) for x in (got, want, own["lse"])
            )
        error, index = largest_error(got, want)
        native_error, _ = largest_error(own[name], want)
        counted = native_error if math.isfinite(native_error) else 0.0
        least = terms[name].max()
        ulp = spacing_at_largest(want, kind)
        assert error <= 2 * max(counted, least) + 2 * ulp, (
            f"{name} {kind} {list(result.shape)}: error {error:.3g} at {index} "
            f"(got {got[index]:.7g}, expected {want[index]:.7g}), native error "
            f"{native_error:.3g}, rounding of the terms {least:.3g}, ulp {ulp:.3g}"
        )


def assert_equal_up_to_rounding(actual, expected, magnitude=0.0, dtype=mx.float32):
    """Assert that two computations of one quantity agree, without an oracle.

    The largest difference may be 32 spacings of the dtype at the largest magnitude:
    the rounding errors of some 100 terms in quadrature, on both sides.

    Args:
        actual: MLX or NumPy array.
        expected: MLX or NumPy array, or a number.
        magnitude: Largest magnitude of the terms, where terms cancel.
        dtype: Dtype that the results were rounded to.
    """
    actual, expected = (
        to_numpy(x) if isinstance(x, mx.array) else np.asarray(x, np.float64)
        for x in (actual, expected)
    )
    expected = np.broadcast_to(expected, actual.shape)
    error, index = largest_error(actual, expected)
    bound = 32 * SPACING[dtype] * max(np.abs(expected).max(), magnitude)
    assert error <= bound, (
        f"error {error:.3g} at {index} (got {actual[index]:.7g}, "
        f"expected {expected[index]:.7g}), bound {bound:.3g}"
    )


def assert_bit_equal(actual, expected):
    """Assert that two MLX arrays hold the same bits, NaN included."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    same = mx.view(actual, mx.uint8) == mx.view(expected, mx.uint8)
    assert mx.all(same).item(), f"{mx.sum(~same).item()} bytes differ"
