"""Trains a small byte-level GPT with flash attention; an example, not a framework.

The defaults take about two minutes on two CPU cores and download nothing: the text is
the language reference that every Python installation carries::

    python examples/train_gpt.py
    python examples/train_gpt.py --attention native --out runs/native
    python examples/train_gpt.py --data book.txt --dims 384 --layers 6 --heads 6

With ``--pack`` every paragraph of the text is a document of its own, which sees nothing
of the others in its window::

    python examples/train_gpt.py --pack --context 256 --out runs/packed

Several ranks share the work: every one takes its part of each batch, so that the losses
are those of one process. Here two on one machine::

    mlx.launch -n 2 --backend ring examples/train_gpt.py --out runs/two

The simulator executes the Metal kernels on the CPU, slowly; a tiny run through it::

    python examples/train_gpt.py --backend simulator --out runs/simulator --steps 4 \
        --batch-size 1 --context 32 --layers 1 --dims 32 --heads 2 --sample-bytes 8
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from matplotlib.figure import Figure
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from tqdm import tqdm

from mlx_flash import backend, backends, flash_attention, use_backend
from model import GPT, VOCABULARY, Attention, GPTConfig

HELD_OUT = 0.1  # share of the text, its end, that is only evaluated
EVALUATION_BATCHES = 8
WARMUP = 0.05  # share of the steps in which the learning rate rises
FINAL_RATE = 0.05  # learning rate of the last step, as a share of the highest
BETAS = [0.9, 0.99]
WEIGHT_DECAY = 0.1  # of matrices; norms are not decayed
MAX_GRADIENT_NORM = 1.0

END = b"\0"  # ends a packed document and fills the rest of its window

CHECKPOINT = "checkpoint.safetensors"
PLOT = "loss.png"


def native_attention(
    q: mx.array, k: mx.array, v: mx.array, segment_ids: mx.array | None = None
) -> mx.array:
    mask: str | mx.array = "causal"
    if segment_ids is not None:
        same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        mask = mx.tril(same)  # [B, 1, T, T]
    return mx.fast.scaled_dot_product_attention(
        q, k, v, scale=q.shape[-1] ** -0.5, mask=mask
    )


ATTENTION: dict[str, Attention] = {
    "flash": partial(flash_attention, causal=True),
    "native": native_attention,
}


@dataclass(frozen=True)
class Settings:
    """Everything that decides the curve of losses.

    Args:
        model: Sizes of the model.
        context: Bytes that the model sees at most, ``T``.
        batch_size: Windows per micro-batch, ``B``, of all ranks together.
        accumulate: Micro-batches per step, ``A``.
        steps: Updates of the parameters.
        learning_rate: The highest one, at the end of the warm-up.
        pack: Windows are packed documents instead of any bytes in a row.
        seed: Decides the first parameters, the batches and the sample.
        text_digest: SHA-256 of the text.
    """

    model: GPTConfig
    context: int
    batch_size: int
    accumulate: int
    steps: int
    learning_rate: float
    pack: bool
    seed: int
    text_digest: str

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted per step."""
        return self.accumulate * self.batch_size * self.context


@dataclass
class Run:
    """What training changes: parameters, optimizer state and the losses so far.

    Args:
        model: The model.
        optimizer: Its optimizer.
        training_losses: One per step, so that their number is the step to do next.
        validation_losses: Pairs of steps done and loss on the held-out text.
    """

    model: GPT
    optimizer: optim.Optimizer
    training_losses: list[float] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)


# Text


def read_text(path: Path | None) -> bytes:
    if path is not None:
        return path.read_bytes()
    return "".join(topics[name] for name in sorted(topics)).encode()


def split_text(text: bytes, context: int) -> tuple[np.ndarray, np.ndarray]:
    """The training part and the held-out end of the text, one byte per entry."""
    n_held_out = int(HELD_OUT * len(text))
    if n_held_out <= context:
        needed = math.ceil((context + 1) / HELD_OUT)
        raise ValueError(
            f"the text is too short, got {len(text)} bytes; "
            f"a context of {context} needs {needed}"
        )
    return np.split(np.frombuffer(text, np.uint8), [len(text) - n_held_out])


def every_window(text: np.ndarray, settings: Settings) -> np.ndarray:
    """What batches are drawn from, ``[N, T + 1]``: inputs and the byte after them."""
    if settings.pack:
        return pack(text.tobytes(), settings.context)
    return np.lib.stride_tricks.sliding_window_view(text, settings.context + 1)


