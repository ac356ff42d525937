"""The torch-free half: meshes, partitions, checkpoints. Imports in milliseconds. Errors are shardsmith.errors.Error."""
from collections.abc import Callable, Sequence
from typing import Any

class Mesh:
    def __init__(self, world_size: int, pp: int, tp: int = 1, placement: str = "cluster") -> None: ...
    world_size: int
    pp_size: int
    tp_size: int
    rdp_size: int
    dp_size: int
    mp_size: int
    placement: str
    def coordinates(self, rank: int) -> tuple[int, int, int]: ...  # (pp, tp, rdp)
    def rank(self, pp: int, tp: int, rdp: int) -> int: ...
    def pp_group(self, rank: int) -> list[int]: ...
    def tp_group(self, rank: int) -> list[int]: ...
    def rdp_group(self, rank: int) -> list[int]: ...
    def dp_group(self, rank: int) -> list[int]: ...
    def mp_group(self, rank: int) -> list[int]: ...
    def groups(self, kind: str) -> list[list[int]]: ...  # all of "pp", "tp", "rdp", "dp" or "mp"

class Model:
    """A family's view of one model, from the text of its Hugging Face config.json: what a tensor-parallel rank holds."""

    def __init__(self, config_json: str, tp_rank: int = 0, tp_size: int = 1) -> None: ...
    description: dict[str, Any]
    # (hf name, this rank's shape, place, also_last): place -1 embedding, 0..L-1 block, L final norm and head;
    # also_last: a tied embedding, of which the last stage holds a copy.
    tensors: list[tuple[str, list[int], int, bool]]
    architecture: str  # transformers' class for it
    aliases: dict[str, str]  # names that a module or a file may have instead -> hf name
    tied_names: list[str]
    ignored_suffixes: list[str]
    prefix: str  # "transformer.": files may lack it in names, or have it besides
    # Pieces of one hf tensor as this rank holds it: (logical name, logical shape, permutation, offset in the hf tensor,
    # rows that lie together or 0 for all, from the beginning of such a run to that of the next, shape of the whole logical tensor, where this rank's part begins in it, neighbouring ranks that hold the same part).
    def pieces(self, hf_name: str) -> list[tuple[str, list[int], list[int], list[int], int, int, list[int], list[int], int]]: ...
    piece_names: dict[str, list[str]]  # logical names by hf name; made anew each time
    in_runs: list[str]  # hf names of tensors of which a piece's rows don't lie together; made anew each time
    def partition(self, stages: int, memory_weight: float = 0.8, sequence: int = 1024) -> list[int]: ...  # `first`
    def balance(self, first: list[int], memory_weight: float = 0.8, sequence: int = 1024) -> float: ...
    def stage_tensors(self, first: list[int], stage: int) -> list[str]: ...  # hf names

# Bytes of one microbatch on a rank: hidden states between layers, what embedding, one layer and the head keep until their
# backward, and what the loss needs besides.
def activation_memory(model: Model, *, rows: int, sequence: int, tp: int = 1, split_sequence: bool = False,
                      precision: str = "fp32") -> dict[str, int]: ...
# Bytes that a rank of this stage needs at the fullest moment of a training step: weights, gradients, masters, moments,
# activations, working, and their total. rows: sequences of a microbatch; accumulates: several batches an update.
def training_memory(model: Model, first: list[int], stage: int, *, rows: int, sequence: int, tp: int = 1, rdp: int = 1,
                    microbatches: int = 1, pipeline: str = "interleaved", active_microbatches: int = 0,
                    accumulates: bool = False, split_sequence: bool = False, precision: str = "fp32",
                    shard_optimizer_state: bool = False, activation_checkpointing: str = "none") -> dict[str, int]: ...

# The partition that is wished for. names: (parameter, place); wishes: (module path, stage), innermost counts.
def manual_partition(names: list[tuple[str, int]], layers: int, stages: int, wishes: list[tuple[str, int]],
                     default_stage: int) -> list[int]: ...  # `first`
