"""Run by a vLLM environment's Python: makes a tiny model that two ranks can share.

SmolLM2 has three KV heads, which two ranks cannot share out. The weights are random but not small:
the outputs depend on every token before them, so a wrong read shows. Tokenizer and chat template
are those of the model in the folder given first.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
LOGIT_SPREAD = 3.0


def main(source: Path, target: Path) -> None:
    """Writes the model to `target`."""
    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(source)
    config.hidden_size, config.intermediate_size = 256, 512
    config.num_hidden_layers, config.head_dim = 4, 32
    config.num_attention_heads, config.num_key_value_heads = 8, 4
    config.tie_word_embeddings = False
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            elif "embed_tokens" in name:
                weight.normal_(0.0, 1.0)
            else:
                spread = LOGIT_SPREAD if "lm_head" in name else 1.0
                weight.normal_(0.0, spread * weight.shape[1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(target)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