def pack(text: bytes, context: int) -> np.ndarray:
    """Whole paragraphs of the text, each with an END, as many as fit in a window.

    A paragraph that is longer than a window is cut into several.
    """
    if END in text:
        raise ValueError("the text holds a zero byte, which --pack needs as an end")
    size = context + 1
    rows = [b""]
    for document in re.split(rb"\n\s*\n", text):
        document += END
        for start in range(0, len(document), size):
            piece = document[start : start + size]
            if len(rows[-1]) + len(piece) > size:
                rows.append(b"")
            rows[-1] += piece
    filled = b"".join(row.ljust(size, END) for row in rows)
    return np.frombuffer(filled, np.uint8).reshape(-1, size)


def training_batch(windows: np.ndarray, settings: Settings, step: int) -> mx.array:
    """Micro-batches ``[A, B, T + 1]``, a pure function of seed and step."""
    places = np.random.default_rng((settings.seed, step)).integers(
        len(windows), size=(settings.accumulate, settings.batch_size)
    )
    return mx.array(windows[places].astype(np.int32))


def validation_batches(windows: np.ndarray, settings: Settings) -> mx.array:
    """The same evenly spaced windows every time, ``[batches, B, T + 1]``."""
    shape = EVALUATION_BATCHES, settings.batch_size
    places = np.linspace(0, len(windows) - 1, math.prod(shape), dtype=int)
    return mx.array(windows[places.reshape(shape)].astype(np.int32))


# Training


def ranks() -> mx.distributed.Group:
    """The processes that train together: those that mlx.launch started, or this one."""
    return mx.distributed.init()


def own_part(batches: mx.array) -> mx.array:
    """The windows of this rank, ``[..., B // ranks, T + 1]``."""
    return mx.split(batches, ranks().size(), axis=-2)[ranks().rank()]


def mean_of_ranks(x: mx.array) -> mx.array:
    return mx.distributed.all_sum(x) / ranks().size()


def new_run(settings: Settings, attention: Attention) -> Run:
    mx.random.seed(settings.seed)
    run = Run(GPT(settings.model, attention), make_optimizer(settings))
    run.optimizer.init(run.model.trainable_parameters())
    return run


def make_optimizer(settings: Settings) -> optim.Optimizer:
    """AdamW with warm-up and cosine schedule; only matrices decay."""
    highest = settings.learning_rate
    n_warmup = math.ceil(WARMUP * settings.steps)
    n_cosine = max(settings.steps - n_warmup, 1)
    schedule = optim.join_schedules(
        [
            optim.linear_schedule(highest / n_warmup, highest, n_warmup),
            optim.cosine_decay(highest, n_cosine, FINAL_RATE * highest),
        ],
        [n_warmup],
    )
    matrices, vectors = (
        optim.AdamW(schedule, BETAS, weight_decay=decay, bias_correction=True)
        for decay in (WEIGHT_DECAY, 0.0)
    )
    return optim.MultiOptimizer(
        [matrices, vectors], [lambda _, parameter: parameter.ndim > 1]
    )


