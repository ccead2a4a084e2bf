"""Builds a model folder that vLLM loads from a GGUF file: build_model.py MODEL.gguf FOLDER.

Runs in a vLLM environment (torch, transformers, gguf). transformers reads the GGUF file but
refuses to save what it read, so the weights are copied into a fresh model of the same shape.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


def main(gguf: Path, folder: Path) -> None:
    """Writes config, bfloat16 weights, tokenizer and chat template into `folder`."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise SystemExit(f"{gguf.name} holds no chat template")
    config = loaded.config
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    fresh = LlamaForCausalLM(config).to(torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict(), strict=True)
    fresh.generation_config = loaded.generation_config
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
