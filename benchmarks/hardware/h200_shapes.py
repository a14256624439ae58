"""What ``h200_measure.py`` measures: model shapes and the points of each sweep."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """Decoder shapes: widths in elements, and how many distinct layers are timed."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int

    def gemms(self, tp: int) -> dict[str, tuple[int, int]]:
        """(n, k) of each weight on one of ``tp`` shards."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": ((q + 2 * kv) // tp, self.hidden),
            "o": (self.hidden, q // tp),
            "gate_up": (2 * self.intermediate // tp, self.hidden),
            "down": (self.hidden, self.intermediate // tp),
            "lm_head": (self.vocab // tp, self.hidden),
        }


@dataclass(frozen=True)
class Plan:
    """What is measured; prefill shapes are (sequences, tokens each)."""

    models: tuple[Model, ...]
    tps: tuple[int, ...]
    gemm_m: tuple[int, ...]
    heads: tuple[tuple[int, int, int], ...]
    prefill: tuple[tuple[int, int], ...]
    decode_batch: tuple[int, ...]
    decode_ctx: tuple[int, ...]
    layer_prefill: tuple[tuple[int, int], ...]
    layer_batch: tuple[int, ...]
    layer_ctx: tuple[int, ...]
    eager_batch: tuple[int, ...]


FULL = Plan(
    models=(
        Model("llama-3.1-8b", 4096, 32, 8, 128, 14336, 128256, 8),
        Model("llama-3.1-70b", 8192, 64, 8, 128, 28672, 128256, 4),
    ),
    tps=(1, 8, 2, 4),
    gemm_m=tuple(2**i for i in range(14)),
    heads=((32, 8, 128), (64, 8, 128), (8, 1, 128)),
    prefill=(
        *((1, 2**i) for i in range(7, 15)),
        *((4, n) for n in (512, 1024, 2048, 4096)),
        (16, 512),
    ),
    decode_batch=(1, 4, 16, 64, 128, 256),
    decode_ctx=(256, 1024, 4096, 8192, 16384),
    layer_prefill=(
        *((1, n) for n in (128, 512, 1024, 2048, 4096, 8192, 16384)),
        *((4, 1024), (8, 512)),
    ),
    layer_batch=(1, 8, 32, 64, 128, 256),
    layer_ctx=(512, 2048, 8192),
    eager_batch=(1, 32),
)
DRY = Plan(
    models=(Model("tiny", 64, 4, 2, 16, 96, 128, 2),),
    tps=(1, 2),
    gemm_m=(1, 8),
    heads=((4, 2, 16), (4, 1, 16)),
    prefill=((1, 16), (2, 32)),
    decode_batch=(1, 3),
    decode_ctx=(16, 80),
    layer_prefill=((1, 16), (2, 8)),
    layer_batch=(1, 3),
    layer_ctx=(16, 80),
    eager_batch=(1,),
)
