"""Chat templates in five common styles, and small real tokenizers of three kinds to render them with."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tasks.tokens.tokenizer import load_tokenizer

SPECIAL = [
    "<unk>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # they survive decoding: not marked special
STOPS = ["<|im_end|>", "<|eot_id|>"]

CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = r"""{%- for m in messages %}
{{- '<|begin_of_text|>' if loop.first }}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Earlier thoughts are dropped, those since the last user's turn are kept.
THINKING = r"""{%- set ns = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.user %}
{{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' + m.content.lstrip('\n') }}
{%- elif m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}
{%- else %}{{ m.content }}
{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\n' if m.content or not loop.first }}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

_CALLS = CHATML[CHATML.index("{%- for call") : CHATML.index("<|im_end|>\n{% endfor %}\n{%- if add")]

# As Kimi K2's: a call by its id, which has the function's name in it, never by the name.
KIMI = CHATML.replace(
    _CALLS,
    """{%- for call in m.tool_calls or [] %}<tool_call>{{ call.id }}<args>
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
</tool_call>{% endfor %}""",
).replace(
    "{{ m.content }}", "{{ '## Return of ' ~ m.tool_call_id ~ '\n' if m.role == 'tool' }}{{ m.content }}"
)

# As DeepSeek's: the text of a call's arguments is put between other texts, which an object cannot be.
DEEPSEEK = CHATML.replace(
    _CALLS,
    """{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + call.type + '<sep>' + call.function.name }}
{{- '\n' + call.function.arguments + '</tool_call>' }}
{%- endfor %}""",
)

STYLES = {"chatml": CHATML, "llama3": LLAMA3, "thinking": THINKING, "kimi": KIMI, "deepseek": DEEPSEEK}

_CORPUS = [
    "the quick brown fox jumps over the lazy dog.\n\nwrite a function that adds two numbers",
    "def add(a, b):\n    return a + b\n\n\nprint(add(12345, 678))",
    "user\nassistant\nsystem\ntool\n  Grüße aus Köln, näher",
] * 20
_WORDS = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def expected_answer(style, message):
    """What the template writes for a turn of the target, its end-of-turn token included."""
    content, thought = message["content"], message.get("reasoning_content")
    if style == "llama3":
        return content.strip() + "<|eot_id|>"
    calls = [_expected_call(style, one) for one in message.get("tool_calls") or []]
    if style == "thinking":
        thought = f"<think>\n{thought.strip(chr(10))}\n</think>\n\n" if thought else ""
        called = "\n" * bool(content and calls) + "\n".join(calls)
        return thought + content.lstrip("\n") + called + "<|im_end|>"
    return content + "".join(calls) + "<|im_end|>"


def _expected_call(style, call):
    function, arguments = call["function"], call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if style == "kimi":
        return f"<tool_call>{call['id']}<args>{text}</tool_call>"
    if style == "deepseek":
        return f"<tool_call>function<sep>{function['name']}\n{text}</tool_call>"
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {text}}}\n</tool_call>'


def as_shown(style, message):
    """A turn as the template can take it: null is no text, and chatml would quote the text of arguments."""
    message = {**message, "content": message["content"] or ""}
    if style == "chatml" and message.get("tool_calls"):
        message["tool_calls"] = [_with_object(one) for one in message["tool_calls"]]
    return message


def _with_object(call):
    arguments = call["function"]["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**call["function"], "arguments": arguments}}


def make_target(folder, kind, template):
    """Write a tokenizer with a template and a model's files into a folder, and load it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_KINDS[kind](), eos_token="<|im_end|>", unk_token="<unk>"
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    stops = {"eos_token_id": tokenizer.convert_tokens_to_ids(STOPS)}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    return load_tokenizer(str(folder))


def _make_gpt2():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _train_bytes(bpe)


def _make_digits():
    """As today's large models split a text: three digits, line breaks joined; NFC first."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _train_bytes(bpe)


def _train_bytes(bpe):
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer=trainer)
    return bpe


def _make_metaspace(scheme):
    """As SentencePiece writes blanks; characters that it does not know are lost."""

    def make():
        unigram = Tokenizer(models.Unigram())
        unigram.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        unigram.decoder = decoders.Metaspace(prepend_scheme=scheme)
        alphabet = [chr(n) for n in range(32, 127)] + ["\n", "\t", "ü", "ö", "ä", "ß", "é", "▁"]
        trainer = trainers.UnigramTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            unk_token="<unk>",
            initial_alphabet=alphabet,
            show_progress=False,
        )
        unigram.train_from_iterator(_CORPUS, trainer=trainer)
        return unigram

    return make


_KINDS = {
    "gpt2": _make_gpt2,
    "digits": _make_digits,
    "first": _make_metaspace("first"),
    "always": _make_metaspace("always"),
}
KINDS = tuple(_KINDS)
