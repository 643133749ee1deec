"""Context parallelism: attention over a sequence that is spread over the ranks.

With ``n`` ranks the sequence is cut into ``2 n`` chunks, whose lengths differ by at
most one, and rank ``r`` holds the chunks ``r`` and ``2 n - 1 - r``: an early one, which
sees little of the past, and a late one, which sees much. So every rank has the same
work under a causal mask. Queries stay where they are. Keys and values travel round the
ring of ranks; every rank adds what its queries get from the block that is with it.

The ranks exchange messages while the function is called, not when its result is
evaluated: sends and receives must have one order on all ranks, which lazy evaluation
does not promise. It also keeps a GPU from waiting for another machine, for which macOS
would end its command.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np

from mlx_flash.attention import (
    Attention,
    AttentionGradients,
    differentiable,
    mlx_uses_tf32,
    passes,
)
from mlx_flash.backends import backend
from mlx_flash.options import Options
from mlx_flash.reference import CHUNK, finite
from mlx_flash.validation import check_dtypes, check_shapes, describe, make_options


def ring_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    group: mx.distributed.Group | None = None,
) -> mx.array:
    """Exact self-attention over a sequence that is spread over the ranks of a group.

    The result is this rank's part of what :func:`mlx_flash.flash_attention` computes of
    the whole sequence, and so are the gradients. A rank holds ``L`` of the ``T``
    tokens, those that :func:`shard_sequence` gives it; memory is linear in ``L``. Every
    rank must make the same calls in the same order, gradients included.

    Differentiable once in ``q``, ``k`` and ``v``; the backward goes round the ring a
    second time, and always computes all three gradients.

    Args:
        q: Queries ``[B, H, L, D]``; float32, float16 or bfloat16, any strides.
        k: Keys ``[B, HKV, L, D]``; HKV divides H.
        v: Values ``[B, HKV, L, Dv]``. Mixed dtypes of q, k and v promote.
        scale: Multiplies the scores, dimensionless. Default: ``D ** -0.5``.
        causal: A token sees no later one.
        window: As in ``flash_attention``, counted in tokens of the whole sequence.
        softcap: ``c > 0``: a score ``x`` becomes ``c * tanh(x / c)``.
        group: The ranks. Default: all, ``mx.distributed.init()``. Of one rank:
            ``flash_attention`` in two halves.

    Returns:
        ``[B, H, L, Dv]`` in the promoted dtype.

    Raises:
        ValueError: Shapes, dtypes or numbers are wrong on this rank; or the ranks call
            with different ones, or hold lengths that are not those of
            ``shard_sequence``, which raises on all ranks.
        NotImplementedError: No kernel covers the inputs; or ``mx.compile``,
            ``mx.vmap``, ``mx.jvp`` or a gradient of a gradient is asked for.
        RuntimeError: A rank was lost (from MLX's ring).

    Note:
        The ranks exchange keys and values during the call, which evaluates all that
        they depend on. While MLX records a gradient, it keeps what it evaluates:
        ``mx.checkpoint`` around this function therefore saves no memory.

    Source: Ring Attention, https://arxiv.org/abs/2310.01889.
    """
    check_shapes(q, k, v)
    check_dtypes(q, k, v)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            "[ring_attention] a rank must hold the queries and the keys of the same "
            "tokens; shard q, k and v alike with shard_sequence, got "
            f"{describe(q=q, k=k, v=v)}"
        )
    group = group or mx.distributed.init()
    B, H, L, D = q.shape
    HKV, Dv = v.shape[1], v.shape[3]
    dtype = mx.result_type(q, k, v)
    numbers = (scale, causal, window, softcap)
    call = ((B, H, HKV, D, Dv), str(dtype), *numbers)
    layout = agreed_layout("ring_attention", L, call, group)
    options = make_options(
        D,
        layout.T,
        layout.T,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )
    if B * H * layout.T == 0:
        return mx.zeros((B, H, L, Dv), dtype)
    name = backend()
    # Nothing between two evaluations is freed inside a gradient: the reference must not
    # make more chunks of scores than one in between.
    block = CHUNK if name == "reference" else layout.T
    forward, backward = passes(name, not mlx_uses_tf32())
    ring = Ring(group, layout, options, forward, backward, block)
    # mx.vmap: the first exchange refuses it, in words about the ring.
    attention = differentiable(
        ring.attention_forward,
        ring.attention_backward,
        names=("q", "k", "v"),
        is_kernel=False,
        return_lse=False,
        stream=None,
    )
    out, _ = attention(*(x.astype(dtype) for x in (q, k, v)))
    return out


def shard_sequence(
    x: mx.array, axis: int, *, group: mx.distributed.Group | None = None
) -> mx.array:
    """This rank's part of an array that every rank has.

    Tokens ``[B, T]``, positions ``mx.arange(T)`` for a rotary embedding, targets.

    Args:
        x: Any array, the same on all ranks.
        axis: That of the sequence, of any length ``T``.
        group: The ranks. Default: all, ``mx.distributed.init()``.

    Returns:
        Chunks ``r`` and ``2 n - 1 - r`` of the ``2 n`` of the axis, joined, for rank
        ``r`` of ``n``.

    Raises:
        ValueError: ``x`` has no such axis.
    """
    check_axis("shard_sequence", x, axis)
    group = group or mx.distributed.init()
    layout = Layout(x.shape[axis], group.size())
    before = (slice(None),) * (axis % x.ndim)
    chunks = [x[(*before, rows)] for rows in layout.chunks(group.rank())]
    return mx.concatenate(chunks, axis=axis)


def gather_sequence(
    x: mx.array, axis: int, *, group: mx.distributed.Group | None = None
) -> mx.array:
    """The whole array of which every rank has a part: undoes :func:`shard_sequence`.

    Lazy, as MLX's own operations are: every rank must evaluate it. Differentiable: the
    gradient is this rank's part of the cotangent. It is the right one if every rank
    computes the same loss from the whole array.

    Args:
        x: This rank's part.
        axis: That of the sequence.
        group: The ranks. Default: all, ``mx.distributed.init()``.

    Returns:
        The array, the same on all ranks.

    Raises:
        ValueError: ``x`` has no such axis; or the parts do not belong together, which
            raises on all ranks.
        RuntimeError: A rank was lost (from MLX's ring).
    """
    check_axis("gather_sequence", x, axis)
    group = group or mx.distributed.init()
    x = mx.moveaxis(x, axis, 0)
    L, *others = x.shape
    layout = agreed_layout("gather_sequence", L, (others, axis, str(x.dtype)), group)
    # All ranks must give the same shape: the shorter parts are filled up.
    longest = max(layout.lengths)
    x = mx.pad(x, [(0, longest - L)] + [(0, 0)] * len(others))
    parts = mx.distributed.all_gather(x, group=group)
    parts = parts.reshape(layout.n, longest, *others)
    early, late = [], []
    for rank in range(layout.n):
        first, second = layout.local_chunks(rank)
        early.append(parts[rank, first.rows])
        late.append(parts[rank, second.rows])
    return mx.moveaxis(mx.concatenate([*early, *reversed(late)]), 0, axis)


class Chunk(NamedTuple):
    """A chunk as its rank holds it.

    Attributes:
        start: Place of its first token in the whole sequence.
        rows: Its place in what the rank holds.
    """

    start: int
    rows: slice

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return int(self.rows.stop - self.rows.start)

    def blocks(self, size: int) -> Iterator[Chunk]:
        """Its parts of at most so many tokens."""
        for skipped in range(0, self.length, size):
            first = self.rows.start + skipped
            rows = slice(first, min(first + size, self.rows.stop))
            yield Chunk(self.start + skipped, rows)


@dataclass(frozen=True)
class Layout:
    """How a sequence lies on the ranks.

    Attributes:
        T: Length of the sequence.
        n: Number of ranks.
    """

    T: int
    n: int

    def chunks(self, rank: int) -> tuple[slice, slice]:
        """The two chunks of a rank, in the whole sequence."""
        pieces = 2 * self.n
        first, second = (
            slice(c * self.T // pieces, (c + 1) * self.T // pieces)
            for c in (rank, pieces - 1 - rank)
        )
        return first, second

    def local_chunks(self, rank: int) -> tuple[Chunk, Chunk]:
        """The two chunks of a rank, in what it holds."""
        first, second = self.chunks(rank)
        middle = first.stop - first.start
        return (
            Chunk(first.start, slice(0, middle)),
            Chunk(second.start, slice(middle, middle + second.stop - second.start)),
        )

    @property
    def lengths(self) -> list[int]:
        """How many tokens each rank holds."""
        return [
            sum(chunk.length for chunk in self.local_chunks(rank))
            for rank in range(self.n)
        ]


@dataclass(frozen=True)
class Ring:
    """Attention round the ring, with the passes of a back end for pairs of chunks.

    Attributes:
        group: The ranks.
        layout: Of the sequence.
        options: The numbers of the attention over the whole sequence.
        forward: ``attention_forward`` of the back end.
        backward: ``attention_backward`` of the back end.
        block: The most queries that one call of a pass gets.
    """

    group: mx.distributed.Group
    layout: Layout
    options: Options
    forward: Attention
    backward: AttentionGradients
    block: int

    def attention_forward(
        self, q: mx.array, k: mx.array, v: mx.array
    ) -> tuple[mx.array, mx.array]:
        """This rank's part of out and lse; as ``reference.attention_forward``."""
        out = mx.zeros((*q.shape[:3], v.shape[3]), mx.float32)
        lse = mx.full(q.shape[:3], -math.inf, mx.float32)
        for owner in self.owners():
            if owner != self.rank:
                k, v = self.passed_on(k, v, owner=owner, meanwhile=(out, lse))
            for rows, keys, options in self.pairs(owner):
                out, lse = detached(out, lse)
                so_far = out[:, :, rows], lse[:, :, rows]
                arrays = q[:, :, rows], k[:, :, keys], v[:, :, keys]
                out[:, :, rows], lse[:, :, rows] = merged(
                    so_far, self.forward(*arrays, options=options)
                )
        out, lse = detached(out, lse)
        return out.astype(q.dtype), lse

    def attention_backward(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        out: mx.array,
        lse: mx.array,
        dout: mx.array,
        dlse: mx.array,
    ) -> dict[str, mx.array]:
        """This rank's part of the gradients; as ``reference.attention_backward``.

        With the lse of the whole row, the gradients of a pair of chunks are its exact
        share of those of the sequence. The sums of dk and dv follow their k and v one
        exchange later, so that there are kernels to run during both.
        """
        dtype = q.dtype
        dq = mx.zeros(q.shape, mx.float32)
        dk, dv = (mx.zeros(x.shape, mx.float32) for x in (k, v))
        for owner in self.owners():
            sums = dk, dv
            if owner != self.rank:
                k, v = self.passed_on(k, v, owner=owner, meanwhile=(dq, *sums))
                dk, dv = (mx.zeros(x.shape, mx.float32) for x in (k, v))
            for rows, keys, options in self.pairs(owner):
                dq, dk, dv = detached(dq, dk, dv)
                arrays = q[:, :, rows], k[:, :, keys], v[:, :, keys]
                row_arrays = (x[:, :, rows] for x in (out, lse, dout, dlse))
                add_shares(
                    self.backward(*arrays, *row_arrays, options=options),
                    (dq, rows),
                    (dk, keys),
                    (dv, keys),
                )
            if owner != self.rank:
                sums = self.passed_on(*sums, owner=owner, meanwhile=(dq, dk, dv))
                dk, dv = dk + sums[0], dv + sums[1]
        dk, dv = self.passed_on(dk, dv, owner=self.rank, meanwhile=(dq,))  # home
        dq, dk, dv = (x.astype(dtype) for x in detached(dq, dk, dv))
        return {"q": dq, "k": dk, "v": dv}

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank()

    def owners(self) -> Iterator[int]:
        """Whose block is here in each step: the own one, then that of the rank before.

        And so on, round the ring.
        """
        return ((self.rank - step) % self.layout.n for step in range(self.layout.n))

    def pairs(self, owner: int) -> Iterator[tuple[slice, slice, Options]]:
        """Own rows, keys of another rank and the numbers of their attention.

        For each block of rows and chunk of keys of which some key is seen.
        """
        for chunk in self.layout.local_chunks(self.rank):
            for block in chunk.blocks(self.block):
                for keys in self.layout.local_chunks(owner):
                    options = self.options.shifted(block.start - keys.start)
                    if options.sees_any(block.length, keys.length):
                        yield block.rows, keys.rows, options

    def passed_on(
        self,
        x: mx.array,
        y: mx.array,
        *,
        owner: int,
        meanwhile: tuple[mx.array, ...] = (),
    ) -> tuple[mx.array, mx.array]:
        """Send a block to the next rank, receive one from the rank before.

        Args:
            x: ``[B, HKV, length, D]`` of the block that is here.
            y: ``[B, HKV, length, Dv]`` of it.
            owner: Whose block comes.
            meanwhile: What is evaluated during the first of the two messages.

        Returns:
            x and y of the block that comes.
        """
        n = self.layout.n
        if n == 1:
            return x, y
        sent = mx.concatenate([x, y], axis=-1)
        shape = (*sent.shape[:2], self.layout.lengths[owner], sent.shape[3])
        sent = mx.distributed.send(sent, (self.rank + 1) % n, group=self.group)
        came = mx.distributed.recv(
            shape, sent.dtype, (self.rank - 1) % n, group=self.group
        )
        # A send may block until it is received. If all ranks sent first, all would.
        first, second = (came, sent) if self.rank % 2 else (sent, came)
        evaluate("ring_attention", first, *meanwhile)
        evaluate("ring_attention", second)
        x, y = mx.split(came, [x.shape[3]], axis=-1)
        return x, y


def merged(
    a: tuple[mx.array, mx.array], b: tuple[mx.array, mx.array]
) -> tuple[mx.array, mx.array]:
    """The pair out, lse over two sets of keys, from those over each, in float32."""
    (a_out, a_lse), (b_out, b_lse) = a, b
    m = finite(mx.maximum(a_lse, b_lse))
    a_l, b_l = mx.exp(a_lse - m), mx.exp(b_lse - m)
    l = a_l + b_l
    acc = a_l[..., None] * a_out + b_l[..., None] * b_out
    return mx.where(l == 0.0, 0.0, 1.0 / l)[..., None] * acc, m + mx.log(l)


def add_shares(shares: dict[str, mx.array], *sums: tuple[mx.array, slice]) -> None:
    """Add gradients of q, k and v to rows of their sums, in place."""
    for name, (x, rows) in zip("qkv", sums, strict=True):
        x[:, :, rows] += shares[name]


def detached(*arrays: mx.array) -> tuple[mx.array, ...]:
    """The values, evaluated now, as arrays that hold on to nothing they came from.

    While MLX records a gradient, what it evaluates keeps all that it was computed from:
    without this, what is merged or summed would keep the parts of all steps.
    """
    evaluate("ring_attention", *arrays)
    return tuple(mx.array(np.asarray(x)) for x in arrays)


def agreed_layout(
    function: str, L: int, call: tuple[object, ...], group: mx.distributed.Group
) -> Layout:
    """The layout of a sequence, after the ranks compared what they were called with.

    Without this, a rank that is called with another shape would hang the others.

    Args:
        function: What is called.
        L: How many tokens this rank holds.
        call: What must be equal on all ranks.
        group: The ranks.
    """
    digest = zlib.crc32(repr((function, *call)).encode())
    table = mx.distributed.all_gather(mx.array([[L, digest]], mx.uint32), group=group)
    evaluate(function, table)
    lengths, digests = zip(*cast("list[list[int]]", table.tolist()), strict=True)
    if set(digests) != {digest}:
        others = [rank for rank, other in enumerate(digests) if other != digest]
        raise ValueError(
            f"[{function}] all ranks must make the same call, with the same sizes "
            f"(but for the length), dtypes and numbers, got {call} on rank "
            f"{group.rank()} and something else on ranks {others}"
        )
    layout = Layout(sum(lengths), group.size())
    if list(lengths) != layout.lengths:
        raise ValueError(
            f"[{function}] the ranks must hold the parts that shard_sequence makes of "
            f"a sequence, which of {layout.T} tokens have the lengths "
            f"{layout.lengths}, got {list(lengths)}"
        )
    return layout


def evaluate(function: str, *arrays: mx.array) -> None:
    """Evaluate a message now, with advice where MLX forbids it."""
    try:
        mx.eval(arrays)
    except ValueError as error:
        raise NotImplementedError(
            f"[{function}] mx.compile and mx.vmap of it are not implemented, because "
            "the ranks exchange messages during the call; compile the parts around "
            "it, and fold mapped axes into B by a reshape"
        ) from error


def check_axis(function: str, x: mx.array, axis: int) -> None:
    """Raise ValueError unless the array has the axis."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"[{function}] axis must be one of the {x.ndim} of x, got axis {axis} of "
            f"{describe(x=x)}"
        )