def mean_loss(model: GPT, tokens: mx.array, packed: bool) -> mx.array:
    """Nats per byte of the predictions in ``[B, T + 1]`` windows.

    Of several ranks, the mean of their results is that of all windows together.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if not packed:
        return nn.losses.cross_entropy(model(inputs), targets, reduction="mean")
    ends = inputs == END[0]
    # An END belongs to the document before it, and predicts nothing.
    ids = mx.cumsum(ends, axis=1) - ends  # [B, T]
    losses = nn.losses.cross_entropy(model(inputs, segment_ids=ids), targets)
    return mx.where(ends, 0.0, losses).sum() / mean_of_ranks((~ends).sum())


def mean_validation_loss(model: GPT, batches: mx.array, packed: bool) -> float:
    losses = [mean_loss(model, tokens, packed) for tokens in own_part(batches)]
    return mean_of_ranks(mx.stack(losses).mean()).item()


def make_training_step(
    run: Run, compiled: bool, packed: bool = False
) -> Callable[[mx.array], float]:
    """A function that takes ``[A, B, T + 1]``, updates the run and returns the loss."""
    state = [run.model.state, run.optimizer.state]
    zeros = tree_map(mx.zeros_like, (mx.array(0.0), run.model.trainable_parameters()))
    loss_and_gradients = nn.value_and_grad(run.model, mean_loss)

    def add_micro_batch(mean: tuple, tokens: mx.array, share: float) -> tuple:
        loss, gradients = loss_and_gradients(run.model, tokens, packed)
        return tree_map(lambda a, b: a + share * b, mean, (loss, gradients))

    def update(gradients: dict) -> None:
        gradients, _ = optim.clip_grad_norm(gradients, MAX_GRADIENT_NORM)
        run.optimizer.update(run.model, gradients)

    if compiled:
        compile_step = partial(mx.compile, inputs=state, outputs=state)
        add_micro_batch, update = compile_step(add_micro_batch), compile_step(update)

    def training_step(micro_batches: mx.array) -> float:
        mean = zeros
        for tokens in own_part(micro_batches):
            mean = add_micro_batch(mean, tokens, 1.0 / len(micro_batches))
            mx.eval(mean)  # frees the activations before the next micro-batch
        loss, gradients = nn.average_gradients(mean)
        update(gradients)
        mx.eval(state)
        return loss.item()

    return training_step


def train(
    run: Run, text: bytes, settings: Settings, folder: Path, eval_every: int
) -> float:
    """Train from the run's step to the last one; checkpoint at every evaluation.

    The first rank writes.

    Returns:
        Tokens per second of the median step.
    """
    training_text, held_out = split_text(text, settings.context)
    windows = every_window(training_text, settings)
    validation = validation_batches(every_window(held_out, settings), settings)
    # Worth its compilation on a GPU only; the simulator could not run in a trace.
    on_gpu = mx.default_device() == mx.gpu and backend() != "simulator"
    training_step = make_training_step(run, on_gpu, settings.pack)
    if not run.validation_losses:
        loss = mean_validation_loss(run.model, validation, settings.pack)
        run.validation_losses.append((0, loss))

    seconds = []
    first = len(run.training_losses)
    is_first_rank = ranks().rank() == 0
    steps = tqdm(
        range(first, settings.steps),
        initial=first,
        total=settings.steps,
        disable=not is_first_rank,
    )
    for step in steps:
        start = time.perf_counter()
        loss = training_step(training_batch(windows, settings, step))
        seconds.append(time.perf_counter() - start)
        run.training_losses.append(loss)
        speed = settings.tokens_per_step / seconds[-1]
        steps.set_postfix_str(f"loss {loss:.3f}, {speed:.0f} tokens/s", refresh=False)

        done = step + 1
        if done % eval_every == 0 or done == settings.steps:
            loss = mean_validation_loss(run.model, validation, settings.pack)
            run.validation_losses.append((done, loss))
            if is_first_rank:
                save_checkpoint(folder / CHECKPOINT, run, settings)
                plot_losses(folder / PLOT, run)
    return settings.tokens_per_step / statistics.median(seconds or [math.inf])


# Results


def save_checkpoint(path: Path, run: Run, settings: Settings) -> None:
    """Replace the checkpoint in one go: a reader sees the old or the new one."""
    arrays = {
        "model": run.model.parameters(),
        "optimizer": run.optimizer.state,
        "training_losses": mx.array(run.training_losses),
        "validation_losses": mx.array(run.validation_losses),
    }
    partial_path = path.with_name(f"partial-{path.name}")
    mx.save_safetensors(
        str(partial_path),
        tree_flatten(arrays, destination={}),
        metadata={"settings": json.dumps(asdict(settings))},
    )
    os.replace(partial_path, path)


def load_checkpoint(path: Path, run: Run, settings: Settings) -> None:
    """Continue the run from a checkpoint.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It belongs to a run with other settings.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path} to resume from")
    flat_arrays, metadata = mx.load(str(path), return_metadata=True)
    saved = tree_flatten(json.loads(metadata["settings"]), destination={})
    for name, wanted in tree_flatten(asdict(settings)):
        if saved[name] != wanted:
            raise ValueError(
                f"cannot resume: the checkpoint {path} was written with "
                f"{name} {saved[name]}, got {wanted}"
            )
    arrays = tree_unflatten(flat_arrays)
    run.model.update(arrays["model"])
    run.optimizer.state = arrays["optimizer"]
    run.training_losses = arrays["training_losses"].tolist()
    run.validation_losses = [
        (int(done), loss) for done, loss in arrays["validation_losses"].tolist()
    ]


