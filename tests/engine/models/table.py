"""Generates the table of families in docs/engine.md: where each is computed, and the tests behind its cells.

`python -m tests.engine.models.table --write` writes it into the page; `test_family_table` checks it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.models.families import FAMILIES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "engine.md"
BEGIN, END = "<!-- families -->", "<!-- end of families -->"

# The test of each column, as module and name; it runs for every family, in OF_EXPERTS for each that has some.
COLUMNS = {
    "colocated": ("tests.engine.models.test_families", "test_logits_match_transformers"),
    "disaggregated": ("tests.system.test_equivalence", "test_every_way_to_serve_gives_the_same_tokens"),
    "several ranks": ("tests.engine.parallel.test_tensor_parallel", "test_two_ranks_generate_the_tokens_of_one"),
    "expert parallelism": (
        "tests.engine.parallel.test_expert_parallel",
        "test_two_ranks_with_whole_experts_generate_the_tokens_of_one",
    ),
    "quantized weights": (
        "tests.engine.weights.test_quantized_weights",
        "test_every_family_loads_quantized_checkpoints",
    ),
    "captured GPU steps": (
        "tests.engine.step.test_capturable",
        "test_a_captured_step_neither_waits_for_the_device_nor_copies_to_it",
    ),
}
OF_EXPERTS = "expert parallelism"
MODELS = {
    "llama": "Llama 2 and 3, and what shares their architecture",
    "llama4_text": "Llama 4 Scout and Maverick, also as `Llama4ForConditionalGeneration`, text only",
    "mistral": "Mistral 7B",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3 dense",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v2": "DeepSeek-V2, V2-Lite",
    "deepseek_v3": "DeepSeek-V3, R1",
    "phi3": "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
    "olmo2": "OLMo-2",
    "olmo3": "OLMo-3",
    "gemma2": "Gemma-2",
    "gemma3_text": "Gemma-3, also as `Gemma3ForConditionalGeneration`, text only",
    "gpt_oss": "gpt-oss-20b and -120b, in MXFP4 or plain",
    "glm4_moe": "GLM-4.5, 4.5-Air, 4.6",
}
ONE_CALL = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3"})  # on a CPU in bf16
REFUSED = {
    "Gemma3nForConditionalGeneration": "Gemma-3n",
    "Phi4MMForCausalLM": "Phi-4-multimodal",
    "PhiMoEForCausalLM": "Phi-3.5-MoE",
    "Glm4ForCausalLM": "GLM-4 dense",
    "Qwen3NextForCausalLM": "Qwen3-Next",
    "GPT2LMHeadModel": "GPT-2",
}


def render() -> str:
    lines = [
        f"| architecture | models | {' | '.join(COLUMNS)} | on a CPU in bf16 |",
        f"|---|---|{'---|' * len(COLUMNS)}---|",
    ]
    for family in FAMILIES:
        path = "one call" if family.model_type in ONE_CALL else "layer by layer"
        cells = " | ".join(
            "no experts" if column == OF_EXPERTS and family.experts is None else "tested" for column in COLUMNS
        )
        lines.append(f"| `{family.architecture}` | {MODELS[family.model_type]} | {cells} | {path} |")
    for architecture, models in REFUSED.items():
        lines.append(f"| `{architecture}` | {models} | {' | '.join('refused' for _ in COLUMNS)} | |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


if __name__ == "__main__" and "--write" in sys.argv[1:]:
    PAGE.write_text(with_table(PAGE.read_text()))
