"""State dicts of a family under Hugging Face's names, and under ours (src/family/family.h): renamed, split and turned, all
values as they are. The dict that is given is emptied on the way, so that no two copies of a model are held.

What the names and shapes don't say comes from the wrapped model, where it is of that family."""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from shardsmith.errors import Error
from shardsmith.smp.session import state
from shardsmith.smp.slices import Piece, pieces
from shardsmith.smp.state_index import Names, without_wrappers

StateDict = dict[str, Any]
PARTIAL = "_smp_is_partial"


class Shapes:
    """Shapes of a state dict by the ends of its names."""

    def __init__(self, family: str, values: StateDict):
        self.family = family
        self.shapes = {without_wrappers(name): list(value.shape) for name, value in values.items()
                       if isinstance(value, torch.Tensor)}

    def has(self, *ends: str) -> bool:
        return any(name.endswith(ends) for name in self.shapes)

    def of(self, *ends: str) -> list[int]:
        for name, shape in self.shapes.items():
            if name.endswith(ends):
                return shape
        raise Error("corrupt", f"the state dict has no tensor {ends[0]}, so it is of no {self.family}")

    def layers(self, *words: str) -> int:
        """How many there are: 1 + the largest number that follows one of the words in a name."""
        pattern = re.compile(r"(?:^|\.)(?:" + "|".join(words) + r")\.(\d+)\.")
        return 1 + max((int(found[1]) for name in self.shapes if (found := pattern.search(name))), default=-1)


def gpt2_config(s: Shapes) -> dict[str, Any]:
    vocabulary, width = s.of("wte.weight", "word_embedding.weight")
    inner = s.of("h.0.mlp.c_fc.bias", "seq_layers.0.output.dense1.bias")[0]
    return {"model_type": "gpt2", "vocab_size": vocabulary, "n_embd": width, "n_inner": inner, "n_head": 1,
            "n_positions": s.of("wpe.weight", "position_embedding.weight")[0], "n_layer": s.layers("h", "seq_layers")}


def llama_config(model_type: str) -> Callable[[Shapes], dict[str, Any]]:
    def config(s: Shapes) -> dict[str, Any]:
        vocabulary, width = s.of("embed_tokens.weight", "word_embedding.weight")
        first = ("layers.0.self_attn.{}_proj", "seq_layers.0.attention.{}")
        # Heads of 2: which rows are whose head changes no name.
        rows = {ours: s.of(first[0].format(hf) + ".weight", first[1].format(ours) + ".weight")[0] // 2
                for hf, ours in (("q", "query"), ("k", "key"))}
        return {"model_type": model_type, "vocab_size": vocabulary, "hidden_size": width, "head_dim": 2,
                "num_attention_heads": rows["query"], "num_key_value_heads": rows["key"], "max_position_embeddings": 1,
                "intermediate_size": s.of("layers.0.mlp.up_proj.weight", "seq_layers.0.output.up.weight")[0],
                "num_hidden_layers": s.layers("layers", "seq_layers"), "tie_word_embeddings": not s.has("lm_head.weight"),
                "attention_bias": s.has("self_attn.q_proj.bias", "attention.query.bias"),
                "mlp_bias": s.has("mlp.up_proj.bias", "output.up.bias")}

    return config


def neox_config(s: Shapes) -> dict[str, Any]:
    raise Error("invalid_argument", "a GPT-NeoX state dict doesn't say its attention heads, by which query, key and value are "
                                    "mixed: translate after smp.DistributedModel has been given the model")


def bert_config(s: Shapes) -> dict[str, Any]:
    vocabulary, width = s.of("word_embeddings.weight", "word_embedding.weight")
    head = ("BertForMaskedLM" if s.has("cls.predictions.bias", "lm_head.bias")
            else "BertForSequenceClassification" if s.has("classifier.weight") else "BertModel")
    return {"model_type": "bert", "architectures": [head], "vocab_size": vocabulary, "hidden_size": width,
            "num_attention_heads": 1, "num_hidden_layers": s.layers("layer", "seq_layers"),
            "intermediate_size": s.of("layer.0.intermediate.dense.weight", "seq_layers.0.output.dense1.weight")[0],
            "max_position_embeddings": s.of("position_embeddings.weight", "position_embedding.weight")[0],
            "type_vocab_size": s.of("token_type_embeddings.weight", "token_type_embedding.weight")[0],
            **({"num_labels": s.of("classifier.weight")[0]} if head == "BertForSequenceClassification" else {})}


