"""The half that stands on libtorch: pipeline stages, reduction, clipping, and the store as peers."""
from typing import Any

import torch
import torch.distributed as dist

class StorePeers:
    """base/peers.h over c10d's store. `name` separates independent users of one store."""

    def __init__(self, store: dist.Store, rank: int, size: int, name: str) -> None: ...
    # Raises Error("timeout") naming absent ranks, Error("peer") with the text of a rank that has called fail().
    def exchange(self, message: bytes, seconds: float) -> list[bytes]: ...
    # Says that this rank has failed and why; others' exchange() and explain() then name it. Never raises.
    def fail(self, text: str) -> None: ...
    # After a communication error or time-out: waits up to `seconds` for the others to say what happened to them and
    # returns one line that names the rank at fault (the first that failed by itself, else the ones that say nothing).
    def explain(self, text: str, seconds: float) -> str: ...

class GroupTransport:
    """base/transport.h over a process group of its own, of the CPU's tensors."""

    def __init__(self, group: dist.ProcessGroup, name: str, seconds: float) -> None: ...
    # (rank, address, bytes), at most one of each for a pair of ranks.
    def move(self, out: list[tuple[int, int, int]], received: list[tuple[int, int, int]], seconds: float) -> None: ...

class ThreadState:
    """The caller's grad mode, autocast, default dtype and the like; `with state:` makes them another thread's."""

    def __init__(self) -> None: ...
    def __enter__(self) -> "ThreadState": ...
    def __exit__(self, *exc: Any) -> None: ...

