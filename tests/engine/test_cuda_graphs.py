"""Steps by graph against the same steps kernel by kernel, on a GPU; nothing compiles once a stage is warm."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'engine'")
if not torch.cuda.is_available():
    pytest.skip("graphs are captured on a GPU, and there is none", allow_module_level=True)

from atoll.engine.compile_count import compiled  # noqa: E402 - torch may be missing
from atoll.engine.kv import BlockPool  # noqa: E402
from atoll.engine.model_stage import SequenceRows, StageModel  # noqa: E402

pytestmark = pytest.mark.engine
BLOCK, BUDGET = 16, 256


SHAPE = {
    "vocab_size": 500,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
KINDS = {
    "LlamaConfig": {"num_attention_heads": 6},
    "MistralConfig": {"num_attention_heads": 6, "sliding_window": 40},
    "Qwen3Config": {"num_attention_heads": 8},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_by_graph_is_the_step_itself(kind: str) -> None:
    import transformers

    config = getattr(transformers, kind)(**SHAPE, **KINDS[kind])
    layers = config.num_hidden_layers
    stage = StageModel.random(config, 0, layers, blocks=400, block_size=BLOCK, device="cuda")
    stage.warm(BUDGET, None, None)
    ready, generator = compiled(), random.Random(3)
    pool = BlockPool(400, BLOCK, prefix_caching=False)
    torch.backends.cuda.matmul.allow_tf32 = False
    for _ in range(20):
        batch: list[SequenceRows] = []
        left = BUDGET
        while left > 0 and len(batch) < 30:
            position = generator.randrange(60)
            count = min(left, generator.choice([1, 1, 1, 2, 9, 40, 130]))
            table = pool.open([], b"", position + count)
            pool.grow(table, position + count)
            tokens = [generator.randrange(stage.vocabulary) for _ in range(count)]
            batch.append(SequenceRows(0, layers, position, count, table, tokens, sample=True))
            left -= count
        by_graph = stage.forward(batch)
        assert by_graph.logits is not None
        order = [by_graph.sampled.index(number) for number in range(len(batch))]
        found = by_graph.logits[order].clone()
        with torch.inference_mode():
            torch.testing.assert_close(found, stage._run(batch).logits, rtol=1e-3, atol=1e-3)
        for rows in batch:
            pool.close(rows.table)
    assert compiled() == ready
