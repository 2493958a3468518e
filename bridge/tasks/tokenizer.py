"""A tokenizer made for a task: whole phrases, then single bytes. For models that start from scratch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

PAD, EOS, UNKNOWN, SEPARATOR = SPECIAL = ("<pad>", "<eos>", "<unk>", "<sep>")

# The prompt ends with a token of its own, so its tokens are a prefix of the whole conversation's tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% else %}<sep>{% endif %}{% endfor %}"
)

# As in Qwen2Tokenizer. Beside a Qwen2 config.json, transformers 5 rebuilds the tokenizer with its own pre-tokenizer,
# byte-level BPE and the added tokens, whatever tokenizer.json says. So the file says the same from the start.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(phrases: Iterable[str], folder: Path) -> int:
    """Write a tokenizer that transformers loads with `AutoTokenizer.from_pretrained(folder)`; returns its size.

    Each phrase of two or more characters is one token wherever it occurs (from left to right, the longest first); the
    rest is cut into single bytes: byte-level BPE without merges, with the phrases as added tokens. Decoding gives back
    exactly the text, once it is in Unicode normal form C.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    added = sorted({phrase for phrase in phrases if len(phrase) > 1})
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in added])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "additional_special_tokens": [SEPARATOR],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return len(vocabulary) + len(added)