def partition_to_json(first: list[int]) -> str: ...
def partition_from_json(text: str, layers: int, stages: int, where: str) -> list[int]: ...
def supported_model_types() -> list[str]: ...

class Leaf:
    """A tensor inside a value tree that is to be saved, by the address of its storage (CPU memory, must stay alive)."""

    def __init__(
        self,
        dtype: str,  # torch's word: "float32"
        storage_ptr: int,
        storage_nbytes: int,
        offset: int,  # elements into the storage
        size: Sequence[int],
        strides: Sequence[int],
        requires_grad: bool = False,
        name: str = "",  # name in the slice list, "model/..." or "optimizer/state/..."; "": not in it
        global_shape: Sequence[int] = (),
        box_offset: Sequence[int] = (),
    ) -> None: ...

# A tensor on CPU: hf name, dtype, its storage's address and bytes, elements of it before the tensor, strides in elements.
ParameterMemory = tuple[str, str, int, int, int, Sequence[int]]

class Leaves:
    """By logical name what tensor-parallel rank `rank` stores of parameters that are not in the model's in_runs; in the slice
    list under `pattern`, {} being the logical name. Stands for a dict of Leafs in a value tree, once: it is empty then."""

    def __init__(self, model: Model, parameters: Sequence[ParameterMemory], rank: int, pattern: str) -> None: ...
    def add(self, name: str, leaf: Leaf) -> None: ...

class TensorName:
    """A tensor leaf in a value tree that was read: its name in the Index."""

    name: str

class Opaque:
    """Inert stand-in for an object of a class that is not rebuilt."""

    class_name: str
    state: list[Any]

class Index:
    format: str
    values: Any  # nested plain values; tensor leaves are TensorName; made anew each time
    def value(self, key: str) -> Any: ...  # of values, a dict; None where there is none
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> list[int]: ...
    def dtype(self, name: str) -> str: ...
    def alias_of(self, name: str) -> str: ...
    # Of a tensor that lies in one piece: number of its file, byte offset, strides in elements. Else None.
    def place(self, name: str) -> tuple[int, int, list[int]] | None: ...
    # Reading boxes into memory. A want: (name, dtype, global shape, box offset, box extent, address, nbytes, strides in
    # elements). Of parameters (model, those not in its in_runs, patterns, whether they may be missing) every piece is read
    # under the first of the patterns, {} being its logical name, that the index has. Missing tensors raise.
    def prepare(
        self,
        wants: Sequence[tuple[str, str, Sequence[int], Sequence[int], Sequence[int], int, int, Sequence[int]]],
        where: str = "",
        parameters: Sequence[tuple[Model, Sequence[ParameterMemory], Sequence[str], bool]] = (),
    ) -> Reading: ...

class Reading:
    """Reads that are planned. The memory that the wants name must be there until they are run."""

    def announcement(self) -> bytes: ...  # src/storage/shared_reads.h
    # `announcements`: of all ranks, who run theirs at the same time; none: nobody else reads.
    def run(self, announcements: Sequence[bytes] = (), rank: int = 0) -> None: ...

def read_hf(folder: str) -> Index: ...  # names as in the files
def read_hf_logical(folder: str, model: Model) -> Index: ...  # our names; report of unexpected ones in values["unexpected"]
def read_pt(path: str) -> Index: ...
# Anything readable under the names of a partial checkpoint (src/cli/resume.h). `parameters`: Hugging Face names of the
# optimizer's, for state by position. Told: "format", and lists "missing", "unexpected", "renamed", "left_out". Of a folder's,
# file's or checkpoint's values there are "optimizer", "content", "step".
def open_for_resume(path: str, model: Model, parameters: Sequence[str] = ()) -> tuple[Index, dict[str, Any]]: ...
def open_as_is(path: str) -> Index: ...  # anything readable, names as they stand
def write_values(path: str, tree: Any) -> None: ...  # one .pt, synced; tensors are Leafs
def read_partial(folder: str) -> Index: ...  # "model/...", "optimizer/state/..."; values {"model","optimizer","user_content","rng"}
def detect_format(path: str) -> str: ...
def scan(path: str) -> list[dict[str, Any]]: ...  # folder, name, complete, why_not, newest, bytes, manifest (dict or None)
def scan_full(path: str) -> list[dict[str, Any]]: ...  # full ones, newest first; "folder" is the weights' file
def find_checkpoint(path: str, tag: str = "", full: bool = False) -> tuple[dict[str, Any] | None, list[str]]: ...  # (found, passed over)
def verify_partial(folder: str) -> list[str]: ...
def check_same_model(path: str, config_json: str) -> None: ...