def _model(family: str, config: Callable[[Shapes], dict[str, Any]], values: StateDict) -> Any:
    from shardsmith import _core

    wrapped = state.model
    if wrapped is not None and not wrapped.is_plain and wrapped._whole.description["model_type"] == family:
        return wrapped._whole
    found = config(Shapes(family, values))
    tied = not any(without_wrappers(name) == "lm_head.weight" for name in values)
    if family == "gpt2" and not tied:
        words = next(v for n, v in values.items() if n.endswith(("wte.weight", "word_embedding.weight")))
        head = next(v for n, v in values.items() if without_wrappers(n) == "lm_head.weight")
        tied = words.data_ptr() == head.data_ptr() or torch.equal(words, head)
        found["tie_word_embeddings"] = tied
    return _core.Model(json.dumps(found))


def _is_same(parts: list[Piece]) -> bool:
    """Whether the logical tensor is the Hugging Face one."""
    only = parts[0]
    return len(parts) == 1 and only.permutation == sorted(only.permutation) and not only.run


def to_smdistributed(family: str, config: Callable[[Shapes], dict[str, Any]], values: StateDict) -> StateDict:
    """Throws Error("corrupt") for a tensor that is missing or of another shape."""
    model = _model(family, config, values)
    names = Names(model, [name for name in values if name != PARTIAL])
    if names.unexpected:
        raise Error("corrupt", f"the state dict's {names.unexpected[0]} is no tensor of a {family}")
    head = any(without_wrappers(name) in model.tied_names for name in values)
    result: StateDict = {}
    for hf_name, shape, *_ in model.tensors:
        if hf_name not in names.found:
            raise Error("corrupt", f"the state dict has no {hf_name}, which a {family} has")
        tensor = values.pop(names.found[hf_name])
        if list(tensor.shape) != shape:
            raise Error("corrupt", f"the state dict's {names.found[hf_name]} has shape {list(tensor.shape)}, the model's is {shape}")
        parts = pieces(model, hf_name)
        same = _is_same(parts)
        for piece in parts:
            result[piece.name] = tensor if same else piece.read(tensor).clone()
    if head and model.description["tied_head"]:
        result["lm_head.weight"] = result["word_embedding.weight"]
    values.clear()
    return result


def to_hf(family: str, config: Callable[[Shapes], dict[str, Any]], values: StateDict) -> StateDict:
    """Back. Tied tensors are there under all their names, as state_dict() of transformers has them."""
    model = _model(family, config, values)
    result: StateDict = {}
    known = {name for names in model.piece_names.values() for name in names}
    given = {without_wrappers(name): name for name in values if name != PARTIAL}
    unexpected = [given[name] for name in given if name not in known and not (name == "lm_head.weight" and model.tied_names)]
    if unexpected:
        raise Error("corrupt", f"the state dict's {unexpected[0]} is no tensor of a {family}")
    for hf_name, shape, _, also_last in model.tensors:
        parts = pieces(model, hf_name)
        for piece in parts:
            if piece.name not in given:
                raise Error("corrupt", f"the state dict has no {piece.name}, which a {family} has")
            found = values[given[piece.name]]
            if list(found.shape) != piece.shape:
                raise Error("corrupt", f"the state dict's {given[piece.name]} has shape {list(found.shape)}, the model's is "
                                       f"{piece.shape}")
        only = parts[0]
        if _is_same(parts):
            result[hf_name] = values.pop(given[only.name])
        else:
            whole = torch.empty(shape, dtype=values[given[only.name]].dtype)
            for piece in parts:
                view = piece.view(whole)
                view.copy_(values.pop(given[piece.name]).reshape(view.shape))
            result[hf_name] = whole
        if also_last:
            result |= {name: result[hf_name] for name in model.tied_names}
    for alias, hf_name in model.aliases.items():
        if not alias.endswith((".gamma", ".beta")):  # of before transformers 1.0
            result[alias] = result[hf_name]
    values.clear()
    return result


def later(family: str) -> NoReturn:
    raise Error("unsupported", f"smp.nn.huggingface: the family {family} is not there in this version; there are gpt2, gptneox, bert, "
                               "llama, mistral and qwen2")
