"""A computed model of one training step on a GPU: bytes, FLOPs, programs and the time that they must take.

The time of a kernel is the longest of four times: its bytes from device memory over that bandwidth; all bytes that its
programs load over the bandwidth of the L2 cache; its products over the rate of the matrix units; and the time of the
busiest multiprocessor, if each program in order goes to the multiprocessor that is free first. The time of a frozen
GEMM is the longer of the times of its products and its bytes. Nothing overlaps with anything else, caches keep nothing
from one kernel to the next, and the host takes no time.

Within one launch the L2 cache keeps bytes that are read by two programs that start close to each other. ``dy`` reads
the upstream gradient of a slot and of ``PART`` columns twice. It is read from memory only once if it has at most
``KEPT_BYTES``. These are an eighth of the cache: half of it, because on A100 and H100 each of its two partitions may
hold a copy of bytes that multiprocessors of both partitions read (NVIDIA's whitepapers); and a quarter of this half,
because programs of several slots run at once. All loads count towards the bandwidth of L2, whether or not they come
from memory.

Every program is counted as the backend launches it: ``model_gate`` compares the grids.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["H200", "VERSIONS", "Chip", "Group", "KernelTime", "StepModel", "Version", "llama_groups"]

BLOCK_TOKENS = 64
SMALL_TILE = 64
"""Rows per program if a slot may have more than ``NARROW_TILE // 2`` narrow columns: registers suffice for no more."""
KEPT_BYTES = 50e6 / 8
"""Bytes that programs of one launch find in the L2 cache again; an H200 has 50 MB."""
NARROW_TILE = 256
"""Largest number of columns per program on the narrow side, for 16-bit products."""
PART = 2048
"""Wide columns in one part of a sum in ``shrink`` and ``ds``."""
TOKEN_BYTES, ADAPTER_BYTES = 2, 4
FLOOR_BYTES = 36
"""Bytes per parameter in the floor: the norm reads 4; AdamW reads weight, gradient and two moments, and writes all
four."""
_BALANCED = 40
"""Number of programs per multiprocessor from which on their work counts as evenly distributed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A GPU.

    Attributes:
        bytes_per_s: Bandwidth of device memory, as a large copy measures it.
        l2_bytes_per_s: Bandwidth from the L2 cache to all multiprocessors together.
        sm_bytes_per_s: Bandwidth to one multiprocessor.
        flops_per_s: Rate of bfloat16 products with float32 sums, as a large GEMM measures it.
        num_sms: Number of multiprocessors.
        launch_s: Seconds between the end of a kernel and the first loads of the next one.
    """

    name: str
    bytes_per_s: float
    l2_bytes_per_s: float
    sm_bytes_per_s: float
    flops_per_s: float
    num_sms: int
    launch_s: float


