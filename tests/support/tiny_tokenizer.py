"""A small real tokenizer with a ChatML template, made on the spot: no network, no model."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>"]
CORPUS = ["the quick brown fox jumps over the lazy dog", "write a function that adds two numbers"] * 20
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
VOCAB_SIZE = 1024  # of the pretended model; the tokenizer has fewer


def make_tokenizer(folder, *, template=TEMPLATE, context_length=2048, merges=True, extra_tokens=()):
    """Write the tokenizer into a folder and return the folder; without merges each byte is an id."""
    folder.mkdir(parents=True, exist_ok=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400 if merges else 0,
        special_tokens=[*SPECIAL, *extra_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer=trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "max_position_embeddings": context_length}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