class Stage:
    """One pipeline stage of one transformer, computing with the given parameters (which stay the caller's objects;
    gradients arrive in their `.grad`)."""

    def __init__(
        self,
        config_json: str,
        first: list[int],  # the partition
        stage: int,
        parameters: dict[str, torch.Tensor],  # hf name -> this tensor-parallel rank's tensor
        pp_group: dist.ProcessGroup | None,  # None: one stage
        rdp_group: dist.ProcessGroup | None,  # None: one replica
        tp_group: dist.ProcessGroup | None = None,  # None: one tensor-parallel rank
        split_sequence: bool = False,  # each tensor-parallel rank keeps its own positions between layers
        prescaled_batch: bool = True,  # tensor-parallel ranks bring the same batch, not one each
        peer_timeout: float = 300.0,
        seed: int = 0,
        bucket_cap_mb: float = 25.0,
        pipeline: str = "interleaved",  # or "simple"
        active_microbatches: int = 0,  # that may hold activations at once; 0: stages + 2
        shard_optimizer_state: bool = False,
        switches: dict[str, float] = {},  # src/nn/switches.h, by name
    ) -> None: ...

    def set_seed(self, seed: int) -> None: ...  # of dropout masks, between steps
    # Main thread, before the microbatches' threads. `first_sample` is the global number of the first sample of this
    # replica's batch (for dropout masks), `rank_samples` how many each tensor-parallel rank brings where they bring their
    # own. training: order 1F1B; otherwise all forwards.
    def begin_step(self, step: int, microbatches: int, training: bool, dropout: bool, first_sample: int = 0,
                   rank_samples: int = 0, reduce: bool = True, loss_scale: float = 1.0) -> None: ...
    # One thread a microbatch (any thread when there is one stage). Waits for its turn in the schedule with the GIL
    # released. inputs: input_ids [B, S] int64, optional attention_mask [B, S], position_ids [B, S], token_type_ids [B, S], labels [B, S] ([B] of a classification);
    # the same on every stage. Returns {"loss": scalar} where labels are given (on stages before the last without a
    # graph), else {}; on the last stage output(mb) is then available.
    def forward(self, microbatch: int, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...
    # Last stage only: [B, S, V], [B, num_labels] of a classification, or [B, S, H] where there is no head.
    def output(self, microbatch: int) -> torch.Tensor: ...
    def pooled(self, microbatch: int) -> torch.Tensor: ...  # [B, H], last stage of a model with a pooler
    # Last stage: backpropagates loss * scale; others: what arrives from the next stage; `loss` is ignored there.
    def backward(self, microbatch: int, loss: torch.Tensor | None, scale: float) -> None: ...
    def finish_microbatch(self, microbatch: int) -> None: ...  # the user's function returned
    # Some thread failed: wakes all others at their waiting points; their calls raise.
    def abort(self, text: str) -> None: ...
    # Main thread, after all microbatches: waits for sends; with reduce, sums tied gradients of first and last stage and
    # averages over the rdp group in buckets.
    def finish_step(self, reduce: bool) -> None: ...
    # Sends tensors (any dtype, CPU or the stage's device) from stage `root` to all stages; returns them everywhere.
    # On other stages than root `tensors` is ignored.
    def broadcast(self, tensors: list[torch.Tensor], root: int) -> list[torch.Tensor]: ...
    # (segment, attention, output) by layer of the whole model: layers of the same segment (-1: of none) are computed again
    # together when their backward is due, the branches of others as said. Empty: nothing is.
    def set_activation_checkpointing(self, layers: list[tuple[int, bool, bool]]) -> None: ...
    # Parameters of rdp rank 0 to the others, tied ones from the first stage to the last.
    def sync_parameters(self) -> None: ...
    # Where the optimizer's state is sharded, what this rank is to update: (name, first row, row after the last, bucket) of
    # its parameters. After finish_step those rows of the gradients are averages, others are undefined.
    def shards(self) -> list[tuple[str, int, int, int]]: ...
    @property
    def buckets(self) -> int: ...
    # The shards of a bucket have been updated: sends them to the other replicas. All replicas in the same order.
    def start_gather(self, bucket: int) -> None: ...
    def finish_gather(self) -> None: ...
    def gather_shards(self) -> None: ...  # of all buckets
    # Norm (any type above 0, or infinity) over all stages and tensor-parallel ranks, each parameter once; not finite if a
    # gradient isn't.
    def grad_norm(self, norm_type: float = 2.0) -> float: ...
    # Scales by max_norm / (norm + 1e-6) if that is below 1; returns the norm.
    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float: ...

# One AdamW update in one pass over memory (src/optim/adamw_update.h), of float32 CPU tensors: `masters` and moments are
# written, and where there is one, `rounded` becomes the rounded master. Gradients count times gradient_scale.
def adamw_update(
    gradients: list[torch.Tensor],
    masters: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    rounded: list[torch.Tensor | None],
    steps: list[float],  # of this update, from 1
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    gradient_scale: float = 1.0,
) -> None: ...

class ModuleStage:
    """A torch module of any kind, between ranks (src/pipeline/module_stage.h); calls as Stage's."""

    def __init__(
        self,
        config_json: str,  # the module's description: src/family/torch_module.cc
        parameters: dict[str, torch.Tensor],  # this rank's
        buffers: list[torch.Tensor],
        rdp_group: dist.ProcessGroup | None = None,
        tp_group: dist.ProcessGroup | None = None,
        prescaled_batch: bool = True,
        peer_timeout: float = 300.0,
        bucket_cap_mb: float = 25.0,
        shard_optimizer_state: bool = False,
    ) -> None: ...
    def begin_step(self, loss_scale: float = 1.0) -> None: ...
    def backward(self, losses: list[torch.Tensor], gradients: list[torch.Tensor | None], scale: float) -> None: ...
    def finish_step(self, reduce: bool) -> None: ...
    def sync_parameters(self) -> None: ...
    def sync_buffers(self) -> None: ...
    def shards(self) -> list[tuple[str, int, int, int]]: ...
    @property
    def buckets(self) -> int: ...
    def start_gather(self, bucket: int) -> None: ...
    def finish_gather(self) -> None: ...
    def gather_shards(self) -> None: ...
    def grad_norm(self, norm_type: float = 2.0) -> float: ...
    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float: ...

# What smp.nn's layers are made of. All are differentiable.
class TensorParallel:
    """src/nn/tensor_parallel.h, with whole sequences. Graphs hold on to it: it must outlive them."""

    def __init__(self, group: dist.ProcessGroup | None = None, peer_timeout: float = 300.0) -> None: ...
    rank: int
    size: int
    def enter(self, x: torch.Tensor) -> torch.Tensor: ...  # [B, S, H]: as it is; its gradient is summed
    def leave(self, x: torch.Tensor) -> torch.Tensor: ...  # [B, S, H]: the ranks' sum
    def gather_columns(self, x: torch.Tensor, total: int) -> torch.Tensor: ...  # [..., own] -> [..., total]
    def gather_rows(self, x: torch.Tensor) -> torch.Tensor: ...  # [n, ...] of own samples -> [size * n, ...]
    def own_rows(self, x: torch.Tensor) -> torch.Tensor: ...  # back

_Place = tuple[bool, int, int, int]  # of dropout masks: active, seed, step, number of the first sample

def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor: ...
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor: ...
def linear_activation(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str,
                      fused: bool) -> torch.Tensor: ...
def dropout(x: torch.Tensor, p: float, site: int, place: _Place) -> torch.Tensor: ...
def dropout_add(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, p: float, site: int,
                place: _Place) -> torch.Tensor: ...  # residual + dropout(x + bias)
# src/nn/attention.h: q [B, n, S, d], k and v [B, kv, T, d], mask broadcasting to [B, n, S, T], bool or added.
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    slopes: torch.Tensor | None = None,
    dropout: float = 0.0,
    site: int = 0,
    first_head: int = 0,
    place: _Place = ...,
    flash: bool = True,
    fused_softmax: bool = True,
    in_fp32: bool = False,
    query_key_layer: int = 0,
) -> torch.Tensor: ...
def alibi_slopes(heads: int, bias_max: float, first: int, count: int) -> torch.Tensor: ...  # [count]
# Mean cross-entropy of hidden [B, S, H] over weight [V, H]; shifted: position t predicts label t + 1.
def lm_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None, *,
            shifted: bool, ranks: TensorParallel | None = None, first_row: int = 0, vocab_size: int = 0,
            parts: int = 1) -> torch.Tensor: ...