def plot_losses(path: Path, run: Run) -> None:
    figure = Figure()
    axes = figure.subplots()
    steps_done = range(1, len(run.training_losses) + 1)
    axes.plot(steps_done, run.training_losses, alpha=0.5, label="training")
    axes.plot(*zip(*run.validation_losses, strict=True), "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(path)


def sample(
    model: GPT, settings: Settings, n_bytes: int, temperature: float, top_k: int
) -> str:
    """Text that the model continues a line break with, the same for the same seed."""
    tokens = list(b"\n")
    for key in mx.random.split(mx.random.key(settings.seed), n_bytes):
        window = mx.array([tokens[-settings.context :]])  # [1, T]
        logits = model(window)[0, -1]  # [VOCABULARY]
        smallest_kept = mx.topk(logits, min(top_k, VOCABULARY)).min()
        logits = mx.where(logits < smallest_kept, -math.inf, logits)
        tokens.append(mx.random.categorical(logits / temperature, key=key).item())
        if settings.pack and tokens[-1] == END[0]:
            break
    return bytes(tokens[1:]).decode(errors="replace")


def describe_loss(loss: float) -> str:
    return f"{loss:.3f} nats per byte = {loss / math.log(2):.3f} bits per byte"


def print_summary(run: Run, speed: float, text: str, folder: Path) -> None:
    (_, before), *_, (_, after) = run.validation_losses
    print(
        f"sample\n{text}\n",
        f"loss before    {describe_loss(before)}",
        f"loss after     {describe_loss(after)}",
        f"speed          {speed:.0f} tokens per second",
        f"peak memory    {mx.get_peak_memory() / 2**20:.1f} MiB",
        f"files written  {folder / CHECKPOINT}, {folder / PLOT}",
        sep="\n",
    )


# Command line


def at_least(minimum: int) -> Callable[[str], int]:
    """An argument type: whole numbers from ``minimum`` on."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {minimum}, got {text!r}"
            )
        return int(text)

    return whole_number


def positive(text: str) -> float:
    """An argument type: finite numbers above 0."""
    number = float(text)
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text!r}")
    return number


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small byte-level GPT with flash attention.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    count = at_least(1)
    add = parser.add_argument
    add("--attention", choices=ATTENTION, default="flash", help="flash or MLX's own")
    add("--backend", choices=backends.NAMES, default=backend(), help="what runs flash")
    add("--data", type=Path, help="file to learn; None: Python's manual")
    add("--steps", type=count, default=700, help="updates of the parameters")
    add("--batch-size", type=count, default=8, help="windows per micro-batch")
    add("--accumulate", type=count, default=1, help="micro-batches per step")
    add("--context", type=count, default=64, help="bytes the model sees at most")
    add("--pack", action="store_true", help="windows of whole paragraphs, kept apart")
    add("--layers", type=count, default=2, help="blocks of the model")
    add("--heads", type=count, default=2, help="query heads")
    add("--kv-heads", type=count, default=1, help="key/value heads, divides the heads")
    add("--dims", type=count, default=64, help="width of the model")
    add("--learning-rate", type=positive, default=4e-3, help="after the warm-up")
    add("--seed", type=at_least(0), default=0, help="of parameters, batches and sample")
    add("--eval-every", type=count, default=100, help="steps to the next checkpoint")
    add("--sample-bytes", type=count, default=400, help="length of the sample")
    add("--temperature", type=positive, default=0.7, help="divides the sample's logits")
    add("--top-k", type=count, default=20, help="bytes the sample chooses from")
    add("--out", type=Path, default=Path("runs/gpt"), help="folder for the results")
    add("--resume", action="store_true", help="continue from the checkpoint in --out")
    return parser


def settings_of(args: argparse.Namespace, text: bytes) -> Settings:
    return Settings(
        model=GPTConfig(args.layers, args.heads, args.kv_heads, args.dims),
        context=args.context,
        batch_size=args.batch_size,
        accumulate=args.accumulate,
        steps=args.steps,
        learning_rate=args.learning_rate,
        pack=args.pack,
        seed=args.seed,
        text_digest=hashlib.sha256(text).hexdigest(),
    )


def check_attention(config: GPTConfig, attention: Attention) -> None:
    """Call the attention once, so that it can refuse the sizes before the training."""
    q = mx.zeros((1, config.heads, 1, config.head_dim))
    k = mx.zeros((1, config.kv_heads, 1, config.head_dim))
    attention(q, k, k)


def prepare(args: argparse.Namespace) -> tuple[Run, bytes, Settings]:
    text = read_text(args.data)
    settings = settings_of(args, text)
    for part in split_text(text, args.context):
        every_window(part, settings)  # refuses what it cannot pack
    if settings.batch_size % ranks().size():
        raise ValueError(
            f"the {ranks().size()} ranks must divide the windows of a micro-batch, "
            f"got --batch-size {settings.batch_size}"
        )
    check_attention(settings.model, ATTENTION[args.attention])
    run = new_run(settings, ATTENTION[args.attention])
    if args.resume:
        load_checkpoint(args.out / CHECKPOINT, run, settings)
    args.out.mkdir(parents=True, exist_ok=True)
    return run, text, settings


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        try:
            stack.enter_context(use_backend(args.backend))
            run, text, settings = prepare(args)
        except (OSError, ValueError, NotImplementedError) as problem:
            parser.error(str(problem))
        speed = train(run, text, settings, args.out, args.eval_every)
        if ranks().rank() != 0:
            return
        text_sample = sample(
            run.model, settings, args.sample_bytes, args.temperature, args.top_k
        )
    print_summary(run, speed, text_sample, args.out)


if __name__ == "__main__":
    main()
