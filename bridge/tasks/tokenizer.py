"""A tokenizer made for a task: whole phrases, then single digits and characters. For models that start from scratch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

PAD, EOS, UNKNOWN, SEPARATOR = SPECIAL = ("<pad>", "<eos>", "<unk>", "<sep>")
CHARACTERS = ["\n", *map(chr, range(32, 127))]

# The prompt ends with a token of its own, so its tokens are a prefix of the whole conversation's tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% else %}<sep>{% endif %}{% endfor %}"
)


def build_tokenizer(phrases: Iterable[str], folder: Path) -> int:
    """Write a tokenizer that transformers loads with `AutoTokenizer.from_pretrained(folder)`; returns its size.

    Each phrase is one token wherever it occurs (the longest first, from left to right); what is left is cut into
    single ASCII characters. Decoding gives back exactly the text. A character beyond ASCII becomes `<unk>`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    longest_first = sorted(set(phrases) - set(CHARACTERS), key=lambda phrase: (-len(phrase), phrase))
    vocabulary = [*SPECIAL, *CHARACTERS, *longest_first]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "additional_special_tokens": [SEPARATOR],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return len(vocabulary)
