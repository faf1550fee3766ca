"""A model folder with no weights: a byte-level BPE trained here, a config and a chat template."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from loraplex_platform.gateway.tokenization import BaseTokenizer, ModelTexts
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTEXT_LENGTH = 512
BOS, END = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", BOS, END, "<file_sep>")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Hands everything of tools and calls on, as the templates of models that know them do.
CHATML_WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\nCall as <tool_call>.\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments | tojson(indent=1) }}</tool_call>{% endfor %}"
    "{% if message.tool_call_id %}{{ message.tool_call_id }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = [
    "The capital of France is Paris, and the capital of Italy is Rome. Stop here, please!",
    "안녕하세요 세계 여러분, 오늘은 날씨가 좋네요. 안녕하세요 여러분.",
    "Ünïcödé ärgert sich über Straßen 🙂🙂 👩‍👩‍👧 emoji families and naïve café people.",
    "def main() -> None:\n    print('hello world')\n\n\treturn 12345\n",
]


@cache
def tokenizer_json() -> str:
    """The trained tokenizer, as the text of its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 20, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer.to_str()


def texts(chat_template: str | None = CHATML) -> ModelTexts:
    """As read from a model folder."""
    vocab_size = Tokenizer.from_str(tokenizer_json()).get_vocab_size(with_added_tokens=True)
    return ModelTexts(
        tokenizer_json=tokenizer_json(),
        tokenizer_config={"bos_token": BOS, "eos_token": {"content": END}, "pad_token": END},
        config={
            "vocab_size": vocab_size,
            "max_position_embeddings": CONTEXT_LENGTH,
            "eos_token_id": 2,
        },
        generation_config={"eos_token_id": [2, 0]},
        chat_template=chat_template,
    )


def write(folder: Path) -> Path:
    """Write the model folder."""
    files = texts()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(files.tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps(files.tokenizer_config))
    (folder / "config.json").write_text(json.dumps(files.config))
    (folder / "generation_config.json").write_text(json.dumps(files.generation_config))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@cache
def base_tokenizer() -> BaseTokenizer:
    """The gateway's view of the folder."""
    return BaseTokenizer(texts())


@cache
def reference() -> Tokenizer:
    """The library's own tokenizer: the oracle."""
    return Tokenizer.from_str(tokenizer_json())


def ids_of(text: str) -> list[int]:
    """Token ids of a text."""
    return list(reference().encode(text).ids)
