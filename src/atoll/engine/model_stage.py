"""A stage: layers [start, end) of a causal language model, built from transformers' classes.

A stage with start 0 also embeds tokens; one whose end is the number of layers also has the final
norm and the head. It knows nothing of requests: it is given rows and block tables and returns
hidden states or logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from atoll.core.errors import InputError, UsageError
from atoll.engine import attention
from atoll.engine.attention import KvCache, PagedBatch, RowSpan
from atoll.engine.device_copy import to_device
from atoll.engine.fused import FusedLayer, fuse
from atoll.engine.kv import BlockTable
from atoll.engine.matrix_layers import MatrixExperts, MatrixLinear, list_matrices
from atoll.engine.rank_cut import RankCut
from atoll.engine.rank_group import RankGroup
from atoll.engine.rows import RowSlice
from atoll.engine.step_layout import StepOrder, list_samples
from atoll.engine.torch_ops import FP8
from atoll.engine.weight_packing import KEPT_BYTES, can_pack, pack, pack_linears
from atoll.engine.weights.matrix_reader import AtLoad, MatrixReader
from atoll.engine.weights.reader import Progress, WeightReader

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_KV_BYTES = 512 * 2**20
CHOSEN_ROWS = 1 << 16
"""Tokens of one step that stay on the device: more sequences no engine is started with."""
_EAGER_ROWS = (1, 2, 17, 33, 65, 2048)
"""Rows of prompts for which kernels differ."""
_EAGER_DECODES = 33
"""Decodes from which on attention reads fewer positions at a time."""


@dataclass(slots=True)
class SequenceRows:
    """New positions of one sequence: `count` rows from `position` on through layers [start, end).

    `data` is a list of tokens when start is 0 and a `RowSlice` of hidden states otherwise. `sample`
    asks for the logits of the last row; it has a meaning only where the head is. `embeds` are vectors to
    take instead of tokens: which rows [n], and the vectors [n, width]. `keep` asks, where the last norm is,
    for the hidden states after it. A `source` says that the one token is not known here: it is in that row
    of `StageModel.chosen`, and `data` has 0 in its place.
    """

    start: int
    end: int
    position: int
    count: int
    table: BlockTable
    data: Any
    sample: bool = False
    embeds: tuple[Tensor, Tensor] | None = None
    keep: bool = False
    source: int | None = None


@dataclass(frozen=True, slots=True)
class StageOutput:
    """Result of a batch.

    `hidden` has, per `SequenceRows`, its hidden states [count, width] where it goes on to another stage,
    else None. `logits` is [sampled rows, vocabulary]; `sampled` says which `SequenceRows` each is of. `kept`
    has the number of each that is to be kept, and its hidden states after the last norm [count, width].
    Of a plain decode step through a stage without a head, all hidden states are `joined` [rows, width], and
    `hidden` is empty.
    """

    hidden: tuple[Tensor | None, ...]
    logits: Tensor | None = None
    sampled: tuple[int, ...] = ()
    kept: tuple[tuple[int, Tensor], ...] = ()
    joined: Tensor | None = None

    def of(self, numbers: Sequence[int]) -> Tensor:
        """Return the hidden states of some `SequenceRows`, one after another."""
        if self.joined is not None:
            all_of_them = len(numbers) == self.joined.shape[0]
            return self.joined if all_of_them else self.joined[list(numbers)]
        states = [state for n in numbers if (state := self.hidden[n]) is not None]
        return states[0] if len(states) == 1 else torch.cat(states)


class StageModel:
    """Layers [start, end) with their KV cache, ready to run.

    One that is a rank of several has a part of every layer, and what it computes is computed by all together.
    """

    _ranks: RankGroup | None = None
    _cut: RankCut | None = None

    def __init__(
        self,
        folder: str | Path,
        start: int,
        end: int,
        *,
        blocks: int | None = None,
        kv_bytes: int | None = None,
        block_size: int = 16,
        device: str = "cpu",
        dtype: str = "float32",
        quantization: AtLoad | None = None,
        kv_dtype: Literal["fp8"] | None = None,
        progress: Progress | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """Build and load; the KV cache has `blocks` blocks, or as many as fit `kv_bytes`.

        With neither, a CPU gives 512 MiB and a GPU nine tenths of what the weights leave free. `quantization`
        is the format that matrices in 16 bits are turned into as they are loaded, `kv_dtype` that of the KV
        cache (none: `dtype`). Of several `ranks` each holds a part of every layer, and all must be asked for
        the same in the same order.
        """
        self.config, self._ranks = load_config(folder), ranks
        if ranks is not None:
            self._cut = RankCut(self.config, ranks.rank, ranks.size)
            self.config = self._cut.config
        self._build(start, end, device, dtype)
        reader = WeightReader(folder)
        self._load_matrices(MatrixReader(reader, quantization))
        self._load(reader, progress)
        self._allocate(blocks, kv_bytes, block_size, FP8 if kv_dtype == "fp8" else self.dtype)

    @classmethod
    def random(
        cls,
        config: Any,
        start: int,
        end: int,
        *,
        blocks: int,
        block_size: int = 16,
        device: str = "cpu",
        dtype: str = "float32",
        seed: int = 0,
    ) -> StageModel:
        """Build a stage with random weights of a plausible size, for measuring."""
        stage = cls.__new__(cls)
        stage.config = config
        stage._build(start, end, device, dtype)
        generator = torch.Generator(device=device).manual_seed(seed)
        for name, parameter in list(stage._parameters()):
            tensor = torch.empty(parameter.shape, device=device, dtype=DTYPES[dtype])
            if parameter.dim() > 1:
                tensor.normal_(0.0, 0.02, generator=generator)
            else:
                tensor.fill_(1.0)
            stage._set(name, tensor)
        stage._finish()
        stage._allocate(blocks, None, block_size, stage.dtype)
        return stage

    def _build(self, start: int, end: int, device: str, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        attention.register()
        total = self.config.num_hidden_layers
        if not 0 <= start < end <= total:
            raise UsageError(f"layers [{start}, {end}) are not inside [0, {total})")
        if dtype not in DTYPES:
            raise UsageError(f"unknown dtype {dtype!r}", hint=f"use one of {', '.join(DTYPES)}")
        self.start, self.end, self.total = start, end, total
        self.device, self.dtype = torch.device(device), DTYPES[dtype]
        self.config._attn_implementation = attention.IMPLEMENTATION
        # On the meta device a model takes no memory: only the layers of this stage get weights.
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(
                self.config, attn_implementation=attention.IMPLEMENTATION
            )
        body = whole.model
        self.layers = {i: body.layers[i].eval() for i in range(start, end)}
        self.embed = body.embed_tokens if start == 0 else None
        self.norm = body.norm if end == total else None
        self.head = whole.lm_head if end == total else None
        self.tied = bool(self.config.tie_word_embeddings)
        self.rotary = type(body.rotary_emb)(config=self.config).to(self.device)
        self._rope_by_type = "layer_type" in inspect.signature(self.rotary.forward).parameters
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * total
        self.layer_types = list(kinds)
        self.softcap = getattr(self.config, "final_logit_softcapping", None)
        self.width = self.config.hidden_size
        self.vocabulary = self.config.vocab_size if self._cut is None else self._cut.vocabulary

    def _allocate(
        self, blocks: int | None, kv_bytes: int | None, block_size: int, kind: torch.dtype
    ) -> None:
        layers = [(i, *self._kv_shape(i)) for i in range(self.start, self.end)]
        # Twice, for keys and values.
        per_block = sum(2 * block_size * heads * size for _, heads, size in layers)
        per_block *= kind.itemsize
        if blocks is None:
            # What is said is for all ranks together; what is left free is each one's own.
            room = (kv_bytes or _CPU_KV_BYTES) // (1 if self._ranks is None else self._ranks.size)
            if kv_bytes is None and self.device.type == "cuda":
                room = int(0.9 * torch.cuda.mem_get_info(self.device)[0])
            blocks = max(1, room // per_block)
        if self._ranks is not None:
            # Ranks number their blocks alike, so the one with the least room says how many there are.
            blocks = int(self._ranks.gather(torch.tensor([blocks], device=self.device)).min())
        self.cache = KvCache(layers, blocks, block_size, self.device, kind)
        # Tokens that the latest step chose, for the next one to take before the host has read them.
        self.chosen = torch.zeros(CHOSEN_ROWS, dtype=torch.int64, device=self.device)
        self.graphs: Any = None
        if self.device.type == "cuda" and self.fused is not None:
            from atoll.engine.cuda_graphs import StepGraphs

            self.graphs = StepGraphs(self, self.config.max_position_embeddings)

    def _kv_shape(self, index: int) -> tuple[int, int]:
        module = self.layers[index].self_attn
        size = module.head_dim
        heads = getattr(module, "num_key_value_heads", None) or self.config.num_key_value_heads
        return heads, size

    def _parts(self) -> Iterator[tuple[str, Any]]:
        for index, layer in self.layers.items():
            yield f"model.layers.{index}", layer
        if self.embed is not None:
            yield "model.embed_tokens", self.embed
        if self.norm is not None:
            yield "model.norm", self.norm
        if self.head is not None:
            yield "lm_head", self.head

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        for prefix, module in self._parts():
            for name, parameter in module.named_parameters():
                yield f"{prefix}.{name}", parameter

    def _set(self, name: str, tensor: Tensor) -> None:
        for prefix, module in self._parts():
            if name.startswith(f"{prefix}."):
                path, _, leaf = name[len(prefix) + 1 :].rpartition(".")
                owner = module.get_submodule(path) if path else module
                setattr(owner, leaf, torch.nn.Parameter(tensor, requires_grad=False))
                return
        raise UsageError(f"this stage has no parameter {name!r}")

    def _load_matrices(self, reader: MatrixReader) -> None:
        """Put layers over matrices in 8 and 4 bits where those stood that would hold them in 16."""
        for index, layer in self.layers.items():
            for name, child in list(layer.named_modules()):
                made = self._read_layer(reader, f"model.layers.{index}.{name}", child)
                if made is not None:
                    path, _, leaf = name.rpartition(".")
                    setattr(layer.get_submodule(path), leaf, made)

    def _read_layer(
        self, reader: MatrixReader, name: str, layer: torch.nn.Module
    ) -> torch.nn.Module | None:
        """A linear layer or experts over matrices; None: its weights are plain tensors."""
        if type(layer) is torch.nn.Linear:
            matrix = reader.read_linear(name)
            if matrix is None:
                return None
            piece = None if self._cut is None else self._cut.piece(f"{name}.weight")
            if piece is not None:
                matrix = matrix.take(piece.dim, piece.ranges)
            if (matrix.outputs, matrix.depth) != (layer.out_features, layer.in_features):
                raise _unlike(name, (matrix.outputs, matrix.depth), layer.weight, reader.folder)
            return MatrixLinear(matrix.own(self.device), layer._parameters["bias"])
        if "gate_up_proj" not in layer._parameters:
            return None
        stacks: Any = layer
        transposed = bool(getattr(stacks, "is_transposed", False))
        read = reader.read_experts(name, stacks.num_experts, transposed=transposed)
        if read is None:
            return None
        gate_up, down = read
        if self._cut is not None:
            outer, inner = (self._cut.piece(f"{name}.{n}_proj") for n in ("gate_up", "down"))
            assert outer is not None
            assert inner is not None
            gate_up = [matrix.take(0, outer.ranges) for matrix in gate_up]
            down = [matrix.take(1, inner.ranges) for matrix in down]
        owned = ([matrix.own(self.device) for matrix in side] for side in (gate_up, down))
        return MatrixExperts(stacks, *owned)

    def _load(self, reader: WeightReader, progress: Progress | None) -> None:
        wanted = list(self._parameters())
        for number, (name, parameter) in enumerate(wanted, 1):
            source = name
            # A tied head has no weights of its own in the file; a stage that also embeds shares them.
            if name == "lm_head.weight" and self.tied:
                if self.embed is not None:
                    self._set(name, self.embed.weight.data)
                    continue
                source = "model.embed_tokens.weight"
            piece = None if self._cut is None else self._cut.piece(name)
            if piece is not None and not piece.ranges:
                self._set(name, torch.zeros(parameter.shape, dtype=self.dtype, device=self.device))
                continue
            tensor = reader.read(source, piece)
            if tuple(tensor.shape) != tuple(parameter.shape):
                raise _unlike(source, tuple(tensor.shape), parameter, reader.folder)
            # What is not laid out anew later is copied, so that nothing keeps the whole file mapped.
            stays = parameter.dim() == 1 or name == "model.embed_tokens.weight"
            self._set(name, tensor.to(device=self.device, dtype=self.dtype, copy=stays))
            if progress is not None:
                progress(number, len(wanted), name)
        self._finish()

    def _finish(self) -> None:
        """Give real values to what the meta device left without any."""
        for prefix, module in self._parts():
            for name, buffer in list(module.named_buffers()):
                if buffer.device.type != "meta":
                    continue
                path, _, leaf = name.rpartition(".")
                owner = module.get_submodule(path) if path else module
                scale = getattr(owner, f"scalar_{leaf}", None)
                if scale is None:
                    raise UsageError(f"the buffer {prefix}.{name} cannot be rebuilt")
                owner.register_buffer(
                    leaf, torch.tensor(scale, device=self.device), persistent=False
                )
            module.eval()
        with torch.inference_mode():
            # A small stage keeps its plain weights beside the packed ones; for a large one that is too much
            # memory.
            self.weight_bytes = self._count_bytes()
            keep = self.weight_bytes <= KEPT_BYTES
            total = None if self._ranks is None else self._ranks.sum
            self.fused = fuse(self.layers, self.device, keep=keep, total=total)
            if can_pack(self.device, self.dtype):
                for layer in self.layers.values():
                    pack_linears(layer, keep=keep)
                if self.head is not None:
                    self.head = pack(self.head, keep=keep)
            elif self.device.type == "cuda" and self.fused is not None and self.head is not None:
                from atoll.engine.triton_ops import RowLinear

                self.head = RowLinear(self.head.weight.data, self.head.bias)
        if self._ranks is not None and self._cut is not None:
            self._join_ranks(self._ranks, self._cut)

    def _join_ranks(self, ranks: RankGroup, cut: RankCut) -> None:
        """Have the ranks put together what each has only a part of."""
        if self.embed is not None:
            self.embed = _RankEmbedding(self.embed, cut, ranks)
        if self.fused is not None:
            return

        def add_up(module: Any, given: Any, found: Any) -> Any:
            del module, given
            return (
                (ranks.sum(found[0]), *found[1:]) if isinstance(found, tuple) else ranks.sum(found)
            )

        for layer in self.layers.values():
            layer.self_attn.register_forward_hook(add_up)
            layer.mlp.register_forward_hook(add_up)

    def _count_bytes(self) -> int:
        """Bytes of all weights; those that a tied head shares with the embedding count once."""
        tensors = [parameter for _, parameter in self._parameters()]
        for layer in self.layers.values():
            tensors += [tensor for matrix in list_matrices(layer) for tensor in matrix.tensors()]
        return sum({t.data_ptr(): t.numel() * t.itemsize for t in tensors}.values())

    def warm(self, budget: int, max_sequences: int | None, progress: Progress | None) -> None:
        """Make ready whatever steps of at most `budget` rows need; on a CPU nothing has to be.

        `max_sequences` are in a step at most (none: as many as it has rows).
        """
        if self.device.type != "cuda":
            return
        from atoll.engine.compile_count import watch_triton

        watch_triton()
        with torch.inference_mode():
            if self.graphs is not None:
                self.graphs.capture(budget, max_sequences, progress)
            # What no graph takes runs kernel by kernel: each is compiled for a few numbers of rows.
            for rows in _EAGER_ROWS:
                self._run_spare(1, min(rows, budget))
            self._run_spare(min(_EAGER_DECODES, budget), 1)
        torch.cuda.synchronize(self.device)

    def _run_spare(self, sequences: int, count: int) -> None:
        """Run rows of nobody, on the block that belongs to nobody."""
        pages = count // self.cache.block_size + 1
        table = BlockTable(b"", blocks=[self.cache.blocks] * pages, contiguous=False)
        hidden = torch.zeros(count, self.width, dtype=self.dtype, device=self.device)
        data = [0] * count if self.start == 0 else RowSlice(hidden, 0, count)
        rows = SequenceRows(self.start, self.end, 0, count, table, data, sample=True)
        self._run([rows] * sequences)

    def forward(self, batch: Sequence[SequenceRows]) -> StageOutput:
        """Run every `SequenceRows` through its own layer range; neighbours share the layers they share.

        Between two layers where the set of active rows changes, the rows are laid together anew;
        with equal ranges, the usual case, that happens once.
        """
        with torch.inference_mode():
            return self._forward(batch)

    def _forward(self, batch: Sequence[SequenceRows]) -> StageOutput:
        order = None if self.graphs is None else self.graphs.fit(batch)
        if order is not None:
            return self._replay(batch, order)
        return self._run(batch)

    def _run(self, batch: Sequence[SequenceRows]) -> StageOutput:
        self._check(batch)
        states: list[Any] = [
            rows.data.cut().to(device=self.device, dtype=self.dtype) if rows.start > 0 else None
            for rows in batch
        ]
        self._embed(batch, states)
        # Cut the layers wherever a sequence enters or leaves; between two cuts the same rows run.
        cuts = sorted({rows.start for rows in batch} | {rows.end for rows in batch})
        for low, high in pairwise(cuts):
            active = [i for i, rows in enumerate(batch) if rows.start <= low and high <= rows.end]
            if not active:
                continue
            spans, row = [], 0
            for i in active:
                spans.append(RowSpan(row, batch[i].count, batch[i].position, batch[i].table))
                row += batch[i].count
            joined = (
                states[active[0]] if len(active) == 1 else torch.cat([states[i] for i in active])
            )
            hidden = self.run_layers(joined, low, high, PagedBatch(spans, self.cache, self.device))
            for i, span in zip(active, spans, strict=True):
                states[i] = hidden[span.row : span.row + span.count]
        last = tuple(i for i, rows in enumerate(batch) if rows.end == self.total and rows.sample)
        sampled = torch.stack([states[i][-1] for i in last]) if last else None
        return self._outputs(batch, states, last, sampled)

    def _replay(self, batch: Sequence[SequenceRows], order: StepOrder) -> StageOutput:
        """Run a step whose graph has been captured."""
        result, samples = self.graphs.run(batch, order)
        if not order.chunks:
            if self.head is None:
                return StageOutput((), joined=result)
            rows = len(batch)
            return StageOutput((None,) * rows, result, tuple(range(rows)))
        states: list[Any] = [None] * len(batch)
        row = 0
        for number in (*order.decodes, *order.chunks):
            states[number] = result[row : row + batch[number].count]
            row += batch[number].count
        last = tuple(number for number, _ in list_samples(batch, order))
        return self._outputs(batch, states, last, result[samples] if last else None)

    def _check(self, batch: Sequence[SequenceRows]) -> None:
        for rows in batch:
            if not self.start <= rows.start < rows.end <= self.end:
                raise UsageError(
                    f"rows ask for layers [{rows.start}, {rows.end}); this stage holds "
                    f"[{self.start}, {self.end})"
                )

    def _embed(self, batch: Sequence[SequenceRows], states: list[Any]) -> None:
        first = [i for i, rows in enumerate(batch) if rows.start == 0]
        if not first or self.embed is None:
            return
        # Marks of vectors are negative; what is embedded in their place is overwritten.
        tokens = torch.tensor([token for i in first for token in batch[i].data])
        tokens = self._fill_in(to_device(tokens.clamp_min_(0), self.device), batch, first)
        embedded = self.embed(tokens)
        row = 0
        for i in first:
            states[i] = embedded[row : row + batch[i].count]
            row += batch[i].count
            given = batch[i].embeds
            if given is not None:
                states[i][given[0].to(self.device)] = given[1].to(self.device, self.dtype)

    def _fill_in(self, tokens: Tensor, batch: Sequence[SequenceRows], first: list[int]) -> Tensor:
        """Put tokens that only the device knows where they belong."""
        places, row = [], 0
        for i in first:
            source = batch[i].source
            if source is not None:
                places.append((row, source))
            row += batch[i].count
        if not places:
            return tokens
        rows, sources = to_device(torch.tensor(places), self.device).unbind(1)
        return tokens.index_copy_(0, rows, self.chosen[sources])

    def _outputs(
        self,
        batch: Sequence[SequenceRows],
        states: list[Any],
        last: tuple[int, ...],
        sampled: Tensor | None,
    ) -> StageOutput:
        """Put the result together; `sampled` are the last rows of the `last`, those that ask for a token."""
        hidden = tuple(
            state if rows.end < self.total else None
            for rows, state in zip(batch, states, strict=True)
        )
        kept: tuple[tuple[int, Tensor], ...] = ()
        if any(rows.keep for rows in batch) and self.norm is not None:
            wanted = (i for i, rows in enumerate(batch) if rows.end == self.total and rows.keep)
            kept = tuple((i, self.norm(states[i])) for i in wanted)
        if sampled is None or self.head is None:
            return StageOutput(hidden, kept=kept)
        return StageOutput(hidden, self.logits(sampled), last, kept)

    def _last_norm(self, hidden: Tensor) -> Tensor:
        if self.norm is None:
            raise UsageError(f"the stage [{self.start}, {self.end}) has no last norm")
        if self.device.type == "cuda" and self.fused is not None:
            from atoll.engine import triton_ops

            return triton_ops.add_norm(hidden, None, self.norm.weight, self.norm.variance_epsilon)[
                0
            ]
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: Tensor, *, normed: bool = False) -> Tensor:
        """Final norm, head and the cap some models put on logits: [rows, vocabulary]."""
        if self.norm is None or self.head is None:
            raise UsageError(f"the stage [{self.start}, {self.end}) has no head")
        logits: Tensor = self.head(hidden if normed else self._last_norm(hidden))
        if self._ranks is not None and self._cut is not None:
            short = self._cut.tokens_a_rank - logits.shape[1]
            logits = self._ranks.gather(torch.nn.functional.pad(logits, (0, short)))
            logits = logits.transpose(0, 1).flatten(1)[:, : self.vocabulary]
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @property
    def kv_shape(self) -> tuple[int, int]:
        """KV heads, of all ranks together, and the size of one."""
        if self._cut is not None:
            return self._cut.kv_heads, self._cut.head_size
        return self._kv_shape(self.start)

    def read_kv(self, layers: Sequence[int], table: BlockTable, start: int, end: int) -> Tensor:
        """Copy positions [start, end) of some layers: [layers, 2, positions, kv heads, head size]."""
        with torch.inference_mode():
            data = self.cache.read(layers, table, start, end)
            if self._ranks is None or self._cut is None:
                return data
            # Not every way between ranks carries FP8; there and back nothing is lost.
            of_ranks = self._ranks.gather(data.to(self.dtype))
            heads = [of_ranks[rank, ..., number, :] for rank, number in self._cut.kv_holders]
            return torch.stack(heads, dim=-2).to(data.dtype)

    def write_kv(self, layers: Sequence[int], table: BlockTable, start: int, data: Tensor) -> None:
        """Put back what `read_kv` of another stage returned, from position `start` on."""
        with torch.inference_mode():
            if self._cut is not None:
                data = data[..., list(self._cut.own_kv_heads), :]
            self.cache.write(layers, table, start, data)

    def run_layers(self, hidden: Tensor, low: int, high: int, paged: Any) -> Tensor:
        """Run layers [low, high) over [rows, width] hidden states."""
        if self.fused is not None:
            return self._run_fused(self.fused, hidden, low, high, paged)
        hidden = hidden.unsqueeze(0)
        rope = self._rope(hidden, paged.positions, low, high)
        for index in range(low, high):
            output = self.layers[index](
                hidden,
                attention_mask=None,
                position_ids=paged.positions,
                position_embeddings=rope[self.layer_types[index]],
                paged=paged,
            )
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden.squeeze(0)

    def _run_fused(
        self, layers: dict[int, FusedLayer], hidden: Tensor, low: int, high: int, paged: Any
    ) -> Tensor:
        ropes = self._rope(hidden, paged.positions, low, high)
        flat = {kind: (cos[0], sin[0]) for kind, (cos, sin) in ropes.items()}
        residual: Tensor | None = None
        for index in range(low, high):
            rope = flat[self.layer_types[index]]
            hidden, residual = layers[index](hidden, residual, rope, paged)
        if residual is None:
            return hidden
        if hidden.dim() == 3:  # the last layer's result, still in parts
            hidden = hidden.sum(0).to(residual.dtype)
        return hidden + residual

    def _rope(self, hidden: Tensor, positions: Tensor, low: int, high: int) -> dict[str, Any]:
        kinds = set(self.layer_types[low:high])
        if self._rope_by_type:
            return {kind: self.rotary(hidden, positions, kind) for kind in kinds}
        return dict.fromkeys(kinds, self.rotary(hidden, positions))


class _RankEmbedding:
    """Vectors of tokens, of which every rank has some."""

    def __init__(self, embed: Any, cut: RankCut, ranks: RankGroup) -> None:
        self._embed, self._ranks = embed, ranks
        self._first, self._end = cut.tokens

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return [tokens, width]."""
        elsewhere = (tokens < self._first) | (tokens >= self._end)
        own = (tokens - self._first).masked_fill(elsewhere, 0)
        return self._ranks.sum(self._embed(own).masked_fill(elsewhere.unsqueeze(-1), 0.0))


def _unlike(name: str, shape: tuple[int, ...], wanted: Tensor, folder: Path) -> InputError:
    return InputError(
        f"the tensor {name!r} has shape {shape}, the model wants {tuple(wanted.shape)}",
        path=folder,
        hint="config.json and the weights are of different models",
    )


def load_config(folder: str | Path) -> Any:
    """Read a model folder's config.json into a transformers config of its text part."""
    from transformers import AutoConfig

    if not (Path(folder) / "config.json").is_file():
        raise InputError("there is no config.json", path=folder, hint="name a model folder")
    config = AutoConfig.from_pretrained(str(folder))
    return config.get_text_config()
