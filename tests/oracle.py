"""Attention and its gradients in float64 NumPy, and the one tolerance of all tests."""

import math

import mlx.core as mx
import numpy as np

# Distance from 1 to the next larger number, and the smallest positive number.
SPACING = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
SMALLEST = {mx.float32: 2.0**-149, mx.float16: 2.0**-24, mx.bfloat16: 2.0**-133}


def to_numpy(x):
    """The values of an MLX array as float64; bfloat16 has no NumPy counterpart."""
    if isinstance(x, mx.array):
        x = np.array(x.astype(mx.float32))
    return x.astype(np.float64)


def mask_with_four_axes(mask):
    """Leading axes of size 1 added to the shape."""
    return mask.reshape([1] * (4 - mask.ndim) + list(mask.shape))


def is_additive(mask):
    return mask is not None and mask.dtype not in (mx.bool_, np.bool_)


def visibility(Tq, Tk, *, causal, window, mask, segment_ids):
    """Which keys each query sees, ``[B or 1, H or 1, Tq, Tk]``."""
    own = np.arange(Tq)[:, None] + Tk - Tq
    keys = np.arange(Tk)
    visible = np.ones((1, 1, Tq, Tk), bool)
    if causal:
        visible = visible & (keys <= own)
    if window is not None:
        left, right = (window - 1, 0) if isinstance(window, int) else window
        if left is not None:
            visible = visible & (keys >= own - left)
        if right is not None:
            visible = visible & (keys <= own + right)
    if segment_ids is not None:
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids,) * 2
        q_ids, k_ids = (np.array(ids) for ids in pair)
        visible = visible & (q_ids[:, None, :, None] == k_ids[:, None, None, :])
    if mask is not None:
        mask = mask_with_four_axes(mask)
        hidden = to_numpy(mask) < -6e35 if is_additive(mask) else ~np.array(mask)
        visible = visible & ~hidden
    return visible


class Scores:
    """The scores of one call, in float64, and what their gradients need.

    Attributes:
        s: ``[B, H, Tq, Tk]``, -inf where a key is not seen.
        slope: Derivative of the softcap; 1 without one.
        size: Size of the terms of q k^T, added in quadrature.
        added: Magnitudes that are added to it: of the cap and of the mask.
    """

    def __init__(self, q, k, *, scale, softcap=None, mask=None, **masks):
        k = repeat_heads(k, q.shape[1])
        visible = visibility(q.shape[2], k.shape[2], mask=mask, **masks)
        s = scale * (q @ k.swapaxes(-1, -2))
        self.size = abs(scale) * np.sqrt(q**2 @ (k**2).swapaxes(-1, -2))
        self.slope, self.added = np.ones_like(s), np.zeros_like(s)
        if softcap is not None:
            capped = np.tanh(s / softcap)
            s, self.slope = softcap * capped, 1 - capped**2
            self.added = self.added + softcap
        if is_additive(mask):
            values = np.where(visible, to_numpy(mask_with_four_axes(mask)), 0.0)
            s, self.added = s + values, self.added + np.abs(values)
        self.s = np.where(visible, s, -np.inf)


def finite(x):
    return np.where(np.isneginf(x), 0.0, x)


def log_sum_exp(s, sinks):
    """Over the keys and the sink of a head: ``[B, H, Tq]``."""
    z = np.full(s.shape[1], -np.inf) if sinks is None else sinks
    z = np.broadcast_to(z[:, None, None], (*s.shape[:3], 1))
    s = np.concatenate([s, z], axis=-1)
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


def sum_to_mask(x, mask):
    """``[B, H, Tq, Tk]`` in the shape of a mask: the adjoint of its broadcast."""
    sizes = mask_with_four_axes(mask).shape
    lacking = tuple(axis for axis, n in enumerate(sizes) if n == 1)
    return x.sum(axis=lacking, keepdims=True).reshape(mask.shape)


def with_defaults(*, scale, sinks=None, **options):
    """The options of a call, as :class:`Scores` wants them, and the sinks."""
    defaults = {"causal": False, "window": None, "segment_ids": None}
    sinks = None if sinks is None else to_numpy(sinks)
    return {"scale": scale} | defaults | options, sinks


def attention(q, k, v, **options):
    """``out`` and ``lse`` of float64 arrays."""
    options, sinks = with_defaults(**options)
    s = Scores(q, k, **options).s
    lse = log_sum_exp(s, sinks)
    p = np.exp(s - finite(lse)[..., None])
    return p @ repeat_heads(v, q.shape[1]), lse


