"""A Llama of a few megabytes, made from a seed, that vLLM really serves.

Its weights are random but for the last matrix, which makes each token's likeliest successor the
next word of `SENTENCE`. The greedy answer is therefore readable, and far enough from a tie to be
the same on every processor and with any number of tensor-parallel ranks.
"""

import hashlib
import json
import math
import random
import sys
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

SENTENCE = (
    "a small model on two nodes speaks one word after another while every rank of the ring "
    "adds its own part and nobody waits for long until dawn"
)
VOCABULARY, HIDDEN, INNER, HEADS, LAYERS = 512, 256, 512, 4, 2
BEGIN, END = 0, 1
SEED = 20
SHARDS = LAYERS + 2

Matrix: TypeAlias = "array[float]"


def build(cache: Path) -> Path:
    """The model's folder, made on the first call."""
    content = dict(_files())
    digest = hashlib.sha256()
    for name in sorted(content):
        digest.update(name.encode() + b"\0" + content[name])
    folder = cache / f"tiny-model-{digest.hexdigest()[:16]}"
    if not folder.exists():
        _write(folder, content)
    return folder


def _write(folder: Path, content: Mapping[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    for name, data in content.items():
        (aside / name).write_bytes(data)
    aside.chmod(0o755)
    try:
        aside.rename(folder)
    except OSError:
        # Another run of ours was first, with the same content.
        if not folder.exists():
            raise


def _files() -> Iterator[tuple[str, bytes]]:
    for name, document in {
        "config.json": _config(),
        "generation_config.json": {"bos_token_id": BEGIN, "eos_token_id": END},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": _tokenizer_config(),
    }.items():
        yield name, _json(document)
    yield from _weights()


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "torch_dtype": "bfloat16",
    }


def byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers use for each byte, as GPT-2 defined it."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(0x100 + n) for n in range(0x100))
    return [chr(byte) if byte in printable else next(others) for byte in range(0x100)]


def vocabulary() -> dict[str, int]:
    alphabet = byte_alphabet()
    words = [alphabet[ord(" ")] + word for word in dict.fromkeys(SENTENCE.split())]
    return {token: id_ for id_, token in enumerate(["<s>", "</s>", *alphabet, *words])}


def _tokenizer() -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id_, "content": content, **flags, "special": True}
            for id_, content in ((BEGIN, "<s>"), (END, "</s>"))
        ],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # A word of the vocabulary is one token although no merge leads to it.
            "ignore_merges": True,
            "vocab": vocabulary(),
            "merges": [],
        },
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }


def _weights() -> Iterator[tuple[str, bytes]]:
    where: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(_shards(random.Random(SEED)), start=1):
        name = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        where |= dict.fromkeys(tensors, name)
        total += sum(2 * len(values) for _, values in tensors.values())
        yield name, safetensors(tensors)
    yield (
        "model.safetensors.index.json",
        _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}),
    )


def _shards(source: random.Random) -> Iterator[dict[str, tuple[tuple[int, ...], Matrix]]]:
    embedding = _embedding(source)
    yield {"model.embed_tokens.weight": ((VOCABULARY, HIDDEN), embedding)}
    for layer in range(LAYERS):
        yield _layer(source, f"model.layers.{layer}")
    yield {
        "model.norm.weight": ((HIDDEN,), _ones()),
        "lm_head.weight": ((VOCABULARY, HIDDEN), _head(embedding)),
    }


def _layer(source: random.Random, prefix: str) -> dict[str, tuple[tuple[int, ...], Matrix]]:
    shapes = {f"self_attn.{kind}_proj": (HIDDEN, HIDDEN) for kind in "qkvo"}
    shapes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN)}
    shapes["mlp.down_proj"] = (HIDDEN, INNER)
    tensors: dict[str, tuple[tuple[int, ...], Matrix]] = {
        f"{prefix}.{name}.weight": (shape, _random(source, math.prod(shape), 0.05))
        for name, shape in shapes.items()
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{norm}.weight"] = ((HIDDEN,), _ones())
    return tensors


def _random(source: random.Random, count: int, reach: float) -> Matrix:
    # random() is the only part of the module whose sequence Python promises to keep.
    return array("f", ((2 * source.random() - 1) * reach for _ in range(count)))


def _ones() -> Matrix:
    return array("f", [1.0] * HIDDEN)


def _words() -> list[int]:
    """The token of each word, in the sentence's order."""
    ids = vocabulary()
    space = byte_alphabet()[ord(" ")]
    return [ids[space + word] for word in dict.fromkeys(SENTENCE.split())]


def _embedding(source: random.Random) -> Matrix:
    """A row for each word; any other token looks like one of them, and the sentence goes on."""
    words = _words()
    rows = [_random(source, HIDDEN, 1.0) for _ in words]
    embedding = array("f")
    for token in range(VOCABULARY):
        embedding += rows[words.index(token) if token in words else token % len(words)]
    return embedding


def _head(embedding: Matrix) -> Matrix:
    """Each word's row is the embedding of the word before it; no other token is ever likely."""
    head = array("f", bytes(4 * VOCABULARY * HIDDEN))
    words = _words()
    for word, successor in pairwise([*words, words[0]]):
        row = embedding[word * HIDDEN : (word + 1) * HIDDEN]
        head[successor * HIDDEN : (successor + 1) * HIDDEN] = array("f", (x / 8 for x in row))
    return head


def safetensors(tensors: Mapping[str, tuple[tuple[int, ...], Matrix]]) -> bytes:
    """A safetensors file of bfloat16 tensors: length of the header, header, data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, (shape, values) in tensors.items():
        start = len(data)
        data += _bfloat16(values)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data must start at a multiple of 8.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(data)


def _bfloat16(values: Matrix) -> bytes:
    if sys.byteorder == "big":
        raise NotImplementedError("safetensors are little-endian, and so must the machine be")
    raw = values.tobytes()
    halves = bytearray(len(raw) // 2)
    # A bfloat16 is the upper half of a float32.
    halves[0::2], halves[1::2] = raw[2::4], raw[3::4]
    return bytes(halves)