Exchange = Callable[[bytes, float], list[bytes]]  # message, seconds -> all messages in rank order

Move = Callable[[list[tuple[int, int, int]], list[tuple[int, int, int]], float], None]  # to send, to receive, seconds: (rank, address, bytes)

class PartialRequest:
    """What a rank gives to a partial save. It points at the Leafs' memory."""

    def __init__(
        self,
        path: str,
        tag: str,
        manifest: dict[str, Any],  # step, world_size, pp, tp, rdp, placement, first (list[int]), model_config (json text or ""), hf
        files: Sequence[tuple[str, Any]],  # (file name, value tree with Leafs)
        num_kept: int | None = None,
        deadline: float = 300.0,
        shared: set[str] = ...,  # names of those that other ranks give alike: each writes a share of it
    ) -> None: ...
    @property
    def snapshot_bytes(self) -> int: ...  # that a save in the background takes of memory

class FullRequest:
    """What a rank gives to a full save (src/checkpoint/save_full.h): trees of values with Leafs."""

    def __init__(
        self,
        path: str,
        tag: str,
        manifest: dict[str, Any],
        weights: Any = None,
        optimizer: Any = None,
        user_content: Any = None,
        translate: bool = True,
        num_kept: int | None = None,
        deadline: float = 300.0,
    ) -> None: ...
    @property
    def snapshot_bytes(self) -> int: ...

# Both: {folder, bytes, pruned, warnings}. exchange None: alone. move None: no rank needs another's bytes.
def save_partial(request: PartialRequest, rank: int = 0, size: int = 1, exchange: Exchange | None = None) -> dict[str, Any]: ...
def save_full(request: FullRequest, rank: int = 0, size: int = 1, exchange: Exchange | None = None,
              move: Move | None = None) -> dict[str, Any]: ...

class BackgroundSave:
    """src/checkpoint/background_save.h. `background` and `move` are called by its thread."""

    def __init__(self, rank: int = 0, size: int = 1, foreground: Exchange | None = None, background: Exchange | None = None,
                 move: Move | None = None) -> None: ...
    # False: skipped, on all ranks. `check` is called when all is copied; a text that it returns is everybody's error.
    def begin(self, request: PartialRequest | FullRequest, skip_if_busy: bool = False,
              check: Callable[[], str] | None = None) -> bool: ...
    def wait(self) -> dict[str, Any] | None: ...  # as save_partial; raises the failure of the last save, once
    def close(self) -> dict[str, Any] | None: ...
    def is_idle_within(self, seconds: float) -> bool: ...
    @property
    def memory(self) -> int: ...  # bytes held

# The learning rate's factor at `step` (0-based, of the update about to be made): warm-up, then cosine or linear to 0.
def schedule_factor(kind: str, step: int, warmup_steps: int, total_steps: int) -> float: ...

class LossScaler:
    """The factor on the loss under fp16: dynamic, by DeepSpeed's and Megatron's rule (src/optim/loss_scale.h), or fixed."""

    def __init__(self, *, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000,
                 min_scale: float = 1.0, delayed_shift: int = 1, consecutive_hysteresis: bool = False) -> None: ...
    @staticmethod
    def fixed(scale: float) -> "LossScaler": ...
    @property
    def loss_scale(self) -> float: ...
    @property
    def dynamic(self) -> bool: ...
    def update(self, overflow: bool) -> None: ...  # after every step, skipped or not
    def state(self) -> tuple[float, int, int]: ...  # scale, good steps since the last overflow, overflows until it falls
    def restore(self, scale: float, good_steps: int, hysteresis: int) -> None: ...
