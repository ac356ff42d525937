"""The configuration: fields, where values come from (YAML, key=value, flags), and what is wrong with them.

Imports no torch: parsing and --dry-run answer in well under a second.
"""
from __future__ import annotations

import os
import re
from typing import Any, Literal

import pydantic
from pydantic import Field

from shardsmith.errors import Error
from shardsmith.words import did_you_mean


class FinetuneConfig(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", protected_namespaces=())

    model: str = Field(description="Hugging Face folder: config.json, safetensors or .bin, tokenizer.json")
    data: list[str] = Field(description="text files (.txt, ...) and .jsonl files with a text field")
    text_field: str = Field("text", description="the field of a .jsonl line that holds the text")
    output_dir: str = Field(description="folder of the checkpoints")

    nproc_per_node: int = Field(1, ge=1, description="processes to start")
    pipeline_parallel_degree: int = Field(1, ge=1, description="stages that the layers are split over")
    tensor_parallel_degree: int = Field(1, ge=1, description="ranks that each layer is split over, by heads")
    microbatches: int | None = Field(None, ge=1, description="per batch; default: up to 8 where there are several stages")
    pipeline: Literal["interleaved", "simple"] = Field(
        "interleaved", description="interleaved: a backward as soon as it can be; simple: all forwards first")
    active_microbatches: int | None = Field(
        None, ge=1, description="at most so many hold activations at once; default: stages + 2")
    activation_checkpointing: str = Field(
        "none", description="none, each (layer), contiguous or group_N: layers that are computed again for their backward")
    shard_optimizer_state: bool = Field(False, description="each replica's AdamW keeps and updates its share of the state")
    threads: int | None = Field(None, ge=1, description="CPU threads of a process; default: cores / processes")

    per_device_train_batch_size: int = Field(8, ge=1, description="sequences of a replica in one forward and backward")
    per_device_eval_batch_size: int | None = Field(None, ge=1, description="default: as for training")
    gradient_accumulation_steps: int = Field(1, ge=1, description="batches per update")
    max_seq_length: int | None = Field(None, ge=2, description="tokens of a sequence; default: the model's, at most 1024")
    max_steps: int | None = Field(None, description="updates; overrides num_train_epochs")
    num_train_epochs: float = Field(1.0, gt=0, description="passes over the training part")

    learning_rate: float = Field(5e-5, ge=0, description="of AdamW, after warm-up")
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = Field("cosine", description="after warm-up")
    warmup_steps: int = Field(0, ge=0, description="updates with a rising learning rate")
    warmup_ratio: float = Field(0.0, ge=0, le=1, description="the same as a share of all updates")
    weight_decay: float = Field(0.0, ge=0, description="not applied to norms and biases")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="of AdamW")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="of AdamW")
    adam_epsilon: float = Field(1e-8, gt=0, description="of AdamW")
    max_grad_norm: float = Field(1.0, ge=0, description="clips gradients by their norm over all stages; 0: does not")
    seed: int = Field(42, ge=0, lt=2**31, description="of data order and random numbers")
    bf16: bool = Field(False, description="parameters in bfloat16, with float32 masters that AdamW updates")
    fp16: bool = Field(False, description="the same in float16, with a loss scale")
    loss_scale: float = Field(0.0, ge=0, description="of fp16; 0: adapts itself, beginning at 65536")
    nan_loss: Literal["stop", "skip"] = Field("stop", description="a loss or norm that is no number: stop, or skip the update")

    save_steps: int = Field(500, ge=0, description="updates between checkpoints; 0: only at the end")
    save_total_limit: int | None = Field(None, description="newest checkpoints to keep; default: all")
    eval_steps: int | None = Field(None, ge=1, description="updates between evaluations; always before and after")
    eval_fraction: float = Field(0.05, ge=0, lt=1, description="last part of the sequences, for evaluation")
    eval_max_sequences: int | None = Field(None, ge=1, description="at most so many sequences for evaluation")
    logging_steps: int = Field(1, ge=1, description="updates between lines")
    resume_from_checkpoint: str = Field("false", description="false, true (must exist), auto, a folder or a tag")
    report_to: list[Literal["none"]] = Field(["none"], description="only none in this version")
    peer_timeout: float = Field(300.0, gt=0, description="seconds that a rank waits for another before all end")
    stop_grace: float = Field(600.0, gt=0, description="seconds after SIGTERM until ranks are killed")

    dry_run: bool = Field(False, description="only says how the model would be split and how large it is")
    json_output: bool = Field(False, alias="json", description="JSON lines on stdout")
    quiet: bool = Field(False, description="says nothing but errors")

    @pydantic.field_validator("data", "report_to", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @pydantic.field_validator("data")
    @classmethod
    def _some_data(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("no file given")
        return value

    @pydantic.field_validator("resume_from_checkpoint", mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return "false" if value is None else str(value).lower() if isinstance(value, bool) else value

    @pydantic.field_validator("activation_checkpointing")
    @classmethod
    def _strategy(cls, value: str) -> str:
        if not re.fullmatch(r"none|each|contiguous|group_[1-9]\d*", value):
            raise ValueError("should be none, each, contiguous or group_N with a number N")
        return value

    @pydantic.field_validator("max_steps", mode="after")
    @classmethod
    def _positive(cls, value: int | None) -> int | None:
        if value is not None and value != -1 and value < 1:
            raise ValueError("must be at least 1")
        return None if value == -1 else value

    @pydantic.field_validator("save_total_limit", mode="after")
    @classmethod
    def _limit(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be at least 1 (or negative: keep all)")
        return None if value is not None and value < 0 else value


def _names() -> dict[str, str]:
    """The name that is written -> the field."""
    return {(field.alias or name): name for name, field in FinetuneConfig.model_fields.items()}


NAMES = _names()
# Other names that people know.
SYNONYMS = {"model_name_or_path": "model", "train_file": "data", "partitions": "pipeline_parallel_degree",
            "warmup_proportion": "warmup_ratio", "batch_size": "per_device_train_batch_size"}
BOOLEANS = {written for written, name in NAMES.items() if FinetuneConfig.model_fields[name].annotation is bool}
# What a run may change when it goes on from a checkpoint belongs to the run, not to the model.
NOT_WRITTEN = {"dry_run", "json", "quiet", "resume_from_checkpoint"}


def known_name(word: str, where: str) -> str:
    """`word` as written, with - or _ -> the written name. Unknown: an error with the nearest."""
    name = word.replace("-", "_")
    name = SYNONYMS.get(name, name)
    if name not in NAMES:
        raise Error("invalid_argument", f"{where}unknown option '{word}'{did_you_mean(name, [*NAMES, *SYNONYMS])}")
    return name


class Values:
    """Values as they come in, each with the place that it came from."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}

    def put(self, name: str, value: Any, place: str) -> None:
        self.values[name] = value
        self.places[name] = place

    def resolve(self) -> FinetuneConfig:
        try:
            return FinetuneConfig.model_validate(self.values)
        except pydantic.ValidationError as error:
            raise self._explain(error) from None

    def _explain(self, error: pydantic.ValidationError) -> Error:
        mistake = error.errors(include_url=False)[0]
        name = str(mistake["loc"][0])
        if mistake["type"] == "missing":
            missing = [f"--{str(m['loc'][0]).replace('_', '-')}" for m in error.errors() if m["type"] == "missing"]
            return Error("invalid_argument", f"{' and '.join(missing)} must be given")
        what = mistake["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if what != mistake["msg"] and not mistake["msg"].startswith("Value error"):
            what = f"should be {what}"
        what = what.replace(", unable to parse string as an integer", "").replace(
            ", unable to parse string as a number", "")
        place = self.places.get(name, "")
        return Error("invalid_argument", f"{place}{name}: {what}, not {mistake['input']!r}")


def read_yaml(path: str, values: Values) -> None:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            node = yaml.compose(file, Loader=yaml.SafeLoader)
    except OSError as error:
        raise Error("not_found" if isinstance(error, FileNotFoundError) else "io", f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Error("invalid_argument", f"{path}: not UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise Error("invalid_argument", f"{path}{place}: {getattr(error, 'problem', None) or error}") from None
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise Error("invalid_argument", f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}: a mapping of "
                                        "options to values is expected")
    seen: set[str] = set()
    loader = yaml.SafeLoader("")
    for key, value in node.value:
        place = f"{path}:{key.start_mark.line + 1}:{key.start_mark.column + 1}: "
        name = known_name(str(key.value), place)
        if name in seen:
            raise Error("invalid_argument", f"{place}'{key.value}' is given twice")
        seen.add(name)
        place = f"{path}:{value.start_mark.line + 1}:{value.start_mark.column + 1}: "
        values.put(name, loader.construct_object(value, deep=True), place)


def _from_text(name: str, text: str) -> Any:
    optional = FinetuneConfig.model_fields[NAMES[name]].default is None
    if text.lower() in ("none", "null") and optional:
        return None
    if name == "data" and "," in text and not os.path.exists(text):
        return [part for part in text.split(",") if part]
    return text


def parse(arguments: list[str]) -> FinetuneConfig:
    """YAML files first, then key=value, then flags, whatever their order on the line."""
    files: list[str] = []
    pairs: list[tuple[str, Any, str]] = []
    flags: list[tuple[str, Any, str]] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "-q":
            flags.append(("quiet", True, "-q: "))
        elif word.startswith("--"):
            flags.append(_flag(word, rest))
        elif "=" in word:
            key, _, text = word.partition("=")
            name = known_name(key, f"{word}: ")
            pairs.append((name, _from_text(name, text), f"{word}: "))
        elif word.startswith("-"):
            raise Error("invalid_argument", f"unknown option '{word}'; `shardsmith finetune --help` lists them")
        elif word.endswith((".yaml", ".yml")) or os.path.isfile(word):
            files.append(word)
        else:
            raise Error("invalid_argument", f"'{word}' is neither a YAML file nor key=value nor an option")
    values = Values()
    for path in files:
        read_yaml(path, values)
    for name, value, place in pairs + flags:
        values.put(name, value, place)
    return values.resolve()


def _flag(word: str, rest: list[str]) -> tuple[str, Any, str]:
    key, equals, text = word[2:].partition("=")
    if key.startswith("no-") and key[3:].replace("-", "_") in BOOLEANS:
        return key[3:].replace("-", "_"), False, f"{word}: "
    name = known_name(key, "")
    if name in BOOLEANS and not equals:
        follows = rest and rest[0].lower() in ("true", "false")
        return name, rest.pop(0) if follows else True, f"--{key}: "
    if equals:
        return name, _from_text(name, text), f"--{key}: "
    if not rest or rest[0].startswith("--"):
        raise Error("invalid_argument", f"--{key} needs a value")
    value: Any = _from_text(name, rest.pop(0))
    if name == "data":  # several files after one --data
        value = value if isinstance(value, list) else [value]
        while rest and not rest[0].startswith("-") and ("=" not in rest[0] or os.path.exists(rest[0])) and (
                not rest[0].endswith((".yaml", ".yml"))):
            value.append(rest.pop(0))
    return name, value, f"--{key}: "


def help_text() -> str:
    lines = [
        "usage: shardsmith finetune [RUN.yaml] [key=value ...] [--option value ...]",
        "",
        "Fine-tunes a Hugging Face folder (GPT-2, Llama and its like) on text. Options, also as YAML keys:",
        "",
    ]
    for written, name in NAMES.items():
        field = FinetuneConfig.model_fields[name]
        default = "" if field.is_required() or field.default in (None, False) else f" [{_word(field.default)}]"
        lines.append(f"  --{written.replace('_', '-'):<30} {field.description}{default}")
    return "\n".join(lines)


def _word(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)


def resolved_yaml(config: FinetuneConfig) -> str:
    import yaml

    values = {name: value for name, value in config.model_dump(by_alias=True).items() if name not in NOT_WRITTEN}
    return yaml.safe_dump(values, sort_keys=False)