H200 = Chip(
    name="H200",
    bytes_per_s=4.3e12,
    l2_bytes_per_s=6.0e12,
    sm_bytes_per_s=64 * 1.755e9,
    flops_per_s=790e12,
    num_sms=132,
    launch_s=1.5e-6,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Linear modules that read the same input.

    Attributes:
        in_features: ``K``.
        out_features: ``N`` of every module.
    """

    name: str
    in_features: int
    out_features: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version of the adapters' kernels.

    Attributes:
        reads_outputs: Whether the kernels read and write Y and dX after the frozen GEMM. Otherwise they write them
            before the GEMM, which reads them when it stores.
        output_tile: Columns per program of ``expand`` and ``dx``.
        narrow_bytes: Bytes of a number in ``s`` and ``ds``.
        weight_bytes: Bytes of an adapter's number when it is read for a product.
        overwrites_gradients: Whether the first product of a step overwrites a gradient. Otherwise all products are
            added to a gradient that the optimizer has set to zero.
        has_parts: Whether sums over more than ``PART`` wide columns are cut into parts, with one program per part.
        reads_norms: Whether the clipping norm is a separate pass over the gradients. Otherwise the kernels of the
            gradients store the sum of squares of every tile.
        chunk_tokens: Tokens for which a program of ``expand`` and ``dx`` reads its part of an adapter once.
        reads_dy_once: Whether ``ds`` and ``db`` are one launch, ``dy``.
        ds_tokens: Tokens per program of ``ds``.
        gradient_tile: Wide columns per program of ``da`` and ``db``.
        moment_bytes: Bytes of a number in the state of AdamW.
    """

    reads_outputs: bool
    output_tile: int
    narrow_bytes: int
    weight_bytes: int
    overwrites_gradients: bool = False
    has_parts: bool = False
    reads_norms: bool = True
    chunk_tokens: int = BLOCK_TOKENS
    reads_dy_once: bool = False
    ds_tokens: int = BLOCK_TOKENS
    gradient_tile: int = SMALL_TILE
    moment_bytes: int = 4

    @property
    def optimizer_bytes(self) -> int:
        """Bytes per parameter and step: 4 fewer if the gradient is not set to zero, and 4 fewer if no norm reads it; a
        copy of the weight more if products read copies; two moments are read and written."""
        copied = self.weight_bytes if self.weight_bytes < ADAPTER_BYTES else 0
        saved = ADAPTER_BYTES * (self.overwrites_gradients + (not self.reads_norms))
        return FLOOR_BYTES + copied - saved - 4 * (ADAPTER_BYTES - self.moment_bytes)


_COPIES = Version(reads_outputs=False, output_tile=128, narrow_bytes=2, weight_bytes=2, overwrites_gradients=True)
_NORMS = replace(_COPIES, has_parts=True, reads_norms=False)
_NOW = replace(_NORMS, chunk_tokens=256, reads_dy_once=True, ds_tokens=128, gradient_tile=128)

VERSIONS: Mapping[str, Version] = {
    "before": Version(reads_outputs=True, output_tile=64, narrow_bytes=4, weight_bytes=4),
    "outputs first": Version(reads_outputs=False, output_tile=64, narrow_bytes=4, weight_bytes=4),
    "16-bit products": Version(reads_outputs=False, output_tile=128, narrow_bytes=2, weight_bytes=4),
    "overwritten gradients": replace(_COPIES, weight_bytes=4),
    "16-bit copies of the adapters": _COPIES,
    "sums in parts": replace(_COPIES, has_parts=True),
    "norms out of da and db": _NORMS,
    "adapters read once for 256 tokens": replace(_NORMS, chunk_tokens=256),
    "ds and db in one launch": replace(_NORMS, chunk_tokens=256, reads_dy_once=True),
    "now": _NOW,
    "now, with bfloat16 moments": replace(_NOW, moment_bytes=2),
}
"""Versions in the order in which they were made. The current one has tiles of 128 in ``dy`` and ``da``. The last one is
the current version with ``optim_state_dtype: bfloat16``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One launch in the model.

    Attributes:
        num_bytes: Bytes from and to device memory, with each tensor counted once.
        num_flops: FLOPs without padding.
        num_programs: Programs that have work.
        grid: Programs that are launched.
        seconds: Predicted time.
        limit: The longest of the four times.
    """

    group: str
    kernel: str
    num_bytes: float
    num_flops: float
    num_programs: int
    grid: tuple[int, int, int]
    seconds: float
    limit: str

    def as_row(self) -> dict[str, Any]:
        """Return the launch as a row of the result file."""
        return {
            "group": self.group,
            "kernel": self.kernel,
            "megabytes": self.num_bytes / 1e6,
            "gigaflops": self.num_flops / 1e9,
            "programs": self.num_programs,
            "us": self.seconds * 1e6,
            "limit": self.limit,
        }


def llama_groups(shape: Mapping[str, Any]) -> tuple[Group, ...]:
    """Return the groups of a layer of a Llama."""
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return (
        Group(name="q k v", in_features=hidden, out_features=(hidden, kv, kv)),
        Group(name="o", in_features=hidden, out_features=(hidden,)),
        Group(name="gate up", in_features=hidden, out_features=(wide, wide)),
        Group(name="down", in_features=wide, out_features=(hidden,)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """One step of adapters of ``ranks`` on all linear modules of a Llama.

    Attributes:
        chip: The GPU.
        shape: Shape of the base model.
        ranks: Ranks of the jobs.
        passes: Tokens of every job in each forward and backward pass; jobs are in slot order, and a job without tokens
            has 0.
        trained: Trained tokens of each pass.
        sequences: Lengths of all sequences of each pass.
        version: Version of the adapters' kernels.
    """

    chip: Chip
    shape: Mapping[str, Any]
    ranks: tuple[int, ...]
    passes: tuple[tuple[int, ...], ...]
    trained: tuple[int, ...]
    sequences: tuple[tuple[int, ...], ...]
    version: Version

    @property
    def num_params(self) -> int:
        """Number of parameters of all adapters."""
        sides = sum(len(g.out_features) * g.in_features + sum(g.out_features) for g in llama_groups(self.shape))
        return self.shape["num_hidden_layers"] * sum(self.ranks) * sides

    @property
    def floor_s(self) -> float:
        """Seconds of the frozen step, plus the adapters' bytes at full bandwidth."""
        return self.frozen_s + FLOOR_BYTES * self.num_params / self.chip.bytes_per_s

    @property
    def step_s(self) -> float:
        """Seconds of the whole step: frozen GEMMs, kernels of the adapters, optimizer."""
        layers = self.shape["num_hidden_layers"]
        adapters, trained = 0.0, [False] * len(self.ranks)
        for lengths in self.passes:
            adapters += sum(kernel.seconds for kernel in self.kernels(lengths, trained))
            trained = [before or length > 0 for before, length in zip(trained, lengths, strict=True)]
        num_launches = 3 if self.version.reads_norms else 2
        optimizer = self.version.optimizer_bytes * self.num_params / self.chip.bytes_per_s
        optimizer += self._sums_bytes / self.chip.bytes_per_s + num_launches * self.chip.launch_s
        accumulates = not self.version.reads_outputs
        return self._frozen(accumulates=accumulates) + layers * adapters + optimizer

    @property
    def frozen_s(self) -> float:
        """Seconds of the base alone: forward pass, and backward pass of activations."""
        return self._frozen(accumulates=False)

    @property
    def _sums_bytes(self) -> float:
        """Bytes of the sums of squares that a step writes and reads."""
        if self.version.reads_norms:
            return 0.0
        groups, largest, num_tiles = llama_groups(self.shape), max(self.ranks), 0
        for group in groups:
            members = len(group.out_features)
            for wide, most in [(group.in_features, members * largest), *((n, largest) for n in group.out_features)]:
                num_tiles += math.ceil(wide / _rows(self.version.gradient_tile, most))
        return 2.0 * ADAPTER_BYTES * len(self.ranks) * num_tiles * self.shape["num_hidden_layers"]

    def kernels(self, lengths: Sequence[int], trained: Sequence[bool] | None = None) -> list[KernelTime]:
        """Return the adapters' launches of one layer in a pass of ``lengths`` tokens.

        Args:
            lengths: Tokens of every job.
            trained: Whether each job had tokens in an earlier pass of the step; None for the first pass.
        """
        trained = trained if trained is not None else [False] * len(lengths)
        return [kernel for group in llama_groups(self.shape) for kernel in self._of_group(group, lengths, trained)]

    def _frozen(self, *, accumulates: bool) -> float:
        return sum(map(self._frozen_pass, self.passes, self.trained, self.sequences, [accumulates] * len(self.passes)))

    def _frozen_pass(self, lengths: Sequence[int], trained: int, sequences: Sequence[int], accumulates: bool) -> float:
        tokens, hidden, vocabulary = sum(lengths), self.shape["hidden_size"], self.shape["vocab_size"]
        wide, heads = self.shape["intermediate_size"], self.shape["num_attention_heads"]
        kv = hidden // heads * self.shape["num_key_value_heads"]
        layer = 0.0
        for group in llama_groups(self.shape):
            k = group.in_features
            for member, n in enumerate(group.out_features):
                layer += self._gemm(tokens, k, n, adds=accumulates)
                # The input's gradient is a sum over the members; each one except the first adds to it.
                layer += self._gemm(tokens, n, k, adds=accumulates or member > 0)
        # Norms, rotary embedding, gate and residual sums, forward and about twice that backward.
        elements = 3 * (2 * 2 * hidden + 2 * 3 * hidden + 2 * (hidden + kv) + 3 * wide)
        layer += elements * tokens * TOKEN_BYTES / self.chip.bytes_per_s
        layer += 7.0 * hidden * sum(length**2 for length in sequences) / self.chip.flops_per_s
        head = 2 * self._gemm(trained, hidden, vocabulary, adds=False)
        head += 16 * trained * vocabulary / self.chip.bytes_per_s  # logits and log-probabilities in chunks
        return self.shape["num_hidden_layers"] * layer + head

    def _gemm(self, tokens: int, k: int, n: int, *, adds: bool) -> float:
        moved = TOKEN_BYTES * (tokens * k + k * n + (2 if adds else 1) * tokens * n)
        return max(2.0 * tokens * k * n / self.chip.flops_per_s, moved / self.chip.bytes_per_s)

    def _of_group(self, group: Group, lengths: Sequence[int], trained: Sequence[bool]) -> Iterator[KernelTime]:
        k, ns, members = group.in_features, group.out_features, len(group.out_features)
        jobs = [(rank, length) for rank, length in zip(self.ranks, lengths, strict=True) if length]
        tokens = sum(length for _, length in jobs)
        version = self.version

        def blocks_of(most: int) -> list[tuple[int, int]]:
            """Return rank and tokens of every block of up to ``most`` tokens."""
            return [(rank, min(most, length - first)) for rank, length in jobs for first in range(0, length, most)]

        blocks, chunks = blocks_of(BLOCK_TOKENS), blocks_of(version.chunk_tokens)
        narrow = members * sum(rank * length for rank, length in jobs) * version.narrow_bytes
        num_a, num_bs = sum(members * rank for rank, _ in jobs) * k, sum(rank for rank, _ in jobs) * sum(ns)
        a, bs = num_a * version.weight_bytes, num_bs * version.weight_bytes
        # For every job with tokens: how often a gradient is read or written.
        overwrites = version.overwrites_gradients
        uses = [1 if overwrites and not seen else 2 for seen, length in zip(trained, lengths, strict=True) if length]
        moved_ranks = ADAPTER_BYTES * sum(times * rank for times, (rank, _) in zip(uses, jobs, strict=True))
        da, dbs = moved_ranks * members * k, moved_ranks * sum(ns)
        x, ys = tokens * k * TOKEN_BYTES, tokens * sum(ns) * TOKEN_BYTES
        through_a = 2.0 * members * sum(rank * length for rank, length in jobs) * k
        through_b = 2.0 * sum(rank * length for rank, length in jobs) * sum(ns)
        widest = members * max(self.ranks)
        q_tiles, r_tiles = math.ceil(widest / NARROW_TILE), math.ceil(max(self.ranks) / NARROW_TILE)

        def narrow_programs(wide_sizes: Sequence[int], per_rank: int, block_tokens: int) -> list[tuple[float, float]]:
            """Return bytes and FLOPs of the programs for every block and part of a wide size. A program reads both
            sides, and stores narrow columns. If there are several parts, each part stores a plane in float32, and one
            program reads all planes."""
            found = []
            for wide in wide_sizes:
                sizes = _tiles(wide, PART) if version.has_parts else [wide]
                plane = 2 * ADAPTER_BYTES if len(sizes) > 1 else 0
                for rank, rows in blocks_of(block_tokens):
                    for columns in _tiles(rank * per_rank, NARROW_TILE):
                        for size in sizes:
                            moved = TOKEN_BYTES * rows * size + columns * version.weight_bytes * size
                            moved += columns * rows * (version.narrow_bytes / len(sizes) + plane)
                            found.append((moved, 2.0 * block_tokens * size * _padded(columns)))
            return found

        def wide_programs(wide: int, per_rank: int, passes: int) -> list[tuple[float, float]]:
            """Return bytes and FLOPs of the programs for every chunk and tile of wide columns, with ``passes`` over the
            output."""
            found = []
            for rank, rows in chunks:
                columns = rank * per_rank
                tile = version.output_tile
                moved = columns * (version.narrow_bytes * rows + version.weight_bytes * tile)
                moved += passes * TOKEN_BYTES * rows * tile
                padded = math.ceil(rows / BLOCK_TOKENS) * BLOCK_TOKENS
                work = (moved, 2.0 * padded * tile * _padded(columns))
                found += [work] * math.ceil(wide / tile)
            return found

        def weight_programs(wide: int, per_rank: int) -> list[tuple[float, float]]:
            """Return bytes and FLOPs of the programs for every job and tile of wide columns: the job's tokens of both
            sides, and a gradient to which the result is added."""
            found = []
            gradient_tile = _rows(version.gradient_tile, per_rank * max(self.ranks))
            for times, (rank, length) in zip(uses, jobs, strict=True):
                for columns in _tiles(rank * per_rank, NARROW_TILE):
                    moved = length * (TOKEN_BYTES * gradient_tile + version.narrow_bytes * columns)
                    moved += times * ADAPTER_BYTES * gradient_tile * columns
                    padded = math.ceil(length / BLOCK_TOKENS) * BLOCK_TOKENS
                    work = (moved, 2.0 * padded * gradient_tile * _padded(columns))
                    found += [work] * math.ceil(wide / gradient_tile)
            return found

        passes = 2 if version.reads_outputs else 1

        def parts(wide: int) -> int:
            return math.ceil(wide / PART) if version.has_parts else 1

        def planes(wide_sizes: Sequence[int], per_rank: int) -> float:
            """Return the bytes of planes that are written to memory; they are read from L2."""
            columns = per_rank * sum(rank * length for rank, length in jobs)
            return ADAPTER_BYTES * columns * sum(parts(wide) for wide in wide_sizes if parts(wide) > 1)

        def kept_dy() -> float:
            """Return the bytes of the upstream gradient that are in the L2 cache when they are read again."""
            found = (TOKEN_BYTES * length * min(PART, n) for _, length in jobs for n in ns)
            sizes = (TOKEN_BYTES * length * n for _, length in jobs for n in ns)
            return sum(size for size, unit in zip(sizes, found, strict=True) if unit <= KEPT_BYTES)

        def n_tiles(tile: int) -> int:
            return sum(math.ceil(n / tile) for n in ns)

        yield self._kernel(
            group,
            "shrink",
            x + a + narrow + planes([k], members),
            through_a,
            narrow_programs([k], members, BLOCK_TOKENS),
            (len(blocks), q_tiles, parts(k)),
        )
        expand = [work for n in ns for work in wide_programs(n, 1, passes)]
        yield self._kernel(
            group,
            "expand",
            passes * ys + bs + narrow,
            through_b,
            expand,
            (n_tiles(version.output_tile), len(chunks), 1),
        )
        # With a tile of more than 64 ranks, there are registers for fewer tokens.
        ds_tokens = _rows(version.ds_tokens, 2 * max(self.ranks))
        b_tile = _rows(version.gradient_tile, max(self.ranks))
        ds = narrow_programs(ns, 1, ds_tokens)
        db = [work for n in ns for work in weight_programs(n, 1)]
        of_ds, of_db = ys + bs + narrow + planes(ns, 1), ys + narrow + dbs
        if version.reads_dy_once:
            num_items = len(blocks_of(ds_tokens)) + len(jobs) * (PART // b_tile)
            yield self._kernel(
                group,
                "dy",
                of_ds + of_db - kept_dy(),
                2 * through_b,
                ds + db,
                (num_items, members, r_tiles * parts(max(ns))),
            )
        else:
            grid = (len(blocks_of(ds_tokens)), members, r_tiles * parts(max(ns)))
            yield self._kernel(group, "ds", of_ds, through_b, ds, grid)
        dx = wide_programs(k, members, passes)
        yield self._kernel(
            group, "dx", passes * x + a + narrow, through_a, dx, (math.ceil(k / version.output_tile), len(chunks), 1)
        )
        yield self._kernel(
            group,
            "da",
            x + narrow + da,
            through_a,
            weight_programs(k, members),
            (math.ceil(k / _rows(version.gradient_tile, widest)), len(jobs), q_tiles),
        )
        if not version.reads_dy_once:
            yield self._kernel(group, "db", of_db, through_b, db, (n_tiles(b_tile), len(jobs), r_tiles))

    def _kernel(
        self,
        group: Group,
        name: str,
        num_bytes: float,
        num_flops: float,
        programs: Sequence[tuple[float, float]],
        grid: tuple[int, int, int],
    ) -> KernelTime:
        chip = self.chip
        times = {
            "memory": num_bytes / chip.bytes_per_s,
            "L2": sum(moved for moved, _ in programs) / chip.l2_bytes_per_s,
            "products": sum(flops for _, flops in programs) / chip.flops_per_s,
            "busiest SM": _busiest(chip, programs),
        }
        limit = max(times, key=lambda key: times[key])
        return KernelTime(
            group=group.name,
            kernel=name,
            num_bytes=num_bytes,
            num_flops=num_flops,
            num_programs=len(programs),
            grid=grid,
            seconds=times[limit] + chip.launch_s,
            limit=limit,
        )


def _busiest(chip: Chip, programs: Sequence[tuple[float, float]]) -> float:
    """Return the seconds until the last multiprocessor is done, if each program goes to the multiprocessor that is free
    first."""
    seconds = [max(moved / chip.sm_bytes_per_s, flops * chip.num_sms / chip.flops_per_s) for moved, flops in programs]
    if len(seconds) >= _BALANCED * chip.num_sms:
        return sum(seconds) / chip.num_sms
    free_at = [0.0] * chip.num_sms
    for one in seconds:
        heapq.heapreplace(free_at, free_at[0] + one)
    return max(free_at)


def _rows(rows: int, most: int) -> int:
    """Return how many of a program's ``rows`` it has if a slot may have ``most`` narrow columns."""
    return min(rows, SMALL_TILE) if most > NARROW_TILE // 2 else rows


def _tiles(columns: int, tile: int) -> list[int]:
    return [min(tile, columns - first) for first in range(0, columns, tile)]


def _padded(columns: int) -> int:
    """Return the number of columns that the matrix units multiply: a power of two, at least 32."""
    return max(32, 1 << (columns - 1).bit_length())
