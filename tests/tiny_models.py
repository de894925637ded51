"""Tiny random models in Hugging Face layout, made in code, with a tokenizer and a chat template: a server can serve them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, MESSAGE_START, MESSAGE_END = range(3)
VOCAB_SIZE = 384

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "One physical copy of the weights per memory domain, placed where it is used.",
    "What is the capital of France? The capital of France is Paris.",
    "Numbers such as 1, 2, 3, 10 and 100 are counted; words are not.",
    "naïve café, Zürich, 東京, שלום, 🙂",
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": MESSAGE_START,
    "eos_token_id": MESSAGE_END,
    "pad_token_id": END_OF_TEXT,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

# Family name: transformers' names of its config and model classes, and what its config adds to the common one.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 24}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 24, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"original_max_position_embeddings": 512}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"head_dim": 24, "norm_topk_prob": True, **_EXPERTS},
    ),
}


def make_tiny_model(directory: Path, family: str = "llama", **overrides: Any) -> Path:
    """Writes a random model of `family` and a working tokenizer into `directory`; returns `directory`.

    `overrides` go to the family's config; besides them: `seed` (default 0), `dtype` (a torch dtype or its name, default
    float32), `max_shard_size` (as of `save_pretrained`) and `std` (spread of the weights; default 0.2, so that the
    likeliest token changes from position to position).
    """
    model = tiny_model(family, **{k: v for k, v in overrides.items() if k not in ("max_shard_size", "dtype")})
    dtype = overrides.get("dtype", torch.float32)
    model = model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=overrides.get("max_shard_size", "5GB"))
    write_tiny_tokenizer(directory, model.config.vocab_size)
    return directory


def tiny_model(family: str = "llama", seed: int = 0, std: float = 0.2, **overrides: Any) -> Any:
    """The random model itself, a transformers causal language model in float32, ready for inference."""
    config_name, model_name, extra = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**_COMMON, **extra, **overrides})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * std)
            else:
                parameter.add_(noise * 0.1)
    return model


def write_tiny_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Writes tokenizer.json (byte-level BPE of `vocab_size` entries at most) and tokenizer_config.json with a template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, VOCAB_SIZE),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