def gradients(q, k, v, dout, dlse, **options):
    """Those of ``sum(dout * out) + sum(dlse * lse)``, by name.

    Of q, k, v, of the mask if it is additive and of the sinks if there are any.
    """
    out, lse = attention(q, k, v, **options)
    options, sinks = with_defaults(**options)
    scale, mask, HKV = options["scale"], options.get("mask"), k.shape[1]
    scores = Scores(q, k, **options)
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    delta = (dout * out).sum(axis=-1) - dlse
    p = np.exp(scores.s - finite(lse)[..., None])
    dv = p.swapaxes(-1, -2) @ dout
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - delta[..., None])
    dx = ds * scores.slope
    dk = scale * (dx.swapaxes(-1, -2) @ q)
    grads = {
        "dq": scale * (dx @ k),
        "dk": sum_heads(dk, HKV),
        "dv": sum_heads(dv, HKV),
    }
    if is_additive(mask):
        grads["dmask"] = sum_to_mask(ds, mask)
    if sinks is not None:
        p_sink = np.exp(sinks[:, None] - finite(lse))
        grads["dsinks"] = -(p_sink * delta).sum(axis=(0, 2))
    return grads


def native(q, k, v, dout=None, dlse=None, *, scale, sinks=None, **options):
    """The same quantities from MLX's own operations, in the dtype of the inputs.

    ``out`` is ``mx.fast.scaled_dot_product_attention`` with an array mask, or its
    equations where it lacks a feature (softcap) or refuses a dtype (of mask or sinks);
    ``lse`` is a float32 ``mx.logsumexp``. Both are on the CPU: the operation's fallback
    path covers every shape in both directions and is the same on every machine. Rows
    that see no key get no cotangent, because the native result there is the mean of v,
    and count as 0 and -inf.
    """
    B, H, Tq, _ = q.shape
    HKV, Tk = k.shape[1:3]
    softcap, mask = options.pop("softcap", None), options.pop("mask", None)
    defaults = {"causal": False, "window": None, "segment_ids": None}
    visible = mx.array(visibility(Tq, Tk, mask=mask, **(defaults | options)))
    seen = visible.any(axis=-1) if sinks is None else mx.array(True)
    simple = softcap is None and sinks is None and not is_additive(mask)

    def scores(q, k, mask):
        k = mx.repeat(k, H // HKV, axis=1)
        s = (scale * q) @ k.swapaxes(-1, -2)
        if softcap is not None:
            s = softcap * mx.tanh(s / softcap)
        if is_additive(mask):
            s = s + mask_with_four_axes(mask)
        # not -inf: the gradient of a row of -inf is NaN
        return mx.where(visible, s, mx.finfo(s.dtype).min)

    def with_sinks(s, sinks):
        if sinks is None:
            return s
        z = mx.broadcast_to(sinks[:, None, None], (B, H, Tq, 1))
        kind = mx.result_type(s, z)
        return mx.concatenate([s.astype(kind), z.astype(kind)], axis=-1)

    def outputs(q, k, v, mask, sinks):
        if simple:
            out = mx.fast.scaled_dot_product_attention(
                q, k, v, scale=scale, mask=mx.broadcast_to(visible, (B, H, Tq, Tk))
            )
        else:
            p = mx.softmax(with_sinks(scores(q, k, mask), sinks), axis=-1, precise=True)
            out = p[..., :Tk].astype(q.dtype) @ mx.repeat(v, H // HKV, axis=1)
        s = with_sinks(scores(*(x.astype(mx.float32) for x in (q, k)), mask), sinks)
        return out, mx.logsumexp(s.astype(mx.float32), axis=-1)

    with mx.stream(mx.cpu):
        primals = {"q": q, "k": k, "v": v, "mask": mask, "sinks": sinks}
        given = [
            name
            for name, x in primals.items()
            if x is not None and (name != "mask" or is_additive(mask))
        ]

        def of_given(*arrays):
            return outputs(**(primals | dict(zip(given, arrays, strict=True))))

        arrays = [primals[name] for name in given]
        if dout is None:
            (out, lse), grads = of_given(*arrays), []
        else:
            dout = mx.where(seen[..., None], dout, 0)
            dlse = mx.where(seen, dlse, 0)
            (out, lse), grads = mx.vjp(of_given, arrays, [dout, dlse])
        seen = np.array(mx.broadcast_to(seen, (B, H, Tq)))
        values = {
            "out": np.where(seen[..., None], to_numpy(out), 0.0),
            "lse": np.where(seen, to_numpy(lse), -np.inf),
        }
        names = [f"d{name}" for name in given]
        return values | dict(zip(names, map(to_numpy, grads), strict=False))


def truth(q, k, v, dout=None, dlse=None, **options):
    """The same quantities in float64."""
    out, lse = attention(q, k, v, **options)
    values = {"out": out, "lse": lse}
    if dout is not None:
        values |= gradients(q, k, v, dout, dlse, **options)
    return values


def rounding(q, k, v, dout=None, dlse=None, *, dtype, **options):
    """Size of the rounding errors that the terms of each sum carry, per element.

    Each line is a line of the equations with its terms squared: independent errors
    add in quadrature. Tensors that a kernel stores or multiplies in the dtype (p, ds,
    out) carry one spacing of the dtype; a float32 sum of n terms carries sqrt(n)
    spacings of float32. The error of an exponent becomes a relative error of p.
    """
    out, lse = attention(q, k, v, **options)
    options, sinks = with_defaults(**options)
    scale, softcap, mask = (options.get(name) for name in ("scale", "softcap", "mask"))
    _, H, Tq, D = q.shape
    _, HKV, Tk, Dv = v.shape
    low, single = SPACING[dtype], SPACING[mx.float32]
    scores = Scores(q, k, **options)
    keys, values = repeat_heads(k, H), repeat_heads(v, H)
    p = np.exp(scores.s - finite(lse)[..., None])
    lse_size = np.abs(finite(lse))[..., None]

    x_error = single * np.sqrt(D) * scores.size
    s_error = x_error * scores.slope + single * (scores.added + lse_size + np.sqrt(Tk))
    p_error = p * (low + s_error)
    sizes = {
        "out": np.sqrt(p_error**2 @ values**2),
        "lse": (p * s_error).sum(axis=-1),
    }
    if sinks is not None:
        z = sinks[:, None]
        p_sink = np.exp(z - finite(lse))
        sizes["lse"] += p_sink * single * (np.abs(z) + lse_size[..., 0] + np.sqrt(Tk))
    if dout is not None:
        delta = (dout * out).sum(axis=-1, keepdims=True) - dlse[..., None]
        delta_size = np.sqrt(((dout * out) ** 2).sum(axis=-1) + dlse**2)[..., None]
        dp = dout @ values.swapaxes(-1, -2)
        dp_size = np.sqrt(dout**2 @ (values**2).swapaxes(-1, -2))
        delta_error = (low + single * np.sqrt(Dv)) * delta_size
        dp_error = single * np.sqrt(Dv) * dp_size
        ds = p * (dp - delta)
        ds_error = np.sqrt(
            (p_error * (dp - delta)) ** 2 + p**2 * (dp_error**2 + delta_error**2)
        )
        if is_additive(mask):
            # The errors of delta and lse are the same for all keys of a row.
            shared = p * delta_error + np.abs(ds) * single * lse_size
            if mask_with_four_axes(mask).shape[3] == 1:
                shared = shared.sum(axis=-1, keepdims=True)
            of_sum = single**2 * ds.size / mask.size * ds**2
            sizes["dmask"] = np.sqrt(
                sum_to_mask(ds_error**2 + of_sum, mask) + sum_to_mask(shared**2, mask)
            )
        if softcap is not None:
            slope_error = 4 * single + 2 * x_error * scores.slope / softcap
            ds_error = np.sqrt((ds_error * scores.slope) ** 2 + (ds * slope_error) ** 2)
        if sinks is not None:
            p_sink_error = p_sink * (sizes["lse"] + single * np.abs(z))
            dz = (p_sink_error * delta[..., 0]) ** 2 + (
                p_sink * delta_error[..., 0]
            ) ** 2
            sizes["dsinks"] = np.sqrt(dz.sum(axis=(0, 2)))
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
    actual, q, k, v, dout=None, dlse=None, *, scale=None, **options
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
    that see no key must be exactly 0, and -inf where there is no sink.

    Args:
        actual: Results by name, any of out, lse, dq, dk, dv, dmask, dsinks.
        q: Queries, as given to the function under test.
        k: Keys.
        v: Values.
        dout: Cotangent of out, where gradients are checked.
        dlse: Cotangent of lse. Default: zeros.
        scale: Default: ``D ** -0.5``.
        options: The other keyword arguments of the call.
    """
    options["scale"] = q.shape[-1] ** -0.5 if scale is None else scale
    if dout is not None and dlse is None:
        dlse = mx.zeros(q.shape[:3])
    arrays = [x for x in (q, k, v, dout, dlse) if x is not None]
    doubles = [to_numpy(x) for x in arrays]
    dtype = mx.result_type(q, k, v)
    kinds = {"lse": mx.float32} | {
        f"d{name}": options[name].dtype
        for name in ("mask", "sinks")
        if options.get(name) is not None
    }
    expected = truth(*doubles, **options)
    terms = rounding(*doubles, **options, dtype=dtype)
    # The dtype of the results is the promoted one, so is that of the native call.
    q, k, v = (x.astype(dtype) for x in arrays[:3])
    own = native(q, k, v, *arrays[3:], **options)
    scores = Scores(*doubles[:2], **with_defaults(**options)[0])
    keyless = np.isneginf(scores.s).all(axis=-1)

    for name, result in actual.items():
        kind = kinds.get(name, dtype)
        assert result.dtype == kind, f"{name} has dtype {result.dtype}, not {kind}"
        want, got = expected[name], to_numpy(result)
        assert got.shape == want.shape, (
            f"{name} has shape {got.shape}, not {want.shape}"
        )
        if name in ("out", "dq"):
            assert (got[keyless] == 0.0).all(), f"{name} of an empty row is not 0"
        if name == "lse" and options.get("sinks") is None:
            assert (got[keyless] == -np.inf).all(), "lse of an empty row is not -inf"
            got, want, own["lse"] = (finite(x) for x in (got, want, own["lse"]))
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
